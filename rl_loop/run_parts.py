"""Builds the parts of a run, each from its sections of the configuration."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_loop.config.errors import ConfigError
from rl_loop.config.every_run import RunConfig
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.engines.backend import BackendContext
from rl_loop.engines.registry import build_backend
from rl_loop.lifecycle.inputs import WEIGHTS, RunInput
from rl_loop.lifecycle.start_checks import check_conversations

# Modules that import torch or Ray are imported where they are used, so that a mistake in a
# configuration is reported first.
if TYPE_CHECKING:
    from rl_loop.chat.codec import ChatCodec
    from rl_loop.config.partial_configs import TrainerConfig
    from rl_loop.conversations.dataset import ConversationData
    from rl_loop.rollout.pool import RolloutPool
    from rl_loop.rollout.worker import RolloutWorker
    from rl_loop.supervised_data import SupervisedData
    from rl_loop.tasks.source import TaskMixture
    from rl_loop.tracking.model_card import ModelCardFacts
    from rl_loop.trainer.group import TrainerGroup


def build_tasks(config: RunConfig) -> "TaskMixture":
    """Read and check the task data of a run. Raises TaskFileError."""
    from rl_loop.tasks.codec import build_codec
    from rl_loop.tasks.source import TaskMixture

    codec = build_codec(config)
    if not isinstance(config, RlConfig):
        return TaskMixture(config.tasks, codec)
    return TaskMixture(
        config.tasks, codec, config.rollout.max_episode_tokens, config.algorithm.max_staleness
    )


def open_conversations(config: RunConfig) -> tuple["ChatCodec", "ConversationData"]:
    """Open the conversations of a run, and build the codec that renders them.

    Raises:
        ConfigError: the configuration has no conversations.
        DataError: conversations cannot be read.
    """
    if not isinstance(config, SftConfig) or config.data is None:
        raise ConfigError(
            f"{config.name} does not train on conversations. Name a configuration of `gptoss sft` "
            "with `data`"
        )
    check_conversations(config.data)

    from rl_loop.conversations.dataset import ConversationData
    from rl_loop.tasks.codec import build_codec

    codec = build_codec(config)
    return codec, ConversationData(config.data, codec, config.longest_sample)


def open_supervised_data(config: SftConfig) -> tuple["ChatCodec", "SupervisedData"]:
    """Open the training data of supervised fine-tuning, and build the codec that renders it.

    Raises:
        DataError: conversations cannot be read.
        TaskFileError: tasks cannot be read.
    """
    from rl_loop.supervised_data import ConversationBatches, DemonstrationBatches

    count = config.sequences_per_step
    all_tokens = config.trains_all_tokens
    if config.data is None:
        tasks = build_tasks(config)
        return tasks.codec, DemonstrationBatches(tasks, config.demonstrations, count, all_tokens)
    codec, conversations = open_conversations(config)
    return codec, ConversationBatches(conversations, count, all_tokens)


def build_trainer(
    config: RunConfig, inputs: Mapping[str, RunInput] | None = None
) -> "TrainerGroup":
    """Start the trainer's ranks. ``ready`` waits for them.

    Args:
        config: configuration of the run.
        inputs: recorded inputs. Their weights are read even if a run saves a newer checkpoint at
            the same time.
    """
    from rl_loop.trainer.group import TrainerGroup
    from rl_loop.trainer.ray_ranks import RayRanks

    settings = pinned_settings(config, inputs or {})
    return TrainerGroup(settings, RayRanks(settings))


def pinned_settings(settings: "TrainerConfig", inputs: Mapping[str, RunInput]) -> "TrainerConfig":
    """Return settings with the recorded directories of weights in place of run directories."""
    pinned: dict[str, Any] = {}
    for key in WEIGHTS:
        path = getattr(settings, key)
        # Inputs have absolute paths. Only a run directory was replaced, by its newest checkpoint.
        if key in inputs and os.path.abspath(path) != inputs[key].path:
            pinned[key] = Path(inputs[key].path)
    return settings.model_copy(update=pinned)


def build_rollouts(
    config: RunConfig, worker_class: "type[RolloutWorker] | None" = None
) -> "RolloutPool":
    """Start the engines and the rollout workers of a run. ``ready`` waits for them.

    Args:
        config: configuration of the run.
        worker_class: class of the workers. None for the one that the environments of ``tasks``
            need.

    Raises:
        UserError: the API key of a judge is not set.
    """
    from rl_loop.ablations.engine_weights import engine_faults
    from rl_loop.agents.worker import select_worker_class
    from rl_loop.rollout.pool import RolloutPool

    # Reported here, before a worker fails at its start.
    for source in config.tasks.sources.values():
        if source.judge is not None:
            source.judge.api_key()

    return RolloutPool(
        build_backend(config.rollout.engine, backend_context(config)),
        config,
        alter_weights=engine_faults(config.ablation, config.seed),
        worker_class=worker_class or select_worker_class(config.tasks),
    )


def backend_context(config: RunConfig) -> BackendContext:
    """Return the parameters of an engine backend."""
    return BackendContext(
        model=config.model,
        dtype=config.dtype,
        seed=config.seed,
        directory=config.directory.absolute() / "engine",
        routed_experts=config.rollout.routed_experts,
        shares_prefixes=config.training.prefix_sharing is not None,
        quantization=config.trained_quantization,
        adapter=config.unmerged_adapter,
    )


def collect_model_card_facts(config: RunConfig) -> "ModelCardFacts":
    """Return the facts about the run for the model card of an export."""
    from rl_loop.tasks.codec import detect_chat_format
    from rl_loop.tracking.model_card import ModelCardFacts

    algorithm = ""
    if isinstance(config, RlConfig):
        algorithm = (
            f"Advantages: {config.algorithm.advantage.type}; loss: {config.algorithm.policy_loss.type}; "
            f"{config.rollout.tasks_per_step} tasks with {config.rollout.samples_per_task} episodes each "
            f"per step; learning rate {config.optimizer.lr:g}."
        )

    data_kind = "Tasks"
    data = config.tasks.model_dump(mode="json", exclude_defaults=True)
    if isinstance(config, SftConfig) and config.data is not None:
        data_kind = "Conversations"
        data = config.data.model_dump(mode="json", exclude_defaults=True)

    chat_format = detect_chat_format(config)
    return ModelCardFacts(
        name=config.name,
        command=config.command,
        initial_weights=config.initial_weights,
        model=config.model,
        adapter_rank=None if config.adapter is None else config.adapter.rank,
        dtype=config.dtype,
        seed=config.seed,
        algorithm=algorithm,
        data_kind=data_kind,
        data=data,
        chat_format=chat_format,
        # Harmony's parsers of other servers know only the ids of the released models.
        has_released_vocabulary=config.vocabulary == "gptoss"
        or (config.vocabulary == "tokenizer" and chat_format == "chatml"),
    )
