"""Adds the score of a judge to the reward parts of an episode."""

from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.messages import FormatError
from rl_loop.data.trajectory import FinishReason, Trajectory
from rl_loop.environments import Task
from rl_loop.infrastructure import InfrastructureError
from rl_loop.rewards.checker_pool import CheckerError
from rl_loop.rewards.judge import Judge, JudgedAnswer
from rl_loop.rewards.judge_config import SCORE_PART, UNSCORED_PART
from rl_loop.rollout.episode import invalidated
from rl_loop.tasks.source import prompt_text
from rl_loop.threads import run_in_thread


async def judge_episode(
    judge: Judge, task: Task, episode: Trajectory, codec: ChatCodec
) -> Trajectory:
    """Return a valid episode with the reward parts of a judge, or invalid if the judge fails.

    An episode without a final answer gets score 0, and the judge is not asked.

    Args:
        judge: judge of the task's source.
        task: task of the episode, with its rubric.
        episode: the episode. It is changed in place.
        codec: chat format of the policy.
    """
    answer = await run_in_thread(final_text, episode, codec)
    score: float | None = 0.0
    if answer is not None:
        question = JudgedAnswer(task.rubric or "", prompt_text(task), answer)
        try:
            score = await judge.score(question)
        except CheckerError as error:
            return invalidated(episode, InfrastructureError("checker", str(error), "judge"))

    parts = {SCORE_PART: score or 0.0, UNSCORED_PART: float(score is None)}
    episode.reward_parts = episode.reward_parts | parts
    return episode


def final_text(episode: Trajectory, codec: ChatCodec) -> str | None:
    """Return the last message of a completed episode. None if a limit or a mistake ended it."""
    if episode.finish_reason is not FinishReason.STOP or not episode.turns:
        return None
    last = episode.turns[-1]
    messages = codec.parse(episode.token_ids[last.start : last.end].tolist())
    if isinstance(messages, FormatError) or messages[-1].channel != "final":
        return None
    return messages[-1].text
