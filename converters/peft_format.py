"""Adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

Attention's projections are PEFT's ``target_modules``, one pair of A [rank, in] and B [out, rank]
each. The matrices of a layer's experts, one Hugging Face tensor for all experts, are
``target_parameters`` (peft 0.18 and later), whose adapters lie in two matrices:

    lora_A [experts * rank, in]     expert-major: A of expert 0, A of expert 1, ...
    lora_B [out, rank * experts]    rank-major: the first column of B of every expert, the second, ...

Read the other way round, either has the right shape and is wrong. Rows of B of the gate and up
projection alternate between gate and up, as the tensor's channels do.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from converters.errors import ConversionError
from converters.names import Shape, interleave_gate_up, separate_gate_up
from converters.safetensors_files import SafetensorsFile
from megatron_gptoss.config import AdapterConfig, AdapterTarget, ModelConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model.model.layers"

# The parameter that is wrapped first lies deeper: PEFT takes them in the order of the module.
_PEFT_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "router": "mlp.router",
    "gate_up": "mlp.experts.base_layer",
    "down": "mlp.experts",
}
_PARAMETERS = {
    "router": "mlp.router.weight",
    "gate_up": "mlp.experts.gate_up_proj",
    "down": "mlp.experts.down_proj",
}
"""Those of them that PEFT adapts as parameters, by the parameter's name."""
_MEGATRON_MODULES = {
    "q": "self_attention.linear_qkv",
    "k": "self_attention.linear_qkv",
    "v": "self_attention.linear_qkv",
    "o": "self_attention.linear_proj",
    "router": "mlp.router",
    "gate_up": "mlp.experts.experts.linear_fc1",
    "down": "mlp.experts.experts.linear_fc2",
}
"""In the keys of torch_dist checkpoints, which stack layers, and experts along a second axis."""
_FORBIDDEN = {
    "bias": ("none", "biases are frozen"),
    "use_rslora": (False, "the scale is alpha / rank"),
    "use_dora": (False, "adapters are plain LoRA"),
    "modules_to_save": (None, "only adapters are trained"),
    "alpha_pattern": ({}, "all adapters have one alpha"),
}
"""Settings of PEFT with the one value that we have, and why."""


