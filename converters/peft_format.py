"""Adapters in PEFT's format: the tensors of ``adapter_model.safetensors``.

Attention projections, the embedding and the output layer are PEFT's ``target_modules``, with one
pair of A [rank, in] and B [out, rank] each. PEFT treats the embedding as a product of one-hot
tokens with it, which swaps the factors: its A [rank, vocab_size] is our B transposed, its
B [hidden_size, rank] is our A transposed. The matrices of a layer's experts, one Hugging Face
tensor for all experts, are ``target_parameters`` (peft 0.18 and later). Their adapters are stored
in two matrices:

    lora_A [experts * rank, in]     expert-major: A of expert 0, A of expert 1, ...
    lora_B [out, rank * experts]    rank-major: every expert's column 0 of B, then column 1, ...

Swapping the two orders gives the right shapes and wrong values. Rows of B of the gate and up
projection alternate between gate and up, like the channels of the tensor.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from converters.bits import require_finite, same_bits
from converters.errors import ConversionError
from converters.families.gpt_oss.table import interleave_gate_up, separate_gate_up
from converters.mapping import Shape
from converters.peft_settings import EXPERTS, PEFT_CONFIG_FILE, TARGETS, read_settings
from converters.safetensors_files import SafetensorsFile
from megatron_gptoss.config import AdapterConfig, ModelConfig

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE_KEY = "megatron_gptoss.base_digest"
"""Key of the safetensors metadata with the digest of the base. PEFT ignores it."""
MERGE_KEY = "megatron_gptoss.merge_experts"
"""Key of the safetensors metadata: "false" if the trainer did not merge expert adapters. PEFT ignores it."""

_PEFT_MODULES = TARGETS | {
    "router": "model.layers.{layer}.mlp.router",
    # The parameter that is wrapped first is nested deeper: PEFT wraps in the order of the module.
    "gate_up": "model.layers.{layer}.mlp.experts.base_layer",
    "down": "model.layers.{layer}.mlp.experts",
}
"""Name of the PEFT module that holds the factors, by kind of adapter."""
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
"""Name of the adapted module in torch_dist checkpoints (which stack layers), by kind."""
_BASE_COPIES = {
    f"{PREFIX}{module}{inner}.weight": f"{module}.weight"
    for module in ("model.embed_tokens", "lm_head")
    for inner in ("", ".base_layer")
}
"""Hugging Face name of each base tensor that PEFT may store in the adapter's file, by name there.

PEFT stores them with adapters of the embedding or the output layer.
"""
_PARAMETERS = {"gate_up": "gate_up_proj", "down": "down_proj"}
"""PEFT's names of the two expert matrices."""
_LAYER = re.compile(re.escape(f"{PREFIX}model.layers.") + r"(\d+)\.")


