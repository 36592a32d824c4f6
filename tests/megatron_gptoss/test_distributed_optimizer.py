"""Checkpoints of the distributed optimizer with Transformer Engine's Adam, both of which a trainer
has on GPUs only.

Megatron's part runs here as it is, on two gloo ranks. Adam is a stand-in with the interface and
the state of Transformer Engine's: of each fp32 master weight the half that its bf16 weight lacks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer import distrib_optimizer, optimizer_config

from converters.live import load_hf_weights
from megatron_gptoss import distributed, trainer
from megatron_gptoss import optimizer as gptoss_optimizer
from megatron_gptoss.checkpoint.directory import latest_checkpoint
from megatron_gptoss.checkpoint.loader import load_checkpoint
from megatron_gptoss.checkpoint.megatron_faults import lower_half, master_weight
from megatron_gptoss.checkpoint.state import trainer_state
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.optimizer_offload import OffloadedState
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.planning.parameter_counts import parameters_per_gpu
from megatron_gptoss.planning.state_memory import SAVED_BYTES, host_memory_of_save
from tests.distributed import free_port, run_distributed
from tests.megatron_gptoss.reference import (
    TINY,
    documents,
    hf_model,
    local_batches,
    mean_cross_entropy,
    save_checkpoint,
)

SAMPLES = documents([30, 5, 18, 26, 11, 2, 23, 9], seed=3)
STEPS = 5
SAVED = 3


class FusedAdam(torch.optim.Optimizer):
    """AdamW as Transformer Engine computes it, with its quirks around ``state_dict``."""

    def __init__(
        self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, master_weight_dtype: Any = None,
        exp_avg_dtype: Any = None, exp_avg_sq_dtype: Any = None, use_decoupled_grad: bool = True,
        store_param_remainders: bool = False, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.store_param_remainders = store_param_remainders

    def _halved(self, parameter: torch.Tensor, name: str) -> bool:
        return (
            self.store_param_remainders
            and name == "master_param"
            and parameter.dtype == torch.bfloat16
        )

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        assert self.state[parameter][name].dtype == (
            torch.int16 if self._halved(parameter, name) else torch.float32
        )
        return self.state[parameter][name]

    def set_scaled_state(self, parameter: torch.Tensor, name: str, state: torch.Tensor) -> None:
        dtype = torch.int16 if self._halved(parameter, name) else torch.float32
        assert state.dtype == dtype
        self.state[parameter].setdefault(name, torch.empty_like(parameter, dtype=dtype)).copy_(
            state
        )

    def state_dict(self) -> dict[str, Any]:
        assert not self.state, "the real one makes a copy of all state here"
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert not state_dict["state"], "the real one wants halves of master weights here"
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            b1, b2 = group["betas"]
            step = group["step"]

            for parameter in group["params"]:
                state = self.state[parameter]
                grad = parameter.decoupled_grad
                if not state:
                    state |= {name: torch.zeros_like(grad) for name in ("exp_avg", "exp_avg_sq")}
                    halved = self._halved(parameter, "master_param")
                    state["master_param"] = (
                        torch.zeros_like(parameter, dtype=torch.int16)
                        if halved
                        else parameter.float()
                    )

                mean = state["exp_avg"].lerp_(grad, 1 - b1) / (1 - b1**step)
                root = (state["exp_avg_sq"].lerp_(grad * grad, 1 - b2) / (1 - b2**step)).sqrt()
                master = state["master_param"]
                if master.dtype == torch.int16:
                    master = master_weight(parameter, master)
                master = master - group["lr"] * mean / (root + group["eps"])

                if self._halved(parameter, "master_param"):
                    state["master_param"] = lower_half(master)
                    upper = (master.view(torch.int32) - state["master_param"]) >> 16
                    parameter.copy_(upper.to(torch.int16).view(torch.bfloat16))
                else:
                    state["master_param"] = master
                    parameter.copy_(master)


def as_on_a_gpu() -> None:
    """From now on this process's trainers have the distributed optimizer, buckets, and the Adam
    above."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    for name in (
        "transformer_engine",
        "transformer_engine.pytorch",
        "transformer_engine.pytorch.optimizers",
    ):
        sys.modules[name] = ModuleType(name)
    sys.modules[name].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    megatron_optimizer.Adam = FusedAdam
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    optimizer_config.is_te_min_version = megatron_optimizer.is_te_min_version = lambda *_: True

    data_parallel = gptoss_optimizer.DistributedDataParallelConfig
    optimizer = gptoss_optimizer.MegatronOptimizerConfig
    buckets = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 8000}
    gptoss_optimizer.DistributedDataParallelConfig = lambda **given: data_parallel(
        **given | buckets
    )  # type: ignore
    precision = {
        "use_distributed_optimizer": True,
        **gptoss_optimizer.precision_settings(OptimizerConfig()),
    }
    gptoss_optimizer.MegatronOptimizerConfig = lambda **given: optimizer(**given | precision)  # type: ignore


