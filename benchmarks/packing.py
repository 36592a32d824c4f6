"""How full and how even packed micro-batches are, on recorded lengths.

    python benchmarks/packing.py                # measure
    python benchmarks/packing.py --record       # write packing_lengths.json anew (a minute; needs the o200k vocabulary)

``packing_lengths.json`` holds, per distribution, tokens of a sequence -> how many there are, as o200k counts them:

- episodes: 1,024 demonstrations of each of the four environments, whole multi-turn episodes in Harmony; `incident` at
  its levels 1 to 3 in turn, all other options at their defaults.
- documents: every Python file of CPython's standard library with its tests (the version is in the file), cut at
  32,768 tokens as for pre-training. A long tail: the median is a twentieth of the longest.
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

from megatron_gptoss.config import ModelConfig
from megatron_gptoss.packing import PackedBatch, Sample, pack
from megatron_gptoss.planning.flops import forward_flops

FILE = Path(__file__).with_name("packing_lengths.json")
LONGEST = 32_768
GPT_OSS_20B = ModelConfig(num_layers=24, num_experts=32)


def episodes(count: int = 1024) -> list[int]:
    from rl_loop.config.training import DemonstrationConfig
    from rl_loop.environments import environment_class
    from rl_loop.harmony.codec import Harmony, PromptConfig
    from rl_loop.harmony.vocabulary import GptOssVocabulary
    from rl_loop.tasks.demonstrations import demonstrate

    harmony, lengths = Harmony(GptOssVocabulary(), PromptConfig()), []
    for name in ("retool", "gsm8k", "instructions", "incident"):
        environment = environment_class(name)
        for i in range(count):
            options = {"level": i % 3 + 1} if name == "incident" else {}
            task = environment.generate("train", 0, i, environment.Options.model_validate(options))
            task = replace(task, environment=name)
            lengths.append(len(demonstrate(task, harmony, DemonstrationConfig(), f"{name}/{i}").token_ids))
    return lengths


def documents() -> list[int]:
    from rl_loop.harmony.vocabulary import GptOssVocabulary

    vocabulary, lengths = GptOssVocabulary(), []
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if "site-packages" not in path.parts and (text := path.read_text(errors="replace")):
            lengths.append(min(LONGEST, len(vocabulary.encode_text(text))))
    return [length for length in lengths if length > 1]


def measure(lengths: list[int], ranks: int, limit: int) -> dict[str, float]:
    """Of one step's sequences: shares, and how much longer the slowest takes than the mean."""
    samples = [Sample([0] * length, [0] + [1] * (length - 1)) for length in lengths]
    per_rank = pack(samples, limit, ranks, 8, lambda length: forward_flops(GPT_OSS_20B, [length]))

    def work(batch: PackedBatch) -> int:
        return forward_flops(GPT_OSS_20B, batch.cu_seqlens.diff().tolist())

    tokens = sum(lengths) - len(lengths)
    rows = [batch for batches in per_rank for batch in batches]
    works = [[work(batch) for batch in batches] for batches in per_rank]
    mean = sum(map(sum, works)) / ranks
    in_order, sizes = sorted((n - 1 for n in lengths), reverse=True), []
    while in_order:  # unpacked: as many of similar length as fit when padded to the longest of them
        together = max(1, limit // in_order[0])
        sizes.append(in_order[0] * len(in_order[:together]))
        in_order = in_order[together:]
    shuffled = Random(0).sample(lengths, len(lengths))
    fours = [shuffled[i : i + 4] for i in range(0, len(shuffled), 4)]
    return {
        "sequences": len(lengths),
        "micro_batches_per_rank": len(per_rank[0]),
        "useful": tokens / sum(batch.tokens for batch in rows),
        "filled": tokens / (limit * len(rows)),
        "slowest_rank": max(map(sum, works)) / mean,
        "slowest_of_each_micro_batch": sum(map(max, zip(*works, strict=True))) / mean,
        "useful_if_padded_in_fours": tokens / sum(len(four) * max(four) for four in fours),
        "useful_if_sorted_and_padded": tokens / sum(sizes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--limit", type=int, default=LONGEST, help="tokens of a micro-batch")
    args = parser.parse_args()
    if args.record:
        recorded = {"python": platform.python_version()}
        for name, lengths in (("episodes", episodes()), ("documents", documents())):
            recorded[name] = {str(length): count for length, count in sorted(Counter(lengths).items())}
        FILE.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
    recorded = json.loads(FILE.read_text())
    for name in ("episodes", "documents"):
        everything = [int(length) for length, count in recorded[name].items() for _ in range(count)]
        everything.sort()
        quantiles = {q: everything[int(q / 100 * (len(everything) - 1))] for q in (0, 50, 90, 99, 100)}
        print(json.dumps({"distribution": name, "sequences": len(everything), "percentiles": quantiles}))
        step = Random(0).sample(everything, 1024)
        for ranks in (1, 4, 8, 32):
            figures = {key: round(value, 4) for key, value in measure(step, ranks, args.limit).items()}
            print(json.dumps({"distribution": name, "data_parallel": ranks, **figures}), flush=True)


if __name__ == "__main__":
    main()
