"""Reads and checks an adapter's directory in PEFT's format."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from converters.bits import require_finite, same_bits
from converters.errors import ConversionError
from converters.mapping import Shape
from converters.peft_format import (
    BASE_COPIES,
    BASE_KEY,
    MERGE_KEY,
    PARAMETERS,
    PREFIX,
    WEIGHTS_FILE,
    AdapterMapping,
    adapter_places,
    make_mapping,
    peft_names,
)
from converters.peft_settings import EXPERTS, PEFT_CONFIG_FILE, read_settings
from converters.safetensors_files import SafetensorsFile
from megatron_gptoss.config import AdapterConfig, ModelConfig

_LAYER = re.compile(re.escape(f"{PREFIX}model.layers.") + r"(\d+)\.")


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
        for name, hf_name in BASE_COPIES.items():
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
                    f"{file}: target_parameters has only {PARAMETERS[mapping.kind]} of the "
                    f"experts in layer {mapping.layer}, but the trainer adapts both matrices or "
                    f"none. {advice}"
                )
        layers: dict[str, list[int | None]] = {}
        for mapping in self.mappings:
            layers.setdefault(mapping.kind, []).append(mapping.layer)
        for kind, adapted_layers in layers.items():
            if kind not in ("embedding", "head") and len(adapted_layers) < self._model.num_layers:
                raise ConversionError(
                    f"{file}: {kind} has adapters in the layers {adapted_layers} only, but the trainer "
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
            make_mapping(
                self._model,
                kind,
                layer,
                settings.find_rank(kind, layer),
                settings.compute_scale(kind, layer),
            )
            for kind, layer in adapter_places(self._model)
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
                f"{PARAMETERS[expert_mappings[0].kind]} of the experts. It is square "
                f"({expert_mappings[0].shape[0]}), so its shape does not show whether A and B are "
                "exchanged, as written by peft 0.19 and later with transformers 4. Merge the "
                "adapter with PEFT"
            )
        # Both matrices together always decide, because at most one of gate_up_proj and down_proj is
        # square.
        return not self._shapes_match(mappings) and self._shapes_match(exchanged)

    def _shapes_match(self, mappings: list[AdapterMapping]) -> bool:
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
        expected |= dict.fromkeys(BASE_COPIES, vocabulary_shape)
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
        for kind, layer in adapter_places(self._model):
            if name in peft_names(kind, layer):
                return f": {PEFT_CONFIG_FILE} does not name this weight, so PEFT would ignore the tensor"
        return ""
