"""PEFT's ``adapter_config.json``: reading, writing and rejection of unsupported settings."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from converters.errors import ConversionError
from converters.model_extras import read_object
from megatron_gptoss.config import AdapterConfig, ModelConfig

PEFT_CONFIG_FILE = "adapter_config.json"

TARGETS = {
    "embedding": "model.embed_tokens",
    "q": "model.layers.{layer}.self_attn.q_proj",
    "k": "model.layers.{layer}.self_attn.k_proj",
    "v": "model.layers.{layer}.self_attn.v_proj",
    "o": "model.layers.{layer}.self_attn.o_proj",
    "router": "model.layers.{layer}.mlp.router.weight",
    "gate_up": "model.layers.{layer}.mlp.experts.gate_up_proj",
    "down": "model.layers.{layer}.mlp.experts.down_proj",
    "head": "lm_head",
}
"""Adapted weight by kind of adapter: a module, or a parameter for the kinds in PARAMETERS."""
PARAMETERS = ("router", "gate_up", "down")
"""Kinds that PEFT adapts as parameters of a module, not as a module."""
EXPERTS = ("gate_up", "down")
"""Kinds of the two expert matrices."""
MAX_REPETITIONS = 4
"""Maximum number of repetitions in a regular expression of the settings."""
GROUPS = ("SUBPATTERN", "BRANCH", "MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT", "ATOMIC_GROUP")
"""Parts of a regular expression that must not be repeated, to bound the matching time."""
_SUPPORTED = {
    "peft_type",
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "bias",
    "init_lora_weights",
    # no effect on the values that are computed from the tensors
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
}
"""Keys of PEFT's settings that may have any value, or are checked separately."""
_REASONS = {
    "use_dora": "adapters are plain LoRA",
    "lora_bias": "adapters have no bias",
    "modules_to_save": "only adapters are trained",
    "fan_in_fan_out": "GPT-OSS has no weights that are stored transposed",
    "layer_replication": "it creates another model",
    "trainable_token_indices": "only adapters are trained",
}
"""Reason against each unsupported setting. Settings that are unknown are rejected, too."""
_PLAIN_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base unmodified.

Other values move a part of the base into A and B.
"""


def peft_config(model: ModelConfig, adapter: AdapterConfig, base: str | None) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``.

    Args:
        model: model configuration of the base.
        adapter: adapter settings.
        base: Hugging Face name or directory of the base, for users who load the adapter.
    """
    modules = [f"{target}_proj" for target in ("q", "k", "v", "o") if target in adapter.targets]
    if "embedding" in adapter.targets:
        modules.append("embed_tokens")
    if "head" in adapter.targets:
        modules.append("lm_head")

    parameters = []
    rank_pattern = {}
    if "experts" in adapter.targets:
        parameters += ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        # PEFT accepts any prefix before a pattern, so a suffix selects a matrix in every layer.
        if adapter.rank_of_experts(model) != adapter.rank:
            rank_pattern = dict.fromkeys(parameters, adapter.rank_of_experts(model))
    if "router" in adapter.targets:
        parameters.append("mlp.router.weight")

    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": modules or None,
        "target_parameters": parameters or None,
        "rank_pattern": rank_pattern,
        "alpha_pattern": {},
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


