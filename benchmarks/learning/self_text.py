"""Conversations that a ChatML model writes itself, for distillation into another model.

    python -m benchmarks.learning self-text models/smollm2-135m self_written.jsonl --conversations 12000
    python -m benchmarks.learning self-text models/smollm2-135m answers.jsonl --prompts gsm8k/train.jsonl

Without ``--prompts``, the model also writes the user's message: it continues the header of a user's
turn (Magpie, arXiv 2406.08464). With ``--prompts``, it answers the values of ``--column`` in the
records of a file. Tokens are sampled from the whole distribution, which distillation compares. A
message may be cut off at ``--max-tokens``, because the teacher has a distribution at every token.

Writes one conversation per line in the format ``messages``, without the system message, which is
that of the model's chat template. ``chatml.system`` must be the same in training.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import batched
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ENDS = ("<|im_end|>", "<|endoftext|>")
USER = "<|im_start|>user\n"


class Writer:
    """ChatML model that writes user's messages and answers."""

    def __init__(self, directory: Path, max_tokens: int, seed: int) -> None:
        """Load a model onto the GPU in bf16, or onto the CPU in fp32.

        Args:
            directory: Hugging Face directory.
            max_tokens: maximum tokens of a message.
            seed: seed of the sampling.
        """
        torch.manual_seed(seed)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self._device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        self._model = model.to(self._device).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
        known = self._tokenizer.get_vocab()
        self._ends = [known[name] for name in ENDS if name in known]
        self._max_tokens = max_tokens

    def write(self, questions: Sequence[str | None]) -> Iterator[dict[str, Any]]:
        """Yield a conversation for each question that the model answers.

        Args:
            questions: user's messages. None for one that the model writes.
        """
        # The template adds the model's system message before the header of the user's message.
        example = self._template([{"role": "user", "content": "x"}])
        header = example[: example.index(USER) + len(USER)]
        written = iter(self._continue([header for q in questions if q is None]))
        asked = [next(written) if q is None else q for q in questions]

        chats = [[{"role": "user", "content": text.strip()}] for text in asked if text.strip()]
        answers = self._continue([self._template(chat) for chat in chats])
        for chat, answer in zip(chats, answers, strict=True):
            if answer.strip():
                yield {"messages": [*chat, {"role": "assistant", "content": answer}]}

    def _template(self, chat: list[dict[str, str]]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        return text

    def _continue(self, prompts: Sequence[str]) -> list[str]:
        """Sample a continuation of each prompt, up to the end of the message or the limit."""
        if not prompts:
            return []
        inputs = self._tokenizer(
            list(prompts), return_tensors="pt", padding=True, add_special_tokens=False
        ).to(self._device)
        with torch.no_grad():
            outputs = self._model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=self._max_tokens,
                eos_token_id=self._ends,
                pad_token_id=self._ends[0],
            )
        sampled = outputs[:, inputs["input_ids"].shape[1] :]
        texts: list[str] = self._tokenizer.batch_decode(sampled, skip_special_tokens=True)
        return texts


def prompts_of(path: Path, column: str) -> list[str]:
    """Return the values of a column of a .jsonl file."""
    return [json.loads(line)[column] for line in path.read_text().splitlines()]


def main() -> None:
    """Write the conversations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--conversations", type=int, default=12_000)
    parser.add_argument("--prompts", type=Path, help=".jsonl with user's messages")
    parser.add_argument("--column", default="question", help="column of --prompts")
    parser.add_argument("--batch", type=int, default=1024, help="conversations at a time")
    parser.add_argument("--max-tokens", type=int, default=400, help="limit of a message")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    questions: list[str | None] = [None] * arguments.conversations
    if arguments.prompts is not None:
        questions = [*prompts_of(arguments.prompts, arguments.column)]
    writer = Writer(arguments.model, arguments.max_tokens, arguments.seed)
    count = 0
    with arguments.out.open("w") as file:
        for batch in batched(questions, arguments.batch):
            for conversation in writer.write(batch):
                file.write(json.dumps(conversation) + "\n")
                count += 1
            file.flush()
            print(f"{count} conversations", flush=True)


if __name__ == "__main__":
    main()
