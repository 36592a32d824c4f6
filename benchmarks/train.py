"""Training GPT-OSS on GPUs, measured. One case per call; under torchrun for several GPUs.

    python benchmarks/train.py log-probs
    python benchmarks/train.py step --layers 4 --length 4096 --sequences 4
    torchrun --nproc_per_node 4 benchmarks/train.py step --expert 4 --length 4096 --sequences 4 --micro-batches 2
    torchrun --nproc_per_node 4 benchmarks/train.py stock --expert 4
    torchrun --nproc_per_node 2 benchmarks/train.py check-overlap --layers 2 --experts 8

Weights are random (normal with std 0.02, biases and sinks 0, norms 1), tokens uniform, routing what follows from them.
``--also "step ARGUMENTS"`` runs a further case in the same processes. Prints a JSON object per case; ``--out FILE``
appends them as lines. MFU is taken against a matrix product measured beforehand.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_gptoss import distributed
from megatron_gptoss.config import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_gptoss.log_probs import log_probs_and_entropy
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import PackedBatch, Sample, build_batch
from megatron_gptoss.planning.flops import forward_flops, matmul_ceiling
from megatron_gptoss.scorer import gather_parameters
from megatron_gptoss.static_shape_p2p import StaticShapeP2P
from megatron_gptoss.trainer import LossOutput, PolicyTrainer

VOCAB = 201_088


def milliseconds(call: Callable[[], Any], rounds: int = 5) -> float:
    times = []
    for _ in range(rounds + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[1:])


def log_probs_case(tokens: int = 32_768, hidden_size: int = 2880) -> dict[str, float]:
    """Scoring and training through log_probs_and_entropy against the bare matrix products, 2,048 tokens at a time."""
    hidden = torch.randn(tokens, hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.nn.Parameter(0.02 * torch.randn(VOCAB, hidden_size, device="cuda", dtype=torch.bfloat16))
    buffers = {"main_grad": torch.zeros_like(weight, dtype=torch.float32), "grad_added_to_main_grad": False}
    for name, value in buffers.items():
        setattr(weight, name, value)
    labels = torch.randint(0, VOCAB, (tokens,), device="cuda")

    @torch.no_grad()
    def score() -> None:
        log_probs_and_entropy(hidden, weight, labels)

    @torch.no_grad()
    def score_products() -> None:
        for chunk in hidden.split(2048):
            chunk @ weight.t()

    def train() -> None:
        log_probs_and_entropy(hidden, weight, labels)[0].sum().backward()
        hidden.grad = weight.grad = None

    @torch.no_grad()
    def train_products(again: bool) -> None:
        for chunk in hidden.split(2048):
            logits = chunk @ weight.t()
            if again:
                logits = chunk @ weight.t()
            logits @ weight
            logits.t() @ chunk

    calls = {
        "score": score,
        "score_matmul": score_products,
        "train": train,
        "train_three_matmuls": lambda: train_products(False),
        "train_four_matmuls": lambda: train_products(True),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    result: dict[str, float] = {}
    for _ in range(5):  # in turn, so that clocks and temperature meet all of them
        for name, call in calls.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            times[name].append(milliseconds(call, 2))
            result[f"{name}_extra_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
    return result | {f"{name}_ms": median(values) for name, values in times.items()}


def random_weights(model: torch.nn.Module) -> None:
    """The same on all replicas; the shards of a tensor are the same on all tensor-parallel ranks, too."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    same = torch.Generator("cuda").manual_seed(stage)
    experts = torch.Generator("cuda").manual_seed(1000 * (parallel_state.get_expert_model_parallel_rank() + 1) + stage)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1)
            elif parameter.dim() == 1:
                parameter.zero_()
            else:
                parameter.normal_(0, 0.02, generator=experts if "experts" in name else same)


def batches(count: int, sequences: int, length: int, rank: int) -> list[PackedBatch]:
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randint(0, VOCAB, (count, sequences, length + 1), generator=generator).tolist()
    return [build_batch([Sample(ids, [0] + [1] * length) for ids in row], align=8) for row in rows]


def sft_loss(tokens: int) -> Callable[..., LossOutput]:
    def loss(log_probs: torch.Tensor, entropy: torch.Tensor, batch: PackedBatch) -> LossOutput:
        total = -(log_probs * batch.loss_mask).sum() / tokens
        return LossOutput(total, {"loss": total})

    return loss


