"""Sinks, experts and perplexity of an upcycled model that was healed (``gptoss sft upcycled_heal``).

    python -m benchmarks.learning healed-model runs/upcycled_heal
    python -m benchmarks.learning healed-model runs/upcycled_heal --model models/smollm2-135m_upcycled

Needs no GPU. Evaluates the reference equations of GPT-OSS in fp32 on the validation conversations
of the run. Prints a table with one row per layer:

    sink          mean probability of the sink, over all tokens and heads
    least, most   load of the least and the most used expert; 1 is an even share of the tokens

The last lines are the mean of the sinks, the losses of this model and of the dense model in nats
per token in the loss, and the perplexity relative to the dense model. Exits with code 1 if a bar is
missed: a sink between 1% and 60% in every layer, no unused expert, no expert above 2 even shares,
and a relative perplexity of at most 1.05.
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
from megatron_gptoss.samples import TrainingSamples
from rl_loop.algorithms.choices import DistillationLoss
from rl_loop.config.load import load_config
from rl_loop.config.run import SftConfig
from rl_loop.conversations.rejections import RejectionReport
from rl_loop.run_parts import open_conversations

SINK = (0.01, 0.6)
"""Accepted range of a layer's mean probability of the sink."""
MAX_LOAD = 2.0
"""Largest accepted load of an expert, in even shares."""
MAX_PERPLEXITY = 1.05
"""Largest accepted perplexity relative to the dense model."""

Document = tuple[Tensor, Tensor]
"""Tokens and loss mask of a conversation, int64 and bool [tokens]."""


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
    loss: float
    """Loss of the model, nats per token in the loss."""
    dense_loss: float
    """Loss of the dense model, nats per token in the loss."""

    @property
    def perplexity(self) -> float:
        """Perplexity relative to the dense model."""
        return exp(self.loss - self.dense_loss)

    def missed(self) -> list[str]:
        """Return a sentence for every missed bar."""
        layers = list(enumerate(zip(self.sinks, self.loads, strict=True)))
        of_bar = {
            f"the sink is outside {SINK[0]:.0%} to {SINK[1]:.0%} in layers": [
                layer for layer, (sink, _) in layers if not SINK[0] <= sink <= SINK[1]
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
        if not self.perplexity <= MAX_PERPLEXITY:
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
                f"loss {self.loss:.4f}, of the dense model {self.dense_loss:.4f}",
                f"perplexity relative to the dense model {self.perplexity:.3f}",
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
    loss = mean_loss(measured, documents)

    dense_source = HfDirectory(dense)
    reference = hugging_face_reference(dense_source.config, cache(dense_source.get))
    tokens = sum(len(ids) for ids, _ in documents)
    even_share = tokens * config.experts_per_token / config.num_experts
    return Result(
        sinks=(measured.sinks / (tokens * config.num_attention_heads)).tolist(),
        loads=(measured.loads / even_share).tolist(),
        loss=loss,
        dense_loss=mean_loss(reference, documents),
    )


def mean_loss(model: Decoder, documents: Iterable[Document]) -> float:
    """Return the loss in nats per token in the loss."""
    total, count = 0.0, 0
    for tokens, in_loss in documents:
        log_probs = model.logits(tokens)[:-1].log_softmax(-1)
        of_labels = log_probs.gather(1, tokens[1:, None])[:, 0][in_loss[1:]]
        total -= float(of_labels.sum(dtype=torch.float64))
        count += len(of_labels)
    return total / count


def validation_documents(config: SftConfig) -> Iterator[Document]:
    """Yield the validation conversations of a run."""
    _, data = open_conversations(config)
    with data:
        sources = data.validation(RejectionReport(write=lambda _: None, show=print))
    if not sources:
        sys.exit("the run has no validation conversations. Set data.validation_fraction")
    for samples in sources.values():
        yield from split_documents(samples)


def split_documents(samples: TrainingSamples) -> Iterator[Document]:
    """Yield the sequences of samples."""
    for start, end in zip(samples.offsets[:-1], samples.offsets[1:], strict=True):
        ids, mask = samples.token_ids[start:end], samples.loss_mask[start:end]
        yield torch.from_numpy(ids).long(), torch.from_numpy(mask).bool()


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
    print(f"{len(documents)} conversations, {sum(len(ids) for ids, _ in documents):,} tokens\n")
    print(result)
    for sentence in result.missed():
        print(f"missed: {sentence}")
    if result.missed():
        sys.exit(1)


if __name__ == "__main__":
    main()
