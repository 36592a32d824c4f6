"""Advantage estimators and policy losses by name, or as MODULE:FUNCTION of the user's own.

Entries are imported on demand: a configuration is read and checked without torch. What such a
function gets and returns is described in docs/algorithms.md."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rl_loop.registry import Registry


def is_function(candidate: object) -> bool:
    """Say whether something can be called, and is no class."""
    return callable(candidate) and not isinstance(candidate, type)


ADVANTAGES: Registry[Callable[..., Any]] = Registry(
    kind="advantage",
    expected="a function of BatchRewards",
    accepts=is_function,
    entries={
        "grpo": "rl_loop.algorithms.advantages:grpo",
        "dr_grpo": "rl_loop.algorithms.advantages:dr_grpo",
        "leave_one_out": "rl_loop.algorithms.advantages:leave_one_out",
        "gdpo": "rl_loop.algorithms.advantages:gdpo",
        "reinforce": "rl_loop.algorithms.advantages:reinforce",
        # The only one that looks at tokens and values: whoever assigns advantages calls it apart.
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


def check_function(
    registry: Registry[Callable[..., Any]], name: str, options: Mapping[str, Any]
) -> None:
    """Raise ValueError if MODULE:FUNCTION cannot be imported or does not take ``options``."""
    signature = inspect.signature(registry.resolve(name))
    try:
        signature.bind(None, **options)
    except TypeError as error:
        raise ValueError(
            f"{registry.kind} {name} with options {dict(options)}: {error}; it is {signature}"
        ) from None
