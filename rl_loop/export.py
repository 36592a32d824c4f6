"""The end of a run: a Hugging Face checkpoint, and proof that it is the
policy that was trained."""

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from converters.adapter_checkpoint import export_adapter, peft_base_name
from converters.errors import ConversionError
from converters.model_extras import EXTRAS_FOLDER, ModelExtras, read_extras
from converters.mxfp4_tensors import Digests
from megatron_gptoss.checkpoint.directory import latest_checkpoint
from megatron_gptoss.config import Quantization
from megatron_gptoss.samples import TrainingSamples
from rl_loop.chat.codec import ChatCodec
from rl_loop.tasks.source import TaskSource
from rl_loop.trainer.weight_export import WeightExport

logger = logging.getLogger(__name__)

CHAT_TEMPLATE_FILE = "chat_template.jinja"
"""Where transformers and servers look for it."""

COMPARED_PROMPTS = 32
"""Held-out prompts that export and trainer both answer."""

COMPARED_TOKENS = 64
"""Length of an answer."""

LARGEST_DECODED = 2_000_000_000
"""Parameters of the largest export that transformers decodes from, on the driver's CPU."""


class Trainer(Protocol):
    """Has the policy: a TrainerGroup."""

    def export(self, export: WeightExport) -> None: ...

    def packed_digests(self) -> Digests: ...

    def greedy_tokens(self, samples: TrainingSamples) -> np.ndarray: ...


@dataclass(frozen=True)
class GreedyAgreement:
    """How many greedy answers of the export are the trainer's."""

    equal: int
    """Answers that are equal, token for token."""
    compared: int
    """All answers that were compared."""


def export_policy(
    trainer: Trainer,
    codec: ChatCodec,
    directory: Path,
    *,
    tokenizer_source: Path | None = None,
    settings_source: Path | None = None,
    quantization: Quantization | None = None,
    sampled: Digests | None = None,
) -> int:
    """Have rank 0 of the trainer write weights, config.json, tokenizer and generation settings.

    A sample of what is on the disk is compared with the trainer's weights, and of quantized experts
    all bits with the trainer's and the engines'.

    Args:
        trainer: holds the policy.
        codec: has the end tokens and, of a vocabulary made for the run, tokenizer and chat template.
        directory: to write.
        tokenizer_source: a Hugging Face directory, an imported checkpoint, or a run with an export.
            Tokenizer and chat templates are copied from it if the vocabulary is not the run's own.
        settings_source: likewise; generation settings and token ids are copied from it. By default
            those of ``tokenizer_source``.
        quantization: format of the experts, the bits that were trained.
        sampled: digests of the experts that engines sampled from last; empty or None if they held
            another form of them.

    Returns:
        The number of matrices whose bits were all compared.

    Raises:
        ConversionError: naming the tensor that differs; the directory is then as it was.
    """
    settings = _extras_of(settings_source or tokenizer_source) or ModelExtras()
    packed_digests: dict[str, Digests] = {}
    if quantization is not None:
        packed_digests["the trainer"] = trainer.packed_digests()
    if sampled:
        packed_digests["the engines"] = sampled

    # Rank 0 writes what all ranks gather there, a tensor at a time: the whole weights of a large
    # model fit neither into its GPU nor into Ray's store.
    trainer.export(
        WeightExport(
            directory,
            replace(settings, files=_tokenizer_files(codec, tokenizer_source)),
            eos_token_ids=tuple(codec.stop_token_ids),
            packed=quantization is not None,
            packed_digests=packed_digests,
        )
    )
    return len(packed_digests.get("the trainer", {}))


def _tokenizer_files(codec: ChatCodec, source: Path | None) -> Mapping[str, bytes]:
    """Return tokenizer and chat templates by name; warn if there are none."""
    with tempfile.TemporaryDirectory() as scratch:
        files = codec.vocabulary.save(Path(scratch))
        if files:
            template = Path(scratch) / CHAT_TEMPLATE_FILE
            template.write_text(codec.chat_template())
            return ModelExtras.of_files([*files, template]).files

    extras = _extras_of(source)
    if extras is not None and extras.files:
        return extras.files
    logger.warning(
        "the export gets no tokenizer and no chat template: %s holds none; copy those of the base model there",
        source or "nothing that the run began with",
    )
    return {}


def _extras_of(source: Path | None) -> ModelExtras | None:
    """Read the extras of a model's directory, an imported checkpoint or a run with an export."""
    if source is None:
        return None
    for directory in (source, source / "export", source / EXTRAS_FOLDER):
        if (directory / "config.json").exists():
            return read_extras(directory)
    return None


def export_trained_adapter(checkpoints: Path, directory: Path, base: Path | None) -> None:
    """Write the adapters of the newest checkpoint in PEFT's format to ``directory``.

    Args:
        checkpoints: where a run that is done keeps its checkpoints.
        directory: replaced if it exists, once the new one is complete.
        base: what the run began with; ``adapter_config.json`` names it if PEFT can load it.

    Raises:
        ConversionError: naming the file, key or tensor.
    """
    checkpoint = latest_checkpoint(checkpoints)
    if checkpoint is None:
        raise ConversionError(f"{checkpoints}: holds no checkpoint of the adapters to export")

    export_adapter(checkpoint, directory, peft_base_name(base), overwrite=True)


def greedy_agreement(
    trainer: Trainer,
    tasks: TaskSource,
    directory: Path,
    dtype: str,
    quantization: Quantization | None = None,
) -> GreedyAgreement:
    """Compare greedy answers of the export in ``directory`` with the trainer's on held-out
    prompts.

    transformers decodes. The trainer then says of every position which token it would have chosen:
    by induction its own greedy answer is the same exactly if these are all equal."""
    prompts = [tasks.prompt_ids(task) for task in tasks.held_out()[:COMPARED_PROMPTS]]
    model = _load_with_transformers(directory, dtype, quantization)
    samples = _decode_greedily(model, prompts, list(tasks.codec.stop_token_ids))

    # Only answers are compared: what the policy would have put in place of a prompt says nothing.
    differs = (trainer.greedy_tokens(samples) != samples.token_ids) & samples.loss_mask
    equal = sum(not row.any() for row in np.split(differs, samples.offsets[1:-1]))
    return GreedyAgreement(equal=equal, compared=len(samples))


def _load_with_transformers(directory: Path, dtype: str, quantization: Quantization | None) -> Any:
    """Load an export; experts in MXFP4 as the values that they stand for."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar
    from transformers.utils.quantization_config import Mxfp4Config

    disable_progress_bar()  # it would write into the run's own display
    options: dict[str, Any] = {}
    if quantization is not None:
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    torch_dtype = getattr(torch, dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch_dtype, attn_implementation="eager", **options
    )
    # transformers dequantizes to bf16, which holds the values exactly.
    return model.to(torch_dtype)


def _decode_greedily(model: Any, prompts: list[list[int]], stops: list[int]) -> TrainingSamples:
    """Return prompts with the answers of an export; the mask is 1 on the answers."""
    sequences = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=COMPARED_TOKENS,
            eos_token_id=stops,
            pad_token_id=stops[0],
        )
        token_ids = generated[0].tolist()
        mask = [0] * len(prompt) + [1] * (len(token_ids) - len(prompt))
        sequences.append({"token_ids": token_ids, "loss_mask": mask})
    return TrainingSamples.join(sequences)