class ExpertLoad:
    """Tokens per expert of every layer, counted by hooks on the routers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.counts: list[torch.Tensor] = []
        self.handles = [
            module.register_forward_hook(lambda _m, _i, out: self.counts.append(out[1].sum(0).detach()))
            for module in model.modules()
            if type(module).__name__ == "GptOssRouter"
        ]

    def result(self, expert_parallel: int) -> dict[str, float]:
        for handle in self.handles:
            handle.remove()
        counts = torch.stack(self.counts).float()
        dist.all_reduce(counts, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        ranks = counts.view(len(counts), expert_parallel, -1).sum(-1)
        return {
            "expert_load_max_over_mean": float((counts.amax(-1) / counts.mean(-1)).mean()),
            "rank_load_max_over_mean": float((ranks.amax(-1) / ranks.mean(-1)).mean()),
        }


def measure_steps(step: Callable[[], Any], count: int, tokens_per_gpu: int, flops: float, ceiling: float) -> dict:
    times = []
    for i in range(count):
        if i == 2:  # as rl_loop.trainer.worker does
            gc.collect()
            gc.freeze()
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    seconds = median(times[2:])
    return {
        "seconds": seconds,
        "all_seconds": [round(x, 4) for x in times],
        "tokens_per_second_per_gpu": tokens_per_gpu / seconds,
        "tflops_per_gpu": flops / seconds / 1e12,
        "mfu": flops / seconds / 1e12 / ceiling,
        "ceiling_tflops": ceiling,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
    }


def profile_step(step: Callable[[], Any], path: Path) -> None:
    """Write device time and count of every kernel of one step, longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        step()
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        kernels = [event for event in trace.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
        kernels.sort(key=lambda event: -event.self_device_time_total)
        rows = [f"{e.self_device_time_total / 1e3:9.2f} ms {e.count:6d} x {e.key[:160]}" for e in kernels]
        path.write_text("\n".join(rows) + "\n")


def release(trainer: PolicyTrainer) -> None:
    """Give back what the next case needs, whatever still refers to it."""
    gc.unfreeze()
    buffers = [b for part in trainer.model for b in part.buffers + part.expert_parallel_buffers]
    tensors = [b.grad_data for b in buffers] + [b.param_data for b in buffers]
    for part in trainer.optimizer.chained_optimizers:
        tensors += [tensor for state in part.optimizer.state.values() for tensor in state.values()]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            tensor.untyped_storage().resize_(0)


def attention(name: str) -> dict[str, Any]:
    if name != "transformer_engine":
        return {"attention_backend_name": name}
    from transformer_engine_attention import TransformerEngineAttention

    return {"core_attention": TransformerEngineAttention}


def gather_before_forward(trainer: PolicyTrainer) -> None:
    """Parameters whole before the next forward pass begins, instead of under it."""
    for part in trainer.model:
        part.disable_forward_pre_hook(param_sync=False)
        part.ddp_config.overlap_param_gather = False


@contextmanager
def messages(name: str) -> Iterator[None]:
    """Between pipeline stages."""
    ours = StaticShapeP2P._communicate_shapes
    if name == "megatron":
        StaticShapeP2P._communicate_shapes = P2PCommunicator._communicate_shapes  # type: ignore[method-assign]
    yield
    StaticShapeP2P._communicate_shapes = ours  # type: ignore[method-assign]


def step_case(args: argparse.Namespace, ceiling: float) -> dict[str, Any]:
    model_config = ModelConfig(num_layers=args.layers, num_experts=args.experts)
    parallel = ParallelConfig(
        world_size=dist.get_world_size(), expert=args.expert, context=args.context, tensor=args.tensor,
        pipeline=args.pipeline, virtual_pipeline=args.virtual_pipeline, last_stage_layers=args.last_stage_layers,
        recompute=tuple(args.recompute), recompute_layers=args.recompute_layers,
        expert_dispatcher=args.dispatcher,
    )  # fmt: skip
    model = build_model(
        model_config, parallel, torch.bfloat16, moe_router_force_load_balancing=args.balanced,
        batch_p2p_sync=args.messages == "megatron", **attention(args.attention), **json.loads(args.config),
    )  # fmt: skip
    random_weights(model)
    optimizer = OptimizerConfig(gradient_dtype=args.gradients, moment_dtype=args.moments, offload=args.offload)
    trainer = PolicyTrainer(model, optimizer)
    if args.gather == "before":
        gather_before_forward(trainer)
    data_rank, data_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    rows = batches(args.micro_batches, args.sequences, args.length, data_rank)
    tokens = data_size * sum(row.tokens for row in rows)
    flops = 3 * forward_flops(model_config, [args.length] * args.sequences * args.micro_batches)
    flops /= parallel.context * parallel.tensor * parallel.pipeline
    losses: list[float] = []
    parts: list[dict[str, float]] = []

    def step() -> None:
        statistics = trainer.train_step(rows, sft_loss(tokens), 1e-5)
        losses.append(statistics.sums["loss"])
        parts.append(statistics.seconds_of)

    with messages(args.messages):
        result = measure_steps(step, args.steps, tokens // dist.get_world_size(), flops, ceiling)
    if args.profile:
        profile_step(step, args.profile)
    load = ExpertLoad(model)
    trainer.score(rows)
    torch.cuda.reset_peak_memory_stats()
    score = measure_steps(lambda: trainer.score(rows), 3, tokens // dist.get_world_size(), flops / 3, ceiling)
    parameters = sum(p.numel() for p in model.parameters())
    release(trainer)
    return {
        **result,
        **load.result(args.expert),
        "score_seconds": score["seconds"],
        "score_peak_gb": score["peak_gb"],
        "parameters_per_gpu": parameters,
        "seconds_of": {part: median(step[part] for step in parts[2 : args.steps]) for part in parts[0]},
        "losses": losses,
    }


def check_overlap_case(args: argparse.Namespace, ceiling: float) -> dict[str, Any]:
    """Three steps and a score right after them, with weights gathered before the next forward pass (twice, for the
    noise of the run), under it, and, as the control that must stand out, never."""
    parallel = ParallelConfig(world_size=dist.get_world_size(), expert=args.expert)
    model_config = ModelConfig(num_layers=args.layers, num_experts=args.experts)
    rows = batches(args.micro_batches, args.sequences, args.length, parallel_state.get_data_parallel_rank())
    tokens = parallel_state.get_data_parallel_world_size() * sum(row.tokens for row in rows)
    result: dict[str, Any] = {}
    reference = torch.empty(0)
    for mode in ("before", "before_again", "under", "never"):
        model = build_model(model_config, parallel, torch.bfloat16)
        random_weights(model)
        trainer = PolicyTrainer(model, OptimizerConfig())
        trainer.model[0].broadcast_params()
        if mode != "under":
            gather_before_forward(trainer)
            trainer.model[0].ddp_config.overlap_param_gather = mode == "never"
        losses, seconds = [], []
        for _ in range(3):
            torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            losses.append(trainer.train_step(rows, sft_loss(tokens), 1e-3).sums["loss"])
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        scores = torch.cat(trainer.score(rows))
        if mode == "before":
            reference = scores
        if mode != "never":
            gather_parameters(trainer.model)
        replicas_equal = True
        for parameter in model.parameters():
            apart = not getattr(parameter, "allreduce", True)
            group = (
                parallel_state.get_expert_data_parallel_group() if apart else parallel_state.get_data_parallel_group()
            )
            sums = [torch.zeros((), dtype=torch.double, device="cuda") for _ in range(group.size())]
            dist.all_gather(sums, parameter.detach().double().square().sum(), group=group)
            replicas_equal &= len(set(torch.stack(sums).tolist())) == 1
        result[mode] = {
            "losses": losses,
            "seconds": seconds,
            "score_difference": float((scores - reference).abs().mean()),
            "replicas_equal": replicas_equal,
        }
        release(trainer)
        del trainer, model
        gc.collect()
        torch.cuda.empty_cache()
    return result


def stock_case(args: argparse.Namespace, ceiling: float) -> dict[str, Any]:
    """Megatron as its examples run GPT-OSS: unpacked, Transformer Engine attention, logits held, one sequence a time.

    The router's bias is bf16 there, which is numerically wrong but costs no time.
    """
    import contextlib

    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer

    from megatron_gptoss.transformer_config import build_transformer_config

    model_config = ModelConfig(num_layers=args.layers, num_experts=args.experts)
    parallel = ParallelConfig(world_size=dist.get_world_size(), expert=args.expert)
    config = build_transformer_config(
        model_config, parallel, torch.bfloat16, activation_func=quick_gelu, bias_activation_fusion=True,
        calculate_per_token_loss=False, moe_router_force_load_balancing=args.balanced, perform_initialization=False,
    )  # fmt: skip
    yarn = {
        "yarn_rotary_scaling_factor": 32.0, "yarn_original_max_position_embeddings": 4096, "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0, "yarn_mscale": None, "yarn_mscale_all_dim": None,
        "yarn_correction_range_round_to_int": False, "position_embedding_type": "yarn",
    }  # fmt: skip
    for key, value in yarn.items():
        setattr(config, key, value)
    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=args.experts, moe_grouped_gemm=True)
    module = GPTModel(
        config, spec, VOCAB, args.length, position_embedding_type="yarn", rotary_base=150_000, parallel_output=False
    )
    module = module.cuda().bfloat16()
    random_weights(module)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, grad_reduce_in_fp32=True
    )
    model = DistributedDataParallel(config, ddp, module)
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam", lr=1e-5, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
        ),
        [model],
    )
    ids = torch.randint(0, VOCAB, (args.micro_batches, 1, args.length), device="cuda")
    positions = torch.arange(args.length, device="cuda")[None]

    def step() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        for i, row in enumerate(ids):
            with model.no_sync() if i < len(ids) - 1 else contextlib.nullcontext():
                model(row, positions, None, labels=row.roll(-1, 1)).float().mean().backward()
        finalize_model_grads([model])
        optimizer.step()

    flops = 3 * forward_flops(model_config, [args.length] * args.micro_batches)
    return measure_steps(step, args.steps, args.micro_batches * args.length, flops, ceiling)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["log-probs", "step", "stock", "check-overlap"])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--length", type=int, default=4096, help="tokens of every sequence")
    parser.add_argument("--sequences", type=int, default=1, help="sequences packed into one micro-batch")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--expert", type=int, default=1, help="expert parallel size")
    parser.add_argument("--context", type=int, default=1, help="context parallel size")
    parser.add_argument("--tensor", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    parser.add_argument("--virtual-pipeline", type=int, default=1, help="chunks of layers per stage")
    parser.add_argument("--gather", default="under", choices=["under", "before"], help="parameters: the forward pass")
    parser.add_argument("--messages", default="ours", choices=["ours", "megatron"], help="between pipeline stages")
    parser.add_argument("--moments", default="fp32")
    parser.add_argument("--gradients", default="fp32")
    parser.add_argument("--last-stage-layers", type=int, help="pipeline: fewer than the other stages have")
    parser.add_argument("--recompute", nargs="*", default=[])
    parser.add_argument("--recompute-layers", type=int, help="of a chunk; the others keep what they computed")
    parser.add_argument("--attention", default="auto", help="a backend of ours, or transformer_engine")
    parser.add_argument("--dispatcher", default="alltoall", help="or deepep")
    parser.add_argument("--offload", type=float, default=0.0, help="share of the optimizer's state in host memory")
    parser.add_argument("--balanced", action="store_true", help="route at random and evenly, for comparison only")
    parser.add_argument("--config", default="{}", help="JSON of further TransformerConfig fields")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--profile", type=Path, help="file for the device times of one step by kernel")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--also", action="append", default=[], help="a further case, as one string")
    return parser


def run(args: argparse.Namespace, port: int) -> None:
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    started = time.perf_counter()
    parallel = {name: getattr(args, name) for name in ("expert", "context", "tensor", "pipeline", "virtual_pipeline")}
    distributed.initialize(ParallelConfig(world_size=world_size, **parallel), rank, port=port)
    torch.cuda.reset_peak_memory_stats()
    cases = {"step": step_case, "stock": stock_case, "check-overlap": check_overlap_case}
    cases["log-probs"] = lambda *_: log_probs_case()
    result = cases[args.case](args, matmul_ceiling())
    given = {k: v for k, v in vars(args).items() if not isinstance(v, Path) and k != "also"}
    if rank == 0:
        line = json.dumps(
            {"arguments": given, "gpus": world_size, **result, "wall_seconds": time.perf_counter() - started}
        )
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")
    gc.collect()
    torch.cuda.empty_cache()
    dist.barrier()
    distributed.shutdown()


def main() -> None:
    args = arguments().parse_args()
    run(args, port=29_777)
    for index, further in enumerate(args.also):
        out = ["--out", str(args.out)] if args.out else []
        run(arguments().parse_args([*shlex.split(further), *out]), port=29_778 + index)


if __name__ == "__main__":
    main()
