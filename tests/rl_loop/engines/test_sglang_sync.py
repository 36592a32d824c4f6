"""Weights sent to SGLang servers: versions, names, crashes on either side."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import openai
import pytest
import ray
import torch
from safetensors.torch import save_file

from converters.expert_adapters import changed_names, expert_adapter_shapes
from converters.names import hf_shapes
from converters.random_weights import random_hf_weights
from megatron_gptoss.config import AdapterConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.engines.backend import BackendContext
from rl_loop.engines.protocol import GenerateRequest, SamplingParams
from rl_loop.engines.sglang import server_actors
from rl_loop.engines.sglang.engine import SglangEngine
from rl_loop.engines.sglang.fleet import CurrentWeights, SglangFleet
from rl_loop.engines.sglang.server import ServerState, ServerStatus
from rl_loop.engines.sglang.server_actors import ServerActors, statuses
from rl_loop.engines.sglang.server_hash import gpu_hash
from rl_loop.engines.sglang.server_layout import SglangLayout, sampled_parameters
from rl_loop.engines.sglang.weight_endpoints import SglangSender, send_weights
from rl_loop.gateway.serve import ServeOptions
from rl_loop.harmony.codec import ParsedMessage
from rl_loop.rollout.collector import TrainingRequests
from rl_loop.run import run_server
from rl_loop.run_parts import build_rollouts, build_tasks, build_trainer
from rl_loop.tasks.codec import build_codec
from rl_loop.weight_sync.canary import CanaryError, CanaryTolerance, check_canary
from rl_loop.weight_sync.servers import SyncPlan
from rl_loop.weight_sync.source import WeightMismatchError
from rl_loop.weight_sync.transports import split_into_buckets
from tests.support.forked_workers import local_ray
from tests.support.megatron_gptoss.dense_reference import MODELS as DENSE_MODELS
from tests.support.rl_loop import mxfp4_sync
from tests.support.rl_loop.engines.scored_weights import MODEL, ROOT, TEXT, scores_under
from tests.support.rl_loop.sglang_protocol import (
    VOCAB,
    LocalServer,
    digest,
    next_token,
    prefix_state,
)
from tests.support.waiting import wait_until


def draw_weights(seed: int, model: GptOssModelConfig = MODEL) -> dict[str, torch.Tensor]:
    get = random_hf_weights(model, seed)
    return {name: get(name).to(torch.bfloat16) for name in hf_shapes(model)}


def test_buckets_are_bounded_and_keep_every_tensor() -> None:
    weights = draw_weights(0)
    parts = list(split_into_buckets(weights.items(), 10_000))
    assert [name for part in parts for name, _ in part] == list(weights)
    for part in parts:
        *before, last = [tensor.nbytes for _, tensor in part]
        assert sum(before) + last <= 10_000 or sum(before) <= 10_000 // 8
    assert len(parts) > 3


@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
def test_spans_of_a_request_name_the_weights_during_a_sync(transport: str, tmp_path: Path) -> None:
    async def main() -> None:
        server = LocalServer(token_seconds=0.005)
        server.weights, server.version = draw_weights(1), "1"
        url = await server.start()

        async def servers() -> list[ServerStatus]:
            return [ServerStatus(url, ServerState.SYNCED, 1, int(server.version))]

        engine = SglangEngine(servers, MODEL.model_copy(update={"vocab_size": VOCAB}))
        tokens, versions, turn = list(TEXT), [], 0
        syncing = asyncio.ensure_future(asyncio.sleep(0.3))
        while len(tokens) < len(TEXT) + 150:
            room = len(TEXT) + 150 - len(tokens)
            running = asyncio.ensure_future(
                engine.generate(
                    GenerateRequest(f"e/0/0/{turn}", list(tokens), SamplingParams(room))
                )
            )
            if not turn:
                await syncing
                plan = SyncPlan(
                    urls=(url,),
                    version=2,
                    transport=transport,
                    bucket_bytes=20_000,
                    directory=tmp_path / "weights",
                )
                await send_weights(draw_weights(2).items(), MODEL, plan)
            result = await running
            tokens += result.output_ids
            versions += [
                span.version for span in result.weight_versions for _ in range(span.start, span.end)
            ]
            turn += 1
        assert versions == sorted(versions)
        assert set(versions) == {1, 2}
        for i, version in enumerate(versions):
            prefix = tokens[: len(TEXT) + i]
            assert tokens[len(TEXT) + i] == next_token(
                prefix_state(prefix, digest(draw_weights(version)))
            )
        await engine.close()
        await server.stop()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w | {"model.layers.0.no_such.weight": torch.zeros(3)},
            "no_such.weight is not in a gpt_oss model",
        ),
        (
            lambda w: w | {"model.norm.weight": torch.zeros(31)},
            r"model.norm.weight has shape \[31\], .* expects \[32\]",
        ),
        (
            lambda w: {n: t for n, t in w.items() if n != "model.norm.weight"},
            "lack the tensor model.norm.weight",
        ),
    ],
)
def test_weights_of_another_model_are_named_and_not_served(change: object, message: str) -> None:
    async def main() -> None:
        server = LocalServer()
        server.weights, server.version = draw_weights(1), "1"
        plan = SyncPlan(
            urls=(await server.start(),),
            version=2,
            transport="shared_memory",
            bucket_bytes=20_000,
        )
        with pytest.raises(WeightMismatchError, match=message):
            await send_weights(change(draw_weights(2)).items(), MODEL, plan)
        assert server.version == "1"
        assert not server.paused.is_set(), "half-loaded weights could be served"
        await server.stop()

    asyncio.run(main())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("drops", "self_attn.sinks"),
        ("drops", "mlp.router.bias"),
        ("drops", "mlp.experts.gate_up_proj_bias"),
        ("transposes", "self_attn.o_proj.weight"),
        ("transposes", "mlp.experts.down_proj"),
        ("", ""),
    ],
)
def test_dropped_or_transposed_tensor_is_named_and_not_served(
    fault: str, name: str, ranks: int
) -> None:
    square = MODEL.model_copy(update={"hidden_size": 64, "intermediate_size": 64})

    get = random_hf_weights(square, 1)
    before = {name: get(name).to(torch.bfloat16) for name in hf_shapes(square)}
    after = {name: tensor + 1 for name, tensor in before.items()}

    async def main() -> None:
        server = LocalServer()
        server.weights, server.version, server.ranks = before, "1", ranks
        plan = SyncPlan(
            urls=(await server.start(),),
            version=3,
            transport="shared_memory",
            tensor_parallel=ranks,
        )
        if fault:
            setattr(server, fault, f"model.layers.1.{name}")
            with pytest.raises(
                WeightMismatchError,
                match=rf"received weights 3, but its content differs in model.layers.1.{name}$",
            ):
                await send_weights(after.items(), square, plan)
            assert server.version == "1"
            assert not server.paused.is_set(), "weights that nobody sent could be served"
        else:
            await send_weights(after.items(), square, plan)
            assert server.version == "3"
        await server.stop()

    asyncio.run(main())


@pytest.mark.parametrize(
    "lost", ["model.layers.1.self_attn.sinks", "model.embed_tokens.weight", None]
)
def test_sent_weights_are_compared_without_sending_them_again(lost: str | None) -> None:
    after = {name: tensor + 1 for name, tensor in draw_weights(1).items()}

    async def main() -> None:
        server = LocalServer()
        server.weights, server.version, server.drops = draw_weights(1), "1", lost or ""
        sync = SyncPlan(
            urls=(await server.start(),),
            version=2,
            transport="shared_memory",
            compare=False,
        )
        await send_weights(after.items(), MODEL, sync)
        held = dict(server.weights)
        assert [name for name in held if not torch.equal(held[name], after[name])] == (
            [lost] if lost else []
        )
        everything = replace(sync, transport="none", compare=True)
        if lost:
            sampled = [name for names in sampled_parameters(MODEL, 2).values() for name in names]
            assert lost not in sampled
            with pytest.raises(WeightMismatchError, match=f"but its content differs in {lost}$"):
                await send_weights(after.items(), MODEL, everything)
        else:
            await send_weights(after.items(), MODEL, everything)
        assert all(server.weights[name] is held[name] for name in held)
        await server.stop()

    asyncio.run(main())


def test_every_tensor_is_compared_within_a_rotation() -> None:
    turns = [sampled_parameters(MODEL, version) for version in range(6)]
    assert {name for turn in turns for names in turn.values() for name in names} == set(
        hf_shapes(MODEL)
    )
    always = ("sinks", "router.bias", "o_proj.weight", "qkv_proj.weight", "w2_weight")
    assert all(any(name.endswith(end) for name in turn) for turn in turns for end in always)


@pytest.mark.parametrize("kind", ["llama", "llama, tied", "qwen2", "qwen2, tied"])
def test_every_dense_tensor_is_compared_within_a_rotation(kind: str) -> None:
    model = DENSE_MODELS[kind]
    turns = [sampled_parameters(model, version) for version in range(12)]
    assert {name for turn in turns for names in turn.values() for name in names} == set(
        hf_shapes(model)
    )
    assert turns[0]["model.layers.0.mlp.gate_up_proj.weight"] == [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ]


def test_rank_of_a_dense_server_holds_its_shard_of_projections() -> None:
    model = DENSE_MODELS["qwen2"]
    info = {"ep_size": 1, "enable_dp_attention": False, "device": "cpu", "dtype": "float32"}
    layout = SglangLayout(model, 2, info)
    weights = {
        name: torch.arange(math.prod(s)).view(s).float() for name, s in hf_shapes(model).items()
    }

    def held(name: str) -> torch.Tensor:
        return weights[f"model.layers.0.{name}.weight"]

    half = model.intermediate_size // 2
    (gate, up) = layout._shard(
        "x.gate_up_proj.weight", [held("mlp.gate_proj"), held("mlp.up_proj")], 1
    )
    assert torch.equal(gate, held("mlp.gate_proj")[half:])
    assert torch.equal(up, held("mlp.up_proj")[half:])
    (down,) = layout._shard("x.mlp.down_proj.weight", [held("mlp.down_proj")], 1)
    assert torch.equal(down, held("mlp.down_proj")[:, half:])


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (5, 0x44A2078445CF44D1),
        (16384, 0x2E46EBD8D5F41216),
        (16386, 0x5489B16B65157AE4),
        (200_003, 0x80557506F7F3FBB7),
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_hash_of_gpu_weights_equals_sglangs_kernel(length: int, expected: int, device: str) -> None:
    values = (torch.arange(length, device=device) * 7 % 251).to(torch.bfloat16)
    assert (
        gpu_hash([values])
        == gpu_hash(list(values.split([length // 3, length - length // 3])))
        == expected
    )


def test_wait_for_servers_logs_the_ready_count_and_log_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starting = ServerStatus("http://b", ServerState.STARTING)
    ready = ServerStatus("http://a", ServerState.UNSYNCED)
    seconds = 0.0

    async def known(actors: list[str]) -> list[ServerStatus]:
        return [ready, starting if seconds < 70 else replace(ready, url="http://b")]

    def sleep(waited: float) -> None:
        nonlocal seconds
        seconds += waited

    clock = SimpleNamespace(monotonic=lambda: seconds, sleep=sleep)
    monkeypatch.setattr(server_actors, "statuses", known)
    monkeypatch.setattr(server_actors, "time", clock)
    servers = object.__new__(ServerActors)
    servers.actors = ["a", "b"]
    servers._directory = tmp_path
    with caplog.at_level("INFO", logger=server_actors.__name__):
        servers.ready()
    assert caplog.messages == [
        f"waiting for SGLang servers: 1 of 2 are ready after {after} s; their output is in "
        f"{tmp_path / 'server_*.log'}"
        for after in (30, 60)
    ]


# -- the fleet: server processes, Ray actors, gloo ------------------------------------------------


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    with local_ray(num_cpus=2, object_store_bytes=100 << 20):
        yield


class Trainer:
    """Trainer that sends weights like trainer rank 0. It dies before tensor ``dies_at``."""

    def __init__(
        self, seed: int, dies_at: int | None = None, model: GptOssModelConfig = MODEL
    ) -> None:
        self.named, self.dies_at, self.sends = draw_weights(seed, model), dies_at, 0
        self.compared: list[bool] = []

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(self.named.items()):
            if number == self.dies_at:
                raise RuntimeError("the trainer died")
            yield item

    def release_memory(self) -> None: ...

    def send_weights(self, sender: SglangSender) -> None:
        self.sends += 1
        self.compared.append(sender.plans[0].compare)
        sender.send(self._stream(), 0)


@pytest.fixture
def config(tmp_path: Path, one_ray: None) -> RlConfig:
    """Configuration of two mock SGLang servers, each in its own process."""
    stub = f"{ROOT / 'tests/support/rl_loop/sglang_process'}:{ROOT}:{ROOT / 'kernels'}"
    config = load_config(
        ROOT / "configs/rl/tiny_retool.yaml",
        RlConfig,
        [
            f"output_dir={tmp_path}",
            "rollout.engine.type=sglang",
            "rollout.engine.servers=2",
            "rollout.engine.weight_sync=gloo",
        ],
    )
    settings = config.rollout.engine.model_copy(
        update={
            "python": sys.executable,
            "env": {
                "PYTHONPATH": stub,
                "FAULT_FILE": str(tmp_path / "fault"),
                "OMP_NUM_THREADS": "1",
            },
            "sync_seconds": 120.0,
            "bucket_bytes": 20_000,
        }
    )
    rollout = config.rollout.model_copy(update={"engine": settings})
    return config.model_copy(update={"model": MODEL, "rollout": rollout, "dtype": "bf16"})


@pytest.fixture
def fleet(config: RlConfig) -> Iterator[SglangFleet]:
    context = BackendContext(config.model, config.dtype, config.seed, config.directory / "engine")
    servers = ServerActors(config.rollout.engine, context)
    yield SglangFleet(servers, config.rollout.engine, context)
    servers.close()


def states(fleet: SglangFleet) -> list[tuple[ServerState, int | None]]:
    return [
        (status.state, status.version) for status in asyncio.run(statuses(fleet.servers.actors))
    ]


def kill_first_server(fleet: SglangFleet) -> None:
    os.kill(
        ray.get(fleet.servers.actors[0].__ray_call__.remote(lambda server: server._process.pid)),
        signal.SIGKILL,
    )


def test_killed_server_serves_again_after_it_gets_the_weights(
    fleet: SglangFleet,
) -> None:
    fleet.servers.ready()
    assert states(fleet) == [(ServerState.UNSYNCED, None)] * 2
    trainer = Trainer(1)
    fleet.sync(trainer, 1)
    assert states(fleet) == [(ServerState.SYNCED, 1)] * 2
    assert fleet.score(TEXT, 1.0) == [scores_under(trainer.named)] * 2
    fleet.recover_engines()
    assert trainer.sends == 1, "nothing was to be recovered"
    kill_first_server(fleet)
    wait_until(lambda: states(fleet)[0] == (ServerState.UNSYNCED, None))
    assert states(fleet)[1] == (ServerState.SYNCED, 1)
    fleet.recover_engines()
    assert states(fleet) == [(ServerState.SYNCED, 1)] * 2
    assert fleet.score(TEXT, 1.0) == [scores_under(trainer.named)] * 2
    # If the recovered server gets other weights than the rest, its canary detects them.
    fleet._current = CurrentWeights(Trainer(2), 1)
    kill_first_server(fleet)
    wait_until(lambda: states(fleet)[0] == (ServerState.UNSYNCED, None))
    fleet.recover_engines()
    assert states(fleet)[0][0] is not ServerState.SYNCED
    assert states(fleet)[1] == (ServerState.SYNCED, 1)


def test_checkpoint_is_served_by_a_server_with_its_weights(
    config: RlConfig, tmp_path: Path
) -> None:
    """Covers ``gptoss serve`` with ``rollout.engine.type: sglang``, except for its command line."""
    codec = build_codec(config)
    model = MODEL.model_copy(update={"vocab_size": codec.vocabulary.size})
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(model.to_hf_config()))
    save_file(draw_weights(1, model), checkpoint / "model.safetensors")

    hello = [ParsedMessage("final", None, None, "Hello")]
    says = json.dumps(codec.render_assistant(hello, "<|return|>"))
    env = config.rollout.engine.env | {"SAYS": says}
    engine = config.rollout.engine.model_copy(update={"env": env, "servers": 1})
    rollout = config.rollout.model_copy(update={"engine": engine})
    config = config.model_copy(update={"model": model, "rollout": rollout})
    answers: list[object] = []

    def ask(base_url: str, keys: list[str]) -> None:
        try:
            with openai.OpenAI(base_url=base_url, api_key=keys[0], max_retries=0) as client:
                first = client.responses.create(model="x", input="Hi")
                more = {"input": "More", "previous_response_id": first.id}
                answers.extend([first.output_text, client.responses.create(**more).output_text])
                answers.append([entry.id for entry in client.models.list()])
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_start(base_url: str, keys: list[str]) -> None:
        Thread(target=ask, args=(base_url, keys)).start()

    run_server(config, ServeOptions(port=0, model="mine"), on_start, checkpoint)
    assert answers == ["Hello", "Hello", ["mine"]]


def test_syncs_share_a_process_group_until_a_server_restarts(fleet: SglangFleet) -> None:
    def groups_joined() -> list[int]:
        urls = tuple(status.url for status in asyncio.run(statuses(fleet.servers.actors)))
        return [
            info["groups"]
            for info in fleet.servers.at_all(urls, lambda client: client.call("/server_info"))
        ]

    fleet.servers.ready()
    for version in (1, 2, 3):
        fleet.sync(Trainer(version), version)
        assert groups_joined() == [1, 1]
    kill_first_server(fleet)
    wait_until(lambda: states(fleet)[0] == (ServerState.UNSYNCED, None))
    trainer = Trainer(4)
    fleet.sync(trainer, 4)
    assert groups_joined() == [1, 2]
    assert fleet.score(TEXT, 1.0) == [scores_under(trainer.named)] * 2


def test_server_restarted_during_an_update_gets_the_new_weights(
    fleet: SglangFleet,
) -> None:
    fleet.servers.ready()
    trainer = Trainer(1)
    fleet.sync(trainer, 1)
    with fleet.updating_weights(2):
        kill_first_server(fleet)
        wait_until(lambda: states(fleet)[0] == (ServerState.UNSYNCED, None))
        healer = Thread(target=fleet.recover_engines)  # like the thread of rollouts
        healer.start()
        healer.join()
        assert trainer.sends == 1
        trainer.named = Trainer(2).named
    fleet.recover_engines()
    assert states(fleet) == [(ServerState.SYNCED, 2), (ServerState.SYNCED, 1)]
    assert fleet.score(TEXT, 1.0)[0] == scores_under(trainer.named)


def test_death_during_a_sync_leaves_no_partial_weights_served(
    fleet: SglangFleet, tmp_path: Path
) -> None:
    (tmp_path / "fault").write_text("die /update_weights_from_distributed:2")
    fleet.servers.ready()
    trainer = Trainer(1)
    fleet.sync(trainer, 1)
    assert trainer.sends == 2
    wait_until(lambda: all(state is not ServerState.DEAD for state, _ in states(fleet)))
    fleet.servers.ready()
    fleet.recover_engines()
    assert states(fleet) == [(ServerState.SYNCED, 1)] * 2
    assert fleet.score(TEXT, 1.0) == [scores_under(trainer.named)] * 2
    with pytest.raises(Exception, match="the trainer died"):
        fleet.sync(Trainer(2, dies_at=9), 2)
    assert all(state is not ServerState.SYNCED for state, _ in states(fleet))
    again = Trainer(2)
    fleet.servers.ready()
    fleet.sync(again, 2)
    fleet.recover_engines()
    assert states(fleet) == [(ServerState.SYNCED, 2)] * 2
    assert fleet.score(TEXT, 1.0) == [scores_under(again.named)] * 2
    assert all(again.compared), "new processes are compared with what they were sent"
    fleet.sync(again, 3)
    fleet.sync(again, 7)
    assert again.compared[-2:] == [False, True]


def test_canary_uses_live_servers_or_their_replacements(fleet: SglangFleet, tmp_path: Path) -> None:
    fleet.servers.ready()
    trainer = Trainer(1)
    fleet.sync(trainer, 1)
    (tmp_path / "fault").write_text("die /generate:1")
    assert fleet.score(TEXT, 1.0) == [scores_under(trainer.named)]
    assert not (tmp_path / "fault").exists()

    for actor in fleet.servers.actors:
        ray.get(actor.__ray_call__.remote(lambda server: server._kill()))
    scores = fleet.score(TEXT, 1.0)
    assert scores and all(found == scores_under(trainer.named) for found in scores)
    assert trainer.sends == 2


def test_canary_detects_wrong_server_weights(
    config: RlConfig,
) -> None:
    parallel = config.parallel.model_copy(update={"world_size": 2, "expert": 2})
    config = config.model_copy(update={"parallel": parallel, "initial_weights": None})
    trainer, pool = build_trainer(config), build_rollouts(config)
    try:
        trainer.ready()
        pool.ready()
        pool.sync_weights(trainer, 5)
        assert pool.score(TEXT, 1.0) == [scores_under(trainer.weights())] * 2
        with pytest.raises(
            CanaryError, match="after syncing weights 5, rollout worker 0 and the trainer differ"
        ):
            check_canary(trainer, pool, TEXT, tolerance=CanaryTolerance.of(2e-2, "fp32"), version=5)
        pool.backend.fleet._current = CurrentWeights(Trainer(7), 5)
        with pytest.raises(
            WeightMismatchError,
            match=r"received weights 5, but its content differs in model.embed_tokens.weight$",
        ):
            check_canary(trainer, pool, TEXT, tolerance=CanaryTolerance.of(2e-2, "fp32"), version=5)
    finally:
        pool.close()
        trainer.close()


def test_episodes_continue_their_prefix_after_server_deaths(
    config: RlConfig, tmp_path: Path
) -> None:
    # The mock server samples all of VOCAB ids. A smaller model would not have most of them.
    model = MODEL.model_copy(update={"vocab_size": VOCAB})
    slow = config.rollout.engine.env | {"TOKEN_SECONDS": "0.05"}
    engine = config.rollout.engine.model_copy(update={"env": slow})
    rollout = config.rollout.model_copy(update={"engine": engine, "samples_per_task": 4})
    config = config.model_copy(update={"rollout": rollout, "model": model})
    weights = {version: Trainer(version, model=model) for version in (1, 2, 3)}
    requests = TrainingRequests(build_tasks(config), rollout, seed=0)
    pool = build_rollouts(config)
    try:
        pool.ready()
        pool.sync_weights(weights[1], 1)
        stream = pool.stream()
        for number in range(6):
            stream.admit(number, requests.for_group(number, number))
        time.sleep(0.5)

        fault = tmp_path / "fault"
        fault.write_text("die /update_weights_from_distributed:2")
        pool.sync_weights(weights[2], 2)
        assert not fault.exists(), "no server died"
        time.sleep(0.5)
        pool.sync_weights(weights[3], 3)
        ended = [stream.take() for _ in range(6)]
    finally:
        pool.close()

    assert sorted(group.number for group in ended) == list(range(6))
    episodes = [episode for group in ended for episode in group.group.trajectories]
    assert len(episodes) == 6 * 4, "an episode was lost or became invalid"
    digests = {version: digest(source.named) for version, source in weights.items()}
    for episode in episodes:
        ids = episode.token_ids.tolist()
        versions = [span.version for span in episode.weight_versions]
        assert versions == sorted(versions)
        for span in episode.weight_versions:
            for place in range(span.start, span.end):
                assert ids[place] == next_token(prefix_state(ids[:place], digests[span.version]))
    assert max(len(episode.weight_versions) for episode in episodes) > 1


UNMERGED = AdapterConfig(rank=8, expert_rank=3, targets=("q", "experts"), merge_experts=False)


class AdapterTrainer(Trainer):
    """Trainer rank 0 of a run with unmerged adapters on a base of seed 1."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        changed = changed_names(mxfp4_sync.MODEL, UNMERGED)
        merged = mxfp4_sync.mxfp4_weights(seed)
        generator = torch.Generator().manual_seed(seed)
        shapes = expert_adapter_shapes(mxfp4_sync.MODEL, 3)
        self.adapters = {name: merged[name] for name in changed}
        self.adapters |= {
            name: torch.randn(shape, generator=generator).bfloat16()
            for name, shape in shapes.items()
        }
        self.everything = mxfp4_sync.mxfp4_weights(1) | self.adapters
        self.only_adapters: list[bool] = []

    def send_weights(self, sender: SglangSender) -> None:
        self.only_adapters.append(sender.adapters_only)
        self.named = self.adapters if sender.adapters_only else self.everything
        super().send_weights(sender)


