"""Several clients of one server: isolation, owners, checkpoints, downloads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from converters.peft_directory import PeftDirectory
from rl_loop.config.load import load_config
from rl_loop.config.tinker import TinkerConfig
from rl_loop.tinker.owners import owner_of
from rl_loop.tinker.state import STALE_SECONDS
from rl_loop.tinker.store import CheckpointName
from rl_loop.tinker.wire import MESSAGES
from tests.support.rl_loop.tinker_client import (
    DATA,
    MODEL,
    TOKENS,
    call,
    datum,
    fetch,
    log_probs_of,
    step,
    tinker,
)
from tests.support.rl_loop.tinker_server import (
    KEY,
    OTHER_KEY,
    SMALLER,
    RunningServer,
    running_server,
)

LIMITS = ["tinker.turn_tokens=64", "tinker.max_models=4", "tinker.snapshots_per_model=2"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("tinker"), [*SMALLER, *LIMITS]) as running:
        yield running


def service(server: RunningServer, key: str = KEY) -> Any:
    return tinker.ServiceClient(base_url=server.url, api_key=key)


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    one = service(server)
    yield one
    one.close("success").result()


@pytest.fixture
def other(server: RunningServer) -> Iterator[Any]:
    one = service(server, OTHER_KEY)
    yield one
    one.close("success").result()


def batch(tenant: int, number: int) -> list[Any]:
    """Return two datums that depend on tenant and step."""
    tokens = [(7 * tenant + 3 * number + 5 * i) % 90 for i in range(8)]
    return [datum(tokens, weights=[1.0] * 7), datum(TOKENS, **DATA)]


def submit(train: Any, tenant: int, number: int) -> list[Any]:
    """Send two passes and a step, and return their futures."""
    passes = [
        train.forward_backward(batch(tenant, number + part), "cross_entropy") for part in (0, 1)
    ]
    return [*passes, train.optim_step(tinker.AdamParams(learning_rate=0.02, grad_clip_norm=1.0))]


def numbers(futures: list[Any]) -> list[Any]:
    """Return log-probs and gradient norm of a step."""
    *passes, update = [future.result() for future in futures]
    found = [row for one in passes for row in log_probs_of(one)]
    return [*(row.tolist() for row in found), update.metrics["grad_norm"]]


def test_clients_at_once_get_the_numbers_of_clients_alone(server: RunningServer) -> None:
    kinds = [{"rank": 8, "seed": 1}, {"rank": 4, "seed": 2}, {"rank": 8, "seed": 3}]
    alone = []
    for tenant, kind in enumerate(kinds):
        single = service(server)
        train = single.create_lora_training_client(base_model=MODEL, **kind).result()
        alone.append([numbers(submit(train, tenant, number)) for number in range(3)])
        single.close("success").result()

    clients = [service(server) for _ in kinds]
    trains = [
        one.create_lora_training_client(base_model=MODEL, **kind).result()
        for one, kind in zip(clients, kinds, strict=True)
    ]
    sent = [
        [submit(train, tenant, number) for tenant, train in enumerate(trains)]
        for number in range(3)
    ]
    for tenant, expected in enumerate(alone):
        assert [numbers(futures[tenant]) for futures in sent] == expected
    for one in clients:
        one.close("success").result()


def test_giant_pass_lets_others_run_and_keeps_its_sum(client: Any, other: Any) -> None:
    giant = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
    small = other.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
    one = giant.forward([datum(TOKENS, **DATA)], "cross_entropy").result()
    many = [datum(TOKENS, **DATA)] * 2000
    started = time.monotonic()
    pending = giant.forward_backward(many, "cross_entropy")
    step(small)
    small_seconds = time.monotonic() - started
    result = pending.result()
    giant_seconds = time.monotonic() - started
    assert small_seconds < giant_seconds / 2
    assert len(result.loss_fn_outputs) == 2000
    assert result.metrics["loss:sum"] == pytest.approx(2000 * one.metrics["loss:sum"], rel=1e-5)
    # The step uses the gradients of all parts.
    norm = giant.optim_step(tinker.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
    giant.forward_backward([datum(TOKENS, **DATA)], "cross_entropy")
    single = giant.optim_step(tinker.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
    assert norm == pytest.approx(2000 * single, rel=1e-4)


def test_repeated_and_reversed_requests_run_once_in_order(
    server: RunningServer, client: Any
) -> None:
    """Requests are sent without the SDK, which sends chunks of a pass in another order, too."""
    found = []
    for order in ([1, 2, 3, 4], [4, 3, 4, 2, 2, 1, 3, 1]):
        train = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
        for number in order:
            answers = [send(server, train.model_id, number) for _ in range(order.count(number))]
            assert len(set(answers)) == 1
        request_id = f"{train.model_id}/4/optim_step"
        body = json.dumps({"request_id": request_id}).encode()
        update = json.loads(fetch(server, "retrieve_future", body))
        save = {"model_id": train.model_id, "seq_id": 5, "path": "after"}
        saved = json.loads(fetch(server, "save_weights", json.dumps(save).encode()))
        fetch(server, "retrieve_future", json.dumps(saved).encode())
        path = f"tinker://{train.model_id}/weights/after"
        resumed = client.create_training_client_from_state(path).result()
        scores = log_probs_of(resumed.forward([datum(TOKENS)], "cross_entropy").result())
        found.append([update["metrics"]["grad_norm"], scores[0].tolist()])
    assert found[0] == found[1]


def send(server: RunningServer, model_id: str, number: int) -> str:
    """Send a pass, or a step as number 4, and return the id of its future."""
    if number == 4:
        step = {"model_id": model_id, "seq_id": 4, "adam_params": {"learning_rate": 0.01}}
        answer = fetch(server, "optim_step", json.dumps(step).encode())
    else:
        message = MESSAGES["ForwardBackwardRequest"](
            model_id=model_id, seq_id=number, loss_fn="cross_entropy"
        )
        one = message.data.add()
        one.model_input.add().encoded_text.tokens = np.array([5, 6, number], np.int32).tobytes()
        target = one.loss_fn_inputs["target_tokens"]
        target.dense, target.dtype = np.array([6, 7, 8]).tobytes(), 2
        body = message.SerializeToString()
        headers = {"Content-Type": "application/x-protobuf"}
        answer = fetch(server, "forward_backward", body, **headers)
    return str(json.loads(answer)["request_id"])


def test_owners_do_not_see_each_other(server: RunningServer, client: Any, other: Any) -> None:
    train = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
    path = train.save_state("mine").result().path
    sampler = train.save_weights_and_get_sampling_client().result()
    run = f"training_runs/{train.model_id}"
    session = train.model_id.partition(":")[0]
    future = f'{{"request_id": "{train.model_id}/1/save_weights"}}'
    for key, status in ((KEY, 200), (OTHER_KEY, 404)):
        info = f'{{"tinker_path": "{path}"}}'
        assert call(server, "weights_info", info.encode(), key) == status
        found = f'{{"model_id": "{train.model_id}"}}'
        assert call(server, "get_info", found.encode(), key) == status
        assert call(server, run, None, key) == status
        assert call(server, f"sessions/{session}", None, key) == status
    assert call(server, f"sessions/{session}/finish", key=OTHER_KEY) == 200
    assert call(server, "retrieve_future", future.encode(), KEY) == 200
    assert call(server, "retrieve_future", future.encode(), OTHER_KEY) == 410

    rest = other.create_rest_client()
    assert rest.list_user_checkpoints().result().checkpoints == []
    assert rest.list_training_runs().result().training_runs == []
    assert session not in rest.list_sessions().result().sessions
    assert session in client.create_rest_client().list_sessions().result().sessions
    for refused in (
        lambda: other.create_training_client_from_state_with_optimizer(path).result(),
        lambda: other.create_sampling_client(model_path=path).result(),
        lambda: rest.delete_checkpoint_from_tinker_path(path).result(),
        lambda: rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result(),
    ):
        with pytest.raises((tinker.NotFoundError, ValueError)):
            refused()
    stolen = tinker.SamplingClient.from_sampler_handle(
        sampler.get_sampler_handle(), api_key=OTHER_KEY
    )
    with pytest.raises((tinker.NotFoundError, ValueError)):
        stolen.compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result()
    assert client.create_rest_client().list_checkpoints(train.model_id).result().checkpoints


def test_failures_of_one_client_leave_others_alone(client: Any, other: Any) -> None:
    """Refused passes, an endless loss and a client that fetches nothing."""
    good = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
    bad = other.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
    expected = service_free_numbers(good)
    for number in range(3):
        # Nobody fetches the answers of these.
        bad.forward_backward([datum(TOKENS, weights=[1e38] * 6)], "cross_entropy")
        bad.forward_backward([datum(TOKENS, weights=[1.0] * 5)], "cross_entropy")
        bad.optim_step(tinker.AdamParams(learning_rate=1e6))
        futures = submit(good, 0, number)
        assert numbers(futures) == expected[number]
    with pytest.raises(tinker.RequestFailedError):
        bad.optim_step(tinker.AdamParams(learning_rate=1.0)).result()


def service_free_numbers(train: Any) -> list[list[Any]]:
    """Return the numbers of three steps, and set the client back to its start."""
    start = train.save_state("start").result().path
    found = [numbers(submit(train, 0, number)) for number in range(3)]
    train.load_state_with_optimizer(start).result()
    return found


def test_models_and_snapshots_are_limited(client: Any) -> None:
    trains = [
        client.create_lora_training_client(base_model=MODEL, rank=4).result() for _ in range(4)
    ]
    with pytest.raises(tinker.RequestFailedError, match="up to 4 models at a time"):
        client.create_lora_training_client(base_model=MODEL, rank=4).result()
    samplers = [trains[0].save_weights_and_get_sampling_client().result() for _ in range(3)]
    prompt = tinker.ModelInput.from_ints(TOKENS)
    samplers[2].compute_logprobs(prompt).result()
    with pytest.raises((tinker.NotFoundError, ValueError), match="the newest 2 of each model"):
        samplers[0].compute_logprobs(prompt).result()


def test_models_of_a_silent_client_make_room(server: RunningServer, client: Any) -> None:
    silent = service(server)
    trains = [
        silent.create_lora_training_client(base_model=MODEL, rank=4).result() for _ in range(4)
    ]
    session = server.state.sessions[trains[0].model_id.partition(":")[0]]
    session.seen -= STALE_SECONDS + 1
    train = client.create_lora_training_client(base_model=MODEL, rank=4).result()
    step(train)
    assert list(server.state.tenants) == [train.model_id]


def test_exported_adapter_is_read_as_peft(
    server: RunningServer, client: Any, tmp_path: Path
) -> None:
    """The files of the signed URLs have the tenant's factors, without its key."""
    train = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
    step(train, 0.05)
    path = train.save_weights_external("adapter", ttl_seconds=3600).result().path
    rest = client.create_rest_client()
    found = rest.get_external_weights_urls(path).result()
    assert set(found.urls) == {"adapter_config.json", "adapter_model.safetensors"}
    for name, url in found.urls.items():
        with urllib.request.urlopen(url) as response:
            (tmp_path / name).write_bytes(response.read())
    for broken in (url.replace("signature=", "signature=0"), url.replace("expires=", "expires=9")):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(broken)

    config = load_config(Path("tiny"), TinkerConfig, SMALLER)
    adapter = PeftDirectory(tmp_path, config.model)
    assert adapter.adapter.rank == 4 and adapter.adapter.alpha == 16
    assert {mapping.kind for mapping in adapter.mappings} == {"q", "o", "gate_up", "down", "head"}
    saved = server.state.store.load(
        CheckpointName.parse(train.save_weights_for_sampler("same").result().path),
        server.state.model.base_digest,
    )[1]
    for mapping in adapter.mappings:
        a, b = adapter.read(mapping)
        assert bool(b.any())
        for key, factor in (("a", a), ("b", b)):
            (whole,) = [
                tensor
                for name, tensor in saved.items()
                if name.endswith(f".adapters.{mapping.kind}.{key}")
            ]
            part = whole[..., : mapping.rank, :] if key == "a" else whole[..., : mapping.rank]
            assert torch.equal(factor, part)
            assert float(whole.abs().sum()) == pytest.approx(float(part.abs().sum()))

    for refused in (
        lambda: client.create_sampling_client(model_path=path).result(),
        lambda: client.create_training_client_from_state(path).result(),
    ):
        with pytest.raises((tinker.APIError, tinker.RequestFailedError, ValueError)):
            refused()


