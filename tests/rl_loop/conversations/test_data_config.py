"""Configuration ``data``: allowed values, and errors of others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rl_loop.config.errors import ConfigError
from rl_loop.config.load import dump_config, load_config
from rl_loop.config.run import SftConfig

ROOT = Path(__file__).parents[3]
SHOP = ROOT / "configs/sft/tiny_shop.yaml"
RETOOL = ROOT / "configs/sft/tiny_retool.yaml"


def test_path_alone_is_a_source_and_survives_serialization(tmp_path: Path) -> None:
    config = load_config(SHOP, SftConfig, ["data.format=sharegpt"])
    assert config.data is not None
    assert list(config.data.sources) == ["data"]
    assert config.data.sources["data"].format == "sharegpt"

    # The key as errors name it. The file uses the short form.
    by_name = load_config(SHOP, SftConfig, ["data.sources.data.format=sharegpt"])
    assert by_name == config

    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml", SftConfig) == config


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data={sources: {a: {path: x}}, path: y}", "path belongs to a source. Move it to sources.NAME"),
        ("data={sources: {}}", "data.sources"),
        ("data={history: append}", "data.sources"),
        ("data={path: x, histroy: append}", "data.histroy: unknown key"),
        ("data={path: x, format: alpaca}", "data.sources.data.format"),
        ("data={path: x, validation_path: y, validation_fraction: 0.1}", "Give one of them"),
        ("data={path: x, max_tokens: 5000}", "data.max_tokens (5000) exceeds training.max_tokens_per_micro_batch"),
        ("data={path: 'hub:name'}", "data.sources.data: hub:name is not the name of a data set. Use hub:NAME:SPLIT or"),
        ("data={path: x, validation_path: 'hub:a::b'}", "hub:a::b is not the name of a data set. Use hub:NAME:SPLIT"),
        ("data={path: x, weight: 0}", "data.sources.data.weight"),
    ],
)  # fmt: skip
def test_invalid_data_setting_is_named(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        load_config(RETOOL, SftConfig, ["model.max_length=8192", override])


def test_longest_sample_is_limited_by_row_and_model_length() -> None:
    def longest(*overrides: str) -> int:
        return load_config(SHOP, SftConfig, [*overrides]).longest_sample

    assert longest() == 1024
    assert longest("model.max_length=8192") == 4097
    assert longest("data.max_tokens=100") == 100
    config = load_config(SHOP, SftConfig, ["data.max_tokens=100"])
    assert config.memory_inputs.longest_sequence == 100
    # `gptoss plan` computes how many of the longest sequences fit into a row.
    config = load_config(SHOP, SftConfig, ["model.max_length=8192"])
    assert config.memory_inputs.longest_sequence == 4096
