"""Invalid adapter settings are rejected before a model is built, with the wrong key."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from megatron_gptoss.config import AdapterConfig, AdapterTarget, check_quantization
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig

GPT_OSS_20B = GptOssModelConfig(num_layers=24, num_experts=32)


def test_expert_rank_is_rank_divided_by_active_experts() -> None:
    assert AdapterConfig().rank_of_experts(GPT_OSS_20B) == 8
    assert AdapterConfig(rank=2).rank_of_experts(GPT_OSS_20B) == 1
    assert AdapterConfig(expert_rank=16).rank_of_experts(GPT_OSS_20B) == 16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank"),
        ({"alpha": 0.0}, "alpha"),
        ({"targets": ()}, "adapter.targets is empty"),
        ({"targets": ("q", "o", "q")}, "adapter.targets names a target twice: q, o, q"),
        ({"targets": ("gate",)}, "targets"),
        ({"targets": ("q",), "expert_rank": 4}, r"adapter.expert_rank \(4\) has no effect"),
    ],
)
def test_invalid_adapter_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AdapterConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 513}, r"adapter.rank \(513\) exceeds the smaller dimension \(512\).*target k"),
        ({"expert_rank": 2881}, r"adapter.expert_rank \(2881\) exceeds .*\(2880\).*target experts"),
        ({"rank": 33, "targets": ("router",)}, r"adapter.rank \(33\) .*\(32\).*target router"),
        ({"rank": 2881, "targets": ("embedding",)}, r"\(2881\) .*\(2880\).*target embedding"),
        ({"rank": 2881, "targets": ("head",)}, r"\(2881\) .*\(2880\).*target head"),
    ],
)
def test_a_rank_above_the_size_of_a_weight_is_rejected(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AdapterConfig(**settings).check_ranks(GPT_OSS_20B)
    AdapterConfig(rank=32, targets=get_args(AdapterTarget)).check_ranks(GPT_OSS_20B)


EXPERTS_ONLY = AdapterConfig(targets=("experts",), expert_rank=8)


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        (AdapterConfig(rank=8), AdapterConfig(rank=16), ("adapter.rank", "8", "16")),
        (AdapterConfig(alpha=8), AdapterConfig(alpha=16), ("adapter.alpha", "8.0", "16.0")),
        (
            AdapterConfig(expert_rank=4),
            AdapterConfig(),
            ("adapter.expert_rank", "4", "8"),
        ),
        (
            AdapterConfig(targets=("o", "q")),
            AdapterConfig(targets=("q",)),
            ("adapter.targets", "o, q", "q"),
        ),
        (AdapterConfig(expert_rank=8), AdapterConfig(), None),
        (AdapterConfig(targets=("q", "o")), AdapterConfig(targets=("o", "q")), None),
        # the general rank has no effect if only experts have adapters
        (EXPERTS_ONLY, EXPERTS_ONLY.model_copy(update={"rank": 4}), None),
    ],
)
def test_difference_names_settings_that_change_adapters(
    one: AdapterConfig, other: AdapterConfig, difference: tuple[str, str, str] | None
) -> None:
    assert one.difference(other, GPT_OSS_20B) == difference


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size"])
def test_quantization_needs_complete_blocks(name: str) -> None:
    model = GPT_OSS_20B.model_copy(update={name: 2896})
    with pytest.raises(ValueError, match=rf"a multiple of 32 as {name}, but {name} is 2896"):
        check_quantization("quantization", "mxfp4", model)
    check_quantization("quantization", None, model)
