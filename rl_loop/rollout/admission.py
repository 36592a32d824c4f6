"""Decides which groups of episodes may begin, and which of them a step trains on.

Groups have numbers in the order of their tasks. The *home* of group n is step n // groups_per_step.
Step s is trained by weights of version s, which engines have got just before. Two orders:

- ``in_order``: groups of step s begin when the engines have version s - k or a later one, and step
  s trains on exactly its own groups. No token is ever older than k versions, however long an
  episode takes: when one outlasts its k steps of slack, the trainer waits for it.
- ``ready_first``: a step trains on groups that have ended, whatever their home. A group that began
  with version v has its *limit* at step v + k. A group is passed over only as long as all others
  can still be trained on by their limits. As the bound is the same, that takes slack: fewer groups
  are under way than in order, and only from k = 2 on there is a choice.

With either one every group is trained on exactly once. Nothing here knows a clock, a thread or
Ray: the loop (``collector.py``) and a simulator (``benchmarks/async_rollouts.py``) run the same
code."""

from collections.abc import Mapping, Sequence

from rl_loop.algorithms.config import Order


def lead_of(order: Order, max_staleness: int) -> int:
    """Return how many steps before its home a group may begin.

    With ready_first the rest of ``max_staleness`` is the slack that choosing takes. If every place
    were taken, as many groups would reach their limit in each step as a step has room for."""
    if order == "in_order":
        return max_staleness
    return (max_staleness + 1) // 2


class AdmissionControl:
    """The groups of one run, from their admission to the step that trains on them.

    ``synced``, ``admit_next``, ``finish`` and ``take`` are called as things happen; all return at
    once."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        steps: int,
        order: Order = "in_order",
        first_step: int = 0,
        passed_over: Sequence[int] = (),
        finished: Mapping[int, int] | None = None,
    ) -> None:
        """Begin with ``first_step`` of ``steps``; no group of a later step is admitted.

        Of a resumed run: ``passed_over`` are groups that had been admitted and not trained on when
        later ones already were (``untrained``), and ``finished`` those that had ended, with the
        versions with which they began. The others begin anew."""
        if groups_per_step < 1:
            raise ValueError(f"groups_per_step is {groups_per_step}, expected at least 1")
        if max_staleness < 0:
            raise ValueError(f"max_staleness is {max_staleness}, expected at least 0")

        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.order = order
        self.version = first_step
        """Of the weights that the engines have."""
        self.next_step = first_step
        """The step that ``take`` is asked for next."""
        self._steps = steps
        self._lead = lead_of(order, max_staleness)

        # Of the groups below _frontier all were admitted once; those in _again begin anew.
        self._again = sorted(passed_over)
        self._frontier = first_step * groups_per_step + len(self._again)

        self._begun_with: dict[int, int] = {}
        """Admitted and not yet trained on: number -> version of the engines when it began."""
        self._finished: list[int] = []
        """Those of them that have ended, in the order in which they did."""
        self._restored = dict(finished or {})

    # -- what happens -----------------------------------------------------------------------------

    def synced(self, version: int) -> None:
        """Note that all engines have weights ``version``."""
        if version < self.version:
            raise ValueError(f"weights {version} after weights {self.version}: versions never fall")
        self.version = version

    def admit_next(self) -> int | None:
        """Admit the next group and return its number; None if none may begin yet."""
        # As many may be under way as steps are ahead of the one that is taken next.
        steps_ahead = self.version + self._lead + 1 - self.next_step
        if len(self._begun_with) >= steps_ahead * self.groups_per_step:
            return None

        if self._again:
            number = self._again.pop(0)
        elif self.home(self._frontier) < self._steps:
            number = self._frontier
            self._frontier += 1
        else:
            return None
        self._begun_with[number] = self._restored.pop(number, self.version)
        return number

    def finish(self, number: int) -> None:
        """Note that all episodes of a group have ended."""
        if number not in self._begun_with or number in self._finished:
            raise ValueError(f"group {number} ended, which is not under way")
        self._finished.append(number)

    def take(self, step: int) -> list[int] | None:
        """Return the groups that ``step`` trains on, in order; None while one of them has not
        ended. Every step is taken once, one after the other."""
        if step != self.next_step:
            raise ValueError(f"step {step} is taken, expected {self.next_step}")

        if self.order == "in_order":
            chosen = self._own_groups(step)
        else:
            chosen = self._ready_groups(step)
        if chosen is None:
            return None

        for number in chosen:
            oldest = step - self._begun_with.pop(number)
            assert oldest <= self.max_staleness, f"group {number} is {oldest} versions old"
            self._finished.remove(number)
        self.next_step += 1
        return sorted(chosen)

    # -- what there is ----------------------------------------------------------------------------

    def home(self, number: int) -> int:
        """Return the step to which a group belongs by its number."""
        return number // self.groups_per_step

    @property
    def untrained(self) -> list[int]:
        """Groups that were admitted and not yet trained on, in order."""
        return sorted([*self._begun_with, *self._again])

    @property
    def finished(self) -> dict[int, int]:
        """Those of them that have ended, with the versions with which they began."""
        return {number: self._begun_with[number] for number in sorted(self._finished)}

    # -- choosing ---------------------------------------------------------------------------------

    def _own_groups(self, step: int) -> list[int] | None:
        first = step * self.groups_per_step
        own = list(range(first, first + self.groups_per_step))
        return own if set(own) <= set(self._finished) else None

    def _ready_groups(self, step: int) -> list[int] | None:
        """Choose among the groups that have ended: those that must not be passed over first, then
        those that ended first."""
        chosen: list[int] = []
        for limit in range(step, step + self.max_staleness + 1):
            urgent = [number for number in self._begun_with if self._limit(number) <= limit]
            # Each of the steps up to that limit has room for as many.
            at_least = len(urgent) - (limit - step) * self.groups_per_step
            missing = at_least - sum(self._limit(number) <= limit for number in chosen)
            if missing <= 0:
                continue

            ready = [n for n in self._finished if n in urgent and n not in chosen]
            if len(ready) < missing:
                return None
            chosen += ready[:missing]

        others = [number for number in self._finished if number not in chosen]
        chosen += others[: self.groups_per_step - len(chosen)]
        return chosen if len(chosen) == self.groups_per_step else None

    def _limit(self, number: int) -> int:
        """Return the last step that may train on a group that is under way."""
        return self._begun_with[number] + self.max_staleness
