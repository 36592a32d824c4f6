"""Prediction of rollouts and of whole steps, from the configuration alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from launch.gpus import configured_hardware
from launch.plan import MEASURED_GPU, predict_update, scoring_seconds
from launch.rollout_time import PROMPT_TOKENS, EpisodeLengths, ServerModel, simulate_rollout
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.planning.memory_advice import Hardware
from rl_loop.config.rollout_advice import MEAN_LENGTH_FRACTION, batch_size, mean_sampled_tokens
from rl_loop.config.run import RlConfig
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.engines.sglang.prefills import GATHERED_SHARE

UNGATHERED_REQUESTS_PER_PREFILL = 2
"""Tool outputs per prefill on a server that does not gather requests.

They are 1.4 to 2.5 in logs of runs with the 20B.
"""
SIMULATED_ROLLOUTS = 5
"""Number of simulated rollouts.

Their mean is the prediction, because the time of a rollout depends on its longest episode.
"""
STALENESS = (0, 1, 2, 3, 4, 8)
"""Values of ``algorithm.max_staleness`` to compare."""


@dataclass(frozen=True)
class LoopPrediction:
    """Bounds of the loop's speed, in seconds per step."""

    update_seconds: float
    """Time of the trainer's update and of teachers' scoring, without waiting for episodes."""
    engine_seconds: float
    """Time of the engines for a step's episodes if their batches are always full.

    Never more than ``rollout_seconds``.
    """
    rollout_seconds: float
    """Time of a step's episodes, from their common start to the end of the longest episode."""
    tokens_per_gpu: float
    """Tokens of a step's episodes per GPU of trainer and engines.

    Prompts, tool outputs and sampled tokens count, as in the metric ``tokens_per_second``.
    """
    scoring_seconds: float = 0.0
    """Time of teachers' scoring, which ``update_seconds`` contains."""

    def step_seconds(self, staleness: int) -> float:
        """Return the predicted wall-clock time of a step."""
        # With staleness 0, a step takes the rollout and then the update. With staleness k, up to
        # k + 1 steps overlap, because episodes of a step may start k steps earlier. A step
        # therefore takes at least 1 / (k + 1) of the sequential time. It is never faster than
        # trainer or engines.
        sequential = self.rollout_seconds + self.update_seconds
        return max(self.update_seconds, self.engine_seconds, sequential / (staleness + 1))

    def bound(self, staleness: int) -> str:
        """Return the name of the bound that limits a step at a staleness."""
        seconds = self.step_seconds(staleness)
        # step_seconds returns one of these numbers unchanged, so they compare exactly.
        if seconds == self.update_seconds:
            return "trainer"
        return "engines" if seconds == self.engine_seconds else "rollout"

    def trainer_idle_fraction(self, staleness: int) -> float:
        """Return the predicted fraction of a step in which the trainer waits for episodes."""
        return 1 - self.update_seconds / self.step_seconds(staleness)

    def engines_idle(self, staleness: int) -> float:
        """Return the fraction of a step that engines with always full batches would not need.

        The real idle time is shorter, because the last episodes of a step run in small batches.
        """
        return 1 - self.engine_seconds / self.step_seconds(staleness)

    def tokens_per_second(self, staleness: int) -> float:
        """Return the predicted tokens per second and GPU of the whole loop (``tokens_per_gpu``)."""
        return self.tokens_per_gpu / self.step_seconds(staleness)

    @property
    def fastest_staleness(self) -> int:
        """Smallest staleness at which steps are as fast as possible."""
        # The loop ends, because sequential / (staleness + 1) falls below any bound.
        fastest = max(self.update_seconds, self.engine_seconds)
        staleness = 0
        while self.step_seconds(staleness) > fastest:
            staleness += 1
        return staleness


