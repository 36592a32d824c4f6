"""`gptoss play`: every policy, every way in which an episode ends, and its output."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from transformers import GptOssConfig
from typer.testing import CliRunner

from launch.cli import app
from launch.played_episode import FORMAT_ERRORS, EpisodeTerminal
from launch.standard_input import StandardInput
from rl_loop.config.load import load_rl_config
from rl_loop.config.run import RlConfig
from rl_loop.config.training import DemonstrationConfig
from rl_loop.environments.scripted_messages import final
from rl_loop.play.episode import PlayOptions, play_episode
from rl_loop.play.policies import PlayError
from rl_loop.rollout import agent as agent_loop
from rl_loop.tasks.codec import build_codec
from rl_loop.tasks.demonstrations import demonstrate
from rl_loop.tasks.source import TaskMixture
from tests.support.launch.played_environment import CLOSED, NAME
from tests.support.launch.terminal import Terminal
from tests.support.rl_loop.gateway.policy import Lesson, learned_model
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
AGENT = "tests.support.launch.played_agent"
SETTINGS: dict[str, Any] = {
    "name": "played",
    "model": "tiny_words",
    "dtype": "fp32",
    "vocabulary": "tiny",
    "tasks": {"sources": {"sums": {"environment": NAME}}, "held_out_tasks": 4},
    "rollout": {"max_turns": 4, "max_sampled_tokens_per_turn": 64, "max_episode_tokens": 400},
    "sandbox": {"servers": 1},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("play") / "sums.yaml"
    file.write_text(yaml.safe_dump(SETTINGS))
    return file


@pytest.fixture
def play(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[bool, str]]:
    """Return a function that plays an episode. It returns validity and output."""
    # Tests of an infrastructure failure need not wait for its repetitions.
    monkeypatch.setattr(agent_loop, "TOOL_RETRY_DELAYS", (0.0,))

    def played(
        policy: Any, *overrides: str, typed: str = "", terminal: bool = False, **options: Any
    ) -> tuple[bool, str]:
        config = load_rl_config(path, list(overrides))
        printed = io.StringIO()
        colors: Any = "truecolor" if terminal else None
        console = Console(file=printed, force_terminal=terminal, width=400, color_system=colors)
        reading, writing = os.pipe()
        # The pipe holds all lines, so writing does not wait for the reader.
        os.write(writing, typed.encode())
        os.close(writing)
        list_tokens = options.pop("list_tokens", False)
        try:
            view = EpisodeTerminal(console, StandardInput(reading), list_tokens=list_tokens)
            group = play_episode(config, PlayOptions(policy, **options), view)
            return view.print_outcome(group), printed.getvalue()
        finally:
            os.close(reading)

    return played


type Play = Callable[..., tuple[bool, str]]

# ---- policies


def test_scripted_policy_plays_the_expert_of_the_task(play: Play) -> None:
    is_valid, printed = play("scripted", task=5)
    assert is_valid
    blocks = printed.split("\n\n")
    assert blocks[0] == f"task sums-train-5 of environment {NAME}"
    heads = [block.splitlines()[0] for block in blocks[1:-1] if ": tokens " in block]
    roles = [re.sub(r"tokens [\d-]+", "tokens", head) for head in heads]
    assert roles == [
        "prompt: tokens, no loss",
        "assistant: tokens, loss",
        "tool: tokens, no loss",
        "assistant: tokens, loss",
    ]
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 6, "b": 7}<|call|>'
    assert call in blocks[-4]
    assert "<|message|>13<|end|>" in blocks[-3]
    end, counts, answer, reward = blocks[-1].splitlines()
    assert end == "end: stop"
    assert counts.startswith("turns 2, tool calls 1, tool errors 0, tokens ")
    assert answer == "answer: 13; expected: 13"
    assert reward == "reward: 1 (correct 1, format_error 0, score 1)"


def test_token_lines_are_those_of_a_rollout(play: Play, path: Path) -> None:
    """Positions, ids and mask equal the demonstration, which another loop renders."""
    _, printed = play("scripted", task=5, list_tokens=True)
    config = load_rl_config(path, [])
    codec = build_codec(config)
    task = TaskMixture(config.tasks, codec).train(5, 1)[0]
    shown = demonstrate(task, codec, DemonstrationConfig(correct_fraction=1), seed="0")

    lines = re.findall(r"^ *(\d+)  (train|     )  +([\d+]+)  '", printed, flags=re.M)
    assert [int(position) for position, _, _ in lines] == list(range(len(shown.token_ids)))
    assert [int(token) for _, _, token in lines] == shown.token_ids
    assert [int(mask == "train") for _, mask, _ in lines] == shown.loss_mask
    assert f"tokens {len(shown.token_ids)} ({sum(shown.loss_mask)} with loss)" in printed


def test_environment_without_a_script_is_a_clear_error(play: Play) -> None:
    with pytest.raises(
        PlayError, match=r"Sums cannot be scripted\. Define `solve`, or use --policy"
    ):
        play("scripted", "tasks.sources.sums.options.scripted=false")


def test_script_that_ends_too_early_is_an_error(play: Play) -> None:
    with pytest.raises(PlayError, match="script of task sums-train-0 ends before its episode"):
        play("scripted", "tasks.sources.sums.options.turns=1")


@pytest.fixture(scope="module")
def weights(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a tiny model to repeat the expert on training task 5."""
    config = load_rl_config(path, [])
    codec = build_codec(config)
    task = TaskMixture(config.tasks, codec).train(5, 1)[0]
    shown = demonstrate(task, codec, DemonstrationConfig(correct_fraction=1), seed="0")
    lesson = Lesson(shown.token_ids, [bool(mask) for mask in shown.loss_mask])
    model = learned_model(GptOssConfig(**config.model.to_hf_config()), [lesson])
    directory = tmp_path_factory.mktemp("weights") / "hf"
    model.save_pretrained(directory)
    return directory


