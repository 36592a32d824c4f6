"""A gateway that serves a checkpoint: no trainer, no episodes, nothing kept but what conversations go
on from."""

import asyncio
import gc
import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_gptoss.user_error import UserError
from rl_loop.chat.codec import ChatCodec
from rl_loop.config.episode import EpisodeLimits
from rl_loop.engines.protocol import (
    MeasuresRounding,
    ModelShape,
    PackedExpertsEngine,
    RolloutEngine,
    SamplingParams,
    server_client,
    weight_holder,
)
from rl_loop.gateway.server import LOOPBACK, Gateway, GatewaySettings
from rl_loop.gateway.session import SessionSettings

if TYPE_CHECKING:
    import torch

    from converters.mxfp4_tensors import Digests

REMEMBERED_TURNS = 1024
"""Of each API key: conversations that go on from older turns are rendered from their text."""


@dataclass(frozen=True)
class ServeOptions:
    """What ``gptoss serve`` is told besides a model."""

    host: str = LOOPBACK
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    """Each has conversations of its own; none for one key that is made up."""
    model: str = "policy"
    """Name of the model in answers."""
    max_tokens: int | None = None
    """Of a conversation; None for as many as the model has positions."""
    history: Literal["append", "harmony"] = "harmony"
    """See ``SessionSettings.history``; the released models expect ``harmony``."""


class ServeError(UserError):
    """A checkpoint cannot be served; the message says why."""


class OwnEngine:
    """The one engine of this process, as a ``RolloutBackend`` reaches those of its workers."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def load_weights(self, weights: "Mapping[str, torch.Tensor]", version: int) -> None:
        asyncio.run(weight_holder(self._engine).sync_weights(weights.items(), version))

    def set_min_version(self, version: int) -> None:
        server_client(self._engine).set_min_version(version)

    def engine_scores(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        return [asyncio.run(self._engine.score(token_ids, temperature))]

    def engine_rounding_errors(self, token_ids: list[int]) -> list[float | None]:
        if isinstance(self._engine, MeasuresRounding):
            return [asyncio.run(self._engine.rounding_error(token_ids))]
        return [None]

    def engine_digests(self) -> "list[Digests]":
        if isinstance(self._engine, PackedExpertsEngine):
            return [asyncio.run(self._engine.packed_digests())]
        return [{}]


def served_settings(options: ServeOptions, positions: int) -> GatewaySettings:
    """Return the settings of a server for a model of so many positions.

    Raises ServeError if the model has fewer than it is asked for."""
    max_tokens = options.max_tokens or positions
    if max_tokens > positions:
        raise ServeError(f"--max-tokens {max_tokens}: the model has {positions} positions")

    limits = EpisodeLimits(
        max_turns=sys.maxsize,
        max_tokens=max_tokens,
        episode_seconds=float("inf"),
    )
    session = SessionSettings(
        limits=limits,
        sampling=SamplingParams(max_new_tokens=max_tokens),
        history=options.history,
        clients_choose_sampling=True,
        is_episode=False,
        remembered_turns=REMEMBERED_TURNS,
    )
    return GatewaySettings(session, model=options.model, host=options.host, port=options.port)


async def serve(
    engine: RolloutEngine,
    codec: ChatCodec,
    shape: ModelShape,
    settings: GatewaySettings,
    api_keys: Sequence[str],
    on_start: Callable[[str, list[str]], None],
) -> None:
    """Serve until the process is asked to end, by SIGINT or SIGTERM.

    ``on_start`` is called with the base URL and the API keys. Raises ServeError if the address
    cannot be listened on."""
    gateway = Gateway(engine, codec, shape, settings)
    try:
        await gateway.start()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ServeError(f"cannot listen on {settings.host}:{settings.port}: {reason}") from error

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)

    try:
        keys: list[str | None] = [*api_keys] or [None]
        # A name seeds what is sampled: another one with every start, for other answers.
        run = secrets.token_hex(4)
        sessions = [
            gateway.open_session(f"{run}-{number}", api_key) for number, api_key in enumerate(keys)
        ]
        on_start(gateway.base_url, [session.api_key for session in sessions])
        # Collecting garbage stops all requests for the time that it takes to look at every object
        # of the libraries. They stay until the end.
        gc.collect()
        gc.freeze()
        await stopped.wait()
    finally:
        await gateway.close()
        await engine.close()
