"""Builds the codec of a run from its model family and vocabulary.

``detect_chat_format`` chooses the chat format, and ``_BUILDERS`` has a format's constructor.
"""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal

from megatron_gptoss.config import ModelConfig
from megatron_gptoss.families.dense.config import DenseModelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.tokenizer_vocabulary import (
    TOKENIZER_FILE,
    TokenizerVocabulary,
    added_tokens,
    read_vocabulary,
)
from rl_loop.chatml.codec import ChatMl
from rl_loop.chatml.vocabulary import ChatMlVocabulary, tiny_vocabulary
from rl_loop.config.load import read_yaml
from rl_loop.config.partial_configs import EpisodesConfig
from rl_loop.config.tasks import SourceConfig
from rl_loop.config.training import DemonstrationConfig
from rl_loop.conversations.corpus import conversation_texts
from rl_loop.environments import (
    ENVIRONMENTS,
    Task,
    environment_class,
    make_offline_environment,
)
from rl_loop.harmony.codec import Harmony
from rl_loop.harmony.vocabulary import GptOssVocabulary, HarmonyTokenizer, make_vocabulary
from rl_loop.tasks.demonstrations import demonstrate
from rl_loop.tasks.episode_prompts import build_prompt
from rl_loop.tasks.task_file import TaskData

ChatFormat = Literal["harmony", "chatml"]

CHAT_FORMATS: dict[type[ModelConfig], ChatFormat] = {
    GptOssModelConfig: "harmony",
    DenseModelConfig: "chatml",
}
"""Chat formats by model family. A checkpoint's tokenizer may have the tokens of another one."""
TOKENIZER_KINDS: dict[ChatFormat, type[TokenizerVocabulary]] = {
    "harmony": HarmonyTokenizer,
    "chatml": ChatMlVocabulary,
}
"""Vocabularies of a checkpoint's tokenizer by chat format."""

CORPUS_TASKS = 100
"""Number of demonstrations per source from which a tiny vocabulary is built."""


def build_codec(config: EpisodesConfig) -> ChatCodec:
    """Build the codec of a run. A tiny vocabulary is built from demonstrations of the tasks.

    Raises:
        ValueError: if the vocabulary does not fit the model.
    """
    return _BUILDERS[detect_chat_format(config)](config)


def detect_chat_format(config: EpisodesConfig) -> ChatFormat:
    """Return the chat format of a run.

    It is that of the model family. If the checkpoint's tokenizer lacks tokens of this format and
    has all tokens of another one, it is the other one.

    Raises:
        TokenizerError: if the tokenizer cannot be read.
    """
    family_format = CHAT_FORMATS[type(config.model)]
    directory = tokenizer_directory(config.tokenizer_source)
    if config.vocabulary != "tokenizer" or directory is None:
        return family_format

    names = added_tokens(directory)
    known = [
        form for form, kind in TOKENIZER_KINDS.items() if names.issuperset(kind.required_tokens)
    ]
    if family_format in known or not known:
        return family_format
    return known[0]


def tokenizer_directory(source: Path | None) -> Path | None:
    """Return the directory with the tokenizer of a Hugging Face directory or of a run.

    A run has a copy in its export. Without an export, it is the tokenizer that the run began with.
    """
    visited: set[Path] = set()
    while source is not None and source not in visited:
        visited.add(source)
        for directory in (source, source / "export"):
            if (directory / TOKENIZER_FILE).exists():
                return directory
        source = _tokenizer_source_of_run(source)
    return None


def _tokenizer_source_of_run(run: Path) -> Path | None:
    """Return the source of a run's tokenizer. None if the directory is not a run."""
    file = run / "config.yaml"
    if not file.exists():
        return None
    tree = read_yaml(file)
    source = tree.get("tokenizer") or tree.get("initial_weights")
    return None if source is None else Path(str(source))


def with_tokenizer_from[C: EpisodesConfig](config: C, weights: Path | None) -> C:
    """Return a configuration for other weights than ``initial_weights``.

    They have their own tokenizer, unless ``tokenizer`` is set or they come without one.
    """
    if config.tokenizer is not None or tokenizer_directory(weights) is None:
        return config
    return config.model_copy(update={"tokenizer": weights})


def _build_harmony(config: EpisodesConfig) -> Harmony:
    size, seconds = config.model.vocab_size, config.sandbox.timeout_seconds
    if config.vocabulary == "tokenizer":
        vocabulary = read_vocabulary(HarmonyTokenizer, _tokenizer_directory(config), size)
        return Harmony(vocabulary, config.prompt, seconds)

    def corpus() -> str:
        # Episodes need a separate event loop, because the caller may be running one.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(vocabulary_corpus, config).result()

    return Harmony(make_vocabulary(config.vocabulary, size, corpus), config.prompt, seconds)


