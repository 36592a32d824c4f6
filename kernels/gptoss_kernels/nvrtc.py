"""CUDA C++ compiled at run time with the NVRTC that ships with torch; cubins are kept in the cache directory.

No CUDA toolkit is needed. Compiling needs no GPU, so a wrong kernel is found on any machine that has torch for CUDA."""

import ctypes
import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptoss_kernels.cache import cache_directory, write_atomically


@dataclass(frozen=True)
class TensorMap:
    """A tensor with its CUtensorMap, by which the TMA of sm_90 copies boxes of rows: an argument of a Kernel.

    The map holds the tensor's address, so the two travel together."""

    tensor: torch.Tensor
    encoded: ctypes.Array[ctypes.c_char]


class Kernel:
    """One compiled function, launched on torch's current stream."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        torch.cuda.current_stream()  # creates the context that the module is loaded into
        driver = _driver()
        self.name, self.shared_bytes = name, shared_bytes
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), cubin), f"load {name}")
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), f"find {name}")
        maximum_dynamic_shared_size = 8
        status = driver.cuFuncSetAttribute(self._function, maximum_dynamic_shared_size, shared_bytes)
        _check(status, f"reserve {shared_bytes} bytes of shared memory for {name}")

    def __call__(self, blocks: int, threads: int, *arguments: "torch.Tensor | int | float | TensorMap") -> None:
        """Tensors are passed as pointers, ints as int, floats as float, a ``tensor_map``'s encoding by value."""
        values = [_as_ctypes(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(x) for x in values])
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = _driver().cuLaunchKernel(
            self._function, blocks, 1, 1, threads, 1, 1, self.shared_bytes, stream, pointers, None
        )
        _check(status, f"launch {self.name}")


def _as_ctypes(argument: "torch.Tensor | int | float | TensorMap") -> Any:
    """What the driver copies into the launch.

    The caller holds the tensors until the kernel is in its stream; from there on torch's allocator keeps their memory
    from other work."""
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, TensorMap):
        return argument.encoded
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.c_float(argument)


def tensor_map(tensor: torch.Tensor, box: tuple[int, int]) -> TensorMap:
    """Describe a contiguous bf16 tensor [tokens, heads, 64] for copies of boxes of (positions, heads) rows.

    The tensor starts at a multiple of 16 bytes. Rows land in shared memory in the 128-byte swizzle, zeros where a box
    passes the tensor's end. Raises RuntimeError when the driver refuses."""
    return TensorMap(tensor, _encode(tensor.data_ptr(), tensor.shape, box))


# Safe to keep when memory is freed and given out again: an encoded map depends on nothing but these arguments.
@functools.lru_cache(maxsize=1024)
def _encode(address: int, shape: torch.Size, box: tuple[int, int]) -> ctypes.Array[ctypes.c_char]:
    tokens, heads, size = shape

    # The driver wants the 128 bytes of the map at a multiple of 64.
    raw = ctypes.create_string_buffer(128 + 63)
    encoded = (ctypes.c_char * 128).from_buffer(raw, -ctypes.addressof(raw) % 64)

    sizes = (ctypes.c_uint64 * 3)(size, heads, tokens)
    strides = (ctypes.c_uint64 * 2)(2 * size, 2 * size * heads)
    boxes = (ctypes.c_uint32 * 3)(size, box[1], box[0])
    steps = (ctypes.c_uint32 * 3)(1, 1, 1)

    # The numbers are cuda.h's enumerations: bf16 in three dimensions; not interleaved, 128-byte swizzle, 128 bytes at a
    # time into L2, zeros outside.
    tensor = 9, 3, ctypes.c_void_p(address), sizes, strides
    layout = 0, 3, 2, 0
    status = _driver().cuTensorMapEncodeTiled(encoded, *tensor, boxes, steps, *layout)
    _check(status, f"describe {list(shape)} at {address:#x} for boxes of {list(box)}")
    return encoded


def compile_cubin(source: Path, defines: dict[str, int], architecture: str) -> bytes:
    """Compile ``source``, with its folder on the include path, for e.g. "sm_90".

    Raises RuntimeError with the compiler's log."""
    nvrtc = _nvrtc()
    headers = sorted(source.parent.glob("*.cuh"))
    options = [f"--gpu-architecture={architecture}", f"--include-path={source.parent}"]
    options += ["--std=c++17", "-default-device", *(f"-D{name}={value}" for name, value in sorted(defines.items()))]
    version = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1]))
    text = source.read_bytes()
    # the include path itself is no part of the key: the headers' contents are
    key = [text, *(h.read_bytes() for h in headers), " ".join(o for o in options if "include" not in o).encode()]
    key.append(f"{version[0].value}.{version[1].value}".encode())
    path = cache_directory() / f"{source.stem}_{hashlib.sha256(b'|'.join(key)).hexdigest()[:20]}.cubin"
    if path.exists():
        return path.read_bytes()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None)
    array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
    status = nvrtc.nvrtcCompileProgram(program, len(options), array)
    size, wanted = ctypes.c_size_t(), "ProgramLog" if status else "CUBIN"
    nvrtc[f"nvrtcGet{wanted}Size"](program, ctypes.byref(size))
    answer = ctypes.create_string_buffer(size.value)
    nvrtc[f"nvrtcGet{wanted}"](program, answer)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if status:
        raise RuntimeError(f"{source.name} does not compile for {architecture}:\n{answer.value.decode()}")
    write_atomically(path, answer.raw)
    return answer.raw


def _check(status: int, action: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA could not {action}: {text.value.decode() if text.value else status}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    cuda = torch.version.cuda
    if cuda is None:
        raise RuntimeError("this torch is built without CUDA: the window kernels need NVRTC, use backend='reference'")
    name = f"libnvrtc.so.{cuda.split('.')[0]}"
    packages = Path(torch.__file__).parents[1] / "nvidia"
    for candidate in (name, *map(str, packages.glob(f"*/lib/{name}"))):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise RuntimeError(f"{name} not found: it comes with torch's nvidia-cuda-nvrtc package")


def architecture(device: torch.device) -> str:
    """The device's own architecture, with Hopper's warpgroup instructions where it is one."""
    major, minor = torch.cuda.get_device_capability(device)
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"
