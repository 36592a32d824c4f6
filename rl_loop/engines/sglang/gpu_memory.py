"""Conversion of a server's share of a GPU into SGLang's ``--mem-fraction-static``.

``rollout.engine.memory_fraction`` is the share of the whole GPU for all memory of a running server.
SGLang's fraction f refers to the memory that is free before the weights are loaded, when the
process has a CUDA context and process groups (``_profile_available_bytes`` in
``srt/mem_cache/kv_cache_configurator.py`` of 0.5.17):

    weights + key/value cache = f * free;  CUDA graphs and activations are not part of it

Therefore one f is a different share on an empty GPU than on a GPU with a trainer.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_gptoss.config import AdapterConfig, ModelConfig
from megatron_gptoss.config.precision import bytes_per_number
from megatron_gptoss.nvidia_smi import NvidiaSmiMissingError, memory_bytes, query_gpus
from rl_loop.engines.backend import EngineUnavailableError
from rl_loop.engines.sglang.prefills import last_value

KEY = "rollout.engine.memory_fraction"

CONTEXT_BYTES = 800_000_000
"""GPU memory of a server's process before SGLang reads the free memory.

CUDA context, libraries and process groups. Measured on an H200: 0.75 GB.
"""
WORKING_BYTES = 6_500_000_000
"""GPU memory of a server without weights, key/value cache and context.

CUDA graphs of up to 256 requests, activations of a prefill of 8,192 tokens, logits of a scored text
of 4,096 tokens, and the table of requests. Measured with the 20B on an H200: 6.38 GB
(``benchmarks/sglang/memory.py``).
"""
PROCESS_GROUP_BYTES = 900_000_000
"""Memory of process groups per GPU with tensor parallelism, before SGLang reads the free memory.

NCCL's buffers, and 82 MB of SGLang's all-reduce. 2 ranks on 2 H200 logged 1.15 GB for them. With
their contexts they had about 1.7 GB, compared with 0.75 GB of a single rank. 4 ranks on 4 H200
logged 1.1 to 1.4 GB. A paused server keeps more (``colocated_memory``).
"""
FUSED_TOKENS = 2048
"""Largest batch, in tokens, whose all-reduce FlashInfer fuses with the norm after it.

``FUSE_ALLREDUCE_MAX_BATCH_SIZE`` of ``srt/layers/communicator.py``.
"""
BLOCK = 32
"""MXFP4 values that share a scale."""
MAX_ADAPTER_RANK = 16
"""Largest rank of unmerged expert adapters: ``RANK`` of the plugin's ``gptoss_adapted_moe``."""
MXFP4_LOADING_BYTES = 250_000_000
"""Rounding by torch's allocator that SGLang counts as part of MXFP4 weights.

Measured with the 20B: 0.29 GB with 1 rank, 0.21 GB with 2.
"""
USEFUL_CACHE_TOKENS = 65_536
"""Smallest useful key/value cache, in tokens."""
WINDOWED_CACHE_SHARE = 0.8
"""Tokens in the cache of windowed layers, per token in the cache of other layers.

SGLang's default of ``WINDOWED_CACHE_OPTION``.
"""
WINDOWED_CACHE_OPTION = "--swa-full-tokens-ratio"

SHARE_TOO_SMALL = (
    "Loaded weights leave no GPU memory",
    "Not enough memory. Please try to increase --mem-fraction-static",
)
"""SGLang's messages if weights or cache do not fit ``--mem-fraction-static``."""
MEMORY_USED_UP = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "The memory capacity is unbalanced",
)
"""Messages of SGLang, torch and the driver if a GPU has no free memory."""

SHOWN_CHARACTERS = 300
"""Length limit of a log line in an error message."""

SETTLING_SECONDS = 30.0
"""Longest wait in seconds until the memory of a killed process is free."""
SETTLED_BYTES = 64 << 20
"""Free memory has settled if it grows by less than this many bytes within a second."""

HIDE_THE_REST = ("", "-1", "NoDevFiles")
"""Entries of CUDA_VISIBLE_DEVICES after which CUDA ignores the rest. Slurm writes "NoDevFiles"."""


