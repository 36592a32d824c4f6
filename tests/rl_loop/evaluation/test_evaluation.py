"""``gptoss eval``: episodes of a checkpoint or of an endpoint, their file, and the table."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launch.cli import app
from rl_loop.config.errors import ConfigError
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.environments.scripted_messages import final
from rl_loop.gateway.serve import ServeOptions
from rl_loop.lifecycle.weight_checks import check_loads_merged_weights
from rl_loop.run import run_evaluation, run_server
from rl_loop.run_parts import build_tasks
from rl_loop.tasks.evaluation_records import read_evaluation
from rl_loop.tasks.source import TaskMixture

CONFIG = Path("configs/rl/tiny_gsm8k.yaml")
SMALL = ["tasks.held_out_tasks=6", "evaluation.samples_per_task=4", "sandbox.servers=1"]


class Completions(BaseHTTPRequestHandler):
    """A mock of vLLM's completions with token ids. Its policy answers even seeds correctly."""

    answers: dict[tuple[int, ...], str]
    tasks: TaskMixture
    fault: str | None = None
    requests: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        answer = self.answers[tuple(body["prompt"])] if body["seed"] % 2 == 0 else "-1"
        ids = self.tasks.codec.render_assistant([final(rf"\boxed{{{answer}}}")], "<|return|>")
        assert ids[-1] in body["stop_token_ids"]
        choice: dict[str, Any] = {"finish_reason": "stop", "stop_reason": ids[-1], "text": ""}
        choice |= {"token_ids": ids[:-1], "logprobs": {"token_logprobs": [-0.5] * (len(ids) - 1)}}
        if self.fault == "no token ids":
            del choice["token_ids"]
        self.send_response(500 if self.fault == "error" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [choice]}).encode())

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def endpoint() -> Iterator[tuple[str, type[Completions]]]:
    tasks = build_tasks(load_config(CONFIG, RlConfig, SMALL))
    answers = {tuple(tasks.prompt_ids(task)): task.ground_truth for task in tasks.held_out()}
    handler = type("Handler", (Completions,), {"tasks": tasks, "answers": answers, "requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", handler
    server.shutdown()
    server.server_close()


def test_endpoint_is_evaluated_by_token_ids(
    endpoint: tuple[str, type[Completions]], tmp_path: Path
) -> None:
    url, handler = endpoint
    config = load_config(CONFIG, RlConfig, [*SMALL, f"evaluation.endpoint={url}"])
    records = run_evaluation(config, None, tmp_path / "deep" / "episodes.jsonl")
    assert read_evaluation(tmp_path / "deep" / "episodes.jsonl") == records
    assert len(records) == len(handler.requests) == 6 * 4
    assert all(request["return_token_ids"] for request in handler.requests)
    expected = sum(request["seed"] % 2 == 0 for request in handler.requests)
    assert sum(record["reward_parts"]["correct"] for record in records) == expected
    assert {record["category"] for record in records} == {"gsm8k"}
    assert {record["finish_reason"] for record in records} == {"stop"}
    assert {record["answer"] for record in records} <= {"-1", *handler.answers.values()}


def test_eval_command_prints_scores_and_comparison(
    endpoint: tuple[str, type[Completions]], tmp_path: Path
) -> None:
    url, _ = endpoint
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    arguments = ["eval", str(CONFIG), *SMALL, f"evaluation.endpoint={url}"]
    result = CliRunner().invoke(app, [*arguments, "--output", str(first)])
    assert result.exit_code == 0, result.output
    for text in ("avg@4", "pass@2", "maj@4", "gsm8k", "finish_reason: stop 24"):
        assert text in result.output
    again = CliRunner().invoke(app, [*arguments, "--output", str(second), "--baseline", str(first)])
    assert "minus baseline" in again.output
    assert "0.000 [0.000, 0.000]" in again.output


@pytest.mark.parametrize(
    ("fault", "message"), [("error", "answered 500"), ("no token ids", "does not return token ids")]
)
def test_unusable_endpoint_is_named_with_its_fault(
    endpoint: tuple[str, type[Completions]], tmp_path: Path, fault: str, message: str
) -> None:
    url, handler = endpoint
    handler.fault = fault
    result = CliRunner().invoke(app, ["eval", str(CONFIG), *SMALL, f"evaluation.endpoint={url}"])
    assert result.exit_code == 1
    assert f"{url}/completions" in result.output
    assert message in result.output


def test_baseline_that_is_not_an_evaluation_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    result = CliRunner().invoke(app, ["eval", str(CONFIG), "--baseline", str(tmp_path / "x.jsonl")])
    assert result.exit_code == 1
    assert "x.jsonl: not the episodes of an evaluation" in result.output


def test_merged_export_is_not_rounded_for_mxfp4_servers(tmp_path: Path) -> None:
    """The servers of an unmerged run would round merged weights. The message has overrides that load."""
    unmerged = [
        *SMALL,
        "model.hidden_size=64",
        "model.intermediate_size=64",
        "quantization=mxfp4",
        "adapter={rank: 4, merge_experts: false}",
        "dtype=bf16",
        "rollout.engine={type: sglang, quantization: mxfp4}",
    ]
    config = load_config(CONFIG, RlConfig, unmerged)
    remedy = ["adapter.merge_experts=true", "rollout.engine.quantization=null"]
    with pytest.raises(ConfigError, match=" ".join(remedy)):
        run_evaluation(config, tmp_path, tmp_path / "episodes.jsonl")
    with pytest.raises(ConfigError, match=" ".join(remedy)):
        run_server(config, ServeOptions(), print, tmp_path)
    check_loads_merged_weights(load_config(CONFIG, RlConfig, [*unmerged, *remedy]))
