"""A tiny GPT-OSS that has memorized conversations, so that real sampling gives known responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedConfig, PreTrainedModel

from rl_loop.engines.embedded.engine import TransformersEngine
from rl_loop.harmony.codec import Harmony, ParsedMessage, Tool, ToolOutput
from rl_loop.harmony.vocabulary import special_id

ADD = Tool(
    "add",
    "",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
)
ARGUMENTS = '{"a": 1, "b": 1}'
LONG = " ".join(str(number) for number in range(10, 40))
GARBAGE = "nonsense"
"""An invalid channel."""


@dataclass
class Lesson:
    """Tokens to memorize, and which of them are sampled."""

    ids: list[int]
    mask: list[bool]

    def then(self, ids: list[int], *, sampled: bool) -> Lesson:
        return Lesson(self.ids + ids, self.mask + [sampled] * len(ids))


class Script:
    """The policy's turns, written by the renderer of demonstrations."""

    def __init__(self, harmony: Harmony) -> None:
        self.harmony = harmony
        self.thought = ParsedMessage("analysis", None, None, "ok")

    def says(self, text: str, *, thinks: bool = False) -> list[int]:
        messages = [ParsedMessage("final", None, None, text)]
        if thinks:
            messages.insert(0, self.thought)
        return self.harmony.render_assistant(messages, "<|return|>")

    def calls_add(self) -> list[int]:
        call = ParsedMessage("commentary", "functions.add", "<|constrain|>json", ARGUMENTS)
        return self.harmony.render_assistant([self.thought, call], "<|call|>")

    def illegal(self) -> list[int]:
        message = ParsedMessage(GARBAGE, None, None, "x")
        return self.harmony.render_assistant([message], "<|return|>")

    def comments_only(self) -> list[int]:
        return self.harmony.render_assistant([self.thought], "<|return|>")

    def prompt(self, text: str, tools: tuple[Tool, ...] = (), instructions: str = "") -> list[int]:
        messages = [{"role": "user", "content": text}]
        if instructions:
            messages.insert(0, {"role": "developer", "content": instructions})
        return self.harmony.render_prompt(messages, tools)

    def hears(self, text: str) -> list[int]:
        return self.harmony.render_observation([], text)

    def hears_tool(self, text: str) -> list[int]:
        return self.harmony.render_observation([ToolOutput("functions.add", "commentary", text)])

    def lessons(self) -> list[Lesson]:
        nothing = Lesson([], [])
        greeted = nothing.then(self.prompt("Hi"), sampled=False)
        greeted = greeted.then(self.says("Hello", thinks=True), sampled=True)
        more = greeted.then(self.hears("More"), sampled=False).then(self.says("Bye"), sampled=True)
        again = greeted.then(self.hears("Again"), sampled=False)
        again = again.then(self.says("What"), sampled=True)

        history = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "More"},
        ]
        shortened = nothing.then(self.harmony.render_prompt(history), sampled=False)
        shortened = shortened.then(self.says("Bye"), sampled=True)

        summed = nothing.then(self.prompt("1+1", (ADD,)), sampled=False)
        summed = summed.then(self.calls_add(), sampled=True)
        summed = summed.then(self.hears_tool("2"), sampled=False)
        summed = summed.then(self.says("two"), sampled=True)

        [end] = self.harmony.vocabulary.from_harmony([special_id("<|end|>")])
        counted = nothing.then(self.prompt("Count"), sampled=False)
        counted = counted.then(self.says(LONG), sampled=True)
        cut = nothing.then(self.prompt("Count"), sampled=False)
        cut = cut.then(self.says(LONG)[:12], sampled=True).then([end], sampled=False)
        cut = cut.then(self.hears("Stop"), sampled=False).then(self.says("ok"), sampled=True)

        broken = nothing.then(self.prompt("Break"), sampled=False).then(
            self.illegal(), sampled=True
        )
        mute = nothing.then(self.prompt("Think"), sampled=False)
        mute = mute.then(self.comments_only(), sampled=True)
        offered = nothing.then(self.prompt("Hi", (ADD,)), sampled=False)
        offered = offered.then(self.says("Hello", thinks=True), sampled=True)
        brief = nothing.then(self.prompt("Hi", instructions="Be brief."), sampled=False)
        brief = brief.then(self.says("Yo"), sampled=True)
        return [more, again, shortened, summed, counted, cut, broken, mute, brief, offered]


def tiny_config(vocabulary_size: int) -> GptOssConfig:
    return GptOssConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=vocabulary_size,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=2048,
        pad_token_id=None,
        eos_token_id=None,
    )


def practise(model: Any, lesson: Lesson) -> tuple[torch.Tensor, int]:
    """Return the summed cross-entropy of a lesson's sampled tokens, and how many are correct."""
    ids = torch.tensor([lesson.ids])
    is_sampled = torch.tensor(lesson.mask[1:])
    hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state[0, is_sampled]
    logits = model.lm_head(hidden)
    targets = ids[0, 1:][is_sampled]
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    return loss, int((logits.argmax(-1) == targets).sum())


def learned_model(config: PreTrainedConfig, lessons: list[Lesson], max_steps: int = 1500) -> Any:
    """Train a model until it samples every lesson correctly."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model: Any = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.08)

    count = sum(sum(lesson.mask[1:]) for lesson in lessons)
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3, betas=(0.9, 0.95))
    for _ in range(max_steps):
        optimizer.zero_grad()
        loss, right = 0.0, 0
        # One at a time, because most of a batch would be padding.
        for lesson in lessons:
            part, correct = practise(model, lesson)
            (part / count).backward()
            loss += part.item() / count
            right += correct
        if loss < 0.01 and right == count:
            return model.eval().requires_grad_(False)
        optimizer.step()
    raise AssertionError(f"the policy has not learned its lessons: loss {loss:.3f}")


async def build_engine(model: PreTrainedModel) -> TransformersEngine:
    """Build an embedded engine with the model's weights as version 1."""
    engine = TransformersEngine.from_config(model.config)
    await engine.sync_weights(model.named_parameters(), 1)
    return engine
