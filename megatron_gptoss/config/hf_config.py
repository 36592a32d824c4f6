"""Reading of Hugging Face's ``config.json``: the keys of a family, and rotary settings.

A family declares all keys in one ``HfKeys``. Unknown keys are errors, because they may change the
computation of the model.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from megatron_gptoss.rope_scaling import RopeScaling
from megatron_gptoss.untrusted_files import read_json

Config = TypeVar("Config", bound=BaseModel)

IGNORED = frozenset({
    "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "dtype", "model_type",
    "name_or_path", "torch_dtype", "transformers.js_config", "transformers_version",
    "unsloth_fixed", "unsloth_version",
})  # fmt: skip
"""Keys of every family that describe the file, not the model. An export writes its own."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys with ids of special tokens."""

MERGED_KEY = "megatron_gptoss_merged_adapters"
"""Key of a merged model with the digests of its adapters, so that none is merged twice."""

COPIED = frozenset({
    *TOKEN_IDS, MERGED_KEY, "sep_token_id", "decoder_start_token_id",
    # outputs other than the logits
    "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "return_dict",
    "use_cache",
    # classification heads, and keys that transformers 4 writes into every file
    "finetuning_task", "id2label", "is_decoder", "label2id", "num_labels", "prefix",
    "problem_type", "task_specific_params", "tf_legacy_loss", "tie_encoder_decoder",
    "tokenizer_class", "torchscript", "use_bfloat16",
    # generation settings, which belong into generation_config.json
    "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids",
    "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "min_p",
    "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens",
    "target_lookbehind", "temperature", "top_k", "top_p", "typical_p",
})  # fmt: skip
"""Keys of every family that change no logits. An export copies them from its reference."""

FIXED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_dropout": (0,),
    "auto_map": (),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (1,),
    "pruned_heads": ({},),
}
"""Keys of every family with the values that the layers compute. Null is always allowed."""

_ROPE_SECTIONS = ("rope_scaling", "rope_parameters")
"""Names of the rotary settings in releases, and in files of transformers 5."""
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate",
        "attention_factor",
    ),
    "llama3": (
        "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    ),
}  # fmt: skip
"""Keys of each ``rope_type`` that is built, without rope_type and rope_theta."""


