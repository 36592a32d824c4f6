"""Lines of episodes.jsonl: whole episodes for people to read."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rl_loop.data.trajectory import Trajectory

FIGURES = ("task_id", "reward", "reward_parts", "finish_reason", "tool_calls", "tool_errors")
"""Fields of a Trajectory that are recorded as they are."""


def episode_record(
    trajectory: Trajectory, decode_token: Callable[[int], str], *, step: int, split: str = "train"
) -> dict[str, Any]:
    """Make the record of one episode.

    step, split ("train" or "held_out"), FIGURES
    turns   [{role: "prompt" | "assistant" | "tool", start, end, text}], token ranges [start, end)
    tokens  [{text, mask, logprob?}]; the log-prob (nats) only where mask is 1"""
    # Lists of Python's own numbers, which JSON knows.
    columns = zip(
        trajectory.token_ids.tolist(),
        trajectory.loss_mask.tolist(),
        trajectory.rollout_log_probs.tolist(),
        strict=True,
    )
    tokens = []
    for token_id, is_sampled, log_prob in columns:
        token: dict[str, Any] = {"text": decode_token(token_id), "mask": int(is_sampled)}
        if is_sampled:
            token["logprob"] = round(log_prob, 6)
        tokens.append(token)

    figures = {name: getattr(trajectory, name) for name in FIGURES}
    turns = [asdict(turn) for turn in trajectory.turns]
    return {"step": step, "split": split, **figures, "turns": turns, "tokens": tokens}