@dataclass(frozen=True)
class AdapterMapping:
    """One adapter of the model, or a layer's expert adapters."""

    kind: str
    """One of embedding, q, k, v, o, router, gate_up, down, head."""
    layer: int | None
    """0-based layer; None outside the layers."""
    shape: Shape
    """[out, in] of the adapted weight; for experts, of one expert."""
    rank: int
    scale: float
    """Factor of the product B A."""
    experts: int | None
    """Number of experts; None if the adapter is not of experts."""
    exchanged: bool = False
    """True for PEFT's other layout of experts, in which A has the outputs and B the inputs.

    PEFT 0.19 and later writes it with transformers 4, which does not mark experts as transposed.
    """
    is_unpaired: bool = False
    """True for one of the two expert matrices if the other has no adapter in the layer."""

    @property
    def checkpoint_key(self) -> str:
        """Key in a torch_dist checkpoint, without the name of the factor (a or b)."""
        return f"{_MEGATRON_MODULES[self.kind]}.adapters.{self.kind}"

    @property
    def checkpoint_index(self) -> Shape:
        """Index along the leading dimensions: (layer,), or () outside the layers."""
        return () if self.layer is None else (self.layer,)

    @property
    def names(self) -> tuple[str, str]:
        """PEFT's names of A and B."""
        # PEFT wraps the experts once per matrix. The first wrapper is the inner one.
        return _peft_names("down" if self.is_unpaired else self.kind, self.layer)

    @property
    def factor_shapes(self) -> tuple[Shape, Shape]:
        """Shapes of A [rank, in] and B [out, rank]; for experts, with a leading [experts]."""
        rows, columns = self.shape
        stack = () if self.experts is None else (self.experts,)
        return (*stack, self.rank, columns), (*stack, rows, self.rank)

    @property
    def peft_shapes(self) -> tuple[Shape, Shape]:
        """PEFT's shapes of A and B."""
        rows, columns = self.shape
        # PEFT's factors of an embedding are swapped: A is our B transposed.
        if self.kind == "embedding":
            return (self.rank, rows), (columns, self.rank)

        # PEFT stores a layer's expert factors in one pair.
        width = self.rank * (self.experts or 1)
        if self.exchanged:
            return (width, rows), (columns, width)
        return (width, columns), (rows, width)

    def to_peft(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert factors to PEFT's layout.

        Args:
            a: [rank, in]; for experts, [experts, rank, in].
            b: [out, rank]; for experts, [experts, out, rank].

        Returns:
            A and B with ``peft_shapes``.
        """
        if self.kind == "embedding":
            return b.T.contiguous(), a.T.contiguous()
        if self.experts is None:
            return a, b

        # Only B has the outputs. Megatron has all gates first, Hugging Face alternates.
        if self.kind == "gate_up":
            b = torch.stack([interleave_gate_up(expert_b) for expert_b in b])

        # [experts, out, rank] -> [out, rank, experts]
        return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1).contiguous()

    def from_peft(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Invert ``to_peft``: ``peft_shapes`` become [..., rank, in] and [..., out, rank].

        Also reads PEFT's exchanged layout.
        """
        if self.kind == "embedding":
            return b.T.contiguous(), a.T.contiguous()
        if self.experts is None:
            return a, b

        # A is expert-major, B is rank-major (module docstring).
        a = a.view(self.experts, self.rank, -1)
        b = b.view(-1, self.rank, self.experts).permute(2, 0, 1).contiguous()
        # PEFT adapted the transposed matrix: the factors are transposed and swap places.
        if self.exchanged:
            a, b = b.mT.contiguous(), a.mT.contiguous()
        # After the exchange, because only now B has the outputs.
        if self.kind == "gate_up":
            b = torch.stack([separate_gate_up(expert_b) for expert_b in b])
        return a, b


def _peft_names(kind: str, layer: int | None) -> tuple[str, str]:
    """Return PEFT's names of A and B for one kind of adapter."""
    module = PREFIX + _PEFT_MODULES[kind].format(layer=layer)
    if kind == "embedding":
        return f"{module}.lora_embedding_A", f"{module}.lora_embedding_B"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def adapter_mappings(model: ModelConfig, adapter: AdapterConfig) -> Iterator[AdapterMapping]:
    """Yield all adapters of a model, in the order of its weights.

    Args:
        model: model configuration.
        adapter: adapter settings.
    """
    for kind, layer in _places(model):
        # One target of our settings covers both expert matrices.
        target = "experts" if kind in EXPERTS else kind
        if target in adapter.targets:
            rank = adapter.rank_of_experts(model) if kind in EXPERTS else adapter.rank
            yield _mapping(model, kind, layer, rank, adapter.alpha / rank)


def _places(model: ModelConfig) -> Iterator[tuple[str, int | None]]:
    """Yield kind and layer of every weight that can have an adapter, in model order."""
    yield "embedding", None
    for layer in range(model.num_layers):
        for kind in ("q", "k", "v", "o", "router", *EXPERTS):
            yield kind, layer
    yield "head", None


def _mapping(
    model: ModelConfig, kind: str, layer: int | None, rank: int, scale: float
) -> AdapterMapping:
    """Return the entry of an adapter."""
    hidden = model.hidden_size
    shapes = {
        "embedding": (model.vocab_size, hidden),
        "q": (model.query_size, hidden),
        "k": (model.key_size, hidden),
        "v": (model.key_size, hidden),
        "o": (hidden, model.query_size),
        "router": (model.num_experts, hidden),
        "gate_up": (2 * model.intermediate_size, hidden),
        "down": (hidden, model.intermediate_size),
        "head": (model.vocab_size, hidden),
    }
    experts = model.num_experts if kind in EXPERTS else None
    return AdapterMapping(kind, layer, shapes[kind], rank, scale, experts)


# -- a directory -------------------------------------------------------------------------------


class PeftDirectory:
    """An adapter in PEFT's format, checked to hold exactly the tensors that a model needs.

    Ranks and scales may differ between adapters, and layers may have no adapter.
    """

    def __init__(self, path: Path, model: ModelConfig) -> None:
        """Open an adapter.

        Args:
            path: directory of the adapter.
            model: configuration of the base.

        Raises:
            ConversionError: naming the file, setting or tensor that does not fit.
        """
        self.path = path
        self._model = model
        self._file = path / WEIGHTS_FILE
        self._settings = read_settings(path / PEFT_CONFIG_FILE)
        # A dangling link gets the more exact error of SafetensorsFile.
        if not self._file.exists() and not self._file.is_symlink():
            raise ConversionError(f"{self._file}: missing. Only safetensors files are supported")

        self._weights = SafetensorsFile(self._file)
        self.base: str | None = self._weights.metadata.get(BASE_KEY)
        """Digest of the base, written by ``export_adapter``; None if PEFT wrote the file."""
        self._merges_experts = self._weights.metadata.get(MERGE_KEY) != "false"
        self.mappings = self._find_mappings()
        self._check_tensors()

    def rounds(self, kind: str) -> bool:
        """Return True if the trainer rounded merged weights of a kind. PEFT does not."""
        return self.base is not None and (self._merges_experts or kind not in EXPERTS)

    @property
    def base_name(self) -> str | None:
        """Name or directory of the base in the settings; None if there is none."""
        return self._settings.base

    @cached_property
    def adapter(self) -> AdapterConfig:
        """Equivalent settings for a trainer.

        Raises:
            ConversionError: naming a property that a trainer does not support. The adapter can
                still be merged.
        """
        return self._adapter_config()

    def read(self, mapping: AdapterMapping) -> tuple[torch.Tensor, torch.Tensor]:
        """Read A [rank, in] and B [out, rank]; for experts, with a leading [experts]."""
        factors = []
        for name in mapping.names:
            # NaN in one factor would spread over a whole row or column of the merged matrix.
            factor = self._weights.read(name)
            require_finite(factor, name, self._file)
            factors.append(factor)
        return mapping.from_peft(*factors)

    def check_base_copies(self, get_tensor: Callable[[str], torch.Tensor]) -> None:
        """Check that the copies of the base's tensors in the adapter's file equal the base.

        Args:
            get_tensor: returns the base's tensor [...] of a Hugging Face name, of any float dtype.

        Raises:
            ConversionError: naming a tensor that was trained, or that is of a different base.
        """
        for name, hf_name in _BASE_COPIES.items():
            if name not in self._weights.entries:
                continue
            # The copy may have a different dtype than the base.
            saved = self._weights.read(name)
            if not same_bits(saved, get_tensor(hf_name).to(saved.dtype)):
                raise ConversionError(
                    f"{self._file}: tensor {name} differs from the base's {hf_name}: the adapter "
                    "is of a different base, or was trained together with this weight"
                )

    def _adapter_config(self) -> AdapterConfig:
        file = self._settings.file
        advice = "Merge it into the base (gptoss convert merge) and start with the merged model"
        # A trainer adapts both expert matrices, in all layers, or none.
        for mapping in self.mappings:
            if mapping.is_unpaired:
                raise ConversionError(
                    f"{file}: target_parameters has only {_PARAMETERS[mapping.kind]} of the "
                    f"experts in layer {mapping.layer}, but the trainer adapts both matrices or "
                    f"none. {advice}"
                )
        layers: dict[str, list[int | None]] = {}
        for mapping in self.mappings:
            layers.setdefault(mapping.kind, []).append(mapping.layer)
        for kind, found in layers.items():
            if kind not in ("embedding", "head") and len(found) < self._model.num_layers:
                raise ConversionError(
                    f"{file}: {kind} has adapters in the layers {found} only, but the trainer "
                    f"adapts all layers or none. {advice}"
                )

        # A trainer has one rank for experts and one for all other weights.
        others = [mapping for mapping in self.mappings if mapping.experts is None]
        experts = [mapping for mapping in self.mappings if mapping.experts is not None]
        rank = self._one_rank(others, "adapters outside of experts", advice)
        expert_rank = self._one_rank(experts, "adapters of experts", advice)

        # rsLoRA and alpha_pattern give other scales than lora_alpha / rank. Find the alpha that
        # gives the first adapter's scale, and require that it gives the others'.
        first = self.mappings[0]
        alpha = self._settings.alpha
        # Dividing by a rank rounds in fp64, so compare with a tolerance.
        if not math.isclose(alpha / first.rank, first.scale, rel_tol=1e-12):
            alpha = first.scale * first.rank
        for mapping in self.mappings:
            if not math.isclose(alpha / mapping.rank, mapping.scale, rel_tol=1e-12):
                raise ConversionError(
                    f"{file}: {first.kind} is scaled by {first.scale:g} at rank {first.rank} and "
                    f"{mapping.kind} by {mapping.scale:g} at rank {mapping.rank}, but the trainer "
                    f"has one alpha for all. {advice}"
                )

        # gate_up and down are one target. dict.fromkeys drops the duplicate and keeps the order.
        targets: list[Any] = ["experts" if kind in EXPERTS else kind for kind in layers]
        # If only experts are adapted, no tensor shows another rank. Keep r of the file.
        config = AdapterConfig(
            rank=rank or self._settings.rank, alpha=alpha, targets=tuple(dict.fromkeys(targets))
        )
        # Leave expert_rank null if the default gives the same rank, as most configurations do.
        if expert_rank and expert_rank != config.rank_of_experts(self._model):
            config = config.model_copy(update={"expert_rank": expert_rank})
        if not self._merges_experts:
            config = config.model_copy(update={"merge_experts": False})
        try:
            config.check_ranks(self._model)
        except ValueError as error:
            raise ConversionError(f"{file}: {error}") from None
        return config

    def _one_rank(self, mappings: list[AdapterMapping], which: str, advice: str) -> int | None:
        """Return the only rank of the adapters, None without any. Raises ConversionError."""
        ranks = sorted({mapping.rank for mapping in mappings})
        if len(ranks) > 1:
            raise ConversionError(
                f"{self._settings.file}: {which} have ranks {ranks}, but the trainer has one rank "
                f"for experts and one for all other weights. {advice}"
            )
        return ranks[0] if ranks else None

    def _find_mappings(self) -> list[AdapterMapping]:
        """Return the adapters named by the settings, by PEFT's rules."""
        settings = self._settings
        mappings = [
            _mapping(
                self._model,
                kind,
                layer,
                settings.find_rank(kind, layer),
                settings.compute_scale(kind, layer),
            )
            for kind, layer in _places(self._model)
            if settings.names(kind, layer)
        ]
        if not mappings:
            raise ConversionError(
                f"{settings.file}: target_modules and target_parameters name no weight of a "
                f"{self._model.model_type} model that can have an adapter"
            )

        for mapping in mappings:
            target = "experts" if mapping.kind in EXPERTS else mapping.kind
            if target not in self._model.adapter_targets:
                available = ", ".join(self._model.adapter_targets) or "none"
                raise ConversionError(
                    f"{settings.file}: {target} of a {self._model.model_type} model cannot be "
                    f"adapted; available: {available}"
                )

        # The only adapted matrix of a layer has one wrapper, so its names have no base_layer.
        places = {(mapping.kind, mapping.layer) for mapping in mappings}
        for number, mapping in enumerate(mappings):
            if mapping.kind in EXPERTS:
                has_both = all((kind, mapping.layer) in places for kind in EXPERTS)
                mappings[number] = replace(mapping, is_unpaired=not has_both)
        # No setting names the layout of experts, so the shapes of the tensors decide.
        exchanged = [
            replace(mapping, exchanged=mapping.experts is not None) for mapping in mappings
        ]
        return exchanged if self._fits_exchanged(mappings, exchanged) else mappings

    def _fits_exchanged(
        self, mappings: list[AdapterMapping], exchanged: list[AdapterMapping]
    ) -> bool:
        """Return True if the tensors of experts have the shapes of the exchanged layout.

        Raises:
            ConversionError: if there is only one of the two matrices, and it is square.
        """
        expert_mappings = [mapping for mapping in mappings if mapping.experts is not None]
        if expert_mappings and all(len(set(mapping.shape)) == 1 for mapping in expert_mappings):
            raise ConversionError(
                f"{self._settings.file}: target_parameters has only "
                f"{_PARAMETERS[expert_mappings[0].kind]} of the experts. It is square "
                f"({expert_mappings[0].shape[0]}), so its shape does not show whether A and B are "
                "exchanged, as written by peft 0.19 and later with transformers 4. Merge the "
                "adapter with PEFT"
            )
        # Both matrices together always decide, because at most one of gate_up_proj and down_proj is
        # square.
        return not self._fit(mappings) and self._fit(exchanged)

    def _fit(self, mappings: list[AdapterMapping]) -> bool:
        for mapping in mappings:
            for name, shape in zip(mapping.names, mapping.peft_shapes, strict=True):
                entry = self._weights.entries.get(name)
                # Only experts have two layouts. ``_check_tensors`` reports other wrong shapes.
                if mapping.experts is not None and (entry is None or entry.shape != shape):
                    return False
        return True

    def _check_tensors(self) -> None:
        """Compare names, shapes and dtypes of tensors with the settings."""
        expected: dict[str, Shape] = {}
        for mapping in self.mappings:
            expected.update(zip(mapping.names, mapping.peft_shapes, strict=True))
        # Missing tensors first: of a misspelled tensor, the expected name tells more.
        for name in expected:
            if name not in self._weights.entries:
                raise ConversionError(f"{self._file}: tensor {name} is missing")

        # Copies of the base's tensors may be present, but are not required.
        vocabulary_shape = (self._model.vocab_size, self._model.hidden_size)
        expected |= dict.fromkeys(_BASE_COPIES, vocabulary_shape)
        for name, entry in self._weights.entries.items():
            if name not in expected:
                raise ConversionError(
                    f"{self._file}: tensor {name} is not a supported adapter"
                    f"{self._reason_against(name)}"
                )
            if tuple(entry.shape) != expected[name]:
                raise ConversionError(
                    f"{self._file}: tensor {name} has shape {list(entry.shape)}, but {PEFT_CONFIG_FILE} "
                    f"and the base require {list(expected[name])}"
                )
            # An adapter in fp8 or integers has scales that PEFT's format does not define.
            if entry.dtype_name not in ("BF16", "F16", "F32"):
                raise ConversionError(
                    f"{self._file}: tensor {name} has the unsupported dtype {entry.dtype_name}"
                )

    def _reason_against(self, name: str) -> str:
        """Return why the settings have no adapter for a tensor, as the end of an error."""
        # Explain the two usual causes: a different base, and settings that do not fit the tensors.
        match = _LAYER.match(name)
        if match is not None and int(match[1]) >= self._model.num_layers:
            layers = self._model.num_layers
            return f": the base has {layers} layers, so the adapter is of a different model"
        for kind, layer in _places(self._model):
            if name in _peft_names(kind, layer):
                return f": {PEFT_CONFIG_FILE} does not name this weight, so PEFT would ignore the tensor"
        return ""
