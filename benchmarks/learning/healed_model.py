"""Sinks, experts and perplexity of an upcycled model that was healed (``gptoss sft upcycled_heal``).

    python -m benchmarks.learning healed-model runs/upcycled_heal
    python -m benchmarks.learning healed-model runs/upcycled_heal --model models/smollm2-135m_upcycled

Needs no GPU. Evaluates the reference equations of GPT-OSS in fp32 on the validation conversations
of the run. Prints a table with one row per layer:

    sink          mean probability of the sink, over all tokens and heads
    least, most   load of the least and the most used expert; 1 is an even share of the tokens

The last lines have the mean of the sinks, the losses of this model and of the dense model in nats
per token, and the perplexity relative to the dense model. Losses are printed twice: over the tokens
in the loss of the run, which are all tokens in distillation, and over the assistant's tokens.

Exits with code 1 if a bar is missed:

    sinks       mean of at least 1%, and at most 60% in every layer
    experts     every expert is used, and none has more than 2 even shares
    perplexity  at most 1.05 times the dense model's, over the tokens in the loss
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from converters.families.registry import hugging_face_reference
from converters.hf_directory import HfDirectory
from converters.reference.decoder import Decoder
from converters.reference.gpt_oss import GptOss, HuggingFaceGptOss
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.algorithms.choices import DistillationLoss
from rl_loop.config.load import load_config
from rl_loop.config.run import SftConfig
from rl_loop.conversations.rejections import RejectionReport
from rl_loop.run_parts import open_conversations
from rl_loop.supervised_data import with_all_tokens

MIN_SINK = 0.01
"""Smallest accepted probability of the sink, mean of the layers."""
MAX_SINK = 0.6
"""Largest accepted probability of the sink of a layer."""
MAX_LOAD = 2.0
"""Largest accepted load of an expert, in even shares."""
MAX_PERPLEXITY = 1.05
"""Largest accepted perplexity relative to the dense model."""


@dataclass(frozen=True)
class Document:
    """Tokens of a conversation with two masks, [tokens]."""

    token_ids: Tensor
    """int64"""
    in_loss: Tensor
    """True for the tokens in the validation loss of the run."""
    of_assistant: Tensor
    """True for the assistant's tokens."""


@dataclass
class Losses:
    """Losses of two models on the same tokens, in nats per token."""

    model: float
    dense: float

    @property
    def perplexity(self) -> float:
        """Perplexity of the model relative to the dense model."""
        return exp(self.model - self.dense)

    def __str__(self) -> str:
        return (
            f"loss {self.model:.4f}, of the dense model {self.dense:.4f}, "
            f"relative perplexity {self.perplexity:.3f}"
        )


class MeasuredGptOss(GptOss):
    """Reference of GPT-OSS that sums the sinks' probabilities and counts the experts' tokens."""

    def __init__(self, config: GptOssModelConfig, layout: HuggingFaceGptOss) -> None:
        super().__init__(config, layout)
        self.sinks = torch.zeros(config.num_layers, dtype=torch.float64)
        """Sum of the sink's probability over tokens and heads, [layers]."""
        self.loads = torch.zeros(config.num_layers, config.num_experts, dtype=torch.int64)
        """Tokens of every expert, [layers, experts]."""

    def weighted_values(self, layer: int, scores: Tensor, value: Tensor) -> Tensor:
        sinks = self.layout.weight(self.layout.names["sinks"], layer)
        probabilities = (sinks[:, None] - scores.logsumexp(-1)).sigmoid()
        self.sinks[layer] += probabilities.sum(dtype=torch.float64)
        return super().weighted_values(layer, scores, value)

    def choose_experts(self, layer: int, logits: Tensor) -> Tensor:
        chosen = super().choose_experts(layer, logits)
        self.loads[layer] += chosen.flatten().bincount(minlength=self.config.num_experts)
        return chosen


@dataclass(frozen=True)
class Result:
    """Measurements of a model on the documents."""

    sinks: list[float]
    """Mean probability of the sink by layer."""
    loads: list[list[float]]
    """Load of every expert by layer; 1 is an even share."""
    in_loss: Losses
    """Losses on the tokens in the loss of the run."""
    of_assistant: Losses
    """Losses on the assistant's tokens."""

    def missed(self) -> list[str]:
        """Return a sentence for every missed bar."""
        layers = list(enumerate(zip(self.sinks, self.loads, strict=True)))
        of_bar = {
            f"the sink is above {MAX_SINK:.0%} in layers": [
                layer for layer, (sink, _) in layers if not sink <= MAX_SINK
            ],
            "an expert is not used in layers": [
                layer for layer, (_, loads) in layers if min(loads) == 0
            ],
            f"an expert has more than {MAX_LOAD:g} even shares in layers": [
                layer for layer, (_, loads) in layers if max(loads) > MAX_LOAD
            ],
        }
        sentences = [
            f"{bar} {', '.join(map(str, where))}" for bar, where in of_bar.items() if where
        ]
        if not fmean(self.sinks) >= MIN_SINK:
            sentences.append(f"the mean of the sinks is below {MIN_SINK:.0%}")
        if not self.in_loss.perplexity <= MAX_PERPLEXITY:
            sentences.append(f"the relative perplexity is above {MAX_PERPLEXITY}")
        return sentences

    def __str__(self) -> str:
        rows = ["| layer | sink | least | most |", "|---|---|---|---|"]
        for layer, (sink, loads) in enumerate(zip(self.sinks, self.loads, strict=True)):
            rows.append(f"| {layer} | {sink:.1%} | {min(loads):.2f} | {max(loads):.2f} |")
        return "\n".join(
            [
                *rows,
                "",
                f"sinks, mean of the layers {fmean(self.sinks):.1%}",
                f"tokens in the loss: {self.in_loss}",
                f"assistant's tokens: {self.of_assistant}",
            ]
        )


