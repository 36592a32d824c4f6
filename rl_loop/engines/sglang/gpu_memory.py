"""A server's share of a GPU, in the terms of SGLang's ``--mem-fraction-static``.

``rollout.engine.memory_fraction`` is a share of the whole GPU that holds all of an awake server.
SGLang's fraction f is of the memory that is free when its process has a CUDA context and process
groups, before its weights (``_profile_available_bytes`` in ``srt/mem_cache/kv_cache_configurator.py``
of 0.5.17):

    weights + key/value cache = f * free;  CUDA graphs and activations come on top

so that the same f is another share beside a trainer than on an empty GPU.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_gptoss.config import ModelConfig
from megatron_gptoss.nvidia_smi import NvidiaSmiMissing, memory_bytes, query_gpus
from rl_loop.engines.backend import EngineUnavailable

KEY = "rollout.engine.memory_fraction"

CONTEXT_BYTES = 800_000_000
"""What a server's process has of a GPU before SGLang looks what is free: CUDA context, libraries,
process groups. 0.75 GB on an H200."""
WORKING_BYTES = 6_500_000_000
"""What SGLang takes besides weights and key/value cache: CUDA graphs of up to 256 requests, the
activations of 8,192 tokens of prefill, logits of a text of 4,096 that is scored, the table of
requests. 6.38 GB of the 20B on an H200 (``benchmarks/sglang/memory.py``)."""
PROCESS_GROUP_BYTES = 900_000_000
"""What the process groups of a server with tensor parallelism take of each of its GPUs, before SGLang
looks what is free: NCCL's buffers, and 82 MB of SGLang's own all-reduce. Two ranks on two H200 logged
1.15 GB for them, and had about 1.7 with their contexts, where one rank has 0.75; four on four logged 1.1 to
1.4. A sleeping server keeps more (``TENSOR_PARALLEL_ASLEEP_BYTES``)."""
FUSED_TOKENS = 2048
"""The most tokens of a batch whose sums over ranks FlashInfer fuses with the norm behind them
(``FUSE_ALLREDUCE_MAX_BATCH_SIZE`` of ``srt/layers/communicator.py``)."""
BLOCK = 32
"""Values of MXFP4 that share a scale."""
PACKED_LOADING_BYTES = 250_000_000
"""What SGLang counts among MXFP4 weights besides these, as rounding of torch's allocator: 0.29 GB of the
20B with one rank, 0.21 with two."""
USEFUL_CACHE_TOKENS = 65_536
"""A server whose key/value cache has room for fewer tokens is a mistake."""
WINDOWED_CACHE_SHARE = 0.8
"""Tokens of the windowed layers' cache per token of the other layers' (SGLang's default of
``--swa-full-tokens-ratio``)."""

SHARE_TOO_SMALL = (
    "Loaded weights leave no GPU memory",
    "Not enough memory. Please try to increase --mem-fraction-static",
)
"""What SGLang says when weights or cache do not fit ``--mem-fraction-static``."""
MEMORY_USED_UP = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "The memory capacity is unbalanced",
)
"""What SGLang, torch and the driver say when a GPU has no more memory."""

SHOWN_CHARACTERS = 300
"""Of a line of a server's log that an error quotes."""

SETTLING_SECONDS = 30.0
"""Longest wait for the memory of a process that was killed."""
SETTLED_BYTES = 64 << 20
"""Free memory that grew by less than this within a second has settled."""

HIDE_THE_REST = ("", "-1", "NoDevFiles")
"""Entries of CUDA_VISIBLE_DEVICES from which on CUDA shows no GPU; Slurm writes the last one."""


