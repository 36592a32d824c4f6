"""A whole run in one process, without Ray: for experiments on small models and for tests."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from megatron_gptoss import distributed
from rl_loop.ablations.engine_weights import engine_faults
from rl_loop.config.load import dump_config
from rl_loop.config.run import RlConfig
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.engines.backend import WeightSource
from rl_loop.engines.embedded.backend import build_engine
from rl_loop.engines.embedded.config import EmbeddedConfig
from rl_loop.engines.protocol import RolloutEngine
from rl_loop.loop import RlLoop
from rl_loop.rollout.pool import GroupRequest
from rl_loop.rollout.worker import RolloutWorker
from rl_loop.session import build_tasks, loop_settings, trainer_settings, worker_settings
from rl_loop.tracking.episode_recorder import EpisodeRecorder
from rl_loop.tracking.metrics import MetricsWriter
from rl_loop.tracking.recorder import StepRecorder
from rl_loop.tracking.run_directory import Start, start_run
from rl_loop.trainer.checkpointer import Checkpointer, RunState
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.settings import TrainerSettings
from rl_loop.trainer.worker import RankPlace, TrainerWorker


class LocalRank:
    """What a TrainerGroup wants of its ranks, of one rank in this process."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._worker = TrainerWorker(settings, 0, "127.0.0.1", 0, torch.get_num_threads())

    def ready(self) -> list[RankPlace]:
        return [self._worker.place()]

    def store(self, value: Any) -> Any:
        return value

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], asked: Sequence[int]
    ) -> list[Any]:
        result = getattr(self._worker, method)(*arguments[0])
        return [result for _ in asked]

    def close(self) -> None:
        distributed.shutdown()


def local_trainer(settings: TrainerSettings) -> TrainerGroup:
    """Make a trainer of one rank in this process."""
    trainer = TrainerGroup(settings, LocalRank(settings))
    trainer.ready()
    return trainer


class LocalRollouts:
    """What ``RlLoop`` wants of a RolloutPool, of one worker in this process; around ``engine`` if
    there is one."""

    def __init__(self, config: RlConfig, engine: RolloutEngine | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self.alter_weights: Callable[[WeightSource, int], WeightSource] | None = None
        settings = worker_settings(config)
        engine_config = config.rollout.engine
        if engine is None:
            assert isinstance(engine_config, EmbeddedConfig)
            engine = build_engine(config.model, config.dtype, engine_config.max_batch_size)
        self._worker = RolloutWorker(settings, lambda: engine, torch.get_num_threads())
        self._do(self._worker.start())

    def _do[Result](self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._loop.run_until_complete(work)

    def sync_weights(self, source: WeightSource, version: int) -> None:
        if self.alter_weights is not None:
            source = self.alter_weights(source, version)
        self._do(self._worker.sync_weights(source.weights(), version))

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        return [self._do(self._worker.score(token_ids, temperature))]

    def run(
        self, requests: Sequence[GroupRequest], abandon: Callable[[], bool] = lambda: False
    ) -> list[TrajectoryGroup]:
        async def all_groups() -> list[TrajectoryGroup]:
            groups = [
                self._worker.run_group(
                    r.task,
                    r.seeds,
                    r.temperature,
                    purify=r.purify,
                    with_routes=r.with_routes,
                )
                for r in requests
            ]
            return list(await asyncio.gather(*groups))

        return self._do(all_groups())

    def compare_weights(self) -> None: ...

    def pause(self) -> None: ...

    def updating_weights(self, version: int) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self._do(self._worker.close())
        self._loop.close()


class Silent:
    """A progress display that shows nothing."""

    def phase(self, name: str) -> None: ...

    def note(self, message: str) -> None: ...

    def step(self, step: int, values: dict[str, float]) -> None: ...


@contextmanager
def local_loop(
    config: RlConfig, rollouts: LocalRollouts | None = None, resume: bool = False
) -> Iterator[RlLoop]:
    """Build a loop over one trainer rank and one rollout worker, or over ``rollouts`` of the same
    model."""
    with ExitStack() as stack:
        start = Start.RESUME if resume else Start.OVERWRITE
        run = start_run(config.directory, dump_config(config), start)
        trainer = local_trainer(trainer_settings(config))
        stack.callback(trainer.close)
        if rollouts is None:
            rollouts = LocalRollouts(config)
            stack.callback(rollouts.close)
        rollouts.alter_weights = engine_faults(config.ablation, config.seed)

        state = RunState.from_checkpoint(trainer.resume() if resume else None)
        writer = MetricsWriter(run, state.step - 1 if resume else None)
        stack.callback(writer.close)
        tasks = build_tasks(config)
        episodes = stack.enter_context(
            EpisodeRecorder(
                run.episodes,
                tasks.harmony.vocabulary,
                config.tracking.episodes,
                state.step - 1 if resume else None,
            )
        )
        recorder = StepRecorder(run, writer, Silent(), episodes)
        yield RlLoop(
            loop_settings(config),
            trainer=trainer,
            rollouts=rollouts,
            tasks=tasks,
            recorder=recorder,
            checkpointer=Checkpointer(
                trainer, state, config.training, on_save=recorder.finish_writing
            ),
        )
