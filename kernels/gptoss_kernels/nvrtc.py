"""Run-time compilation and launch of CUDA C++ kernels with the NVRTC library of torch.

Compiled kernels (cubins) are kept in the cache directory. No CUDA toolkit is needed. Compiling
needs no GPU, so tests find compile errors on any machine with a CUDA build of torch.
"""

import ctypes
import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptoss_kernels.cache import cache_directory, write_atomically

# Values of enumerations in cuda.h.
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
TENSOR_MAP_BFLOAT16 = 9  # CUtensorMapDataType
TENSOR_MAP_NOT_INTERLEAVED = 0
TENSOR_MAP_SWIZZLE_128B = 3
TENSOR_MAP_L2_PROMOTION_128B = 2  # L2 fetches 128 bytes at a time
TENSOR_MAP_ZEROS_OUTSIDE = 0

TENSOR_MAP_BYTES = 128
"""Size of a CUtensorMap."""
TENSOR_MAP_ALIGNMENT = 64
"""Alignment in bytes that the driver requires of a CUtensorMap."""


@dataclass(frozen=True)
class TensorMap:
    """Kernel argument that describes a tensor to TMA, the copy engine of Hopper.

    The descriptor holds only the address, so this object keeps the tensor alive.
    """

    tensor: torch.Tensor
    """[tokens, heads, 64] bf16."""
    encoded: ctypes.Array[ctypes.c_char]
    """CUtensorMap, TENSOR_MAP_BYTES long."""