class NotEnoughGpuMemory(EngineUnavailable):
    """A server cannot have what it needs of a GPU; the message names the key and a value."""


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU in bytes, without what the driver reserves."""

    name: str
    """Such as "GPU 3"."""
    total: int
    free: int


@dataclass(frozen=True)
class ServerNeeds:
    """What a server must have of each of its GPUs, in bytes."""

    weights: int
    cache: int
    """The smallest useful key/value cache."""
    context: int = CONTEXT_BYTES
    """What its process has before SGLang looks what is free."""
    working: int = WORKING_BYTES
    """What SGLang takes besides weights and cache."""

    @classmethod
    def of(
        cls, model: ModelConfig, dtype: str, tensor_parallel: int, *, packed: bool = False
    ) -> "ServerNeeds":
        """Count for a server of ``tensor_parallel`` GPUs.

        ``dtype``: of weights and cache. ``packed``: its experts' matrices are MXFP4.
        """
        element = 4 if dtype == "float32" else 2
        windowed = model.layer_types.count("sliding_attention")
        layers = model.num_layers - windowed + WINDOWED_CACHE_SHARE * windowed
        # With more GPUs than key/value heads, several GPUs have the same head.
        heads_shared = min(tensor_parallel, model.num_key_value_heads)
        per_token = layers * 2 * model.key_size * element / heads_shared
        weights = model.num_parameters * element // tensor_parallel
        if packed:
            weights -= _expert_values(model) * element // tensor_parallel
            weights += packed_expert_bytes(model, tensor_parallel) + PACKED_LOADING_BYTES

        context = CONTEXT_BYTES
        working = WORKING_BYTES
        if tensor_parallel > 1:
            context += PROCESS_GROUP_BYTES
            working += _fused_all_reduce_bytes(model, tensor_parallel)
        return cls(
            weights=weights,
            cache=math.ceil(USEFUL_CACHE_TOKENS * per_token),
            context=context,
            working=working,
        )

    @property
    def all(self) -> int:
        """Everything that the server holds awake."""
        return self.weights + self.cache + self.working + self.context


def packed_expert_bytes(model: ModelConfig, tensor_parallel: int) -> int:
    """Count a rank's MXFP4 experts in the layouts that the plugin writes (``gptoss_hopper_layout``).

    They are not a share of the whole: SGLang pads what a rank has of the intermediate size to
    multiples of 64, and the layout pads once more. 5.35 GB on each of two ranks of the 20B, where one
    has 10.39.
    """
    inner = _round_up_to(math.ceil(model.intermediate_size / tensor_parallel), 64)
    matrices = [(2 * inner, model.hidden_size), (model.hidden_size, inner)]
    of_expert = sum(_packed_matrix_bytes(rows, inputs) for rows, inputs in matrices)
    return model.num_layers * model.num_experts * of_expert


def _packed_matrix_bytes(rows: int, inputs: int) -> int:
    values = _round_up_to(rows, 64) * _round_up_to(inputs // 2, 64)
    scales = _round_up_to(rows, 256) * _round_up_to(math.ceil(inputs / BLOCK), 2)
    return values + scales


def _expert_values(model: ModelConfig) -> int:
    """Count the weights that MXFP4 packs."""
    return model.num_layers * model.num_experts * 3 * model.intermediate_size * model.hidden_size


def _fused_all_reduce_bytes(model: ModelConfig, tensor_parallel: int) -> int:
    """Count FlashInfer's buffers for sums over ranks that are fused with a norm.

    There are two sets, one behind attention and one behind the experts. A set has four times what all
    ranks add up, in bf16: one buffer, and three that take turns
    (``trtllm_create_ipc_workspace_for_all_reduce_fusion``).
    """
    summands = 2 * tensor_parallel * FUSED_TOKENS * model.hidden_size
    return 2 * 4 * summands


def static_fraction(fraction: float, gpus: Sequence[GpuMemory], needs: ServerNeeds) -> float:
    """Translate the share of whole GPUs into SGLang's fraction of what is free on them.

    Args:
        fraction: of each whole GPU that the server may hold awake.
        gpus: of the server; SGLang counts with the one that has least free.
        needs: of the server on each of them.

    Raises:
        NotEnoughGpuMemory: if the share is more than what is free, or less than what the server
            needs.
    """
    gpu = min(gpus, key=lambda gpu: gpu.free)
    least = _round_up(needs.all / gpu.total)
    most = math.floor(gpu.free / gpu.total * 100) / 100

    share = fraction * gpu.total
    if least > most:
        raise NotEnoughGpuMemory(
            f"{KEY}: a server needs {_gb(needs.all)} of {gpu.name} ({_needs_in_words(needs)}), and "
            f"only {_gb(gpu.free)} of {_gb(gpu.total)} are free: let the trainer keep less there "
            "(optimizer.offload, more GPUs), or give servers GPUs of their own"
        )
    if share < needs.all:
        raise NotEnoughGpuMemory(
            f"{KEY}: {fraction:g} of {gpu.name} is {_gb(share)}, and a server needs "
            f"{_gb(needs.all)} ({_needs_in_words(needs)}): set {least:.2f} to {most:.2f}"
        )
    if share > gpu.free:
        raise NotEnoughGpuMemory(
            f"{KEY}: {fraction:g} of {gpu.name} is {_gb(share)}, and only {_gb(gpu.free)} of "
            f"{_gb(gpu.total)} are free: set {least:.2f} to {most:.2f}"
        )
    return (share - needs.context - needs.working) / (gpu.free - needs.context)


def memory_fault(log: str, fraction: float) -> str | None:
    """Say that a server ended for want of GPU memory, and what to change; None if it did not.

    ``log`` is what the server printed, ``fraction`` the configuration's.
    """
    lines = [line.strip()[:SHOWN_CHARACTERS] for line in log.splitlines()]
    too_small = [line for line in lines if any(sign in line for sign in SHARE_TOO_SMALL)]
    if too_small:
        return f"{too_small[-1]}; set {KEY}={min(0.98, fraction + 0.05):.2f} or higher"

    used_up = [line for line in lines if any(sign in line for sign in MEMORY_USED_UP)]
    if used_up:
        return (
            f"{used_up[-1]}; set {KEY}={max(0.02, fraction - 0.05):.2f} or lower, or end what "
            "else uses the GPU"
        )
    return None


def _needs_in_words(needs: ServerNeeds) -> str:
    return (
        f"weights {_gb(needs.weights)}, a cache of {USEFUL_CACHE_TOKENS:,} tokens "
        f"{_gb(needs.cache)}, graphs and activations {_gb(needs.working)}, context "
        f"{_gb(needs.context)}"
    )


def _round_up(fraction: float) -> float:
    return math.ceil(fraction * 100) / 100


def _round_up_to(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def _gb(number: float) -> str:
    return f"{number / 1e9:.1f} GB"


# -- the machine ----------------------------------------------------------------------------------


def settled_gpus(environment: Mapping[str, str]) -> list[GpuMemory]:
    """Return ``visible_gpus`` once their free memory no longer grows.

    The driver takes a while to give back what a killed process had. A server that was measured
    before would get more than its share.
    """
    deadline = time.monotonic() + SETTLING_SECONDS
    gpus = visible_gpus(environment)
    while gpus and time.monotonic() < deadline:
        time.sleep(1)
        earlier = gpus
        gpus = visible_gpus(environment)
        grown = [now.free - before.free for now, before in zip(gpus, earlier, strict=True)]
        if max(grown) < SETTLED_BYTES:
            break
    return gpus


def visible_gpus(environment: Mapping[str, str]) -> list[GpuMemory]:
    """Return the GPUs of this machine that a process with ``environment`` sees, in its order.

    Empty where there is no nvidia-smi: on a CPU, SGLang's fraction is of the main memory.

    Raises:
        EngineUnavailable: if there is one that does not answer or does not know a GPU's memory, or if
            CUDA_VISIBLE_DEVICES names something that is not one of its GPUs.
    """
    try:
        rows = query_gpus("index", "uuid", "memory.used", "memory.free")
    except NvidiaSmiMissing:
        return []
    except OSError as error:
        # Without it the share would silently be of something else.
        raise EngineUnavailable(
            f"{KEY} is a share of the whole GPU, whose size is not known: {error}"
        ) from error

    gpus = []
    for row in rows:
        used, free = memory_bytes(row["memory.used"]), memory_bytes(row["memory.free"])
        if used is None or free is None:
            # "[N/A]", as of GPUs that share the machine's main memory.
            raise EngineUnavailable(
                f"{KEY} is a share of the whole GPU, and nvidia-smi does not say how much memory GPU "
                f"{row['index']} has: memory.used is {row['memory.used']!r}, memory.free "
                f"{row['memory.free']!r}"
            )
        memory = GpuMemory(name=f"GPU {row['index']}", total=used + free, free=free)
        gpus.append(_ListedGpu(row["index"], row["uuid"], memory))

    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [gpu.memory for gpu in gpus]
    return _chosen_gpus(visible, gpus)


@dataclass(frozen=True)
class _ListedGpu:
    """A GPU and its names in CUDA_VISIBLE_DEVICES."""

    index: str
    uuid: str
    """Such as "GPU-8932f937-..."."""
    memory: GpuMemory

    def is_called(self, name: str) -> bool:
        """Whether an entry of CUDA_VISIBLE_DEVICES means it: a number, or how its UUID begins."""
        return name == self.index or (name.startswith("GPU-") and self.uuid.startswith(name))


def _chosen_gpus(visible: str, gpus: Sequence[_ListedGpu]) -> list[GpuMemory]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, in its order. Raises EngineUnavailable."""
    chosen = []
    for entry in visible.split(","):
        name = entry.strip()
        if name in HIDE_THE_REST:
            break

        meant = [gpu.memory for gpu in gpus if gpu.is_called(name)]
        if len(meant) != 1:
            count = "none" if not meant else "several"
            known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus)
            raise EngineUnavailable(
                f"CUDA_VISIBLE_DEVICES={visible}: {name} is {count} of the GPUs that nvidia-smi "
                f"shows: {known or 'no GPU'}. {KEY} is a share of a whole GPU, not of a MIG slice: "
                "give numbers or UUIDs of whole ones"
            )
        chosen += meant
    return chosen