@dataclass(frozen=True)
class PeftSettings:
    """Content of ``adapter_config.json``, with PEFT's rules for the selection of weights."""

    file: Path
    rank: int
    alpha: float
    is_rank_stabilized: bool
    """True for a scale of alpha / sqrt(rank) (rsLoRA), False for alpha / rank."""
    rank_pattern: dict[str, int]
    """Rank by regular expression of module names; ``rank`` for other modules."""
    alpha_pattern: dict[str, float]
    """Alpha by regular expression of module names; ``alpha`` for other modules."""
    modules: list[str] | str | None
    """target_modules: suffixes of names, or a regular expression."""
    parameters: list[str] | None
    """target_parameters: suffixes of names."""
    excluded: list[str] | str | None
    """exclude_modules: suffixes of module names, or a regular expression."""
    layers: list[int] | None
    """layers_to_transform: layers to which ``modules`` applies if it is a list; None for all."""
    layers_patterns: list[str]
    """layers_pattern: regular expressions of the name before the number of a layer."""
    base: str | None
    """base_model_name_or_path."""

    def find_rank(self, kind: str, layer: int | None = 0) -> int:
        """Return the rank that a kind of adapter has in a layer, by PEFT's rules."""
        return _by_pattern(self.rank_pattern, _name(kind, layer), self.rank)

    def compute_scale(self, kind: str, layer: int | None = 0) -> float:
        """Return the factor of the product B A."""
        # rank_pattern and alpha_pattern are independent: one may change without the other.
        alpha = _by_pattern(self.alpha_pattern, _name(kind, layer), self.alpha)
        rank = self.find_rank(kind, layer)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def names(self, kind: str, layer: int | None = 0) -> bool:
        """Return True if PEFT adapts this kind of weight in a layer.

        See check_target_module_exists and _inject_parameters in PEFT's tuners_utils.py.
        """
        name = _name(kind, layer)
        # Parameters have their own rules: suffixes only, without exclusions and layers.
        if kind in PARAMETERS:
            return _ends_with_any(name, self.parameters or [])
        # As in PEFT, exclude_modules has precedence over target_modules.
        if isinstance(self.excluded, str):
            if re.fullmatch(self.excluded, name):
                return False
        elif _ends_with_any(name, self.excluded or []):
            return False

        if self.modules is None:
            return False
        if isinstance(self.modules, str):
            return re.fullmatch(self.modules, name) is not None
        # As in PEFT, a complete name is exempt from layers_to_transform.
        if name in self.modules:
            return True
        return _ends_with_any(name, self.modules) and self._has_layer(name)

    def _has_layer(self, name: str) -> bool:
        if not self.layers:
            return True
        patterns = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in self.layers_patterns]
        for pattern in patterns or [r".*?\.[^.]*\.(\d+)\."]:
            match = re.match(pattern, name)
            # The pattern may have groups, too. The layer's number is the last group.
            if match is not None:
                return int(match[match.lastindex or 1]) in self.layers
        return False


def _name(kind: str, layer: int | None) -> str:
    return TARGETS[kind].format(layer=layer)