class NotEnoughGpuMemoryError(EngineUnavailableError):
    """A GPU has too little memory for a server. The message names the key and a value."""


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU in bytes, without the driver's reservation."""

    name: str
    """Name for messages, such as "GPU 3"."""
    total: int
    free: int


@dataclass(frozen=True)
class ServerNeeds:
    """Memory that a server needs on each of its GPUs, in bytes."""

    weights: int
    cache: int
    """Size of the smallest useful key/value cache."""
    context: int = CONTEXT_BYTES
    """Memory of the process before SGLang reads the free memory."""
    working: int = WORKING_BYTES
    """Memory of SGLang without weights, cache and context."""

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        dtype: str,
        tensor_parallel: int,
        *,
        mxfp4_experts: bool = False,
        windowed_share: float = WINDOWED_CACHE_SHARE,
        adapter: AdapterConfig | None = None,
    ) -> "ServerNeeds":
        """Estimate the memory of a server.

        Args:
            model: configuration of the model.
            dtype: precision of weights and cache, "fp32" or "bf16".
            tensor_parallel: GPUs of the server.
            mxfp4_experts: whether the experts' matrices are MXFP4.
            windowed_share: tokens in the cache of windowed layers, per token of other layers.
            adapter: adapters that the server adds without merging. None without them.
        """
        element = bytes_per_number(dtype)
        windowed = model.layer_types.count("sliding_attention")
        layers = model.num_layers - windowed + windowed_share * windowed
        # If there are more GPUs than key/value heads, several GPUs hold the same head.
        heads_shared = min(tensor_parallel, model.num_key_value_heads)
        per_token = layers * 2 * model.key_size * element / heads_shared
        weights = model.num_parameters * element // tensor_parallel
        if mxfp4_experts:
            # MXFP4 packs only the experts.
            weights -= _expert_values(model) * element // tensor_parallel
            weights += mxfp4_expert_bytes(model, tensor_parallel) + MXFP4_LOADING_BYTES
        if adapter is not None:
            weights += expert_adapter_bytes(model, tensor_parallel)

        # Process groups exist before SGLang reads the free memory, so they belong to the context.
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
    def token_bytes(self) -> float:
        """Key/value cache of one token."""
        return self.cache / USEFUL_CACHE_TOKENS

    @property
    def all(self) -> int:
        """Total memory of a running server."""
        return self.weights + self.cache + self.working + self.context


def windowed_cache_share(arguments: Sequence[str]) -> float:
    """Return the tokens in the cache of windowed layers, per token in the cache of other layers.

    Args:
        arguments: arguments of SGLang's server, as in ``rollout.engine.arguments``.

    Raises:
        ValueError: the option's value is not a number.
    """
    value = last_value(arguments, WINDOWED_CACHE_OPTION)
    if value is None:
        return WINDOWED_CACHE_SHARE
    try:
        return float(value)
    except ValueError:
        raise ValueError(
            f"rollout.engine.arguments: {WINDOWED_CACHE_OPTION} is {value}, which is not a number. Set it to a value "
            f"such as {WINDOWED_CACHE_SHARE:g}"
        ) from None


def mxfp4_expert_bytes(model: ModelConfig, tensor_parallel: int) -> int:
    """Return the bytes of a rank's MXFP4 experts in the layouts of ``gptoss_hopper_layout``.

    The size is not inversely proportional to the number of ranks: 10.39 GB for the 20B with 1 rank,
    5.35 GB on each of 2 ranks.
    """
    # SGLang pads a rank's part of the intermediate size to a multiple of 64, and the layout pads
    # once more.
    inner = _round_up_to(math.ceil(model.intermediate_size / tensor_parallel), 64)
    matrices = [(2 * inner, model.hidden_size), (model.hidden_size, inner)]
    expert_bytes = sum(_mxfp4_matrix_bytes(rows, inputs) for rows, inputs in matrices)
    return model.num_layers * model.num_experts * expert_bytes


