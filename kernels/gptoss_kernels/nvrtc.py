"""CUDA C++ compiled at run time with torch's NVRTC; cubins are kept in the cache directory.

No CUDA toolkit is needed. Compiling needs no GPU, so a wrong kernel is found on any machine that
has torch for CUDA.
"""

import ctypes
import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptoss_kernels.cache import cache_directory, write_atomically

# Values of cuda.h's enumerations.
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
TENSOR_MAP_BFLOAT16 = 9  # CUtensorMapDataType
TENSOR_MAP_NOT_INTERLEAVED = 0
TENSOR_MAP_SWIZZLE_128B = 3
TENSOR_MAP_L2_PROMOTION_128B = 2  # 128 bytes at a time into L2
TENSOR_MAP_ZEROS_OUTSIDE = 0

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64


@dataclass(frozen=True)
class TensorMap:
    """A tensor with its CUtensorMap, by which TMA copies boxes of it: an argument of a Kernel.

    The map holds the tensor's address, so the two travel together.
    """

    tensor: torch.Tensor
    encoded: ctypes.Array[ctypes.c_char]


class Kernel:
    """One compiled function, launched on torch's current stream."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        """Load the function ``name`` of ``cubin``; blocks use ``shared_bytes`` of memory."""
        torch.cuda.current_stream()  # creates the context that the module is loaded into
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

        # Without this a block gets 48 KiB at most.
        status = driver.cuFuncSetAttribute(
            self._function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes
        )
        _check(status, f"reserve {shared_bytes} bytes of shared memory for {name}")

    def __call__(
        self, blocks: int, threads: int, *arguments: "torch.Tensor | int | float | TensorMap"
    ) -> None:
        """Launch a one-dimensional grid.

        Tensors are passed as pointers, ints as int, floats as float, a ``tensor_map``'s encoding
        by value.
        """
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
    """Return what the driver copies into the launch.

    The caller holds the tensors until the kernel is in its stream; from there on torch's allocator
    keeps their memory from other work.
    """
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, TensorMap):
        return argument.encoded
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.c_float(argument)


def tensor_map(tensor: torch.Tensor, box: tuple[int, int]) -> TensorMap:
    """Describe a contiguous bf16 [tokens, heads, 64] for copies of (positions, heads) boxes.

    The tensor starts at a multiple of 16 bytes. Rows land in shared memory in the 128-byte
    swizzle, zeros where a box passes the tensor's end.

    Raises:
        RuntimeError: when the driver refuses.
    """
    return TensorMap(tensor, _encode(tensor.data_ptr(), tensor.shape, box))


# Safe to keep when memory is freed and given out again: an encoded map depends on nothing but
# these arguments.
@functools.lru_cache(maxsize=1024)
def _encode(address: int, shape: torch.Size, box: tuple[int, int]) -> ctypes.Array[ctypes.c_char]:
    """Encode a CUtensorMap. The driver lists dimensions from the innermost to the outermost."""
    tokens, heads, size = shape
    positions, box_heads = box

    # Reserve more than the map's bytes, to start it at the alignment that the driver wants.
    raw = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT - 1)
    offset = -ctypes.addressof(raw) % TENSOR_MAP_ALIGNMENT
    encoded = (ctypes.c_char * TENSOR_MAP_BYTES).from_buffer(raw, offset)

    # The innermost dimension first: head_size, heads, tokens.
    dimensions = 3
    sizes = (ctypes.c_uint64 * 3)(size, heads, tokens)
    strides = (ctypes.c_uint64 * 2)(2 * size, 2 * size * heads)  # bytes; the innermost is implied
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
    """Compile ``source``, with its folder on the include path, or return the cached result.

    Args:
        source: a .cu file; the .cuh files beside it are its headers.
        defines: macros.
        architecture: for example "sm_90a".

    Raises:
        RuntimeError: with the compiler's log.
    """
    text = source.read_bytes()
    macros = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "-default-device", *macros]

    path = _cached_path(source, text, options)
    if path.exists():
        return path.read_bytes()

    cubin = _compile(source, text, [*options, f"--include-path={source.parent}"])
    write_atomically(path, cubin)
    return cubin


def _cached_path(source: Path, text: bytes, options: list[str]) -> Path:
    """Name the cache file after everything that the cubin depends on.

    Of the include path only the headers' contents count, not where it is.
    """
    headers = [header.read_bytes() for header in sorted(source.parent.glob("*.cuh"))]
    parts = [text, *headers, " ".join(options).encode(), _nvrtc_version().encode()]
    digest = hashlib.sha256(b"|".join(parts)).hexdigest()[:20]
    return cache_directory() / f"{source.stem}_{digest}.cubin"


def _compile(source: Path, text: bytes, options: list[str]) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None)
    encoded_options = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    status = nvrtc.nvrtcCompileProgram(program, len(options), encoded_options)

    # The result is the cubin, or the log of a failure.
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
    """Raise RuntimeError with the driver's words when ``status`` is not success."""
    if status == 0:
        return

    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    reason = text.value.decode() if text.value else status
    raise RuntimeError(f"CUDA could not {action}: {reason}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    cuda = torch.version.cuda
    if cuda is None:
        raise RuntimeError(
            "this torch is built without CUDA: the window kernels need NVRTC, use backend='reference'"
        )

    # On the loader's path (torch has loaded it), or in the wheels beside torch.
    name = f"libnvrtc.so.{cuda.split('.')[0]}"
    packages = Path(torch.__file__).parents[1] / "nvidia"
    for candidate in (name, *map(str, packages.glob(f"*/lib/{name}"))):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise RuntimeError(f"{name} not found: it comes with torch's nvidia-cuda-nvrtc package")


def _nvrtc_version() -> str:
    major = ctypes.c_int()
    minor = ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def architecture(device: torch.device) -> str:
    """Name the device's own architecture, with Hopper's warpgroup instructions where it is one."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) == (9, 0):
        return "sm_90a"
    return f"sm_{major}{minor}"
