"""Conditions under which a fault or a run counts as failed."""

import re

from rl_loop.tracking.run_directory import RunDirectoryError
from tests.faults.observed_run import Attempt, Numbers, ObservedRun
from tests.faults.options import Options
from tests.faults.pairs import find_kind
from tests.faults.results import Injection


def judge_outcome(attempt: Attempt, injection: Injection) -> str:
    """Return an error if the run reacted wrongly to a fault, or an empty string.

    A run must either recover, or end with a reason. The kind of the fault determines which.
    """
    kind = find_kind(injection.kind)
    if injection.outcome == "hung":
        return f"neither recovered nor ended within {injection.limit:.0f} s"
    if injection.outcome == "recovered":
        return "nothing has noticed it" if kind.must_end else ""
    if kind.must_recover:
        return f"it ended, and should have gone on: {injection.message}"
    if kind.kills_driver:
        return ""
    if not injection.message:
        return "it ended without saying why"
    if kind.named_by and not re.search(kind.named_by, injection.message):
        return f"its last line names another cause: {injection.message}"
    if attempt.driver.returncode == 0:
        return "it ended with status 0"
    return ""


def find_named_damage(attempt: Attempt, file: str) -> str:
    """Return the line in which a resumed run names a damaged file; empty if there is none."""
    named = re.search(rf"{re.escape(file)}: damaged[^\n]*", attempt.output)
    return named.group() if named else ""


def compare_curves(run: ObservedRun, reference: dict[int, Numbers], tolerance: float) -> str:
    """Return the first difference from the recorded steps of the undisturbed run.

    Only steps that the undisturbed run has completed are compared.
    """
    recorded = run.recorded()
    steps = [step.step for step in recorded]
    if steps != list(range(1, len(steps) + 1)):
        return f"steps are missing or were recorded twice: {steps}"

    for step in recorded:
        if step.step not in reference:
            break
        for name, found, expected in zip(
            Numbers._fields, step.numbers, reference[step.step], strict=True
        ):
            # not >, because comparisons with NaN are false
            if not abs(found - expected) <= tolerance:
                return f"the {name} of step {step.step} is {found}, and {expected} undisturbed"
    return ""


def compare_episodes(run: ObservedRun) -> str:
    """Return the steps that were not trained exactly once on each of their episodes."""
    try:
        trained = run.episodes()
    except RunDirectoryError as error:
        return f"the episodes cannot be read: {error}"

    expected = run.expected_episodes(len(run.curve()))
    for step in sorted(set(expected) | set(trained)):
        if trained.get(step) != expected.get(step):
            return f"step {step} was trained on {trained.get(step)}, not on {expected.get(step)}"
    return ""


def examine(run: ObservedRun, reference: dict[int, Numbers], options: Options) -> str:
    """Return an error if the records of a finished run are wrong, or an empty string."""
    left = run.attempts[-1].leftovers(options.limit())
    if left:
        return f"left behind: {left}"
    unknown = set(run.curve()) - set(reference)
    if unknown:
        return f"steps that the undisturbed run does not have: {sorted(unknown)}"
    return compare_curves(run, reference, options.tolerance) or compare_episodes(run)