def train(
    parallel: ParallelConfig,
    rank: int,
    port: int,
    save: Path | None = None,
    resume: Path | None = None,
    offload: float = 0.0,
) -> tuple[list[float], int, int]:
    """Losses of the steps, how many buckets of the model have a gap behind them, and the bytes that
    a save holds of the optimizer."""
    distributed.initialize(parallel, rank, port=port)
    try:
        model = build_model(TINY, parallel, torch.bfloat16)
        load_hf_weights(model, TINY, hf_model(std=0.1).state_dict().__getitem__)
        policy = trainer.PolicyTrainer(model, OptimizerConfig())
        if offload:
            policy.offloaded = OffloadedState(policy.optimizer, offload, part_elements=20_000)
        batches = local_batches(SAMPLES, 64, parallel)
        tokens = int(SAMPLES.loss_tokens.sum())
        if resume:
            with counted_empty_tensors() as made:
                load_checkpoint(resume, policy)
            assert sum(made) < 1000, "Megatron makes no empty state beside what was loaded"
            if offload:
                check_all_rests(policy)

        losses = []
        held_by_save = 0
        for step in range(SAVED if resume else 0, STEPS):
            if save and step == SAVED:
                held_by_save = storage_bytes(trainer_state(policy, is_loading=False)["optimizer"])
                save_checkpoint(save, policy, step, {})
            losses.append(policy.train_step(batches, mean_cross_entropy(tokens), 3e-3).sums["loss"])
        buckets = [bucket for buffer in policy.model[0].buffers for bucket in buffer.buckets]
        gaps = sum(len(bucket.grad_data) > bucket.numel_unpadded for bucket in buckets)
        return losses, gaps, held_by_save
    finally:
        distributed.shutdown()


@contextmanager
def counted_empty_tensors() -> Iterator[list[int]]:
    """Collect the elements of the tensors for which Megatron's optimizer calls ``torch.empty``."""
    made: list[int] = []
    torch_empty = torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        tensor = torch_empty(*size, **options)
        if sys._getframe(1).f_globals["__name__"] == distrib_optimizer.__name__:
            made.append(tensor.numel())
        return tensor

    torch.empty = empty  # type: ignore[assignment]
    try:
        yield made
    finally:
        torch.empty = torch_empty


def storage_bytes(state: Any) -> int:
    """Return the bytes of all tensors of a sharded state dict, memory that they share once."""
    storages = {}
    for sharded in nested_values(state):
        if isinstance(sharded, ShardedTensor):
            storage = sharded.data.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def check_all_rests(policy: trainer.PolicyTrainer) -> None:
    """Check that all state is where it rests, before any step."""
    for chained in policy.optimizer.chained_optimizers:
        for parameter, state in chained.optimizer.state.items():
            assert set(state) == {"exp_avg", "exp_avg_sq", "master_param"}
            for name, tensor in state.items():
                assert tensor is policy.offloaded._host[parameter, name]


def train_save_and_resume(rank: int, ports: list[int], root: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    as_on_a_gpu()
    data = ParallelConfig(world_size=2)
    context = ParallelConfig(world_size=2, context=2)
    losses, gaps, held_by_save = train(data, rank, ports[0], save=root)
    resumed = [train(parallel, rank, port, resume=latest_checkpoint(root))[0] for parallel, port in
               ((data, ports[1]), (context, ports[2]))]  # fmt: skip
    half = root.with_name(f"{root.name}_offloaded")
    offloaded = [
        train(data, rank, ports[3], save=half, offload=0.6)[0],
        train(data, rank, ports[4], resume=latest_checkpoint(half), offload=1.0)[0],
    ]
    return {
        "losses": losses,
        "gaps": gaps,
        "held_by_save": held_by_save,
        "resumed": resumed,
        "offloaded": offloaded,
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    ports = [free_port() for _ in range(5)]
    return run_distributed(train_save_and_resume, 2, ports, tmp_path_factory.mktemp("distributed"))


def test_a_resumed_distributed_optimizer_continues_the_same_curve(
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank in two_ranks:
        assert rank["gaps"] > 2  # which Megatron would stumble over
        assert rank["losses"][-1] < rank["losses"][0] - 0.5
        assert rank["resumed"][0] == rank["losses"][SAVED:]


def test_offloaded_state_learns_saves_and_resumes_as_any_other(
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank in two_ranks:
        assert rank["offloaded"][0] == rank["losses"]
        assert rank["offloaded"][1] == rank["losses"][SAVED:]


def test_its_state_reshards(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["resumed"][1] == pytest.approx(rank["losses"][SAVED:], rel=1e-2)  # bf16


def test_a_save_holds_the_state_of_all_parameters_on_every_rank(
    two_ranks: list[dict[str, Any]],
) -> None:
    """What the plan of a run counts, but for a bucket on its way."""
    inputs = MemoryInputs(TINY, ParallelConfig(world_size=2), OptimizerConfig(), tokens=64)
    parameters = sum(parameters_per_gpu(TINY, inputs.parallel, 0))
    predicted = host_memory_of_save(inputs, 0)
    # All of a model this small is one bucket of Megatron's usual size.
    on_the_way = parameters * (8 + SAVED_BYTES / 2)
    for rank in two_ranks:
        assert rank["held_by_save"] == pytest.approx(predicted - on_the_way, rel=0.01)
