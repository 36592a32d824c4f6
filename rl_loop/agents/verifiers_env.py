"""Environments of ``verifiers`` (its ``verifiers.v1``), as agents that are programs of their own.

``verifiers`` pins packages that this project has in other versions, so it has an interpreter of its
own, which ``options.python`` names; this module is all that runs there. docs/agents.md shows the
configuration.

    PYTHON -m rl_loop.agents.verifiers_env TASKSET rows.jsonl       # writes the tasks that are trained on
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
"""What requests call the policy; the gateway serves no other and does not look."""
KEY_VARIABLE = "GPTOSS_SESSION_KEY"
"""How the environment variables begin in which ``verifiers`` looks for the keys of its endpoints."""

_numbers = count()
_environments: dict[str, "asyncio.Future[Any]"] = {}
"""Environments that are being served in this process, by their configurations."""
_serving: set["asyncio.Task[None]"] = set()
"""What serves them, until the process ends."""


async def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Play one episode against the policy at ``base_url`` and return its reward.

    ``task``: a row of ``rows``. Raises InfrastructureFailure for what the policy has no part in."""
    import verifiers.v1 as vf

    environment = await _served(task["env"])
    chosen = next(islice(environment.taskset, task["index"], None), None)
    if chosen is None:
        reason = f"{_name(task['env'])} has no task {task['index']}"
        raise InfrastructureFailure("environment", reason)

    # Keys of endpoints are read from the process's environment; every episode has one of its own.
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

    A limit of time that ``verifiers`` has set is the policy's doing: what was earned until then
    counts. Raises InfrastructureFailure for every other error."""
    is_late = episode.is_timeout or any(trace.is_timeout for trace in episode.traces)
    if not episode.ok and not is_late:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        reason = f"{errors[0].type}: {errors[0].message}" if errors else "the episode is not ok"
        raise InfrastructureFailure("environment", reason[:500])
    rewards = [float(trace.reward) for trace in episode.traces]
    return sum(rewards) / len(rewards) if rewards else 0.0


def rows(taskset: str, settings: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield a row for each task of a taskset: what ``train_path`` and ``held_out_path`` name.

    ``settings``: of the ``EnvConfig`` besides the taskset's id."""
    env = {"taskset": {"id": taskset}, **(settings or {})}
    for task in _load(env).taskset:
        prompt = task.data.prompt_text or f"{taskset} {task.data.idx}"
        yield {"prompt": prompt, "env": env, "index": task.data.idx}


async def _served(env: dict[str, Any]) -> Any:
    """Return an environment whose servers run; one in this process for all episodes of it."""
    key = json.dumps(env, sort_keys=True)
    if key not in _environments:
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        _environments[key] = ready
        serving = asyncio.create_task(_serve(env, ready))
        _serving.add(serving)
    try:
        return await asyncio.shield(_environments[key])
    except RuntimeError as error:
        # The next episode may try again.
        _environments.pop(key, None)
        reason = f"{_name(env)} cannot be served: {error}"
        raise InfrastructureFailure("environment", reason[:500]) from error


async def _serve(env: dict[str, Any], ready: "asyncio.Future[Any]") -> None:
    try:
        environment = await asyncio.to_thread(_load, env)
        async with environment.serving():
            ready.set_result(environment)
            await asyncio.Event().wait()
    except BaseException as error:
        # What goes wrong in its task groups may come as a cancellation, and it may call sys.exit().
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
