"""Registries of advantage estimators, policy losses and shaping terms, by NAME or MODULE:FUNCTION.

Entries are imported on demand, because a configuration is read and checked without torch.
docs/algorithms.md and docs/rewards.md describe arguments and results of such functions.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rl_loop.registry import Registry


def is_function(candidate: object) -> bool:
    """Return True if the object is callable and not a class."""
    return callable(candidate) and not isinstance(candidate, type)


ADVANTAGES: Registry[Callable[..., Any]] = Registry(
    kind="advantage",
    expected="a function of BatchRewards",
    accepts=is_function,
    entries={
        "grpo": "rl_loop.algorithms.advantages:grpo",
        "dr_grpo": "rl_loop.algorithms.advantages:dr_grpo",
        "rloo": "rl_loop.algorithms.advantages:rloo",
        "gdpo": "rl_loop.algorithms.advantages:gdpo",
        "reinforce": "rl_loop.algorithms.advantages:reinforce",
        "none": "rl_loop.algorithms.advantages:none",
        # Needs tokens and values, not BatchRewards. The assignment of advantages calls it
        # separately.
        "gae": "rl_loop.algorithms.advantages:generalized_advantages",
    },
)
"""``BatchRewards`` -> advantages fp64 [samples]."""

POLICY_LOSSES: Registry[Callable[..., Any]] = Registry(
    kind="policy loss",
    expected="a function of LossInputs",
    accepts=is_function,
    entries={
        "ppo": "rl_loop.algorithms.policy_loss:ppo_loss",
        "gspo": "rl_loop.algorithms.policy_loss:gspo_loss",
        "cispo": "rl_loop.algorithms.policy_loss:cispo_loss",
        "reinforce": "rl_loop.algorithms.policy_loss:reinforce_loss",
    },
)
"""``LossInputs`` -> ``PolicyLoss``."""

SHAPING_TERMS: Registry[Callable[..., Any]] = Registry(
    kind="shaping term",
    expected="a function of a task's episodes",
    accepts=is_function,
    entries={
        "relative_length": "rl_loop.data.shaping:relative_length",
        "part": "rl_loop.data.shaping:part",
    },
)
"""Sequence of ``Trajectory`` of one task -> one number per episode."""


def check_function(
    registry: Registry[Callable[..., Any]], name: str, options: Mapping[str, Any]
) -> None:
    """Check that a function accepts its options.

    Args:
        registry: registry of the function.
        name: NAME or MODULE:FUNCTION.
        options: keyword arguments.

    Raises:
        ValueError: the function cannot be imported, or does not accept ``options``.
    """
    signature = inspect.signature(registry.resolve(name))
    try:
        # The first argument stands for the inputs, which only exist in a step.
        signature.bind(None, **options)
    except TypeError as error:
        raise ValueError(
            f"{registry.kind} {name} does not accept the options {dict(options)}: {error}. Its "
            f"signature is {signature}"
        ) from None