def predict_loop(
    config: RlConfig,
    hardware: Hardware | None = None,
    tool_seconds: float = 0.0,
    turn_tokens: float | None = None,
) -> LoopPrediction:
    """Predict the bounds of a loop with SGLang servers.

    On the trainer's GPUs, servers and trainer alternate. The time to sync, pause and resume
    servers is not included.

    Args:
        config: configuration with an SGLang engine.
        hardware: GPU of the servers. None: the GPU of the configuration. The update is predicted
            for an H200.
        tool_seconds: duration of each tool call, in seconds.
        turn_tokens: mean sampled tokens of a turn. None: ``MEAN_LENGTH_FRACTION`` of an episode's
            maximum, divided evenly among its turns.
    """
    rollout = config.rollout
    trainer = config.memory_inputs
    engine = rollout.engine
    assert isinstance(engine, SglangConfig)
    hardware = hardware or configured_hardware(config.gpu_gb)
    server = server_model(engine, config.model, hardware)
    mean = mean_sampled_tokens(rollout, turn_tokens)
    slots = batch_size(
        engine,
        config.model,
        config.dtype,
        hardware.gigabytes,
        mean + PROMPT_TOKENS,
        config.unmerged_adapter,
    )
    lengths = EpisodeLengths(
        turn_tokens or mean / rollout.max_turns,
        rollout.max_turns,
        rollout.max_sampled_tokens_per_turn,
        rollout.max_episode_tokens,
    )
    episodes = rollout.tasks_per_step * rollout.samples_per_task
    # The server with the most episodes takes the longest.
    episodes_per_server = -(-episodes // engine.servers)
    workers = rollout.worker_count / engine.servers
    # Fixed seeds, so that a plan of one configuration always prints the same numbers.
    samples = [lengths.sample(episodes_per_server, seed) for seed in range(SIMULATED_ROLLOUTS)]
    results = [simulate_rollout(server, turns, slots, workers, tool_seconds) for turns in samples]
    full_batches = [_seconds_of_full_batches(server, turns, slots) for turns in samples]

    update = predict_update(trainer)
    step_tokens = fmean(result.tokens for result in results) * episodes / episodes_per_server
    gpus = trainer.parallel.world_size
    # Separate engines have their own GPUs, which the speed per GPU must count.
    if not engine.shares_trainer_gpus:
        gpus += engine.servers * engine.tensor_parallel
    seconds = fmean(result.seconds for result in results)
    # The update was predicted with sequences of maximum length. Episodes have fewer tokens.
    share = step_tokens / update.tokens
    scoring = scoring_seconds(trainer) * share
    return LoopPrediction(
        update_seconds=update.step.total * share + scoring,
        scoring_seconds=scoring,
        # A rollout cannot be faster than full batches. If the estimate for full batches is longer,
        # its averages are too pessimistic, so use the time of the simulation.
        engine_seconds=min(seconds, fmean(full_batches)),
        rollout_seconds=seconds,
        tokens_per_gpu=step_tokens / gpus,
    )


def server_model(engine: SglangConfig, model: ModelConfig, hardware: Hardware) -> ServerModel:
    """Return the model of a server for the simulation."""
    return ServerModel(
        model,
        mxfp4_experts=engine.has_mxfp4_experts,
        tensor_parallel=engine.tensor_parallel,
        gpu=hardware.gpu,
        # Servers on separate GPUs use SGLang's own graphs.
        prefill_graphs=engine.prefill_graph_tokens > 0 or not engine.colocated,
        gather_passes=engine.gather_passes,
    )


def _seconds_of_full_batches(
    server: ServerModel, episodes: Sequence[Sequence[int]], slots: int
) -> float:
    """Return the seconds of a server for some episodes if its batch is always full.

    Args:
        server: server that samples.
        episodes: sampled tokens of every turn of every episode.
        slots: requests that the server runs at a time.
    """
    tokens = sum(map(sum, episodes))
    running = min(slots, len(episodes))
    # On average, a running episode has half of its tokens.
    step_seconds = server.step_seconds(running, tokens / len(episodes) / 2)
    turns = sum(map(len, episodes))
    # Expected number of turns that end while a request waits for its prefill. Gathering stops
    # earlier if the waiting requests are GATHERED_SHARE of the running requests.
    ended_turns = running * turns / tokens * (server.gather_passes - 1)
    turns_per_prefill = max(
        UNGATHERED_REQUESTS_PER_PREFILL, min(ended_turns, GATHERED_SHARE * running)
    )
    prefill_seconds = server.prefill_seconds(round(turns_per_prefill))
    return tokens / running * step_seconds + turns / turns_per_prefill * prefill_seconds


def loop_plan(
    config: RlConfig,
    hardware: Hardware | None = None,
    tool_seconds: float = 0.0,
    turn_tokens: float | None = None,
) -> str:
    """Describe a step, and the effect of ``algorithm.max_staleness`` if engines have own GPUs.

    Args:
        config: configuration of the run.
        hardware: GPU of the servers. None: the GPU of the configuration.
        tool_seconds: duration of each tool call, in seconds.
        turn_tokens: mean sampled tokens of a turn. None: ``MEAN_LENGTH_FRACTION`` of an episode's
            maximum, divided evenly among its turns.
    """
    # Only SGLang's decoding speed was measured.
    rollout = config.rollout
    engine = rollout.engine
    if not isinstance(engine, SglangConfig):
        return f"rollouts: no prediction for engines of type {engine.type}"

    hardware = hardware or configured_hardware(config.gpu_gb)
    prediction = predict_loop(config, hardware, tool_seconds, turn_tokens)
    episodes = rollout.tasks_per_step * rollout.samples_per_task
    if turn_tokens is None:
        lengths = (
            f"{episodes} episodes of {mean_sampled_tokens(rollout):.0f} sampled tokens on average "
            f"(assumption: {MEAN_LENGTH_FRACTION:g} of the maximum, {rollout.max_response_tokens})"
        )
    else:
        lengths = f"{episodes} episodes of {rollout.max_turns} turns of {turn_tokens:g} tokens"
    rates = f"{MEASURED_GPU} rates"
    decoding_gpu = server_model(engine, config.model, hardware).measured_gpu
    if decoding_gpu != MEASURED_GPU:
        rates = f"{decoding_gpu} rates (rollout) and {MEASURED_GPU} rates (update)"
    step = f"a step at {rates} with {lengths} and {tool_seconds:g} s per tool call: "

    scoring = ""
    if prediction.scoring_seconds:
        scoring = f" (teacher's scoring {prediction.scoring_seconds:.1f} s of it)"
    # Engines and trainer alternate on shared GPUs. Their work cannot overlap, so staleness is 0.
    if engine.shares_trainer_gpus:
        seconds = prediction.step_seconds(0)
        return (
            f"{step}{seconds:.1f} s, of which the rollout takes {prediction.rollout_seconds:.1f} s and "
            f"the update {prediction.update_seconds:.1f} s{scoring}, "
            f"{prediction.tokens_per_second(0):.0f} tokens/s/GPU; engines and trainer share GPUs "
            "and alternate (algorithm.max_staleness 0)"
        )

    fastest_staleness = prediction.fastest_staleness
    lines = [
        f"{step}engines {prediction.engine_seconds:.1f} s, rollout {prediction.rollout_seconds:.1f} s, update "
        f"{prediction.update_seconds:.1f} s{scoring}",
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
            f"{prediction.trainer_idle_fraction(staleness):14.0%}"
            f"{prediction.engines_idle(staleness):14.0%} "
            f" {prediction.bound(staleness)}"
        )
        if staleness == config.algorithm.max_staleness:
            line += "  <- configured"
        lines.append(line)
    lines.append(f"  max_staleness above {fastest_staleness} does not make steps faster")
    return "\n".join(lines)
