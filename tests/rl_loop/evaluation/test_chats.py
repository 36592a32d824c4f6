"""Sampled turns of held-out conversations: comparison by value, statistics, and the command."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from launch.cli import app
from megatron_gptoss.samples import TrainingSamples
from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.messages import ParsedMessage
from rl_loop.chat.turn_content import TurnContent
from rl_loop.chatml.codec import ChatMl
from rl_loop.chatml.prompt_config import ChatMlConfig
from rl_loop.config.episode import EpisodeLimits
from rl_loop.config.load import load_config
from rl_loop.config.run import SftConfig
from rl_loop.conversations.harmony import RenderOptions
from rl_loop.conversations.renderers import conversation_renderer
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.engines.protocol import SamplingParams
from rl_loop.environments.base import RewardConfig
from rl_loop.environments.registry import make_environment
from rl_loop.environments.scripted_messages import final, function_call, think
from rl_loop.evaluation.chat_statistics import chat_figures, chat_statistics, compare_chats
from rl_loop.evaluation.chats import chat_records, score_conversations
from rl_loop.evaluation.policy_evaluation import read_held_out_chats, run_of_weights
from rl_loop.evaluation.statistics import estimate, normal_estimate
from rl_loop.harmony.codec import Harmony
from rl_loop.rollout.agent import run_episode
from rl_loop.tasks.chat_turns import ChatTurn, HeldOutChats, held_out_chats
from rl_loop.tasks.evaluation_records import read_evaluation
from tests.support.rl_loop.chatml_vocabularies import VOCABULARIES
from tests.support.rl_loop.conversations.written_by_hand import (
    WEATHER,
    call,
    calls,
    chat,
    said,
    told,
    user,
)
from tests.support.rl_loop.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parents[3]
CHATML = ChatMl(VOCABULARIES["qwen"], ChatMlConfig(system=None))
TWO_CITIES = calls(call("weather", '{"city": "Oslo"}'), call("weather", '{"city": "Rome"}', "c2"))
ASKED = chat(
    user("Oslo and Rome?"),
    TWO_CITIES,
    told("rain"),
    told("sun", "c2"),
    said("Rain and sun."),
    user("And Oslo?"),
    said("Rain."),
    tools=[WEATHER],
)


@pytest.mark.parametrize(
    ("sampled", "is_equal"),
    [
        ([function_call("price", item="lamp", count=2)], True),
        ([think("Hm."), function_call("price", item="lamp", count=2)], True),
        (
            [ParsedMessage("commentary", "functions.price", None, '{"count":2.0,"item":"lamp"}')],
            True,
        ),
        ([function_call("price", item="lamp", count=3)], False),
        ([function_call("price", item="lamp", count="2")], False),
        ([function_call("price", item="lamp")], False),
        ([function_call("price", item="lamp", count=2, size=1)], False),
        ([function_call("stock", item="lamp", count=2)], False),
        ([ParsedMessage("commentary", "functions.price", None, '{"count":2,"item":"lamp"')], False),
        ([function_call("price", item="lamp", count=2)] * 2, False),
        ([final('{"item": "lamp", "count": 2}')], False),
    ],
)
def test_calls_are_equal_by_value(sampled: list[ParsedMessage], is_equal: bool) -> None:
    reference = TurnContent.of([function_call("price", item="lamp", count=2)])
    content = TurnContent.of(sampled)
    assert content.equals(reference) is is_equal
    assert TurnContent.from_json(json.loads(json.dumps(content.to_json()))) == content


def test_parallel_calls_are_compared_in_order_and_code_as_text() -> None:
    first, second = function_call("find", q=1), function_call("find", q=2)
    assert TurnContent.of([first, second]).equals(TurnContent.of([first, second]))
    assert not TurnContent.of([second, first]).equals(TurnContent.of([first, second]))
    code = [TurnContent.of([ParsedMessage("analysis", "python", "code", t)]) for t in ("1", "1.0")]
    assert not code[0].equals(code[1])
    assert TurnContent.of([final(" Yes.\n")]).equals(TurnContent.of([final("Yes.")]))


def chats_of(codec: ChatCodec, *records: dict[str, Any]) -> HeldOutChats:
    """Render records and return their turns."""
    renderer = conversation_renderer(codec, RenderOptions("harmony", 10_000, "reject"))
    sequences, names = [], []
    for number, record in enumerate(records, 1):
        for sample in renderer.render_record(record, "auto")[0]:
            sequences.append({"token_ids": sample.token_ids, "loss_mask": sample.loss_mask})
            names.append(f"chats.jsonl, line {number}")
    return held_out_chats({"data": TrainingSamples.join(sequences, names)}, codec, 10)


def sample_turns(
    chats: HeldOutChats, codec: ChatCodec, write: Callable[[ChatTurn, list[int]], list[int]]
) -> list[TrajectoryGroup]:
    """Run every turn with a policy: ``write`` returns its tokens from the turn and the reference."""

    async def run(turn: ChatTurn) -> Trajectory:
        ids = chats.samples.rows("token_ids")[turn.sample].tolist()
        engine = ScriptedEngine([write(turn, ids[turn.start : turn.end])])
        environment = make_environment(turn.task, None, RewardConfig())
        limits = EpisodeLimits(max_episode_tokens=10_000)
        episode = await run_episode(
            turn.task.task_id, environment, engine, codec, limits, SamplingParams(100), seed=0
        )
        # The policy has seen the true history.
        assert engine.requests[0].input_ids == ids[: turn.start]
        return episode

    return [TrajectoryGroup(turn.task.task_id, [asyncio.run(run(turn))]) for turn in chats.turns]


@pytest.mark.parametrize("name", ["harmony", "chatml"])
def test_turns_follow_the_true_history(name: str, tiny: Harmony) -> None:
    codec: ChatCodec = tiny if name == "harmony" else CHATML
    chats = chats_of(codec, ASKED, chat(user("Hi?"), said("Yes."), tools=[WEATHER]))
    oslo, rome = 'weather({"city": "Oslo"})', 'weather({"city": "Rome"})'
    # GPT-OSS makes one call per turn. ChatML has all calls of a message in one turn.
    expected = [oslo, rome] if name == "harmony" else [f"{oslo}\n{rome}"]
    assert [turn.task.ground_truth for turn in chats.turns] == [
        *expected,
        "Rain and sun.",
        "Rain.",
        "Yes.",
    ]
    assert chats.conversations == 2 and chats.cut_off_turns == 0
    assert [turn.has_calls for turn in chats.turns] == [True] * len(expected) + [False] * 3

    groups = sample_turns(chats, codec, lambda turn, reference: reference)
    records = chat_records(chats, groups, None)
    assert all(record["reward_parts"]["correct"] == 1 for record in records)
    assert [record["answer"] for record in records] == [r["expected"] for r in records]


def test_wrong_argument_and_malformed_turn_are_wrong(tiny: Harmony) -> None:
    chats = chats_of(tiny, ASKED)

    def write(turn: ChatTurn, reference: list[int]) -> list[int]:
        if "Rome" in turn.task.ground_truth:
            return tiny.render_assistant([function_call("weather", city="Oslo")])
        if turn.task.ground_truth == "Rain.":
            return [*tiny.vocabulary.encode_text("Rain."), tiny.stop_token_ids[0]]
        return reference

    records = chat_records(chats, sample_turns(chats, tiny, write), None)
    assert [record["reward_parts"]["correct"] for record in records] == [1, 0, 1, 0]
    assert [record["reward_parts"]["function"] for record in records] == [1, 1, 1, 0]
    figures = chat_figures(records)
    assert figures["tool_call_accuracy"] == 0.5
    assert figures["answer_accuracy"] == 0.5
    assert figures["format_errors"] == 0.25
    assert "perplexity" not in figures
    assert compare_chats(records, records).value == 0
    assert compare_chats(records, [record | {"task_id": "other"} for record in records]) is None


def test_cut_off_turn_is_left_out() -> None:
    cut = chat(user("Hi?"), said("Yes."), user("Again."), said("Ye", finish_reason="length"))
    chats = chats_of(CHATML, cut)
    assert [turn.task.ground_truth for turn in chats.turns] == ["Yes."]
    assert chats.cut_off_turns == 1


def test_perplexity_is_that_of_the_reference_tokens() -> None:
    chats = chats_of(CHATML, ASKED, chat(user("Hi?"), said("Yes."), tools=[WEATHER]))
    groups = sample_turns(chats, CHATML, lambda turn, reference: reference)

    def score(sequences: Any) -> list[list[float]]:
        # Log-probs are -1 for the first conversation, -3 for the second.
        return [[-1.0 - 2 * i] * (len(ids) - 1) for i, ids in enumerate(sequences)]

    records = chat_records(chats, groups, score_conversations(score, chats))
    tokens = [record["reference_tokens"] for record in records]
    assert sum(tokens) == np.count_nonzero(chats.samples.loss_mask)
    expected = math.exp((sum(tokens[:-1]) + 3 * tokens[-1]) / sum(tokens))
    found = chat_statistics(records)
    assert found.perplexity is not None and found.perplexity.value == pytest.approx(expected)
    assert found.perplexity.low < expected < found.perplexity.high
    # Further samples of a turn do not change it.
    assert chat_statistics(records + records[:2]).perplexity == found.perplexity


def test_weighted_interval_is_that_of_a_ratio_of_sums() -> None:
    values, weights = [1.0, 0.0, 0.5, 1.0], [4.0, 1.0, 2.0, 1.0]
    assert estimate(values, [3.0] * 4) == estimate(values)
    assert estimate(values, weights).value == pytest.approx(6 / 8)
    # Coverage of the ratio: conversations of different lengths, whose accuracy depends on them.
    rng, held = np.random.default_rng(0), 0
    for _ in range(300):
        counts = rng.integers(1, 6, 80)
        rates = rng.binomial(counts, 0.3 + 0.1 * counts) / counts
        found = estimate(rates.tolist(), counts.tolist())
        held += found.low <= 0.3 + 0.1 * 11 / 3 <= found.high
    assert 0.92 <= held / 300 <= 0.98
    assert normal_estimate(values, weights).value == pytest.approx(6 / 8)


# ---- the command


class OneMistake(BaseHTTPRequestHandler):
    """A mock of vLLM's completions, whose policy makes one call with a wrong argument."""

    turns: dict[tuple[int, ...], list[int]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = self.turns[tuple(body["prompt"])]
        choice: dict[str, Any] = {"finish_reason": "stop", "stop_reason": ids[-1], "text": ""}
        choice |= {"token_ids": ids[:-1], "logprobs": {"token_logprobs": [-0.5] * (len(ids) - 1)}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [choice]}).encode())

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serve a policy on 4 held-out conversations of the shop, and return the command's arguments."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    from chat_with_tools import Question, conversation

    monkeypatch.chdir(ROOT)
    asked = [[Question("price", item, 7), Question("stock", item, 9)] for item in ("lamp", "vase")]
    path = tmp_path / "chats.jsonl"
    lines = [json.dumps(conversation(questions)) for questions in asked * 2]
    path.write_text("\n".join(lines) + "\n")
    overrides = [
        f"data={{path: {path}, validation_path: {path}, workers: 0}}",
        f"output_dir={tmp_path}",
    ]
    config = load_config(ROOT / "configs/sft/tiny_shop.yaml", SftConfig, overrides)
    chats = read_held_out_chats(config)
    rows = [row.tolist() for row in chats.samples.rows("token_ids")]
    turns = {tuple(rows[t.sample][: t.start]): rows[t.sample][t.start : t.end] for t in chats.turns}
    wrong, right = chats.turns[0], chats.turns[8]
    prompt = tuple(rows[wrong.sample][: wrong.start])
    assert prompt == tuple(rows[right.sample][: right.start]), "equal questions"
    other = chats.turns[4]
    turns[prompt] = rows[other.sample][other.start : other.end]

    handler = type("Handler", (OneMistake,), {"turns": turns})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"evaluation.endpoint=http://127.0.0.1:{server.server_port}/v1"
    yield ["configs/sft/tiny_shop.yaml", *overrides, endpoint]
    server.shutdown()
    server.server_close()


