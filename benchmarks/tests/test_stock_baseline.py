"""Comparison of stock Megatron with our model: weights, rotary embedding, sinks, row boundaries."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from benchmarks.train import cases, stock
from megatron_gptoss.families.layer_registry import get_family_layers
from megatron_gptoss.layers.cpu_block import cpu_block_spec


class ExplicitAttention(torch.nn.Module):
    """Attention with sinks, from its formula, with the interface of Megatron's classes.

    It replaces Transformer Engine's, which needs a GPU.
    """

    sees_boundaries = True
    """True if packed sequences are separate. False is a fault that the comparison must find."""

    def __init__(self, config: TransformerConfig, layer_number: int, **unused: Any) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        has_window = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.keys = config.window_size[0] + 1 if has_window else None
        self.softmax_offset = torch.nn.Parameter(torch.empty(self.heads, dtype=torch.bfloat16))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        attn_mask_type: AttnMaskType,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Attend to [tokens, (1,) heads, size], or within each sequence of a packed row."""
        shape = (*query.shape[:-2], -1)
        query, key, value = (
            x.reshape(len(x), -1, x.shape[-1]).double() for x in (query, key, value)
        )
        ends = [0, len(query)]
        if packed_seq_params is not None and self.sees_boundaries:
            ends = packed_seq_params.cu_seqlens_q.tolist()
        parts = [
            self.attend(query[start:end], key[start:end], value[start:end])
            for start, end in pairwise(ends)
        ]
        return torch.cat(parts).bfloat16().reshape(shape)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the outputs [tokens, heads, size] of one sequence."""
        key, value = (x.repeat_interleave(self.heads // x.shape[1], dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        if self.keys is not None:
            seen &= ~seen.tril(-self.keys)
        sinks = self.softmax_offset.double()[:, None, None].expand(-1, len(query), 1)
        probs = torch.cat([scores.where(seen, -torch.inf), sinks], dim=-1).softmax(-1)[..., :-1]
        return torch.einsum("hqk,khd->qhd", probs, value)


@pytest.fixture(autouse=True)
def layers_of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def spec(config: Any) -> Any:
        submodules = get_family_layers(config.architecture).cpu_layer(config)
        submodules.self_attention.submodules.core_attention = ExplicitAttention
        return cpu_block_spec(submodules, config, 0)

    monkeypatch.setattr(stock, "layer_spec", spec)
    # Megatron's rotary embedding moves its frequencies to this device.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


def compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sequences: int = 3, **config: Any
) -> dict[str, Any]:
    """Return the line of ``check-stock`` for a small model with all experts."""
    out = tmp_path / "check.jsonl"
    # The router of the CPU layers is fp32.
    config = {"moe_router_dtype": "fp32", "bias_activation_fusion": False} | config
    arguments = ["check-stock", "--tiny", "--layers", "2", "--experts", "4", "--length", "32"]
    arguments += ["--sequences", str(sequences), "--config", json.dumps(config), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["train.py", *arguments])
    cases.main()
    (line,) = (json.loads(text) for text in out.read_text().splitlines())
    return line


def test_stock_model_has_our_log_probs_for_equal_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = compared(monkeypatch, tmp_path)
    # Sequences of 32, 26 and 21 tokens.
    assert line["tokens"] == 32 + 26 + 21
    assert line["equal"]
    assert 0 < line["packed_error"] < 0.03 and 0 < line["unpacked_error"] < 0.03
    assert line["packed_loss"] == pytest.approx(line["loss"], rel=1e-3)
    assert line["wrong_boundaries_error"] > 0.5


def test_check_detects_attention_across_sequences(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ExplicitAttention, "sees_boundaries", False)
    line = compared(monkeypatch, tmp_path)
    assert not line["equal"]
    assert line["unpacked_error"] < 0.03 < 0.5 < line["packed_error"]


def test_check_detects_missing_sinks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = stock.load_hf_weights

    def without_sinks(model: Any, config: Any, get_tensor: Any) -> None:
        load(model, config, get_tensor)
        for module in model.modules():
            if isinstance(module, ExplicitAttention):
                module.softmax_offset.data.fill_(-1e4)

    monkeypatch.setattr(stock, "load_hf_weights", without_sinks)
    line = compared(monkeypatch, tmp_path)
    assert not line["equal"] and line["packed_error"] > stock.MAX_ERROR


@pytest.mark.parametrize("fault", [{"glu_linear_offset": 0.0}, {"window_attn_skip_freq": 1}])
def test_check_detects_wrong_settings_of_stock_megatron(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: dict[str, Any]
) -> None:
    line = compared(monkeypatch, tmp_path, **fault)
    assert not line["equal"] and line["unpacked_error"] > stock.MAX_ERROR


def test_one_sequence_is_no_packed_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "--sequences" in compared(monkeypatch, tmp_path, sequences=1)["failed"]