def _ends_with_any(name: str, targets: list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _by_pattern[Number: (int, float)](
    patterns: Mapping[str, Number], name: str, default: Number
) -> Number:
    for pattern, value in patterns.items():
        # As in PEFT's get_pattern_key: the first pattern that matches wins.
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            return value
    return default


def read_settings(file: Path) -> PeftSettings:
    """Read PEFT's settings.

    Raises:
        ConversionError: naming a key that is missing, invalid or not supported.
    """
    if not file.exists():
        raise ConversionError(f"{file}: missing; expected an adapter in PEFT's format")
    settings = read_object(file)
    if settings.get("peft_type") != "LORA":
        raise ConversionError(
            f"{file}: peft_type is {settings.get('peft_type')!r}, expected 'LORA'"
        )
    _check_plain_lora(file, settings)

    # PEFT accepts a single layer. true is an int in Python, but no layer.
    layers = settings.get("layers_to_transform")
    if isinstance(layers, int) and not isinstance(layers, bool):
        layers = [layers]
    # Only for messages, so any other type counts as missing.
    base = settings.get("base_model_name_or_path")
    return PeftSettings(
        file=file,
        rank=_positive(file, settings, "r"),
        alpha=_positive(file, settings, "lora_alpha"),
        is_rank_stabilized=bool(settings.get("use_rslora")),
        rank_pattern=_numbers_by_pattern(file, settings, "rank_pattern"),
        alpha_pattern=_numbers_by_pattern(file, settings, "alpha_pattern"),
        modules=_names_or_pattern(file, settings, "target_modules"),
        parameters=_check_list(file, "target_parameters", settings.get("target_parameters"), str),
        excluded=_names_or_pattern(file, settings, "exclude_modules"),
        layers=_check_list(file, "layers_to_transform", layers, int),
        layers_patterns=_patterns_of_layers(file, settings),
        base=base if isinstance(base, str) else None,
    )


def _check_list(file: Path, key: str, value: Any, kind: type) -> Any:
    """Return a list of strings or integers, or None.

    Raises:
        ConversionError: if ``value`` is anything else.
    """
    # type() instead of isinstance(), because true is an int in Python.
    if value is None or (
        isinstance(value, list) and all(type(element) is kind for element in value)
    ):
        return value
    elements = "strings" if kind is str else "integers"
    raise ConversionError(f"{file}: {key} is {value!r}, expected a list of {elements} or null")


def _names_or_pattern(file: Path, settings: Mapping[str, Any], key: str) -> Any:
    value = settings.get(key)
    if isinstance(value, str):
        _check_pattern(file, key, value)
        return value
    return _check_list(file, key, value, str)


def _patterns_of_layers(file: Path, settings: Mapping[str, Any]) -> list[str]:
    value = settings.get("layers_pattern")
    patterns = [value] if isinstance(value, str) and value else value or []
    for pattern in _check_list(file, "layers_pattern", patterns, str):
        _check_pattern(file, "layers_pattern", pattern)
    return list(patterns)


def _numbers_by_pattern(file: Path, settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = settings.get(key) or {}
    if not isinstance(table, dict):
        raise ConversionError(f"{file}: {key} is {table!r}, expected a table of numbers by name")
    for pattern in table:
        _check_pattern(file, key, pattern)
    # Ranks are integers, alphas may be fractions.
    kind: Literal["r", "lora_alpha"] = "r" if key == "rank_pattern" else "lora_alpha"
    return {name: _positive(file, table, name, kind) for name in table}


def _check_pattern(file: Path, key: str, pattern: str) -> None:
    """Raise ConversionError unless ``pattern`` is a regular expression that matches fast."""
    try:
        re.compile(pattern)
        parsed = re._parser.parse(pattern)  # type: ignore[attr-defined]
    except (re.error, RecursionError, OverflowError) as error:
        raise ConversionError(
            f"{file}: {key} has {pattern!r}, which is not a regular expression ({error})"
        ) from None

    # Matching time grows with the length of a name to the power of the number of repetitions. It
    # is exponential if a group is repeated, such as (a+)+.
    repetitions = _count_repetitions(parsed, inside=False)
    if repetitions > MAX_REPETITIONS:
        raise ConversionError(
            f"{file}: {key} has {pattern[:80]!r}, which repeats a group or has more than "
            f"{MAX_REPETITIONS} repetitions and may match too slowly. List the names instead"
        )


def _count_repetitions(parsed: Any, inside: bool) -> float:
    """Count the repetitions of a parsed regular expression; infinity if they are nested."""
    total = 0.0
    for operation, argument in parsed:
        # An optional part "x?" repeats at most once, so it costs no more than its content.
        if str(operation) in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            _, most, repeated = argument
            if most == 1:
                total += _count_repetitions(repeated, inside)
            elif inside or any(str(inner) in GROUPS for inner, _ in repeated):
                return math.inf
            else:
                # A second repetition inside of this one would make matching exponential.
                total += 1 + _count_repetitions(repeated, inside=True)
            continue

        # The parts of a group, a branch or an assertion are nested in its argument.
        arguments = argument if isinstance(argument, tuple | list) else [argument]
        for part in arguments:
            for branch in part if isinstance(part, list) else [part]:
                if hasattr(branch, "data"):
                    total += _count_repetitions(branch, inside)
    return total


def _check_plain_lora(file: Path, settings: Mapping[str, Any]) -> None:
    """Raise ConversionError for a setting that computes more than scale * (B A)."""
    if settings.get("bias", "none") != "none":
        raise ConversionError(
            f"{file}: bias is {settings['bias']!r}, but only 'none' is supported: biases are frozen"
        )
    if settings.get("init_lora_weights") not in _PLAIN_INITIALIZATIONS:
        raise ConversionError(
            f"{file}: init_lora_weights is {settings['init_lora_weights']!r}, which changes the "
            "base. Save the adapter with PEFT's path_initial_model_for_weight_conversion, which "
            "converts it to a plain adapter"
        )

    # PEFT writes every key of its version. Keys that are null, false or empty change nothing.
    for key, value in settings.items():
        if key not in _SUPPORTED and value:
            reason = _REASONS.get(key, "the key is unknown and may change the results")
            raise ConversionError(f"{file}: {key} is {value!r}, which is not supported: {reason}")


def _positive(
    file: Path,
    settings: Mapping[str, Any],
    key: str,
    kind: Literal["r", "lora_alpha"] | None = None,
) -> Any:
    """Return a positive number. For the kind "r" it must be an integer."""
    if key not in settings:
        raise ConversionError(f"{file}: key {key} is missing")

    value = settings[key]
    kinds: Any = (int,)
    expected = "a positive integer"
    if (kind or key) == "lora_alpha":
        kinds = (int, float)
        expected = "a positive number"
    # true would pass as the integer 1, and JSON readers accept Infinity.
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        raise ConversionError(f"{file}: {key} is {value!r}, expected {expected}")
    return value
