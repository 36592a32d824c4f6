"""Environments of the library ``verifiers`` (API ``verifiers.v1``) as external agents.

The dependencies of ``verifiers`` conflict with those of this project. Therefore this module runs in
the separate interpreter of ``options.python``, and imports only ``rl_loop.infrastructure``.
docs/agents.md shows the configuration.

    PYTHON -m rl_loop.agents.verifiers_env TASKSET rows.jsonl       # writes one row per task
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from rl_loop.infrastructure import InfrastructureError

MODEL = "policy"
"""Model name in requests to the policy. The gateway ignores it."""
KEY_VARIABLE = "GPTOSS_SESSION_KEY"
"""Prefix of the environment variables from which ``verifiers`` reads the keys of its endpoints."""

_episode_numbers = count()
_environments: dict[str, "asyncio.Future[Any]"] = {}
"""Environments whose servers run in this process, by their configuration as JSON."""
_server_tasks: set["asyncio.Task[None]"] = set()
"""asyncio tasks that keep the servers of ``_environments`` alive until the process ends."""


async def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Run one episode with the policy and return its reward.

    Args:
        task: a row that ``rows`` has made.
        base_url: URL of the gateway.
        api_key: key of the episode's session.

    Raises:
        InfrastructureError: the episode failed for a reason that the policy did not cause.
    """
    import verifiers.v1 as vf

    environment = await _serve_policy(task["env"])
    chosen = next(islice(environment.taskset, task["index"], None), None)
    if chosen is None:
        reason = (
            f"{_name(task['env'])}: its task set has no task with index {task['index']}. Write the rows "
            "again from this task set"
        )
        raise InfrastructureError("environment", reason)

    # verifiers reads API keys from environment variables. Every episode has its own key, so it
    # needs its own variable.
    variable = f"{KEY_VARIABLE}_{next(_episode_numbers)}"
    os.environ[variable] = api_key
    try:
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
        context = vf.ModelContext(model=MODEL, client=client)
        return compute_score(await environment.run_episode(chosen, context))
    finally:
        del os.environ[variable]


def compute_score(episode: Any) -> float:
    """Return the reward of an episode: the mean reward of its agents.

    An episode that ended at a time limit of ``verifiers`` keeps the reward that it had then.

    Raises:
        InfrastructureError: the episode ended with another error.
    """
    # A policy that is too slow is at fault for a time limit.
    timed_out = episode.is_timeout or any(trace.is_timeout for trace in episode.traces)
    if not episode.ok and not timed_out:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        reason = f"{errors[0].type}: {errors[0].message}" if errors else "failed without an error"
        raise InfrastructureError("environment", reason[:500])
    rewards = [float(trace.reward) for trace in episode.traces]
    return sum(rewards) / len(rewards) if rewards else 0.0


def rows(taskset: str, settings: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield one row per task of a taskset: the rows of ``train_path`` and ``held_out_path``.

    Args:
        taskset: id of the taskset.
        settings: further fields of ``verifiers.EnvConfig``.
    """
    env = {"taskset": {"id": taskset}, **(settings or {})}
    for task in _load(env).taskset:
        prompt = task.data.prompt_text or f"{taskset} {task.data.idx}"
        yield {"prompt": prompt, "env": env, "index": task.data.idx}


async def _serve_policy(env: dict[str, Any]) -> Any:
    """Return the environment of a configuration, with running servers.

    All episodes of this process with the same configuration share it.
    """
    key = json.dumps(env, sort_keys=True)
    if key not in _environments:
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        _environments[key] = ready
        server_task = asyncio.create_task(_serve(env, ready))
        # asyncio holds only weak references to tasks.
        _server_tasks.add(server_task)
    try:
        # Other episodes wait for the same environment, so a cancelled episode must not cancel it.
        return await asyncio.shield(_environments[key])
    except RuntimeError as error:
        # The next episode may try again.
        _environments.pop(key, None)
        reason = f"{_name(env)} cannot be served: {error}"
        raise InfrastructureError("environment", reason[:500]) from error


async def _serve(env: dict[str, Any], ready: "asyncio.Future[Any]") -> None:
    """Run the servers of an environment until the process ends, and set ``ready``."""
    try:
        # Imports and data sets take long, and other episodes run on this event loop.
        environment = await asyncio.to_thread(_load, env)
        async with environment.serving():
            ready.set_result(environment)
            await asyncio.Event().wait()
    except BaseException as error:
        # verifiers may call sys.exit(), and errors in its task groups may arrive as cancellations.
        if not ready.done():
            ready.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


def _load(env: dict[str, Any]) -> Any:
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    return load_environment(resolve_env_config(env))


def _name(env: dict[str, Any]) -> str:
    return str(env["taskset"]["id"])


def main() -> None:
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: python -m rl_loop.agents.verifiers_env TASKSET ROWS.jsonl [MAX_ROWS]")
    taskset, path = sys.argv[1], Path(sys.argv[2])
    max_rows = int(sys.argv[3]) if len(sys.argv) == 4 else None
    with path.open("w") as file:
        for row in islice(rows(taskset), max_rows):
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
