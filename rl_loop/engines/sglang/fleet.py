"""The SGLang servers of a run as Ray actors: started, brought to the policy's weights, scored, put to sleep.

A sync that fails anywhere leaves no server serving: those that took part are killed, come back with dummy weights as
STALE and are synced again from the beginning."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any, Protocol

import ray
import torch
from ray.exceptions import RayActorError

from rl_loop.cluster.placement import SGLANG_SERVER, place_of
from rl_loop.config.run import RunConfig
from rl_loop.engines.sglang.client import SglangClient
from rl_loop.engines.sglang.engine import score_on
from rl_loop.engines.sglang.server import ServerState, ServerStatus, SglangServer
from rl_loop.engines.sglang.weight_sender import SyncFailed, SyncPlan, TransportName, send_weights

MAX_SYNCS = 3
SAME_WEIGHTS = 0.02  # nats per token that two servers may differ on one text
COMPARED_EVERY = 7  # versions; divides neither 24 nor 36 layers, so that each has its turn in the sample


class WeightSource(Protocol):
    """Who has the policy: the trainer."""

    def send_weights(self, plan: SyncPlan) -> None: ...


Source = WeightSource | dict[str, torch.Tensor]


async def statuses(actors: list[Any]) -> list[ServerStatus]:
    """Of all servers; one whose actor is being restarted counts as dead."""
    answers = await asyncio.gather(*(actor.status.remote() for actor in actors), return_exceptions=True)
    return [a if isinstance(a, ServerStatus) else ServerStatus("", ServerState.DEAD, fault=str(a)) for a in answers]


class SglangFleet:
    """``config.rollout.sglang.servers`` servers. Methods block. No two run at the same time, but for ``heal`` in the
    thread of rollouts that overlap training."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._directory = config, config.directory.absolute() / "engine"
        self._settings = settings = config.rollout.sglang
        self._directory.mkdir(parents=True, exist_ok=True)
        model = json.dumps(config.model.to_hf_config(dtype=config.dtype), indent=2)
        (self._directory / "config.json").write_text(model)
        has_gpus = ray.cluster_resources().get("GPU", 0) >= settings.servers * settings.tensor_parallel
        gpus = settings.tensor_parallel if has_gpus and not settings.colocated else 0
        actor = ray.remote(num_cpus=0, num_gpus=gpus, max_restarts=-1)(SglangServer)
        engine: dict[str, Any] = {"routed_experts": config.rollout.routed_experts, "seed": config.seed}
        limits = {"start_seconds": settings.start_seconds, "health_seconds": settings.health_seconds}
        self.actors: list[Any] = []
        for index in range(settings.servers):
            command = settings.command(index, self._directory, config.dtype, **engine)
            log = self._directory / f"server_{index}.log"
            placed = actor.options(**place_of(SGLANG_SERVER, index))
            self.actors.append(placed.remote(command, settings.environment, log, **limits))
        self._source: tuple[Source, int] | None = None
        self._canary: tuple[list[int], list[float]] | None = None
        self._asleep: set[int] = set()  # incarnations
        self._compared: set[int] = set()  # incarnations whose weights once had the checksums of the sender's
        self._source_learns = Lock()

    def ready(self) -> None:
        """Wait until every server is healthy; raises RuntimeError with the end of its log if one cannot start."""
        self._alive(lambda status: status.state in (ServerState.DEAD, ServerState.STARTING))

    def _alive(self, wait_for: Callable[[ServerStatus], bool] = lambda _: False) -> dict[Any, ServerStatus]:
        """The healthy servers, at least one, when no other is one to ``wait_for``."""
        while True:
            known = dict(zip(self.actors, asyncio.run(statuses(self.actors)), strict=True))
            alive = {actor: status for actor, status in known.items() if status.healthy}
            for status in known.values():
                if status.given_up and (wait_for(status) or not alive):
                    raise RuntimeError(f"an SGLang server does not start: {status.fault}")
            if alive and not any(wait_for(status) for status in known.values()):
                return alive
            time.sleep(0.2)

    def sync(self, source: Source, version: int) -> None:
        """Give all healthy servers weights ``version``. Raises SyncFailed when it failed ``MAX_SYNCS`` times,
        WeightMismatch (a ValueError) for weights that are none of this model."""
        self._source, self._canary = (source, version), None
        for attempt in range(MAX_SYNCS):
            try:
                return self._bring(self._alive())
            except SyncFailed as failure:
                if attempt + 1 == MAX_SYNCS:
                    raise
                print(f"once more, with servers started anew: {failure}", flush=True)

    def heal(self) -> None:
        """Bring servers that were restarted to the weights of the last ``sync``, or to what became of them since. They
        serve only if they score the canary as the others did."""
        if self._source is None or not self._source_learns.acquire(blocking=False):
            return
        try:
            alive = self._alive()
            stale = {actor: status for actor, status in alive.items() if status.state is ServerState.STALE}
            if stale:
                self._bring(stale)
        except SyncFailed as failure:
            if len(stale) == len(alive):
                raise
            print(f"a restarted SGLang server stays out: {failure}")
        finally:
            self._source_learns.release()

    @contextmanager
    def source_changing_to(self, version: int) -> Iterator[None]:
        """The source learns meanwhile, so that nothing can be had from it, and has weights ``version`` afterwards."""
        with self._source_learns:
            yield
            if self._source is not None:
                self._source, self._canary = (self._source[0], version), None

    def _bring(self, servers: dict[Any, ServerStatus]) -> None:
        assert self._source is not None
        source, version = self._source
        begun = {a: s for a, s in servers.items() if _ask(a.begin_sync.remote(s.incarnation))}
        held: int | None = None
        try:
            if not begun:
                raise SyncFailed(f"weights {version}: every server died before the sync began")
            urls = tuple(status.url for status in begun.values())
            asleep = tuple(status.url for status in begun.values() if status.incarnation in self._asleep)
            self._asleep.clear()
            self._memory(asleep, "/resume_memory_occupation", ["weights"])
            incarnations = {status.incarnation for status in begun.values()}
            compare = version % COMPARED_EVERY == 0 or not incarnations <= self._compared
            self._send(source, urls, version, compare)
            self._compared |= incarnations
            self._memory(asleep, "/resume_memory_occupation", ["kv_cache", "cuda_graph"])
            self._compare_with_canary(urls)
            held = version
        finally:
            for actor, status in begun.items():
                _ask(actor.end_sync.remote(status.incarnation, held))

    def compare(self) -> None:
        """Raises WeightMismatch naming the first tensor of the last ``sync`` that a server holds otherwise."""
        if self._source is not None:
            urls = tuple(s.url for s in self._alive().values() if s.state is ServerState.SYNCED)
            self._send(self._source[0], urls, self._source[1], True, "none")

    def _send(
        self, source: Source, urls: tuple[str, ...], version: int, compare: bool, by: TransportName | None = None
    ) -> None:
        settings = self._settings
        plan = SyncPlan(
            urls=urls,
            version=version,
            transport=by or settings.weight_sync,
            tensor_parallel=settings.tensor_parallel,
            bucket_bytes=settings.bucket_bytes,
            directory=self._directory / "weights",
            seconds=settings.sync_seconds,
            compare=compare,
        )
        if isinstance(source, dict):  # they are in this process, which has no GPU
            asyncio.run(send_weights(source.items(), self._config.model, replace(plan, transport="disk")))
        else:
            source.send_weights(plan)

    def _compare_with_canary(self, urls: tuple[str, ...]) -> None:
        if self._canary is None:
            return
        tokens, expected = self._canary
        scored = self._at_all(urls, lambda client: score_on(client, tokens))
        for url, scores in zip(urls, scored, strict=True):
            gap = sum(abs(a - b) for a, b in zip(scores, expected, strict=True)) / len(expected)
            if not gap <= SAME_WEIGHTS:
                raise SyncFailed(f"{url} was given the weights again, but differs by {gap:.2e} nats from the others")

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        """Log-probs of ``token_ids[1:]`` from every server that holds the policy; raises as ``score_on`` does."""
        urls = tuple(s.url for s in self._alive().values() if s.state is ServerState.SYNCED)
        scores = self._at_all(urls, lambda client: score_on(client, token_ids, temperature))
        self._canary = (token_ids, scores[0])
        return scores

    def settings(self, names: Sequence[str]) -> dict[str, Any]:
        """Of the first healthy server, from /server_info."""
        url = next(iter(self._alive().values())).url
        (info,) = self._at_all((url,), lambda client: client.call("/server_info", seconds=60))
        return {"engine": f"SGLang at {url}"} | {name: info[name] for name in names if name in info}

    def sleep(self) -> None:
        """Free the servers' weights and caches if they share GPUs with the trainer; the next ``sync`` wakes them."""
        if self._settings.colocated:
            alive = self._alive()
            begun = [s for a, s in alive.items() if _ask(a.begin_sync.remote(s.incarnation))]
            urls = tuple(status.url for status in begun)
            self._asleep |= {status.incarnation for status in begun}
            self._source = None  # what is lost now comes back with the next version only
            self._at_all(urls, lambda client: client.call("/pause_generation", {"mode": "abort"}))
            self._memory(urls, "/release_memory_occupation", ["kv_cache", "weights", "cuda_graph"])

    def _memory(self, urls: tuple[str, ...], path: str, tags: list[str]) -> None:
        seconds = self._settings.sync_seconds
        self._at_all(urls, lambda client: client.call(path, {"tags": tags}, seconds=seconds))

    @staticmethod
    def _at_all[T](urls: tuple[str, ...], call: Callable[[SglangClient], Awaitable[T]]) -> list[T]:
        async def one(url: str) -> T:
            client = SglangClient(url)
            try:
                return await call(client)
            finally:
                await client.close()

        async def everywhere() -> list[T]:
            return list(await asyncio.gather(*map(one, urls)))

        return asyncio.run(everywhere())

    def close(self) -> None:
        for actor in self.actors:
            _ask(actor.stop.remote())
            ray.kill(actor)


def _ask(reference: Any) -> Any:
    """The answer, None if the actor died."""
    try:
        return ray.get(reference, timeout=60)
    except (RayActorError, TimeoutError):
        return None
