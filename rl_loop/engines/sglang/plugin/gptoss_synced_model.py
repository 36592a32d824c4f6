"""Which tensors of a weight sync a model has got, and which it is still to get."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from gptoss_expert_storage import SOURCES, Experts, WrongWeights
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
        """Forget which tensors came."""
        self._received.clear()

    def end_sync(self) -> None:
        """Raise WrongWeights unless every tensor came since ``begin_sync``."""
        missing = sorted((self._others | self._destinations.keys()) - self._received)
        self._received.clear()
        if missing:
            raise WrongWeights(
                f"{len(missing)} tensors have not come, the first is {missing[0]}: a part of the sync was lost"
            )

    def load_experts(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Load the experts' tensors of ``weights`` and yield the others.

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
                experts.load(own_name, tensor)
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
