"""Files of an export except weights: a chat template equal to the codec, and a model card."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from rl_loop import run
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.environments.arithmetic import vocabulary_text
from rl_loop.export import CHAT_TEMPLATE_FILE, export_policy
from rl_loop.harmony.codec import Harmony, PromptConfig
from rl_loop.harmony.vocabulary import TinyVocabulary
from rl_loop.run_parts import collect_model_card_facts
from rl_loop.tracking.model_card import LOST_BY_MERGING, model_card
from rl_loop.trainer.weight_export import WeightExport
from tests.support.rl_loop.prompts import SHORT_PROMPT

CONFIGS = Path(__file__).parents[2] / "configs"
PROMPTS = {"none": SHORT_PROMPT, "system": PromptConfig(model_identity='A "small"\nmodel.')}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_exported_chat_template_renders_the_codecs_tokens(prompt: str, tmp_path: Path) -> None:
    harmony = Harmony(TinyVocabulary(1024, vocabulary_text()), PROMPTS[prompt])
    harmony.vocabulary.save(tmp_path)
    (tmp_path / CHAT_TEMPLATE_FILE).write_text(harmony.chat_template())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    messages = [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "And 5 * 7?"},
    ]
    for conversation in (messages[:1], messages):
        ids = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=False
        )
        assert ids == harmony.render_prompt(conversation)


def test_exported_chat_template_rejects_tool_messages(tmp_path: Path) -> None:
    harmony = Harmony(TinyVocabulary(1024, vocabulary_text()), SHORT_PROMPT)
    harmony.vocabulary.save(tmp_path)
    (tmp_path / CHAT_TEMPLATE_FILE).write_text(harmony.chat_template())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(Exception, match="not tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "5"}])


class InitialTokenizerCodec:
    """A codec with the tokenizer of the initial model, which is copied and not written."""

    stop_token_ids = (7,)

    def __init__(self) -> None:
        self.vocabulary = self

    def save(self, directory: Path) -> list[Path]:
        return []


class RecordingTrainer:
    def export(self, export: WeightExport) -> None:
        self.exported = export


def export_from(tokenizer: Path | None, settings: Path | None = None) -> WeightExport:
    trainer: Any = RecordingTrainer()
    codec: Any = InitialTokenizerCodec()
    export_policy(trainer, codec, Path("out"), tokenizer_source=tokenizer, settings_source=settings)
    return trainer.exported


@pytest.mark.parametrize("folder", ["", "export", "hugging_face"])
def test_export_has_tokenizer_and_settings_of_the_initial_model(
    folder: str, tmp_path: Path
) -> None:
    """A model's directory, a run with an export and an imported checkpoint."""
    source = tmp_path / "first" / folder
    (source / "additional_chat_templates").mkdir(parents=True)
    files = ["vocab.json", "tokenizer.model", "additional_chat_templates/rag.jinja"]
    for name in files:
        (source / name).write_text("{}")
    (source / "config.json").write_text('{"bos_token_id": 3, "hidden_size": 8}')
    (source / "generation_config.json").write_text('{"temperature": 0.6}')

    export = export_from(tmp_path / "first")
    assert sorted(export.extras.files) == sorted(files)
    assert export.extras.generation == {"temperature": 0.6}
    assert export.extras.config == {"bos_token_id": 3}
    assert export.eos_token_ids == (7,)

    # The settings belong to the weights, so a separate tokenizer does not change them.
    (tmp_path / "tokenizer").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "tokenizer" / name).write_text("{}")
    export = export_from(tmp_path / "tokenizer", tmp_path / "first")
    assert list(export.extras.files) == ["tokenizer.json"]
    assert export.extras.generation == {"temperature": 0.6}


def test_export_without_tokenizer_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not export_from(tmp_path / "second").extras.files
    assert "the export has no tokenizer" in caplog.text


def test_model_card_names_base_model_results_and_serve_commands() -> None:
    config = load_config(CONFIGS / "untested/rl/gpt-oss-20b_1x8.yaml", RlConfig)
    card = model_card(
        collect_model_card_facts(config),
        {"held_out_accuracy_rl": 0.8672341, "steps": 400},
        has_template=True,
    )
    _, header, body = card.split("---\n", 2)
    assert yaml.safe_load(header)["base_model"] == "models/gpt-oss-20b"
    assert "| held_out_accuracy_rl | 0.867234 |" in body
    assert "sglang.launch_server --model-path" in body and "vllm serve" in body
    assert "no chat template" not in body
    assert "no chat template" in model_card(
        collect_model_card_facts(config), {}, has_template=False
    )

    adapted = model_card(
        collect_model_card_facts(config), {LOST_BY_MERGING: 0.384}, has_template=True
    )
    assert "lost 38.4% of the adapters' updates" in adapted and "lost" not in card

    tiny = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig)
    assert "vllm" not in model_card(collect_model_card_facts(tiny), {}, has_template=True)


def test_greedy_comparison_is_skipped_for_large_models(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(CONFIGS / "untested/rl/gpt-oss-20b_1x8.yaml", RlConfig)
    # The session has neither a trainer nor tasks, so any decoding would fail.
    session: Any = SimpleNamespace(run=SimpleNamespace(export=Path("runs/large/export")))
    with caplog.at_level(logging.INFO):
        assert run._compare_answers(config, session) == {}
    assert "runs/large/export: sampled weights of the export equal" in caplog.text
    assert "20.9 billion parameters" in caplog.text

    tiny = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig)
    with pytest.raises(AttributeError):
        run._compare_answers(tiny, session)
