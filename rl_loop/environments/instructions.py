"""Verifiable instruction following: answers must satisfy constraints that programs check.

Generated prompts use the IFEval checkers (arXiv 2311.07911) that need no download. In later turns the
user adds constraints, and earlier constraints still apply, as in Multi-IF. Files of IFEval and
IFBench are read unmodified.
"""

import asyncio
from dataclasses import dataclass
from random import Random
from typing import Any

from pydantic import Field, field_validator

from rl_loop.environments.base import (
    Environment,
    EnvironmentOptions,
    ScriptedPolicy,
    Split,
    StepResult,
    Task,
    text_in,
)
from rl_loop.environments.instruction_checkers import (
    TextConstraint,
    check,
    check_in_process,
    checker_class,
    draw_constraint,
    ifeval_conflicts,
    missing_data,
)
from rl_loop.environments.instruction_solutions import SOLUTIONS, write_solution
from rl_loop.environments.scripted_messages import final

TOPICS = (
    "rivers",
    "bread",
    "trains",
    "clouds",
    "chess",
    "gardens",
    "winter",
    "maps",
    "owls",
    "tea",
    "boats",
    "stars",
)

ATTEMPTS = 1000
"""Limit of attempts to draw a prompt with compatible constraints."""


class InstructionOptions(EnvironmentOptions):
    constraints: int = Field(2, gt=0)
    """Number of new constraints per user turn."""
    turns: int = Field(1, gt=0)
    """Number of user turns."""
    checkers: list[str] = Field(default_factory=lambda: list(SOLUTIONS))
    """IFEval constraints of generated prompts."""
    skip_unavailable: bool = False
    """Leave out rows of files whose checkers need NLTK data that is not installed. By default such a
    row is an error with the command that installs the data."""

    @field_validator("checkers")
    @classmethod
    def _checkers_are_known(cls, checkers: list[str]) -> list[str]:
        unknown = sorted(set(checkers) - set(SOLUTIONS))
        if unknown:
            known = ", ".join(SOLUTIONS)
            raise ValueError(f"unknown checkers {', '.join(unknown)}. Choose from {known}")
        return checkers


@dataclass(frozen=True)
class TurnScore:
    """Shares of the constraints that an answer satisfies, between 0 and 1."""

    strict: float
    loose: float


class InstructionEnvironment(Environment):
    """Conversation whose answers are checked by programs.

    ``task.metadata`` holds:

    - "turns": for each user turn its new constraints as [name, arguments];
    - "user": messages of the later user turns;
    - "topic": topic of the text, for the script.
    """

    Options = InstructionOptions

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._scores: list[TurnScore] = []
        """Scores of the answers until now, one per user turn."""

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        for attempt in range(ATTEMPTS):
            # Index and attempt are in the seed, so that a task is the same in every run.
            rng = Random(f"{split}/{seed}/{index}/{attempt}")
            task = _compose(f"{split}-{index}", rng, options)
            if task is not None:
                return task
        raise ValueError(
            f"checkers {', '.join(options.checkers)} exclude each other, so no prompt has constraints="
            f"{options.constraints} in each of turns={options.turns}. Lower them, or add checkers"
        )

    @classmethod
    def from_record(cls, record: dict[str, Any], name: str, options: Any) -> Task | None:
        """Return the task in a row of IFEval or IFBench.

        Such a row is {"key", "prompt", "instruction_id_list", "kwargs"}.
        """
        constraints = _parse_constraints(record)
        for constraint in constraints:
            checker_class(constraint.name)  # raises ValueError for an unknown name
            # Check before the run, because a checker without its data would fail in every episode.
            missing = missing_data(constraint.name)
            if missing and options.skip_unavailable:
                return None
            if missing:
                command = f"python -m nltk.downloader {' '.join(missing)}"
                raise ValueError(
                    f"{constraint.name} needs NLTK data that is not installed. Run `{command}`, or set "
                    "skip_unavailable: true to leave such rows out"
                )

        messages = [{"role": "user", "content": text_in(record, "prompt")}]
        metadata = {"turns": [_as_json(constraints)], "user": []}
        return Task(name, messages, "", "instructions", metadata)

    @classmethod
    def solve(cls, task: Task, rng: Random, inject_errors: bool) -> ScriptedPolicy:
        """Return a scripted policy that satisfies all constraints.

        With ``inject_errors`` it satisfies about half of them.
        """
        remembered: list[tuple[str, dict[str, Any]]] = []
        for turn in task.metadata["turns"]:
            for name, arguments in turn:
                if not inject_errors or rng.random() < 0.5:
                    remembered.append((name, arguments))
            yield [final(write_solution(task.metadata["topic"], remembered))]

    async def answer(self, text: str) -> StepResult:
        turns = self.task.metadata["turns"]
        # Constraints of earlier turns still apply.
        due = [TextConstraint(*entry) for turn in turns[: len(self._scores) + 1] for entry in turn]
        prompt = self.task.messages[-1]["content"]

        # Checkers run in other processes, so check all constraints at the same time.
        verdicts = await asyncio.gather(
            *(check_in_process(constraint, text, prompt) for constraint in due)
        )
        strict = sum(verdict.strict for verdict in verdicts) / len(due)
        loose = sum(verdict.loose for verdict in verdicts) / len(due)
        self._scores.append(TurnScore(strict, loose))

        answered = len(self._scores)
        if answered < len(turns):
            return StepResult(user=self.task.metadata["user"][answered - 1])
        return self.end_truncated()

    def end_truncated(self) -> StepResult:
        """Score the answers until now. Unanswered turns score 0."""
        turns = len(self.task.metadata["turns"])
        strict = sum(score.strict for score in self._scores) / turns
        loose = sum(score.loose for score in self._scores) / turns
        return self.end_with_score(
            strict, strict=float(strict >= 1), loose=float(loose >= 1), partial_loose=loose
        )


