"""Demonstrations, compared with episodes of the agent loop with a real interpreter."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Literal
from unittest.mock import Mock

import pytest
from openai_harmony import (
    DeveloperContent,
    Message,
    ReasoningEffort,
    Role,
    SystemContent,
    ToolDescription,
    ToolNamespaceConfig,
)

from rl_loop.config.episode import EpisodeLimits
from rl_loop.config.load import load_config
from rl_loop.config.run import SftConfig
from rl_loop.config.training import DemonstrationConfig
from rl_loop.data.trajectory import FinishReason, Trajectory
from rl_loop.engines.protocol import SamplingParams
from rl_loop.environments import (
    ENVIRONMENTS,
    Environment,
    RewardConfig,
    ScriptedPolicy,
    StepResult,
    Task,
    make_environment,
)
from rl_loop.environments.scripted_messages import final, think
from rl_loop.harmony.codec import Harmony, PromptConfig, PythonTool
from rl_loop.harmony.vocabulary import GptOssVocabulary
from rl_loop.rollout.agent import run_episode
from rl_loop.run_parts import build_tasks
from rl_loop.sandbox import PythonSandbox, SandboxConfig
from rl_loop.session import SftSession
from rl_loop.tasks.demonstrations import (
    Demonstration,
    PlayedEpisode,
    build_demonstrations,
    demonstrate,
    render_as_sampled,
    render_by_user_turn,
)
from rl_loop.tasks.task_file import TaskFileError
from rl_loop.tracking.run_directory import StartMode
from tests.support.rl_loop import harmony_reference as reference
from tests.support.rl_loop.prompts import SHORT_PROMPT
from tests.support.rl_loop.scripted_engine import ScriptedEngine
from tests.support.rl_loop.tasks.demonstrations import CHECKERS, generate_task, scripted_episode

MIXED = DemonstrationConfig(correct_fraction=0.5)


def sampled_turns(demo: Demonstration) -> list[list[int]]:
    """Return the spans of tokens in the loss."""
    turns: list[list[int]] = []
    for i, (token, mask) in enumerate(zip(demo.token_ids, demo.loss_mask, strict=True)):
        if mask:
            turns += [] if demo.loss_mask[i - 1] else [[]]
            turns[-1].append(token)
    return turns


async def replay(harmony: Harmony, tasks: list[Task]) -> list[tuple[Demonstration, Trajectory]]:
    """Return episodes whose policy repeats the demonstrations, with a real sandbox."""
    sandbox = PythonSandbox(SandboxConfig(servers=1))
    await sandbox.start()
    pairs = []
    try:
        for index, task in enumerate(tasks):
            demo = await asyncio.to_thread(demonstrate, task, harmony, MIXED, str(index))
            environment = make_environment(task, sandbox.run, RewardConfig())
            engine = ScriptedEngine(sampled_turns(demo))
            limits = EpisodeLimits(max_turns=20, max_episode_tokens=9000, max_episode_seconds=60)
            run = run_episode(
                "t", environment, engine, harmony, limits, SamplingParams(4000), seed=0
            )
            pairs.append((demo, await run))
    finally:
        await sandbox.close()
    return pairs


KINDS: list[tuple[str, dict[str, object]]] = [
    ("retool", {}),
    ("retool", {"stateful": True, "instructions": None}),
    ("gsm8k", {}),
    ("gsm8k", {"tools": True}),
    ("instructions", {"turns": 2, "checkers": CHECKERS, "constraints": 1}),
    ("incident", {"level": 3}),
    ("reasoning_gym", {}),
]


def test_every_registered_environment_has_demonstration_tests() -> None:
    # External environments have no scripted policy. Conversations are their demonstrations.
    assert {name for name, _ in KINDS} == set(ENVIRONMENTS) - {"black_box", "mcp", "openenv"}


def in_openai_harmony(episode: PlayedEpisode, prompt: PromptConfig) -> list[list[Message]]:
    """Return an episode as messages of openai-harmony: the prompt, then a list per user turn."""
    settings = prompt.model_dump(include={"model_identity", "knowledge_cutoff"})
    system = SystemContent(
        **settings, reasoning_effort=prompt.reasoning_effort and ReasoningEffort.MEDIUM
    )
    if not prompt.channels:
        system.channel_config = None
    described = [
        tool.in_sandbox(10) for tool in episode.builtin_tools if isinstance(tool, PythonTool)
    ]
    for tool in described if prompt.describe_builtin_tools else []:
        system = system.with_tools(
            ToolNamespaceConfig(name=tool.name, description=tool.description, tools=[])
        )
    messages = (
        [Message.from_role_and_content(Role.SYSTEM, system)]
        if system.model_dump(exclude_none=True)
        else []
    )

    instructions = [m["content"] for m in episode.prompt if m["role"] == "developer"]
    if instructions or episode.tools:
        developer = DeveloperContent(instructions=instructions[0] if instructions else None)
        if episode.tools:
            functions = [
                ToolDescription.new(t.name, t.description, t.parameters) for t in episode.tools
            ]
            developer = developer.with_function_tools(functions)
        messages.append(Message.from_role_and_content(Role.DEVELOPER, developer))
    messages += [reference.user(m["content"]) for m in episode.prompt if m["role"] == "user"]

    parts, answer = [messages], list[Message]()
    for turn in episode.turns:
        answer += [
            reference.assistant(m.text, m.channel, m.recipient, m.content_type)
            for m in turn.messages
        ]
        answer += [
            reference.tool(output.tool, output.text, output.channel)
            for output in turn.result.tool_outputs
        ]
        if turn.result.user is not None:
            parts, answer = [*parts, [*answer, reference.user(turn.result.user)]], []
    return [*parts, answer]


@pytest.mark.parametrize("prompt", [SHORT_PROMPT, PromptConfig()], ids=["short", "full"])
@pytest.mark.parametrize(("environment", "options"), KINDS)
def test_prompts_and_demonstrations_equal_openai_harmonys(
    environment: str, options: dict[str, object], prompt: PromptConfig
) -> None:
    """Demonstrations equal openai-harmony's rendering token for token, with 2 exceptions.

    - Recipients are after the channel, where GPT-OSS writes them.
    - A whole episode keeps <|return|> like a rollout, where history has <|end|>.
    """
    harmony = Harmony(GptOssVocabulary(), prompt)
    for seed in range(6):
        episode = scripted_episode(
            replace(generate_task(environment, seed, **options), environment=environment), seed
        )
        opening, *turns = in_openai_harmony(episode, prompt)
        rendered = harmony.render_prompt(episode.prompt, episode.tools, episode.builtin_tools)
        assert rendered == reference.render_for_completion(opening)

        whole = render_as_sampled(episode, harmony)
        assert whole.token_ids[: len(rendered)] == rendered
        calls = (
            turns[-1][-1].recipient is not None
        )  # an incident ends with a call that has no result
        history = [
            reference.END if token == reference.RETURN else token for token in whole.token_ids
        ]
        history[-1] = whole.token_ids[-1]
        messages = [*opening, *(message for turn in turns for message in turn)]
        assert reference.with_recipient_in_role(history) == reference.render_for_training(messages)
        assert history[-1] == (reference.CALL if calls else reference.RETURN)

        for number, shown in enumerate(render_by_user_turn(episode, harmony)):
            before = [message for turn in turns[:number] for message in turn]
            kept = [message for message in before if message.channel != "analysis"]
            last = [message for message in turns[number] if message.author.role is not Role.USER]
            expected = reference.render_for_training([*opening, *kept, *last])
            assert reference.with_recipient_in_role(shown.token_ids) == expected


@pytest.mark.parametrize(("environment", "options"), KINDS)
def test_demonstrations_are_equal_in_the_small_vocabulary(
    tiny: Harmony, environment: str, options: dict[str, object]
) -> None:
    full = Harmony(GptOssVocabulary(), SHORT_PROMPT)
    for seed in range(6):
        episode = scripted_episode(
            replace(generate_task(environment, seed, **options), environment=environment), seed
        )
        small, large = render_as_sampled(episode, tiny), render_as_sampled(episode, full)
        assert small.token_ids == tiny.vocabulary.from_harmony(large.token_ids)
        assert tiny.vocabulary.to_harmony(small.token_ids) == large.token_ids


def test_only_function_calls_have_the_constrain_token(
    full: Harmony,
) -> None:
    for environment, calls, constrained in (("incident", 6, 6), ("retool", 1, 0)):
        episode = scripted_episode(
            replace(generate_task(environment, 0), environment=environment), 0
        )
        shown = render_as_sampled(episode, full).token_ids
        assert shown.count(reference.CALL) == calls
        assert shown.count(reference.CONSTRAIN) == constrained


@pytest.mark.parametrize(
    ("environment", "options", "wording"),
    [
        ("retool", {}, "execute STATELESS Python"),
        ("retool", {"stateful": True}, "stateful Jupyter notebook"),
        ("gsm8k", {"tools": True}, "execute STATELESS Python"),
        ("gsm8k", {}, None),
        ("incident", {}, None),
    ],
)
def test_system_message_describes_python_only_where_callable(
    environment: str, options: dict[str, object], wording: str | None
) -> None:
    harmony = Harmony(GptOssVocabulary(), PromptConfig(), python_seconds=3)
    episode = scripted_episode(
        replace(generate_task(environment, 0, **options), environment=environment), 0
    )
    text = harmony.decode(
        harmony.render_prompt(episode.prompt, episode.tools, episode.builtin_tools)
    )
    assert ("## python" in text) == (wording is not None)
    assert ("time out after 3.0 seconds" in text) == (wording is not None)
    assert wording is None or wording in text


def real_tasks(environment: str, tmp_path: Path, rows: list[dict[str, str]]) -> SftConfig:
    """Return a run on tasks of files. Held-out tasks have another wording."""
    files = []
    for name, verb in (("train", "What is"), ("held_out", "Compute")):
        path = tmp_path / f"{name}.jsonl"
        asked = [{**row, "question": f"{verb} {row['question']}?"} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in asked))
        files.append(f"{name}_path: {path}")
    source = f"{{environment: {environment}, {', '.join(files)}, options: {{instructions: null}}}}"
    overrides = [f"tasks.sources={{real: {source}}}", f"output_dir={tmp_path}"]
    # The words of the generator are tokens, too.
    overrides.append("model.vocab_size=1024")
    return load_config(Path("configs/sft/tiny_retool.yaml"), SftConfig, overrides)


def test_sft_on_tasks_without_scripted_policy_is_rejected_early(
    tmp_path: Path,
) -> None:
    rows = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(3)]
    reason = r"tasks\.sources\.real: its tasks have no demonstrations: .*\. Fine-tune on conv"
    with pytest.raises(TaskFileError, match=reason):
        SftSession(real_tasks("retool", tmp_path, rows), Mock(), StartMode.NEW).__enter__()


def test_published_problems_become_sft_samples(tmp_path: Path) -> None:
    rows = [
        {"question": f"{i} and 1", "answer": f"So <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}"}
        for i in range(3)
    ]
    tasks = build_tasks(real_tasks("gsm8k", tmp_path, rows))
    tasks.check_demonstrations()
    assert len(tasks.demonstrations(0, 4, DemonstrationConfig())) == 4


def test_prompts_of_a_run_state_its_sandbox_time_limit() -> None:
    overrides = [
        "prompt.describe_builtin_tools=true",
        "sandbox.timeout_seconds=4.5",
        "model.vocab_size=2048",
    ]
    tasks = build_tasks(load_config(Path("configs/sft/tiny_retool.yaml"), SftConfig, overrides))
    assert "time out after 4.5 seconds" in tasks.codec.decode(
        tasks.prompt_ids(tasks.train(0, 1)[0])
    )


class TalkingEnvironment(Environment):
    """An environment with 2 questions, each with reasoning and an answer."""

    @classmethod
    def solve(cls, task: Task, rng: Random, inject_errors: bool) -> ScriptedPolicy:
        yield [think("one is odd"), final("odd")]
        yield [think("two is even"), final("even")]

    async def answer(self, text: str) -> StepResult:
        return StepResult(user="And two?") if text == "odd" else self.end_with_score(1.0)


def test_later_turn_has_history_appended_or_in_the_format(
    harmony: Harmony,
) -> None:
    name = f"{__name__}:TalkingEnvironment"
    task = Task("t", [{"role": "user", "content": "Is one odd?"}], "", name)

    def shown(history: Literal["append", "harmony"]) -> list[tuple[str, str]]:
        """Return the text of all tokens and of the sampled tokens, for every sample."""
        texts: list[tuple[str, str]] = []
        for sample in build_demonstrations(
            task, harmony, DemonstrationConfig(history=history), "0"
        ):
            pairs = zip(sample.token_ids, sample.loss_mask, strict=True)
            texts.append(
                (harmony.decode(sample.token_ids), harmony.decode([i for i, mask in pairs if mask]))
            )
        return texts

    thought = "<|channel|>analysis<|message|>one is odd<|end|><|start|>assistant"
    answer = "<|channel|>final<|message|>odd"
    last = "<|channel|>analysis<|message|>two is even<|end|><|start|>assistant<|channel|>final<|message|>even<|return|>"
    question = "<|start|>user<|message|>And two?<|end|><|start|>assistant"

    ((whole, sampled),) = shown("append")
    assert whole.endswith(
        f"Is one odd?<|end|><|start|>assistant{thought}{answer}<|return|>{question}{last}"
    )
    assert sampled == f"{thought}{answer}<|return|>{last}"

    (first, first_sampled), (second, second_sampled) = shown("harmony")
    assert first.endswith(f"Is one odd?<|end|><|start|>assistant{thought}{answer}<|return|>")
    assert first_sampled == f"{thought}{answer}<|return|>"
    assert second.endswith(f"Is one odd?<|end|><|start|>assistant{answer}<|end|>{question}{last}")
    assert second_sampled == last


def test_sft_trains_on_every_user_turn_with_either_history() -> None:
    options = [
        f"tasks.sources.instructions.options.{option}" for option in ("turns=2", "constraints=1")
    ]
    overrides = [*options, "model.vocab_size=2048"]
    source = build_tasks(
        load_config(Path("configs/sft/tiny_instructions.yaml"), SftConfig, overrides)
    )
    whole = source.demonstrations(0, 5, DemonstrationConfig())
    by_turn = source.demonstrations(0, 5, DemonstrationConfig(history="harmony"))
    assert len(whole) == 5
    assert len(by_turn) == 10
    assert whole.loss_tokens.sum() == by_turn.loss_tokens.sum() > 0


@pytest.mark.parametrize(("environment", "options"), KINDS)
def test_demonstration_equals_an_episode_token_for_token(
    harmony: Harmony, environment: str, options: dict[str, object]
) -> None:
    right = 0.0
    tasks = [generate_task(environment, i, **options) for i in range(20)]
    for demo, episode in asyncio.run(replay(harmony, tasks)):
        assert demo.token_ids == episode.token_ids.tolist()
        assert demo.loss_mask == episode.loss_mask.tolist()
        assert episode.finish_reason is FinishReason.STOP
        assert demo.result is not None
        assert demo.result.reward == episode.reward
        right += episode.reward_parts["correct"]
    assert 3 <= right <= 18


def test_retool_demonstrations_include_mistakes(tiny: Harmony) -> None:
    calls: Counter[int] = Counter()
    for _, episode in asyncio.run(replay(tiny, [generate_task("retool", i) for i in range(40)])):
        calls[episode.tool_calls] += 1
        assert episode.tool_calls == 0 or episode.reward == 1.0
    assert set(calls) == {0, 1, 2}


def test_share_of_expert_demonstrations_is_as_configured(tiny: Harmony) -> None:
    right = 0.0
    for index in range(300):
        result = demonstrate(
            generate_task("gsm8k", index),
            tiny,
            DemonstrationConfig(correct_fraction=0.3),
            str(index),
        ).result
        assert result is not None
        right += result.reward_parts["correct"]
    assert right / 300 == pytest.approx(0.3, abs=0.1)


def test_demonstration_depends_only_on_its_task_and_seed(tiny: Harmony) -> None:
    task = generate_task("retool", 3)
    assert demonstrate(task, tiny, MIXED, "7") == demonstrate(task, tiny, MIXED, "7")
