"""Speed and memory of training GPT-OSS on GPUs, one case per call.

    python -m benchmarks.train log-probs
    python -m benchmarks.train step --layers 4 --length 4096 --sequences 4
    torchrun --nproc_per_node 4 -m benchmarks.train step --expert 4 --sequences 4 --micro-batches 2
    torchrun --nproc_per_node 4 -m benchmarks.train stock --expert 4
    python -m benchmarks.train stock --packed --layers 4 --sequences 2 --micro-batches 2 \\
        --also "check-stock --layers 4 --sequences 2"
    torchrun --nproc_per_node 2 -m benchmarks.train check-overlap --layers 2 --experts 8
    python -m benchmarks.train table --out FILE
    python -m benchmarks.train memory --layers 12 --moments bf16 --gradients bf16 --offload 1 \\
        --recompute moe_act layernorm --sequences 4 --micro-batches 4
    torchrun --nproc_per_node 8 -m benchmarks.train step --tiny --layers 2 --experts 8 --expert 8

Needs one GPU, or several with torchrun. ``step --tiny`` has small sizes and also runs on CPUs, as a
test of the command, without MFU and memory.

Weights are random (normal with std 0.02, biases and sinks 0, norms 1). Tokens are uniform, and
routing follows from them. ``--also "step ARGUMENTS"`` runs another case in the same processes.
Prints a JSON object per case. ``--out FILE`` appends the objects as lines, and ``table`` converts
FILE to a Markdown table. MFU is relative to a matrix product that is measured first.

- ``step`` also reports the fraction of time that the computing stream waits for the experts'
  all-to-all, including slower ranks. It adds the predictions of ``gptoss plan``: seconds, this
  fraction, and tensors of the update.
- ``stock`` is Megatron with its own layers and Transformer Engine's attention, as Megatron-Bridge
  runs it. With ``--packed``, a row has ``--sequences`` sequences instead of one. If the case cannot
  run on one GPU, its result has the reason, such as missing memory.
- ``check-stock`` compares its log-probs with ours, for equal weights and a row of ``--sequences``
  different sequences.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from benchmarks.harness import median_milliseconds, reset_peak
from benchmarks.train.release import release
from benchmarks.train.steps import (
    TINY,
    VOCAB,
    measure_steps,
    profile_step,
    random_batches,
    random_weights,
    sft_loss,
)
from benchmarks.train.stock import check_stock_case, measure_or_explain, stock_case
from converters.model_weights import export_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.gpu_memory import PhasePeak, phase_memory, release_cached_memory
from megatron_gptoss.layers.moe_layer import GptOssMoELayer
from megatron_gptoss.layers.router import GptOssRouter
from megatron_gptoss.log_probs import log_probs_and_entropy
from megatron_gptoss.matmul_ceiling import matmul_ceiling
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.planning.flops import forward_flops
from megatron_gptoss.planning.memory import MemoryPhase, MemoryPrediction, predict_stage_memory
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.planning.step_time import predict_step
from megatron_gptoss.scorer import gather_parameters
from megatron_gptoss.static_shape_p2p import StaticShapeP2P
from megatron_gptoss.step_clock import ALL_TO_ALL, PARTS, StepClock
from megatron_gptoss.trainer import PolicyTrainer


class AllToAllClock(StepClock):
    """Clock that times the experts' all-to-all separately from other communication."""

    parts = (*PARTS, ALL_TO_ALL)

    def __call__(self, name: str, log_level: int = 0) -> Any:
        if name != ALL_TO_ALL:
            return super().__call__(name, log_level)
        return SimpleNamespace(start=lambda barrier=False: self.enter(name), stop=self.leave)


