"""A server's share of a GPU, in the terms of SGLang's ``--mem-fraction-static``.

``rollout.engine.memory_fraction`` is a share of the whole GPU that holds all of an awake server.
SGLang's fraction f is of the memory that is free when its process has a CUDA context and process
groups, before its weights (``_profile_available_bytes`` in ``srt/mem_cache/kv_cache_configurator.py``
of 0.5.17):

    weights + key/value cache = f * free;  CUDA graphs and activations come on top

so that the same f is another share beside a trainer than on an empty GPU.
"""

import math
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_gptoss.config import ModelConfig
from rl_loop.engines.backend import EngineUnavailable

KEY = "rollout.engine.memory_fraction"

CONTEXT_BYTES = 800_000_000
"""What a server's process has of a GPU before SGLang looks what is free: CUDA context, libraries,
process groups. 0.75 GB on an H200."""
WORKING_BYTES = 6_500_000_000
"""What SGLang takes besides weights and key/value cache: CUDA graphs of up to 256 requests, the
activations of 8,192 tokens of prefill, logits of a text of 4,096 that is scored, the table of
requests. 6.38 GB of the 20B on an H200 (``benchmarks/server_memory.py``)."""
PACKED_BYTES_PER_VALUE = 17 / 32 * 1.03
"""Of MXFP4: 32 codes and a scale, and what layouts for Hopper add. Rows of 1,440 bytes become 1,472
and 5,760 or 2,880 rows of scales 5,888 or 3,072: 2.6 % more for the 20B."""
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
        weights = model.num_parameters * element
        if packed:
            values = packed_values(model)
            weights += math.ceil(values * PACKED_BYTES_PER_VALUE) - values * element
        return cls(
            weights=weights // tensor_parallel,
            cache=math.ceil(USEFUL_CACHE_TOKENS * per_token),
        )

    @property
    def all(self) -> int:
        """Everything that the server holds awake."""
        return self.weights + self.cache + WORKING_BYTES + CONTEXT_BYTES


def packed_values(model: ModelConfig) -> int:
    """Count the weights that MXFP4 packs."""
    # Need torch, which reading a configuration does not.
    from converters.hf_layouts import is_expert_matrix
    from converters.names import hf_shapes

    shapes = (shape for name, shape in hf_shapes(model).items() if is_expert_matrix(name))
    return sum(map(math.prod, shapes))


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
    return (share - CONTEXT_BYTES - WORKING_BYTES) / (gpu.free - CONTEXT_BYTES)


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
        f"{_gb(needs.cache)}, graphs and activations {_gb(WORKING_BYTES)}, context "
        f"{_gb(CONTEXT_BYTES)}"
    )


def _round_up(fraction: float) -> float:
    return math.ceil(fraction * 100) / 100


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
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=index,uuid,memory.used,memory.free"]
    try:
        answer = subprocess.run(
            [*query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        # Without it the share would silently be of something else.
        raise EngineUnavailable(
            f"{KEY} is a share of the whole GPU, and {program} does not say what that is: {error}"
        ) from error

    gpus = []
    for line in answer.stdout.splitlines():
        index, uuid, used, free = (field.strip() for field in line.split(","))
        if not (used.isdecimal() and free.isdecimal()):
            # "[N/A]", as of GPUs that share the machine's main memory.
            raise EngineUnavailable(
                f"{KEY} is a share of the whole GPU, and nvidia-smi does not say how much memory GPU {index} has: "
                f"memory.used is {used!r}, memory.free {free!r}"
            )
        total = (int(used) + int(free)) << 20
        memory = GpuMemory(name=f"GPU {index}", total=total, free=int(free) << 20)
        gpus.append(_ListedGpu(index, uuid, memory))

    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [gpu.memory for gpu in gpus]
    return _chosen_gpus(visible, gpus)


@dataclass(frozen=True)
class _ListedGpu:
    """One line of nvidia-smi."""

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
