"""A Chrome trace of three decoding steps, as torch 2.11's profiler writes it for GPU activities.

A step lasts 100 microseconds. Its CUDA graph has one layer with MXFP4 experts, and the output
layer. Sampling follows it. A second stream prepares the next batch, a third one copies results. The
third step is incomplete.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

PROJECTION = "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNN"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::"
COPY = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
    "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>>(int, int)"
)
GRAPH = [
    # name, start in the step, duration
    ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)", 0, 2),
    (PROJECTION, 2, 5),
    ("void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<false, 64u>(float*)", 7, 1),
    (
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<1>>>(int)",
        8,
        6,
    ),
    # 1 microsecond without a kernel
    ("void tinygemm_kernel<16, 8, 64, 16, 1, 2>(__nv_bfloat16*, __nv_bfloat16*)", 15, 2),
    ("_topk_forward", 17, 1),
    (ELEMENTWISE + "FillFunctor<int>, std::array<char*, 1ul>>(int)", 18, 1),
    (COPY, 19, 1),
    ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu", 20, 10),
    # launched early: waits 1 microsecond for the previous kernel
    ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1", 29, 9),
    (ELEMENTWISE + "(anonymous namespace)::CompareEqFunctor<int>, std::array<char*, 2ul>>", 38, 1),
    ("_reduce", 39, 2),
    ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)", 41, 1),
    (PROJECTION, 42, 8),
    (COPY, 50, 2),
]
SOFTMAX = "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float>(float*)"

HOST_TO_GPU = "Memcpy HtoD (Pinned -> Device)"
GPU_TO_HOST = "Memcpy DtoH (Device -> Pinned)"


def decoding_events() -> list[dict[str, Any]]:
    """Return the events of the trace."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "ts": 0, "pid": 0, "tid": 0, "args": {"name": "GPU 0"}},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "ts": 900, "dur": 500},
        # Belongs to a graph that was launched before the trace began.
        gpu_event("kernel", "_reduce", 970, 5, stream=7, correlation=11),
    ]
    for step in range(3):
        began = 1000 + 100 * step
        launch = 100 * (step + 1)
        events.append(runtime_event("cudaGraphLaunch", began - 20, launch))
        events.append({"ph": "s", "id": launch, "cat": "ac2g", "name": "ac2g", "ts": began - 20})
        for name, start, duration in GRAPH:
            events.append(gpu_event("kernel", name, began + start, duration, 7, launch))

        # A copy that began before the concurrent kernel.
        events.append(gpu_event("gpu_memcpy", HOST_TO_GPU, began + 53, 3, 13, launch + 4))
        events.append(runtime_event("cudaLaunchKernel", began + 5, launch + 1))
        events.append(gpu_event("kernel", SOFTMAX, began + 54, 6, 7, launch + 1))
        events.append(gpu_event("kernel", "alloc_decode_kernel", began + 58, 5, 13, launch + 2))
        events.append(gpu_event("gpu_memcpy", GPU_TO_HOST, began + 61, 5, 17, launch + 3))
    events.append(gpu_event("kernel", "a_kernel_of_no_known_name", 1066, 1, 7, 190))
    return events


def gpu_event(
    category: str, name: str, start: float, duration: float, stream: int, correlation: int
) -> dict[str, Any]:
    """Return one activity of the GPU."""
    args = {"device": 0, "context": 1, "stream": stream, "correlation": correlation}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def runtime_event(name: str, start: float, correlation: int) -> dict[str, Any]:
    """Return one call of CUDA's runtime, on the processor."""
    args = {"cbid": 311, "correlation": correlation}
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": name,
        "pid": 4711,
        "tid": 4711,
        "ts": start,
        "dur": 9,
        "args": args,
    }


def write_trace(path: Path, events: list[dict[str, Any]]) -> None:
    """Write a gzipped trace with SGLang's name, ``*.trace.json.gz``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump({"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": events}, file)
