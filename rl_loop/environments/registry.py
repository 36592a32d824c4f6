"""Environments by the name that a task or a configuration gives."""

import inspect

from rl_loop.environments.base import Environment, Execute, RewardConfig, Task
from rl_loop.registry import Registry, subclass_of

DEFAULT_ENVIRONMENT = "retool"
"""Of configurations that name no source of tasks."""

ENVIRONMENTS: Registry[type[Environment]] = Registry(
    kind="environment",
    expected="a subclass of Environment",
    accepts=subclass_of(Environment),
    entries={
        # Imported when a task or a configuration names them: clients of servers are slow to import.
        "retool": "rl_loop.environments.retool:ReToolEnvironment",
        "gsm8k": "rl_loop.environments.gsm8k:Gsm8kEnvironment",
        "instructions": "rl_loop.environments.instructions:InstructionEnvironment",
        "incident": "rl_loop.environments.incident:IncidentEnvironment",
        "reasoning_gym": "rl_loop.environments.reasoning:ReasoningGymEnvironment",
        "black_box": "rl_loop.environments.black_box:BlackBoxEnvironment",
        "mcp": "rl_loop.environments.mcp_tools:McpEnvironment",
        "openenv": "rl_loop.environments.openenv:OpenEnvEnvironment",
    },
)

CHECKED_METHODS = ("generate", "from_record", "solve", "call", "answer", "step", "illegal")
"""Methods that the loop calls with arguments, and that can therefore be written with wrong
ones."""
PASSED_BY_NAME = ("faulty",)
"""Arguments of these that are passed as keywords; the others are passed by position."""

_checked: set[type[Environment]] = set()
"""Environments whose methods take the right arguments."""


def environment_class(name: str) -> type[Environment]:
    """Return the environment of a name in ``ENVIRONMENTS``, or import that of MODULE:CLASS.

    Raises ValueError if there is none, or a method of it takes the wrong arguments."""
    environment = ENVIRONMENTS.resolve(name)
    # Asked for every row of a task file: once is enough.
    if environment not in _checked:
        _check_signatures(environment)
        _checked.add(environment)
    return environment


def make_environment(task: Task, execute: Execute, reward: RewardConfig) -> Environment:
    """Make the environment of one episode. Raises ValueError if there is no such environment."""
    return environment_class(task.environment)(task, execute, reward)


def make_offline_environment(task: Task) -> Environment:
    """Make an environment without a sandbox: for prompts, reward parts and demonstrations.

    Its Python is ``simulate_python``, its rewards are the default ones."""
    environment = environment_class(task.environment)
    return environment(task, environment.simulate_python, RewardConfig())


def _check_signatures(environment: type[Environment]) -> None:
    """Raise ValueError if the loop could not call a method as it calls that of ``Environment``.

    In an episode the TypeError of such a call would look like a tool that failed: the run would
    try it again, and blame the infrastructure in the end."""
    for name in CHECKED_METHODS:
        parameters = inspect.signature(getattr(Environment, name)).parameters
        by_position = [parameter for parameter in parameters if parameter not in PASSED_BY_NAME]
        by_name = {parameter: None for parameter in parameters if parameter in PASSED_BY_NAME}

        signature = inspect.signature(getattr(environment, name))
        try:
            signature.bind(*by_position, **by_name)
        except TypeError as error:
            expected = ", ".join(parameters)
            reason = f"{name}{signature} must take ({expected}): {error}"
            raise ValueError(f"environment {environment.__name__}: {reason}") from None
