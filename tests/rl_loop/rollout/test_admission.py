"""Which groups begin when, and which step trains on them: what has to hold whatever takes how long."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_loop.rollout.admission import AdmissionControl, Order, lead_of


@dataclass
class History:
    """What became of every group of a run."""

    begun_with: dict[int, int] = field(default_factory=dict)
    """Number -> version of the weights when it began."""
    trained_in: dict[int, int] = field(default_factory=dict)
    batches: list[list[int]] = field(default_factory=list)
    most_under_way: int = 0
    waits: int = 0
    """How often a step was asked for and could not be had yet."""


@dataclass(frozen=True)
class Run:
    groups_per_step: int
    max_staleness: int
    steps: int
    order: Order
    seed: int


runs = st.builds(
    Run,
    groups_per_step=st.integers(1, 5),
    max_staleness=st.integers(0, 5),
    steps=st.integers(1, 12),
    order=st.sampled_from(["in_order", "ready_first"]),
    seed=st.integers(0, 2**32),
)


def play(run: Run, control: AdmissionControl, history: History, steps: range) -> None:
    """Train; groups end in an order drawn at random, with a few that outlast all others."""
    chance = random.Random(f"{run.seed}/{steps}")
    running = list[int]()
    stubborn = {n for n in range(run.steps * run.groups_per_step) if chance.random() < 0.2}
    for step in steps:
        control.synced(step)
        while (number := control.admit_next()) is not None:
            assert number not in history.begun_with
            history.begun_with[number] = step
            running.append(number)
        waiting = set(history.begun_with) - set(history.trained_in)
        history.most_under_way = max(history.most_under_way, len(waiting))

        # Some groups end while the trainer learns, before anybody asks.
        for number in [n for n in running if n not in stubborn and chance.random() < 0.3]:
            running.remove(number)
            control.finish(number)
        while (batch := control.take(step)) is None:
            history.waits += 1
            # Those that nothing hurries end only when nothing else is left to end.
            hurried = [n for n in running if n not in stubborn] or running
            assert hurried, f"step {step} waits, and nothing is under way"
            number = chance.choice(hurried)
            running.remove(number)
            control.finish(number)
        for number in batch:
            assert number not in history.trained_in
            history.trained_in[number] = step
        history.batches.append(batch)


def played(run: Run) -> History:
    history = History()
    play(run, new_control(run), history, range(run.steps))
    return history


def new_control(run: Run, **resumed: object) -> AdmissionControl:
    return AdmissionControl(
        groups_per_step=run.groups_per_step,
        max_staleness=run.max_staleness,
        steps=run.steps,
        order=run.order,
        **resumed,  # type: ignore[arg-type]
    )


@given(runs)
def test_no_token_can_be_older_than_the_bound(run: Run) -> None:
    history = played(run)
    for number, step in history.trained_in.items():
        assert step - history.begun_with[number] <= run.max_staleness


@given(runs)
def test_every_group_that_was_admitted_is_trained_on_once_and_whole_steps_at_a_time(
    run: Run,
) -> None:
    history = played(run)
    assert sorted(history.trained_in) == list(range(run.steps * run.groups_per_step))
    assert set(history.begun_with) == set(history.trained_in)
    assert {len(batch) for batch in history.batches} == {run.groups_per_step}


@given(runs)
def test_no_more_groups_are_under_way_than_the_bound_allows(run: Run) -> None:
    lead = lead_of(run.order, run.max_staleness)
    history = played(run)
    assert history.most_under_way <= (lead + 1) * run.groups_per_step
    for number, version in history.begun_with.items():
        assert version >= number // run.groups_per_step - run.max_staleness


@given(runs)
def test_in_order_every_step_trains_on_its_own_groups_and_lengths_are_those_sampled(
    run: Run,
) -> None:
    history = played(replace(run, order="in_order"))
    lengths = random.Random(run.seed)
    length_of = {number: lengths.randrange(9) for number in history.begun_with}
    for step, batch in enumerate(history.batches):
        own = [n for n in history.begun_with if n // run.groups_per_step == step]
        assert batch == own
        assert Counter(map(length_of.get, batch)) == Counter(map(length_of.get, own))


@given(runs)
def test_a_run_that_is_cut_anywhere_goes_on_within_the_bound_and_admits_no_burst(run: Run) -> None:
    cut = random.Random(run.seed).randrange(run.steps + 1)
    before = History()
    control = new_control(run)
    play(run, control, before, range(cut))
    waiting = {n: v for n, v in before.begun_with.items() if n not in before.trained_in}
    assert control.untrained == sorted(waiting)

    # Every other group that had ended is in the checkpoint; the rest begins anew.
    kept = dict(list(control.finished.items())[::2])
    passed_over = control.untrained if run.order == "ready_first" else []
    resumed = new_control(run, first_step=cut, passed_over=passed_over, finished=kept)
    after = History()
    after.trained_in = dict(before.trained_in)
    chance = random.Random(run.seed + 1)
    running = list[int]()
    for step in range(cut, run.steps):
        resumed.synced(step)
        while (number := resumed.admit_next()) is not None:
            after.begun_with[number] = kept.get(number, step)
            if number in kept:
                resumed.finish(number)
            else:
                running.append(number)
        lead = lead_of(run.order, run.max_staleness)
        assert len(resumed.untrained) <= (lead + 1) * run.groups_per_step + len(passed_over)
        assert len(running) <= (lead + 1) * run.groups_per_step
        while (batch := resumed.take(step)) is None:
            resumed.finish(running.pop(chance.randrange(len(running))))
        for number in batch:
            assert number not in after.trained_in
            assert step - after.begun_with[number] <= run.max_staleness
            after.trained_in[number] = step
    assert sorted(after.trained_in) == list(range(run.steps * run.groups_per_step))


def finish_all_but(control: AdmissionControl, left: set[int]) -> None:
    while (number := control.admit_next()) is not None:
        if number not in left:
            control.finish(number)


def test_ready_first_passes_a_slow_group_over_until_its_limit_and_then_waits_for_it() -> None:
    control = AdmissionControl(groups_per_step=2, max_staleness=2, steps=9, order="ready_first")
    finish_all_but(control, {0})
    assert control.take(0) == [1, 2]
    control.synced(1)
    finish_all_but(control, set())
    assert control.take(1) == [3, 4]
    control.synced(2)
    finish_all_but(control, set())
    assert control.take(2) is None, "group 0 began with weights 0, and may be two versions old"
    control.finish(0)
    assert control.take(2) == [0, 5]


def test_ready_first_leaves_room_for_groups_that_reach_their_limit_together() -> None:
    """Two groups with the same limit cannot both be trained on in its last step of one group."""
    control = AdmissionControl(groups_per_step=1, max_staleness=3, steps=9, order="ready_first")
    finish_all_but(control, {0, 1})
    assert control.take(0) == [2]
    control.synced(1)
    finish_all_but(control, set())
    assert control.take(1) == [3]
    control.synced(2)
    finish_all_but(control, set())
    assert control.take(2) is None, "steps 2 and 3 have room for groups 0 and 1 and no others"
    control.finish(1)
    assert control.take(2) == [1]


def test_a_group_from_a_checkpoint_keeps_its_limit() -> None:
    control = AdmissionControl(
        groups_per_step=1,
        max_staleness=2,
        steps=9,
        order="ready_first",
        first_step=2,
        passed_over=[0],
        finished={0: 0},
    )
    assert [control.admit_next() for _ in range(3)] == [0, 3, None]
    control.finish(3)
    assert control.take(2) is None, "group 0 began with weights 0"
    control.finish(0)
    assert control.finished == {0: 0, 3: 2}
    assert control.take(2) == [0]


def test_in_order_waits_for_a_slow_group_and_the_next_steps_go_on() -> None:
    control = AdmissionControl(groups_per_step=2, max_staleness=2, steps=9)
    finish_all_but(control, {1})
    assert control.take(0) is None
    control.finish(1)
    assert [control.take(step) for step in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert control.take(3) is None, "it may begin with weights 1 at the earliest"


@pytest.mark.parametrize("order", ["in_order", "ready_first"])
def test_without_staleness_a_step_is_admitted_when_it_is_next(order: Order) -> None:
    control = AdmissionControl(groups_per_step=2, max_staleness=0, steps=3, order=order)
    assert [control.admit_next() for _ in range(3)] == [0, 1, None]
    control.finish(0)
    control.finish(1)
    assert control.take(0) == [0, 1]
    assert control.admit_next() is None, "the engines have weights 0"
    control.synced(1)
    assert [control.admit_next() for _ in range(3)] == [2, 3, None]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="groups_per_step is 0"):
        AdmissionControl(groups_per_step=0, max_staleness=0, steps=1)
    with pytest.raises(ValueError, match="max_staleness is -1"):
        AdmissionControl(groups_per_step=1, max_staleness=-1, steps=1)

    control = AdmissionControl(groups_per_step=1, max_staleness=2, steps=9, first_step=3)
    with pytest.raises(ValueError, match="weights 2 after weights 3: versions never fall"):
        control.synced(2)
    with pytest.raises(ValueError, match="group 3 ended, which is not under way"):
        control.finish(3)
    with pytest.raises(ValueError, match="step 4 is taken, expected 3"):
        control.take(4)
    assert control.admit_next() == 3
    control.finish(3)
    with pytest.raises(ValueError, match="group 3 ended"):
        control.finish(3)
