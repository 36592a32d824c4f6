"""The end of a run: a Hugging Face checkpoint, and proof that it is the policy that was trained."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from converters.hf_directory import tokenizer_and_generation, write_hf_directory
from converters.read_back import check_weights
from megatron_gptoss.packing import Sample
from rl_loop.config.run import RunConfig
from rl_loop.harmony.codec import Harmony
from rl_loop.tasks.source import TaskSource
from rl_loop.trainer.group import TrainerGroup

COMPARED_PROMPTS = 32
COMPARED_TOKENS = 64


def export_policy(trainer: TrainerGroup, harmony: Harmony, config: RunConfig, directory: Path) -> None:
    """Write the trainer's weights, config.json, tokenizer and generation settings to ``directory``, and compare a
    sample of what is on the disk with the trainer's. Raises ConversionError naming the tensor that differs."""
    source = config.initial_weights
    with tempfile.TemporaryDirectory() as scratch:
        files = harmony.vocabulary.save(Path(scratch))
        if not files and source is not None and (source / "config.json").exists():
            files, _ = tokenizer_and_generation(source)
        weights = trainer.weights()
        write_hf_directory(
            directory,
            config.model,
            weights.items(),
            tokenizer_files=files,
            eos_token_ids=harmony.stop_token_ids,
            overwrite=True,
            check=lambda partial: check_weights(weights, partial, "sample"),
        )


def greedy_agreement(trainer: TrainerGroup, tasks: TaskSource, config: RunConfig, directory: Path) -> tuple[int, int]:
    """On how many held-out prompts the export's greedy answer is the trainer's, token for token; and of how many.

    transformers decodes. The trainer then says of every position which token it would have chosen: by induction its own
    greedy answer is the same exactly if these are all equal."""
    from transformers import GptOssForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would write into the run's own display
    dtype, stops = getattr(torch, config.dtype), list(tasks.harmony.stop_token_ids)
    model: Any = GptOssForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    greedy = {"do_sample": False, "max_new_tokens": COMPARED_TOKENS, "eos_token_id": stops, "pad_token_id": stops[0]}
    prompts = [tasks.prompt_ids(task) for task in tasks.held_out()[:COMPARED_PROMPTS]]
    samples = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)[0].tolist()
        samples.append(Sample(answer, [0] * len(prompt) + [1] * (len(answer) - len(prompt))))
    chosen = trainer.greedy_tokens(samples)
    equal = sum(
        all(c == t for c, t, m in zip(row, sample.token_ids, sample.loss_mask, strict=True) if m)
        for row, sample in zip(chosen, samples, strict=True)
    )
    return equal, len(samples)