def test_model_policy_samples_from_the_weights(play: Play, weights: Path) -> None:
    is_valid, printed = play("model", "rollout.temperature=0.01", task=5, weights=weights)
    assert is_valid
    assert printed.splitlines()[-2:] == [
        "answer: 13; expected: 13",
        "reward: 1 (correct 1, format_error 0, score 1)",
    ]
    assert '{"a": 6, "b": 7}<|call|>' in printed


class Completions(BaseHTTPRequestHandler):
    """A mock of vLLM's completions with token ids, which always answers with ``ids``."""

    ids: list[int]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        choice: dict[str, Any] = {"finish_reason": "stop", "stop_reason": self.ids[-1], "text": ""}
        choice["token_ids"] = self.ids[:-1]
        choice["logprobs"] = {"token_logprobs": [-0.5] * len(self.ids[:-1])}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [choice]}).encode())

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def endpoint(config: RlConfig) -> Iterator[str]:
    """Serve a policy that always answers 8. Yields the override with its address."""
    ids = build_codec(config).render_assistant([final("8")])
    handler = type("Handler", (Completions,), {"ids": ids})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"evaluation.endpoint=http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_model_policy_samples_from_an_endpoint(play: Play, path: Path) -> None:
    with endpoint(load_rl_config(path, [])) as address:
        is_valid, printed = play("model", address)
    assert is_valid
    assert "<|channel|>final<|message|>8<|return|>" in printed
    assert "reward: 1 " in printed


def test_episode_of_an_external_agent_is_shown(play: Play, path: Path) -> None:
    options = {"agent": f"{AGENT}:run", "tasks": f"{AGENT}:tasks"}
    source = {"environment": "black_box", "options": options}
    sources = f"tasks.sources={json.dumps({'agent': source})}"
    # A tiny vocabulary cannot know the words of an agent. The endpoint has the model.
    agent = [sources, "vocabulary=gptoss", "model.vocab_size=201088"]
    with endpoint(load_rl_config(path, agent)) as address:
        is_valid, printed = play("model", *agent, address)
    assert is_valid
    _, prompt, answer, _ = re.split(r"\n\n(?=prompt:|assistant:|end:)", printed)
    assert prompt.startswith("prompt: tokens 0-") and "<|message|>train 0<|end|>" in prompt
    assert answer.startswith("assistant: tokens ")
    assert answer.endswith("<|channel|>final<|message|>8<|return|>")
    assert "reward: 1 " in printed

    with pytest.raises(PlayError, match="--policy me: an external agent plays the episodes of"):
        play("me", *agent)


def test_model_policy_without_weights_names_the_remedy(path: Path) -> None:
    result = CliRunner().invoke(app, ["play", str(path), "--policy", "model"])
    assert result.exit_code == 1
    assert result.stderr == "gptoss: there is no model. Pass --weights, or set initial_weights\n"


def test_a_person_answers_with_thoughts_calls_and_text(play: Play) -> None:
    typed = '\n/think first \\\nsecond\n/call add {"a": 1, "b": 2}\n/unknown x\n8\n'
    is_valid, printed = play("me", typed=typed)
    assert is_valid
    assert (
        "<|channel|>analysis<|message|>first \nsecond<|end|><|start|>assistant<|channel|>"
        in printed
    )
    assert "<|message|>3<|end|>" in printed
    assert "/unknown is not a command:" in printed
    assert "<|channel|>final<|message|>8<|return|>" in printed
    assert printed.endswith(
        "answer: 8; expected: 8\nreward: 1 (correct 1, format_error 0, score 1)\n"
    )


def test_held_out_task_is_played(play: Play) -> None:
    _, printed = play("scripted", task=3, held_out=True)
    assert "task sums-held_out-3 of" in printed
    with pytest.raises(PlayError, match="--task 4: the last held-out task is 3"):
        play("scripted", task=4, held_out=True)


# ---- mistakes of the policy


