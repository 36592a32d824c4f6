"""Checks of a run's vocabulary and chat format, before torch or any weights are loaded."""

import logging
import tempfile
from pathlib import Path

from megatron_gptoss.families.gpt_oss.config import RELEASED_VOCABULARY
from megatron_gptoss.user_error import UserError
from rl_loop.chat.tokenizer_vocabulary import TOKENIZER_FILE, text_tokens
from rl_loop.config.errors import StartError
from rl_loop.config.every_run import RunConfig
from rl_loop.config.run import SftConfig
from rl_loop.config.served import load_served_config
from rl_loop.harmony.o200k import ensure_o200k
from rl_loop.lifecycle.error_hints import how_to_make_weights
from rl_loop.tasks.codec import build_codec, detect_chat_format, tokenizer_directory

logger = logging.getLogger(__name__)


def check_chat_format(config: RunConfig) -> None:
    """Check the vocabulary, and that the chat format supports the configuration.

    Raises:
        StartError: the vocabulary does not fit, or the chat format does not support a setting.
        TokenizerError: the tokenizer cannot be read.
        VocabularyUnavailableError: the vocabulary of the released models is needed and missing.
    """
    if config.vocabulary == "tokenizer":
        _check_tokenizer(config.tokenizer_source)
    chat_format = detect_chat_format(config)
    # The tiny vocabularies and Harmony's parser use tokens of the released models.
    if config.vocabulary != "tokenizer" or chat_format == "harmony":
        ensure_o200k()
    if config.vocabulary == "gptoss":
        _check_released_vocabulary(config)
    if chat_format == "chatml":
        _check_chatml(config)


def _check_tokenizer(source: Path | None) -> None:
    """Raise StartError if there is no tokenizer."""
    if source is not None and not source.exists():
        raise StartError(
            f"vocabulary=tokenizer: {source} does not exist. {how_to_make_weights(source)}"
        )
    if tokenizer_directory(source) is None:
        raise StartError(
            "vocabulary=tokenizer: there is no tokenizer.json in "
            f"{source or 'initial_weights, which is null'}. Set tokenizer to a directory that "
            "has one"
        )


def _check_released_vocabulary(config: RunConfig) -> None:
    """Raise StartError if the model does not have the released models' ids."""
    family = config.model.model_type
    if detect_chat_format(config) != "harmony":
        raise StartError(
            f"vocabulary=gptoss does not fit a {family} model. Set vocabulary=tokenizer for the "
            "tokenizer of the checkpoint, or vocabulary=tiny"
        )
    if config.model.vocab_size != RELEASED_VOCABULARY:
        raise StartError(
            f"vocabulary=gptoss has {RELEASED_VOCABULARY} ids, but model.vocab_size is "
            f"{config.model.vocab_size}. Set vocabulary=tokenizer for the tokenizer of the "
            "checkpoint, or vocabulary=tiny"
        )


def _check_chatml(config: RunConfig) -> None:
    """Raise StartError for settings that only Harmony supports."""
    if isinstance(config, SftConfig) and config.demonstrations.history == "harmony":
        raise StartError(
            "demonstrations.history=harmony is only for Harmony. A model with ChatML sees earlier "
            "turns as they were sampled. Set demonstrations.history=append"
        )


def check_tiny_vocabulary(config: RunConfig) -> None:
    """Raise StartError if the initial weights are of a run with a different tiny vocabulary.

    That run used the same ids for different tokens, so the policy would write meaningless text
    without an error.
    """
    weights = config.initial_weights
    if config.vocabulary != "tiny" or weights is None:
        return

    try:
        differs = _has_different_tokens(weights, config)
    except (UserError, ValueError, OSError) as error:
        # The vocabulary of a run without an export depends on its data, which may be gone.
        logger.warning(
            "initial_weights: the vocabulary of %s was not compared with that of this run: %s",
            weights,
            error,
        )
        return

    if differs:
        raise StartError(
            f"initial_weights: {weights} has a different tiny vocabulary, which consists of the "
            "words of tasks or conversations. Use the tasks.sources of that run, or set "
            "vocabulary_data to its data"
        )


def _has_different_tokens(weights: Path, config: RunConfig) -> bool:
    """Return True if the tokens of an export or a run differ from this run's tiny vocabulary."""
    if (weights / TOKENIZER_FILE).exists():
        return text_tokens(weights) != _tiny_tokens(config)
    if not (weights / "config.yaml").exists():
        return False

    earlier = load_served_config(weights)
    if _vocabulary_sources(earlier) == _vocabulary_sources(config):
        return False
    return _tiny_tokens(earlier) != _tiny_tokens(config)


def _vocabulary_sources(config: RunConfig) -> tuple[object, ...]:
    """Return the settings that decide which tokens a tiny vocabulary has."""
    words = config.vocabulary_conversations or config.tasks.sources
    return config.vocabulary, detect_chat_format(config), config.model.vocab_size, words


def _tiny_tokens(config: RunConfig) -> dict[str, int]:
    """Return the ids of a tiny vocabulary's text tokens."""
    with tempfile.TemporaryDirectory() as scratch:
        build_codec(config).vocabulary.save(Path(scratch))
        return text_tokens(Path(scratch))