def _compose(task_id: str, rng: Random, options: InstructionOptions) -> Task | None:
    """Return a task with random constraints; None if the constraints are incompatible."""
    topic = rng.choice(TOPICS)
    names = _draw_compatible(options.checkers, options.constraints * options.turns, rng)
    # All other constraints are in conflict with the drawn ones.
    if len(names) < options.constraints * options.turns:
        return None

    constraints: list[TextConstraint] = []
    sentences: list[str] = []
    for name in names:
        # Each constraint has its own seed, so that it does not depend on the others.
        constraint, sentence = draw_constraint(name, rng.randrange(1 << 30))
        constraints.append(constraint)
        sentences.append(sentence)

    # After each user turn, one text must satisfy all constraints until then.
    turn_starts = range(0, len(constraints), options.constraints)
    for start in turn_starts:
        if not _script_meets(topic, constraints[: start + options.constraints]):
            return None

    turns = [_as_json(constraints[start : start + options.constraints]) for start in turn_starts]
    requests = [" ".join(sentences[start : start + options.constraints]) for start in turn_starts]
    messages = [{"role": "user", "content": f"Write about {topic}. {requests[0]}"}]
    follow_ups = [f"Now also: {request}" for request in requests[1:]]
    metadata = {"turns": turns, "user": follow_ups, "topic": topic}
    return Task(task_id, messages, "", "instructions", metadata)


def _draw_compatible(names: list[str], count: int, rng: Random) -> list[str]:
    """Return up to ``count`` random constraints without conflicts."""
    conflicts = ifeval_conflicts()
    chosen: list[str] = []
    # A sample of all names is a random order.
    for name in rng.sample(names, len(names)):
        if len(chosen) < count and not any(name in conflicts[other] for other in chosen):
            chosen.append(name)
    return chosen


def _script_meets(topic: str, constraints: list[TextConstraint]) -> bool:
    """Return True if the script's text about ``topic`` satisfies all constraints."""
    text = write_solution(
        topic, [(constraint.name, constraint.arguments) for constraint in constraints]
    )
    return all(check(constraint, text, "").strict for constraint in constraints)


def _parse_constraints(record: dict[str, Any]) -> list[TextConstraint]:
    """Return the constraints in a row of IFEval or IFBench. Raises KeyError or ValueError."""
    names = record["instruction_id_list"]
    kwargs = record["kwargs"]
    for key, values in (("instruction_id_list", names), ("kwargs", kwargs)):
        # Both lists need the same length, because the loop below pairs them.
        if not isinstance(values, list) or len(values) != len(names) or not values:
            raise ValueError(f"{key!r} must be a list with an entry for each constraint")
    if not all(arguments is None or isinstance(arguments, dict) for arguments in kwargs):
        raise ValueError("'kwargs' must be a list of objects")

    constraints = []
    for name, entry in zip(names, kwargs, strict=True):
        arguments = {key: value for key, value in (entry or {}).items() if value is not None}
        constraints.append(TextConstraint(name, arguments))
    return constraints


def _as_json(constraints: list[TextConstraint]) -> list[Any]:
    """Return constraints in the format of a task's metadata."""
    return [[constraint.name, constraint.arguments] for constraint in constraints]
