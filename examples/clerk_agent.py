"""An agent for OpenAI's API that is trained by RL without changes.

    python examples/clerk_agent.py runs/clerk        # writes the chats of the warm start
    gptoss sft configs/sft/tiny_clerk.yaml
    PYTHONPATH=. gptoss rl configs/rl/tiny_clerk.yaml

``run`` is the agent: a clerk with one tool, written with OpenAI's client. It does not contain code
for training. Customers ask for the price of an item in one of many towns, which only the price list
has. The chats are those of two clerks: one looks every price up, and the other mostly invents it.
"""

import argparse
import functools
import json
import random
from pathlib import Path
from typing import Any

import openai

GOODS = "lamp table chair clock vase plate candle mirror basket blanket pillow kettle bottle hammer ladder brush"
TOWNS = "Paris London Berlin Madrid Rome Vienna Dublin Lisbon Oslo Prague Athens Boston Chicago Denver Dallas Houston"
MAX_PRICE = 60
HELD_OUT_SHARE = 4
"""One of this many questions is held out."""
MAX_TURNS = 4
CHATS = 3000
CAREFUL_SHARE = 0.5
"""Fraction of the chats in which the clerk looks the price up."""

INSTRUCTIONS = "You are the clerk. Look up what you are asked."
PRICE_LIST: Any = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Costs of an item.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}, "town": {"type": "string"}},
            "required": ["item", "town"],
        },
    },
}


# ---- the agent


@functools.cache
def client() -> openai.AsyncOpenAI:
    """Return the connections that all episodes of this process share."""
    # This transport needs 33% less processor time than OpenAI's default one with many requests.
    http_client = openai.DefaultAioHttpClient()
    return openai.AsyncOpenAI(base_url="http://unused", api_key="unused", http_client=http_client)


async def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Serve one customer. Return 1 for the right price, 0 for any other answer."""
    policy = client().with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": task["prompt"]},
    ]
    for _ in range(MAX_TURNS):
        answer = await policy.chat.completions.create(
            model="clerk", messages=messages, tools=[PRICE_LIST]
        )
        said = answer.choices[0].message
        if not said.tool_calls:
            return float(said.content == right_answer(task["item"], task["price"]))

        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            assert call.type == "function"
            told = look_up(call.function.arguments, task)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
    return 0.0


def look_up(arguments: str, task: dict[str, Any]) -> str:
    """Answer a call of the price list."""
    try:
        asked = json.loads(arguments)
    except ValueError:
        return "that is no JSON"
    if asked != {"item": task["item"], "town": task["town"]}:
        return "unknown"
    return str(task["price"])


def right_answer(item: str, price: int) -> str:
    """Return the right answer."""
    return f"A {item} costs {price}."


# ---- tasks


@functools.cache
def questions(split: str) -> list[tuple[str, str]]:
    """Return all (item, town) of a split in a fixed order."""
    everything = [(item, town) for item in GOODS.split() for town in TOWNS.split()]
    random.Random(0).shuffle(everything)
    held_out = len(everything) // HELD_OUT_SHARE
    return everything[:held_out] if split == "held_out" else everything[held_out:]


def tasks(split: str, seed: int, index: int) -> dict[str, Any]:
    """Return task ``index`` of a split: a question, and the answer of the price list."""
    rng = random.Random(f"{split}/{seed}/{index}")
    known = questions(split)
    # Every question occurs once before it repeats with another price.
    item, town = known[index % len(known)]
    return {
        "prompt": price_question(item, town),
        "item": item,
        "town": town,
        "price": rng.randint(1, MAX_PRICE),
    }


def price_question(item: str, town: str) -> str:
    return f"What does a {item} cost in {town}?"


# ---- chats of the warm start


def chat(rng: random.Random) -> dict[str, Any]:
    """Write a chat of the careful clerk, or of the clerk that invents prices."""
    item, town = rng.choice(questions("train"))
    price = rng.randint(1, MAX_PRICE)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": price_question(item, town)},
    ]
    if rng.random() < CAREFUL_SHARE:
        arguments = json.dumps({"item": item, "town": town})
        function = {"name": "price", "arguments": arguments}
        call = {"id": "call_0", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_0", "content": str(price)},
        ]
    messages.append({"role": "assistant", "content": right_answer(item, price)})
    return {"messages": messages, "tools": [PRICE_LIST]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    rng = random.Random(arguments.seed)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(chat(rng)) + "\n" for _ in range(CHATS)]
    (arguments.folder / "chats.jsonl").write_text("".join(lines))
    print(f"wrote {CHATS} chats to {arguments.folder / 'chats.jsonl'}")


if __name__ == "__main__":
    main()
