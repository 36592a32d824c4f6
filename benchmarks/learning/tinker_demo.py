r"""RL on the demo's task through the Tinker SDK: each step is four calls of the official client.

The episodes run in this process. A server of `gptoss tinker` samples their tokens and trains:

    gptoss sft tiny_retool
    gptoss tinker tiny initial_weights=runs/tiny_retool_sft adapter='{rank: 8, alpha: 16}' \
        training.max_tokens_per_micro_batch=4096
    export TINKER_BASE_URL=... TINKER_API_KEY=...
    python -m benchmarks.learning tinker --steps 60
"""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tinker

from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.data.trajectory import FinishReason, Trajectory, TrajectoryGroup
from rl_loop.engines.protocol import GenerateRequest, GenerateResult
from rl_loop.rollout.worker import RolloutWorker
from rl_loop.run_parts import build_tasks
from rl_loop.tasks.source import TaskMixture


class SdkEngine:
    """A rollout engine that samples through the SDK."""

    sampler: Any
    """Sampling client of the newest weights."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one continuation."""
        if request.on_begin is not None:
            request.on_begin()
        wanted = request.sampling
        parameters = tinker.SamplingParams(
            max_tokens=wanted.max_new_tokens,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            stop=list(wanted.stop_token_ids),
            seed=wanted.seed,
        )
        prompt = tinker.ModelInput.from_ints(request.input_ids)
        answer = await self.sampler.sample(prompt, 1, parameters)
        sequence = answer.sequences[0]
        stopped = sequence.stop_reason == "stop"
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        return GenerateResult(list(sequence.tokens), list(sequence.logprobs), reason)

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Return the log-probs of tokens after the first."""
        scores = await self.sampler.compute_logprobs(tinker.ModelInput.from_ints(input_ids))
        return list(scores[1:])

    async def abort(self, request_id: str | None = None) -> None:
        """Do nothing, because no episode of this program is aborted."""

    async def close(self) -> None:
        """Release nothing."""


def advantages(group: TrajectoryGroup) -> np.ndarray:
    """Return GRPO's advantages of a group's episodes, float [episodes]."""
    rewards = np.array([episode.reward for episode in group.trajectories])
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def datum(episode: Trajectory, advantage: float, tokens: int) -> Any:
    """Return an episode with the advantage of its sampled tokens, as a mean over a step's tokens."""
    sampled = episode.loss_mask[1:]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(episode.token_ids[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": episode.token_ids[1:].astype(np.int64),
            "logprobs": np.where(sampled, episode.rollout_log_probs[1:], 0).astype(np.float32),
            "advantages": (sampled * advantage / tokens).astype(np.float32),
        },
    )


def datums(groups: Sequence[TrajectoryGroup]) -> list[Any]:
    """Return all episodes of a step whose groups have different rewards."""
    chosen = [
        (episode, advantage)
        for group in groups
        for episode, advantage in zip(group.trajectories, advantages(group), strict=True)
        if advantage
    ]
    tokens = sum(int(episode.loss_mask.sum()) for episode, _ in chosen)
    return [datum(episode, advantage, tokens) for episode, advantage in chosen]


async def held_out_accuracy(worker: RolloutWorker, tasks: TaskMixture) -> float:
    """Return the share of held-out tasks with a correct answer."""
    episodes = [
        worker.run_group(task, (number,), worker.config.rollout.evaluation_temperature)
        for number, task in enumerate(tasks.held_out())
    ]
    groups = await asyncio.gather(*episodes)
    return float(np.mean([group.trajectories[0].reward_parts["correct"] for group in groups]))


async def train(steps: int, evaluate_every: int) -> None:
    """Train, and print one line per step."""
    config = load_config(Path("tiny_retool_adapter"), RlConfig, [f"training.steps={steps}"])
    engine = SdkEngine()
    worker = RolloutWorker(config, lambda: engine, threads=1)
    await worker.start()
    tasks = build_tasks(config)
    rollout, optimizer = config.rollout, config.optimizer

    service = tinker.ServiceClient()
    client = await service.create_lora_training_client(
        base_model="openai/gpt-oss-20b", rank=8, seed=config.seed
    )
    for step in range(steps + 1):
        engine.sampler = await client.save_weights_and_get_sampling_client()
        if step % evaluate_every == 0 or step == steps:
            print(f"step {step}: held out {await held_out_accuracy(worker, tasks):.3f}", flush=True)
        if step == steps:
            break
        first = step * rollout.tasks_per_step
        groups = await asyncio.gather(
            *(
                worker.run_group(task, seeds(first + number, rollout.samples_per_task), 1.0)
                for number, task in enumerate(tasks.train(first, rollout.tasks_per_step))
            )
        )
        batch = datums(groups)
        passed = client.forward_backward(
            batch, "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
        )
        settings = tinker.AdamParams(
            learning_rate=optimizer.learning_rate_at(step, steps),
            beta2=optimizer.beta2,
            eps=optimizer.eps,
            grad_clip_norm=optimizer.clip_grad,
        )
        update = await client.optim_step(settings)
        await passed
        reward = np.mean([one.reward for group in groups for one in group.trajectories])
        norm = update.metrics["grad_norm"]
        print(f"step {step + 1}: reward {reward:.3f}  grad norm {norm:.3f}", flush=True)
    await worker.close()
    service.close("success").result()


def seeds(number: int, count: int) -> tuple[int, ...]:
    """Return the seeds of a group's episodes."""
    return tuple(range(10_000 + number * count, 10_000 + (number + 1) * count))


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--evaluate-every", type=int, default=20)
    arguments = parser.parse_args()
    asyncio.run(train(arguments.steps, arguments.evaluate_every))


if __name__ == "__main__":
    main()