@pytest.mark.slow
def test_command_of_the_sdk_downloads_an_adapter(
    server: RunningServer, client: Any, tmp_path: Path
) -> None:
    """It trains on a copy of the checkpoint for the export, and deletes the export."""
    train = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
    path = train.save_state("trained").result().path
    environment = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY}
    command = [Path(sys.executable).with_name("tinker"), "checkpoint", "download", path]
    subprocess.run([*command, "--output", tmp_path], env=environment, check=True)
    (found,) = tmp_path.glob("*/adapter_config.json")
    config = load_config(Path("tiny"), TinkerConfig, SMALLER)
    assert PeftDirectory(found.parent, config.model).adapter.rank == 4
    kinds = {name.kind for name, _ in server.state.store.list(owner_of(KEY))}
    assert "weights" in kinds


def test_lifetimes_change_and_expire(client: Any) -> None:
    train = client.create_lora_training_client(base_model=MODEL, rank=4).result()
    path = train.save_state("short", ttl_seconds=1).result().path
    kept = train.save_state("kept", ttl_seconds=3600).result().path
    rest = client.create_rest_client()
    rest.set_checkpoint_ttl_from_tinker_path(kept, None).result()
    deadline = time.monotonic() + 30
    while len(found := rest.list_checkpoints(train.model_id).result().checkpoints) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert [(one.tinker_path, one.expires_at) for one in found] == [(kept, None)]
    with pytest.raises(tinker.RequestFailedError, match="there is no checkpoint"):
        client.create_training_client_from_state(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(kept, 3600).result()
    assert rest.list_checkpoints(train.model_id).result().checkpoints[0].expires_at is not None
