"""Arguments of a server process, from the settings of the servers and the memory of their GPUs."""

from collections.abc import Callable
from pathlib import Path

from megatron_gptoss.config import AdapterConfig
from megatron_gptoss.config.precision import DTYPE_NAMES
from megatron_gptoss.families.registry import read_hf_config
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.engines.sglang.gpu_memory import settled_gpus, static_fraction
from rl_loop.engines.sglang.prefills import gathering_options, prefill_graph_options
from rl_loop.engines.sglang.python_environment import inherited_environment

Command = Callable[[str, int], list[str]]
"""(host, port) -> argument vector of a server. Called on the server's node whenever it starts."""


def server_command(
    settings: SglangConfig,
    index: int,
    model: Path,
    dtype: str,
    *,
    routed_experts: bool,
    seed: int,
    adapter: AdapterConfig | None = None,
) -> Command:
    """Return a function that builds the arguments of a server whenever it starts.

    Args:
        settings: settings of the servers.
        index: number of the server.
        model: directory with a config.json. Servers have random weights until the first sync.
        dtype: precision of weights and cache, "fp32" or "bf16".
        routed_experts: whether servers report the experts of every token.
        seed: seed of the servers.
        adapter: adapters that servers add without merging. None without them.

    Returns:
        The function. It raises NotEnoughGpuMemoryError if ``memory_fraction`` does not fit the GPU.
    """
    options: dict[str, object] = {
        "--model-path": model,
        # Random weights: the first sync replaces them, and the directory has none.
        "--load-format": "dummy",
        "--dtype": DTYPE_NAMES[dtype],
        "--tp-size": settings.tensor_parallel,
        "--random-seed": seed,
        "--attention-backend": settings.attention_backend,
        # triton_kernel is SGLang's default for GPT-OSS. Without the plugin it does not record
        # the experts of a token. Dense models ignore the option.
        "--moe-runner-backend": "triton_kernel" if settings.has_mxfp4_experts else "triton",
        "--max-running-requests": settings.max_running_requests,
        "--cuda-graph-max-bs-decode": settings.max_running_requests,
        # FlashInfer's sampling ignores the seed of a request.
        "--sampling-backend": "pytorch",
        # No request constrains sampling.
        "--grammar-backend": "none",
    }

    flags = _flags(settings, routed_experts)
    words = [settings.python, "-m", "sglang.launch_server"]
    for name, value in options.items():
        words += [name, str(value)]

    def build(host: str, port: int) -> list[str]:
        # The user's arguments come last, because the last value of a repeated option counts.
        # At every start, because a restarted server may find other free memory.
        place = _place_and_memory(settings, index, model, dtype, adapter)
        return [*words, *flags, *place, *settings.arguments, "--host", host, "--port", str(port)]

    return build


def _flags(settings: SglangConfig, routed_experts: bool) -> list[str]:
    """Return the arguments that depend on features of the run."""
    # Chunks then have only new tokens. Requests are token ids, so servers need no tokenizer.
    flags = ["--incremental-streaming-output", "--skip-tokenizer-init"]
    if routed_experts:
        flags.append("--enable-return-routed-experts")
    if settings.deterministic:
        # fa3 splits the keys of heads of size 64 differently for 8 new tokens than for 9, and a
        # cached prefix changes the number of new tokens.
        flags += ["--enable-deterministic-inference", "--disable-radix-cache"]
    if not settings.is_on_cpus:
        flags += gathering_options(settings.arguments)
    if settings.colocated:
        flags += ["--enable-memory-saver", *prefill_graph_options(settings.prefill_graph_tokens)]
        if settings.tensor_parallel > 1 and not _names_all_reduce_fusion(settings):
            flags.append("--enforce-disable-flashinfer-allreduce-fusion")
    return flags


def _names_all_reduce_fusion(settings: SglangConfig) -> bool:
    """Return True if the user configures FlashInfer's all-reduce that is fused with a norm."""
    # SGLang would enable this fusion by default. FlashInfer compiles for minutes when a machine
    # starts its first server, and its buffers were not tested with servers that sleep.
    return any(
        "--flashinfer-allreduce-fusion-backend" in argument for argument in settings.arguments
    )


def _place_and_memory(
    settings: SglangConfig, index: int, model: Path, dtype: str, adapter: AdapterConfig | None
) -> list[str]:
    """Return the options for the GPUs of server ``index`` and for its share of their memory."""
    environment = inherited_environment() | settings.environment
    gpus = [] if "cpu" in settings.arguments else settled_gpus(environment)

    # Ray shows a server only the GPUs that it has reserved. A colocated server has reserved
    # none and sees all GPUs of the node.
    first = 0
    if settings.colocated:
        first = index * settings.tensor_parallel
        if gpus:
            # The index counts the servers of all nodes.
            first %= len(gpus)

    fraction = settings.memory_fraction
    if gpus:
        its_gpus = gpus[first : first + settings.tensor_parallel]
        needs = settings.server_needs(read_hf_config(model), dtype, adapter)
        fraction = static_fraction(fraction, its_gpus, needs)
    return ["--base-gpu-id", str(first), "--mem-fraction-static", f"{fraction:.4f}"]
