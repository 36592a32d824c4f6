"""Simulation of asynchronous rollouts, on a virtual clock.

    python -m benchmarks.rollouts simulate                  # a table of both policies and all k
    python -m benchmarks.rollouts simulate --out async.md --plot async.png
    python -m benchmarks.rollouts simulate --gaps 0.1 --rollouts 1

Needs no GPU. Engines, tools and a trainer are simulated with two policies:

- ``in_order`` is the policy of the loop (``rl_loop/rollout/collector.py``). A step trains on its
  own groups, which start up to k steps earlier.
- ``discard`` is an alternative that this project does not implement. A step trains on the groups
  that finish first. Groups older than k versions are discarded.

The workload has published long tails (TraceLab, arXiv 2606.30560):

- Tool calls per episode: 25% have none, median 1, p90 20, p99 86, mean 7.8.
- Seconds per tool call: p50 1.6, p75 8.6, p90 44, mean 37.

Quantiles between these points are interpolated in their logarithm. The largest values, 130 calls
and 1,080 s, reproduce the published means. A latent difficulty of the task correlates the lengths
of its episodes. Tokens per turn, the engines' speed and the cost of a sync are assumptions
(``Costs``). The trainer's speed follows from ``--rollouts``.

Every run trains the same number of steps. Prints a table with these columns:

    steps/h           steps per hour, and the speed-up over k = 0
    stale             staleness of trained tokens in weight versions, mean and largest
    long trained      fraction trained on, of the 10% of tasks with the longest episodes
    calls trained     tool calls per trained episode, relative to those per started episode
    idle: trainer     fraction of time without training
    idle: engines     fraction of time without decoding
    prefilled again   tokens per step whose keys were recomputed because of new weights
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, mean
from typing import Literal, Protocol

type Policy = Literal["in_order", "discard"]
POLICIES: tuple[Policy, ...] = ("in_order", "discard")
STALENESS = (0, 1, 2, 4, 8)

CALLS = ((0.0, 0.0), (0.25, 0.0), (0.5, 1.0), (0.9, 20.0), (0.99, 86.0), (1.0, 130.0))
"""Quantiles of tool calls per episode. All but the last are published."""
GAPS = ((0.0, 0.1), (0.5, 1.6), (0.75, 8.6), (0.9, 44.0), (1.0, 1080.0))
"""Quantiles of seconds per tool call. All but the first and the last are published."""
LONG_SHARE = 0.1
"""Fraction of all tasks that count as long: those with the longest episodes."""


@dataclass(frozen=True)
class Workload:
    """Size and distribution of the sampled episodes."""

    groups_per_step: int = 32
    samples: int = 8
    """Number of episodes of a group."""
    steps: int = 60
    correlation: float = 0.5
    """Correlation of the quantiles (as normal deviates) of two episodes of a task."""
    gap_scale: float = 1.0
    """Factor of the seconds of tool calls."""
    prompt_tokens: int = 1000
    tool_tokens: int = 300
    """Tokens of a tool's answer."""
    turn_tokens: float = 200.0
    """Median tokens per turn. The distribution is log-normal with sigma 1."""
    seed: int = 0


@dataclass(frozen=True)
class Costs:
    """Speeds of the simulated machines. The defaults are assumptions, not measurements."""

    slots: int = 256
    """Maximum number of sequences that the engines decode concurrently."""
    token_seconds: float = 0.010
    """Time of a decoding step with one sequence, in seconds."""
    token_seconds_per_sequence: float = 0.00004
    """Additional time of a decoding step per further sequence, in seconds."""
    prefill_tokens_per_second: float = 50_000.0
    """Prefill throughput of all engines together. Decoding stops during prefill."""
    sync_seconds: float = 5.0
    rollouts_over_training: float = 2.0
    """Duration of a step's rollouts relative to its training, with k = 0."""


@dataclass(frozen=True)
class EpisodePlan:
    """Predetermined turns and delays of an episode."""

    turns: tuple[int, ...]
    """Number of tokens of each turn."""
    gaps: tuple[float, ...]
    """Seconds of the tool call after each turn except the last."""
    tool_tokens: int = 0
    """Tokens of a tool's answer."""


