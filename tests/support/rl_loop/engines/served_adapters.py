"""Trains unmerged adapters, sends them to a server's model, and compares the log-probs of both.

The trainer is a small fp32 model on a base in MXFP4. The server has transformers' attention, and experts with the
plugin's storage and kernels in Triton's interpreter. Prints the mean and the largest difference of log-probs as JSON:

    TRITON_INTERPRET=1 PYTHONPATH=rl_loop/engines/sglang/plugin:. \\
        python -m tests.support.rl_loop.engines.served_adapters
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import json
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gptoss_adapted_moe as adapted
import gptoss_small_batch_moe as matmul
import torch
import triton
import triton.language as tl  # noqa: F401 the interpreter looks for it
from gptoss_routing_kernels import max_blocks, route
from torch import Tensor

from converters.gathering import WeightGathering
from megatron_gptoss import distributed
from megatron_gptoss.config import AdapterConfig, OptimizerConfig, ParallelConfig
from megatron_gptoss.layers.adapters import named_adapters
from megatron_gptoss.packing import build_batch
from megatron_gptoss.trainer import PolicyTrainer
from rl_loop.engines.sglang.server_actors import adapter_environment
from tests.support.distributed import free_port
from tests.support.megatron_gptoss.adapted import MODEL, adapted_model
from tests.support.megatron_gptoss.reference import (
    documents,
    hf_logits,
    hf_model,
    mean_cross_entropy,
)
from tests.support.rl_loop.engines.adapted_experts import interpreted_bf16
from tests.support.rl_loop.engines.expert_matmul_interpreted import Ragged, interpreted_values
from tests.support.rl_loop.mxfp4_server import ServedModel, SyncedModel

ADAPTER = AdapterConfig(
    rank=8,
    alpha=16,
    expert_rank=4,
    targets=("q", "k", "v", "o", "experts", "router"),
    merge_experts=False,
)
SAMPLES = documents([18, 9])
STEPS = 2
TOKENS = int(SAMPLES.loss_tokens.sum())


@triton.jit
def unrounded(x):
    """Replace ``to_bf16``, so that results differ from the trainer's only in the order of fp32 sums."""
    return x


class ServedExperts(torch.nn.Module):
    """MLP of a transformers layer with the experts of a server."""

    def __init__(self, router: torch.nn.Module, layer: Any) -> None:
        super().__init__()
        self.router = router
        self.layer = layer

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        top_k = MODEL.experts_per_token
        x = hidden_states.flatten(0, 1)
        logits = torch.nn.functional.linear(x, self.router.weight, self.router.bias)
        routes = route(logits, top_k)
        data = SimpleNamespace(
            expt_data=Ragged(routes),
            n_expts_tot=MODEL.num_experts,
            n_expts_act=top_k,
            n_blocks=lambda entries, rows: max_blocks(entries, MODEL.num_experts),
        )
        inner = self.layer.w13_weight_bias.shape[1] // 2
        hidden = x.new_full((len(x) * top_k, inner), torch.nan)
        of_experts = x.new_full((len(x) * top_k, x.shape[1]), torch.nan)
        swiglu = matmul.Swiglu(alpha=1.702, limit=7.0)
        self._multiply("w13", x, data, routes, hidden, swiglu=swiglu)
        self._multiply("w2", hidden, data, routes, of_experts, gates=routes.gates)
        return of_experts.view(-1, top_k, x.shape[1]).sum(1).view_as(hidden_states), None

    def _multiply(
        self, name: str, x: Tensor, data: Any, routes: Any, out: Tensor, **kind: Any
    ) -> None:
        """Multiply as ``with_small_batch_kernel`` does, with adapters in a dtype of the interpreter."""
        method = self.layer.quant_method
        config = getattr(method, f"{name}_precision_config")
        adapter = getattr(config, adapted.ADAPTER)
        matmul.multiply(
            x,
            getattr(method, f"{name}_weight_triton_tensor").storage.data.mT,
            config.weight_scale.storage.data.mT,
            getattr(self.layer, f"{name}_weight_bias"),
            data,
            routes.by_expert,
            out,
            adapter=replace(adapter, a=adapter.a.float(), b=adapter.b.float()),
            **kind,
        )


class Server:
    """A server's model. Its experts are those that the plugin has loaded."""

    def __init__(self) -> None:
        self.served = ServedModel(MODEL)
        self.synced = SyncedModel(self.served)
        self.model = hf_model(MODEL)
        for index, layer in enumerate(self.model.model.layers):
            experts = self.served.get_submodule(f"model.layers.{index}.mlp.experts")
            layer.mlp = ServedExperts(layer.mlp.router, experts)

    @torch.no_grad()
    def load(self, sent: dict[str, Tensor], *, adapters_only: bool) -> None:
        """Receive a sync, which must be complete."""
        self.synced.begin_sync()
        parameters = dict(self.model.named_parameters())
        for name, tensor in self.synced.load_experts(sent.items()):
            parameters[name].copy_(tensor)
        self.synced.end_sync(len(sent) if adapters_only else None)

    @torch.no_grad()
    def log_probs(self) -> Tensor:
        labels = torch.cat([torch.tensor(row[1:]).long() for row in SAMPLES.rows("token_ids")])
        return hf_logits(self.model, SAMPLES).log_softmax(-1).gather(1, labels[:, None])[:, 0]


def gaps(server: Server, trained: Tensor, to_bf16: Any) -> dict[str, float]:
    """Return the differences of log-probs if the server's kernels round with ``to_bf16``."""
    for module in (matmul, adapted):
        module.to_bf16 = to_bf16
    difference = (server.log_probs() - trained).abs()
    return {"mean": float(difference.mean()), "largest": float(difference.max())}


def main() -> None:
    matmul.scaled_values = interpreted_values
    os.environ |= adapter_environment(MODEL, ADAPTER)
    distributed.initialize(ParallelConfig(), port=free_port())
    model = adapted_model(ParallelConfig(), ADAPTER, quantization="mxfp4", moe_grouped_gemm=True)
    trainer = PolicyTrainer(model, OptimizerConfig())
    gathering = WeightGathering(model, MODEL)
    batch = build_batch(SAMPLES)
    server = Server()

    found: dict[str, dict[str, float]] = {}
    for step in range(STEPS):
        trainer.train_step([batch], mean_cross_entropy(TOKENS), learning_rate=3e-3)
        # Servers hold bf16. A bf16 trainer's adapters have no other values.
        with torch.no_grad():
            for _, adapter in named_adapters(model):
                for factor in adapter.parameters():
                    factor.copy_(factor.bfloat16())
        if step == 1:
            found["before the sync"] = gaps(server, trainer.score([batch])[0], unrounded)
        sent = gathering.begin(mxfp4_experts=True, adapters_only=step > 0)
        server.load({name: tensor.clone() for name, tensor in sent}, adapters_only=step > 0)
        trained = trainer.score([batch])[0]
        found[f"step {step}"] = gaps(server, trained, unrounded)
    found["rounded"] = gaps(server, trained, interpreted_bf16)
    distributed.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
