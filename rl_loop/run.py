"""Runs of a configuration from start to export.

``run_sft``, ``run_rl`` and ``run_evaluation`` are the functions behind the ``gptoss`` commands.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_loop.cluster.ray_session import ray_session
from rl_loop.config.every_run import RunConfig
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.engines.protocol import RolloutEngine
from rl_loop.engines.registry import build_backend
from rl_loop.gateway.serve import LocalEngine, ServeOptions, serve, served_settings
from rl_loop.lifecycle.start_checks import store_need
from rl_loop.lifecycle.store_size import store_bytes
from rl_loop.lifecycle.weight_checks import check_loads_merged_weights
from rl_loop.process_memory import exempt_from_collection, keep_freed_memory
from rl_loop.run_parts import (
    backend_context,
    build_rollouts,
    build_tasks,
    build_trainer,
    collect_model_card_facts,
)
from rl_loop.session import RlSession, RunInterrupted, RunSession, SftSession, build_loop
from rl_loop.tracking.metrics import MetricName, StepMetrics
from rl_loop.tracking.model_card import LOST_BY_MERGING, write_model_card
from rl_loop.tracking.progress import ProgressFactory, silent
from rl_loop.tracking.run_directory import (
    RunDirectory,
    StartMode,
    metric_curve,
    read_json,
    read_json_lines,
)

if TYPE_CHECKING:
    from rl_loop.evaluation.chats import ChatValidation
    from rl_loop.rollout.pool import RolloutPool

logger = logging.getLogger(__name__)

__all__ = [
    "RunInterrupted",
    "run_engine_report",
    "run_evaluation",
    "run_rl",
    "run_server",
    "run_sft",
]


def run_sft(
    config: SftConfig,
    show: ProgressFactory = silent,
    *,
    resume: bool = False,
    overwrite: bool = False,
    resume_or_new: bool = False,
) -> Path:
    """Fine-tune on conversations or on generated demonstrations.

    A policy that was trained on conversations is exported. Adapters are always exported, both
    separately and merged.

    Args:
        config: configuration of the run.
        show: makes the display of the progress.
        resume: continue an existing run.
        overwrite: delete an existing run once all parts of the new one are ready.
        resume_or_new: continue an existing run, or start a new one if there is none.

    Returns:
        The run directory.

    Raises:
        RunInterrupted: the run was asked to stop.
    """
    how = StartMode.chosen(resume=resume, overwrite=overwrite, resume_or_new=resume_or_new)
    steps = config.training.steps
    with SftSession(config, show, how) as session:
        data = session.data
        # Imports torch. A mistake in the configuration is reported before.
        from rl_loop.sft import train_supervised

        chats = _chat_validation(config, session)
        with session.finishing_steps():
            done = train_supervised(
                session.trainer,
                data,
                session.recorder,
                session.checkpointer,
                steps=steps,
                sequences_per_step=config.sequences_per_step,
                chats=chats,
            )
        _check_not_interrupted(config, session, done)
        figures = data.summary() | _last_losses(session.run)
        if chats is not None:
            figures |= chats.figures
            # The export needs the memory of the engines.
            chats.engines.close()
        exported = _export(config, session) if config.exports else {}
        if config.unmerged_adapter is not None:
            figures |= exported
        seconds = round(session.checkpointer.seconds, 1)
        session.run.write_summary(steps=done, **figures, seconds=seconds)
        # Full training on demonstrations writes no export. The card quotes the summary, so it comes
        # last.
        if session.run.export.exists():
            write_model_card(session.run, collect_model_card_facts(config))
        if rejected := session.rejections.summary():
            session.progress.note(f"conversations: {rejected} ({session.run.rejected})")
    return config.directory


def _chat_validation(config: SftConfig, session: SftSession) -> "ChatValidation | None":
    """Return the measurement of held-out conversations, with engines that are ready.

    None if validations measure the loss only.
    """
    if config.data is None or session.rollouts is None:
        return None
    from rl_loop.evaluation.chats import ChatValidation
    from rl_loop.evaluation.policy_evaluation import complete_turns
    from rl_loop.weight_sync.canary import CanaryTolerance

    data = session.data
    chats = complete_turns(data.held_out_chats, session.codec, config.data.sampled_conversations)
    _wait_for_engines(config, session, session.rollouts)
    return ChatValidation(
        session.trainer,
        session.rollouts,
        chats,
        temperature=config.rollout.evaluation_temperature,
        tolerance=CanaryTolerance.of(None, config.dtype),
        sequences_at_a_time=config.sequences_per_step,
        is_quantized=config.trained_quantization is not None,
    )


def _check_not_interrupted(config: SftConfig, session: SftSession, done: int) -> None:
    """Raise RunInterrupted if the run was asked to stop.

    Args:
        config: configuration of the run.
        session: session of the run.
        done: number of completed steps.
    """
    steps = config.training.steps
    is_stopped = done < steps and not session.data.exhausted
    saved = f"saved after step {done} of {steps} in {session.run.path}"
    if is_stopped:
        raise RunInterrupted(saved)
    # After a request during the last step, a resume writes the export. The export may take
    # minutes, in which a further request would have no effect.
    if session.interrupt.requested and config.exports:
        raise RunInterrupted(f"{saved}. The export is missing; --resume writes it")


def _last_losses(run: RunDirectory) -> dict[str, float]:
    """Return the last training loss of a supervised run, and the last validation loss if any."""
    records = read_json_lines(run.metrics)
    losses = {"loss": metric_curve(records, MetricName.LOSS)[1][-1]}
    if validation := metric_curve(records, MetricName.VALIDATION_LOSS)[1]:
        losses["validation_loss"] = validation[-1]
    return losses


def run_rl(
    config: RlConfig,
    show: ProgressFactory = silent,
    *,
    resume: bool = False,
    overwrite: bool = False,
    resume_or_new: bool = False,
) -> Path:
    """Train with reinforcement learning, evaluate and export.

    Args:
        config: configuration of the run.
        show: makes the display of the progress.
        resume: continue an existing run.
        overwrite: delete an existing run once all parts of the new one are ready.
        resume_or_new: continue an existing run, or start a new one if there is none.

    Returns:
        The run directory.

    Raises:
        RunInterrupted: the run was asked to stop.
    """
    if config.algorithm.estimates:
        # Estimates are columns, too, and double the memory that a step uses.
        keep_freed_memory()
    how = StartMode.chosen(resume=resume, overwrite=overwrite, resume_or_new=resume_or_new)
    with RlSession(config, show, how) as session:
        loop = build_loop(config, session)
        _wait_for_engines(config, session, session.rollouts)
        # These objects live as long as the run. A collector's search of them would delay a step.
        exempt_from_collection()

        with session.finishing_steps():
            done = loop.train()
        # A request during the last step ends the run, too. Its checkpoint is complete, and a resume
        # completes the rest.
        if done < config.training.steps or session.interrupt.requested:
            raise RunInterrupted(_interrupt_message(config, session, done))
        evaluation = loop.evaluate()
        if config.rollout.engine.has_mxfp4_experts:
            # All checksums. The export is compared with the engines and the trainer, too.
            session.rollouts.compare_weights()
        # The export needs the memory of the engines.
        session.rollouts.close()

        compared = _export(config, session, loop.engine_digests)
        agreement = _compare_answers(config, session)
        seconds = session.checkpointer.seconds + _seconds_of_initial_run(config)
        session.run.write_summary(
            **_summary(session.run, config.training.steps, evaluation),
            seconds=round(seconds, 1),
            **compared,
            **agreement,
        )
        write_model_card(session.run, collect_model_card_facts(config))
    return config.directory


def _wait_for_engines(config: RunConfig, session: RunSession, rollouts: "RolloutPool") -> None:
    """Wait until the engines are ready. They have been starting at the same time as the trainer."""
    session.progress.note("waiting for the rollout engines")
    rollouts.ready()
    if session.checkpointer.state.step > 0 and config.rollout.engine.shares_trainer_gpus:
        # Unlike in a new run, the optimizer state is on the GPU already. As in every later sync,
        # the engines' caches must wait until the trainer's buffers are released.
        rollouts.pause()


def run_evaluation(config: RunConfig, weights: Path | None, output: Path) -> list[dict[str, Any]]:
    """Evaluate on held-out tasks, or on the held-out conversations of supervised fine-tuning.

    ``evaluation.samples_per_task`` episodes of every task, or samples of every turn, are recorded.

    Args:
        config: configuration of the evaluation.
        weights: replace the configuration's ``initial_weights``.
        output: file for the records.

    Returns:
        The records.

    Raises:
        ConfigError: a configuration of supervised fine-tuning has no held-out conversations.
        DataError: conversations cannot be read.
        ConversionError: there are no weights, or they cannot be read.
        EndpointError: the endpoint cannot be used.
    """
    # Imports torch.
    from rl_loop.evaluation import policy_evaluation

    if isinstance(config, SftConfig):
        return policy_evaluation.evaluate_on_chats(config, weights, output)
    assert isinstance(config, RlConfig)
    return policy_evaluation.evaluate_on_tasks(config, weights, output)


def run_server(
    config: RunConfig,
    options: ServeOptions,
    on_start: Callable[[str, list[str]], None],
    weights: Path | None = None,
) -> None:
    """Serve the model of ``config`` with OpenAI's API until the process is asked to end.

    An exception of an engine that does not start is raised here.

    Args:
        config: configuration with the model and its engine.
        options: address and limits of the server.
        on_start: called with the base URL and the API keys.
        weights: replace the configuration's ``initial_weights``.

    Raises:
        ConversionError: there are no weights.
        ServeError: the server cannot listen on the address.
    """
    check_loads_merged_weights(config)
    # These import torch.
    from rl_loop.rollout.worker import model_shape
    from rl_loop.tasks.codec import build_codec

    settings = served_settings(options, config.model.max_length)
    codec = build_codec(config)
    with local_engine(config, weights) as engine:
        shape = model_shape(config.model)
        asyncio.run(serve(engine, codec, shape, settings, options.api_keys, on_start))


@contextmanager
def local_engine(config: RunConfig, weights: Path | None = None) -> Iterator[RolloutEngine]:
    """Start the engine of a configuration in this process, with its weights.

    Args:
        config: configuration with the model and its engine.
        weights: replace the configuration's ``initial_weights``.

    Raises:
        ConversionError: there are no weights.
    """
    # Imports torch.
    from rl_loop.evaluation.evaluate import load_weights

    loaded = load_weights(weights or config.initial_weights, config.dtype)
    with ExitStack() as stack:
        # An embedded engine runs in this process and needs no Ray.
        if config.rollout.engine.server_processes is not None:
            stack.enter_context(ray_session())
        backend = build_backend(config.rollout.engine, backend_context(config))
        stack.callback(backend.close)
        engine = backend.engine_factory()()
        backend.start(LocalEngine(engine))
        # The weights never change, so this version is the only one.
        backend.sync_weights(loaded, 0)
        yield engine


def run_engine_report(config: RlConfig) -> str:
    """Start engine and trainer of ``config`` and compare them on the held-out tasks.

    Returns:
        The report.

    Raises:
        CanaryError: engine and trainer hold different models.
    """
    from rl_loop.evaluation.engine_comparison import engine_report
    from rl_loop.weight_sync.canary import CanaryTolerance

    with ExitStack() as stack:
        stack.enter_context(ray_session(store_bytes(store_need(config))))
        tasks = build_tasks(config)
        trainer = build_trainer(config)
        stack.callback(trainer.close)
        # Engines on the same GPUs take a share of the memory that the trainer leaves.
        trainer.ready()
        rollouts = build_rollouts(config)
        stack.callback(rollouts.close)
        rollouts.ready()

        return engine_report(
            trainer,
            rollouts,
            tasks,
            config.algorithm,
            temperature=config.rollout.temperature,
            canary_tolerance=CanaryTolerance.of(config.canary_tolerance, config.dtype),
        )


def _interrupt_message(config: RlConfig, session: RunSession, done: int) -> str:
    """Return the message about a run that was asked to stop after ``done`` steps."""
    if not (session.run.checkpoints / "latest").exists():
        return f"stopped; {session.saved_step_message()}"
    saved = f"saved after step {done} of {config.training.steps} in {session.run.path}"
    if done == config.training.steps:
        saved += ". The final evaluation and the export are missing; --resume continues with them"
    return saved


def _export(
    config: RunConfig, session: RunSession, engine_digests: dict[str, str] | None = None
) -> dict[str, float]:
    """Write the Hugging Face checkpoint and, if there are any, the separate adapters.

    Args:
        config: configuration of the run.
        session: the open session.
        engine_digests: digests of the quantized experts that engines held last.

    Returns:
        Entries for the run's summary.
    """
    from rl_loop.export import export_policy, export_trained_adapter
    from rl_loop.tasks.codec import tokenizer_directory

    session.progress.phase("export")
    mxfp4_experts = export_policy(
        session.trainer,
        session.codec,
        session.run.export,
        tokenizer_source=tokenizer_directory(config.tokenizer_source) or config.tokenizer_source,
        settings_source=config.initial_weights,
        quantization=config.trained_quantization,
        sampled=engine_digests,
    )
    if config.adapter is not None:
        export_trained_adapter(
            session.run.checkpoints, session.run.adapter, base=config.initial_weights
        )
    if config.unmerged_adapter is not None:
        lost = session.trainer.lost_by_merging()
        logger.info(
            "%s has merged experts in %s, which lose %.1f%% of their adapters' updates by rounding. %s has the trained "
            "model: its adapters are exact",
            session.run.export,
            config.dtype,
            100 * lost,
            session.run.adapter,
        )
        return {LOST_BY_MERGING: lost}
    return {} if config.trained_quantization is None else {"mxfp4_experts_equal": mxfp4_experts}


def _compare_answers(config: RlConfig, session: RlSession) -> dict[str, int]:
    """Compare greedy answers of the Hugging Face checkpoint with those of the trainer.

    Returns:
        Entries for the run's summary. Empty if the model is too large for the CPU.
    """
    from rl_loop.export import MAX_DECODED_PARAMETERS, greedy_agreement

    if config.model.num_parameters > MAX_DECODED_PARAMETERS:
        logger.info(
            "%s: sampled weights of the export equal the trainer's. Answers were not compared, because "
            "%.1f billion parameters are too many for a CPU",
            session.run.export,
            config.model.num_parameters / 1e9,
        )
        return {}

    agreement = greedy_agreement(
        session.trainer,
        session.tasks,
        session.run.export,
        config.dtype,
        config.trained_quantization,
    )
    return {
        "greedy_answers_equal": agreement.equal,
        "greedy_answers_compared": agreement.compared,
    }


def _summary(run: RunDirectory, steps: int, evaluation: StepMetrics) -> dict[str, Any]:
    """Return the summary's figures. ``evaluation`` has the metrics after the last step."""
    records = read_json_lines(run.metrics)
    final = evaluation.values()

    def curve(name: str) -> list[float]:
        return metric_curve(records, name)[1]

    gaps = curve(MetricName.LOG_PROB_GAP)
    return {
        "steps": steps,
        # The first evaluation measures the initial weights, which usually come from `gptoss sft`.
        "held_out_accuracy_sft": curve(MetricName.HELD_OUT_ACCURACY)[0],
        "held_out_accuracy_rl": final[MetricName.HELD_OUT_ACCURACY],
        "held_out_reward_sft": curve(MetricName.HELD_OUT_REWARD)[0],
        "held_out_reward_rl": final[MetricName.HELD_OUT_REWARD],
        "tool_call_rate": final["held_out/tool_call_rate"],
        "mean_turns": final["held_out/turns"],
        "max_clip_fraction": max(curve(MetricName.CLIP_FRACTION)),
        "max_ratio_deviation": max(curve("ratio/deviation_max")),
        "mean_log_prob_gap": sum(gaps) / len(gaps),
        "max_log_prob_gap": max(curve("mismatch/log_prob_gap_max")),
    }


def _seconds_of_initial_run(config: RunConfig) -> float:
    """Return the training time of the run that made the initial weights, 0 for other weights."""
    if config.initial_weights is None:
        return 0.0
    source = RunDirectory(config.initial_weights)
    if not source.summary.exists():
        return 0.0
    return float(read_json(source.summary).get("seconds", 0.0))
