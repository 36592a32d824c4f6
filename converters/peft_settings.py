"""PEFT's ``adapter_config.json``: what it says of an adapter of GPT-OSS, and what we cannot read."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.errors import ConversionError
from converters.model_extras import read_object
from megatron_gptoss.config import AdapterConfig, ModelConfig

CONFIG_FILE = "adapter_config.json"

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
"""Every kind of adapter, with what it changes: a module, or one of the PARAMETERS."""
PARAMETERS = ("router", "gate_up", "down")
"""What PEFT adapts as parameters of a module, and not as a module."""
EXPERTS = ("gate_up", "down")
"""The two matrices of experts, which have adapters both or neither."""
_UNDERSTOOD = {
    "peft_type",
    "r",
    "lora_alpha",
    "rank_pattern",
    "target_modules",
    "target_parameters",
    "bias",
    "init_lora_weights",
    # what changes nothing that is computed from the tensors
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
}
"""Keys of PEFT's settings that may have any value, or are looked at by themselves."""
_REASONS = {
    "use_rslora": "the scale is alpha / rank",
    "use_dora": "adapters are plain LoRA",
    "lora_bias": "adapters have no bias",
    "modules_to_save": "only adapters are trained",
    "alpha_pattern": "all adapters have one alpha",
    "fan_in_fan_out": "GPT-OSS has no weights that are stored transposed",
    "layer_replication": "it makes another model",
    "trainable_token_indices": "only adapters are trained",
}
"""Why a setting that is on cannot be read. One that is not named here is refused as unknown."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base as it is; others put a part of it into A and B."""


def peft_config(model: ModelConfig, adapter: AdapterConfig, base: str | None) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``.

    Args:
        model: the base's architecture.
        adapter: the settings.
        base: the Hugging Face name or directory of the base, for whoever loads the adapter.
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
    """What ``adapter_config.json`` says."""

    file: Path
    rank: int
    alpha: float
    rank_pattern: dict[str, int]
    """Ranks by a regular expression of the names that have them; others have ``rank``."""
    targets: dict[str, Any]
    """target_modules and target_parameters as they are: lists of names, or None; of modules maybe
    a regular expression."""

    def rank_of(self, kind: str) -> int:
        """Return the rank of a kind of adapter, as PEFT finds it, in the first layer."""
        name = TARGETS[kind].format(layer=0)
        for pattern, rank in self.rank_pattern.items():
            if re.fullmatch(rf"(.*\.)?({pattern})", name):
                return rank
        return self.rank

    def names(self, kind: str) -> bool:
        """Tell whether this kind of adapter is in the lists of targets."""
        key = "target_parameters" if kind in PARAMETERS else "target_modules"
        targets = self.targets[key]
        if not isinstance(targets, list):
            return False
        name = TARGETS[kind].format(layer=0)
        return any(name == target or name.endswith(f".{target}") for target in targets)


def read_settings(file: Path) -> PeftSettings:
    """Read PEFT's settings. Raises ConversionError naming the key that cannot be read."""
    if not file.exists():
        raise ConversionError(f"{file}: missing; expected an adapter in PEFT's format")
    settings = read_object(file)

    if settings.get("peft_type") != "LORA":
        raise ConversionError(
            f"{file}: peft_type is {settings.get('peft_type')!r}, expected 'LORA'"
        )
    _refuse_other_methods(file, settings)

    rank_pattern = settings.get("rank_pattern") or {}
    for pattern in rank_pattern:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConversionError(
                f"{file}: rank_pattern has {pattern!r}, which is no regular expression ({error})"
            ) from None
    return PeftSettings(
        file=file,
        rank=_positive(file, settings, "r"),
        alpha=_positive(file, settings, "lora_alpha"),
        rank_pattern={name: _positive(file, rank_pattern, name) for name in rank_pattern},
        targets={key: settings.get(key) for key in ("target_modules", "target_parameters")},
    )


def _refuse_other_methods(file: Path, settings: Mapping[str, Any]) -> None:
    """Raise ConversionError for a setting that makes more of an adapter than s (B A)."""
    if settings.get("bias", "none") != "none":
        raise ConversionError(
            f"{file}: bias is {settings['bias']!r}, and only 'none' can be read: biases are frozen"
        )
    if settings.get("init_lora_weights") not in _PLAIN_STARTS:
        raise ConversionError(
            f"{file}: init_lora_weights is {settings['init_lora_weights']!r}, which changes the "
            "base: save it with PEFT's path_initial_model_for_weight_conversion, which makes a "
            "plain adapter of it"
        )

    for key, value in settings.items():
        if key not in _UNDERSTOOD and value:
            reason = _REASONS.get(key, "it is not known here, and may change what is computed")
            raise ConversionError(f"{file}: {key} is {value!r}, which cannot be read: {reason}")


def _positive(file: Path, settings: Mapping[str, Any], key: str) -> Any:
    """Return a positive number; a rank must be an integer."""
    if key not in settings:
        raise ConversionError(f"{file}: key {key} is missing")

    value = settings[key]
    kinds: Any = (int,)
    expected = "a positive integer"
    if key == "lora_alpha":
        kinds = (int, float)
        expected = "a positive number"
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        raise ConversionError(f"{file}: {key} is {value!r}, expected {expected}")
    return value
