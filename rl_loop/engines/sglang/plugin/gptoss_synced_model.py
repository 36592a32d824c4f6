"""Which tensors of a weight sync a model has got, and which it is still to get."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from gptoss_expert_storage import LARGEST_SCALE, SOURCES, Experts, WrongWeights
from torch import Tensor


class SyncedModel:
    """A model that serves MXFP4 experts, and which tensors of a sync it has got."""

    def __init__(self, model: Any) -> None:
        self.experts: list[Experts] = []
        # By the name of a tensor of a sync: a layer's experts, and their own name of it.
        self._destinations: dict[str, tuple[Experts, str]] = {}
        # Names of the tensors that SGLang loads itself.
        self._others: set[str] = set()
        self._received: set[str] = set()
        # By the name of a tensor of scales: its largest byte, which is on the GPU until the sync ends.
        self._largest_scales: dict[str, Tensor] = {}

        # What is left of the parameters when the experts have taken theirs.
        names = {name for name, _ in model.named_parameters()}
        for prefix, module in model.named_modules():
            experts = getattr(getattr(module, "quant_method", None), "gptoss_experts", None)
            if experts is not None:
                self._add_experts(f"{prefix}.", experts)
                names -= {f"{prefix}.{name}" for name in SOURCES}
        for name in names:
            self._others |= set(_sources_of(name))

    def _add_experts(self, prefix: str, experts: Experts) -> None:
        named = replace(experts, prefix=prefix)
        self.experts.append(named)
        for name, source in SOURCES.items():
            self._destinations[f"{prefix}{source}"] = (named, name)

    def begin_sync(self) -> None:
        """Forget which tensors came, and their scales."""
        self._received.clear()
        self._largest_scales.clear()

    def end_sync(self) -> None:
        """Raise WrongWeights unless every tensor came since ``begin_sync``, with scales that the server's
        kernels multiply with."""
        received = set(self._received)
        largest_scales = dict(self._largest_scales)
        self.begin_sync()

        _check_scales(largest_scales)
        missing = sorted((self._others | self._destinations.keys()) - received)
        if missing:
            raise WrongWeights(
                f"{len(missing)} tensors have not come, the first is {missing[0]}: a part of the sync was lost"
            )

    def load_experts(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Load the experts' tensors of ``weights`` and yield the others.

        How large scales are, ``end_sync`` looks at.

        Raises:
            WrongWeights: naming a tensor that is unknown or comes twice.
        """
        for name, tensor in weights:
            if name not in self._destinations and name not in self._others:
                raise WrongWeights(f"the server's model has no tensor {name}")
            if name in self._received:
                raise WrongWeights(f"tensor {name} came twice")

            if name in self._destinations:
                experts, own_name = self._destinations[name]
                largest_scale = experts.load(own_name, tensor)
                if largest_scale is not None:
                    self._largest_scales[name] = largest_scale
            else:
                yield name, tensor
            # Last: what could not be loaded has not come.
            self._received.add(name)

    def checksums(self, hash_tensor: Any) -> dict[str, str]:
        """Hash the experts' tensors as they came, one after the other, by SGLang's names."""
        checksums = {}
        for experts in self.experts:
            for name in SOURCES:
                tensor, stale = experts.read(name)
                checksum = hash_tensor(tensor)
                if stale:
                    # The kernels read padding, too: no weights are right with it.
                    checksum = f"stale padding: {stale} elements"
                checksums[f"{experts.prefix}{name}"] = checksum
        return checksums


def _check_scales(largest_scales: dict[str, Tensor]) -> None:
    """Raise WrongWeights naming a tensor whose largest byte is above ``LARGEST_SCALE``."""
    if not largest_scales:
        return

    # One wait for the GPU, instead of one for every tensor while the next ones could be written.
    largest_bytes = torch.stack(list(largest_scales.values())).tolist()
    for name, byte in zip(largest_scales, largest_bytes, strict=True):
        if byte > LARGEST_SCALE:
            raise WrongWeights(
                f"{name} has the scale byte {byte}, which means values of up to {6 * 2.0 ** (byte - 127):.3g}; "
                f"servers multiply with bytes up to {LARGEST_SCALE}"
            )


def _sources_of(name: str) -> list[str]:
    """Return the Hugging Face tensors that a parameter outside the experts is made of."""
    fused = re.fullmatch(r"(.*\.)qkv_proj(\..*)", name)
    if fused is None:
        return [name]
    return [f"{fused[1]}{part}_proj{fused[2]}" for part in "qkv"]


def is_starting(model: Any) -> bool:
    """Tell whether SGLang has not finished loading a model for the first time."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return any(
        hasattr(method, "gptoss_experts") and not hasattr(method, "gptoss_loaded")
        for method in methods
    )


def synced(model: Any) -> SyncedModel | None:
    """Return what is known of a model; None if it has no experts in their layouts."""
    known: SyncedModel | None = getattr(model, "gptoss_synced", None)
    if known is None:
        known = SyncedModel(model)
        if not known.experts:
            return None
        model.gptoss_synced = known
    return known
