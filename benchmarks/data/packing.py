"""Fill and balance of packed micro-batches, on recorded lengths.

    python -m benchmarks.data packing                # measure
    python -m benchmarks.data packing --record       # write packing_lengths.json first

Needs no GPU. ``--record`` needs the o200k vocabulary. Prints one JSON line per distribution and
number of data-parallel ranks.

``packing_lengths.json`` contains two distributions of sequence lengths in o200k tokens, as
{length: number of sequences}:

- episodes: 1,024 demonstrations of each of 4 environments. They are whole multi-turn episodes in
  Harmony. ``incident`` alternates between its levels 1 to 3. Other options have their defaults.
- documents: every Python file of CPython's standard library with its tests, cut at 32,768 tokens as
  in pre-training. The distribution has a long tail. The file has the version of Python.
"""

from __future__ import annotations

import argparse
import json
import platform
import sysconfig
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.packing import PackedBatch, pack
from megatron_gptoss.planning.flops import forward_flops
from megatron_gptoss.samples import TrainingSamples

FILE = Path(__file__).with_name("packing_lengths.json")
MAX_LENGTH = 32_768
GPT_OSS_20B = GptOssModelConfig(num_layers=24, num_experts=32)


def record_episodes(count: int = 1024) -> list[int]:
    """Return the lengths of ``count`` demonstrations of each environment."""
    from rl_loop.config.training import DemonstrationConfig
    from rl_loop.environments import environment_class
    from rl_loop.harmony.codec import Harmony, PromptConfig
    from rl_loop.harmony.vocabulary import GptOssVocabulary
    from rl_loop.tasks.demonstrations import demonstrate

    harmony = Harmony(GptOssVocabulary(), PromptConfig())
    lengths = []
    for name in ("retool", "gsm8k", "instructions", "incident"):
        environment = environment_class(name)
        for i in range(count):
            options = {"level": i % 3 + 1} if name == "incident" else {}
            task = environment.generate("train", 0, i, environment.Options.model_validate(options))
            task = replace(task, environment=name)
            demonstration = demonstrate(task, harmony, DemonstrationConfig(), f"{name}/{i}")
            lengths.append(len(demonstration.token_ids))
    return lengths


def record_documents() -> list[int]:
    """Return the lengths of all files of the standard library, cut at MAX_LENGTH."""
    from rl_loop.harmony.vocabulary import GptOssVocabulary

    vocabulary = GptOssVocabulary()
    library = Path(sysconfig.get_paths()["stdlib"])
    lengths = []
    for path in sorted(library.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        tokens = len(vocabulary.encode_text(path.read_text(errors="replace")))
        if tokens > 1:
            lengths.append(min(MAX_LENGTH, tokens))
    return lengths


def record() -> None:
    """Overwrite FILE with new lengths."""
    recorded: dict[str, Any] = {"python": platform.python_version()}
    for name, lengths in (("episodes", record_episodes()), ("documents", record_documents())):
        counts = sorted(Counter(lengths).items())
        recorded[name] = {str(length): count for length, count in counts}
    FILE.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


def batch_flops(batch: PackedBatch) -> int:
    """Return the forward FLOPs of one micro-batch."""
    return forward_flops(GPT_OSS_20B, batch.cu_seqlens.diff().tolist())


def measure(lengths: list[int], ranks: int, limit: int) -> dict[str, float]:
    """Pack one step's sequences and measure fill and balance of the micro-batches.

    Args:
        lengths: tokens of each sequence.
        ranks: number of data-parallel ranks.
        limit: maximum number of tokens of a micro-batch.

    Returns:
        ``useful`` and ``filled`` are fractions of the computed tokens and of the capacity.
        ``slowest_rank`` and ``slowest_of_each_micro_batch`` are relative to the mean work of ranks.
    """
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    samples = TrainingSamples(
        offsets=offsets,
        token_ids=np.zeros(offsets[-1], np.int32),
        loss_mask=np.ones(offsets[-1], np.bool_),
    )
    per_rank = pack(samples, limit, ranks, 8, lambda length: forward_flops(GPT_OSS_20B, [length]))

    batches = [batch for rank in per_rank for batch in rank]
    work = [[batch_flops(batch) for batch in rank] for rank in per_rank]
    mean_work = sum(map(sum, work)) / ranks

    # The first token of a sequence predicts nothing and is not computed.
    tokens = sum(lengths) - len(lengths)
    return {
        "sequences": len(lengths),
        "micro_batches_per_rank": len(per_rank[0]),
        "useful": tokens / sum(batch.tokens for batch in batches),
        "filled": tokens / (limit * len(batches)),
        "slowest_rank": max(map(sum, work)) / mean_work,
        "slowest_of_each_micro_batch": sum(map(max, zip(*work, strict=True))) / mean_work,
        "useful_if_padded_in_fours": tokens / padded_in_fours(lengths),
        "useful_if_sorted_and_padded": tokens / sorted_and_padded(lengths, limit),
    }


def padded_in_fours(lengths: list[int]) -> int:
    """Return the tokens of random batches of four, padded to the longest of each batch."""
    shuffled = Random(0).sample(lengths, len(lengths))
    total = 0
    for start in range(0, len(shuffled), 4):
        four = shuffled[start : start + 4]
        total += len(four) * max(four)
    return total


def sorted_and_padded(lengths: list[int], limit: int) -> int:
    """Return the tokens of padded batches of similar lengths.

    Each batch is filled up to ``limit``, counting the padding to its longest sequence.

    Args:
        lengths: tokens of each sequence.
        limit: maximum number of tokens of a batch.
    """
    remaining = sorted((length - 1 for length in lengths), reverse=True)
    total = 0
    while remaining:
        longest = remaining[0]
        count = max(1, limit // longest)
        total += longest * len(remaining[:count])
        remaining = remaining[count:]
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--record", action="store_true", help="write packing_lengths.json anew")
    parser.add_argument("--limit", type=int, default=MAX_LENGTH, help="tokens of a micro-batch")
    options = parser.parse_args()
    if options.record:
        record()

    recorded = json.loads(FILE.read_text())
    for name in ("episodes", "documents"):
        lengths = sorted(
            Counter({int(length): count for length, count in recorded[name].items()}).elements(),
        )
        percentiles = {q: lengths[int(q / 100 * (len(lengths) - 1))] for q in (0, 50, 90, 99, 100)}
        print(
            json.dumps(
                {"distribution": name, "sequences": len(lengths), "percentiles": percentiles},
            )
        )

        step = Random(0).sample(lengths, 1024)
        for ranks in (1, 4, 8, 32):
            figures = {
                key: round(value, 4) for key, value in measure(step, ranks, options.limit).items()
            }
            print(
                json.dumps({"distribution": name, "data_parallel": ranks, **figures}),
                flush=True,
            )
