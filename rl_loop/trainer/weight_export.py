"""What an export of the policy consists of, as the driver says it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from converters.model_extras import ModelExtras
from converters.mxfp4_tensors import Digests


@dataclass(frozen=True)
class WeightExport:
    """What is written, and where. A node's disk will not do where the driver is on another node:
    as checkpoints are, exports are written by the trainer's ranks."""

    directory: Path
    """Replaced if it exists, once the new one is complete."""
    extras: ModelExtras = field(default_factory=ModelExtras)
    """Tokenizer, chat templates, token ids and generation settings."""
    eos_token_ids: tuple[int, ...] = ()
    """End tokens of a turn, in place of those of ``extras``."""
    packed: bool = False
    """Whether experts come, and are written, as MXFP4 blocks and scales."""
    packed_digests: Mapping[str, Digests] = field(default_factory=dict)
    """By the name of who holds them: digests that all packed experts on the disk must have."""
