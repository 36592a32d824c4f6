"""The effect of each configuration key on a resumed run.

The other inputs of a run's computation are in ``lifecycle.inputs`` (files), in ``RunState``
(positions in the data) and in ``rollout.group_store`` (episodes of later steps, which are dropped if
a key with ``affects_sampling`` changes).

A test walks all keys of ``gptoss rl`` and ``gptoss sft``. A REJECTED rule also covers the keys
below it. Any other key needs a rule, so the effect of a new key must be declared.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ResumeEffect(StrEnum):
    """Effect of a changed key on a resumed run."""

    REJECTED = "rejected"
    """The run cannot continue with a different value."""
    MAY_CHANGE = "may change"
    """The results of later steps change. The sequence of data does not."""
    NO_EFFECT = "does not matter"
    """The results are equal, up to the order of sums."""


@dataclass(frozen=True)
class ResumeRule:
    """The effect of one key."""

    effect: ResumeEffect
    reason: str
    affects_sampling: bool = False
    """True if episodes depend on the key. Groups that were sampled with a different value are then
    sampled again."""


def _rejected(reason: str) -> ResumeRule:
    return ResumeRule(ResumeEffect.REJECTED, reason)


SHAPE = "the weights of the checkpoint have different shapes"
DATA = "data is addressed by position, so some tasks would be trained on twice and others never"
STATE = "the checkpoint's optimizer state does not fit"
ADAPTER = "the checkpoint has the weights and the optimizer state of the earlier adapters"
TOKEN_IDS = "the policy was trained with different token ids"
SYSTEM_MESSAGE = (
    "the policy was trained with a different system message, so curves would not be comparable"
)
TOOLS = "episodes would use different tools, so curves would not be comparable"

LEARNING = ResumeRule(ResumeEffect.MAY_CHANGE, "training from the next step on")
SAMPLING = ResumeRule(
    ResumeEffect.MAY_CHANGE, "sampling from the next step on", affects_sampling=True
)
REWARD = ResumeRule(ResumeEffect.MAY_CHANGE, "rewards of later episodes", affects_sampling=True)
ENDING = ResumeRule(ResumeEffect.MAY_CHANGE, "the end of the run")
FILES = ResumeRule(ResumeEffect.MAY_CHANGE, "compared by content, see lifecycle.inputs")
MEASUREMENT = ResumeRule(ResumeEffect.MAY_CHANGE, "measurements, not training")
LAYOUT = ResumeRule(ResumeEffect.NO_EFFECT, "the same computation in another place")
RECORDING = ResumeRule(ResumeEffect.NO_EFFECT, "recorded files")
ELSEWHERE = ResumeRule(ResumeEffect.NO_EFFECT, "used by another command")

RULES: dict[str, ResumeRule] = {
    "name": ResumeRule(ResumeEffect.NO_EFFECT, "the location of the run"),
    "output_dir": ResumeRule(ResumeEffect.NO_EFFECT, "the location of the run"),
    "seed": _rejected(DATA),
    "model": _rejected(SHAPE),
    "adapter": _rejected(ADAPTER),
    # Without adapters, experts are trained in this format, and a change is rejected elsewhere.
    "quantization": LAYOUT,
    "dtype": _rejected(STATE),
    "gpu_gb": ELSEWHERE,
    "vocabulary": _rejected(TOKEN_IDS),
    "vocabulary_data": _rejected(TOKEN_IDS),
    "prompt": _rejected(SYSTEM_MESSAGE),
    "chatml": _rejected(SYSTEM_MESSAGE),
    "tasks": _rejected(DATA),
    # "*" stands for the name of any source.
    "tasks.sources.*.judge": REWARD,
    "demonstrations": _rejected(DATA),
    "sequences_per_step": _rejected(DATA),
    "load_balancing_loss": LEARNING,
    "loss.all_tokens": LEARNING,
    "loss.top_k": LEARNING,
    "loss.type": LEARNING,
    "loss.teacher": FILES,
    # Compared by content, not by path.
    "initial_weights": FILES,
    "initial_adapter": FILES,
    "tokenizer": FILES,
    # -- data -------------------------------------------------------------------------------------
    "data": _rejected(DATA),
    "data.max_rejected_fraction": ENDING,
    "data.sampled_conversations": MEASUREMENT,
    "data.validate_every": MEASUREMENT,
    "data.workers": LAYOUT,
    # -- parallel ---------------------------------------------------------------------------------
    # Loading a checkpoint divides its tensors for the layout of the run.
    "parallel.context": LAYOUT,
    "parallel.context_scheme_full": LAYOUT,
    "parallel.context_scheme_window": LAYOUT,
    # A resume from or to ``expert: 1`` is rejected elsewhere, because the optimizers differ.
    "parallel.expert": LAYOUT,
    "parallel.expert_dispatcher": LAYOUT,
    "parallel.last_stage_layers": LAYOUT,
    "parallel.pipeline": LAYOUT,
    "parallel.recompute": LAYOUT,
    "parallel.recompute_layers": LAYOUT,
    "parallel.tensor": LAYOUT,
    "parallel.virtual_pipeline": LAYOUT,
    "parallel.world_size": LAYOUT,
    # -- optimizer, training, tracking, evaluation ------------------------------------------------
    # Adam's moments continue, and the values apply from the next step on.
    "optimizer.beta1": LEARNING,
    "optimizer.beta2": LEARNING,
    "optimizer.clip_grad": LEARNING,
    "optimizer.eps": LEARNING,
    "optimizer.gradient_dtype": LEARNING,
    "optimizer.lr": LEARNING,
    "optimizer.moment_dtype": _rejected(STATE),
    # Offloading moves the state between GPU and host. The arithmetic is the same.
    "optimizer.offload_fraction": LAYOUT,
    "optimizer.on_non_finite": LEARNING,
    "optimizer.schedule": LEARNING,
    "optimizer.warmup_steps": LEARNING,
    "optimizer.weight_decay": LEARNING,
    "training.checkpoint_every": RECORDING,
    "training.deterministic": LAYOUT,
    "training.keep_adapters": RECORDING,
    "training.keep_checkpoints": RECORDING,
    "training.max_tokens_per_micro_batch": ResumeRule(
        ResumeEffect.MAY_CHANGE, "packing of sequences, and which samples of `data` are too long"
    ),
    "training.min_shared": ResumeRule(ResumeEffect.NO_EFFECT, "packing of sequences"),
    "training.share_prefixes": ResumeRule(
        ResumeEffect.MAY_CHANGE, "packing of sequences, and which samples are in a mini-batch"
    ),
    "training.steps": ResumeRule(
        ResumeEffect.MAY_CHANGE, "the length of the run and its schedules"
    ),
    "tracking.episodes": RECORDING,
    "tracking.tags": RECORDING,
    "evaluation.max_concurrent_episodes": ELSEWHERE,
    "evaluation.endpoint": ELSEWHERE,
    "evaluation.endpoint_model": ELSEWHERE,
    "evaluation.samples_per_task": ELSEWHERE,
    "evaluate_every": MEASUREMENT,
    "canary_tolerance": ENDING,
    # -- rollout ----------------------------------------------------------------------------------
    # Seeds follow from the run's seed and the number of a group, not from the worker or the order.
    "rollout.max_concurrent_tasks": LAYOUT,
    "rollout.evaluation_temperature": MEASUREMENT,
    "rollout.max_episode_seconds": SAMPLING,
    "rollout.max_invalid_fraction": ENDING,
    "rollout.max_observation_bytes": SAMPLING,
    "rollout.max_sampled_tokens": SAMPLING,
    "rollout.max_sampled_tokens_per_turn": SAMPLING,
    "rollout.max_episode_tokens": SAMPLING,
    "rollout.max_tool_calls": SAMPLING,
    "rollout.max_turns": SAMPLING,
    "rollout.purification": SAMPLING,
    "rollout.purification.probability": SAMPLING,
    "rollout.purification.retries": SAMPLING,
    "rollout.routed_experts": SAMPLING,
    "rollout.samples_per_task": SAMPLING,
    # The positions of all later tasks follow from it.
    "rollout.tasks_per_step": _rejected(DATA),
    "rollout.temperature": SAMPLING,
    "rollout.top_p": SAMPLING,
    "rollout.truncated_episodes": SAMPLING,
    "rollout.workers": LAYOUT,
    # Settings of the engine that choose other kernels or precisions change the sampled tokens.
    "rollout.engine.arguments": SAMPLING,
    "rollout.engine.attention_backend": SAMPLING,
    "rollout.engine.bucket_bytes": LAYOUT,
    "rollout.engine.colocated": LAYOUT,
    "rollout.engine.deterministic": SAMPLING,
    "rollout.engine.env": SAMPLING,
    "rollout.engine.fp32_logits": SAMPLING,
    "rollout.engine.keep_weights": LAYOUT,
    "rollout.engine.max_batch_size": LAYOUT,
    "rollout.engine.max_running_requests": LAYOUT,
    "rollout.engine.memory_fraction": LAYOUT,
    "rollout.engine.options": SAMPLING,
    "rollout.engine.prefill_graph_tokens": LAYOUT,
    "rollout.engine.python": SAMPLING,
    "rollout.engine.quantization": SAMPLING,
    "rollout.engine.servers": LAYOUT,
    "rollout.engine.start_seconds": LAYOUT,
    "rollout.engine.sync_seconds": LAYOUT,
    "rollout.engine.tensor_parallel": SAMPLING,
    "rollout.engine.type": SAMPLING,
    "rollout.engine.weight_sync": LAYOUT,
    # -- sandbox and reward -----------------------------------------------------------------------
    "sandbox.address_space_gb": SAMPLING,
    "sandbox.interpreter": SAMPLING,
    "sandbox.preload_modules": SAMPLING,
    "sandbox.servers": LAYOUT,
    "sandbox.timeout_seconds": SAMPLING,
    "sandbox.total_memory_gb": LAYOUT,
    # An episode keeps the reward that it got at its end.
    "reward.correct": REWARD,
    "reward.format_error": REWARD,
    "reward.tool_use_bonus": REWARD,
    "reward.wrong": REWARD,
    # -- algorithm --------------------------------------------------------------------------------
    "algorithm.advantage.gae_lambda": LEARNING,
    "algorithm.advantage.gamma": LEARNING,
    "algorithm.advantage.options": LEARNING,
    "algorithm.advantage.reward_weights": LEARNING,
    "algorithm.advantage.type": LEARNING,
    "algorithm.aggregation": LEARNING,
    "algorithm.correction.bounds": LEARNING,
    "algorithm.correction.cap": LEARNING,
    "algorithm.correction.geometric_bounds": LEARNING,
    "algorithm.correction.k3_limit": LEARNING,
    "algorithm.correction.off_policy_limit": LEARNING,
    "algorithm.correction.veto": LEARNING,
    "algorithm.correction.weight": LEARNING,
    "algorithm.critic": _rejected("a critic is trained from the first step on"),
    "algorithm.critic.lr": LEARNING,
    "algorithm.critic.value_clip": LEARNING,
    "algorithm.critic.warmup_steps": LEARNING,
    "algorithm.distillation": LEARNING,
    "algorithm.distillation.coefficient": LEARNING,
    "algorithm.distillation.loss.beta": LEARNING,
    "algorithm.distillation.loss.top_k": LEARNING,
    "algorithm.distillation.loss.type": LEARNING,
    # Compared by content, not by path.
    "algorithm.distillation.teacher": FILES,
    "algorithm.distillation.teachers": FILES,
    # Every step reserves the numbers of all its rounds, so seeds and tasks would shift.
    "algorithm.dynamic_sampling_rounds": _rejected(DATA),
    "algorithm.entropy_bonus": LEARNING,
    "algorithm.kl": LEARNING,
    "algorithm.kl.coefficient": LEARNING,
    "algorithm.kl.estimator": LEARNING,
    "algorithm.kl.apply_to": LEARNING,
    # Episodes of later steps may be too old for a smaller bound.
    "algorithm.max_staleness": SAMPLING,
    "algorithm.mini_batches": LEARNING,
    "algorithm.old_log_probs": SAMPLING,
    "algorithm.overlong_buffer_tokens": LEARNING,
    "algorithm.overlong_penalty": LEARNING,
    "algorithm.policy_loss.clip_high": LEARNING,
    "algorithm.policy_loss.clip_low": LEARNING,
    "algorithm.policy_loss.dual_clip": LEARNING,
    "algorithm.policy_loss.options": LEARNING,
    "algorithm.policy_loss.type": LEARNING,
    "algorithm.routing_replay": SAMPLING,
    "algorithm.shaping": LEARNING,
    "algorithm.standard_deviation": LEARNING,
    "algorithm.whiten_advantages": LEARNING,
    # -- ablation ---------------------------------------------------------------------------------
    "ablation.engine_noise": SAMPLING,
    # The optimizer has no state of frozen parameters.
    "ablation.freeze": _rejected(STATE),
    "ablation.router_noise": LEARNING,
    "ablation.without": SAMPLING,
}
"""Rules by key."""

SOURCE_NAME = re.compile(r"(?<=^tasks\.sources\.)[^.]+")
"""Name of a source in a key."""

UNDECLARED = _rejected("rl_loop.lifecycle.resume_rules declares no effect of this key")

EPISODE_PREFIXES = ("rollout.", "reward.", "algorithm.")
"""Prefixes of keys that matter only if episodes are sampled."""


def find_rule(key: str, samples_episodes: bool = True) -> ResumeRule:
    """Return the rule of a key, or of the nearest key above it that has one.

    Args:
        key: dotted key.
        samples_episodes: True for reinforcement learning, False for supervised fine-tuning.
    """
    if not samples_episodes and key.startswith(EPISODE_PREFIXES):
        return ELSEWHERE
    # Walk up from the key, so that a section's rule applies to all keys without their own.
    parent = SOURCE_NAME.sub("*", key)
    while parent:
        if parent in RULES:
            return RULES[parent]
        parent = parent.rpartition(".")[0]
    return UNDECLARED


def flatten(config: Any, key: str = "") -> dict[str, Any]:
    """Return the values of a configuration by full key. An empty section is a value."""
    if not isinstance(config, Mapping) or not config:
        return {key: config}
    values: dict[str, Any] = {}
    for name, value in config.items():
        values |= flatten(value, f"{key}.{name}" if key else name)
    return values


def sampling_digest(config: Mapping[str, Any]) -> str:
    """Return a digest of all configuration values that affect the sampling of episodes."""
    values = flatten(config)
    sampled = {key: value for key, value in values.items() if find_rule(key).affects_sampling}
    # Sorted, so that the order of keys in a file does not matter.
    return hashlib.sha256(json.dumps(sampled, sort_keys=True).encode()).hexdigest()
