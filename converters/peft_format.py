"""Adapters in PEFT's format: the tensors of ``adapter_model.safetensors``.

Attention's projections, the embedding and the output layer are PEFT's ``target_modules``, one pair
of A [rank, in] and B [out, rank] each. PEFT takes the embedding the other way round, as a product
of one-hot tokens with it: its A [rank, vocab_size] is our B transposed, its B [hidden_size, rank]
our A. The matrices of a layer's experts, one Hugging Face tensor for all experts, are
``target_parameters`` (peft 0.18 and later), whose adapters lie in two matrices:

    lora_A [experts * rank, in]     expert-major: A of expert 0, A of expert 1, ...
    lora_B [out, rank * experts]    rank-major: the first column of B of every expert, the second, ...

Read the other way round, either has the right shape and is wrong. Rows of B of the gate and up
projection alternate between gate and up, as the tensor's channels do.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from converters.bits import same_bits
from converters.errors import ConversionError
from converters.families.gpt_oss.table import interleave_gate_up, separate_gate_up
from converters.mapping import Shape
from converters.peft_settings import CONFIG_FILE, EXPERTS, TARGETS, read_settings
from converters.safetensors_files import SafetensorsFile
from megatron_gptoss.config import AdapterConfig, ModelConfig

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."

_PEFT_MODULES = TARGETS | {
    "router": "model.layers.{layer}.mlp.router",
    # The parameter that is wrapped first lies deeper: PEFT takes them in the order of the module.
    "gate_up": "model.layers.{layer}.mlp.experts.base_layer",
    "down": "model.layers.{layer}.mlp.experts",
}
"""What holds the factors of each kind of adapter."""
_MEGATRON_MODULES = {
    "embedding": "embedding.word_embeddings",
    "q": "decoder.layers.self_attention.linear_qkv",
    "k": "decoder.layers.self_attention.linear_qkv",
    "v": "decoder.layers.self_attention.linear_qkv",
    "o": "decoder.layers.self_attention.linear_proj",
    "router": "decoder.layers.mlp.router",
    "gate_up": "decoder.layers.mlp.experts.experts.linear_fc1",
    "down": "decoder.layers.mlp.experts.experts.linear_fc2",
    "head": "output_layer",
}
"""In the keys of torch_dist checkpoints, which stack layers."""
_BASE_COPIES = {
    f"{PREFIX}{module}{inner}.weight": f"{module}.weight"
    for module in ("model.embed_tokens", "lm_head")
    for inner in ("", ".base_layer")
}
"""What PEFT saves of the base beside adapters of embedding or output layer, by its name there."""
_LAYER = re.compile(re.escape(f"{PREFIX}model.layers.") + r"(\d+)\.")


@dataclass(frozen=True)
class AdapterMapping:
    """One adapter of the model, or those of all experts of a layer together."""

    kind: str
    """embedding, q, k, v, o, router, gate_up, down or head."""
    layer: int | None
    """None outside the layers."""
    shape: Shape
    """[out, in] of the weight that it changes, of one expert."""
    rank: int
    experts: int | None
    """How many there are; None if it is not of experts."""

    @property
    def checkpoint_key(self) -> str:
        """Return the key of a torch_dist checkpoint without the factor's name, a or b."""
        return f"{_MEGATRON_MODULES[self.kind]}.adapters.{self.kind}"

    @property
    def checkpoint_index(self) -> Shape:
        """Return where the checkpoint's tensors have it: (layer,), or () outside the layers."""
        return () if self.layer is None else (self.layer,)

    @property
    def names(self) -> tuple[str, str]:
        """Return PEFT's names of A and B."""
        return _peft_names(self.kind, self.layer)

    @property
    def factor_shapes(self) -> tuple[Shape, Shape]:
        """Return our shapes of A and B, of experts stacked."""
        rows, columns = self.shape
        stack = () if self.experts is None else (self.experts,)
        return (*stack, self.rank, columns), (*stack, rows, self.rank)

    @property
    def peft_shapes(self) -> tuple[Shape, Shape]:
        """Return PEFT's shapes of A and B."""
        rows, columns = self.shape
        if self.kind == "embedding":
            return (self.rank, rows), (columns, self.rank)

        width = self.rank * (self.experts or 1)
        return (width, columns), (rows, width)

    def to_peft(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring A [rank, in] and B [out, rank], or of experts stacks of them, into PEFT's layout."""
        if self.kind == "embedding":
            return b.T.contiguous(), a.T.contiguous()
        if self.experts is None:
            return a, b
        if self.kind == "gate_up":
            b = torch.stack([interleave_gate_up(of_expert) for of_expert in b])

        # [experts, out, rank] -> [out, rank, experts]
        return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1).contiguous()

    def from_peft(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Invert ``to_peft``."""
        if self.kind == "embedding":
            return b.T.contiguous(), a.T.contiguous()
        if self.experts is None:
            return a, b

        rows, columns = self.shape
        a = a.view(self.experts, self.rank, columns)
        b = b.view(rows, self.rank, self.experts).permute(2, 0, 1).contiguous()
        if self.kind == "gate_up":
            b = torch.stack([separate_gate_up(of_expert) for of_expert in b])
        return a, b


def _peft_names(kind: str, layer: int | None) -> tuple[str, str]:
    """Return PEFT's names of A and B."""
    module = PREFIX + _PEFT_MODULES[kind].format(layer=layer)
    if kind == "embedding":
        return f"{module}.lora_embedding_A", f"{module}.lora_embedding_B"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def adapter_mappings(model: ModelConfig, adapter: AdapterConfig) -> Iterator[AdapterMapping]:
    """Yield all adapters of a model, in the order of its weights."""
    hidden = model.hidden_size
    vocabulary_shape = (model.vocab_size, hidden)
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

    if "embedding" in adapter.targets:
        yield AdapterMapping("embedding", None, vocabulary_shape, adapter.rank, experts=None)
    for layer in range(model.num_layers):
        for kind, shape in attention_shapes.items():
            if kind in adapter.targets:
                yield AdapterMapping(kind, layer, shape, adapter.rank, experts=None)
        if "experts" in adapter.targets:
            for kind, shape in expert_shapes.items():
                yield AdapterMapping(kind, layer, shape, expert_rank, model.num_experts)
    if "head" in adapter.targets:
        yield AdapterMapping("head", None, vocabulary_shape, adapter.rank, experts=None)


# -- a directory -------------------------------------------------------------------------------


class PeftDirectory:
    """An adapter in PEFT's format, checked against a model: every tensor is there, and no other."""

    def __init__(self, path: Path, model: ModelConfig) -> None:
        """Open ``path``.

        Raises:
            ConversionError: naming the file, the setting or the tensor that does not fit.
        """
        self.path = path
        self._model = model
        self._file = path / WEIGHTS_FILE
        self._settings = read_settings(path / CONFIG_FILE)
        if not self._file.exists():
            raise ConversionError(f"{self._file}: missing; only safetensors can be read")

        self._weights = SafetensorsFile(self._file)
        self.adapter = self._adapter_config()
        self.mappings = list(adapter_mappings(model, self.adapter))
        self._check_tensors()

    def read(self, mapping: AdapterMapping) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B in our layout, of experts stacked."""
        name_a, name_b = mapping.names
        return mapping.from_peft(self._weights.read(name_a), self._weights.read(name_b))

    def check_base_copies(self, get_tensor: Callable[[str], torch.Tensor]) -> None:
        """Check that what PEFT saved of the base is what the base has.

        Args:
            get_tensor: returns the base's tensor of a Hugging Face name.

        Raises:
            ConversionError: naming the tensor, which was trained, or is of another base.
        """
        for name, hf_name in _BASE_COPIES.items():
            if name not in self._weights.entries:
                continue
            saved = self._weights.read(name)
            if not same_bits(saved, get_tensor(hf_name).to(saved.dtype)):
                raise ConversionError(
                    f"{self._file}: tensor {name} is not the base's {hf_name}: the adapter is of "
                    "another base, or was trained together with this weight"
                )

    def _adapter_config(self) -> AdapterConfig:
        """Make our settings of PEFT's."""
        kinds = self._kinds()
        ranks = {kind: self._settings.rank_of(kind) for kind in kinds}
        other_ranks = {rank for kind, rank in ranks.items() if kind not in EXPERTS}
        expert_ranks = {rank for kind, rank in ranks.items() if kind in EXPERTS}
        file = self._settings.file
        if len(expert_ranks) > 1:
            raise ConversionError(f"{file}: gate_up_proj and down_proj differ in rank")
        if len(other_ranks) > 1:
            raise ConversionError(
                f"{file}: adapters that are not of experts have ranks {sorted(other_ranks)}; only "
                "one rank for all, and another one for experts, can be read"
            )

        targets: list[Any] = ["experts" if kind in EXPERTS else kind for kind in kinds]
        config = AdapterConfig(
            rank=other_ranks.pop() if other_ranks else self._settings.rank,
            alpha=self._settings.alpha,
            targets=tuple(dict.fromkeys(targets)),
        )
        # Null where that is the default, as in most configurations.
        if expert_ranks and expert_ranks != {config.rank_of_experts(self._model)}:
            config = config.model_copy(update={"expert_rank": expert_ranks.pop()})
        try:
            config.check_ranks(self._model)
        except ValueError as error:
            raise ConversionError(f"{file}: {error}") from None
        return config

    def _kinds(self) -> list[str]:
        """Return the kinds of adapters that settings or tensors name.

        Settings may have a regular expression in place of names, and tensors may be missing.
        """
        named = [kind for kind in _PEFT_MODULES if self._settings.names(kind)]
        if len(set(named) & set(EXPERTS)) == 1:
            raise ConversionError(
                f"{self._settings.file}: target_parameters has one of the experts' two matrices, "
                "gate_up_proj and down_proj; adapters of both or of none can be read"
            )

        kinds = [kind for kind in _PEFT_MODULES if kind in named or self._has_tensors(kind)]
        if not kinds:
            raise ConversionError(f"{self._file}: holds no adapter of GPT-OSS")
        return kinds

    def _has_tensors(self, kind: str) -> bool:
        names: set[str] = set()
        for layer in range(self._model.num_layers):
            names.update(_peft_names(kind, layer))
        return not names.isdisjoint(self._weights.entries)

    def _check_tensors(self) -> None:
        """Compare names, shapes and dtypes with those that the settings ask for."""
        expected: dict[str, Shape] = {}
        for mapping in self.mappings:
            expected.update(zip(mapping.names, mapping.peft_shapes, strict=True))
        for name in expected:
            if name not in self._weights.entries:
                raise ConversionError(f"{self._file}: tensor {name} is missing")

        vocabulary_shape = (self._model.vocab_size, self._model.hidden_size)
        expected |= dict.fromkeys(_BASE_COPIES, vocabulary_shape)
        for name, entry in self._weights.entries.items():
            if name not in expected:
                raise ConversionError(
                    f"{self._file}: tensor {name} is no adapter that can be read"
                    f"{self._beyond_last_layer(name)}"
                )
            if tuple(entry.shape) != expected[name]:
                raise ConversionError(
                    f"{self._file}: tensor {name} has shape {list(entry.shape)}, expected "
                    f"{list(expected[name])} with what {CONFIG_FILE} and the base say"
                )
            if entry.dtype_name not in ("BF16", "F16", "F32"):
                raise ConversionError(
                    f"{self._file}: tensor {name} has the unsupported dtype {entry.dtype_name}"
                )

    def _beyond_last_layer(self, name: str) -> str:
        """Say, for an error, that the base has no such layer; "" if it has."""
        match = _LAYER.match(name)
        if match is None or int(match[1]) < self._model.num_layers:
            return ""
        return f": the base has {self._model.num_layers} layers, so the adapter is of another model"