@dataclass(frozen=True)
class Outcome:
    """Results of a simulation."""

    seconds: float
    """Duration on the virtual clock."""
    steps: int
    staleness_mean: float
    staleness_max: int
    begun: list[int]
    """Numbers of the groups that started and were trained on or discarded."""
    trained: list[list[int]]
    """Numbers of the trained groups, by step."""
    training_seconds: float
    engine_idle_seconds: float
    recomputed_tokens: float
    tokens: float
    """Number of trained tokens."""

    @property
    def steps_per_hour(self) -> float:
        return self.steps / self.seconds * 3600


# -- the workload ---------------------------------------------------------------------------------


def quantile(points: Sequence[tuple[float, float]], share: float) -> float:
    """Interpolate a quantile function.

    The interpolation is logarithmic where both ends are positive.

    Args:
        points: (fraction, value) in increasing order.
        share: fraction at which to interpolate.
    """
    for (left, low), (right, high) in pairwise(points):
        if share <= right:
            part = (share - left) / (right - left)
            if low <= 0:
                return low + part * (high - low)
            return low * (high / low) ** part
    return points[-1][1]


def plan_group(workload: Workload, number: int) -> list[EpisodePlan]:
    """Draw the episodes of a group. They do not depend on the policy and k."""
    chance = random.Random(f"{workload.seed}/{number}")
    difficulty = chance.gauss(0, 1)
    shared, own = math.sqrt(workload.correlation), math.sqrt(1 - workload.correlation)

    plans = []
    for _ in range(workload.samples):
        deviate = shared * difficulty + own * chance.gauss(0, 1)
        calls = round(quantile(CALLS, NormalDist().cdf(deviate)))
        gaps = [workload.gap_scale * quantile(GAPS, chance.random()) for _ in range(calls)]
        spread = [math.exp(chance.gauss(0, 1)) for _ in range(calls + 1)]
        turns = [max(1, round(workload.turn_tokens * factor)) for factor in spread]
        plans.append(EpisodePlan(tuple(turns), tuple(gaps), workload.tool_tokens))
    return plans


# -- policies -------------------------------------------------------------------------------------


class Control(Protocol):
    """Decides which groups start and which are trained on."""

    def synced(self, version: int) -> None: ...

    def admit_next(self) -> int | None: ...

    def finish(self, number: int) -> None: ...

    def take(self, step: int) -> list[int] | None: ...


class InOrderControl:
    """Trains on the groups of each step, which start up to ``max_staleness`` steps earlier."""

    def __init__(self, groups_per_step: int, max_staleness: int, steps: int) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._steps = steps
        self._version = 0
        self._next = 0
        self._finished: set[int] = set()

    def synced(self, version: int) -> None:
        self._version = version

    def admit_next(self) -> int | None:
        step = self._next // self._groups_per_step
        if step > self._version + self._max_staleness or step >= self._steps:
            return None
        self._next += 1
        return self._next - 1

    def finish(self, number: int) -> None:
        self._finished.add(number)

    def take(self, step: int) -> list[int] | None:
        own = range(step * self._groups_per_step, (step + 1) * self._groups_per_step)
        if not self._finished.issuperset(own):
            return None
        self._finished.difference_update(own)
        return list(own)


class DiscardControl:
    """Trains on the groups that finish first, and discards groups that are too old."""

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        self.discarded: list[int] = []
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._version = 0
        self._next = 0
        self._begun_with: dict[int, int] = {}
        self._finished: list[int] = []

    def synced(self, version: int) -> None:
        self._version = version
        for number, begun in list(self._begun_with.items()):
            if version - begun > self._max_staleness:
                self._drop(number)
                self.discarded.append(number)

    def admit_next(self) -> int | None:
        if len(self._begun_with) == (self._max_staleness + 1) * self._groups_per_step:
            return None
        number = self._next
        self._next += 1
        self._begun_with[number] = self._version
        return number

    def finish(self, number: int) -> None:
        self._finished.append(number)

    def take(self, step: int) -> list[int] | None:
        if len(self._finished) < self._groups_per_step:
            return None
        batch = self._finished[: self._groups_per_step]
        for number in batch:
            self._drop(number)
        return sorted(batch)

    def _drop(self, number: int) -> None:
        del self._begun_with[number]
        if number in self._finished:
            self._finished.remove(number)


