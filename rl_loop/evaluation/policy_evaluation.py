"""``gptoss eval``: samples episodes of held-out tasks, or turns of held-out conversations."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from megatron_gptoss.samples import TrainingSamples
from rl_loop.agents.worker import select_worker_class
from rl_loop.chat.codec import ChatCodec
from rl_loop.cluster.ray_session import ray_session
from rl_loop.config.every_run import RunConfig
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.conversations.errors import DataError
from rl_loop.conversations.rejections import RejectionReport
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.evaluation.chat_statistics import chat_figures
from rl_loop.evaluation.chats import chat_records, chat_requests, score_conversations
from rl_loop.evaluation.evaluate import (
    evaluation_records,
    evaluation_requests,
    load_weights,
    run_at_endpoint,
    write_records,
)
from rl_loop.lifecycle.interrupt import run_until_interrupted
from rl_loop.lifecycle.start_checks import evaluation_need
from rl_loop.lifecycle.store_size import check_running_store, store_bytes
from rl_loop.lifecycle.weight_checks import check_loads_merged_weights
from rl_loop.rollout.group_stream import GroupRequest
from rl_loop.rollout.pool import RolloutPool
from rl_loop.rollout.worker import ChatWorker, RolloutWorker
from rl_loop.run_parts import build_rollouts, build_tasks, open_conversations
from rl_loop.tasks.chat_turns import HeldOutChats, held_out_chats
from rl_loop.tracking.run_directory import RunDirectory

logger = logging.getLogger(__name__)


def evaluate_on_tasks(config: RlConfig, weights: Path | None, output: Path) -> list[dict[str, Any]]:
    """Run episodes of every held-out task, and write and return their records.

    Arguments and errors are those of ``rl_loop.run.run_evaluation``.
    """
    requests = evaluation_requests(
        build_tasks(config),
        config.evaluation.samples_per_task,
        config.rollout.evaluation_temperature,
    )
    worker_class = select_worker_class(config.tasks)
    # An endpoint samples elsewhere, so neither Ray nor an engine starts.
    if config.evaluation.endpoint is not None:
        groups = _run_at_endpoint(config, requests, worker_class)
    else:
        with _engines(config, weights, len(requests), worker_class) as rollouts:
            groups = rollouts.run(requests)
    records = evaluation_records(requests, groups)
    write_records(records, output)
    return records


def evaluate_on_chats(
    config: SftConfig, weights: Path | None, output: Path
) -> list[dict[str, Any]]:
    """Sample every turn of the held-out conversations, and write and return the records.

    Arguments and errors are those of ``rl_loop.run.run_evaluation``.
    """
    chats = read_held_out_chats(config)
    requests = chat_requests(
        chats, config.evaluation.samples_per_task, config.rollout.evaluation_temperature
    )
    if config.evaluation.endpoint is not None:
        groups, log_probs = _run_at_endpoint(config, requests, ChatWorker), None
    else:
        with _engines(config, weights, len(requests), ChatWorker) as rollouts:
            groups = rollouts.run(requests)
            log_probs = score_conversations(rollouts.score_each, chats)
    records = chat_records(chats, groups, log_probs)
    write_records(records, output)
    run = run_of_weights(weights or config.initial_weights)
    if config.evaluation.endpoint is None and run is not None:
        run.write_summary(evaluation=chat_figures(records))
    return records


def run_of_weights(weights: Path | None) -> RunDirectory | None:
    """Return the finished run that made a checkpoint or an export; None if there is none."""
    if weights is None:
        return None
    for directory in (weights, weights.parent):
        run = RunDirectory(directory)
        # Without a summary the run has not finished, and a summary would show it as finished.
        if run.config.exists() and run.summary.exists():
            return run
    return None


def read_held_out_chats(config: SftConfig) -> HeldOutChats:
    """Read the conversations that ``data`` holds out.

    Raises:
        DataError: conversations cannot be read, or none of them has a complete turn.
    """
    codec, conversations = open_conversations(config)
    with conversations:
        report = RejectionReport(write=lambda records: None, show=logger.warning)
        validation = conversations.validation(report)
    return complete_turns(validation, codec, conversations.config.validation_conversations)


def complete_turns(
    validation: Mapping[str, TrainingSamples], codec: ChatCodec, conversations: int
) -> HeldOutChats:
    """Call ``held_out_chats``, and log the number of turns that are left out.

    Raises:
        DataError: none of the conversations has a complete turn.
    """
    chats = held_out_chats(validation, codec, conversations)
    if chats.cut_off_turns:
        logger.warning("%d turns are not evaluated, because they were cut off", chats.cut_off_turns)
    if not chats.turns:
        raise DataError("the held-out conversations have no complete turn of the assistant")
    return chats


def _run_at_endpoint(
    config: RunConfig, requests: Sequence[GroupRequest], worker_class: type[RolloutWorker]
) -> list[TrajectoryGroup]:
    url = config.evaluation.endpoint
    assert url is not None
    return run_until_interrupted(
        run_at_endpoint(requests, url, config.evaluation, config, worker_class)
    )


@contextmanager
def _engines(
    config: RunConfig, weights: Path | None, tasks: int, worker_class: type[RolloutWorker]
) -> Iterator[RolloutPool]:
    """Start engines with the weights to evaluate.

    Args:
        config: configuration of the evaluation.
        weights: replace the configuration's weights.
        tasks: number of tasks in the evaluation.
        worker_class: class of the workers.
    """
    check_loads_merged_weights(config)
    # Unreadable weights are reported before engines start.
    loaded = load_weights(weights or config.initial_weights, config.dtype)
    with ExitStack() as stack:
        need = evaluation_need(config, tasks)
        stack.enter_context(ray_session(store_bytes(need)))
        # A Ray that already ran keeps the store that it was started with.
        check_running_store(need)
        rollouts = build_rollouts(config, worker_class)
        stack.callback(rollouts.close)
        rollouts.ready()
        rollouts.sync_weights(loaded, version=0)
        yield rollouts
