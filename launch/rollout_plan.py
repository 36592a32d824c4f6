"""Prediction of rollouts and of whole steps, from the configuration alone."""

from dataclasses import dataclass

from launch.plan import MEASURED_GPU, predict_update
from launch.rollout_time import (
    PROMPT_TOKENS,
    WORKER_SECONDS,
    EpisodeLengths,
    ServerModel,
    simulate_rollout,
)
from megatron_gptoss.planning.memory_advice import Hardware
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from rl_loop.config.rollout import RolloutConfig
from rl_loop.config.rollout_advice import fitting_requests
from rl_loop.engines.sglang.config import SglangConfig

H200_GPU = Hardware(150.1, MEASURED_GPU)
"""GPU whose rates were measured."""
MEAN_LENGTH = 0.5
"""Mean of an episode's sampled tokens, as a fraction of its limit. An assumption."""
REQUESTS_PER_PREFILL = 2
"""Tool outputs that servers prefill together. Logs of runs with the 20B have 1.4 to 2.5."""
SEEDS = 5
"""Random rollouts whose mean is predicted. Their longest episodes differ."""
STALENESS = (0, 1, 2, 3, 4, 8)
"""Values of ``algorithm.max_staleness`` to compare."""


@dataclass(frozen=True)
class AsyncPrediction:
    """Bounds of the loop's speed, in seconds per step."""

    training: float
    """Time of the trainer if it never waits."""
    engines: float
    """Time of the engines for a step's episodes if their batches are always full."""
    rollout: float
    """Time of a step's episodes, from their common begin to the end of the longest one."""
    tokens_per_gpu: float
    """Trained tokens per step and GPU, over the GPUs of trainer and engines."""

    def step_seconds(self, staleness: int) -> float:
        """Return the predicted wall-clock time of a step.

        With staleness 0, a step takes the rollout and then the update. With staleness k,
        the same work has k + 1 steps of time, because an episode begins k steps before its own. A
        step is never faster than trainer or engines.
        """
        # The engines finish a step only with its longest episode.
        sequential = max(self.rollout, self.engines) + self.training
        return max(self.training, self.engines, sequential / (staleness + 1))

    def bound(self, staleness: int) -> str:
        """Return the name of the bound that limits a step at a staleness."""
        seconds = self.step_seconds(staleness)
        # step_seconds returns one of these numbers unchanged, so they compare exactly.
        if seconds == self.training:
            return "trainer"
        return "engines" if seconds == self.engines else "rollout"

    def trainer_idle(self, staleness: int) -> float:
        """Return the predicted fraction of a step in which the trainer waits for episodes."""
        return 1 - self.training / self.step_seconds(staleness)

    def engines_idle(self, staleness: int) -> float:
        """Return the fraction of a step that engines with always full batches would not need.

        The real idle time is shorter, because the last episodes of a step run in small batches.
        """
        return 1 - self.engines / self.step_seconds(staleness)

    def tokens_per_second(self, staleness: int) -> float:
        """Return the predicted number of trained tokens per second and GPU of the whole loop."""
        return self.tokens_per_gpu / self.step_seconds(staleness)

    @property
    def fastest_staleness(self) -> int:
        """Smallest staleness at which steps are as fast as possible."""
        # The loop ends, because sequential / (staleness + 1) falls below any bound.
        fastest = max(self.training, self.engines)
        staleness = 0
        while self.step_seconds(staleness) > fastest:
            staleness += 1
        return staleness


