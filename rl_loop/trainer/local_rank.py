"""The only rank of a trainer, in the process of the driver."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_gptoss import distributed
from rl_loop.config.partial_configs import TrainerConfig
from rl_loop.trainer.rank_state import RankPosition
from rl_loop.trainer.worker import TrainerWorker


class LocalRank:
    """A TrainerWorker as the ``TrainerRanks`` of a ``TrainerGroup``. It needs no Ray."""

    def __init__(
        self, settings: TrainerConfig, worker_class: type[TrainerWorker] = TrainerWorker
    ) -> None:
        """Build the model. ``worker_class`` is the class of the worker."""
        # A single rank opens no port.
        self.worker = worker_class(settings, 0, "127.0.0.1", 0, torch.get_num_threads())

    def ready(self) -> list[RankPosition]:
        return [self.worker.position()]

    def store(self, value: Any) -> Any:
        return value

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], result_ranks: Sequence[int]
    ) -> list[Any]:
        (argument,) = arguments
        return [getattr(self.worker, method)(*argument)]

    def call_and_store(self, method: str) -> Callable[[], Any]:
        (result,) = self.call(method, [()], [0])
        return lambda: result

    def close(self) -> None:
        distributed.shutdown()
