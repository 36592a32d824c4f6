"""GPU memory of servers on the trainer's GPUs, for the memory plan of the trainer."""

from megatron_gptoss.planning.memory_inputs import EngineMemory
from rl_loop.engines.sglang.gpu_memory import WORKING_BYTES

PAUSED_BYTES = 1_650_000_000
"""GPU memory of a paused server: context, libraries, kernels, input buffers of CUDA graphs.

Measured with the 20B on an H200: 1.62 GB (``benchmarks/sglang/memory.py``).
"""
TENSOR_PARALLEL_PAUSED_BYTES = 1_300_000_000
"""Additional memory of a paused server with tensor parallelism, on each GPU, per rank.

Measured on H200 with the 120B and the 20B. Compared with one rank per server, a GPU with a trainer
and a paused server had 2.8 to 2.9 GB more with 2 ranks, and 4.3 to 5.1 GB more with 4 ranks. The
memory that torch's allocator held in the trainer is not counted. According to SGLang's log, process
groups are 1.1 and 1.4 GB of it. The origin of the rest is not measured.
"""
RECEIVING_BYTES = 1_500_000_000
"""Memory of a server in a weight sync, without weights and cache.

CUDA graphs, which exist from the start, take 0.7 GB for up to 256 requests. Receiving tensors takes
as much. Measured in the first syncs of runs on 1, 2 and 4 H200: 1.5 GB, and 0.9 GB with graphs for
up to 32 requests.
"""


def colocated_engine_memory(
    *,
    weight_bytes: int,
    tensor_parallel: int,
    memory_fraction: float,
    keep_weights: bool,
    bucket_bytes: int,
    has_mxfp4_experts: bool,
) -> EngineMemory:
    """Return the memory of a server on each of its GPUs.

    Args:
        weight_bytes: weights of one rank of the server.
        tensor_parallel: ranks of the server.
        memory_fraction: fraction of the GPU for a running server.
        keep_weights: whether a paused server keeps its weights.
        bucket_bytes: maximum size of a bucket of a weight sync.
        has_mxfp4_experts: True if the server holds experts in MXFP4.
    """
    # The first rank of a server opens the memory of the trainer's GPU. The other ranks copy whole
    # tensors to their own GPUs (``_unwrap_tensor`` of SGLang 0.5.17).
    paused = PAUSED_BYTES
    shares_model = tensor_parallel > 1
    if shares_model:
        paused += TENSOR_PARALLEL_PAUSED_BYTES * tensor_parallel
    if keep_weights:
        # A sync needs no further memory for them.
        paused += weight_bytes
        weight_bytes = 0
    return EngineMemory(
        running_fraction=memory_fraction,
        paused_bytes=paused,
        weight_bytes=weight_bytes,
        sync_bytes=RECEIVING_BYTES,
        working_bytes=WORKING_BYTES,
        bucket_bytes=bucket_bytes,
        copies_buckets=shares_model,
        has_mxfp4_experts=has_mxfp4_experts,
    )
