"""Selection of the parameters to compare after a conversion: all, or a rotating sample."""

import contextlib
import random
from dataclasses import dataclass
from pathlib import Path

from converters.mapping import ParameterMapping
from converters.reports import Check
from gptoss_kernels.cache import cache_directory, write_atomically
from megatron_gptoss.config import ModelConfig


@dataclass(frozen=True)
class ComparedParameters:
    """Parameters to compare after one conversion."""

    check: Check
    layer: int | None
    """Layer whose experts are compared; None for all layers."""

    def includes(self, mapping: ParameterMapping) -> bool:
        """Return True if the parameter is to be compared."""
        return mapping.expert is None or self.layer is None or self.layer == mapping.layer


def choose_compared_parameters(kind: str, config: ModelConfig, check: Check) -> ComparedParameters:
    """Choose the parameters to compare.

    Args:
        kind: kind of conversion, such as ``import``. Each kind has its own rotation.
        config: model configuration.
        check: ``all``, or ``sample`` for the experts of one layer.
    """
    # A sample leaves out experts only, so without experts everything is compared.
    if check == "all" or not config.num_experts:
        return ComparedParameters(check, layer=None)
    return ComparedParameters(check, layer=next_layer(kind, config))


def next_layer(kind: str, config: ModelConfig) -> int:
    """Return the layer after the layer whose experts were compared last.

    The last layer is stored in the user's cache, per ``kind`` of conversion and model size. Without
    a stored layer, a random layer is returned.
    """
    try:
        last = int(_last_layer_file(kind, config).read_text())
    except (OSError, ValueError):
        # A random start, so that machines with an empty cache do not all compare the same layer.
        return random.SystemRandom().randrange(config.num_layers)
    # After the last layer, the rotation starts over.
    return (last + 1) % config.num_layers


def save_compared_layer(kind: str, config: ModelConfig, layer: int) -> None:
    """Store the layer whose experts were compared."""
    # An unwritable cache must not fail a correct conversion.
    with contextlib.suppress(OSError):
        file = _last_layer_file(kind, config)
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, str(layer).encode())


def _last_layer_file(kind: str, config: ModelConfig) -> Path:
    """Return the file that stores the layer whose experts were compared last."""
    # A directory's path changes between conversions, so the model is identified by its size.
    size = f"{config.num_layers}_layers_{config.num_experts}_experts_{config.hidden_size}_wide"
    return cache_directory() / "layer_read_back_last" / f"{kind}_{size}"
