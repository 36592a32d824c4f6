"""Checkpoints of the distributed optimizer with Transformer Engine's Adam.

A trainer has both only on GPUs. Here, Megatron's part runs on two gloo ranks. Adam is a mock with
the interface and the state of Transformer Engine's: for each fp32 master weight, the half that its
bf16 weight lacks. With two GPUs, Transformer Engine's Adam and NCCL are used.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.optimizer import distrib_optimizer, optimizer_config

from converters.model_weights import load_hf_weights
from megatron_gptoss import distributed, trainer
from megatron_gptoss import optimizer as gptoss_optimizer
from megatron_gptoss.checkpoint import state as checkpoint_state
from megatron_gptoss.checkpoint import streamed_state
from megatron_gptoss.checkpoint import writer as checkpoint_writer
from megatron_gptoss.checkpoint.directory import latest_checkpoint
from megatron_gptoss.checkpoint.gathered_state import separate_tensors
from megatron_gptoss.checkpoint.loader import load_checkpoint
from megatron_gptoss.checkpoint.megatron_workarounds import lower_half, master_weight
from megatron_gptoss.checkpoint.state import trainer_state
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.optimizer_offload import OffloadedState
from megatron_gptoss.planning import state_memory
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.allocations import Allocations
from tests.support.megatron_gptoss.reference import (
    TINY,
    documents,
    hf_model,
    local_batches,
    mean_cross_entropy,
    save_checkpoint,
)

SAMPLES = documents([30, 5, 18, 26, 11, 2, 23, 9], seed=3)
STEPS = 4
SAVED = 2
BUCKET = 8000
"""Number of parameters that fill a bucket."""
LOADED = 480_000
"""Bytes of optimizer state that are loaded at a time. The state of a rank has some megabytes."""


class FusedAdam(torch.optim.Optimizer):
    """AdamW of Transformer Engine with its special behavior of ``state_dict``."""

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
    """Give the trainers of this process the distributed optimizer, buckets and ``FusedAdam``."""
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
    buckets = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "bucket_size": BUCKET,
    }
    gptoss_optimizer.DistributedDataParallelConfig = lambda **given: data_parallel(
        **given | buckets
    )  # type: ignore
    precision = {
        "use_distributed_optimizer": True,
        **gptoss_optimizer.precision_settings(OptimizerConfig()),
    }
    gptoss_optimizer.MegatronOptimizerConfig = lambda **given: optimizer(**given | precision)  # type: ignore


@dataclass
class SaveMemory:
    """Bytes of host memory on one rank during a save."""

    gathered: int
    """Gathered optimizer state."""
    gathering: int
    """Peak during the gathering."""
    written: int
    """State and weights during the write of the checkpoint."""
    saving: int
    """Peak before the write."""


def train(
    parallel: ParallelConfig,
    rank: int,
    port: int,
    save: Path | None = None,
    resume: Path | None = None,
    offload: float = 0.0,
) -> tuple[list[float], int, SaveMemory | None]:
    """Return losses, the number of buckets followed by a gap, and the memory of a save."""
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
                memory_of_load(resume, policy)
            assert sum(made) < 1000, "Megatron makes no empty state beside what was loaded"
            if offload:
                check_all_rests(policy)

        losses = []
        memory = None
        for step in range(SAVED if resume else 0, STEPS):
            if save and step == SAVED:
                if not offload:
                    check_gathers_what_megatron_does(policy, rank)
                    memory = memory_of_save(policy, save.with_name(f"{save.name}_measured"))
                save_checkpoint(save, policy, step, {})
            losses.append(policy.train_step(batches, mean_cross_entropy(tokens), 3e-3).sums["loss"])
        buckets = [bucket for buffer in policy.model[0].buffers for bucket in buffer.buckets]
        gaps = sum(len(bucket.grad_data) > bucket.numel_unpadded for bucket in buckets)
        return losses, gaps, memory
    finally:
        distributed.shutdown()


@contextmanager
def counted_empty_tensors() -> Iterator[list[int]]:
    """Collect the sizes of the tensors for which Megatron's optimizer calls ``torch.empty``."""
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


def memory_of_load(checkpoint: Path, policy: trainer.PolicyTrainer) -> None:
    """Load a checkpoint, and check that this takes little additional memory."""
    weights = sum(parameter.nbytes for parameter in policy.module.parameters())
    gc.collect()
    # The second rank has fewer parts than the first.
    limit = LOADED * (1 + 2 * torch.distributed.get_rank())
    streamed_state.LOADED_BYTES = limit
    with Allocations() as loading:
        load_checkpoint(checkpoint, policy)
        gc.collect()
        kept = loading.live

    # The load temporarily holds new and old weights. The complete optimizer state would be 6 times
    # larger.
    largest = max(12 * parameter.numel() for parameter in policy.module.parameters())
    assert loading.peak - kept < weights + limit + largest