def log_probs_case(tokens: int = 32_768, hidden_size: int = 2880) -> dict[str, float]:
    """Time scoring and training with log_probs_and_entropy, and the matrix products alone.

    The products take 2,048 tokens at a time.

    Args:
        tokens: number of tokens.
        hidden_size: size of the hidden states.

    Returns:
        Milliseconds and additional GB of each call.
    """
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(tokens, hidden_size, **bf16).requires_grad_()
    weight = torch.nn.Parameter(0.02 * torch.randn(VOCAB, hidden_size, **bf16))
    labels = torch.randint(0, VOCAB, (tokens,), device="cuda")

    # As in Megatron's data parallelism, gradients are accumulated in a buffer.
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    weight.grad_added_to_main_grad = False

    @torch.no_grad()
    def score() -> None:
        log_probs_and_entropy(hidden, weight, labels)

    @torch.no_grad()
    def score_products() -> None:
        for chunk in hidden.split(2048):
            chunk @ weight.t()

    def train() -> None:
        log_probs, _ = log_probs_and_entropy(hidden, weight, labels)
        log_probs.sum().backward()
        hidden.grad = None
        weight.grad = None

    @torch.no_grad()
    def train_products(recompute: bool) -> None:
        for chunk in hidden.split(2048):
            logits = chunk @ weight.t()
            if recompute:
                logits = chunk @ weight.t()
            logits @ weight
            logits.t() @ chunk

    calls = {
        "score": score,
        "score_matmul": score_products,
        "train": train,
        "train_three_matmuls": lambda: train_products(recompute=False),
        "train_four_matmuls": lambda: train_products(recompute=True),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    result: dict[str, float] = {}

    # Interleaved, so that clocks and temperature affect all calls.
    for _ in range(5):
        for name, call in calls.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            times[name].append(median_milliseconds(call, rounds=2))
            extra_bytes = torch.cuda.max_memory_allocated() - before
            result[f"{name}_extra_gb"] = extra_bytes / 1e9

    for name, values in times.items():
        result[f"{name}_ms"] = median(values)
    return result


class ExpertLoad:
    """Counts the tokens of every expert with hooks on the routers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.counts: list[torch.Tensor] = []
        """Tokens of each expert, one tensor per layer and micro-batch."""
        self.handles = []
        for module in model.modules():
            if isinstance(module, GptOssRouter):
                self.handles.append(module.register_forward_hook(self._count))

    def _count(self, module: Any, inputs: Any, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        _, is_chosen = outputs
        self.counts.append(is_chosen.sum(0).detach())

    def result(self, expert_parallel: int) -> dict[str, float]:
        """Stop counting and return the imbalance of the load. Collective."""
        for handle in self.handles:
            handle.remove()

        counts = torch.stack(self.counts).float()
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(counts, group=group)
        rank_counts = counts.view(len(counts), expert_parallel, -1).sum(-1)
        return {
            "expert_load_max_over_mean": max_over_mean(counts),
            "rank_load_max_over_mean": max_over_mean(rank_counts),
        }


def max_over_mean(counts: torch.Tensor) -> float:
    """Return the largest entry relative to the mean entry, averaged over rows."""
    return float((counts.amax(-1) / counts.mean(-1)).mean())


def attention_overrides(name: str) -> dict[str, Any]:
    """Return the overrides that make ``build_model`` use the named attention."""
    if name != "transformer_engine":
        return {"attention_backend_name": name}
    from tests.support.megatron_gptoss.transformer_engine_attention import (
        TransformerEngineAttention,
    )

    return {"core_attention": TransformerEngineAttention}


def gather_before_forward(trainer: PolicyTrainer) -> None:
    """Gather parameters before the next forward pass instead of during it."""
    for chunk in trainer.model:
        chunk.disable_forward_pre_hook(param_sync=False)
        chunk.ddp_config.overlap_param_gather = False


@contextmanager
def stage_messages(kind: str) -> Iterator[None]:
    """Send messages between pipeline stages with our or with Megatron's code in this context."""
    ours = StaticShapeP2P._communicate_shapes
    if kind == "megatron":
        theirs = P2PCommunicator._communicate_shapes
        StaticShapeP2P._communicate_shapes = theirs  # type: ignore[method-assign]
    yield
    StaticShapeP2P._communicate_shapes = ours  # type: ignore[method-assign]


def parallel_config(args: argparse.Namespace) -> ParallelConfig:
    """Return the layout of the arguments."""
    return ParallelConfig(
        world_size=dist.get_world_size(),
        expert=args.expert,
        context=args.context,
        tensor=args.tensor,
        pipeline=args.pipeline,
        virtual_pipeline=args.virtual_pipeline,
        last_stage_layers=args.last_stage_layers,
        recompute=tuple(args.recompute),
        recompute_layers=args.recompute_layers,
        expert_dispatcher=args.dispatcher,
    )


def build_trainer(args: argparse.Namespace) -> PolicyTrainer:
    """Return the trainer of ``step_case`` with random weights."""
    sizes = TINY if args.tiny else {}
    model_config = GptOssModelConfig(num_layers=args.layers, num_experts=args.experts, **sizes)

    # Megatron synchronizes with the GPU after every message. Only its own messages need this.
    model = build_model(
        model_config,
        parallel_config(args),
        torch.bfloat16,
        quantization=args.quantization,
        moe_router_force_load_balancing=args.balanced,
        batch_p2p_sync=args.messages == "megatron",
        **attention_overrides(args.attention),
        **json.loads(args.config),
    )
    random_weights(model)

    optimizer = OptimizerConfig(
        gradient_dtype=args.gradients,
        moment_dtype=args.moments,
        offload_fraction=args.offload,
    )
    trainer = PolicyTrainer(model, optimizer)
    if args.gather == "before":
        gather_before_forward(trainer)
    return trainer


def step_case(args: argparse.Namespace, ceiling: float) -> dict[str, Any]:
    """Time training steps and scoring with the layout of the arguments.

    Args:
        args: command line.
        ceiling: TFLOP/s of a matrix product, for MFU.
    """
    trainer = build_trainer(args)
    model_config = trainer.chunks[0].config.architecture
    use_clock(trainer, AllToAllClock())

    data_rank = parallel_state.get_data_parallel_rank()
    data_size = parallel_state.get_data_parallel_world_size()
    batches = random_batches(
        args.micro_batches,
        args.sequences,
        args.length,
        seed=data_rank,
        vocabulary=model_config.vocab_size,
    )
    tokens = data_size * sum(batch.tokens for batch in batches)
    tokens_per_gpu = tokens // dist.get_world_size()

    # FLOPs of one data-parallel rank, divided by the GPUs that share its rows.
    lengths = [args.length] * args.sequences * args.micro_batches
    sharers = args.context * args.tensor * args.pipeline
    flops = 3 * forward_flops(model_config, lengths) / sharers

    losses: list[float] = []
    step_parts: list[dict[str, float]] = []

    def step() -> None:
        statistics = trainer.train_step(batches, sft_loss(tokens), learning_rate=1e-5)
        losses.append(statistics.sums["loss"])
        step_parts.append(statistics.seconds_by_part)

    with stage_messages(args.messages):
        result = measure_steps(step, args.steps, tokens_per_gpu, flops, ceiling)
    if args.profile:
        profile_step(step, args.profile)

    # In a separate pass, because counting takes time.
    load = ExpertLoad(trainer.module)
    trainer.score(batches)
    reset_peak()
    score = measure_steps(lambda: trainer.score(batches), 3, tokens_per_gpu, flops / 3, ceiling)

    parameters = sum(parameter.numel() for parameter in trainer.module.parameters())
    release(trainer)

    # Use only the timed steps, without the warm-up and the profiled step.
    timed_parts = step_parts[2 : args.steps]
    seconds_by_part = {
        name: median(parts[name] for parts in timed_parts) for name in timed_parts[0]
    }
    return {
        **result,
        **load.result(args.expert),
        **predicted_step(args, trainer, batches),
        "score_seconds": score["seconds"],
        "score_peak_gb": score.get("peak_gb"),
        "parameters_per_gpu": parameters,
        "seconds_by_part": seconds_by_part,
        "all_to_all_share": seconds_by_part[ALL_TO_ALL] / sum(seconds_by_part.values()),
        "losses": losses,
    }


def use_clock(trainer: PolicyTrainer, clock: StepClock) -> None:
    """Replace the trainer's clock in all objects that use it."""
    for chunk in trainer.chunks:
        chunk.config.timers = clock
        for module in chunk.modules():
            if isinstance(module, GptOssMoELayer):
                module.clock = clock
    trainer.clock = clock


def predicted_step(
    args: argparse.Namespace, trainer: PolicyTrainer, batches: list[PackedBatch]
) -> dict[str, float]:
    """Return the predictions of ``gptoss plan`` for the step.

    They are the time on H200 GPUs, the fraction of the experts' all-to-all, and the tensors of the
    fullest pipeline stage in GB.
    """
    time_of = predict_step(
        trainer.chunks[0].config.architecture,
        parallel_config(args),
        trainer.config,
        [args.length] * args.sequences,
        args.micro_batches,
        quantization=args.quantization,
    )
    phases = {
        phase.name: phase
        for phase in predict_stage_memory(memory_inputs(args, trainer, batches), 1e3).phases
    }
    return {
        "predicted_seconds": time_of.total,
        "predicted_all_to_all_share": time_of.experts / time_of.total,
        "predicted_peak_gb": phases["update"].trainer / 1e9,
    }


def memory_case(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the memory of a run's phases without engines, and predict it.

    The trainer is built. Then all weights are exported as in a sync, followed by scoring and an
    update. This is done twice, because the first step creates the optimizer's state.
    """
    if args.segments:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    memory = phase_memory()
    memory.enter("start")
    trainer = build_trainer(args)
    trainer.memory = memory
    reserved_after_building = torch.cuda.memory_reserved()
    release_cached_memory()
    state_before_first_step = state_bytes_on_gpu(trainer)

    data_rank = parallel_state.get_data_parallel_rank()
    batches = random_batches(args.micro_batches, args.sequences, args.length, seed=data_rank)
    tokens = sum(batch.tokens for batch in batches)
    predicted = {phase.name: phase for phase in memory_estimate(args, trainer, batches).phases}

    rows: list[dict[str, Any]] = []
    for step in range(2):
        memory.enter("sync")
        gather_parameters(trainer.model)
        for _ in export_hf_weights(trainer.module, trainer.chunks[0].config.architecture):
            pass
        release_cached_memory()
        memory.enter("scoring")
        trainer.score(batches)
        trainer.train_step(batches, sft_loss(tokens), learning_rate=1e-5)
        measured = memory.take()
        assert measured is not None, "there is no GPU"
        for name, peak in measured.peaks.items():
            rows.append(phase_row(step, name, peak, predicted.get(name)))

    if dist.get_rank() == 0:
        print_phases(rows)
    if args.segments:
        release_cached_memory()
        args.segments.write_text(kept_segments(torch.cuda.memory_snapshot()))
    result = {
        "phases": rows,
        "reserved_after_building_gb": reserved_after_building / 1e9,
        "state_before_first_step_gb": state_before_first_step / 1e9,
        "state_between_steps_gb": state_bytes_on_gpu(trainer) / 1e9,
        "parameters_per_gpu": sum(p.numel() for p in trainer.module.parameters()),
    }
    release(trainer)
    return result


def kept_segments(snapshot: list[dict[str, Any]]) -> str:
    """List the memory that torch cannot release, because a small part of it is in use.

    Args:
        snapshot: result of ``torch.cuda.memory_snapshot``, with the history of allocations.

    Returns:
        A line per segment with unused MB, used MB and the lines that allocated the used memory,
        sorted by unused MB.
    """
    lines = []
    for segment in snapshot:
        used = [block for block in segment["blocks"] if block["state"] != "inactive"]
        unused = segment["total_size"] - sum(block["size"] for block in used)
        if unused and used:
            places = sorted({allocating_line(block) for block in used})
            used_mb = (segment["total_size"] - unused) / 1e6
            lines.append((unused, f"{unused / 1e6:9.1f} {used_mb:9.1f}  {'; '.join(places)}"))

    lines.sort(reverse=True)
    total = sum(unused for unused, _ in lines) / 1e9
    rows = [
        f"{total:.2f} GB unused in segments that are in use",
        " unused MB   used MB  allocated by",
    ]
    return "\n".join([*rows, *(line for _, line in lines)]) + "\n"


def allocating_line(block: dict[str, Any]) -> str:
    """Return the innermost line outside of torch that allocated a block."""
    for frame in block.get("frames", []):
        if "/torch/" not in frame["filename"]:
            return f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
    return "unknown"


def state_bytes_on_gpu(trainer: PolicyTrainer) -> int:
    """Return the bytes of optimizer state on the GPU."""
    size = 0
    for chained in trainer.optimizer.chained_optimizers:
        for state in chained.optimizer.state.values():
            tensors = (value for value in state.values() if isinstance(value, torch.Tensor))
            size += sum(tensor.nbytes for tensor in tensors if tensor.is_cuda)
    return size


def memory_estimate(
    args: argparse.Namespace,
    trainer: PolicyTrainer,
    batches: list[PackedBatch],
) -> MemoryPrediction:
    """Return the predicted memory of the trainer on this GPU."""
    _, total = torch.cuda.mem_get_info()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return predict_stage_memory(memory_inputs(args, trainer, batches), total / 1e9, stage)


def memory_inputs(
    args: argparse.Namespace,
    trainer: PolicyTrainer,
    batches: list[PackedBatch],
) -> MemoryInputs:
    """Return the inputs of the memory prediction for the trainer."""
    return MemoryInputs(
        trainer.chunks[0].config.architecture,
        parallel_config(args),
        trainer.config,
        max(batch.tokens for batch in batches),
        quantization=args.quantization,
        micro_batches=len(batches),
    )


def phase_row(
    step: int, name: str, peak: PhasePeak, predicted: MemoryPhase | None
) -> dict[str, Any]:
    """Return the measured and predicted memory of one phase in GB."""
    row: dict[str, Any] = {
        "step": step,
        "phase": name,
        "allocated": peak.allocated / 1e9,
        "reserved": peak.reserved / 1e9,
        "gpu": peak.gpu / 1e9,
    }
    if predicted is not None:
        row["predicted_allocated"] = predicted.trainer / 1e9
        row["predicted_gpu"] = predicted.total / 1e9
    return row


def print_phases(rows: list[dict[str, Any]]) -> None:
    """Print the phases as a table, in GB of this rank's GPU."""
    columns = ("allocated", "predicted_allocated", "reserved", "gpu", "predicted_gpu")
    print(f"{'step':>4} {'phase':12}" + "".join(f"{name:>21}" for name in columns))
    for row in rows:
        figures = (f"{row[name]:21.1f}" if name in row else f"{'-':>21}" for name in columns)
        print(f"{row['step']:4} {row['phase']:12}" + "".join(figures), flush=True)


def check_overlap_case(args: argparse.Namespace, ceiling: float) -> dict[str, Any]:
    """Compare ways of gathering weights, by three steps and a score directly after them.

    Weights are gathered before the next forward pass (twice, to show the noise), during it, and
    never. The last one is a control that must differ.
    """
    data_rank = parallel_state.get_data_parallel_rank()
    batches = random_batches(args.micro_batches, args.sequences, args.length, seed=data_rank)

    result: dict[str, Any] = {}
    reference: torch.Tensor | None = None
    for mode in ("before", "before_again", "under", "never"):
        trainer = overlap_trainer(args, mode)
        losses, seconds = timed_steps(trainer, batches)
        scores = torch.cat(trainer.score(batches))
        if reference is None:
            reference = scores

        # Gather the weights of the last step first, because replicas would differ otherwise.
        if mode != "never":
            gather_parameters(trainer.model)

        result[mode] = {
            "losses": losses,
            "seconds": seconds,
            "score_difference": float((scores - reference).abs().mean()),
            "replicas_equal": replicas_equal(trainer.module),
        }
        release(trainer)
        del trainer
        gc.collect()
        torch.cuda.empty_cache()
    return result


def overlap_trainer(args: argparse.Namespace, mode: str) -> PolicyTrainer:
    """Return a trainer that gathers weights in a mode of ``check_overlap_case``."""
    parallel = ParallelConfig(world_size=dist.get_world_size(), expert=args.expert)
    model_config = GptOssModelConfig(num_layers=args.layers, num_experts=args.experts)
    model = build_model(model_config, parallel, torch.bfloat16)
    random_weights(model)
    trainer = PolicyTrainer(model, OptimizerConfig())
    trainer.model[0].broadcast_params()

    if mode != "under":
        gather_before_forward(trainer)
        # Without the hook, overlapping means that the weights are not gathered.
        trainer.model[0].ddp_config.overlap_param_gather = mode == "never"
    return trainer


def timed_steps(
    trainer: PolicyTrainer,
    batches: list[PackedBatch],
) -> tuple[list[float], list[float]]:
    """Run three steps and return their losses and seconds."""
    data_size = parallel_state.get_data_parallel_world_size()
    tokens = data_size * sum(batch.tokens for batch in batches)

    losses = []
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        statistics = trainer.train_step(batches, sft_loss(tokens), learning_rate=1e-3)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(statistics.sums["loss"])
    return losses, seconds


def replicas_equal(model: torch.nn.Module) -> bool:
    """Return True if all replicas of every parameter have equal sums of squares. Collective."""
    all_equal = True
    for parameter in model.parameters():
        is_expert = not getattr(parameter, "allreduce", True)
        if is_expert:
            group = parallel_state.get_expert_data_parallel_group()
        else:
            group = parallel_state.get_data_parallel_group()

        local_sum = parameter.detach().double().square().sum()
        sums = [torch.zeros_like(local_sum) for _ in range(group.size())]
        dist.all_gather(sums, local_sum, group=group)
        all_equal &= len(set(torch.stack(sums).tolist())) == 1
    return all_equal


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "case",
        choices=["log-probs", "step", "stock", "check-stock", "memory", "check-overlap", "table"],
    )

    # Model and batch
    add("--layers", type=int, default=24)
    add("--experts", type=int, default=32)
    add("--length", type=int, default=4096, help="tokens of every sequence")
    add("--sequences", type=int, default=1, help="sequences packed into one micro-batch")
    add("--micro-batches", type=int, default=1)
    add("--packed", action="store_true", help="stock: all sequences of a micro-batch in one row")
    add("--balanced", action="store_true", help="route at random and evenly, for comparison only")

    # Layout
    add("--expert", type=int, default=1, help="expert parallel size")
    add("--context", type=int, default=1, help="context parallel size")
    add("--tensor", type=int, default=1, help="tensor parallel size")
    add("--pipeline", type=int, default=1, help="pipeline stages")
    add("--virtual-pipeline", type=int, default=1, help="chunks of layers per stage")
    add("--last-stage-layers", type=int, help="pipeline: fewer than the other stages have")
    add("--dispatcher", default="alltoall", help="or deepep")

    # Computation, memory and communication
    add("--attention", default="auto", help="a backend of ours, or transformer_engine")
    add("--recompute", nargs="*", default=[])
    add("--recompute-layers", type=int, help="of a chunk; the others keep what they computed")
    add("--quantization", choices=["mxfp4"], help="what the experts are trained through")
    add("--moments", default="fp32")
    add("--gradients", default="fp32")
    add("--offload", type=float, default=0.0, help="share of the optimizer's state on the host")
    add(
        "--gather",
        default="under",
        choices=["under", "before"],
        help="parameters: the forward pass",
    )
    add(
        "--messages",
        default="ours",
        choices=["ours", "megatron"],
        help="between pipeline stages",
    )
    add("--tiny", action="store_true", help="step, check-stock: small sizes")
    add("--config", default="{}", help="JSON of further TransformerConfig fields")

    # Measurement
    add("--steps", type=int, default=6)
    add("--profile", type=Path, help="file for the device times of one step by kernel")
    add("--segments", type=Path, help="memory: file for what keeps torch from giving memory back")
    add("--out", type=Path)
    add("--also", action="append", default=[], help="a further case, as one string")
    return parser


def run_case(args: argparse.Namespace) -> dict[str, Any]:
    """Run the case of the arguments. Collective."""
    if args.case == "memory":
        return memory_case(args)
    ceiling = 0.0 if args.tiny and not torch.cuda.is_available() else matmul_ceiling()
    if args.case == "step":
        return step_case(args, ceiling)
    if args.case == "stock":
        return measure_or_explain(stock_case, args, ceiling)
    if args.case == "check-stock":
        return measure_or_explain(check_stock_case, args, ceiling)
    if args.case == "check-overlap":
        return check_overlap_case(args, ceiling)
    return dict(log_probs_case())


def run(args: argparse.Namespace, port: int) -> None:
    """Join the ranks, run one case and print its result."""
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    started = time.perf_counter()
    parallel = ParallelConfig(
        world_size=world_size,
        expert=args.expert,
        context=args.context,
        tensor=args.tensor,
        pipeline=args.pipeline,
        virtual_pipeline=args.virtual_pipeline,
    )
    distributed.initialize(parallel, rank, port=port)
    reset_peak()
    result = run_case(args)

    if rank == 0:
        arguments = {}
        for name, value in vars(args).items():
            if not isinstance(value, Path) and name != "also":
                arguments[name] = value
        wall_seconds = time.perf_counter() - started
        line = json.dumps(
            {"arguments": arguments, "gpus": world_size, **result, "wall_seconds": wall_seconds}
        )
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")

    gc.collect()
    torch.cuda.empty_cache()
    dist.barrier()
    distributed.shutdown()


def table(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the lines of ``--out``."""
    rows = [
        "| case | GPUs | layers | tokens of a step and GPU | attention | seconds | predicted | tokens/s/GPU | MFU "
        "| all-to-all | predicted | peak GB | predicted |",
        "|---" * 13 + "|",
    ]
    for line in lines:
        arguments = line["arguments"]
        case = arguments["case"]
        if arguments.get("packed"):
            case += ", packed"
        sequences = arguments["sequences"]
        if arguments["case"] == "stock" and not arguments.get("packed"):
            sequences = 1
        sharers = arguments["context"] * arguments["tensor"] * arguments["pipeline"]
        tokens = sequences * arguments["length"] * arguments["micro_batches"] // sharers
        cells = [
            case,
            str(line["gpus"]),
            str(arguments["layers"]),
            f"{tokens:,}",
            line.get("last_attention") or arguments["attention"],
        ]
        cells += [line["failed"]] if "failed" in line else [figure(line, "seconds", ".3f")]
        cells += [
            figure(line, "predicted_seconds", ".3f"),
            figure(line, "tokens_per_second_per_gpu", ",.0f"),
            figure(line, "mfu", ".1%"),
            figure(line, "all_to_all_share", ".1%"),
            figure(line, "predicted_all_to_all_share", ".1%"),
            figure(line, "peak_gb", ".1f"),
            figure(line, "predicted_peak_gb", ".1f"),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def figure(line: dict[str, Any], name: str, form: str) -> str:
    """Format a value of a case; "-" if the case does not have it."""
    return format(line[name], form) if name in line else "-"


def main() -> None:
    """Run the case of the command line and those of ``--also``, each with new process groups."""
    args = argument_parser().parse_args()
    if args.case == "table":
        print(table([json.loads(line) for line in args.out.read_text().splitlines()]))
        return
    run(args, port=29_777)
    for index, further in enumerate(args.also):
        out = ["--out", str(args.out)] if args.out else []
        further_args = argument_parser().parse_args([*shlex.split(further), *out])
        run(further_args, port=29_778 + index)
