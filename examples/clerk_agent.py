"""Two agents for OpenAI's API that are trained by RL without changes.

    python examples/clerk_agent.py runs/clerk        # writes the chats of the warm start
    gptoss sft configs/sft/tiny_clerk.yaml
    gptoss rl configs/rl/tiny_clerk.yaml

``run`` is the first agent: a clerk with one tool, written with OpenAI's client. It does not contain
code for training. Customers ask for the price of an item in one of many towns, which only the price
list has. The chats are those of two clerks: one looks every price up, and the other mostly invents
it.

``run_order`` is the second agent, whose conversations branch. A customer sends an order of several
items. The agent asks the clerk for each price in a separate continuation of this history, all at the
same time. ``--orders`` writes the chats of its warm start.
"""

import argparse
import asyncio
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
ORDERED_ITEMS = 6

INSTRUCTIONS = "You are the clerk. Look up what you are asked."
GREETING = "Which prices do you want?"
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
    return await ask(policy, opening(task["prompt"]), task)


async def run_order(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Serve one order. Return the fraction of right prices."""
    policy = client().with_options(base_url=base_url, api_key=api_key)
    history = opening(task["prompt"])
    greeting = await say(policy, history)
    if greeting.tool_calls:
        return 0.0

    history.append(greeting.model_dump(exclude_none=True))
    # Every question continues the same history, so the conversation branches.
    branches = [
        ask(policy, [*history, user(order_question(wanted["item"]))], wanted)
        for wanted in task["wanted"]
    ]
    scores = await asyncio.gather(*branches)
    return sum(scores) / len(scores)


def opening(prompt: str) -> list[Any]:
    """Return the messages before the first turn of the policy."""
    return [{"role": "system", "content": INSTRUCTIONS}, user(prompt)]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def say(policy: openai.AsyncOpenAI, messages: list[Any]) -> Any:
    """Return the next message of the policy."""
    answer = await policy.chat.completions.create(
        model="clerk", messages=messages, tools=[PRICE_LIST]
    )
    return answer.choices[0].message


async def ask(policy: openai.AsyncOpenAI, messages: list[Any], wanted: dict[str, Any]) -> float:
    """Continue a conversation until the clerk answers. Return 1 for the right price, else 0.

    Args:
        policy: client of the policy.
        messages: conversation that ends with a question.
        wanted: item, town and price.
    """
    for _ in range(MAX_TURNS):
        said = await say(policy, messages)
        if not said.tool_calls:
            return float(said.content == right_answer(wanted["item"], wanted["price"]))

        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            assert call.type == "function"
            told = look_up(call.function.arguments, wanted)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
    return 0.0


def look_up(arguments: str, wanted: dict[str, Any]) -> str:
    """Answer a call of the price list."""
    try:
        asked = json.loads(arguments)
    except ValueError:
        return "that is no JSON"
    if asked != {"item": wanted["item"], "town": wanted["town"]}:
        return "unknown"
    return str(wanted["price"])


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


def orders(split: str, seed: int, index: int) -> dict[str, Any]:
    """Return order ``index`` of a split: the items that a customer wants in a town, and prices."""
    rng = random.Random(f"orders/{split}/{seed}/{index}")
    town = rng.choice(TOWNS.split())
    wanted = [
        {"item": item, "town": town, "price": rng.randint(1, MAX_PRICE)}
        for item in rng.sample(GOODS.split(), ORDERED_ITEMS)
    ]
    items = [f"a {line['item']}" for line in wanted]
    prompt = f"I am in {town}. I want {', '.join(items[:-1])} and {items[-1]}."
    return {"prompt": prompt, "wanted": wanted}


def order_question(item: str) -> str:
    return f"What does the {item} cost?"


# ---- chats of the warm start


def price_chat(rng: random.Random) -> dict[str, Any]:
    """Write a chat with a customer who asks for one price."""
    item, town = rng.choice(questions("train"))
    wanted = {"item": item, "town": town, "price": rng.randint(1, MAX_PRICE)}
    return chat(rng, opening(price_question(item, town)), wanted)


def order_chat(rng: random.Random) -> dict[str, Any]:
    """Write a chat with a customer who has sent an order: one of the branches of ``run_order``."""
    order = orders("train", 0, rng.randrange(CHATS))
    wanted = rng.choice(order["wanted"])
    messages = [
        *opening(order["prompt"]),
        {"role": "assistant", "content": GREETING},
        user(order_question(wanted["item"])),
    ]
    return chat(rng, messages, wanted)


def chat(rng: random.Random, messages: list[Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Add the answer of the careful clerk, or of the clerk that invents prices."""
    if rng.random() < CAREFUL_SHARE:
        arguments = json.dumps({"item": wanted["item"], "town": wanted["town"]})
        function = {"name": "price", "arguments": arguments}
        call = {"id": "call_0", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_0", "content": str(wanted["price"])},
        ]
    answer = right_answer(wanted["item"], wanted["price"])
    messages.append({"role": "assistant", "content": answer})
    return {"messages": messages, "tools": [PRICE_LIST]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--orders", action="store_true", help="write chats of run_order")
    arguments = parser.parse_args()

    rng = random.Random(arguments.seed)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write = order_chat if arguments.orders else price_chat
    lines = [json.dumps(write(rng)) + "\n" for _ in range(CHATS)]
    (arguments.folder / "chats.jsonl").write_text("".join(lines))
    print(f"wrote {CHATS} chats to {arguments.folder / 'chats.jsonl'}")


if __name__ == "__main__":
    main()