def memory_of_save(policy: trainer.PolicyTrainer, root: Path) -> SaveMemory:
    """Save a checkpoint, and return the memory that the save needs."""
    gc.collect()
    with Allocations() as gathering:
        state = trainer_state(policy, is_loading=False)
        gc.collect()
        gathered = gathering.live
    del state

    # With a GPU, Megatron's copies are on the host already. Here it would also copy weights,
    # because they are parts of a buffer.
    copy_to_host = checkpoint_writer._copy_to_host
    checkpoint_writer._copy_to_host = lambda file: file
    writer = checkpoint_writer.CheckpointWriter(root)
    try:
        with Allocations() as saving:
            writer.start(policy, SAVED, {})
            gc.collect()
            written = saving.live
        writer.finish()
    finally:
        checkpoint_writer._copy_to_host = copy_to_host
    return SaveMemory(gathered, gathering.peak, written, saving.peak)


def check_gathers_what_megatron_does(policy: trainer.PolicyTrainer, rank: int) -> None:
    """Compare the gathered tensors with those that Megatron gathers."""
    tensors = tensors_to_write(policy)
    gather_on_writing_ranks = checkpoint_state.gather_on_writing_ranks
    checkpoint_state.gather_on_writing_ranks = lambda _: nullcontext()  # type: ignore[assignment]
    try:
        expected = tensors_to_write(policy)
    finally:
        checkpoint_state.gather_on_writing_ranks = gather_on_writing_ranks

    assert tensors.keys() == expected.keys()
    assert rank > 0 or tensors
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


def tensors_to_write(policy: trainer.PolicyTrainer) -> dict[Any, torch.Tensor]:
    """Return the optimizer's tensors that this rank writes, by name and offset."""
    state = trainer_state(policy, is_loading=False)["optimizer"]
    return {
        (sharded.key, sharded.global_offset): sharded.data
        for sharded in nested_values(state)
        if isinstance(sharded, ShardedTensor) and is_main_replica(sharded.replica_id)
    }


