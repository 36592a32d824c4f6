"""Fixtures of a tiny model with random parameters on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from converters import torch_dist
from tests.support.converters.models import TINY, save_hf, tiny_weights
from tests.support.megatron_gptoss.process_groups import process_groups as process_groups


@pytest.fixture(scope="session")
def weights() -> dict[str, torch.Tensor]:
    return tiny_weights()


@pytest.fixture(scope="session")
def reference(weights: dict[str, torch.Tensor]) -> GptOssForCausalLM:
    model = (
        GptOssForCausalLM(GptOssConfig(**TINY.to_hf_config(), attn_implementation="eager"))
        .float()
        .eval()
    )
    model.load_state_dict(weights, strict=True)
    return model


@pytest.fixture(params=["fp32", "bf16"])
def precision(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def hf_dir(tmp_path: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Save the model in fp32 as one file."""
    return save_hf(tmp_path / "hf", weights)


@pytest.fixture
def nothing_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the check of an import, because tests of ``verify`` write wrong checkpoints."""
    monkeypatch.setattr(torch_dist, "check_import", lambda *args: None)
