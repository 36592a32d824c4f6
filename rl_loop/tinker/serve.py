"""Starts the trainer, the engine and the server of ``gptoss tinker``, and stops them."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from converters.adapter_checkpoint import peft_base_name
from megatron_gptoss.user_error import UserError
from rl_loop.cluster.ray_session import ray_session
from rl_loop.config.tinker import TinkerConfig
from rl_loop.engines.registry import build_backend
from rl_loop.gateway.serve import LocalEngine, stop_on_signals
from rl_loop.gateway.server import LOOPBACK
from rl_loop.rollout.worker import model_shape
from rl_loop.run_parts import backend_context
from rl_loop.tinker.owners import KEY_PREFIX, Owners, stored_key
from rl_loop.tinker.peft_export import adapter_rank
from rl_loop.tinker.policy import Policy
from rl_loop.tinker.server import TinkerServer
from rl_loop.tinker.state import ServedModel, TinkerState
from rl_loop.tinker.training_calls import FLAGS
from rl_loop.tracking.run_lock import locked_run
from rl_loop.trainer.group import TrainerRanks
from rl_loop.trainer.local_rank import LocalRank
from rl_loop.trainer.ray_ranks import RayRanks
from rl_loop.trainer.tenant_group import TenantGroup
from rl_loop.trainer.tenant_worker import TenantWorker


class TinkerError(UserError):
    """The server cannot start. The message has the reason."""


@dataclass(frozen=True)
class TinkerOptions:
    """Options of ``gptoss tinker`` in addition to the configuration."""

    host: str = LOOPBACK
    """Address to listen on."""
    port: int = 8100
    """Port to listen on. 0 for a free port."""
    api_keys: tuple[str, ...] = ()
    """Keys of clients. If empty, one key is generated and kept in the directory of the run."""


def run_tinker(
    config: TinkerConfig, options: TinkerOptions, on_start: Callable[[str, Sequence[str]], None]
) -> None:
    """Serve the model of ``config`` until the process is asked to end.

    Args:
        config: model, adapters and engine.
        options: address and keys.
        on_start: called with the URL and the keys.

    Raises:
        RunLockedError: another process uses the directory of the run.
        TinkerError: the server cannot listen on the address, or a key is unusable.
    """
    for key in options.api_keys:
        if not key.startswith(KEY_PREFIX):
            raise TinkerError(
                f"--api-key-file: keys must begin with {KEY_PREFIX}, as the SDK requires"
            )
    # One thread uses the trainer: torch's and Megatron's settings belong to a thread.
    with (
        locked_run(config.directory),
        ThreadPoolExecutor(1, "policy") as thread,
        ExitStack() as stack,
    ):
        keys = options.api_keys or (stored_key(config.directory / "tinker" / "key"),)
        context = open_policy(config)
        policy = thread.submit(context.__enter__).result()
        stack.callback(lambda: thread.submit(context.__exit__, None, None, None).result())
        asyncio.run(_serve(config, options, policy, thread, keys, on_start))


@contextmanager
def open_policy(config: TinkerConfig) -> Iterator[Policy]:
    """Start the trainer and the engine. Use the result on the same thread."""
    with ExitStack() as stack:
        group = TenantGroup(config, _open_ranks(config, stack))
        stack.callback(group.close)
        group.ready()
        backend = build_backend(config.rollout.engine, backend_context(config))
        stack.callback(backend.close)
        engine = backend.engine_factory()()
        stack.callback(lambda: asyncio.run(engine.close()))
        backend.start(LocalEngine(engine))
        yield Policy(group, backend, engine, model_shape(config.model))


def _open_ranks(config: TinkerConfig, stack: ExitStack) -> TrainerRanks:
    """Start the trainer ranks. A single rank is in this process."""
    if config.parallel.world_size == 1:
        return LocalRank(config, TenantWorker)
    stack.enter_context(ray_session())
    return RayRanks(config, serves_tenants=True)


async def _serve(
    config: TinkerConfig,
    options: TinkerOptions,
    policy: Policy,
    thread: ThreadPoolExecutor,
    keys: Sequence[str],
    on_start: Callable[[str, Sequence[str]], None],
) -> None:
    """Serve until SIGINT or SIGTERM."""
    model = served_model(config)
    state = TinkerState(policy, thread, config.directory / "tinker", model, config.tinker)
    server = TinkerServer(state, Owners(keys), _notice(model))
    try:
        url = await server.start(options.host, options.port)
    except OSError as error:
        raise TinkerError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror or error}. Choose "
            "another --host or --port"
        ) from error
    stopped = stop_on_signals()
    try:
        on_start(url, keys)
        await stopped.wait()
    finally:
        await server.close()


def served_model(config: TinkerConfig) -> ServedModel:
    """Return the facts about the model that requests need."""
    assert config.adapter is not None
    targets = config.adapter.targets
    return ServedModel(
        api_name=config.tinker.base_model,
        base_digest=base_digest(config),
        vocabulary_size=config.model.vocab_size,
        max_tokens=min(config.model.max_length, config.training.max_tokens_per_micro_batch),
        max_rank=adapter_rank(config.adapter, config.model),
        has_adapters={flag: bool(set(names) & set(targets)) for flag, names in FLAGS.items()},
        architecture=config.model,
        adapter=config.adapter,
        peft_base_name=peft_base_name(config.initial_weights),
    )


def base_digest(config: TinkerConfig) -> str:
    """Return a digest of the base and of its adapters' settings."""
    facts = config.model_dump(
        mode="json", include={"model", "initial_weights", "quantization", "dtype", "adapter"}
    )
    # Only random weights depend on the seed.
    seed = config.seed if config.initial_weights is None else None
    content = json.dumps([facts, seed], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _notice(model: ServedModel) -> str:
    """Return the message that clients log."""
    untrained = [flag for flag, is_trained in model.has_adapters.items() if not is_trained]
    text = "gptoss tinker: see docs/tinker.md for the calls that differ"
    if untrained:
        text += f". Without adapters here: {', '.join(untrained)}"
    return text