def _build_chatml(config: EpisodesConfig) -> ChatMl:
    size, seconds = config.model.vocab_size, config.sandbox.timeout_seconds
    if config.vocabulary == "gptoss":
        raise ValueError(
            "vocabulary=gptoss is for GPT-OSS only. Set vocabulary=tokenizer for the tokenizer "
            "of the checkpoint, or vocabulary=tiny"
        )
    # As for Harmony, demonstrations need a separate event loop.
    if config.vocabulary == "tiny":
        with ThreadPoolExecutor(1) as thread:
            corpus = thread.submit(_chatml_corpus, config).result()
        return ChatMl(tiny_vocabulary(size, corpus), config.chatml, seconds)

    vocabulary = read_vocabulary(ChatMlVocabulary, _tokenizer_directory(config), size)
    return ChatMl(vocabulary, config.chatml, seconds)


def _tokenizer_directory(config: EpisodesConfig) -> Path:
    """Return the directory of vocabulary ``tokenizer``. Raises ValueError if there is none."""
    directory = tokenizer_directory(config.tokenizer_source)
    if directory is None:
        raise ValueError(
            "vocabulary=tokenizer: "
            f"{config.tokenizer_source or 'initial_weights is null, which'} has no "
            f"{TOKENIZER_FILE}. Set tokenizer to a directory that has one"
        )
    return directory


_BUILDERS: dict[ChatFormat, Callable[[EpisodesConfig], ChatCodec]] = {
    "harmony": _build_harmony,
    "chatml": _build_chatml,
}


# ---- corpora of tiny vocabularies


def vocabulary_corpus(config: EpisodesConfig) -> str:
    """Return the corpus of a run's tiny Harmony vocabulary."""
    harmony = Harmony(GptOssVocabulary(), config.prompt, config.sandbox.timeout_seconds)
    if config.vocabulary_conversations is not None:
        return "\n".join(conversation_texts(config.vocabulary_conversations, harmony))

    # The texts of all registered environments, so that words of every conversation, such as
    # "assistant", are tokens of every tiny vocabulary.
    texts = [ENVIRONMENTS.resolve(name).vocabulary_text() for name in ENVIRONMENTS]
    lines = [text for text in texts if text]
    for source in config.tasks.sources.values():
        text = environment_class(source.environment).vocabulary_text()
        if text and text not in lines:
            lines.append(text)
        if not text:
            lines += _demonstrated_texts(source, harmony)
    return "\n".join(lines)


def _chatml_corpus(config: EpisodesConfig) -> str:
    """Return the corpus of a run's tiny ChatML vocabulary."""
    # A vocabulary of single bytes is enough, because only the text is used.
    codec = ChatMl(tiny_vocabulary(512, ""), config.chatml, config.sandbox.timeout_seconds)
    if config.vocabulary_conversations is not None:
        return "\n".join(conversation_texts(config.vocabulary_conversations, codec))

    lines: list[str] = []
    for source in config.tasks.sources.values():
        text = environment_class(source.environment).vocabulary_text()
        demonstrated = []
        # The text of an environment covers its files, whose rows may have no script.
        if not text or source.held_out_path is None:
            demonstrated = _demonstrated_texts(source, codec)
        if text:
            # It determines which numbers are tokens. Numbers of a hundred tasks would hardly be
            # used again.
            demonstrated = [re.sub("[0-9]+", "0", line) for line in demonstrated]
        lines += [text, *demonstrated]
    return "\n".join(lines)


def _demonstrated_texts(source: SourceConfig, codec: ChatCodec) -> list[str]:
    """Return the text of episodes on training tasks of a source, or of prompts without a script."""
    # An evaluation that is added to the RL run must not change the vocabulary of the SFT run.
    if source.weight == 0:
        return []

    texts = []
    for i, task in enumerate(_corpus_tasks(source)):
        try:
            ids = demonstrate(task, codec, DemonstrationConfig(), seed=str(i)).token_ids
        except NotImplementedError:
            prompt = build_prompt(make_offline_environment(task))
            ids = codec.render_prompt(prompt.messages, prompt.tools, prompt.builtin_tools)
        texts.append(codec.decode(ids))
    return texts


def _corpus_tasks(source: SourceConfig) -> list[Task]:
    """Return generated tasks of a source, or rows of its file if it has no generator."""
    environment = environment_class(source.environment)
    options = environment.Options.model_validate(source.options)
    # Generated tasks come first, so that a run on generated tasks and a run on files have the same
    # vocabulary.
    try:
        generated = [environment.generate("train", 0, i, options) for i in range(CORPUS_TASKS)]
    except NotImplementedError:
        if source.train_path is None:
            raise
        rows = TaskData(
            source.train_path, source.environment, environment, options, columns=source.columns
        )
        return list(islice(rows, CORPUS_TASKS))
    return [replace(task, environment=source.environment) for task in generated]
