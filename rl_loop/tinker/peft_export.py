"""Adapters of tenants in PEFT's format."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from converters.peft_format import AdapterMapping, adapter_mappings
from converters.peft_settings import EXPERTS
from megatron_gptoss.config import AdapterConfig, ModelConfig
from megatron_gptoss.tenant_state import FACTOR

_NAME = re.compile(re.escape(FACTOR) + r"(?:decoder\.layers\.(\d+)\.)?.*\.adapters\.(\w+)\.([ab])")


class TenantAdapters:
    """The adapters of a tenant, as the source of an export."""

    path = Path("adapter")
    """Name of the source in messages."""

    def __init__(
        self,
        model: ModelConfig,
        adapter: AdapterConfig,
        rank: int,
        base: str,
        factors: Mapping[str, torch.Tensor],
    ) -> None:
        """Read a tenant.

        Args:
            model: configuration of the base.
            adapter: adapters of the server.
            rank: rank of the tenant.
            base: digest of the base.
            factors: result of ``copy_adapter``. They are 0 beyond the rank.
        """
        self.model = model
        self.base = base
        self.adapter = tenant_adapter(adapter, model, rank)
        self.mappings = list(adapter_mappings(model, self.adapter))
        self._factors: dict[tuple[str, int | None, str], torch.Tensor] = {}
        for name, factor in factors.items():
            match = _NAME.fullmatch(name)
            assert match is not None, name
            layer = None if match[1] is None else int(match[1])
            self._factors[match[2], layer, match[3]] = factor

    def rounds(self, kind: str) -> bool:
        """Return True if the trainer rounded merged weights of a kind."""
        return self.adapter.merge_experts or kind not in EXPERTS

    def read(self, mapping: AdapterMapping) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors A [rank, in] and B [out, rank]; those of experts are stacked."""
        a = self._factors[mapping.kind, mapping.layer, "a"]
        b = self._factors[mapping.kind, mapping.layer, "b"]
        return a[..., : mapping.rank, :].contiguous(), b[..., : mapping.rank].contiguous()


def tenant_adapter(adapter: AdapterConfig, model: ModelConfig, rank: int) -> AdapterConfig:
    """Return the settings of a tenant's adapters.

    Args:
        adapter: adapters of the server.
        model: configuration of the base.
        rank: rank of the tenant, up to ``adapter_rank``.
    """
    changes: dict[str, int] = {"rank": rank}
    if "experts" in adapter.targets:
        highest = adapter_rank(adapter, model)
        changes["expert_rank"] = max(1, rank * adapter.rank_of_experts(model) // highest)
    return adapter.model_copy(update=changes)


def adapter_rank(adapter: AdapterConfig, model: ModelConfig) -> int:
    """Return the highest rank of any adapter."""
    of_experts = adapter.rank_of_experts(model) if "experts" in adapter.targets else 0
    others = adapter.rank if set(adapter.targets) - {"experts"} else 0
    return max(of_experts, others)
