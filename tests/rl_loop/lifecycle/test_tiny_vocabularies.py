"""A run does not start from weights whose tiny vocabulary has other tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rl_loop.config.errors import StartError
from rl_loop.config.load import dump_config, load_rl_config, load_run_config
from rl_loop.config.run import RlConfig
from rl_loop.lifecycle.vocabulary_checks import check_tiny_vocabulary
from rl_loop.tasks.codec import build_codec

CONFIGS = Path(__file__).parents[3] / "configs"
OTHER_TASKS = "tasks.sources={words: {environment: gsm8k}}"
LARGE = "model.vocab_size=1024"


def save_run(directory: Path, *overrides: str) -> Path:
    """Write the configuration of an SFT run on arithmetic."""
    config = load_run_config(CONFIGS / "sft/tiny_retool.yaml", "sft", [LARGE, *overrides])
    directory.mkdir()
    (directory / "config.yaml").write_text(yaml.safe_dump(dump_config(config)))
    return directory


def rl_from(weights: Path, *overrides: str) -> RlConfig:
    settings = [LARGE, f"initial_weights={weights}", *overrides]
    return load_rl_config(CONFIGS / "rl/tiny_retool.yaml", settings)


def test_weights_of_a_run_on_other_tasks_are_rejected(tmp_path: Path) -> None:
    run = save_run(tmp_path / "arithmetic")
    check_tiny_vocabulary(rl_from(run))
    with pytest.raises(StartError, match="arithmetic has a different tiny vocabulary"):
        check_tiny_vocabulary(rl_from(run, OTHER_TASKS))


def test_other_options_of_the_same_words_are_accepted(tmp_path: Path) -> None:
    run = save_run(tmp_path / "arithmetic")
    again = "tasks.sources={again: {environment: retool, weight: 3}}"
    check_tiny_vocabulary(rl_from(run, again))


def test_export_has_the_vocabulary_of_its_run(tmp_path: Path) -> None:
    export = tmp_path / "export"
    export.mkdir()
    build_codec(rl_from(tmp_path)).vocabulary.save(export)
    check_tiny_vocabulary(rl_from(export))
    with pytest.raises(StartError, match="export has a different tiny vocabulary"):
        check_tiny_vocabulary(rl_from(export, OTHER_TASKS))


def test_run_whose_data_is_gone_has_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = save_run(tmp_path / "chats", "data={path: gone.jsonl}")
    check_tiny_vocabulary(rl_from(run))
    [record] = caplog.records
    assert "was not compared" in record.getMessage() and "gone.jsonl" in record.getMessage()


def test_other_vocabularies_are_not_compared(tmp_path: Path) -> None:
    run = save_run(tmp_path / "arithmetic")
    check_tiny_vocabulary(rl_from(run, OTHER_TASKS, "vocabulary=tokenizer"))
    check_tiny_vocabulary(rl_from(tmp_path, OTHER_TASKS))
