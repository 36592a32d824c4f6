"""Prediction of asynchronous rollouts' speed, from the configuration alone."""

from dataclasses import dataclass

from launch.plan import MEASURED_GPU, predict_update
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from rl_loop.config.rollout import RolloutConfig
from rl_loop.engines.sglang.config import SglangConfig

MEAN_LENGTH = 0.5
"""Mean of an episode's sampled tokens, as a fraction of its limit. An assumption."""
BANDWIDTH = 4.32e12
"""Memory bandwidth of an H200 in bytes/s, measured (docs/performance.md, decoding)."""
DECODING_OVERHEAD = 1.4
"""Time of SGLang's decoding step over the time to read its data.

Measured as 1.28 to 1.84 for 8 to 256 sequences of the 20B (docs/performance.md, decoding).
"""
BYTES = 2
"""Bytes per weight and per number in the key/value cache."""
STALENESS = (0, 1, 2, 3, 4, 8)
"""Values of ``algorithm.max_staleness`` to compare."""


@dataclass(frozen=True)
class AsyncPrediction:
    """Bounds of the loop's speed, in seconds per step."""

    training: float
    """Time of the trainer if it never waits."""
    engines: float
    """Time of the engines for a step's episodes if they never wait."""
    longest_episode: float
    """Time of the longest episode from its first token to its last."""
    tokens_per_gpu: float
    """Trained tokens per step and GPU, over the GPUs of trainer and engines."""

    def step_seconds(self, staleness: int) -> float:
        """Return the predicted wall-clock time of a step.

        With staleness 0, a step takes the longest episode and then the update. With staleness k,
        the same work has k + 1 steps of time, because an episode begins k steps before its own. A
        step is never faster than trainer or engines.
        """
        # The engines finish a step only with its longest episode.
        sequential = max(self.longest_episode, self.engines) + self.training
        return max(self.training, self.engines, sequential / (staleness + 1))

    def bound(self, staleness: int) -> str:
        """Return the name of the bound that limits a step at a staleness."""
        seconds = self.step_seconds(staleness)
        # step_seconds returns one of these numbers unchanged, so they compare exactly.
        if seconds == self.training:
            return "trainer"
        return "engines" if seconds == self.engines else "longest episode"

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


def decoding_step_seconds(
    model: ModelConfig, sequences: float, context: float, gpus: int = 1
) -> float:
    """Predict the time of SGLang's decoding step on H200 GPUs.

    The step is bound by memory reads: attention and output layer, the experts to which any sequence
    is routed, and the keys and values of each sequence, or of its window.

    Args:
        model: model configuration.
        sequences: number of sequences in the batch.
        context: tokens per sequence.
        gpus: tensor-parallel size.

    Returns:
        Seconds.
    """
    # Q and output projection of every query head, key and value of every key/value head.
    heads = 2 * model.num_attention_heads + 2 * model.num_key_value_heads
    attention = heads * model.head_size * model.hidden_size
    experts = 1.0  # a dense model's MLP
    if model.num_experts > 0:
        # Probability that no sequence is routed to an expert, for uniform routing.
        untouched = (1 - model.experts_per_token / model.num_experts) ** sequences
        experts = model.num_experts * (1 - untouched)

    # Three matrices: gate, up and down.
    expert = 3 * model.hidden_size * model.intermediate_size
    weights = model.num_layers * (attention + experts * expert)
    # The output layer. A step reads only one row of the embedding per sequence.
    weights += model.vocab_size * model.hidden_size

    full = model.layer_types.count("full_attention")
    # A layer with a window reads at most its window from the cache.
    window = min(context, model.sliding_window or context)
    seen = full * context + (model.num_layers - full) * window
    # Factor 2: a key and a value.
    keys_and_values = sequences * seen * 2 * model.num_key_value_heads * model.head_size
    return DECODING_OVERHEAD * BYTES * (weights + keys_and_values) / (BANDWIDTH * gpus)


def predict_async_rollouts(
    rollout: RolloutConfig, trainer: MemoryInputs, tool_seconds: float
) -> AsyncPrediction:
    """Predict the bounds of a loop with SGLang servers.

    On the trainer's GPUs, servers and trainer alternate. Weight syncs and sleeping and waking of
    servers are not included.

    Args:
        rollout: rollout settings with an SGLang engine.
        trainer: model, layout and batch.
        tool_seconds: duration of each tool call in the longest episode.
    """
    engine = rollout.engine
    assert isinstance(engine, SglangConfig)
    episodes = rollout.tasks_per_step * rollout.samples_per_task
    # A server cannot run more than its limit, nor more episodes than a step has.
    running = min(engine.max_running_requests, episodes / engine.servers)

    longest = rollout.max_response_tokens
    context = MEAN_LENGTH * rollout.max_tokens
    step = decoding_step_seconds(trainer.model, running, context, engine.tensor_parallel)
    tokens_per_server = episodes * MEAN_LENGTH * longest / engine.servers
    update = predict_update(trainer)
    gpus = trainer.parallel.world_size
    # Separate engines have their own GPUs, which the speed per GPU must count.
    if not engine.shares_trainer_gpus:
        gpus += engine.servers * engine.tensor_parallel
    return AsyncPrediction(
        training=MEAN_LENGTH * update.step.total,
        engines=tokens_per_server / running * step,
        longest_episode=longest * step + (rollout.max_turns - 1) * tool_seconds,
        tokens_per_gpu=MEAN_LENGTH * update.tokens / gpus,
    )


def async_rollout_plan(
    rollout: RolloutConfig,
    trainer: MemoryInputs,
    configured: int,
    tool_seconds: float = 0.0,
) -> str:
    """Describe the effect of ``algorithm.max_staleness``.

    Args:
        rollout: rollout settings.
        trainer: model, layout and batch.
        configured: configured value of ``algorithm.max_staleness``.
        tool_seconds: duration of each tool call in the longest episode.
    """
    # Only SGLang's decoding speed was measured.
    engine = rollout.engine
    if not isinstance(engine, SglangConfig):
        return f"rollouts: no prediction for engines of type {engine.type}"

    prediction = predict_async_rollouts(rollout, trainer, tool_seconds)
    episodes = rollout.tasks_per_step * rollout.samples_per_task
    longest = rollout.max_response_tokens
    lengths = (
        f"{episodes} episodes of {MEAN_LENGTH * longest:.0f} sampled tokens on average "
        f"(assumption: {MEAN_LENGTH:g} of the maximum, {longest})"
    )

    # Sharing GPUs excludes overlap, so only staleness 0 exists.
    if engine.shares_trainer_gpus:
        seconds = prediction.step_seconds(0)
        return (
            f"a step at {MEASURED_GPU} rates with {lengths}: {seconds:.1f} s, of which the update "
            f"takes {prediction.training:.1f} s, {prediction.tokens_per_second(0):.0f} "
            "tokens/s/GPU; engines and trainer share GPUs and alternate (algorithm.max_staleness 0)"
        )

    least = prediction.fastest_staleness
    lines = [
        f"a step at {MEASURED_GPU} rates with {lengths} and {tool_seconds:g} s per tool call: "
        f"engines {prediction.engines:.1f} s, longest episode {prediction.longest_episode:.1f} s, "
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