@pytest.mark.parametrize(
    ("typed", "kind"),
    [
        ("/raw <|channel|>final<|message|>8<|call|>", "recipient"),
        ("/raw <|channel|>poem<|message|>8<|return|>", "channel"),
        ("/raw <|message|><|message|>8<|return|>", "structure"),
        ("/raw <|channel|>analysis<|message|>8<|return|>", "unanswered"),
        ("/call subtract {}", "unknown_tool"),
    ],
)
def test_format_error_is_shown_as_in_training(play: Play, typed: str, kind: str) -> None:
    is_valid, printed = play("me", typed=typed)
    assert is_valid, "the reward counts"
    assert f"end: format error {kind}: {FORMAT_ERRORS[kind]}" in printed
    assert "reward: -1 (correct 0, format_error 1, score 0)" in printed


def test_turn_without_a_stop_token_is_not_sent(play: Play) -> None:
    _, printed = play("me", typed="/raw <|channel|>final<|message|>8\n8\n")
    assert "not sent: a turn ends with <|return|> or <|call|>" in printed
    assert printed.endswith("score 1)\n")


def test_tool_error_is_shown_with_its_text(play: Play) -> None:
    _, printed = play("me", typed="/call add {}\n/call add {\n8")
    assert "tool errors: 1 of 1 calls. The policy reads the messages" in printed
    assert "<|message|>a is missing ␛[2J<|end|>" in printed
    assert "<|message|>the arguments are not JSON: " in printed
    assert "tool calls 2, tool errors 2" in printed


def test_limit_cuts_a_typed_turn_as_in_training(play: Play) -> None:
    limit = "rollout.max_sampled_tokens_per_turn=6"
    is_valid, printed = play("me", limit, "rollout.truncated_episodes=mask", typed="8 " * 20)
    assert is_valid
    assert "end: length (a limit truncated the episode)" in printed
    assert "(no loss, because rollout.truncated_episodes is mask)" in printed
    [first, last] = re.findall(r"assistant: tokens (\d+)-(\d+)", printed)[0]
    assert int(last) - int(first) + 1 == 6


# ---- failures


def test_infrastructure_failure_is_shown_with_its_place(play: Play) -> None:
    is_valid, printed = play("me", typed="/call crash {}\n8\n")
    assert not is_valid
    assert re.search(r'played_environment.py:\d+ in call: return str\(\{\}\["port"\]\)', printed)
    assert printed.endswith(
        "end: infrastructure failure of tool: functions.crash: KeyError: 'port'\n"
        "The episode is invalid: it has no reward and is not trained on\n"
    )


def test_end_of_input_stops_the_episode(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CLOSED, str(tmp_path / "closed"))
    with pytest.raises(PlayError, match="the input ended before the episode"):
        play("me", typed='/call add {"a": 1, "b": 2}\n')
    assert (tmp_path / "closed").exists()


def test_ctrl_c_closes_the_environment(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from launch.cli import main; main()", "play", str(path)]
    closed = tmp_path / "closed"
    variables = {"OMP_NUM_THREADS": "1", CLOSED: str(closed)}
    with Terminal([*command, "--policy", "me"], ROOT, **variables) as terminal:
        terminal.wait_for(r"\n> $", PATIENCE_SECONDS)
        terminal.press_ctrl_c()
        assert terminal.wait(PATIENCE_SECONDS) == 130
        assert terminal.said.endswith("gptoss: stopped\r\n")
        assert terminal.processes_left() == []
    assert closed.exists()


# ---- the terminal


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("list_tokens", [True, False])
def test_output_of_tools_has_no_control_characters(
    play: Play, terminal: bool, list_tokens: bool
) -> None:
    _, printed = play("me", typed="/call echo {}\n8\n", terminal=terminal, list_tokens=list_tokens)
    # Colors and styles are the only escape sequences of the command itself.
    plain = re.sub(r"\x1b\[[\d;]*m", "", printed)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", plain)
    if not list_tokens:
        assert "␛]0;owned␇ :smile: [bold] <U+202E>" in plain


def test_terminal_colors_tokens_with_loss(play: Play) -> None:
    _, printed = play("scripted", terminal=True)
    green = re.findall(r"\x1b\[30;42m(.*?)\x1b", printed)
    assert "<|channel|>" in green
    assert "<|start|>" not in green[:1]


@pytest.mark.parametrize("kind", ["pipe", "file", "null"])
def test_lines_of_every_kind_of_input_are_read(kind: str, tmp_path: Path) -> None:
    text = "" if kind == "null" else "first\r\n\nlast ü"
    if kind == "pipe":
        descriptor, writing = os.pipe()
        os.write(writing, text.encode())
        os.close(writing)
    elif kind == "file":
        (tmp_path / "lines").write_text(text, newline="")
        descriptor = os.open(tmp_path / "lines", os.O_RDONLY)
    else:
        descriptor = os.open(os.devnull, os.O_RDONLY)

    async def read_all() -> list[str]:
        lines = StandardInput(descriptor)
        read = []
        while (line := await lines.read_line()) is not None:
            read.append(line)
        return read

    try:
        assert asyncio.run(read_all()) == ([] if kind == "null" else ["first", "", "last ü"])
    finally:
        os.close(descriptor)
