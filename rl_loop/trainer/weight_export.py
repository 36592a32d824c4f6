"""Request of the driver to export the policy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from converters.model_extras import ModelExtras
from converters.mxfp4_tensors import Digests


@dataclass(frozen=True)
class WeightExport:
    """Contents and directory of an export.

    The trainer's first rank writes it. If the driver is on another node, the directory must be on a
    shared file system.
    """

    directory: Path
    """Directory of the export. An existing one is replaced after the new one is complete."""
    extras: ModelExtras = field(default_factory=ModelExtras)
    """Tokenizer, chat templates, token ids and generation settings."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids of the tokens that end a turn. They replace the ids of ``extras``."""
    mxfp4_experts: bool = False
    """True to gather and write experts as MXFP4 blocks and scales."""
    mxfp4_digests: Mapping[str, Digests] = field(default_factory=dict)
    """Digests of experts in MXFP4 that the written files must have. The keys are "the trainer" and
    "the engines"."""