def control_for(policy: Policy, max_staleness: int, workload: Workload) -> Control:
    """Return the control of a policy."""
    if policy == "discard":
        return DiscardControl(workload.groups_per_step, max_staleness)
    return InOrderControl(workload.groups_per_step, max_staleness, workload.steps)


# -- engines and tools ----------------------------------------------------------------------------


@dataclass(eq=False)
class Episode:
    """A running episode."""

    group: int
    plan: EpisodePlan
    context: int
    """Number of tokens so far: prompt, turns and answers of tools."""
    turn: int = 0
    tokens_left: float = 0.0
    """Remaining tokens of the current turn."""
    cached: int = 0
    """Tokens of the context with cached keys."""
    cached_with: int = -1
    """Version of the weights that computed the cached keys."""
    began_at: float = 0.0
    """Value of the engines' ``work`` when the turn started or resumed."""
    by_version: dict[int, float] = field(default_factory=dict)
    """Number of sampled tokens by version of the weights."""
    is_dropped: bool = False


class Engines:
    """Tools, and all engines as one engine whose sequences have equal speed.

    ``_work`` is the number of tokens that each sequence of the batch has received since the start.
    A turn ends when it has received its own tokens. Prefill stops decoding.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.now = 0.0
        self.idle_seconds = 0.0
        self.recomputed_tokens = 0.0
        self.ended: list[Episode] = []
        """Episodes that have ended since the last check."""
        self._version = 0
        self._work = 0.0
        self._prefill_seconds = 0.0
        """Seconds until decoding continues."""
        self._decoding: list[tuple[float, int, Episode]] = []
        """Heap, by the value of ``_work`` at which the turn ends."""
        self._waiting: deque[Episode] = deque()
        self._at_tools: list[tuple[float, int, Episode]] = []
        """Heap, by the time at which the tool answers."""
        self._ticket = 0
        """Unique number that makes entries of heaps comparable."""

    def begin(self, episode: Episode) -> None:
        """Queue the next turn of an episode."""
        episode.tokens_left = episode.plan.turns[episode.turn]
        self._waiting.append(episode)
        self._admit()

    def sync(self, version: int) -> None:
        """Load new weights. Running turns keep their tokens, and all cached keys are dropped."""
        interrupted = [episode for _, _, episode in sorted(self._decoding)]
        for episode in interrupted:
            self._keep_tokens(episode)
        self._decoding.clear()
        self._prefill_seconds = 0.0
        self._version = version
        self._pass_time(self.costs.sync_seconds, decoding=False)

        for episode in interrupted:
            if not episode.is_dropped:
                self._start(episode)
        self._admit()

    def drop(self, group: int) -> None:
        """Drop the episodes of a group."""
        kept = []
        for entry in self._decoding:
            entry[2].is_dropped |= entry[2].group == group
            if not entry[2].is_dropped:
                kept.append(entry)
        self._decoding = kept
        heapq.heapify(self._decoding)
        for episode in [*self._waiting, *(entry[2] for entry in self._at_tools)]:
            episode.is_dropped |= episode.group == group
        self._admit()

    def run(self, until: float = math.inf) -> None:
        """Continue until an episode ends or until a time."""
        while not self.ended:
            turn_ends = math.inf
            if self._decoding:
                left = self._decoding[0][0] - self._work
                turn_ends = self.now + self._prefill_seconds + left * self._seconds_per_token
            tool_ends = self._at_tools[0][0] if self._at_tools else math.inf

            event = min(turn_ends, tool_ends)
            if event >= until:
                assert until < math.inf, "a step waits for episodes, but none is running"
                self._pass_time(until - self.now)
                self.now = until
                return
            self._pass_time(event - self.now)
            if turn_ends <= tool_ends:
                _, _, episode = heapq.heappop(self._decoding)
                self._end_turn(episode)
            else:
                _, _, episode = heapq.heappop(self._at_tools)
                if not episode.is_dropped:
                    self.begin(episode)

    @property
    def _seconds_per_token(self) -> float:
        costs = self.costs
        return costs.token_seconds + costs.token_seconds_per_sequence * len(self._decoding)

    def _pass_time(self, seconds: float, *, decoding: bool = True) -> None:
        self.now += seconds
        if not self._decoding or not decoding:
            self.idle_seconds += seconds
            return
        prefill = min(seconds, self._prefill_seconds)
        self._prefill_seconds -= prefill
        self._work += (seconds - prefill) / self._seconds_per_token

    def _admit(self) -> None:
        while self._waiting and len(self._decoding) < self.costs.slots:
            episode = self._waiting.popleft()
            if not episode.is_dropped:
                self._start(episode)

    def _start(self, episode: Episode) -> None:
        """Prefill the part of an episode without cached keys, and start decoding."""
        if episode.cached_with != self._version:
            self.recomputed_tokens += episode.cached
            episode.cached = 0
        new = episode.context - episode.cached
        self._prefill_seconds += new / self.costs.prefill_tokens_per_second
        episode.cached = episode.context
        episode.cached_with = self._version

        episode.began_at = self._work
        self._ticket += 1
        entry = (self._work + episode.tokens_left, self._ticket, episode)
        heapq.heappush(self._decoding, entry)

    def _keep_tokens(self, episode: Episode) -> None:
        """Add the tokens decoded since the start of the turn to the episode."""
        tokens = min(self._work - episode.began_at, episode.tokens_left)
        version = episode.cached_with
        episode.by_version[version] = episode.by_version.get(version, 0.0) + tokens
        episode.tokens_left -= tokens
        episode.context += round(tokens)
        episode.cached = episode.context

    def _end_turn(self, episode: Episode) -> None:
        self._keep_tokens(episode)
        self._admit()
        if episode.turn == len(episode.plan.gaps):
            self.ended.append(episode)
            return

        episode.context += episode.plan.tool_tokens
        seconds = episode.plan.gaps[episode.turn]
        episode.turn += 1
        self._ticket += 1
        heapq.heappush(self._at_tools, (self.now + seconds, self._ticket, episode))


# -- the loop -------------------------------------------------------------------------------------


class Simulation:
    """The loop with simulated engines and a simulated trainer: sync, take, train."""

    def __init__(self, workload: Workload, costs: Costs, control: Control) -> None:
        self.workload = workload
        self.engines = Engines(costs)
        self._control = control
        self._episodes: dict[int, list[Episode]] = {}
        """Episodes of the groups in flight, by number."""
        self._running: dict[int, int] = {}
        """Number of running episodes by group."""
        self._begun: list[int] = []
        self._rollout_seconds: list[float] = []

    @property
    def mean_rollout_seconds(self) -> float:
        """Mean time in which the trainer waits for a step's episodes, in seconds."""
        return mean(self._rollout_seconds)

    def run(self, seconds_per_token: float) -> Outcome:
        """Train all steps with a trainer that needs ``seconds_per_token`` per sampled token."""
        engines = self.engines
        trained: list[list[int]] = []
        tokens_by_staleness: dict[int, float] = {}
        training_seconds = 0.0
        for step in range(self.workload.steps):
            self._sync(step)
            asked = engines.now
            trained.append(self._take(step))
            self._rollout_seconds.append(engines.now - asked)

            tokens = 0.0
            for number in trained[-1]:
                for episode in self._episodes.pop(number):
                    for version, count in episode.by_version.items():
                        tokens_by_staleness[step - version] = (
                            tokens_by_staleness.get(step - version, 0.0) + count
                        )
                        tokens += count
            seconds = tokens * seconds_per_token
            training_seconds += seconds
            self._generate_until(engines.now + seconds)

        total = sum(tokens_by_staleness.values())
        return Outcome(
            seconds=engines.now,
            steps=self.workload.steps,
            staleness_mean=sum(
                staleness * count for staleness, count in tokens_by_staleness.items()
            )
            / total,
            staleness_max=max(
                staleness for staleness, count in tokens_by_staleness.items() if count > 0
            ),
            begun=[number for number in self._begun if number not in self._episodes],
            trained=trained,
            training_seconds=training_seconds,
            engine_idle_seconds=engines.idle_seconds,
            recomputed_tokens=engines.recomputed_tokens,
            tokens=total,
        )

    def _sync(self, version: int) -> None:
        self.engines.sync(version)
        self._control.synced(version)
        if isinstance(self._control, DiscardControl):
            for number in self._control.discarded:
                self.engines.drop(number)
                self._episodes.pop(number)
                self._running.pop(number, None)
            self._control.discarded.clear()

        while (number := self._control.admit_next()) is not None:
            self._begin(number)

    def _begin(self, number: int) -> None:
        context = self.workload.prompt_tokens
        episodes = [Episode(number, plan, context) for plan in plan_group(self.workload, number)]
        self._begun.append(number)
        self._episodes[number] = episodes
        self._running[number] = len(episodes)
        for episode in episodes:
            self.engines.begin(episode)

    def _take(self, step: int) -> list[int]:
        while (batch := self._control.take(step)) is None:
            self.engines.run()
            self._note_ended()
        return batch

    def _generate_until(self, time: float) -> None:
        """Let engines and tools continue while the trainer works."""
        while self.engines.now < time:
            self.engines.run(until=time)
            self._note_ended()

    def _note_ended(self) -> None:
        for episode in self.engines.ended:
            self._running[episode.group] -= 1
            if self._running[episode.group] == 0:
                del self._running[episode.group]
                self._control.finish(episode.group)
        self.engines.ended.clear()


