"""The embedded engine takes experts in MXFP4, keeps their bits and computes with their values."""

from __future__ import annotations

import asyncio
import re

import pytest
import torch

from converters.mxfp4_tensors import (
    fake_quantize_experts,
    first_difference,
    quantize_experts,
    stack_digests,
)
from rl_loop.engines.embedded.engine import TransformersEngine
from rl_loop.weight_sync.canary import CanaryError, check_mxfp4_experts
from rl_loop.weight_sync.source import LoadedWeights
from tests.support.rl_loop.engines.models import (
    build_engine,
    plain_log_probs,
    prompt,
    reference_model,
)

# Rows consist of whole MXFP4 blocks.
WIDTH = 32
MODEL = reference_model(0, intermediate_size=WIDTH)
BLOCKS = "model.layers.0.mlp.experts.down_proj_blocks"
SCALES = "model.layers.0.mlp.experts.down_proj_scales"
Weights = dict[str, torch.Tensor]


def mxfp4_weights(seed: int = 0) -> Weights:
    return LoadedWeights(
        reference_model(seed, intermediate_size=WIDTH).state_dict()
    ).mxfp4_weights()


def synced(weights: Weights) -> TransformersEngine:
    engine = build_engine(MODEL)
    asyncio.run(engine.sync_weights(weights.items(), 2))
    return engine


def test_engine_computes_with_dequantized_mxfp4_values() -> None:
    rounded = reference_model(0, intermediate_size=WIDTH)
    rounded.load_state_dict(fake_quantize_experts(MODEL.state_dict()))
    engine = synced(mxfp4_weights())
    found = asyncio.run(engine.score(prompt(20)))
    torch.testing.assert_close(
        torch.tensor(found), torch.as_tensor(plain_log_probs(rounded, prompt(20))).float()
    )
    unrounded = torch.as_tensor(plain_log_probs(MODEL, prompt(20))).float()
    assert (torch.tensor(found) - unrounded).abs().max() > 1e-3


def test_engine_reports_digests_of_mxfp4_experts_only() -> None:
    sent = mxfp4_weights()
    engine = synced(sent)
    digests = asyncio.run(engine.mxfp4_digests())
    assert digests == stack_digests(sent.items())
    layers = MODEL.config.num_hidden_layers
    assert len(digests) == 2 * layers * MODEL.config.num_local_experts

    asyncio.run(engine.sync_weights(MODEL.state_dict().items(), 3))
    assert asyncio.run(engine.mxfp4_digests()) == {}


def test_engine_copies_the_weights_that_it_receives() -> None:
    sent = mxfp4_weights()
    engine = synced(sent)
    expected = stack_digests(sent.items())
    sent[BLOCKS].zero_()
    assert asyncio.run(engine.mxfp4_digests()) == expected


def test_changed_dequantized_values_are_detected() -> None:
    engine = synced(mxfp4_weights())
    with torch.no_grad():
        engine._model.model.layers[0].mlp.experts.down_proj[1, 2, 3] += 0.5
    with pytest.raises(
        RuntimeError, match=r"layers\.0\.mlp\.experts\.down_proj: the engine computes with"
    ):
        asyncio.run(engine.mxfp4_digests())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda named: named.pop(SCALES), f"tensor {SCALES} is missing"),
        (lambda named: named.update({SCALES: named[SCALES][:, 1:]}), f"tensor {SCALES} has shape"),
        (
            lambda named: named.update({SCALES: named[SCALES].int()}),
            f"tensor {SCALES} has dtype torch.int32",
        ),
        (lambda named: named.update({f"{SCALES}x": named[SCALES]}), f"tensor {SCALES}x is not in"),
        (
            lambda named: named.update({BLOCKS.removesuffix("_blocks"): torch.zeros(1)}),
            f"tensor {BLOCKS.removesuffix('_blocks')} is not in",
        ),
    ],
)
def test_mxfp4_weights_that_do_not_fit_are_named_and_not_loaded(
    change: object, message: str
) -> None:
    engine = synced(mxfp4_weights())
    before = asyncio.run(engine.mxfp4_digests())
    named = mxfp4_weights(1)
    change(named)
    with pytest.raises(ValueError, match=re.escape(message)):
        asyncio.run(engine.sync_weights(named.items(), 3))
    assert asyncio.run(engine.mxfp4_digests()) == before


class HeldDigests:
    """Trainer or engines with these digests of experts."""

    def __init__(self, digests: object) -> None:
        self.digests = digests

    def mxfp4_digests(self) -> object:
        return self.digests


def test_differing_mxfp4_experts_are_named_with_the_worker() -> None:
    expected = stack_digests(mxfp4_weights().items())
    assert (
        check_mxfp4_experts(HeldDigests(expected), HeldDigests([expected, expected]), 1) == expected
    )
    assert check_mxfp4_experts(HeldDigests(expected), HeldDigests([]), 1) == {}

    # A changed bit of a scale or block, and a missing expert.
    for name in (SCALES, BLOCKS):
        changed = mxfp4_weights()
        changed[name][1].view(-1)[5] ^= 1
        found = stack_digests(changed.items())
        message = r"tensor .*down_proj, expert 1: its MXFP4 values on rollout worker 1 differ .* weights 4 "
        with pytest.raises(CanaryError, match=message):
            check_mxfp4_experts(HeldDigests(expected), HeldDigests([expected, found]), 4)
    missing = dict(expected)
    name = missing.popitem()[0]
    assert first_difference(expected, missing) == name
    with pytest.raises(CanaryError, match=r"digest none, expected"):
        check_mxfp4_experts(HeldDigests(expected), HeldDigests([missing]), 4)


def test_weights_in_memory_use_the_shared_quantizer() -> None:
    named = MODEL.state_dict()
    packed = quantize_experts(named)
    others = [name for name in named if not name.endswith(("gate_up_proj", "down_proj"))]
    assert all(packed[name] is named[name] for name in others)
    assert len(packed) == len(others) + 4 * MODEL.config.num_hidden_layers
