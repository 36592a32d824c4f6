"""A gateway that serves a checkpoint, without a trainer or episodes.

It keeps only the conversations that clients may continue.
"""

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
    Mxfp4Engine,
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

MAX_TURNS_PER_KEY = 1024
"""Number of remembered turns per API key. Continuations of older turns are rendered from text."""


@dataclass(frozen=True)
class ServeOptions:
    """Options of ``gptoss serve`` in addition to the model."""

    host: str = LOOPBACK
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    """Keys of clients, each with separate conversations. If empty, one key is generated."""
    model: str = "policy"
    """Model name in responses."""
    max_tokens: int | None = None
    """Maximum tokens of a conversation. None for the number of the model's positions."""
    history: Literal["append", "harmony"] = "harmony"
    """Rendering of the history, see ``SessionSettings.history``. Released models expect
    ``harmony``."""


class ServeError(UserError):
    """A checkpoint cannot be served. The message has the reason."""


class LocalEngine:
    """Engine of this process, with the methods by which a ``RolloutBackend`` uses its workers."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def load_weights(self, weights: "Mapping[str, torch.Tensor]", version: int) -> None:
        """Replace the weights by tensors by Hugging Face name, in the shapes of their names."""
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
        if isinstance(self._engine, Mxfp4Engine):
            return [asyncio.run(self._engine.mxfp4_digests())]
        return [{}]


def served_settings(options: ServeOptions, positions: int) -> GatewaySettings:
    """Return the settings of a server.

    Args:
        options: options of ``gptoss serve``.
        positions: positions of the model.

    Raises:
        ServeError: the model has fewer positions than requested.
    """
    max_tokens = options.max_tokens or positions
    if max_tokens > positions:
        raise ServeError(
            f"--max-tokens {max_tokens} exceeds the {positions} positions of the model"
        )

    # A server has no episodes. Only the model's context limits a conversation.
    limits = EpisodeLimits(
        max_turns=sys.maxsize,
        max_episode_tokens=max_tokens,
        max_episode_seconds=float("inf"),
    )
    session = SessionSettings(
        limits=limits,
        sampling=SamplingParams(max_new_tokens=max_tokens),
        history=options.history,
        clients_choose_sampling=True,
        is_episode=False,
        max_stored_turns=MAX_TURNS_PER_KEY,
    )
    return GatewaySettings(session, model=options.model, host=options.host, port=options.port)


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGINT and SIGTERM set in the running event loop."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    # SIGTERM would otherwise end the process at once, without closing engines and servers.
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    return stopped


async def serve(
    engine: RolloutEngine,
    codec: ChatCodec,
    shape: ModelShape,
    settings: GatewaySettings,
    api_keys: Sequence[str],
    on_start: Callable[[str, list[str]], None],
) -> None:
    """Serve until the process is asked to end by SIGINT or SIGTERM.

    Args:
        engine: samples the answers.
        codec: chat format of the policy.
        shape: shape of the model.
        settings: address and limits of the server.
        api_keys: keys of clients. If empty, one key is generated.
        on_start: called with the base URL and the API keys.

    Raises:
        ServeError: the server cannot listen on the address.
    """
    gateway = Gateway(engine, codec, shape, settings)
    try:
        await gateway.start()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ServeError(
            f"cannot listen on {settings.host}:{settings.port}: {reason}. Choose another --host "
            "or --port"
        ) from error

    stopped = stop_on_signals()
    try:
        # A session without a key generates one.
        keys: list[str | None] = [*api_keys] or [None]
        # The name seeds sampling. A random name gives other answers after every start.
        run = secrets.token_hex(4)
        sessions = [
            gateway.open_session(f"{run}-{number}", api_key) for number, api_key in enumerate(keys)
        ]
        on_start(gateway.base_url, [session.api_key for session in sessions])
        # A garbage collection blocks all requests while it visits every object of the libraries,
        # which live until the end.
        gc.collect()
        gc.freeze()
        await stopped.wait()
    finally:
        await gateway.close()
        await engine.close()