def test_eval_command_counts_a_wrong_argument(shop: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["eval", *shop])
    assert result.exit_code == 0, result.output
    rows = {line.split("  ")[0].strip(): line.split() for line in result.stdout.splitlines()}
    # 2 of 8 calls ask for the price of another item. Answers are all right.
    assert rows["tool calls"][2:5] == ["4", "8", "0.750"]
    assert rows["answers"][1:4] == ["4", "8", "1.000"]
    assert rows["all"][1:4] == ["4", "16", "0.875"]
    records = read_evaluation(tmp_path / "tiny_shop.evaluation.jsonl")
    (wrong, _) = [record for record in records if not record["reward_parts"]["correct"]]
    assert wrong["expected"] == 'price({"item": "lamp"})'
    assert wrong["answer"] == 'price({"item": "vase"})'
    assert wrong["reward_parts"]["function"] == 1

    baseline = str(tmp_path / "tiny_shop.evaluation.jsonl")
    again = CliRunner().invoke(app, ["eval", *shop, "--baseline", baseline])
    assert "0.000 [0.000, 0.000]" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny_retool"], "trains on demonstrations"),
        (
            ["tiny_shop", "data.validation_path=null"],
            "data: tiny_shop holds out no conversations",
        ),
        (
            ["tiny_shop", "data.validation_path=null", "data.sampled_conversations=100"],
            "sampled_conversations (100) needs held-out conversations",
        ),
    ],
)
def test_eval_command_names_missing_conversations(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    name, *overrides = arguments
    result = CliRunner().invoke(app, ["eval", f"configs/sft/{name}.yaml", *overrides])
    assert result.exit_code == 1
    assert message in result.output


def test_figures_belong_to_the_finished_run_of_the_weights(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "export").mkdir(parents=True)
    (run / "config.yaml").write_text("name: run\n")
    assert run_of_weights(run / "export") is None, "a summary would show the run as finished"
    (run / "summary.json").write_text('{"steps": 1}\n')
    for weights in (run, run / "export"):
        found = run_of_weights(weights)
        assert found is not None and found.path == run
    assert run_of_weights(tmp_path / "elsewhere" / "model") is None
    assert run_of_weights(None) is None