@torch.no_grad()
def measure(model: Path, dense: Path, documents: Sequence[Document]) -> Result:
    """Evaluate both models on the documents.

    Args:
        model: Hugging Face directory of a GPT-OSS model.
        dense: Hugging Face directory of the dense model.
        documents: texts in the vocabulary of both models.
    """
    source = HfDirectory(model)
    config = source.config
    if not isinstance(config, GptOssModelConfig):
        sys.exit(f"{model}: model_type is {config.model_type}, but sinks and experts need gpt_oss")
    measured = MeasuredGptOss(config, HuggingFaceGptOss(config, cache(source.get)))
    in_loss, of_assistant = mean_losses(measured, documents)

    dense_source = HfDirectory(dense)
    reference = hugging_face_reference(dense_source.config, cache(dense_source.get))
    dense_in_loss, dense_of_assistant = mean_losses(reference, documents)

    tokens = sum(len(document.token_ids) for document in documents)
    even_share = tokens * config.experts_per_token / config.num_experts
    return Result(
        sinks=(measured.sinks / (tokens * config.num_attention_heads)).tolist(),
        loads=(measured.loads / even_share).tolist(),
        in_loss=Losses(in_loss, dense_in_loss),
        of_assistant=Losses(of_assistant, dense_of_assistant),
    )


def mean_losses(model: Decoder, documents: Iterable[Document]) -> tuple[float, float]:
    """Return the losses on the tokens in the loss and on the assistant's, in nats per token."""
    totals, counts = [0.0, 0.0], [0, 0]
    for document in documents:
        log_probs = model.logits(document.token_ids)[:-1].log_softmax(-1)
        of_labels = log_probs.gather(1, document.token_ids[1:, None])[:, 0]
        for i, mask in enumerate((document.in_loss, document.of_assistant)):
            selected = of_labels[mask[1:]]
            totals[i] -= float(selected.sum(dtype=torch.float64))
            counts[i] += len(selected)
    return totals[0] / counts[0], totals[1] / counts[1]


def validation_documents(config: SftConfig) -> Iterator[Document]:
    """Yield the validation conversations of a run."""
    _, data = open_conversations(config)
    with data:
        sources = data.validation(RejectionReport(write=lambda _: None, show=print))
    if not sources:
        sys.exit("the run has no validation conversations. Set data.validation_fraction")
    for samples in sources.values():
        in_loss = with_all_tokens(samples) if config.trains_all_tokens else samples
        for start, end in zip(samples.offsets[:-1], samples.offsets[1:], strict=True):
            yield Document(
                torch.from_numpy(samples.token_ids[start:end]).long(),
                torch.from_numpy(in_loss.loss_mask[start:end]).bool(),
                torch.from_numpy(samples.loss_mask[start:end]).bool(),
            )


def main() -> None:
    """Parse the command line, print the table, and check the bars."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Any = parser.add_argument
    add("run", type=Path, help="directory of a run of gptoss sft, or its configuration")
    add("overrides", nargs="*", help="KEY=VALUE of the configuration")
    add("--model", type=Path, help="Hugging Face directory; default: export of the run")
    add("--dense", type=Path, help="Hugging Face directory; default: teacher of the run")
    add("--conversations", type=int, default=32, help="validation conversations per source")
    args = parser.parse_args()

    if args.model is None and not args.run.is_dir():
        parser.error(f"{args.run} is not the directory of a run: give --model DIRECTORY")
    path = args.run / "config.yaml" if args.run.is_dir() else args.run
    count = f"data.validation_conversations={args.conversations}"
    config = load_config(path, SftConfig, [count, *args.overrides])
    dense = args.dense
    if dense is None:
        if not isinstance(config.loss, DistillationLoss):
            sys.exit("the run has no teacher: give --dense DIRECTORY")
        dense = config.loss.teacher

    documents = list(validation_documents(config))
    result = measure(args.model or args.run / "export", dense, documents)
    print(f"{len(documents)} conversations, {sum(len(d.token_ids) for d in documents):,} tokens\n")
    print(result)
    for sentence in result.missed():
        print(f"missed: {sentence}")
    if result.missed():
        sys.exit(1)


if __name__ == "__main__":
    main()
