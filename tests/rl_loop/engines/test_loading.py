"""The embedded engine from a Hugging Face directory, good and bad."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_loop.engines.transformers_engine import TransformersEngine
from tests.rl_loop.engines.models import plain_log_probs, prompt, reference_model, tiny_config

MODEL = reference_model()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    MODEL.save_pretrained(tmp_path)
    return tmp_path


def test_engine_from_a_directory_scores_like_the_model_that_was_saved(checkpoint: Path) -> None:
    engine = TransformersEngine.from_pretrained(checkpoint)
    scores = asyncio.run(engine.score(prompt(40)))
    np.testing.assert_allclose(scores, plain_log_probs(MODEL, prompt(40)), atol=1e-5, rtol=0)


def test_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        TransformersEngine.from_pretrained(tmp_path)


def test_truncated_weights_are_an_error_naming_the_directory(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=str(checkpoint)):
        TransformersEngine.from_pretrained(checkpoint)


def test_missing_tensor_is_not_filled_with_random_numbers(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.3.self_attn.sinks"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.3\.self_attn\.sinks"):
        TransformersEngine.from_pretrained(checkpoint)


def test_rotary_frequencies_are_the_same_in_every_dtype_and_the_config_is_left_alone() -> None:
    config = tiny_config()
    engines = [TransformersEngine.from_config(config, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    low, full = (engine._model.model.rotary_emb.inv_freq for engine in engines)
    assert torch.equal(low.float(), full) and low.dtype == torch.float32
    assert engines[0]._model.lm_head.weight.dtype == torch.bfloat16
    assert config._attn_implementation == "eager"
