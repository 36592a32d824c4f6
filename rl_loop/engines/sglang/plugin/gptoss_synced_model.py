"""Record of the tensors that a model has received in a weight sync."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from gptoss_expert_storage import MAX_SCALE, LayerExperts, WrongWeightsError
from torch import Tensor


class SyncedModel:
    """A model with MXFP4 experts, and the tensors that it has received in the current sync."""

    def __init__(self, model: Any) -> None:
        self.experts: list[LayerExperts] = []
        # By the Hugging Face name of a tensor: experts of its layer, and SGLang's name within them.
        self._destinations: dict[str, tuple[LayerExperts, str]] = {}
        # Names of the tensors that SGLang's own code loads.
        self._others: set[str] = set()
        self._received: set[str] = set()
        # By the name of a scale tensor: its largest byte. It stays on the GPU until the sync ends.
        self._largest_scales: dict[str, Tensor] = {}
        # True after a sync with all tensors. Later ones may leave out those that training does not change.
        self._is_complete = False

        # The parameters without those of the experts.
        names = {name for name, _ in model.named_parameters()}
        for prefix, module in model.named_modules():
            # Only MoE layers whose experts ``allocate`` has created have this attribute.
            experts = getattr(getattr(module, "quant_method", None), "gptoss_experts", None)
            if experts is not None:
                self._add_experts(f"{prefix}.", experts)
                names -= {f"{prefix}.{name}" for name in experts.sources}
        for name in names:
            self._others |= set(_list_sources(name))

    def _add_experts(self, prefix: str, experts: LayerExperts) -> None:
        named = replace(experts, prefix=prefix)
        self.experts.append(named)
        for name, source in named.sources.items():
            self._destinations[f"{prefix}{source}"] = (named, name)

    def begin_sync(self) -> None:
        """Clear the record of received tensors and their scales."""
        self._received.clear()
        self._largest_scales.clear()

    def end_sync(self, sent: int | None = None) -> None:
        """Check that all tensors have come since ``begin_sync``, with scales that kernels support.

        Args:
            sent: number of tensors of a sync without those that training does not change. It has all
                unmerged adapters. None: all tensors of the model must have come.

        Raises:
            WrongWeightsError: if a tensor is missing or has a scale above ``MAX_SCALE``.
        """
        # Cleared before the checks, so that a failed sync does not affect the next one.
        received = set(self._received)
        largest_scales = dict(self._largest_scales)
        self.begin_sync()

        _check_scales(largest_scales)
        if sent is not None and not self._is_complete:
            raise WrongWeightsError("a sync without the base came before one with all tensors")
        expected = self._others | self._destinations.keys()
        if sent is not None:
            adapters = (name for name in self._destinations if name.endswith(("lora_A", "lora_B")))
            expected = set(adapters)
        missing = sorted(expected - received)
        if missing:
            raise WrongWeightsError(
                f"the sync is incomplete: {len(missing)} tensors are missing, the first is "
                f"{missing[0]}"
            )
        if sent is not None and len(received) != sent:
            raise WrongWeightsError(
                f"the sync is incomplete: {sent} tensors were sent, but {len(received)} came"
            )
        self._is_complete = True

    def load_experts(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Load the experts' tensors of ``weights`` and yield the others.

        ``end_sync`` checks the size of the scales.

        Args:
            weights: (Hugging Face name, whole tensor in the shape of this name).

        Raises:
            WrongWeightsError: if a tensor is unknown, comes twice, or does not fit. The message names
                it.
        """
        for name, tensor in weights:
            if name not in self._destinations and name not in self._others:
                raise WrongWeightsError(f"the server's model has no tensor {name}")
            if name in self._received:
                raise WrongWeightsError(f"tensor {name} was sent twice")

            if name in self._destinations:
                experts, own_name = self._destinations[name]
                largest_scale = experts.load(own_name, tensor)
                if largest_scale is not None:
                    self._largest_scales[name] = largest_scale
            else:
                yield name, tensor
            # Last, because a tensor that could not be loaded counts as missing.
            self._received.add(name)

    def checksums(self, hash_tensor: Any) -> dict[str, str]:
        """Return hashes of the experts' tensors in their original format, by SGLang's names."""
        checksums = {}
        for experts in self.experts:
            for name in experts.sources:
                tensor, wrong = experts.read(name)
                checksum = hash_tensor(tensor)
                if wrong:
                    # Kernels also read the padding, so results are wrong if the padding is.
                    checksum = f"wrong padding: {wrong} elements"
                checksums[f"{experts.prefix}{name}"] = checksum
        return checksums


def _check_scales(largest_scales: dict[str, Tensor]) -> None:
    """Check the largest bytes of scale tensors.

    Raises:
        WrongWeightsError: if one is above ``MAX_SCALE``. The message names the tensor.
    """
    if not largest_scales:
        return

    # Wait for the GPU once, not once per tensor while further tensors could be written.
    largest_bytes = torch.stack(list(largest_scales.values())).tolist()
    for name, byte in zip(largest_scales, largest_bytes, strict=True):
        if byte > MAX_SCALE:
            raise WrongWeightsError(
                f"{name} has the scale byte {byte}, which means values of up to "
                f"{6 * 2.0 ** (byte - 127):.3g}, but servers support scale bytes up to "
                f"{MAX_SCALE}"
            )


def _list_sources(name: str) -> list[str]:
    """Return the Hugging Face tensors of which a parameter outside the experts consists."""
    fused = re.fullmatch(r"(.*\.)qkv_proj(\..*)", name)
    if fused is None:
        return [name]
    return [f"{fused[1]}{part}_proj{fused[2]}" for part in "qkv"]


def is_starting(model: Any) -> bool:
    """Return True if SGLang has not finished loading a model for the first time."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return any(
        hasattr(method, "gptoss_experts") and not hasattr(method, "gptoss_loaded")
        for method in methods
    )


def synced(model: Any) -> SyncedModel | None:
    """Return the record of a model. None if it has no experts in the plugin's layouts."""
    known: SyncedModel | None = getattr(model, "gptoss_synced", None)
    if known is None:
        known = SyncedModel(model)
        if not known.experts:
            return None
        model.gptoss_synced = known
    return known
