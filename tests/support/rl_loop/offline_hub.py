"""A working directory in which tinker-cookbook finds a tokenizer and datasets without a hub.

``AutoTokenizer`` and ``datasets.load_dataset`` read a local folder of a repository's name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.rl_loop.tinker_client import MODEL

CONTROL = [
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>",
    "<|end|>", "<|message|>", "<|call|>",
]  # fmt: skip
"""Control tokens of Harmony."""


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with a token for every byte and Harmony's control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROL)
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|return|>", pad_token="<|endoftext|>"
    )
    whole.save_pretrained(directory / MODEL)


def write_datasets(directory: Path) -> None:
    """Write short datasets under the names that recipes load."""
    sums = [(f"What is {i} plus {i}?", f"It is {2 * i}.") for i in range(32)]
    chats = [
        {
            "prompt": question,
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ],
        }
        for question, answer in sums
    ]
    _write(directory / "HuggingFaceH4/no_robots/data", chats)
    _write(
        directory / "openai/gsm8k/main",
        [{"question": q, "answer": f"{a}\n#### {2 * i}"} for i, (q, a) in enumerate(sums)],
    )
    card = (
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n"
        "    path: main/train.jsonl\n  - split: test\n    path: main/test.jsonl\n---\n"
    )
    (directory / "openai/gsm8k/README.md").write_text(card)
    _write(directory / "zwhe99/DeepMath-103K", [{"question": question} for question, _ in sums])
    pairs = [
        {
            "chosen": f"\n\nHuman: {question}\n\nAssistant: {answer}",
            "rejected": f"\n\nHuman: {question}\n\nAssistant: No.",
        }
        for question, answer in sums
    ]
    _write(directory / "Anthropic/hh-rlhf", pairs)


def _write(folder: Path, rows: Sequence[Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, chosen in (("train", rows), ("test", rows[:4])):
        lines = [json.dumps(row) + "\n" for row in chosen]
        (folder / f"{split}.jsonl").write_text("".join(lines))