def simulate(
    workload: Workload, costs: Costs, policy: Policy, max_staleness: int, seconds_per_token: float
) -> Outcome:
    """Run the loop with one policy.

    Args:
        workload: size and distribution of the episodes.
        costs: speeds of the machines.
        policy: name of the policy.
        max_staleness: k.
        seconds_per_token: time of the trainer per sampled token.
    """
    control = control_for(policy, max_staleness, workload)
    return Simulation(workload, costs, control).run(seconds_per_token)


def training_speed(workload: Workload, costs: Costs) -> float:
    """Return the trainer's seconds per token that give ``rollouts_over_training`` with k = 0."""
    simulation = Simulation(workload, costs, control_for("in_order", 0, workload))
    outcome = simulation.run(seconds_per_token=0.0)
    tokens_per_step = outcome.tokens / outcome.steps
    return simulation.mean_rollout_seconds / costs.rollouts_over_training / tokens_per_step


# -- results --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    policy: Policy
    max_staleness: int
    outcome: Outcome
    speed_up: float
    """Steps per hour relative to those with k = 0."""
    long_trained: float
    """Fraction trained on, of the long tasks that were trained on or discarded."""
    calls_trained: float
    """Mean tool calls of trained episodes, relative to those of all started episodes."""


def compare(
    workload: Workload, costs: Costs, staleness: Sequence[int], policies: Sequence[Policy]
) -> list[Row]:
    """Run every policy with every k on the same tasks.

    Args:
        workload: size and distribution of the episodes.
        costs: speeds of the machines.
        staleness: values of k.
        policies: names of the policies.
    """
    speed = training_speed(workload, costs)
    slowest = simulate(workload, costs, "in_order", 0, speed)
    lengths = TaskLengths(workload)

    rows = []
    for policy in policies:
        for k in staleness:
            outcome = simulate(workload, costs, policy, k, speed)
            trained = [number for batch in outcome.trained for number in batch]
            long = [number for number in outcome.begun if lengths.is_long(number)]
            row = Row(
                policy=policy,
                max_staleness=k,
                outcome=outcome,
                speed_up=outcome.steps_per_hour / slowest.steps_per_hour,
                long_trained=len(set(long) & set(trained)) / max(1, len(long)),
                calls_trained=lengths.mean_calls(trained) / lengths.mean_calls(outcome.begun),
            )
            rows.append(row)
    return rows