@dataclass(frozen=True)
class HfKeys:
    """All keys of ``config.json`` that a family accepts, in addition to the shared ones."""

    fields: Mapping[str, str]
    """Field of the configuration class by key."""
    optional: frozenset[str] = frozenset()
    """Keys of ``fields`` that may be missing: then the field has its default."""
    nullable: frozenset[str] = frozenset()
    """Keys of ``fields`` that may be null. The family derives their fields."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Second spellings: a key, and the key whose value it must repeat."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys with the values that the layers compute. Null is always allowed."""
    checked: frozenset[str] = frozenset()
    """Keys that the code of the family reads, without the rotary settings."""
    copied: frozenset[str] = frozenset()
    """Keys that do not change logits. An export copies them from its reference."""

    def read(self, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the values of a parsed ``config.json`` by field.

        Args:
            raw: parsed content.
            where: name of the file in errors.

        Raises:
            ValueError: a key is missing or unknown, or its value is not supported. The message
                names the key.
        """
        known = {*self.fields, *self.aliases, *self.checked, *_ROPE_SECTIONS, "rope_theta"}
        known |= {"original_max_position_embeddings", *IGNORED, *COPIED, *self.copied}
        fixed = {**FIXED, **self.fixed}
        for key, value in raw.items():
            if key in fixed:
                _check_fixed(key, value, fixed[key], where)
            # Null means the default of transformers, as if the key were missing.
            elif key not in known and value is not None:
                raise ValueError(
                    f"{where}: {key} is unknown ({value!r}) and may change what the model "
                    "computes. Remove the key if it does not"
                )

        for key, original in self.aliases.items():
            value = raw.get(key)
            if value is not None and original in raw and value != raw[original]:
                raise ValueError(
                    f"{where}: {key} ({value!r}) and {original} ({raw[original]!r}) must be equal. "
                    "Correct the wrong one"
                )
        return self._read_fields(raw, where)

    def _read_fields(self, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the values by field; raise ValueError if a key is missing or null."""
        fields = {}
        for key, name in self.fields.items():
            if key not in raw:
                if key not in self.optional:
                    raise ValueError(f"{where}: key '{key}' is missing")
                continue
            if raw[key] is not None:
                fields[name] = raw[key]
            elif key not in self.nullable:
                raise ValueError(f"{where}: {key} is null, expected a value. Set it")
        return fields

    def copied_from(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a parsed ``config.json`` that an export copies."""
        return {key: value for key, value in raw.items() if key in COPIED or key in self.copied}

    def build(self, model: type[Config], fields: Mapping[str, Any], where: str) -> Config:
        """Return a validated configuration.

        Args:
            model: class of the configuration.
            fields: values by field.
            where: name of the file in errors.

        Raises:
            ValueError: a value is invalid. The message has one line and names the key.
        """
        # Users know the keys of their file, not the names of our fields.
        try:
            return model(**fields)
        except ValidationError as error:
            # One mistake at a time, because the message has one line.
            first = error.errors()[0]
            message = first["msg"].removeprefix("Value error, ")
            if not first["loc"]:
                raise ValueError(f"{where}: {self._with_key_names(message)}") from None
            key = self._with_key_names(str(first["loc"][0]))
            raise ValueError(f"{where}: {key} is {first['input']!r}: {message}") from None

    def _with_key_names(self, text: str) -> str:
        """Replace names of fields by keys of ``config.json``."""
        keys = {name: key for key, name in self.fields.items()}
        return re.sub(r"\w+", lambda word: keys.get(word[0], word[0]), text)


def _check_fixed(key: str, value: Any, allowed: tuple[Any, ...], where: str) -> None:
    """Raise ValueError if a value is neither null nor allowed."""
    # Compare types, too, because 0 == False and 1 == True in Python.
    fits = any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)
    if value is None or fits:
        return
    expected = " or ".join(repr(one) for one in allowed) or "no value"
    raise ValueError(
        f"{where}: {key} must be {expected}, got {value!r}. Models with other values are not "
        "supported"
    )


def load_hf_config(source: Path | str | dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Load a ``config.json``.

    Args:
        source: a file, its directory, or the parsed content.

    Returns:
        The content, and the name of the source for errors.

    Raises:
        ValueError: the file is missing, not regular, too large or not JSON. The message names it.
    """
    if isinstance(source, dict):
        return source, "config"

    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; expected a Hugging Face model directory") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: is not a JSON object. Copy or download it again")
    return content, str(path)


# -- rotary settings ---------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeSettings:
    """Rotary settings of a ``config.json``."""

    section: str
    """Key that contains the settings, for errors."""
    theta: float | None
    """Base of the frequencies; None if the file has none."""
    scaling: dict[str, Any]
    """rope_type, and its keys without null values."""

    def build(self, adapter: TypeAdapter[Any], where: str) -> RopeScaling | None:
        """Return the scaling; None for plain frequencies.

        Args:
            adapter: validator of the scalings that the family supports.
            where: name of the file in errors.

        Raises:
            ValueError: a key is missing or wrong. The message names it.
        """
        if self.scaling["rope_type"] == "default":
            return None
        values = {key: value for key, value in self.scaling.items() if key != "attention_factor"}
        try:
            scaling: RopeScaling = adapter.validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"] if part not in _ROPE_KEYS)
            message = first["msg"].removeprefix("Value error, ")
            if first["type"] == "missing":
                message = f"is missing, and rope_type {self.scaling['rope_type']!r} needs it"
            elif key:
                message = f"is {first['input']!r}: {message}"
            raise ValueError(f"{where}: {self.section}.{key} {message}") from None
        self._check_attention_factor(scaling, where)
        return scaling

    def _check_attention_factor(self, scaling: RopeScaling, where: str) -> None:
        """Raise ValueError if the factor of cos and sin in the file is not that of the layers."""
        factor = self.scaling.get("attention_factor")
        if factor is None:
            return
        # YaRN's factor (arXiv 2309.00071), which transformers computes if the file has none.
        expected = 0.1 * math.log(scaling.factor) + 1.0
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            factor = math.nan
        if not math.isclose(factor, expected, rel_tol=1e-9):
            raise ValueError(
                f"{where}: {self.section}.attention_factor must be {expected}, which follows from "
                "the "
                f"factor, or absent, got {self.scaling['attention_factor']!r}. Other values are "
                "not supported"
            )


def read_rope(raw: Mapping[str, Any], where: str) -> RopeSettings:
    """Read the rotary settings of a ``config.json`` from any version of transformers.

    Args:
        raw: parsed content.
        where: name of the file in errors.

    Raises:
        ValueError: a key is not supported, or two keys differ. The message names them.
    """
    sections = {name: raw[name] for name in _ROPE_SECTIONS if raw.get(name)}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise ValueError(f"{where}: {name} must be a table or null, got {section!r}")

    # If a file has both keys, they must be equal: transformers 5 prefers rope_scaling, and other
    # loaders prefer rope_parameters.
    scalings = {name: _read_section(name, section, where) for name, section in sections.items()}
    found = list(scalings.values())
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError(
            f"{where}: rope_scaling and rope_parameters differ. Remove the one that is wrong"
        )

    thetas = {name: section.get("rope_theta") for name, section in sections.items()}
    thetas["rope_theta"] = raw.get("rope_theta")
    values = [value for value in thetas.values() if value is not None]
    if any(value != values[0] for value in values):
        raise ValueError(
            f"{where}: rope_theta has different values in {', '.join(thetas)} ({values}). Remove "
            "those that are wrong"
        )

    # The name that the user finds in the file, for errors. A section with content comes first.
    section = next((name for name in _ROPE_SECTIONS if name in raw), "rope_scaling")
    section = next(iter(sections), section)
    scaling = found[0] if found else {"rope_type": "default"}
    outside = raw.get("original_max_position_embeddings")
    if outside is not None and outside != scaling.get("original_max_position_embeddings"):
        raise ValueError(
            f"{where}: original_max_position_embeddings is {outside!r} outside {section} and "
            f"{scaling.get('original_max_position_embeddings')!r} inside. Remove it outside"
        )
    return RopeSettings(section, values[0] if values else None, scaling)


def _read_section(name: str, section: dict[str, Any], where: str) -> dict[str, Any]:
    """Return rope_type and its keys; raise ValueError if a key is not supported."""
    # Older files have the key "type" instead of "rope_type".
    types = [section[key] for key in ("rope_type", "type") if section.get(key) is not None]
    if len(types) == 2 and types[0] != types[1]:
        raise ValueError(
            f"{where}: {name}.rope_type ({types[0]!r}) and {name}.type ({types[1]!r}) differ. "
            "Remove the one that is wrong"
        )
    rope_type = types[0] if types else "default"
    if not isinstance(rope_type, str) or rope_type not in _ROPE_KEYS:
        raise ValueError(
            f"{where}: {name}.rope_type {rope_type!r} is not supported. "
            f"Supported: {', '.join(_ROPE_KEYS)}"
        )

    scaling: dict[str, Any] = {"rope_type": rope_type}
    for key, value in section.items():
        if key in ("rope_type", "type", "rope_theta"):
            continue
        if key == "partial_rotary_factor":
            _check_fixed(f"{name}.{key}", value, (1,), where)
        elif key == "truncate" and not isinstance(value, bool):
            # Any text is true in Python, and null would be false although the default is true.
            raise ValueError(f"{where}: {name}.truncate must be true or false, got {value!r}")
        elif value is not None and key not in _ROPE_KEYS[rope_type]:
            raise ValueError(
                f"{where}: {name}.{key} ({value!r}) is not supported for rope_type {rope_type!r}. "
                "Remove the key if the model was trained without it"
            )
        elif value is not None:
            scaling[key] = value
    return scaling
