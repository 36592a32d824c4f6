"""A tiny model with all parameters random, on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GptOssForCausalLM

from tests.converters.models import TINY, save_hf
from tests.megatron_gptoss.reference import hf_model


@pytest.fixture(scope="session")
def reference() -> GptOssForCausalLM:
    return hf_model(TINY)


@pytest.fixture(scope="session")
def weights(reference: GptOssForCausalLM) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in reference.state_dict().items()}


@pytest.fixture(params=["fp32", "bf16"])
def precision(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def hf_dir(tmp_path: Path, weights: dict[str, torch.Tensor]) -> Path:
    """fp32, one file."""
    return save_hf(tmp_path / "hf", weights)
