"""SGLang servers without Ray, for ``benchmarks.sglang``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_gptoss.config import AdapterConfig, Quantization
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.engines.sglang.engine import SglangEngine
from rl_loop.engines.sglang.server import ServerState, ServerStatus, SglangServer
from rl_loop.engines.sglang.server_actors import adapter_environment
from rl_loop.engines.sglang.server_command import server_command

PATCHES = "GPTOSS_SGLANG_PATCHES"
"""Environment variable with the plugin's patches of a server, separated by commas."""


@dataclass(frozen=True)
class Variation:
    """Differences of a server from the default one, to measure their effect."""

    without_variables: tuple[str, ...] = ()
    """Environment variables to remove."""
    without_patches: tuple[str, ...] = ()
    """Patches of the plugin to disable."""
    arguments: tuple[str, ...] = ()
    """Additional arguments of the server's command."""
    expert_adapter_rank: int | None = None
    """Rank of unmerged expert adapters; None for a server without them."""


NONE = Variation()


def model_config(options: argparse.Namespace, max_length: int = 32_768) -> GptOssModelConfig:
    """Return the configuration of GPT-OSS-20B with ``--layers`` layers, or of a tiny model.

    Args:
        options: command line.
        max_length: maximum number of tokens of a text.
    """
    if not options.tiny:
        return GptOssModelConfig(num_layers=options.layers, num_experts=32, max_length=max_length)
    return GptOssModelConfig(
        num_layers=options.layers,
        num_experts=4,
        experts_per_token=2,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_size=32,
        vocab_size=1024,
        max_length=max_length,
    )


def server_settings(
    options: argparse.Namespace,
    attention: str,
    further_arguments: list[str] | None = None,
    quantization: Quantization | None = None,
) -> SglangConfig:
    """Return the settings of a server.

    Args:
        options: command line.
        attention: SGLang's attention backend.
        further_arguments: additional arguments of the server's command.
        quantization: format of the experts.
    """
    server_arguments = ["--disable-piecewise-cuda-graph"]
    if options.device == "cpu":
        server_arguments = ["--device", "cpu", "--max-total-tokens", "8192"]
    server_arguments += further_arguments or []
    server_arguments += options.server_arguments.split()

    environment = {"PYTHONPATH": options.pythonpath}
    for setting in options.server_env:
        name, value = setting.split("=", 1)
        environment[name] = value

    return SglangConfig(
        python=options.python,
        tensor_parallel=options.server_tensor_parallel,
        attention_backend=attention,
        memory_fraction=options.memory_fraction,
        weight_sync=options.transport,
        arguments=server_arguments,
        deterministic="deterministic" in options.cases,
        quantization=quantization,
        colocated="sleep" in options.cases,
        env=environment,
    )


def make_server(
    options: argparse.Namespace,
    settings: SglangConfig,
    config: GptOssModelConfig,
    directory: Path,
    log: Path,
    variation: Variation = NONE,
) -> SglangServer:
    """Prepare a server with dummy weights. It starts when its status is requested.

    Args:
        options: command line.
        settings: settings of the server. They include the arguments of ``variation``.
        config: configuration of the model.
        directory: directory for the model's configuration.
        log: log file of the server.
        variation: environment variables and patches to remove, and adapters to add.
    """
    on_gpu = options.device != "cpu"
    if on_gpu:
        # Set in the settings, not only in the process. The server's fraction of memory refers to
        # the free memory of its GPUs, and this process may see other GPUs first.
        own_gpus = {"CUDA_VISIBLE_DEVICES": ",".join(server_gpus(options))}
        settings = settings.model_copy(update={"env": own_gpus | settings.env})

    hf_config = settings.describe_model(config, "bf16")
    (directory / "config.json").write_text(json.dumps(hf_config))
    full_command = server_command(
        settings,
        0,
        directory,
        "bf16",
        routed_experts=on_gpu,
        seed=0,
    )

    def command(host: str, port: int) -> list[str]:
        words = full_command(host, port)
        return [word for word in words if word.removeprefix("--") not in options.without]

    environment = {"OMP_NUM_THREADS": "4"}
    if not on_gpu:
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    environment |= settings.environment
    for name in variation.without_variables:
        environment.pop(name, None)
    if variation.expert_adapter_rank is not None:
        adapter = unmerged_adapter(variation.expert_adapter_rank)
        environment |= adapter_environment(config, adapter)
    if variation.without_patches:
        patches = environment[PATCHES].split(",")
        environment[PATCHES] = ",".join(
            patch for patch in patches if patch not in variation.without_patches
        )
    return SglangServer(command, environment, log)


def make_engine(server: SglangServer, config: GptOssModelConfig) -> SglangEngine:
    """Return a client of one server."""

    async def statuses() -> list[ServerStatus]:
        return [await server.status()]

    return SglangEngine(statuses, config)


async def wait_until_healthy(server: SglangServer) -> float:
    """Start a server and return the seconds until it is ready. Exits if the start fails."""
    began = time.monotonic()
    while (status := await server.status()).state is not ServerState.UNSYNCED:
        if status.fault:
            raise SystemExit(status.fault)
        await asyncio.sleep(0.5)
    return time.monotonic() - began


def unmerged_adapter(rank: int) -> AdapterConfig:
    """Return the settings of unmerged adapters of experts only, of a rank."""
    return AdapterConfig(expert_rank=rank, targets=("experts",), merge_experts=False)


def server_gpus(options: argparse.Namespace) -> list[str]:
    """Return the machine-wide indices of a server's GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
    first = options.server_gpu
    gpus = visible[first : first + options.server_tensor_parallel]
    if len(gpus) < options.server_tensor_parallel:
        raise SystemExit(f"a server on GPUs from {first} on needs more than {len(visible)} of them")
    return gpus


def used_gpu_memory(options: argparse.Namespace) -> int:
    """Return the total bytes in use on a server's GPUs, by all processes."""
    return sum(_gpu_memory(gpu, "memory.used") for gpu in server_gpus(options))


def free_gpu_memory(options: argparse.Namespace) -> int:
    """Return the smallest number of free bytes on a server's GPUs."""
    return min(_gpu_memory(gpu, "memory.free") for gpu in server_gpus(options))


def total_gpu_memory(options: argparse.Namespace) -> int:
    """Return the smallest memory size of a server's GPUs in bytes."""
    return min(_gpu_memory(gpu, "memory.total") for gpu in server_gpus(options))


def _gpu_memory(gpu: str, quantity: str) -> int:
    command = [
        "nvidia-smi",
        f"--id={gpu}",
        f"--query-gpu={quantity}",
        "--format=csv,noheader,nounits",
    ]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) << 20
