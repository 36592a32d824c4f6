"""``gptoss doctor --engine``: the distribution of the log-prob gap."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megatron_gptoss.config import ModelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.samples import TrainingSamples
from rl_loop.engines.sglang.config import MOE_CONFIGS, PLUGIN, SglangConfig
from rl_loop.engines.sglang.server_command import server_command
from rl_loop.evaluation.engine_comparison import gap_table
from rl_loop.harmony.codec import Harmony
from tests.support.megatron_gptoss.dense_reference import QWEN2

MOE = {"SGLANG_MOE_CONFIG_DIR": str(MOE_CONFIGS)}
"""Environment variables that every server gets."""


def test_gap_table_groups_sampled_tokens_by_position_and_class(full: Harmony) -> None:
    text = full.vocabulary.encode_text("The answer is 42")
    tokens = [text[0]] * 130 + text
    mask = [0] * 130 + [1] * len(text)
    sample = {
        "token_ids": tokens,
        "loss_mask": mask,
        "rollout_log_probs": [5.0] * 130 + [-1.0] * len(text),
    }
    scores = np.array([-1.5] * 130 + [-1.25] * (len(text) - 1) + [-2.0], np.float32)
    table = gap_table(TrainingSamples.join([sample]), scores, full)
    lines = {line[:26].strip(): line[26:].split() for line in table}
    n = len(text)
    assert lines["all"][0] == lines["position 128 and on"][0] == str(n)
    assert float(lines["all"][1]) == pytest.approx((0.25 * (n - 1) + 1.0) / n, rel=1e-2)
    assert lines["digits"][0] == "1"
    assert float(lines["digits"][-1]) == 1.0
    assert float(lines["words"][-1]) == 0.25
    assert "position 0 and on" not in lines


def test_server_command_and_environment_follow_the_configuration() -> None:
    settings = SglangConfig(
        python="/opt/python",
        tensor_parallel=2,
        colocated=True,
        arguments=["--log-level", "info"],
    )
    assert settings.weight_sync == "cuda_ipc"
    words = server_command(settings, 1, Path("/model"), "bf16", routed_experts=True, seed=7)(
        "10.0.0.1", 3100
    )
    pairs = dict(pairwise(words))
    assert words[:3] == ["/opt/python", "-m", "sglang.launch_server"]
    assert pairs["--model-path"] == "/model"
    assert pairs["--moe-runner-backend"] == "triton", "the default returns all-zero routes"
    assert pairs["--base-gpu-id"] == "2"
    assert (pairs["--host"], pairs["--port"]) == ("10.0.0.1", "3100")
    assert {
        "--incremental-streaming-output",
        "--enable-return-routed-experts",
        "--enable-memory-saver",
        "--disable-prefill-cuda-graph",
        "--enforce-disable-flashinfer-allreduce-fusion",
    } <= set(words)
    assert "--enable-deterministic-inference" not in words
    assert pairs["--cuda-graph-max-bs-decode"] == pairs["--max-running-requests"] == "256"
    assert settings.environment == MOE | {
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
        "GPTOSS_SGLANG_PATCHES": (
            "hidden_key,bound_store,paused_cache,fused_sampling,fused_window_attention,fp32_logits"
        ),
        "PYTHONPATH": str(PLUGIN),
    }
    apart = SglangConfig(weight_sync="nccl").environment
    assert apart["NCCL_CUMEM_ENABLE"] == "1", "as the trainer's NCCL has it"
    expected = "hidden_key,bound_store,fast_abort,fused_sampling,fused_window_attention,fp32_logits"
    assert apart["GPTOSS_SGLANG_PATCHES"] == expected
    with pytest.raises(ValueError, match="Set weight_sync=cuda_ipc"):
        SglangConfig(colocated=True, weight_sync="nccl")


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel": 1},
        {"tensor_parallel": 2, "arguments": ["--flashinfer-allreduce-fusion-backend", "auto"]},
        {"tensor_parallel": 2, "colocated": False},
    ],
)
def test_fused_allreduce_is_left_to_sglang_where_possible(
    settings: dict[str, object],
) -> None:
    colocated = {"colocated": True}
    build = server_command(
        SglangConfig.model_validate(colocated | settings),
        0,
        Path("/model"),
        "bf16",
        routed_experts=True,
        seed=0,
    )
    assert "--enforce-disable-flashinfer-allreduce-fusion" not in build("host", 1)


GATHERING = [
    "--enable-prefill-delayer",
    *("--prefill-delayer-queue-min-ratio", "0.1"),
    *("--prefill-delayer-max-delay-passes", "16"),
]


def command_words(**settings: object) -> list[str]:
    config = SglangConfig.model_validate(settings)
    return server_command(config, 0, Path("/model"), "bf16", routed_experts=True, seed=0)("host", 1)


def test_servers_gather_requests_for_a_prefill() -> None:
    for settings in ({}, {"colocated": True}, {"deterministic": True}, {"tensor_parallel": 2}):
        words = command_words(**settings)
        begin = words.index("--enable-prefill-delayer")
        assert words[begin : begin + len(GATHERING)] == GATHERING
    # SGLang asserts that its scheduler overlaps, and servers on CPUs have short steps.
    for arguments in (["--disable-overlap-schedule"], ["--device", "cpu"]):
        assert not set(GATHERING) & set(command_words(arguments=arguments))


def test_the_longest_wait_is_an_argument_of_servers() -> None:
    option = "--prefill-delayer-max-delay-passes"
    for arguments in ([option, "1"], [f"{option}=1"]):
        config = SglangConfig(arguments=arguments)
        assert config.gather_passes == 1
        # SGLang uses the last value.
        assert command_words(arguments=arguments).index(option) < command_words(
            arguments=arguments
        ).index(arguments[0], -6)
    assert SglangConfig().gather_passes == 16
    assert SglangConfig(arguments=["--device", "cpu"]).gather_passes == 1
    assert SglangConfig(arguments=["--disable-overlap-schedule"]).gather_passes == 1
    for value in ("0", "many", "-1"):
        with pytest.raises(ValueError, match=f"{option} is {value}, which is not a positive"):
            SglangConfig(arguments=[option, value])


def prefill_graph_options(tokens: int) -> list[str]:
    settings = SglangConfig(colocated=True, prefill_graph_tokens=tokens, arguments=["--last"])
    build = server_command(settings, 0, Path("/model"), "bf16", routed_experts=True, seed=0)
    words = build("host", 1)
    assert "--disable-prefill-cuda-graph" not in words
    begin = words.index("--cuda-graph-backend-prefill")
    return words[begin : words.index("--base-gpu-id")]


def test_prefill_graph_sizes_cover_lengths_up_to_the_limit() -> None:
    options = prefill_graph_options(64)
    begin = options.index("--cuda-graph-config")
    assert options[:begin] == [
        *("--cuda-graph-backend-prefill", "full"),
        *("--cuda-graph-bs-prefill", "2", "4", "8", "16", "32", "64"),
    ]
    # A batch never has more requests than a graph.
    assert json.loads(options[begin + 1]) == {"prefill": {"full_prefill_max_req": 64}}
    assert options[begin + 2 :] == ["--prefill-max-requests", "64"]
    # SGLang runs a graph only for at least half of the tokens that it was captured for.
    for tokens in (100, 300, 511):
        options = prefill_graph_options(tokens)
        sizes = [int(word) for word in options[3 : options.index("--cuda-graph-config")]]
        assert sizes[-1] == tokens
        for length in range(1, tokens + 1):
            assert min(size for size in sizes if size >= length) <= 2 * length


def test_colocated_gpt_oss_servers_capture_prefills_by_default() -> None:
    def tokens(model: ModelConfig, **settings: object) -> int:
        config = SglangConfig.model_validate({"colocated": True} | settings)
        return config.for_model(model).prefill_graph_tokens

    gpt_oss = GptOssModelConfig(num_layers=24, num_experts=32)
    assert tokens(gpt_oss) == 512
    assert tokens(gpt_oss, prefill_graph_tokens=64) == 64
    assert tokens(gpt_oss, prefill_graph_tokens=0) == 0
    assert tokens(QWEN2) == 0
    without: list[dict[str, object]] = [
        {"colocated": False},
        {"attention_backend": "triton"},
        {"deterministic": True},
        {"weight_sync": "shared_memory"},
    ]
    for settings in without:
        assert tokens(gpt_oss, **settings) == 0, settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"colocated": False}, "applies to colocated servers only"),
        ({"attention_backend": "triton"}, "needs attention_backend=fa3"),
        ({"deterministic": True}, "and deterministic=false"),
    ],
)
def test_prefill_graphs_are_rejected_for_unsupported_servers(
    settings: dict[str, object], message: str
) -> None:
    colocated = {"colocated": True, "prefill_graph_tokens": 512}
    SglangConfig.model_validate(colocated)
    with pytest.raises(ValueError, match=message):
        SglangConfig.model_validate(colocated | settings)


def test_deterministic_server_disables_flashinfer_and_radix() -> None:
    variable = "SGLANG_IS_FLASHINFER_AVAILABLE"
    settings = SglangConfig(deterministic=True, weight_sync="disk", env={"OTHER": "1"})
    words = server_command(settings, 0, Path("/model"), "bf16", routed_experts=True, seed=7)(
        "10.0.0.1", 3100
    )
    assert {"--enable-deterministic-inference", "--disable-radix-cache"} <= set(words)
    assert settings.environment.items() >= (MOE | {variable: "false", "OTHER": "1"}).items()
    assert (
        SglangConfig(deterministic=True, env={variable: "true"}).environment[variable] == "true"
    ), "the user's word"
