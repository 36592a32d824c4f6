"""The tokenizer of a checkpoint selects vocabulary and chat format, for every model family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.messages import FormatError
from rl_loop.chat.tokenizer_vocabulary import TokenizerError
from rl_loop.chatml.codec import ChatMl
from rl_loop.chatml.vocabulary import tiny_vocabulary
from rl_loop.config.load import load_rl_config
from rl_loop.config.run import RlConfig
from rl_loop.environments import arithmetic
from rl_loop.harmony.codec import Harmony
from rl_loop.harmony.vocabulary import SPECIAL_TOKENS, HarmonyTokenizer, TinyVocabulary
from rl_loop.lifecycle.vocabulary_checks import check_chat_format
from rl_loop.run_parts import collect_model_card_facts
from rl_loop.tasks.codec import build_codec, tokenizer_directory, with_tokenizer_from
from tests.support.rl_loop.chatml_vocabularies import without_call_tokens
from tests.support.rl_loop.environments import reversing

CONFIGS = Path(__file__).parents[3] / "configs/rl"
WORDS = arithmetic.vocabulary_text()
SIZE = 1200
QUESTION = [{"role": "user", "content": "Compute 12*34. Ends with <|end|> or <|im_end|>?"}]


def load_recipe(name: str, tokenizer: Path) -> RlConfig:
    settings = [f"model.vocab_size={SIZE}", "vocabulary=tokenizer", f"tokenizer={tokenizer}"]
    return load_rl_config(CONFIGS / f"{name}.yaml", settings)


def codec(config: RlConfig) -> ChatCodec:
    check_chat_format(config)
    return build_codec(config)


@pytest.fixture
def chatml(tmp_path: Path) -> Path:
    tiny_vocabulary(SIZE, WORDS).save(tmp_path)
    return tmp_path


@pytest.fixture
def harmony(tmp_path: Path) -> Path:
    TinyVocabulary(SIZE, WORDS).save(tmp_path)
    return tmp_path


def test_gpt_oss_speaks_chatml_with_a_chatml_tokenizer(chatml: Path) -> None:
    config = load_recipe("tiny_retool", chatml)
    spoken = codec(config)
    assert isinstance(spoken, ChatMl)
    assert spoken.decode(spoken.render_prompt(QUESTION)).startswith("<|im_start|>system")
    assert spoken.render_prompt(QUESTION) == codec(load_recipe("tiny_dense", chatml)).render_prompt(
        QUESTION
    )
    assert collect_model_card_facts(config).chat_format == "chatml"


def test_harmony_tokenizer_equals_the_tiny_vocabulary(harmony: Path) -> None:
    spoken = codec(load_recipe("tiny_retool", harmony))
    assert isinstance(spoken, Harmony) and isinstance(spoken.vocabulary, HarmonyTokenizer)
    tiny = TinyVocabulary(SIZE, WORDS)
    expected = Harmony(tiny, load_recipe("tiny_retool", harmony).prompt)
    prompt = spoken.render_prompt(QUESTION)
    assert prompt == expected.render_prompt(QUESTION)
    assert spoken.stop_token_ids == expected.stop_token_ids
    assert spoken.decode(prompt) == expected.decode(prompt)
    assert spoken.vocabulary.to_harmony(prompt) == tiny.to_harmony(prompt)
    text = "é漢 <|end|> \U0001f600"
    assert spoken.vocabulary.encode_text(text) == tiny.encode_text(text)


def test_harmony_tokenizer_parses_sampled_turns(harmony: Path) -> None:
    spoken = codec(load_recipe("tiny_retool", harmony))
    assert isinstance(spoken, Harmony) and isinstance(spoken.vocabulary, HarmonyTokenizer)
    ids = spoken.vocabulary.markup
    text = spoken.vocabulary.encode_text
    answer = [ids["<|channel|>"], *text("final"), ids["<|message|>"], *text("408")]
    parsed = spoken.parse([*answer, ids["<|return|>"]])
    assert not isinstance(parsed, FormatError)
    assert [(message.channel, message.text) for message in parsed] == [("final", "408")]

    # An id that Harmony does not have is a format error, wherever it stands.
    unused = SIZE - 1
    assert isinstance(spoken.parse([*answer, unused, ids["<|return|>"]]), FormatError)


def test_dense_model_speaks_harmony_with_harmonys_tokens(harmony: Path) -> None:
    config = load_recipe("tiny_dense", harmony)
    assert isinstance(codec(config), Harmony)
    # The parsers of other servers know only the ids of the released models.
    assert not collect_model_card_facts(config).has_released_vocabulary


def test_family_decides_if_a_tokenizer_has_both_formats(harmony: Path) -> None:
    path = harmony / "tokenizer.json"
    description = json.loads(path.read_text())
    names = {f"<|unused_{i}|>": name for i, name in enumerate(("<|im_start|>", "<|im_end|>"))}
    for added in description["added_tokens"]:
        added["content"] = names.get(added["content"], added["content"])
    path.write_text(json.dumps(description))
    assert isinstance(codec(load_recipe("tiny_retool", harmony)), Harmony)
    assert isinstance(codec(load_recipe("tiny_dense", harmony)), ChatMl)


def test_missing_tokens_of_the_familys_format_are_named(tmp_path: Path) -> None:
    description = json.loads(without_call_tokens()._tokenizer.to_str())
    description["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    for name, token in (("tiny_retool", SPECIAL_TOKENS[0]), ("tiny_dense", "<|im_start|>")):
        with pytest.raises(TokenizerError) as refusal:
            codec(load_recipe(name, tmp_path))
        assert f"has no token {token}" in str(refusal.value)
        assert "with the tokens of ChatML or Harmony" in str(refusal.value)

    (tmp_path / "tokenizer.json").write_text("[1]")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        check_chat_format(load_recipe("tiny_retool", tmp_path))


# ---- tokenizers of runs


def save_tokenizer(directory: Path) -> Path:
    directory.mkdir(parents=True)
    tiny_vocabulary(512, "").save(directory)
    return directory


def save_run(directory: Path, **keys: str) -> Path:
    directory.mkdir()
    lines = [f"{key}: {value}" for key, value in {"name": "run", **keys}.items()]
    (directory / "config.yaml").write_text("\n".join(lines))
    return directory


def test_run_without_export_has_the_tokenizer_of_its_inputs(tmp_path: Path) -> None:
    base = save_tokenizer(tmp_path / "base")
    other = save_tokenizer(tmp_path / "other")
    first = save_run(tmp_path / "first", initial_weights=str(base))
    second = save_run(tmp_path / "second", initial_weights=str(first))
    assert tokenizer_directory(second) == tokenizer_directory(first) == base
    named = save_run(tmp_path / "named", initial_weights=str(first), tokenizer=str(other))
    assert tokenizer_directory(named) == other

    export = save_tokenizer(second / "export")
    assert tokenizer_directory(second) == export
    assert tokenizer_directory(save_run(tmp_path / "random", initial_weights="null")) is None
    circle = tmp_path / "circle"
    assert tokenizer_directory(save_run(circle, initial_weights=str(circle))) is None


def test_other_weights_bring_their_tokenizer(tmp_path: Path) -> None:
    base = save_tokenizer(tmp_path / "base")
    other = save_tokenizer(tmp_path / "other")
    config = load_rl_config(
        CONFIGS / "tiny_dense.yaml", ["vocabulary=tokenizer", f"initial_weights={base}"]
    )
    assert with_tokenizer_from(config, None).tokenizer_source == base
    assert with_tokenizer_from(config, other).tokenizer_source == other
    assert with_tokenizer_from(config, tmp_path).tokenizer_source == base, "it has no tokenizer"
    named = config.model_copy(update={"tokenizer": base})
    assert with_tokenizer_from(named, other).tokenizer_source == base


def test_tiny_vocabulary_has_the_words_of_task_files(tmp_path: Path) -> None:
    """An environment without a generator is demonstrated on the rows of its file."""
    path = tmp_path / "words.jsonl"
    path.write_text('{"word": "drawer"}\n')
    source = f"{{environment: '{reversing.NAME}', train_path: {path}, held_out_path: {path}}}"
    settings = [f"tasks.sources={{words: {source}}}", "vocabulary=tiny"]

    codec = build_codec(load_rl_config(CONFIGS / "tiny_instructions.yaml", settings))

    # One or two tokens, and not a token per letter.
    for word in ("Reverse", " drawer", "reward"):
        assert len(codec.vocabulary.encode_text(word)) <= 2, word


def test_tiny_vocabulary_of_files_is_that_of_generated_tasks() -> None:
    """An SFT run on generated tasks is continued on files, with an evaluation of other tasks."""

    def ids(sources: str) -> list[int]:
        settings = [f"tasks.sources={sources}", "vocabulary=tiny"]
        codec = build_codec(load_rl_config(CONFIGS / "tiny_gsm8k.yaml", settings))
        return codec.vocabulary.encode_text("A girl has boys and cards. 5 + 8 pens were lost.")

    generated = ids("{a: {environment: gsm8k}}")
    file = "train_path: a.jsonl, held_out_path: b.jsonl"
    evaluated = "b: {environment: instructions, held_out_path: c.jsonl, weight: 0}"
    assert ids(f"{{a: {{environment: gsm8k, {file}}}, {evaluated}}}") == generated
