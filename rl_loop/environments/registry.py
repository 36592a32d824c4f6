"""Registry of environments by the names in tasks and configurations."""

import inspect

from rl_loop.environments.base import Environment, PythonExecutor, RewardConfig, Task
from rl_loop.registry import Registry, accept_subclasses

DEFAULT_ENVIRONMENT = "retool"
"""Environment of configurations without ``tasks.sources``."""

ENVIRONMENTS: Registry[type[Environment]] = Registry(
    kind="environment",
    expected="a subclass of Environment",
    accepts=accept_subclasses(Environment),
    entries={
        # Imported on first use, because clients of servers import slowly.
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

CHECKED_METHODS = (
    "generate",
    "from_record",
    "solve",
    "call",
    "answer",
    "step",
    "end_with_format_error",
)
"""Methods whose arguments are checked, because the loop calls them with arguments."""
PASSED_BY_NAME = ("inject_errors",)
"""Arguments that are passed as keywords. Others are passed by position."""

_checked: set[type[Environment]] = set()
"""Environments whose signatures are correct."""


def environment_class(name: str) -> type[Environment]:
    """Return the environment class of a name in ``ENVIRONMENTS`` or of MODULE:CLASS.

    Raises:
        ValueError: if there is none, or if a method takes the wrong arguments.

    Example:
        >>> environment_class("gsm8k").__name__
        'Gsm8kEnvironment'
    """
    environment = ENVIRONMENTS.resolve(name)
    # Called for every row of a task file, so check each class once.
    if environment not in _checked:
        _check_signatures(environment)
        _checked.add(environment)
    return environment


def make_environment(task: Task, execute: PythonExecutor, reward: RewardConfig) -> Environment:
    """Return an environment for one episode. Raises ValueError if the class does not exist."""
    return environment_class(task.environment)(task, execute, reward)


def make_offline_environment(task: Task) -> Environment:
    """Return an environment without a sandbox, for prompts, reward parts and demonstrations.

    It runs Python by ``simulate_python`` and uses the default rewards.

    Example:
        >>> task = Task("1", [{"role": "user", "content": "1 + 1"}], "2", environment="gsm8k")
        >>> environment = make_offline_environment(task)
        >>> environment.end_with_score(1.0, "2").reward
        1.0
    """
    environment = environment_class(task.environment)
    return environment(task, environment.simulate_python, RewardConfig())


def _check_signatures(environment: type[Environment]) -> None:
    """Check that the methods of an environment accept the loop's arguments.

    Raises:
        ValueError: naming the method and the expected arguments.
    """
    # A call with other arguments would raise TypeError in an episode, which looks like a failing
    # tool. The run would repeat the call and report an infrastructure failure.
    for name in CHECKED_METHODS:
        parameters = inspect.signature(getattr(Environment, name)).parameters
        # The loop passes some arguments by name, so their position is free.
        by_position = [parameter for parameter in parameters if parameter not in PASSED_BY_NAME]
        by_name = {parameter: None for parameter in parameters if parameter in PASSED_BY_NAME}

        # Only the number and the kind of the arguments matter, so bind names in place of values.
        signature = inspect.signature(getattr(environment, name))
        try:
            signature.bind(*by_position, **by_name)
        except TypeError as error:
            expected = ", ".join(parameters)
            reason = f"{name}{signature} must take ({expected}): {error}"
            raise ValueError(f"environment {environment.__name__}: {reason}") from None