def test_restarted_server_gets_base_and_adapters(config: RlConfig, tmp_path: Path) -> None:
    """Real processes: a sync of everything, one of adapters, a killed server, and a comparison of all tensors."""
    settings = config.rollout.engine.model_copy(update={"quantization": "mxfp4"})
    context = BackendContext(mxfp4_sync.MODEL, "bf16", 0, tmp_path / "engine", adapter=UNMERGED)
    fleet = SglangFleet(ServerActors(settings, context), settings, context)
    try:
        fleet.servers.ready()
        fleet.sync(AdapterTrainer(1), 1)
        trainer = AdapterTrainer(2)
        fleet.sync(trainer, 2)
        assert trainer.only_adapters == [True]
        fleet.compare()
        kill_first_server(fleet)
        wait_until(lambda: states(fleet)[0] == (ServerState.UNSYNCED, None))
        fleet.recover_engines()
        assert trainer.only_adapters == [True, False, False]
        assert states(fleet) == [(ServerState.SYNCED, 2)] * 2
        fleet.compare()

        # The comparison covers the base that no sync of adapters has sent.
        name = "model.layers.1.mlp.experts.down_proj_blocks"
        trainer.everything[name] = trainer.everything[name] ^ 1
        with pytest.raises(WeightMismatchError, match=name):
            fleet.compare()
    finally:
        fleet.servers.close()
