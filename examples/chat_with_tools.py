"""Chat files with your own tools: write them, train on them, and evaluate new conversations.

    python examples/chat_with_tools.py runs/shop
    gptoss data preview configs/sft/tiny_shop.yaml
    gptoss sft configs/sft/tiny_shop.yaml
    gptoss eval configs/sft/tiny_shop.yaml --weights runs/tiny_shop/export

Customers ask the clerk of a shop for prices and stocks, which only the clerk's tools know. The file
has OpenAI's ``messages`` and ``tools``. Held-out conversations ask for other prices and stocks of
the same goods.

With ``--weather``, each question is about two cities, and the answer makes two calls at once.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
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

CITIES = ["Oslo", "Rome", "Lima", "Cairo", "Paris", "Tokyo", "Delhi", "Quito"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
SKIES = ["sun", "rain", "snow", "wind"]
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a day.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "day": {"type": "string"}},
            "required": ["city", "day"],
        },
    },
}


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

    trained = (conversation(rng.sample(known, k=rng.choice((1, 2)))) for _ in range(TRAINING))
    write_lines(folder / "train.jsonl", trained)
    evaluated = (conversation(held_out[2 * i : 2 * i + 2]) for i in range(HELD_OUT))
    write_lines(folder / "held_out.jsonl", evaluated)


# ---- weather, with two calls in one message


@dataclass(frozen=True)
class Forecast:
    """A question about the weather in two cities on one day, with the tool's answers."""

    cities: tuple[str, str]
    day: str
    skies: tuple[str, str]

    def conversation(self) -> dict[str, Any]:
        """Return a conversation in OpenAI's format."""
        (first, second), (here, there) = self.cities, self.skies
        calls = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {
                    "name": "weather",
                    "arguments": json.dumps({"city": city, "day": self.day}),
                },
            }
            for number, city in enumerate(self.cities)
        ]
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "content": sky}
            for call, sky in zip(calls, self.skies, strict=True)
        ]
        asked = f"How is the weather in {first} and {second} on {self.day}?"
        messages = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": None, "tool_calls": calls},
            *answers,
            {"role": "assistant", "content": f"{first} has {here}, {second} has {there}."},
        ]
        return {"messages": messages, "tools": [WEATHER_TOOL]}


def write_weather(folder: Path, seed: int) -> None:
    """Write train.jsonl and held_out.jsonl, which share no two cities with the same day."""
    rng = random.Random(seed)
    places = [(a, b, day) for a in CITIES for b in CITIES if a != b for day in DAYS]
    rng.shuffle(places)

    def forecast(place: tuple[str, str, str]) -> dict[str, Any]:
        first, second, day = place
        skies = (rng.choice(SKIES), rng.choice(SKIES))
        return Forecast((first, second), day, skies).conversation()

    held_out, known = places[:HELD_OUT], places[HELD_OUT:]
    write_lines(folder / "train.jsonl", (forecast(rng.choice(known)) for _ in range(TRAINING)))
    write_lines(folder / "held_out.jsonl", map(forecast, held_out))


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weather", action="store_true", help="Write the chats about the weather.")
    arguments = parser.parse_args()

    write = write_weather if arguments.weather else write_files
    write(arguments.folder, arguments.seed)
    print(f"wrote {TRAINING} and {HELD_OUT} conversations to {arguments.folder}")


if __name__ == "__main__":
    main()