class CudaKernel:
    """Compiled CUDA function that runs on torch's current stream."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        """Load a function into the current CUDA context.

        Args:
            cubin: compiled code, as returned by ``compile_cubin``.
            name: name of an ``extern "C"`` function.
            shared_bytes: dynamic shared memory per block, in bytes.

        Raises:
            RuntimeError: the driver reports an error.
        """
        # Without a context cuModuleLoadData fails. This call makes torch create one.
        torch.cuda.current_stream()
        driver = _driver()
        self.name = name
        self.shared_bytes = shared_bytes
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()

        status = driver.cuModuleLoadData(ctypes.byref(self._module), cubin)
        _check(status, f"load {name}")
        status = driver.cuModuleGetFunction(
            ctypes.byref(self._function), self._module, name.encode()
        )
        _check(status, f"find {name}")

        # Without this attribute the driver rejects launches with more than 48 KiB.
        status = driver.cuFuncSetAttribute(
            self._function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes
        )
        _check(status, f"reserve {shared_bytes} bytes of shared memory for {name}")

    def __call__(
        self, blocks: int, threads: int, *arguments: "torch.Tensor | int | float | TensorMap"
    ) -> None:
        """Launch the function on a one-dimensional grid.

        Args:
            blocks: number of blocks.
            threads: threads per block.
            arguments: arguments of the function. A tensor becomes a pointer, an int becomes int, a
                float becomes float, a TensorMap is passed by value.

        Raises:
            RuntimeError: the driver rejects the launch.
        """
        # `values` must stay referenced until the launch: the driver gets their addresses and copies
        # the values during the call.
        values = [_as_ctypes(argument) for argument in arguments]
        addresses = [ctypes.addressof(value) for value in values]
        parameters = (ctypes.c_void_p * len(values))(*addresses)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

        grid = (blocks, 1, 1)
        block = (threads, 1, 1)
        extra = None
        status = _driver().cuLaunchKernel(
            self._function, *grid, *block, self.shared_bytes, stream, parameters, extra
        )
        _check(status, f"launch {self.name}")


def _as_ctypes(argument: "torch.Tensor | int | float | TensorMap") -> Any:
    """Return the C value of a kernel argument.

    The caller must hold the tensors until the kernel is queued. Afterwards the stream order of
    torch's allocator protects their memory.
    """
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, TensorMap):
        return argument.encoded
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.c_float(argument)


def tensor_map(tensor: torch.Tensor, box: tuple[int, int]) -> TensorMap:
    """Return a descriptor with which TMA copies boxes of a tensor into shared memory.

    Rows arrive in the 128-byte swizzle. Parts of a box beyond the end of the tensor are zeros.

    Args:
        tensor: [tokens, heads, 64] bf16, contiguous, aligned to 16 bytes.
        box: (tokens, heads) per copy.

    Raises:
        RuntimeError: the driver rejects the description.
    """
    return TensorMap(tensor, _encode(tensor.data_ptr(), tensor.shape, box))


# torch's allocator returns the same addresses again and again, so descriptors repeat. Entries stay
# valid when memory is freed and reused, because a descriptor depends only on these arguments.
@functools.lru_cache(maxsize=1024)
def _encode(address: int, shape: torch.Size, box: tuple[int, int]) -> ctypes.Array[ctypes.c_char]:
    """Encode a CUtensorMap for a [tokens, heads, head_size] bf16 tensor at an address."""
    tokens, heads, size = shape
    positions, box_heads = box

    # ctypes cannot align a buffer, so reserve more bytes and start at an aligned address.
    raw = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT - 1)
    offset = -ctypes.addressof(raw) % TENSOR_MAP_ALIGNMENT
    encoded = (ctypes.c_char * TENSOR_MAP_BYTES).from_buffer(raw, offset)

    # The driver lists dimensions from the innermost to the outermost: head_size, heads, tokens.
    # Strides are in bytes; the innermost stride is implied.
    dimensions = 3
    sizes = (ctypes.c_uint64 * 3)(size, heads, tokens)
    strides = (ctypes.c_uint64 * 2)(2 * size, 2 * size * heads)
    box_sizes = (ctypes.c_uint32 * 3)(size, box_heads, positions)
    steps = (ctypes.c_uint32 * 3)(1, 1, 1)

    status = _driver().cuTensorMapEncodeTiled(
        encoded,
        TENSOR_MAP_BFLOAT16,
        dimensions,
        ctypes.c_void_p(address),
        sizes,
        strides,
        box_sizes,
        steps,
        TENSOR_MAP_NOT_INTERLEAVED,
        TENSOR_MAP_SWIZZLE_128B,
        TENSOR_MAP_L2_PROMOTION_128B,
        TENSOR_MAP_ZEROS_OUTSIDE,
    )
    _check(status, f"describe {list(shape)} at {address:#x} for boxes of {list(box)}")
    return encoded


def compile_cubin(source: Path, defines: dict[str, int], architecture: str) -> bytes:
    """Return the compiled code of a source, from the cache if it is there.

    Args:
        source: path of a .cu file. Its folder is on the include path.
        defines: macros and their values.
        architecture: GPU architecture, for example "sm_90a".

    Returns:
        Contents of the cubin.

    Raises:
        RuntimeError: the source does not compile. The message contains the compiler's log.
    """
    text = source.read_bytes()
    # Sorted, because the options are part of the cache file's name. -default-device makes functions
    # without an annotation device functions.
    macros = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "-default-device", *macros]

    path = _cached_path(source, text, options)
    if path.exists():
        return path.read_bytes()

    cubin = _compile(source, text, [*options, f"--include-path={source.parent}"])
    write_atomically(path, cubin)
    return cubin


def _cached_path(source: Path, text: bytes, options: list[str]) -> Path:
    """Return the path of the cache file, named after everything that affects the cubin."""
    # Hash the contents of the headers instead of the include path: the same package installed in
    # another folder can then use the same cache.
    headers = [header.read_bytes() for header in sorted(source.parent.glob("*.cuh"))]
    parts = [text, *headers, " ".join(options).encode(), _nvrtc_version().encode()]
    digest = hashlib.sha256(b"|".join(parts)).hexdigest()[:20]
    return cache_directory() / f"{source.stem}_{digest}.cubin"


def _compile(source: Path, text: bytes, options: list[str]) -> bytes:
    """Compile ``text``; ``source`` names it in error messages."""
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None)
    encoded_options = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    status = nvrtc.nvrtcCompileProgram(program, len(options), encoded_options)

    # NVRTC has the same pair of functions for the cubin and for the log of a failure.
    result = "ProgramLog" if status else "CUBIN"
    size = ctypes.c_size_t()
    nvrtc[f"nvrtcGet{result}Size"](program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    nvrtc[f"nvrtcGet{result}"](program, buffer)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    if status:
        architecture = options[0].removeprefix("--gpu-architecture=")
        raise RuntimeError(
            f"{source.name} does not compile for {architecture}:\n{buffer.value.decode()}"
        )
    return buffer.raw


def _check(status: int, action: str) -> None:
    """Raise RuntimeError with the driver's description if ``status`` is an error."""
    if status == 0:
        return

    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    reason = text.value.decode() if text.value else status
    raise RuntimeError(f"CUDA could not {action}: {reason}")


@functools.cache
def _driver() -> ctypes.CDLL:
    """Return the CUDA driver library. Loaded lazily, because machines without a GPU lack it."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """Return the NVRTC library of torch's CUDA version."""
    cuda = torch.version.cuda
    if cuda is None:
        raise RuntimeError(
            "torch is built without CUDA, but the window kernels need NVRTC. "
            "Use backend='reference'"
        )

    # The loader finds the library by name if torch has loaded it. Otherwise it is in one of the
    # nvidia wheels next to torch.
    name = f"libnvrtc.so.{cuda.split('.')[0]}"
    packages = Path(torch.__file__).parents[1] / "nvidia"
    for candidate in (name, *map(str, packages.glob(f"*/lib/{name}"))):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise RuntimeError(
        f"{name} not found. Install nvidia-cuda-nvrtc, a dependency of torch, or use backend='reference'"
    )


def _nvrtc_version() -> str:
    """Return the version as "MAJOR.MINOR"."""
    major = ctypes.c_int()
    minor = ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def architecture(device: torch.device) -> str:
    """Return the architecture of a device, for example "sm_80", or "sm_90a" for Hopper."""
    major, minor = torch.cuda.get_device_capability(device)
    # Warpgroup products (wgmma) exist only in the architecture-specific variant, sm_90a.
    if (major, minor) == (9, 0):
        return "sm_90a"
    return f"sm_{major}{minor}"