def expert_adapter_bytes(model: ModelConfig, tensor_parallel: int) -> int:
    """Return the bytes of a rank's unmerged expert adapters, which servers pad to rank 16.

    0.35 GB for the 20B with 1 rank. A rank has all inputs of gate and up, and all outputs of down.
    """
    inner = _round_up_to(math.ceil(model.intermediate_size / tensor_parallel), 64)
    rows_and_columns = (2 * inner + model.hidden_size) + (model.hidden_size + inner)
    expert_bytes = 2 * MAX_ADAPTER_RANK * rows_and_columns
    return model.num_layers * model.num_experts * expert_bytes


def _mxfp4_matrix_bytes(rows: int, inputs: int) -> int:
    # As ``value_storage_shape`` and ``scale_storage_shape`` of the plugin, whose module needs
    # Triton.
    values = _round_up_to(rows, 64) * _round_up_to(inputs // 2, 64)
    scales = _round_up_to(rows, 256) * _round_up_to(math.ceil(inputs / BLOCK), 2)
    return values + scales


def _expert_values(model: ModelConfig) -> int:
    """Return the number of weights that MXFP4 packs."""
    return model.num_layers * model.num_experts * 3 * model.intermediate_size * model.hidden_size


def _fused_all_reduce_bytes(model: ModelConfig, tensor_parallel: int) -> int:
    """Return the bytes of FlashInfer's buffers for all-reduces that are fused with a norm.

    There are two sets: one after attention, one after the experts. A set is 4 times the size of all
    ranks' inputs in bf16: one buffer, and three that alternate
    (``trtllm_create_ipc_workspace_for_all_reduce_fusion``).
    """
    summands = 2 * tensor_parallel * FUSED_TOKENS * model.hidden_size
    return 2 * 4 * summands


def static_fraction(fraction: float, gpus: Sequence[GpuMemory], needs: ServerNeeds) -> float:
    """Convert a share of whole GPUs into SGLang's fraction of the free memory on them.

    Args:
        fraction: share of each whole GPU for the running server.
        gpus: GPUs of the server. SGLang uses the free memory of the fullest one.
        needs: memory that the server needs on each of them.

    Raises:
        NotEnoughGpuMemoryError: if the share is larger than the free memory, or too small for the
            server.
    """
    # All ranks of a server get the same fraction.
    gpu = min(gpus, key=lambda gpu: gpu.free)

    # Round the limits inward, so that the messages never advise a share that would fail.
    least = _round_up(needs.all / gpu.total)
    most = math.floor(gpu.free / gpu.total * 100) / 100

    share = fraction * gpu.total
    if least > most:
        raise NotEnoughGpuMemoryError(
            f"{KEY}: a server needs {_gb(needs.all)} of {gpu.name} ({_describe_needs(needs)}), "
            f"but only {_gb(gpu.free)} of {_gb(gpu.total)} are free. Reduce the trainer's memory "
            "there (optimizer.offload_fraction, more GPUs), or run servers on separate GPUs"
        )
    if share < needs.all:
        raise NotEnoughGpuMemoryError(
            f"{KEY}: {fraction:g} of {gpu.name} is {_gb(share)}, but a server needs "
            f"{_gb(needs.all)} ({_describe_needs(needs)}). Set it to {least:.2f} to {most:.2f}"
        )
    if share > gpu.free:
        raise NotEnoughGpuMemoryError(
            f"{KEY}: {fraction:g} of {gpu.name} is {_gb(share)}, but only {_gb(gpu.free)} of "
            f"{_gb(gpu.total)} are free. Set it to {least:.2f} to {most:.2f}"
        )

    # Invert SGLang's formula at the top: weights and cache are the share without the rest, and the
    # context is already allocated when SGLang reads the free memory.
    return (share - needs.context - needs.working) / (gpu.free - needs.context)


def memory_fault(log: str, fraction: float) -> str | None:
    """Return the log line and the remedy if a server ended because it had no GPU memory, else None.

    Args:
        log: output of the server.
        fraction: configured ``memory_fraction``.
    """
    # The two causes have opposite remedies. The share can be too small for weights and cache, or so
    # large that no memory is left for the rest.
    lines = [line.strip()[:SHOWN_CHARACTERS] for line in log.splitlines()]
    too_small = [line for line in lines if any(sign in line for sign in SHARE_TOO_SMALL)]
    if too_small:
        return f"{too_small[-1].removesuffix('.')}. Set {KEY}={min(0.98, fraction + 0.05):.2f} or higher"

    used_up = [line for line in lines if any(sign in line for sign in MEMORY_USED_UP)]
    if used_up:
        return (
            f"{used_up[-1].removesuffix('.')}. Set {KEY}={max(0.02, fraction - 0.05):.2f} or lower, or stop other "
            "processes on the GPU"
        )
    return None


def _describe_needs(needs: ServerNeeds) -> str:
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
    """Return ``visible_gpus`` after their free memory has stopped growing.

    The driver frees the memory of a killed process with a delay. A server whose share was computed
    during the delay would get too much.
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

    The list is empty without nvidia-smi: on a CPU, SGLang's fraction refers to the main memory.

    Raises:
        EngineUnavailableError: if nvidia-smi does not respond, does not report a GPU's memory, or if
            CUDA_VISIBLE_DEVICES names an unknown GPU.
    """
    try:
        rows = query_gpus("index", "uuid", "memory.used", "memory.free")
    except NvidiaSmiMissingError:
        return []
    except OSError as error:
        # Without this error, the share would silently refer to the main memory.
        raise EngineUnavailableError(
            f"{KEY} is a share of the whole GPU, but the size of the GPU is unknown: {error}"
        ) from error

    gpus = []
    for row in rows:
        used, free = memory_bytes(row["memory.used"]), memory_bytes(row["memory.free"])
        if used is None or free is None:
            # "[N/A]", for example for GPUs that share the machine's main memory.
            raise EngineUnavailableError(
                f"{KEY} is a share of the whole GPU, but nvidia-smi does not report the memory "
                f"of GPU {row['index']}: memory.used is {row['memory.used']!r}, memory.free "
                f"{row['memory.free']!r}"
            )
        # nvidia-smi's total would include memory that the driver reserves.
        memory = GpuMemory(name=f"GPU {row['index']}", total=used + free, free=free)
        gpus.append(_ListedGpu(row["index"], row["uuid"], memory))

    visible = environment.get("CUDA_VISIBLE_DEVICES")
    # Without the variable, CUDA shows all GPUs.
    if visible is None:
        return [gpu.memory for gpu in gpus]
    return _chosen_gpus(visible, gpus)


@dataclass(frozen=True)
class _ListedGpu:
    """A GPU and its names in CUDA_VISIBLE_DEVICES."""

    index: str
    uuid: str
    """UUID, such as "GPU-8932f937-..."."""
    memory: GpuMemory

    def is_called(self, name: str) -> bool:
        """Return True if an entry of CUDA_VISIBLE_DEVICES (index or UUID prefix) means this GPU."""
        return name == self.index or (name.startswith("GPU-") and self.uuid.startswith(name))


def _chosen_gpus(visible: str, gpus: Sequence[_ListedGpu]) -> list[GpuMemory]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, in its order.

    Raises:
        EngineUnavailableError: if an entry does not name exactly one GPU.
    """
    chosen = []
    for entry in visible.split(","):
        name = entry.strip()
        if name in HIDE_THE_REST:
            break

        meant = [gpu.memory for gpu in gpus if gpu.is_called(name)]
        if len(meant) != 1:
            count = "none" if not meant else "several"
            known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus)
            raise EngineUnavailableError(
                f"CUDA_VISIBLE_DEVICES={visible}: {name} matches {count} of the GPUs that "
                f"nvidia-smi reports: {known or 'no GPU'}. {KEY} is a share of a whole GPU, not "
                "of a MIG slice. Use indices or UUIDs of whole GPUs"
            )
        chosen += meant
    return chosen
