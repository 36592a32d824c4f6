"""Run of benchmarks.sglang decode with mock SGLang servers, and its memory bound."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from converters.names import hf_shapes
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.engines.sglang.gpu_memory import CONTEXT_BYTES, WORKING_BYTES
from tests.support.forked_workers import forked_python

ROOT = Path(__file__).parents[2]
SIZES = {
    "num_experts": 4,
    "experts_per_token": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_size": 32,
    "vocab_size": 1024,
    "sliding_window": 16,
}


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return importlib.import_module("benchmarks.sglang.decoding")


def test_servers_alternate_and_only_one_gets_our_settings(tmp_path: Path) -> None:
    stub = f"{ROOT / 'tests/support/rl_loop/sglang_process'}:{ROOT}:{ROOT / 'kernels'}"
    program = [*forked_python(), "-m", "benchmarks.sglang", "decode", "--device", "cpu", "--tiny"]
    program += ["--layers", "2", "--transport", "gloo", "--attention", "intel_amx"]
    program += ["--pythonpath", stub, "--running", "1", "3", "--prompt", "20", "--tokens", "8"]
    program += ["--rounds", "2", "--log", str(tmp_path / "log"), "--out", str(tmp_path / "table")]
    program += ["--profile", "--traces", str(tmp_path / "traces")]
    program += ["--server-env", "TOKEN_SECONDS=0.005"]  # requests must run until the trace ends
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["variant"] for line in lines if line["case"] == "start"] == ["unmodified", "tuned"]
    rows = [line for line in lines if line["case"] == "decode"]
    assert [row["running"] for row in rows] == [1, 3]
    for row in rows:
        assert len(row["unmodified_client_all_ms"]) == len(row["tuned_client_all_ms"]) == 2
        assert row["tuned_prefill_tokens_per_second"] > 0
        assert row["tuned_steps_by"] == "client"  # the mock servers do not write such lines
    tables = (tmp_path / "table").read_text()
    rounds, *profiles = tables.split("GPU microseconds per decoding step")
    assert rounds.count("\n| ") == 3
    assert len(profiles) == 2  # for 1 and 3 requests
    for row, profile in zip(rows, profiles, strict=True):
        assert "| group | unmodified us | kernels | tuned us | kernels |" in profile
        timed = [float(cell.replace(",", "")) for cell in _cells(profile, "the step as timed")]
        in_row = [row["unmodified_ms"] * 1e3, row["tuned_ms"] * 1e3]
        assert timed == pytest.approx(in_row, rel=1e-3)  # rows are printed with four digits
        assert _cells(profile, "the step under the profiler") == ["**100.0**", "**100.0**"]
    assert len(list((tmp_path / "traces").iterdir())) == 4


def _cells(table: str, head: str) -> list[str]:
    """Return the microseconds of the row that starts with ``head``."""
    (row,) = (line for line in table.splitlines() if line.startswith(f"| {head}"))
    return [cell.strip() for cell in row.split("|")[2:-1:2]]


def test_unmodified_server_does_not_get_our_settings(decoding: ModuleType) -> None:
    assert decoding.VARIANTS["unmodified"].without_variables == ("SGLANG_MOE_CONFIG_DIR",)
    assert decoding.VARIANTS["tuned"] == decoding.Variation()


def test_table_compares_each_server_with_the_first(decoding: ModuleType) -> None:
    names = ["bf16", "mxfp4", "mxfp4_slow_routing"]
    options = argparse.Namespace(
        quantization="mxfp4", variants=names, attention=["fa3"], prompt=5, tokens=6, rounds=7
    )
    row = {"running": 2, "experts_used": 3.0}
    for milliseconds, name in zip((8.0, 4.0, 2.0), names, strict=True):
        row |= {f"{name}_ms": milliseconds, f"{name}_prefill_tokens_per_second": 1.0}
        row[f"{name}_steps_by"] = "client" if name == "bf16" else "server"
    text = decoding.table([row], options, GptOssModelConfig(num_layers=2, **SIZES))
    assert [line for line in text.splitlines() if "**" in line] == [
        "| 2 | 1 | 1 | 1.00 | 8.00 | 4.00 | **2.00** | 250 | 500 | 3.0 | - | - |",
        "| 2 | 1 | 1 | 1.00 | 8.00 | 2.00 | **4.00** | 250 | 1,000 | 3.0 | - | - |",
    ]

    assert text.count("Decoding steps as told by: 2: client, server.") == 2

    options.variants = ["bf16", "int4"]
    with pytest.raises(
        SystemExit, match="--variants int4: there are bf16, mxfp4, mxfp4_slow_routing"
    ):
        decoding.select_variants(options)


def test_slow_calls_do_not_change_the_median_step(decoding: ModuleType) -> None:
    times = decoding.Times(
        one_token=[3.5, 0.5, 0.5, 3.0, 0.5], all_tokens=[2.5, 4.5, 2.5, 2.5, 6.5]
    )
    steps = times.steps(tokens=100)
    assert sorted(steps)[2] == pytest.approx(0.02)
    assert steps == pytest.approx([0.02, 0.04, 0.02, 0.02, 0.06])


LOG = """
[2026-11-26 09:39:29] Prefill batch, #new-seq: 50, #new-token: 50, #running-req: 4, #queue-req: 0
[2026-11-26 09:39:30] Decode batch, #running-req: 4, #full token: 9, gen throughput (token/s): 20.5, #queue-req: 0
[2026-11-26 09:39:31] Decode batch, #running-req: 4, #full token: 9, gen throughput (token/s): 400.00, #queue-req: 0
[2026-11-26 09:39:31] Decode batch, #running-req: 3, #full token: 9, gen throughput (token/s): 900.00, #queue-req: 0
[2026-11-26 09:39:32] Decode batch, #running-req: 4, #full token: 9, gen throughput (token/s): 500.00, #queue-req: 0
"""


def test_step_time_is_server_reported_and_excludes_gaps(decoding: ModuleType) -> None:
    assert decoding.step_seconds(LOG, running=4) == [0.01, 0.008]
    assert decoding.step_seconds(LOG, running=8) == []


def server_options(**others: object) -> argparse.Namespace:
    """Return the options of ``benchmarks.sglang`` for servers on a CPU."""
    options: dict[str, object] = {
        "device": "cpu",
        "server_gpu": 0,
        "server_tensor_parallel": 1,
        "without": [],
        "pythonpath": "",
        "server_arguments": "",
        "server_env": [],
        "python": sys.executable,
        "memory_fraction": 0.5,
        "transport": "gloo",
    }
    return argparse.Namespace(**options | others)


def test_server_memory_is_a_fraction_of_its_own_gpu(
    decoding: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = importlib.import_module("benchmarks.sglang.servers")
    # The trainer uses nearly all of GPU 0.
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\necho '0, GPU-8aa1-07, 142000, 1000'\necho '1, GPU-8ab2-0f, 3000, 140000'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    options = server_options(device="cuda", server_gpu=1, transport="nccl", cases=["sync"])
    settings = servers.server_settings(options, "fa3")
    config = GptOssModelConfig(num_layers=2, **SIZES)
    server = servers.make_server(options, settings, config, tmp_path, tmp_path / "log")
    assert server._environment["CUDA_VISIBLE_DEVICES"] == "1"

    words = server._command("127.0.0.1", 1)
    assert words[words.index("--base-gpu-id") + 1] == "0", "the only one that it sees"
    fraction = float(words[words.index("--mem-fraction-static") + 1])
    share = 0.5 * (143_000 << 20) - CONTEXT_BYTES - WORKING_BYTES
    assert fraction == pytest.approx(share / ((140_000 << 20) - CONTEXT_BYTES), abs=1e-4)


def test_all_but_bf16_pack_experts_and_patches_are_optional(
    decoding: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same as on GPUs, which this machine does not have.
    monkeypatch.setattr(SglangConfig, "is_on_cpus", property(lambda self: False))
    servers = importlib.import_module("benchmarks.sglang.servers")
    options = server_options(
        quantization="mxfp4",
        variants=list(decoding.QUANTIZED_VARIANTS),
        attention=["fa3"],
        cases=["decode"],
        log=None,
    )
    config = GptOssModelConfig(num_layers=2, **SIZES)
    has_mxfp4_experts = {}
    patches = {}
    for name, variation in decoding.QUANTIZED_VARIANTS.items():
        packs = name not in decoding.BF16_VARIANTS
        variant = decoding.prepare(
            name, variation, 0, options, config, tmp_path, mxfp4_experts=packs
        )
        has_mxfp4_experts[name] = variant.mxfp4_experts
        # All servers have the first two, which protect their key and their store.
        patches[name] = variant.server._environment[servers.PATCHES].removeprefix(
            "hidden_key,bound_store,"
        )

    assert has_mxfp4_experts == {
        "bf16": False,
        "mxfp4": True,
        "bf16_slow_sampling": False,
        "mxfp4_slow_sampling": True,
        "bf16_slow_window": False,
        "mxfp4_slow_window": True,
        "bf16_slow": False,
        "mxfp4_slow": True,
        "mxfp4_slow_routing": True,
        "mxfp4_slow_gemms": True,
        "mxfp4_slow_small_batch": True,
        "bf16_rounded_logits": False,
        "mxfp4_rounded_logits": True,
        "mxfp4_sglang_fp32_logits": True,
        "mxfp4_adapters": True,
    }
    packed = "mxfp4_experts,ptxas_override,fused_routing,moe_occupancy,small_batch_moe,fast_abort"
    kernels = ",fused_sampling,fused_window_attention"
    defaults = f"{kernels},fp32_logits"
    assert patches == {
        "bf16": f"fast_abort{defaults}",
        "mxfp4": packed + defaults,
        "mxfp4_slow_routing": packed.replace("fused_routing,", "") + defaults,
        "mxfp4_slow_gemms": packed.replace("moe_occupancy,", "") + defaults,
        "mxfp4_slow_small_batch": packed.replace("small_batch_moe,", "") + defaults,
        "bf16_slow_sampling": "fast_abort,fused_window_attention,fp32_logits",
        "mxfp4_slow_sampling": f"{packed},fused_window_attention,fp32_logits",
        "bf16_slow_window": "fast_abort,fused_sampling,fp32_logits",
        "mxfp4_slow_window": f"{packed},fused_sampling,fp32_logits",
        "bf16_slow": "fast_abort,fp32_logits",
        "mxfp4_slow": f"{packed},fp32_logits",
        "bf16_rounded_logits": f"fast_abort{kernels}",
        "mxfp4_rounded_logits": packed + kernels,
        "mxfp4_sglang_fp32_logits": packed + kernels,
        "mxfp4_adapters": packed + defaults,
    }


def test_step_with_all_experts_reads_all_but_the_embedding(decoding: ModuleType) -> None:
    config = GptOssModelConfig(num_layers=2, **SIZES)
    matrices = 0
    for name, shape in hf_shapes(config).items():
        is_matrix = len(shape) > 1 and not name.endswith("bias")
        if is_matrix and "embed" not in name:
            matrices += int(np.prod(shape))
    read = decoding.bytes_of_step(config, running=0, context=100, experts=4)
    assert read == 2 * matrices


def test_visible_keys_and_values_are_read_for_every_request(decoding: ModuleType) -> None:
    config = GptOssModelConfig(num_layers=2, **SIZES)
    alone = decoding.bytes_of_step(config, running=1, context=100, experts=4)
    four = decoding.bytes_of_step(config, running=4, context=100, experts=4)
    # A window layer sees 16 of the 100 tokens. Keys and values have 2 heads of 32, 2 bytes each.
    assert four - alone == 3 * (16 + 100) * 2 * 2 * 32 * 2


def test_experts_are_counted_once_per_step_and_layer(decoding: ModuleType) -> None:
    routes = np.array([[[[0, 1]], [[2, 3]]], [[[1, 0]], [[2, 0]]]])
    assert routes.shape == (2, 2, 1, 2)  # requests, steps, layers, experts of a token
    assert decoding.mean_experts_used(routes) == (2 + 3) / 2


def test_expected_experts_are_those_of_independent_even_routes(decoding: ModuleType) -> None:
    config = GptOssModelConfig(num_layers=2, **SIZES)
    generator = torch.Generator().manual_seed(0)
    used = []
    for _ in range(2000):
        scores = torch.rand(3, 4, generator=generator)
        used.append(scores.topk(2).indices.unique().numel())
    assert decoding.expected_experts(config, 3) == pytest.approx(np.mean(used), rel=0.02)