class TaskLengths:
    """Lengths of the episodes of tasks."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._calls: dict[int, list[int]] = {}
        tasks = range(workload.steps * workload.groups_per_step)
        longest = sorted(max(self._count_calls(number)) for number in tasks)
        self._limit = longest[int(len(longest) * (1 - LONG_SHARE))]

    def is_long(self, number: int) -> bool:
        """Return True if the longest episode of a task is among the longest 10% (LONG_SHARE)."""
        return max(self._count_calls(number)) >= self._limit

    def mean_calls(self, numbers: Sequence[int]) -> float:
        return mean(calls for number in numbers for calls in self._count_calls(number))

    def _count_calls(self, number: int) -> list[int]:
        if number not in self._calls:
            plans = plan_group(self._workload, number)
            self._calls[number] = [len(plan.gaps) for plan in plans]
        return self._calls[number]


HEADER = (
    "order", "k", "steps/h", "x", "stale mean", "max", "long trained", "calls trained",
    "idle: trainer", "engines", "prefilled again",
)  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    for row in rows:
        outcome = row.outcome
        cells = (
            row.policy,
            f"{row.max_staleness}",
            f"{outcome.steps_per_hour:.2f}",
            f"{row.speed_up:.2f}",
            f"{outcome.staleness_mean:.2f}",
            f"{outcome.staleness_max}",
            f"{row.long_trained:.0%}",
            f"{row.calls_trained:.2f}",
            f"{1 - outcome.training_seconds / outcome.seconds:.0%}",
            f"{outcome.engine_idle_seconds / outcome.seconds:.0%}",
            f"{outcome.recomputed_tokens / outcome.steps:,.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw speed, staleness, trained long tasks and the trainer's idle time over k."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = {
        "steps per hour, over k = 0": lambda row: row.speed_up,
        "mean staleness of trained tokens": lambda row: row.outcome.staleness_mean,
        "long tasks trained, of those begun": lambda row: row.long_trained,
        "trainer idle": lambda row: 1 - row.outcome.training_seconds / row.outcome.seconds,
    }
    figure, axes = pyplot.subplots(1, len(drawn), figsize=(4 * len(drawn), 3.2))
    for axis, (title, value) in zip(axes, drawn.items(), strict=True):
        for policy in dict.fromkeys(row.policy for row in rows):
            own = [row for row in rows if row.policy == policy]
            axis.plot([row.max_staleness for row in own], [*map(value, own)], "o-", label=policy)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("k")
        axis.set_ylim(bottom=0)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=Workload.steps)
    add("--groups", type=int, default=Workload.groups_per_step, help="of a step")
    add("--samples", type=int, default=Workload.samples, help="episodes of a group")
    add("--gaps", type=float, default=1.0, help="factor of the seconds that tools take")
    add("--rollouts", type=float, default=2.0, help="rollouts' time over training's with k = 0")
    add("--sync", type=float, default=Costs.sync_seconds, help="seconds of a weight sync")
    add("--slots", type=int, default=Costs.slots, help="sequences that are decoded at a time")
    add("--max-staleness", type=int, nargs="+", default=list(STALENESS), help="values of k")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="Markdown file for the table")
    add("--plot", type=Path, help="PNG file for curves")
    options = parser.parse_args()

    workload = Workload(
        groups_per_step=options.groups,
        samples=options.samples,
        steps=options.steps,
        gap_scale=options.gaps,
        seed=options.seed,
    )
    costs = Costs(
        slots=options.slots,
        sync_seconds=options.sync,
        rollouts_over_training=options.rollouts,
    )
    rows = compare(workload, costs, options.max_staleness, POLICIES)
    text = table(rows)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    if options.plot:
        plot(rows, options.plot)
