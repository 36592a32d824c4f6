"""Trainer of ``benchmarks.sglang``: random weights on one or several ranks, without Ray."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.train.random_adapters import draw_adapted_model
from converters.gathering import GatheredWeights, WeightGathering
from converters.mapping import NamedTensor
from megatron_gptoss import distributed
from megatron_gptoss.config import AdapterConfig, ParallelConfig, Quantization
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.model import build_model
from rl_loop.cluster.placement import free_port
from rl_loop.engines.sglang.weight_endpoints import send_weights
from rl_loop.weight_sync.servers import SyncPlan


class RandomTrainer:
    """A model with random weights. Its experts are sharded over ``--expert-parallel`` ranks.

    Rank 0 is this process on the first GPU. It sends the weights. The other ranks are processes on
    the following GPUs. They take part in every gathering until ``close``.
    """

    def __init__(self, options: argparse.Namespace, config: GptOssModelConfig) -> None:
        self.config = config
        port = free_port()
        spawn = multiprocessing.get_context("spawn")
        self._others = [
            spawn.Process(target=_take_part, args=(options, config, rank, port), daemon=True)
            for rank in range(1, options.expert_parallel)
        ]
        for process in self._others:
            process.start()
        self._rank = _TrainerRank(options, config, 0, port)

    @property
    def model(self) -> torch.nn.Module:
        """Rank 0's part of the model."""
        return self._rank.model

    async def send(self, plan: SyncPlan) -> None:
        """Send all weights as the product's ranks do.

        The next call may follow after an error. Raises the errors of ``send_weights``.
        """
        weights = self._rank.begin_gathering(adapters_only=plan.adapters_only)
        try:
            await send_weights(_in_bf16(weights), self.config, plan)
        finally:
            # The other ranks still wait to send the rest after a failure.
            weights.finish()

    def weights(self) -> Iterator[NamedTensor]:
        """Yield all weights by Hugging Face name, in bf16 or as MXFP4 bytes.

        The caller must read the iterator to its end.
        """
        return _in_bf16(self._rank.begin_gathering())

    def close(self) -> None:
        """Stop the other ranks, which wait for the next gathering."""
        for process in self._others:
            process.kill()
            process.join()


class _TrainerRank:
    """One rank of the trainer, in a separate process except for rank 0."""

    def __init__(
        self, options: argparse.Namespace, config: GptOssModelConfig, rank: int, port: int
    ) -> None:
        """Join the other ranks and build this rank's part of the model. Collective."""
        ranks = options.expert_parallel
        parallel = ParallelConfig(world_size=ranks, expert=ranks)
        distributed.initialize(parallel, rank, port=port)
        rank_of_experts = options.expert_adapter_rank
        adapter = None
        if rank_of_experts is not None:
            # Attention has merged adapters, as in a run.
            adapter = AdapterConfig(expert_rank=rank_of_experts, merge_experts=False)
        self.model = random_model(config, parallel, options.quantization, adapter)
        self._gathering = WeightGathering(self.model, config)
        self._transposed = options.transport == "cuda_ipc"
        self._mxfp4_experts = options.quantization is not None

    def begin_gathering(self, *, adapters_only: bool = False) -> GatheredWeights:
        """Start to gather all weights on rank 0. Collective.

        Args:
            adapters_only: whether to leave out weights that training does not change.
        """
        return self._gathering.begin(
            transposed=self._transposed,
            mxfp4_experts=self._mxfp4_experts,
            adapters_only=adapters_only,
            paced=True,
        )


def _take_part(
    options: argparse.Namespace, config: GptOssModelConfig, rank: int, port: int
) -> None:
    """Run a rank that does not send to servers, until it or rank 0 is killed."""
    os.environ["LOCAL_RANK"] = str(rank)  # the number of its GPU
    trainer = _TrainerRank(options, config, rank, port)
    while True:
        trainer.begin_gathering().finish()


def random_model(
    config: GptOssModelConfig,
    parallel: ParallelConfig,
    quantization: Quantization | None,
    adapter: AdapterConfig | None = None,
) -> torch.nn.Module:
    """Return this rank's part of a bf16 model with normally distributed weights. Norms are 1."""
    model = build_model(
        config, parallel, torch.bfloat16, adapter=adapter, quantization=quantization
    )
    if adapter is not None:
        draw_adapted_model(model)
        return model

    # Replicated parameters are equal on all ranks. Experts differ.
    torch.manual_seed(0)
    device = next(model.parameters()).device
    of_experts = torch.Generator(device).manual_seed(1 + dist.get_rank())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1)
            elif "softmax_offset" in name:
                parameter.normal_(0, 1)
            elif ".experts." in name:
                parameter.normal_(0, 0.02, generator=of_experts)
            else:
                parameter.normal_(0, 0.02)
    return model


def _in_bf16(weights: GatheredWeights) -> Iterator[NamedTensor]:
    for name, tensor in weights:
        yield name, tensor if tensor.dtype == torch.uint8 else tensor.to(torch.bfloat16)
        del tensor  # or it would outlive its bucket
