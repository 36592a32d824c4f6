"""The official SDK drives the server: training, checkpoints, sampling."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_loop.tinker.wire import ENUMS, MESSAGES, SDK_VERSION
from tests.support.rl_loop.tinker_client import (
    DATA,
    MODEL,
    TOKENS,
    call,
    datum,
    log_probs_of,
    step,
    tinker,
)
from tests.support.rl_loop.tinker_server import KEY, RunningServer, running_server

STEPS = 4
ADVANTAGES = [0.0, 1, 1, -1, 1, 1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("tinker")) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    yield service
    service.close("success").result()


def test_messages_equal_those_of_the_sdk() -> None:
    from tinker._version import __version__
    from tinker.proto import tinker_public_pb2 as sdk

    assert __version__ == SDK_VERSION
    for name, message in MESSAGES.items():
        theirs = sdk.DESCRIPTOR.message_types_by_name[name]
        assert _fields(message.DESCRIPTOR) == _fields(theirs), name
    for name, values in ENUMS.items():
        theirs = sdk.DESCRIPTOR.enum_types_by_name[name]
        assert dict(enumerate(values)) == {v.number: v.name for v in theirs.values}
    # Sampling parameters are JSON in the calls of the client.
    unused = {"SamplingParams", "StopStrings", "StopTokens"}
    assert set(sdk.DESCRIPTOR.message_types_by_name) - set(MESSAGES) == unused


def _fields(descriptor: Any) -> dict[int, tuple[Any, ...]]:
    fields = {}
    for field in descriptor.fields:
        of_message = field.message_type.name if field.message_type is not None else None
        group = field.containing_oneof.name if field.containing_oneof is not None else None
        # The entries of a map are messages within the message.
        inner = _fields(field.message_type) if of_message and of_message.endswith("Entry") else None
        fields[field.number] = (field.name, field.type, field.is_repeated, of_message, group, inner)
    return fields


def test_training_learns_and_reports_sums(client: Any) -> None:
    assert client.get_server_capabilities().supported_models[0].model_name == MODEL
    train = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
    assert train.get_info().lora_rank == 8
    results = [step(train, 0.03) for _ in range(STEPS)]
    losses = [passed.metrics["loss:sum"] for passed, _ in results]
    assert losses[-1] < losses[0] - 1
    last, stepped = results[-1]
    by_hand = -float((log_probs_of(last)[0] * np.array(DATA["weights"])).sum())
    assert losses[-1] == pytest.approx(by_hand, rel=1e-5)
    assert stepped.metrics["grad_norm"] > 0


def test_losses_follow_their_formulas(client: Any) -> None:
    train = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
    on_policy = log_probs_of(train.forward([datum(TOKENS)], "cross_entropy").result())[0].copy()
    advantages = np.array(ADVANTAGES, np.float32)
    row = datum(TOKENS, logprobs=on_policy, advantages=advantages)
    bounds = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    for loss, config in {
        "importance_sampling": None, "ppo": bounds, "cispo": bounds, "dro": {"beta": 0.1},
    }.items():  # fmt: skip
        sums = train.forward_backward([row], loss, config).result().metrics
        ratio_is_one = loss in ("importance_sampling", "ppo")
        expected = -float((advantages if ratio_is_one else advantages * on_policy).sum())
        assert sums["loss:sum"] == pytest.approx(expected, rel=1e-5), loss
    assert train.optim_step(tinker.AdamParams(learning_rate=1e-3)).result().metrics["grad_norm"] > 0

    def squares(data: Any, log_probs: Any) -> Any:
        loss = sum((row**2).sum() for row in log_probs)
        return loss, {"squares": float(loss.detach())}

    custom = train.forward_backward_custom([datum(TOKENS)], squares).result()
    assert custom.metrics["squares"] > 0


def test_refused_pass_makes_the_step_fail(client: Any) -> None:
    train = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
    before = log_probs_of(train.forward([datum(TOKENS)], "cross_entropy").result())[0].copy()
    good = train.forward_backward([datum(TOKENS, **DATA)], "cross_entropy")
    refused: dict[str, tuple[Any, str]] = {
        "is not served here": (datum(TOKENS), "stable_reinforce"),
        "weights has the shape": (datum(TOKENS, weights=[1.0] * 5), "cross_entropy"),
        "needs advantages": (datum(TOKENS, logprobs=[0.0] * 6), "ppo"),
        "vocabulary has": (datum([5, 6, 100_000]), "cross_entropy"),
    }
    for message, (row, loss) in refused.items():
        with pytest.raises(tinker.RequestFailedError, match=message):
            train.forward_backward([row], loss).result()
    good.result()
    with pytest.raises(tinker.RequestFailedError, match="an earlier pass failed"):
        train.optim_step(tinker.AdamParams()).result()
    with pytest.raises(tinker.RequestFailedError, match="no gradient"):
        train.optim_step(tinker.AdamParams()).result()
    after = log_probs_of(train.forward([datum(TOKENS)], "cross_entropy").result())[0]
    assert np.array_equal(before, after)
    step(train)


def test_snapshots_sample_what_the_trainer_scores(client: Any) -> None:
    train = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
    step(train, 0.05)
    sampler = train.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(TOKENS[:4])
    options = tinker.SamplingParams(max_tokens=6, seed=3, temperature=1.0, stop=[])
    answer = sampler.sample(prompt, 3, options, include_prompt_logprobs=True).result()
    again = sampler.sample(prompt, 3, options).result()
    texts = [sequence.tokens for sequence in answer.sequences]
    assert texts == [sequence.tokens for sequence in again.sequences]
    assert len({tuple(text) for text in texts}) == 3

    for sequence in answer.sequences:
        whole = TOKENS[:4] + sequence.tokens
        scores = log_probs_of(train.forward([datum(whole)], "cross_entropy").result())[0]
        assert sequence.logprobs == pytest.approx(scores[3:], abs=1e-5)
        assert answer.prompt_logprobs[0] is None
        assert answer.prompt_logprobs[1:] == pytest.approx(scores[:3], abs=1e-5)

    # A snapshot never changes, and the base differs from it.
    before = sampler.compute_logprobs(prompt).result()
    step(train, 0.05)
    assert sampler.compute_logprobs(prompt).result() == before
    base = client.create_sampling_client(base_model=MODEL).result()
    assert base.compute_logprobs(prompt).result() != before
    short = tinker.SamplingParams(max_tokens=9, seed=3, stop=[texts[0][2]])
    stopped = sampler.sample(prompt, 1, short).result().sequences[0]
    assert stopped.stop_reason == "stop" and stopped.tokens[-1] == texts[0][2]


def test_resumed_training_equals_uninterrupted_training(server: RunningServer) -> None:
    first = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    train = first.create_lora_training_client(base_model=MODEL, rank=4, seed=2).result()
    step(train)
    path = train.save_state("after-one").result().path
    named = train.save_weights_for_sampler("named").result().path
    step(train)
    expected = log_probs_of(train.forward([datum(TOKENS)], "cross_entropy").result())[0].copy()
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        train.save_state("after-one").result()
    first.close("success").result()

    second = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    resumed = second.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.get_info().lora_rank == 4
    step(resumed)
    found = log_probs_of(resumed.forward([datum(TOKENS)], "cross_entropy").result())[0]
    assert np.array_equal(found, expected)

    rest = second.create_rest_client()
    listed = rest.list_checkpoints(train.model_id).result().checkpoints
    assert [c.checkpoint_id for c in listed] == ["weights/after-one", "sampler_weights/named"]
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    assert second.create_sampling_client(model_path=named).result().get_base_model() == MODEL
    rest.delete_checkpoint_from_tinker_path(named).result()
    assert len(rest.list_checkpoints(train.model_id).result().checkpoints) == 1
    second.close("success").result()
    assert all(not name.startswith(resumed.model_id) for name in server.state.tenants)


@pytest.mark.parametrize(
    ("path", "send", "status"),
    [
        ("telemetry", {}, 200),
        ("telemetry", {"key": "tml-wrong"}, 401),
        ("telemetry", {"body": b"[]"}, 400),
        ("save_weights", {"body": b'{"model_id": "no"}'}, 404),
        ("weights_info", {"body": b'{"tinker_path": "tinker://a:train:0/weights/.."}'}, 400),
        ("weights_info", {"body": b'{"tinker_path": "tinker://../weights/a"}'}, 400),
        ("weights_info", {"body": b'{"tinker_path": "tinker://a:train:0/weights/a"}'}, 404),
        ("retrieve_future", {"body": b'{"request_id": "x"}'}, 410),
        ("create_custom_loss", {}, 404),
        ("forward_backward", {}, 415),
    ],
)
def test_calls_outside_of_the_protocol_are_refused(
    server: RunningServer, path: str, send: dict[str, Any], status: int
) -> None:
    assert call(server, path, **send) == status


def test_large_bodies_are_refused_unread(server: RunningServer) -> None:
    from http.client import HTTPConnection

    host = server.url.removeprefix("http://")
    connection = HTTPConnection(host)
    connection.putrequest("POST", "/api/v1/forward_backward")
    for name, value in {
        "X-API-Key": KEY, "Content-Type": "application/x-protobuf", "Content-Length": str(10**9)
    }.items():  # fmt: skip
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.slow
def test_program_of_the_guide_runs(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (Path(__file__).parents[3] / "docs/tinker.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", guide, flags=re.S)
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    exec(program, {})
    *steps, sampled, path = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[0]) for line in steps]
    assert losses[-1] < losses[0]
    assert len(json.loads(sampled)) == 8 and path.endswith("/weights/first")


@pytest.mark.slow
def test_command_prints_address_and_key(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "launch",
        "tinker",
        "tiny",
        f"output_dir={tmp_path}",
        "--port=0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(3)]
            assert lines[0] == "serving openai/gpt-oss-20b to the Tinker SDK; Ctrl-C stops\n"
            url, key = (line.strip().partition("=")[2] for line in lines[1:])
            client = tinker.ServiceClient(base_url=url, api_key=key)
            client.create_lora_training_client(base_model=MODEL, rank=8).result()
            client.close("success").result()
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
