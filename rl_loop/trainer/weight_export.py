"""Contents of a policy export, as requested by the driver."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from converters.model_extras import ModelExtras
from converters.mxfp4_tensors import Digests


@dataclass(frozen=True)
class WeightExport:
    """Contents and directory of an export.

    Like checkpoints, exports are written by the trainer's ranks. A node-local directory is not
    enough if the driver is on another node.
    """

    directory: Path
    """Replaced if it exists, once the new one is complete."""
    extras: ModelExtras = field(default_factory=ModelExtras)
    """Tokenizer, chat templates, token ids and generation settings."""
    eos_token_ids: tuple[int, ...] = ()
    """End tokens of a turn, in place of those of ``extras``."""
    packed: bool = False
    """True to gather and write experts as MXFP4 blocks and scales."""
    mxfp4_digests: Mapping[str, Digests] = field(default_factory=dict)
    """Digests that all packed experts on the disk must have, by the name of their holder."""
