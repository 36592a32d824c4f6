"""The settings of SGLang's mixture-of-experts kernel that are shipped for GPT-OSS."""

import json
import re

import pytest

from rl_loop.engines.sglang.config import MOE_CONFIGS, SglangConfig

FILES = sorted(MOE_CONFIGS.glob("configs/triton_*/*.json"))
UP_FILES = [path for path in FILES if not path.stem.endswith("_down")]
NAME = re.compile(r"E=(32|128),N=(2880|1440|720|360),device_name=[A-Za-z0-9_]+?(_down)?")
"""File names of SGLang 0.5.17 (``get_config_file_name``).

They contain the number of experts, their size per tensor-parallel rank, and the GPU.
"""
FIELDS = {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages"}


def test_moe_config_directory_is_set_unless_the_user_sets_it():
    assert SglangConfig().environment["SGLANG_MOE_CONFIG_DIR"] == str(MOE_CONFIGS)
    elsewhere = SglangConfig(env={"SGLANG_MOE_CONFIG_DIR": "/elsewhere"})
    assert elsewhere.environment["SGLANG_MOE_CONFIG_DIR"] == "/elsewhere"


def test_moe_configs_exist_for_the_20b_on_h100_and_h200():
    names = {path.name for path in FILES}
    for gpu in ("NVIDIA_H200", "NVIDIA_H100_80GB_HBM3"):
        assert {
            f"E=32,N=2880,device_name={gpu}.json",
            f"E=32,N=2880,device_name={gpu}_down.json",
        } <= names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_moe_configs_have_names_and_fields_that_sglang_reads(path):
    assert NAME.fullmatch(path.stem)
    settings = json.loads(path.read_text())
    assert {"1", "8", "64", "256", "4096"} <= settings.keys()
    for tokens, choice in settings.items():
        assert int(tokens) > 0 and choice.keys() == FIELDS

        # Two bf16 tiles per stage must fit into the 227 KB of shared memory of a Hopper block.
        tiles = (choice["BLOCK_SIZE_M"] + choice["BLOCK_SIZE_N"]) * choice["BLOCK_SIZE_K"] * 2
        assert tiles * choice["num_stages"] <= 227 * 1024


@pytest.mark.parametrize("path", UP_FILES, ids=lambda path: path.stem)
def test_both_gemms_of_a_moe_layer_have_equal_block_size_m(path):
    """Both use one sorting of the tokens.

    Otherwise SGLang would override BLOCK_SIZE_M of the down projection with a warning.
    """
    up, down = (
        json.loads(file.read_text()) for file in (path, path.with_stem(f"{path.stem}_down"))
    )
    assert up.keys() == down.keys()
    assert all(up[tokens]["BLOCK_SIZE_M"] == down[tokens]["BLOCK_SIZE_M"] for tokens in up)
