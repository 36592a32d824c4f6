"""Which parameters are compared after a conversion: all, or a sample that changes every time."""

import contextlib
import random
from dataclasses import dataclass
from pathlib import Path

from converters.mapping import ParameterMapping
from converters.reports import Check
from gptoss_kernels.cache import cache_directory, write_atomically
from megatron_gptoss.config import ModelConfig


@dataclass(frozen=True)
class Selection:
    """Parameters that one conversion compares."""

    check: Check
    layer: int | None
    """Whose experts are compared; None: those of all layers."""

    def includes(self, mapping: ParameterMapping) -> bool:
        """Tell whether a parameter is compared."""
        return mapping.expert is None or self.layer is None or self.layer == mapping.layer


def select_parameters(kind: str, config: ModelConfig, check: Check) -> Selection:
    """Choose what the next conversion of this ``kind`` compares."""
    if check == "all" or not config.num_experts:
        return Selection(check, layer=None)
    return Selection(check, layer=next_layer(kind, config))


def next_layer(kind: str, config: ModelConfig) -> int:
    """Return the layer after the one whose experts were compared last.

    It is remembered in the user's cache, for each ``kind`` of conversion and size of model. Where
    nothing is remembered, or nothing can be, it is any layer.
    """
    try:
        last = int(_turn_file(kind, config).read_text())
    except (OSError, ValueError):
        return random.SystemRandom().randrange(config.num_layers)
    return (last + 1) % config.num_layers


def remember_layer(kind: str, config: ModelConfig, layer: int) -> None:
    """Remember the layer whose experts were compared."""
    # A cache that cannot be written is no reason to refuse a good conversion.
    with contextlib.suppress(OSError):
        file = _turn_file(kind, config)
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, str(layer).encode())


def _turn_file(kind: str, config: ModelConfig) -> Path:
    size = f"{config.num_layers}_layers_{config.num_experts}_experts_{config.hidden_size}_wide"
    return cache_directory() / "layer_read_back_last" / f"{kind}_{size}"
