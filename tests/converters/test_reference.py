"""The reference equals transformers for all families, in any dtype, and streams weights."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from converters.families.registry import hugging_face_reference
from converters.reference import decoder
from converters.reference.layouts import build_getter
from megatron_gptoss.config import ModelConfig
from tests.support.megatron_gptoss.dense_reference import MODELS, dense_hf_model
from tests.support.megatron_gptoss.reference import TINY, hf_model
from tests.support.tolerances import assert_within, rounding_error

CASES: dict[str, ModelConfig] = {"gpt_oss": TINY, **MODELS}


def transformers_model(name: str) -> Any:
    return hf_model(std=0.15) if name == "gpt_oss" else dense_hf_model(MODELS[name])


def text(config: ModelConfig, tokens: int = 90) -> torch.Tensor:
    return torch.randint(
        0, config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(2)
    )


@torch.no_grad()
def reference_logits(
    config: ModelConfig, weights: dict[str, torch.Tensor], dtype: torch.dtype, tokens: int = 90
) -> torch.Tensor:
    return hugging_face_reference(config, build_getter(weights), dtype).logits(text(config, tokens))


@pytest.mark.parametrize("name", CASES)
def test_reference_logits_match_transformers(name: str) -> None:
    config = CASES[name]
    model = transformers_model(name)
    with torch.no_grad():
        expected = model(text(config)[None]).logits[0]

    weights = dict(model.state_dict())
    exact = reference_logits(config, weights, torch.float64)
    in_fp32 = reference_logits(config, weights, torch.float32)
    allowed = rounding_error(in_fp32, exact)
    assert allowed < 1e-3 * exact.abs().max()
    assert_within(expected, exact, allowed, name)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2"])
def test_reference_gradients_match_transformers(name: str) -> None:
    config = CASES[name]
    model = transformers_model(name)
    ids = text(config)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:-1], ids[1:])

    loss(model(ids[None]).logits[0]).backward()
    gradients = {}
    for dtype in (torch.float32, torch.float64):
        leaves = {n: p.detach().to(dtype).requires_grad_() for n, p in model.named_parameters()}
        loss(hugging_face_reference(config, build_getter(leaves), dtype).logits(ids)).backward()
        gradients[dtype] = {n: leaf.grad for n, leaf in leaves.items()}
    for parameter_name, parameter in model.named_parameters():
        exact = gradients[torch.float64][parameter_name]
        assert exact is not None and exact.abs().max() > 0, parameter_name
        allowed = rounding_error(gradients[torch.float32][parameter_name], exact)
        assert_within(parameter.grad, exact, allowed, parameter_name)


@pytest.mark.parametrize("name", ["gpt_oss", "llama"])
def test_reference_attends_alike_in_blocks_of_queries(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CASES[name]
    weights = dict(transformers_model(name).state_dict())
    whole = reference_logits(config, weights, torch.float64)
    monkeypatch.setattr(decoder, "QUERY_BLOCK", 7)
    monkeypatch.setattr(decoder, "VOCABULARY_BLOCK", 10)
    assert_within(reference_logits(config, weights, torch.float64), whole, 1e-11)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2"])
def test_reference_holds_few_weights_at_a_time(name: str) -> None:
    """At most a weight and its bias are in memory, so the model may have any size."""
    config = CASES[name]
    weights = dict(transformers_model(name).state_dict())
    read = build_getter(weights)
    alive: list[tuple[weakref.ref[torch.Tensor], int]] = []
    most = largest = 0

    def get(tensor_name: str, expert: int | None = None) -> torch.Tensor:
        nonlocal most, largest
        assert (".experts." in tensor_name) == (expert is not None), tensor_name
        tensor = read(tensor_name, expert).clone()
        alive.append((weakref.ref(tensor), tensor.numel()))
        alive[:] = [(reference, size) for reference, size in alive if reference() is not None]
        most = max(most, sum(size for _, size in alive))
        largest = max(largest, tensor.numel())
        return tensor

    with torch.no_grad():
        hugging_face_reference(config, get).logits(text(config, 5))
    assert 0 < most < 1.1 * largest
