"""A complete run in one process, without Ray, for tests and for experiments with small models."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from converters.mxfp4_tensors import Digests
from megatron_gptoss.samples import TrainingSamples
from rl_loop.ablations.engine_weights import engine_faults
from rl_loop.agents.worker import select_worker_class
from rl_loop.config.load import dump_config
from rl_loop.config.partial_configs import TrainerConfig
from rl_loop.config.run import RlConfig
from rl_loop.data.tensor_bytes import TensorBytes
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.engines.embedded.backend import build_engine, weights_for_engine
from rl_loop.engines.embedded.config import EmbeddedConfig
from rl_loop.engines.protocol import RolloutEngine
from rl_loop.lifecycle.resume_rules import sampling_digest
from rl_loop.loop import RlLoop
from rl_loop.rollout.group_store import GroupStore
from rl_loop.rollout.group_stream import AdmittedGroup, GroupRequest, GroupStream, run_groups
from rl_loop.run_parts import build_tasks
from rl_loop.sandbox import python_sandbox
from rl_loop.tracking.episode_recorder import EpisodeRecorder
from rl_loop.tracking.metrics import MetricsWriter
from rl_loop.tracking.recorder import StepRecorder
from rl_loop.tracking.run_directory import StartMode, start_run
from rl_loop.trainer.checkpointer import Checkpointer, RunState
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.local_rank import LocalRank
from rl_loop.trainer.rank_state import RankPosition
from rl_loop.trainer.worker import TrainerWorker
from rl_loop.weight_sync.source import WeightSource

_check_isolation_once = cache(python_sandbox.check_isolation)


class RanksOfJob(LocalRank):
    """One rank of a job whose processes all run the driver, with the results of every rank."""

    def __init__(self, settings: TrainerConfig, rank: int, port: int) -> None:
        self._rank = rank
        self.worker = TrainerWorker(settings, rank, "127.0.0.1", port, 1)

    def ready(self) -> list[RankPosition]:
        return self._gather(self.worker.position())

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], result_ranks: Sequence[int]
    ) -> list[Any]:
        results = self._gather(getattr(self.worker, method)(*arguments[self._rank]))
        return [results[rank] for rank in result_ranks]

    @staticmethod
    def _gather(result: Any) -> list[Any]:
        results = [None] * dist.get_world_size()
        dist.all_gather_object(results, result)
        return results


def local_trainer(settings: TrainerConfig) -> TrainerGroup:
    """Create a trainer with one rank in this process."""
    trainer = TrainerGroup(settings, LocalRank(settings))
    trainer.ready()
    return trainer


class LocalRollouts:
    """A rollout worker in this process, with the interface of RolloutPool that ``RlLoop`` needs.

    Uses ``engine`` if there is one. Episodes run in a separate thread.
    """

    # Trainer and engine share a process, and maybe a GPU.
    scores_during_rollouts = False

    def __init__(self, config: RlConfig, engine: RolloutEngine | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()
        self._running: set[Future[None]] = set()

        self._trained, self._held = (
            config.trained_quantization,
            config.rollout.engine.experts_format,
        )
        self.alter_weights: Callable[[WeightSource, int], WeightSource] | None = None
        self._rollout = config.rollout
        settings = config
        engine_config = config.rollout.engine
        if engine is None:
            assert isinstance(engine_config, EmbeddedConfig)
            engine = build_engine(
                config.model,
                config.dtype,
                engine_config.max_batch_size,
                engine_config.deterministic,
            )
        worker_class = select_worker_class(config.tasks)
        self.worker = worker_class(settings, lambda: engine, torch.get_num_threads())
        # The check starts one more server, so one check per process and settings is enough.
        with patch.object(python_sandbox, "check_isolation", _check_isolation_once):
            self._do(self.worker.start())

    def _do[Result](self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def sync_weights(self, source: WeightSource, version: int) -> None:
        if self.alter_weights is not None:
            source = self.alter_weights(source, version)
        weights = weights_for_engine(source, self._trained, self._held)
        self._do(self.worker.load_weights(TensorBytes.of(weights), version))

    def prepare_sync(self, source: WeightSource) -> None: ...

    def mxfp4_digests(self) -> list[Digests]:
        return [self._do(self.worker.mxfp4_digests())]

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        return [self._do(self.worker.score(token_ids, temperature))]

    def stream(self) -> GroupStream:
        return GroupStream(self.begin)

    def begin(self, admitted: AdmittedGroup) -> None:
        """Start a group. Called by streams."""
        running = asyncio.run_coroutine_threadsafe(self._run_group(admitted), self._loop)
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _run_group(self, admitted: AdmittedGroup) -> None:
        request = admitted.request
        try:
            group = await self.worker.run_group(
                request.task,
                request.seeds,
                request.temperature,
                purify=request.purify,
                with_routes=request.with_routes,
            )
        except Exception as error:
            admitted.fail(error)
        else:
            admitted.end(group)

    def run(
        self, requests: Sequence[GroupRequest], abandon: Callable[[], bool] = lambda: False
    ) -> list[TrajectoryGroup]:
        return run_groups(self, requests, self._rollout, abandon)

    def rounding_errors(self, token_ids: list[int]) -> list[float | None]:
        return []

    def compare_weights(self) -> None: ...

    def pause(self) -> None: ...

    def updating_weights(self, version: int) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        # Groups of later steps that are no longer needed.
        for running in list(self._running):
            running.cancel()
        self._do(self.worker.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Silent:
    """A progress display that shows nothing."""

    def phase(self, name: str) -> None: ...

    def episodes(self, ended: int, wanted: int) -> None: ...

    def note(self, message: str) -> None: ...

    def step(self, step: int, values: dict[str, float]) -> None: ...


@contextmanager
def local_loop(
    config: RlConfig, rollouts: LocalRollouts | None = None, resume: bool = False
) -> Iterator[RlLoop]:
    """Build a loop with one trainer rank and one rollout worker, or with the given ``rollouts``."""
    with ExitStack() as stack:
        start = StartMode.RESUME if resume else StartMode.OVERWRITE
        run = start_run(config.directory, dump_config(config), start)
        trainer = local_trainer(config)
        stack.callback(trainer.close)
        if rollouts is None:
            rollouts = LocalRollouts(config)
            stack.callback(rollouts.close)
        rollouts.alter_weights = engine_faults(config.ablation, config.seed)

        resumed = trainer.resume() if resume else None
        state = RunState.from_checkpoint(resumed.state if resumed is not None else None)
        writer = MetricsWriter(run, state.step if resume else None)
        stack.callback(writer.close)
        tasks = build_tasks(config)
        if state.tasks is not None:
            tasks.continue_from(state.tasks)
        episodes = stack.enter_context(
            EpisodeRecorder(
                run.episodes,
                tasks.codec.vocabulary,
                config.tracking.episodes,
                state.step if resume else None,
            )
        )
        recorder = StepRecorder(run, writer, Silent(), episodes, steps=config.training.steps)
        group_store = GroupStore(
            run.async_episodes,
            config.training.keep_checkpoints,
            sampling_digest(config.model_dump(mode="json")),
        )
        yield RlLoop(
            config,
            trainer=trainer,
            rollouts=rollouts,
            tasks=tasks,
            recorder=recorder,
            checkpointer=Checkpointer(
                trainer,
                state,
                config.training,
                on_checkpoint_start=recorder.finish_writing,
                task_cursor=lambda state: tasks.cursor(state.next_task),
            ),
            group_store=group_store,
        )


def train_and_record(loop: RlLoop) -> list[TrainingSamples]:
    """Run all steps of a loop. Return the samples of each step, as the trainer got them."""
    trained: list[TrainingSamples] = []
    learn = loop.trainer.rl_step

    def record(samples: TrainingSamples, step: int) -> Any:
        trained.append(samples)
        return learn(samples, step)

    loop.trainer.rl_step = record  # type: ignore[method-assign]
    loop.train()
    return trained