def check_all_rests(policy: trainer.PolicyTrainer) -> None:
    """Check that the offloaded state is on the host before any step."""
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
    losses, gaps, memory = train(data, rank, ports[0], save=root)
    resumed = [train(parallel, rank, port, resume=latest_checkpoint(root))[0] for parallel, port in
               ((data, ports[1]), (context, ports[2]))]  # fmt: skip
    half = root.with_name(f"{root.name}_offloaded")
    offloaded = [
        train(data, rank, ports[3], save=half, offload=0.6)[0],
        train(data, rank, ports[4], resume=latest_checkpoint(half), offload=1.0)[0],
    ]
    expert = ParallelConfig(world_size=2, expert=2)
    apart = root.with_name(f"{root.name}_experts_apart")
    losses_apart, _, memory_apart = train(expert, rank, ports[5], save=apart)
    resumed_apart = train(expert, rank, ports[6], resume=latest_checkpoint(apart))[0]
    return {
        "losses": losses,
        "gaps": gaps,
        "memory": [(data, memory), (expert, memory_apart)],
        "resumed": resumed,
        "offloaded": offloaded,
        "apart": (losses_apart, resumed_apart),
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    ports = [free_port() for _ in range(7)]
    return run_distributed(train_save_and_resume, 2, ports, tmp_path_factory.mktemp("distributed"))


def test_resumed_distributed_optimizer_continues_same_curve(
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank in two_ranks:
        assert rank["gaps"] > 2  # Megatron alone would fail with these gaps
        assert rank["losses"][-1] < rank["losses"][0] - 0.5
        assert rank["resumed"][0] == rank["losses"][SAVED:]


def test_offloaded_state_learns_saves_and_resumes_as_any_other(
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank in two_ranks:
        assert rank["offloaded"][0] == rank["losses"]
        assert rank["offloaded"][1] == rank["losses"][SAVED:]


def test_distributed_optimizer_state_reshards(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["resumed"][1] == pytest.approx(rank["losses"][SAVED:], rel=1e-2)  # bf16


def test_experts_with_separate_optimizer_resume(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        losses, resumed = rank["apart"]
        assert resumed == losses[SAVED:]


def test_rank_needs_host_memory_for_its_written_state(
    two_ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of a run predicts this memory. The test uses the buckets of this file."""
    monkeypatch.setattr(state_memory, "bucket_parameters", lambda _: BUCKET)
    for number, rank in enumerate(two_ranks):
        for parallel, memory in rank["memory"]:
            inputs = MemoryInputs(TINY, parallel, OptimizerConfig(), tokens=64)
            predicted = state_memory.host_memory_of_rank(inputs, number)
            # The master weights of one parameter at a time are made, here on the host instead of
            # the GPU. gloo's thread may also still hold the last message. Megatron alone needs 50
            # times more memory on the second rank.
            assert memory.gathering <= 2 * predicted
            if number == 0:
                # Router biases are fp32 and have no 2-byte part.
                assert memory.written == pytest.approx(predicted, rel=0.01)
                assert memory.saving < 1.02 * predicted, "nothing is there twice"
                assert memory.gathered == pytest.approx(predicted * 12 / 14, rel=0.01)

    # The second rank is not the first of any group, except that it alone has its experts.
    (_, first), (_, first_apart) = two_ranks[0]["memory"]
    (_, second), (_, second_apart) = two_ranks[1]["memory"]
    assert second.gathered == second.written == 0
    assert second.gathering < 0.3 * first.gathering
    assert 0 < second_apart.gathered < 0.7 * first_apart.gathered


def test_a_tensor_that_was_not_gathered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    data = torch.empty(4, device="meta")
    replica = ShardedTensor.from_rank_offsets("moment", data, replica_id=(0, 0, 1))
    separate_tensors({"param_state": {0: {"exp_avg": replica}}})
    main = ShardedTensor.from_rank_offsets("moment", data, replica_id=(0, 0, 0))
    with pytest.raises(RuntimeError, match="moment: rank 3 must write it but has not gathered it"):
        separate_tensors({"param_state": {0: {"exp_avg": main}}})


# Transformer Engine supports these widths. The model has 20 million parameters.
WIDE = GptOssModelConfig(
    num_layers=3, num_experts=8, experts_per_token=8, hidden_size=512, intermediate_size=512, num_attention_heads=16,
    num_key_value_heads=2, vocab_size=1024,
)  # fmt: skip
LAYOUTS_ON_GPUS = {"data": {}, "expert": {"expert": 2}, "tensor": {"tensor": 2, "expert": 2}}
OFFLOADED = {"data": 0.0, "expert": 1.0, "tensor": 0.0}


def train_on_two_gpus(
    rank: int, layout: str, port: int, root: Path, *, resumes: bool
) -> list[float]:
    """Return the losses of the steps before and after the checkpoint, or only after it."""
    os.environ["LOCAL_RANK"] = str(rank)
    parallel = ParallelConfig(world_size=2, **LAYOUTS_ON_GPUS[layout])
    distributed.initialize(parallel, rank, port=port)
    try:
        model = build_model(WIDE, parallel, torch.bfloat16)
        load_hf_weights(model, WIDE, hf_model(WIDE, std=0.05).state_dict().__getitem__)
        policy = trainer.PolicyTrainer(model, OptimizerConfig())
        if OFFLOADED[layout]:
            policy.offloaded = OffloadedState(policy.optimizer, OFFLOADED[layout])
        samples = documents([300, 50, 180, 260, 110, 20, 230, 90], seed=3, vocab_size=1024)
        batches = local_batches(samples, 320, parallel)
        loss = mean_cross_entropy(int(samples.loss_tokens.sum()))
        if resumes:
            load_checkpoint(latest_checkpoint(root), policy)
            return [policy.train_step(batches, loss, 1e-4).sums["loss"] for _ in range(3)]

        losses = [policy.train_step(batches, loss, 1e-4).sums["loss"] for _ in range(3)]
        if not OFFLOADED[layout]:
            check_gathers_what_megatron_does(policy, rank)
        save_checkpoint(root, policy, 3, {})
        return losses + [policy.train_step(batches, loss, 1e-4).sums["loss"] for _ in range(3)]
    finally:
        distributed.shutdown()


def save_and_resume_on_two_gpus(
    rank: int, ports: list[int], root: Path
) -> dict[str, tuple[list[float], list[float]]]:
    port = iter(ports)
    return {
        layout: (
            train_on_two_gpus(rank, layout, next(port), root / layout, resumes=False),
            train_on_two_gpus(rank, layout, next(port), root / layout, resumes=True),
        )
        for layout in LAYOUTS_ON_GPUS
    }


@pytest.mark.gpu
def test_two_gpus_gather_like_megatron_and_resume_equally(tmp_path: Path) -> None:
    """One layout is offloaded, so its gathered state comes from host memory."""
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than 2 GPUs")
    ports = [free_port() for _ in range(2 * len(LAYOUTS_ON_GPUS))]
    for ranks in run_distributed(save_and_resume_on_two_gpus, 2, ports, tmp_path):
        for layout, (losses, resumed) in ranks.items():
            print(layout, losses, resumed)
            assert losses[-1] < losses[0] - 0.05, layout
            # A GPU may sum gradients in another order.
            assert resumed == pytest.approx(losses[3:], rel=1e-4), layout


def test_state_is_loaded_in_parts_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_state, "LOADED_BYTES", 100)
    sizes = [40, 60, 10, 250, 30, 90, 5]
    states = [SimpleNamespace(nbytes=size) for size in sizes]
    parts = streamed_state._parts(states)
    assert [state.nbytes for part in parts for state in part] == sizes
    assert [[state.nbytes for state in part] for part in parts] == [
        [40, 60],
        [10],
        [250],
        [30],
        [90, 5],
    ]
    assert streamed_state._parts([]) == []
