"""Memory with an address in use by C is not freed. Two rules check the sources."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("kernels/gptoss_kernels", "megatron_gptoss", "converters", "rl_loop", "launch")

TAKES_ADDRESSES = {
    # ctypes calls it for each argument of a call. The call holds the tensors.
    "kernels/gptoss_kernels/mxfp4/cpu.py:from_param",
    # CUDA's driver does the same.
    "kernels/gptoss_kernels/nvrtc.py:_as_ctypes",
    # Returns the address inside an object that holds the tensor.
    "kernels/gptoss_kernels/nvrtc.py:tensor_map",
    # Compares the storages of two tensors that the caller holds.
    "converters/gathering.py:_shares_memory",
    # Compares the addresses of a list of tensors. The caller holds the tensors.
    "megatron_gptoss/layers/adapted_grouped_experts.py:_as_stack",
    # The caller holds the tensors until the kernel is launched. Later kernels reuse freed memory in
    # stream order.
    "kernels/gptoss_kernels/mxfp4/gpu.py:launch_fake_quantize",
    # These check only the alignment.
    "kernels/gptoss_kernels/sink_attention/hopper.py:_dense",
    "kernels/gptoss_kernels/adapter_merge.py:_check_update",
    "kernels/gptoss_kernels/adapter_merge.py:_aligned",
    "megatron_gptoss/layers/merge.py:_has_kernel",
}
"""Functions that may call ``data_ptr()``. The comments state why no address outlives its tensor."""


def functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def takes_an_address(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr == "data_ptr" for node in ast.walk(function)
    )


def caches_a_tensor(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = " ".join(ast.unparse(decorator) for decorator in function.decorator_list)
    cached = "cache" in decorators and "cached_property" not in decorators
    return cached and function.returns is not None and "Tensor" in ast.unparse(function.returns)


def sources() -> Iterator[tuple[str, str]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def test_only_known_functions_take_the_address_of_a_tensor():
    found = {
        f"{path}:{f.name}"
        for path, source in sources()
        for f in functions(source)
        if takes_an_address(f)
    }
    assert found == TAKES_ADDRESSES


def test_no_unlocked_cache_creates_a_tensor():
    """functools.cache does not lock, so two threads can create two tensors. One is freed."""
    assert [
        f"{path}:{f.name}"
        for path, source in sources()
        for f in functions(source)
        if caches_a_tensor(f)
    ] == []


def test_rules_detect_earlier_wrong_code():
    """The source is the MXFP4 codec with a bug that made an export write wrong weights."""
    wrong = """
@functools.cache
def limit_table() -> torch.Tensor:
    return torch.zeros(256, 8)

def _pointers(*tensors):
    return [tensor.data_ptr() for tensor in tensors]
"""
    table, pointers = functions(wrong)
    assert caches_a_tensor(table) and not takes_an_address(table)
    assert takes_an_address(pointers) and not caches_a_tensor(pointers)
