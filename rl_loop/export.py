"""Export of a run as a Hugging Face checkpoint, and its comparison with the trained policy."""

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
from megatron_gptoss.config.precision import torch_dtype
from megatron_gptoss.samples import TrainingSamples
from rl_loop.chat.codec import ChatCodec
from rl_loop.tasks.source import TaskMixture
from rl_loop.trainer.weight_export import WeightExport

logger = logging.getLogger(__name__)

CHAT_TEMPLATE_FILE = "chat_template.jinja"
"""File name under which transformers and servers look for the template."""

COMPARED_PROMPTS = 32
"""Number of held-out prompts that export and trainer both answer."""

COMPARED_TOKENS = 64
"""Maximum length of a compared answer."""

MAX_DECODED_PARAMETERS = 2_000_000_000
"""Maximum parameters of an export that transformers decodes from, on the driver's CPU."""


class WeightExporter(Protocol):
    """Holder of the policy: a TrainerGroup."""

    def export(self, export: WeightExport) -> None: ...

    def mxfp4_digests(self) -> Digests: ...

    def greedy_tokens(self, samples: TrainingSamples) -> np.ndarray: ...


@dataclass(frozen=True)
class GreedyAgreement:
    """Number of greedy answers in which export and trainer agree."""

    equal: int
    """Answers that are equal, token for token."""
    compared: int
    """Compared answers."""


def export_policy(
    trainer: WeightExporter,
    codec: ChatCodec,
    directory: Path,
    *,
    tokenizer_source: Path | None = None,
    settings_source: Path | None = None,
    quantization: Quantization | None = None,
    sampled: Digests | None = None,
) -> int:
    """Write weights, config.json, tokenizer and generation settings on rank 0 of the trainer.

    A sample of the written weights is read back and compared with the trainer's weights. All values
    of quantized experts are compared with those of trainer and engines.

    Args:
        trainer: holds the policy.
        codec: has the end tokens. If the vocabulary was made for the run, tokenizer and chat
            template come from the codec, too.
        directory: to write.
        tokenizer_source: a Hugging Face directory, an imported checkpoint, or a run with an export.
            Tokenizer and chat templates are copied from it unless the vocabulary was made for the
            run.
        settings_source: directory like ``tokenizer_source``. Generation settings and token ids are
            copied from it. Default: ``tokenizer_source``.
        quantization: format of the trained experts. None if they are not quantized.
        sampled: digests of the experts from which engines sampled last. Empty or None if the
            engines held the experts in another format.

    Returns:
        Number of quantized matrices that were compared in full.

    Raises:
        ConversionError: a tensor differs. The message names it, and the directory is unchanged.
    """
    settings = _find_extras(settings_source or tokenizer_source) or ModelExtras()
    mxfp4_digests: dict[str, Digests] = {}
    if quantization is not None:
        mxfp4_digests["the trainer"] = trainer.mxfp4_digests()
    if sampled:
        mxfp4_digests["the engines"] = sampled

    # Rank 0 writes each tensor as soon as all ranks have gathered it, because all weights of a
    # large model fit neither into its GPU nor into Ray's store.
    trainer.export(
        WeightExport(
            directory,
            replace(settings, files=_tokenizer_files(codec, tokenizer_source)),
            eos_token_ids=tuple(codec.stop_token_ids),
            mxfp4_experts=quantization is not None,
            mxfp4_digests=mxfp4_digests,
        )
    )
    return len(mxfp4_digests.get("the trainer", {}))


def _tokenizer_files(codec: ChatCodec, source: Path | None) -> Mapping[str, bytes]:
    """Return tokenizer and chat templates by file name. Log a warning if there are none."""
    with tempfile.TemporaryDirectory() as scratch:
        # ``save`` writes files only for a vocabulary that was made for the run.
        files = codec.vocabulary.save(Path(scratch))
        if files:
            template = Path(scratch) / CHAT_TEMPLATE_FILE
            template.write_text(codec.chat_template())
            return ModelExtras.of_files([*files, template]).files

    extras = _find_extras(source)
    if extras is not None and extras.files:
        return extras.files
    logger.warning(
        "the export has no tokenizer and no chat template, because %s. Copy the files of the base "
        "model to the export",
        f"{source} has none" if source else "the run began with random weights",
    )
    return {}


def _find_extras(source: Path | None) -> ModelExtras | None:
    """Return the extras of a model directory, an imported checkpoint or a run with an export."""
    if source is None:
        return None
    # In this order: a Hugging Face directory, a run, an imported checkpoint.
    for directory in (source, source / "export", source / EXTRAS_FOLDER):
        if (directory / "config.json").exists():
            return read_extras(directory)
    return None


def export_trained_adapter(checkpoints: Path, directory: Path, base: Path | None) -> None:
    """Write the adapters of the newest checkpoint in PEFT's format to ``directory``.

    Args:
        checkpoints: checkpoints of a completed run.
        directory: replaced if it exists, once the new one is complete.
        base: initial weights of the run. ``adapter_config.json`` names them if PEFT can load them.

    Raises:
        ConversionError: the message names the file, key or tensor.
    """
    checkpoint = latest_checkpoint(checkpoints)
    if checkpoint is None:
        raise ConversionError(f"{checkpoints} has no checkpoint of adapters to export")

    export_adapter(checkpoint, directory, peft_base_name(base), overwrite=True)


def greedy_agreement(
    trainer: WeightExporter,
    tasks: TaskMixture,
    directory: Path,
    dtype: str,
    quantization: Quantization | None = None,
) -> GreedyAgreement:
    """Compare greedy answers of an export with those of the trainer, on held-out prompts.

    transformers decodes answers from the export. For every position the trainer then reports the
    token that it would have chosen. If these tokens are all equal, the trainer's greedy answer is
    the same.

    Args:
        trainer: holds the policy.
        tasks: source of the held-out prompts.
        directory: the export.
        dtype: precision in which transformers computes.
        quantization: format of the exported experts. None if they are not quantized.
    """
    prompts = [tasks.prompt_ids(task) for task in tasks.held_out()[:COMPARED_PROMPTS]]
    model = _load_with_transformers(directory, dtype, quantization)
    samples = _decode_greedily(model, prompts, list(tasks.codec.stop_token_ids))

    # Predicted tokens within the prompt say nothing, because the prompt is given.
    differs = (trainer.greedy_tokens(samples) != samples.token_ids) & samples.loss_mask
    equal = sum(not row.any() for row in np.split(differs, samples.offsets[1:-1]))
    return GreedyAgreement(equal=equal, compared=len(samples))


def _load_with_transformers(directory: Path, dtype: str, quantization: Quantization | None) -> Any:
    """Load an export. MXFP4 experts are dequantized."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar
    from transformers.utils.quantization_config import Mxfp4Config

    # The bar would write into the run's own display.
    disable_progress_bar()
    options: dict[str, Any] = {}
    if quantization is not None:
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    export_dtype = torch_dtype(dtype)
    # transformers has no SDPA attention for GPT-OSS: `_supports_sdpa` is False.
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=export_dtype, attn_implementation="eager", **options
    )
    # transformers dequantizes to bf16, which holds the values exactly.
    return model.to(export_dtype)


def _decode_greedily(model: Any, prompts: list[list[int]], stops: list[int]) -> TrainingSamples:
    """Return the prompts with greedy answers of an export. The loss mask selects the answers."""
    sequences = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        # transformers warns if mask or padding token are missing, though one prompt has no padding.
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
