"""A chat file with your own tools: write it, train on it, and evaluate new conversations.

    python examples/chat_with_tools.py runs/shop
    gptoss data preview configs/sft/tiny_shop.yaml
    gptoss sft configs/sft/tiny_shop.yaml
    python examples/chat_with_tools.py runs/shop --evaluate runs/tiny_shop

Customers ask the clerk of a shop for prices and stocks, which only the clerk's tools know. The file
has OpenAI's ``messages`` and ``tools``. Held-out conversations ask for other prices and stocks of
the same goods. The tools answer the model's calls. A conversation counts if every call and every
final answer is right.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = "lamp table chair clock vase plate candle mirror basket blanket pillow kettle bottle hammer ladder brush"
GOODS = NAMES.split()
MAX_NUMBER = 60
"""Largest price and stock."""
TRAINING, HELD_OUT = 4000, 100
"""Number of conversations."""

INSTRUCTIONS = "You are the clerk. Look up what you are asked."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string"}},
                "required": ["item"],
            },
        },
    }
    for name, description in (("price", "Costs of an item."), ("stock", "How many there are."))
]


@dataclass(frozen=True)
class Question:
    """A question of the customer, with the tool's answer."""

    tool: str
    item: str
    number: int

    @property
    def text(self) -> str:
        if self.tool == "price":
            return f"What does a {self.item} cost?"
        return f"How many of the {self.item} are left?"

    @property
    def answer(self) -> str:
        if self.tool == "price":
            return f"A {self.item} costs {self.number}."
        return f"There are {self.number} of the {self.item}."


def every_question() -> Iterator[Question]:
    for tool in ("price", "stock"):
        for item in GOODS:
            for number in range(1, MAX_NUMBER + 1):
                yield Question(tool, item, number)


def conversation(questions: Sequence[Question]) -> dict[str, Any]:
    """Return a conversation in OpenAI's format."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": INSTRUCTIONS}]
    for number, question in enumerate(questions):
        function = {"name": question.tool, "arguments": json.dumps({"item": question.item})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages += [
            {"role": "user", "content": question.text},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": str(question.number)},
            {"role": "assistant", "content": question.answer},
        ]
    return {"messages": messages, "tools": TOOLS}


def write_files(folder: Path, seed: int) -> None:
    """Write train.jsonl and held_out.jsonl, which share no question with the same answer."""
    rng = random.Random(seed)
    questions = list(every_question())
    rng.shuffle(questions)
    held_out, known = questions[: 2 * HELD_OUT], questions[2 * HELD_OUT :]

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "train.jsonl").open("w") as file:
        for _ in range(TRAINING):
            asked = rng.sample(known, k=rng.choice((1, 2)))
            file.write(json.dumps(conversation(asked)) + "\n")
    with (folder / "held_out.jsonl").open("w") as file:
        for i in range(HELD_OUT):
            file.write(json.dumps(conversation(held_out[2 * i : 2 * i + 2])) + "\n")


# ---- evaluation


async def converse(engine: Any, harmony: Any, record: dict[str, Any]) -> bool:
    """Ask the model the questions of a held-out conversation, and answer its calls.

    Returns:
        True if all calls and answers of the model are right.
    """
    from rl_loop.conversations.formats import read_tools
    from rl_loop.engines.protocol import GenerateRequest, SamplingParams
    from rl_loop.harmony.codec import FormatError, ToolOutput

    greedy = SamplingParams(64, temperature=0, stop_token_ids=harmony.stop_token_ids)
    messages = record["messages"]
    tools = read_tools(record["tools"])

    for asked, message in enumerate(messages):
        if message["role"] != "user":
            continue
        # The history has the expected answers, not those of the model.
        ids = harmony.render_prompt(messages[: asked + 1], tools)
        name = f"{message['content']}/{id(record)}"

        sampled = await engine.generate(GenerateRequest(f"{name}/0/0", ids, greedy))
        parsed = harmony.parse(sampled.output_ids)
        function = messages[asked + 1]["tool_calls"][0]["function"]
        if (
            isinstance(parsed, FormatError)
            or parsed[-1].recipient != f"functions.{function['name']}"
        ):
            return False
        if parsed[-1].text != function["arguments"]:
            return False

        told = ToolOutput(parsed[-1].recipient, parsed[-1].channel, messages[asked + 2]["content"])
        ids = ids + sampled.output_ids + harmony.render_observation([told])
        sampled = await engine.generate(GenerateRequest(f"{name}/1/0", ids, greedy))
        parsed = harmony.parse(sampled.output_ids)
        if isinstance(parsed, FormatError) or parsed[-1].text != messages[asked + 3]["content"]:
            return False
    return True


def evaluate(folder: Path, run: Path) -> float:
    """Return the fraction of held-out conversations that a run's export answers correctly."""
    import torch
    from transformers import GptOssForCausalLM

    from rl_loop.config.load import load_run_config
    from rl_loop.engines.embedded.engine import TransformersEngine
    from rl_loop.tasks.codec import build_codec

    harmony = build_codec(load_run_config(run / "config.yaml", "sft"))
    model = GptOssForCausalLM.from_pretrained(
        run / "export", dtype=torch.float32, attn_implementation="eager"
    )
    records = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]

    async def ask_all() -> list[bool]:
        engine = TransformersEngine(model)
        try:
            return await asyncio.gather(*(converse(engine, harmony, record) for record in records))
        finally:
            await engine.close()

    right = asyncio.run(ask_all())
    return sum(right) / len(right)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", type=Path, metavar="RUN")
    arguments = parser.parse_args()

    if arguments.evaluate is None:
        write_files(arguments.folder, arguments.seed)
        print(f"wrote {TRAINING} and {HELD_OUT} conversations to {arguments.folder}")
        return
    share = evaluate(arguments.folder, arguments.evaluate)
    print(f"{share:.0%} of {HELD_OUT} held-out conversations are answered without a mistake")


if __name__ == "__main__":
    main()
