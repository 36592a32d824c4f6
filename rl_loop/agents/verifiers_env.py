"""Environments of ``verifiers`` (its ``verifiers.v1``) as external agents.

``verifiers`` needs other versions of some packages than this project. Therefore it runs in a
separate interpreter, which ``options.python`` names, and only this module runs there.
docs/agents.md shows the configuration.

    PYTHON -m rl_loop.agents.verifiers_env TASKSET rows.jsonl       # writes the training tasks
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from rl_loop.infrastructure import InfrastructureFailure

MODEL = "policy"
"""Model name in requests to the policy. The gateway ignores it."""
KEY_VARIABLE = "GPTOSS_SESSION_KEY"
"""Prefix of the environment variables from which ``verifiers`` reads the keys of its endpoints."""

_numbers = count()
_environments: dict[str, "asyncio.Future[Any]"] = {}
"""Environments that are served in this process, by configuration."""
_serving: set["asyncio.Task[None]"] = set()
"""Tasks that serve them until the process ends."""


async def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Run one episode against the policy and return its reward.

    Args:
        task: a row of ``rows``.
        base_url: URL of the gateway.
        api_key: key of the episode's session.

    Raises:
        InfrastructureFailure: the episode failed for a reason that the policy did not cause.
    """
    import verifiers.v1 as vf

    environment = await _served(task["env"])
    chosen = next(islice(environment.taskset, task["index"], None), None)
    if chosen is None:
        reason = f"{_name(task['env'])} has no task {task['index']}"
        raise InfrastructureFailure("environment", reason)

    # verifiers reads keys of endpoints from the process's environment, and every episode has a
    # separate key.
    variable = f"{KEY_VARIABLE}_{next(_numbers)}"
    os.environ[variable] = api_key
    try:
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
        context = vf.ModelContext(model=MODEL, client=client)
        return score_of(await environment.run_episode(chosen, context))
    finally:
        del os.environ[variable]


def score_of(episode: Any) -> float:
    """Return the reward of an episode: the mean of its agents' runs.

    A time limit of ``verifiers`` is caused by the policy, so the reward until then counts.

    Raises:
        InfrastructureFailure: the episode has any other error.
    """
    is_late = episode.is_timeout or any(trace.is_timeout for trace in episode.traces)
    if not episode.ok and not is_late:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        reason = f"{errors[0].type}: {errors[0].message}" if errors else "the episode is not ok"
        raise InfrastructureFailure("environment", reason[:500])
    rewards = [float(trace.reward) for trace in episode.traces]
    return sum(rewards) / len(rewards) if rewards else 0.0


def rows(taskset: str, settings: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield a row for each task of a taskset, for ``train_path`` and ``held_out_path``.

    Args:
        taskset: id of the taskset.
        settings: further fields of the ``EnvConfig``.
    """
    env = {"taskset": {"id": taskset}, **(settings or {})}
    for task in _load(env).taskset:
        prompt = task.data.prompt_text or f"{taskset} {task.data.idx}"
        yield {"prompt": prompt, "env": env, "index": task.data.idx}


async def _served(env: dict[str, Any]) -> Any:
    """Return an environment with running servers. All its episodes in this process share it."""
    key = json.dumps(env, sort_keys=True)
    if key not in _environments:
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        _environments[key] = ready
        serving = asyncio.create_task(_serve(env, ready))
        _serving.add(serving)
    try:
        # Other episodes wait for the same environment, so a cancelled episode must not cancel it.
        return await asyncio.shield(_environments[key])
    except RuntimeError as error:
        # The next episode may try again.
        _environments.pop(key, None)
        reason = f"{_name(env)} cannot be served: {error}"
        raise InfrastructureFailure("environment", reason[:500]) from error


async def _serve(env: dict[str, Any], ready: "asyncio.Future[Any]") -> None:
    try:
        # Imports and data sets take long, and other episodes run on this event loop.
        environment = await asyncio.to_thread(_load, env)
        async with environment.serving():
            ready.set_result(environment)
            await asyncio.Event().wait()
    except BaseException as error:
        # An error in its task groups may arrive as a cancellation, and it may call sys.exit().
        if not ready.done():
            ready.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


def _load(env: dict[str, Any]) -> Any:
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    return load_environment(resolve_env_config(env))


def _name(env: dict[str, Any]) -> str:
    return str(env["taskset"]["id"])


def main() -> None:
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: python -m rl_loop.agents.verifiers_env TASKSET ROWS.jsonl [MOST]")
    taskset, path = sys.argv[1], Path(sys.argv[2])
    most = int(sys.argv[3]) if len(sys.argv) == 4 else None
    with path.open("w") as file:
        for row in islice(rows(taskset), most):
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