def predict_async_rollouts(
    rollout: RolloutConfig,
    trainer: MemoryInputs,
    tool_seconds: float = 0.0,
    turn_tokens: float | None = None,
    hardware: Hardware = H200_GPU,
    worker_seconds: float = WORKER_SECONDS,
) -> AsyncPrediction:
    """Predict the bounds of a loop with SGLang servers.

    On the trainer's GPUs, servers and trainer alternate. Weight syncs and sleeping and waking of
    servers are not included.

    Args:
        rollout: rollout settings with an SGLang engine.
        trainer: model, layout and batch.
        tool_seconds: duration of each tool call.
        turn_tokens: mean sampled tokens of a turn; None for that of ``MEAN_LENGTH``.
        hardware: GPU of the servers. The update is predicted for an H200.
        worker_seconds: time of a rollout worker per turn.
    """
    engine = rollout.engine
    assert isinstance(engine, SglangConfig)
    model = trainer.model
    server = ServerModel(
        model,
        packed=engine.packs_experts,
        tensor_parallel=engine.tensor_parallel,
        gpu=hardware.gpu,
        # Servers on separate GPUs use SGLang's own graphs.
        prefill_graphs=engine.prefill_graph_tokens > 0 or not engine.colocated,
    )
    if turn_tokens is None:
        turn_tokens = MEAN_LENGTH * rollout.max_response_tokens / rollout.max_turns
    lengths = EpisodeLengths(
        turn_tokens, rollout.max_turns, rollout.max_sampled_tokens_per_turn, rollout.max_tokens
    )
    episodes = rollout.tasks_per_step * rollout.samples_per_task
    # The fullest server decides.
    of_server = -(-episodes // engine.servers)
    results = []
    engines = []
    for seed in range(SEEDS):
        turns = lengths.sample(of_server, seed)
        tokens = sum(map(sum, turns))
        fitting = fitting_requests(
            engine, model, hardware.gigabytes, tokens / of_server + PROMPT_TOKENS
        )
        slots = max(1, min(engine.max_running_requests, fitting))
        workers = rollout.worker_count / engine.servers
        results.append(
            simulate_rollout(server, turns, slots, workers, tool_seconds, worker_seconds)
        )
        running = min(slots, of_server)
        decoding = tokens / running * server.step_seconds(running, tokens / of_server / 2)
        prefills = sum(map(len, turns)) / REQUESTS_PER_PREFILL
        engines.append(decoding + prefills * server.prefill_seconds(REQUESTS_PER_PREFILL))

    update = predict_update(trainer)
    step_tokens = sum(result.tokens for result in results) / SEEDS * episodes / of_server
    gpus = trainer.parallel.world_size
    # Separate engines have their own GPUs, which the speed per GPU must count.
    if not engine.shares_trainer_gpus:
        gpus += engine.servers * engine.tensor_parallel
    seconds = sum(result.seconds for result in results) / SEEDS
    return AsyncPrediction(
        training=update.step.total * step_tokens / update.tokens,
        engines=min(seconds, sum(engines) / SEEDS),
        rollout=seconds,
        tokens_per_gpu=step_tokens / gpus,
    )


def async_rollout_plan(
    rollout: RolloutConfig,
    trainer: MemoryInputs,
    configured: int,
    tool_seconds: float = 0.0,
    turn_tokens: float | None = None,
    hardware: Hardware = H200_GPU,
) -> str:
    """Describe the effect of ``algorithm.max_staleness``.

    Args:
        rollout: rollout settings.
        trainer: model, layout and batch.
        configured: configured value of ``algorithm.max_staleness``.
        tool_seconds: duration of each tool call.
        turn_tokens: mean sampled tokens of a turn; None for that of ``MEAN_LENGTH``.
        hardware: GPU of the servers.
    """
    # Only SGLang's decoding speed was measured.
    engine = rollout.engine
    if not isinstance(engine, SglangConfig):
        return f"rollouts: no prediction for engines of type {engine.type}"

    prediction = predict_async_rollouts(rollout, trainer, tool_seconds, turn_tokens, hardware)
    episodes = rollout.tasks_per_step * rollout.samples_per_task
    longest = rollout.max_response_tokens
    if turn_tokens is None:
        lengths = (
            f"{episodes} episodes of {MEAN_LENGTH * longest:.0f} sampled tokens on average "
            f"(assumption: {MEAN_LENGTH:g} of the maximum, {longest})"
        )
    else:
        lengths = f"{episodes} episodes of {rollout.max_turns} turns of {turn_tokens:g} tokens"

    # Sharing GPUs excludes overlap, so only staleness 0 exists.
    if engine.shares_trainer_gpus:
        seconds = prediction.step_seconds(0)
        return (
            f"a step with {lengths}: {seconds:.1f} s, of which the rollout takes "
            f"{prediction.rollout:.1f} s and the update {prediction.training:.1f} s, "
            f"{prediction.tokens_per_second(0):.0f} tokens/s/GPU; engines and trainer share GPUs "
            "and alternate (algorithm.max_staleness 0)"
        )

    least = prediction.fastest_staleness
    lines = [
        f"a step at {MEASURED_GPU} rates with {lengths} and {tool_seconds:g} s per tool call: "
        f"engines {prediction.engines:.1f} s, rollout {prediction.rollout:.1f} s, "
        f"update {prediction.training:.1f} s",
        f"  {'max_staleness':>13}{'s/step':>10}{'speedup':>8}{'tokens/s/GPU':>14}"
        f"{'trainer idle':>14}{'engines idle':>14}  bound by",
    ]

    # Speedups are relative to a loop without overlap.
    sequential = prediction.step_seconds(0)
    for staleness in STALENESS:
        seconds = prediction.step_seconds(staleness)
        line = (
            "  "
            f"{staleness:13}{seconds:10.1f}{sequential / seconds:8.2f}"
            f"{prediction.tokens_per_second(staleness):14.0f}"
            f"{prediction.trainer_idle(staleness):14.0%}"
            f"{prediction.engines_idle(staleness):14.0%} "
            f" {prediction.bound(staleness)}"
        )
        if staleness == configured:
            line += "  <- configured"
        lines.append(line)
    lines.append(f"  max_staleness above {least} does not make steps faster")
    return "\n".join(lines)
