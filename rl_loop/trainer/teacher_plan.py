"""Distribution of a step's sequences over teachers.

A teacher scores the sequences of its task sources, on the ranks that train on them. Its micro-batches
are separate from those of the update, because an update mixes sources.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_gptoss.prefix_tree import PrefixSharing
from megatron_gptoss.samples import NO_TEACHER, TrainingSamples
from rl_loop.config.partial_configs import TrainerConfig
from rl_loop.trainer.step_plan import StepPlan, schedule_sequences


@dataclass(frozen=True)
class TeacherPass:
    """Micro-batches of one rank that a teacher scores."""

    teacher: int
    """Index of the teacher."""
    micro_batches: list[list[int]]
    """Rows of ``RankInputs.samples`` in each micro-batch. All ranks have equally many micro-batches,
    some of which may be empty."""


@dataclass(frozen=True)
class RankTeachers:
    """Passes of all teachers over the sequences of one rank."""

    passes: list[TeacherPass]
    views: TrainingSamples | None
    """The rank's sequences as their teachers see them. None if teachers see the same tokens."""
    sharing: PrefixSharing | None
    """Tokens that the sequences of a micro-batch share. None if they share none."""


def plan_teachers(
    samples: TrainingSamples, plan: StepPlan, settings: TrainerConfig
) -> list[RankTeachers] | None:
    """Distribute the sequences of each rank over their teachers.

    Args:
        samples: all samples of a step.
        plan: distribution of the samples over the ranks.
        settings: settings of the trainer.

    Returns:
        The passes of each data-parallel rank. None if the only teacher scores the micro-batches of
        ``plan``.
    """
    views = samples.teacher_views
    if samples.teachers is None and views is None:
        return None

    teachers = samples.teachers
    if teachers is None:
        teachers = np.zeros(len(samples), np.int64)

    # Teachers choose their own experts.
    seen = samples.without_routes() if views is None else views
    rank_sequences = [plan.list_sequences(rank) for rank in range(plan.ranks)]
    rank_passes: list[list[TeacherPass]] = [[] for _ in rank_sequences]

    # Every rank takes part in every pass, because a model with experts communicates in each one.
    for teacher in np.unique(teachers[teachers != NO_TEACHER]).tolist():
        micro_batches = []
        for sequences in rank_sequences:
            rows = [row for row, i in enumerate(sequences) if teachers[i] == teacher]
            micro_batches.append(_micro_batches(seen, sequences, rows, settings))

        # Ranks with fewer micro-batches run empty ones.
        count = max(map(len, micro_batches))
        for passes, own in zip(rank_passes, micro_batches, strict=True):
            passes.append(TeacherPass(teacher, own + [[]] * (count - len(own))))

    sharing = None if plan.prefixes is None else plan.prefixes.sharing
    return [
        RankTeachers(passes, None if views is None else views.take(sequences), sharing)
        for passes, sequences in zip(rank_passes, rank_sequences, strict=True)
    ]


def _micro_batches(
    samples: TrainingSamples, sequences: Sequence[int], rows: Sequence[int], settings: TrainerConfig
) -> list[list[int]]:
    """Distribute some rows of a rank over micro-batches.

    Args:
        samples: all samples.
        sequences: indices in ``samples`` by row.
        rows: the rows.
        settings: settings of the trainer.
    """
    if not rows:
        return []
    plan, _ = schedule_sequences(samples, [sequences[row] for row in rows], settings, ranks=1)
    return [[rows[i] for i in micro_batch] for micro_batch in plan.micro_batches[0]]
