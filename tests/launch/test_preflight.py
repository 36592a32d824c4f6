"""Checks before a submission: downloads that the variables of a cluster file name."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.cluster import ClusterConfig
from launch.preflight import check_before_queue
from launch.submit import job_settings
from rl_loop.config.errors import ConfigError
from rl_loop.config.load import load_rl_config
from rl_loop.harmony.o200k import FILE_NAME, VARIABLE


def check(shared: Path, env: dict[str, str]) -> None:
    """Run the checks of a launch on this machine."""
    config = load_rl_config(Path("tiny_retool"), ["initial_weights=null"])
    cluster = ClusterConfig(kind="local", shared_dir=shared, min_free_disk=0, env=env)
    check_before_queue(job_settings(config), cluster)


def test_vocabulary_of_the_cluster_must_exist(tmp_path: Path) -> None:
    folder = tmp_path / "vocabulary"
    folder.mkdir()
    with pytest.raises(ConfigError) as found:
        check(tmp_path, {VARIABLE: str(folder)})
    assert f"cluster.env.{VARIABLE}: {folder / FILE_NAME} does not exist" in str(found.value)

    (folder / FILE_NAME).write_text("")
    check(tmp_path, {VARIABLE: str(folder)})


def test_hub_cache_of_an_offline_cluster_must_exist(tmp_path: Path) -> None:
    folder = tmp_path / "huggingface"
    # Online, the Hub's libraries create the folder.
    check(tmp_path, {"HF_HOME": str(folder)})
    offline = {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    with pytest.raises(ConfigError, match=r"cluster\.env.HF_HOME: .* does not exist"):
        check(tmp_path, offline)
    folder.mkdir()
    check(tmp_path, offline)