@dataclass(frozen=True)
class AdapterMapping:
    """One adapter of one layer, or those of all its experts together."""

    layer: int
    kind: str
    """q, k, v, o, router, gate_up or down."""
    shape: Shape
    """[out, in] of the weight that it changes, of one expert."""
    rank: int
    experts: int | None
    """How many there are; None if it is not of experts."""

    @property
    def checkpoint_key(self) -> str:
        """Return the key of a torch_dist checkpoint without the factor's name, a or b."""
        return f"decoder.layers.{_MEGATRON_MODULES[self.kind]}.adapters.{self.kind}"

    @property
    def names(self) -> tuple[str, str]:
        """Return PEFT's names of A and B."""
        module = f"{PREFIX}.{self.layer}.{_PEFT_MODULES[self.kind]}"
        return f"{module}.lora_A.weight", f"{module}.lora_B.weight"

    @property
    def factor_shapes(self) -> tuple[Shape, Shape]:
        """Return our shapes of A and B, of one expert."""
        rows, columns = self.shape
        return (self.rank, columns), (rows, self.rank)

    @property
    def peft_shapes(self) -> tuple[Shape, Shape]:
        """Return PEFT's shapes of A and B."""
        rows, columns = self.shape
        width = self.rank * (self.experts or 1)
        return (width, columns), (rows, width)

    def to_peft(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring A [rank, in] and B [out, rank], or of experts stacks of them, into PEFT's layout."""
        if self.experts is None:
            return a, b
        if self.kind == "gate_up":
            b = torch.stack([interleave_gate_up(of_expert) for of_expert in b])

        # [experts, out, rank] -> [out, rank, experts]
        return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1).contiguous()

    def from_peft(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Invert ``to_peft``."""
        if self.experts is None:
            return a, b

        rows, columns = self.shape
        a = a.view(self.experts, self.rank, columns)
        b = b.view(rows, self.rank, self.experts).permute(2, 0, 1).contiguous()
        if self.kind == "gate_up":
            b = torch.stack([separate_gate_up(of_expert) for of_expert in b])
        return a, b


def adapter_mappings(model: ModelConfig, adapter: AdapterConfig) -> Iterator[AdapterMapping]:
    """Yield all adapters of a model, layer by layer."""
    hidden = model.hidden_size
    attention_shapes = {
        "q": (model.query_size, hidden),
        "k": (model.key_size, hidden),
        "v": (model.key_size, hidden),
        "o": (hidden, model.query_size),
        "router": (model.num_experts, hidden),
    }
    expert_shapes = {
        "gate_up": (2 * model.intermediate_size, hidden),
        "down": (hidden, model.intermediate_size),
    }
    expert_rank = adapter.rank_of_experts(model)

    for layer in range(model.num_layers):
        for kind, shape in attention_shapes.items():
            if kind in adapter.targets:
                yield AdapterMapping(layer, kind, shape, adapter.rank, experts=None)
        if "experts" in adapter.targets:
            for kind, shape in expert_shapes.items():
                yield AdapterMapping(layer, kind, shape, expert_rank, model.num_experts)


def peft_config(model: ModelConfig, adapter: AdapterConfig, base: str | None) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``.

    Args:
        model: the base's architecture.
        adapter: the settings.
        base: the Hugging Face name or directory of the base, for whoever loads the adapter.
    """
    modules = [f"{target}_proj" for target in ("q", "k", "v", "o") if target in adapter.targets]
    parameters = []
    rank_pattern = {}
    if "experts" in adapter.targets:
        parameters += [_PARAMETERS["gate_up"], _PARAMETERS["down"]]
        if adapter.rank_of_experts(model) != adapter.rank:
            rank_pattern = dict.fromkeys(parameters, adapter.rank_of_experts(model))
    if "router" in adapter.targets:
        parameters.append(_PARAMETERS["router"])

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


class PeftDirectory:
    """An adapter in PEFT's format, checked against a model: every tensor is there, and no other."""

    def __init__(self, path: Path, model: ModelConfig) -> None:
        """Open ``path``.

        Raises:
            ConversionError: naming the file, the setting or the tensor that does not fit.
        """
        self.path = path
        settings = _read_settings(path / CONFIG_FILE)
        self._weights = SafetensorsFile(path / WEIGHTS_FILE)
        self.adapter = self._adapter_config(settings, model)
        self.mappings = list(adapter_mappings(model, self.adapter))
        self._check_tensors()

    def read(self, mapping: AdapterMapping) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B in our layout, of experts stacked."""
        name_a, name_b = mapping.names
        return mapping.from_peft(self._weights.read(name_a), self._weights.read(name_b))

    def _adapter_config(self, settings: Mapping[str, Any], model: ModelConfig) -> AdapterConfig:
        """Make our settings of PEFT's; which targets there are, the tensors say."""
        file = self.path / CONFIG_FILE
        for key, (value, reason) in _FORBIDDEN.items():
            if settings.get(key, value) not in (value, None):
                raise ConversionError(
                    f"{file}: {key} is {settings[key]!r}, and only {value!r} can be read: {reason}"
                )

        ranks: dict[AdapterTarget, int] = {}
        for kind, rank in self._ranks(model).items():
            target: Any = "experts" if kind in ("gate_up", "down") else kind
            ranks.setdefault(target, rank)
            if ranks[target] != rank:
                raise ConversionError(f"{self.path}: gate_up_proj and down_proj differ in rank")
        if not ranks:
            raise ConversionError(f"{self.path / WEIGHTS_FILE}: holds no adapter of GPT-OSS")

        others = {rank for target, rank in ranks.items() if target != "experts"}
        if len(others) > 1:
            raise ConversionError(
                f"{self.path}: attention's adapters have ranks {sorted(others)}; only one rank for "
                "all, and another one for experts, can be read"
            )
        expert_rank = ranks.get("experts")
        return AdapterConfig(
            rank=others.pop() if others else settings["r"],
            alpha=settings["lora_alpha"],
            expert_rank=expert_rank,
            targets=tuple(ranks),
        )

    def _ranks(self, model: ModelConfig) -> dict[str, int]:
        """Return the rank of each kind of adapter that the first layer has."""
        ranks = {}
        for kind, module in _PEFT_MODULES.items():
            entry = self._weights.entries.get(f"{PREFIX}.0.{module}.lora_A.weight")
            if entry is not None:
                experts = model.num_experts if kind in ("gate_up", "down") else 1
                ranks[kind] = entry.shape[0] // experts
        return ranks

    def _check_tensors(self) -> None:
        """Compare names and shapes with those that the settings ask for."""
        file = self.path / WEIGHTS_FILE
        expected: dict[str, Shape] = {}
        for mapping in self.mappings:
            expected.update(zip(mapping.names, mapping.peft_shapes, strict=True))

        for name, shape in expected.items():
            entry = self._weights.entries.get(name)
            if entry is None:
                raise ConversionError(f"{file}: tensor {name} is missing")
            if tuple(entry.shape) != shape:
                raise ConversionError(
                    f"{file}: tensor {name} has shape {list(entry.shape)}, expected {list(shape)}"
                )
        for name in self._weights.entries:
            if name not in expected:
                raise ConversionError(f"{file}: tensor {name} is no adapter that can be read")


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConversionError(f"{file}: missing; expected an adapter in PEFT's format") from None
    except json.JSONDecodeError as error:
        raise ConversionError(f"{file}: not valid JSON ({error})") from None

    if settings.get("peft_type") != "LORA":
        raise ConversionError(
            f"{file}: peft_type is {settings.get('peft_type')!r}, expected 'LORA'"
        )
    for key in ("r", "lora_alpha"):
        if key not in settings:
            raise ConversionError(f"{file}: key {key} is missing")
    return settings
