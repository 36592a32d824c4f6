"""Teachers of a trainer rank, and their numbers for the tokens of a step."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from megatron_gptoss.out_of_memory import out_of_memory_explained
from megatron_gptoss.packing import PackedBatch, build_batch
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.scorer import LogProbScorer, alignment
from rl_loop.config.partial_configs import TrainerConfig
from rl_loop.trainer.initial_model import build_teacher
from rl_loop.trainer.rank_inputs import RankInputs
from rl_loop.trainer.teacher_plan import TeacherPass


class Teachers:
    """This rank's parts of all teachers. Every method is collective."""

    def __init__(self, settings: TrainerConfig) -> None:
        """Build the models of ``settings.teachers``, in this order."""
        self.scorers = [LogProbScorer(build_teacher(settings, path)) for path in settings.teachers]
        self._settings = settings

    def log_probs(self, inputs: RankInputs) -> np.ndarray:
        """Return the log-probs of this rank's sequences by their teachers, in nats.

        Returns:
            float32 [tokens]. 0 for the first token of a sequence, NaN for sequences without a
            teacher.
        """
        temperature = self._settings.training_temperature
        if inputs.teachers is None:
            batches = [batch for batches in inputs.pack(alignment()) for batch in batches]
            with out_of_memory_explained(self._settings.memory_inputs):
                values = self.scorers[0].score(batches, temperature)
            return inputs.to_column(values, np.dtype(np.float32))

        column = np.full(inputs.samples.tokens, np.nan, np.float32)
        offsets = inputs.samples.offsets
        for scorer, taken, batches in self._passes(inputs):
            with out_of_memory_explained(self._settings.memory_inputs):
                values = scorer.score(batches, temperature)
            for rows, row_values in zip(taken.micro_batches, values, strict=True):
                labels = row_values.float().cpu().numpy()
                for row, own in zip(rows, _split(labels, inputs, rows), strict=True):
                    column[offsets[row]] = 0
                    column[offsets[row + 1] - len(own) : offsets[row + 1]] = own
        if inputs.teachers.views is not None:
            # Labels of a prompt that the teacher has not seen.
            column[~inputs.samples.loss_mask] = np.nan
        return column

    def add_columns(
        self, packed: Sequence[Sequence[PackedBatch]], inputs: RankInputs, k: int
    ) -> None:
        """Fill the columns of the teachers' k most likely tokens in the micro-batches.

        Args:
            packed: micro-batches of each mini-batch of ``inputs``.
            inputs: sequences of the rank.
            k: number of tokens.
        """
        batches = [batch for mini_batch in packed for batch in mini_batch]
        if inputs.teachers is None:
            for batch, (ids, log_probs) in zip(
                batches, self._top_log_probs(self.scorers[0], batches, k), strict=True
            ):
                batch.teacher_top_ids = ids
                batch.teacher_top_log_probs = log_probs
            return

        places = {}
        for rows, batch in zip(inputs.rows, batches, strict=True):
            batch.teacher_top_ids = torch.zeros(len(batch.labels), k, dtype=torch.int32)
            # Not a number, so that a token without a teacher cannot enter the loss unnoticed.
            batch.teacher_top_log_probs = torch.full((len(batch.labels), k), torch.nan)
            label = 0
            for row in rows:
                label += _label_count(inputs.samples, row)
                places[row] = (batch, label)
        for scorer, taken, scored in self._passes(inputs):
            tops = self._top_log_probs(scorer, scored, k)
            for scored_rows, (ids, log_probs) in zip(taken.micro_batches, tops, strict=True):
                for row, own_ids, own_log_probs in zip(
                    scored_rows,
                    _split(ids, inputs, scored_rows),
                    _split(log_probs, inputs, scored_rows),
                    strict=True,
                ):
                    batch, end = places[row]
                    labels = slice(end - len(own_ids), end)
                    batch.column("teacher_top_ids")[labels] = own_ids
                    batch.column("teacher_top_log_probs")[labels] = own_log_probs
        if inputs.teachers.views is not None:
            for batch in batches:
                batch.column("teacher_top_log_probs")[~batch.loss_mask] = torch.nan

    def _passes(
        self, inputs: RankInputs
    ) -> Iterator[tuple[LogProbScorer, TeacherPass, list[PackedBatch]]]:
        """Yield the scorer, the plan and the micro-batches of every teacher with sequences."""
        assert inputs.teachers is not None
        samples = inputs.teachers.views or inputs.input_samples
        for taken in inputs.teachers.passes:
            batches = [
                build_batch(samples, rows, alignment(), rows, inputs.teachers.sharing)
                for rows in taken.micro_batches
            ]
            yield self.scorers[taken.teacher], taken, batches

    def _top_log_probs(
        self, scorer: LogProbScorer, batches: Sequence[PackedBatch], k: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        with out_of_memory_explained(self._settings.memory_inputs):
            yield from scorer.top_log_probs(batches, k, self._settings.training_temperature)


def _label_count(samples: TrainingSamples, row: int) -> int:
    """Return the number of labels of a sequence. Its first token is not a label."""
    return int(samples.offsets[row + 1] - samples.offsets[row]) - 1


def _split(values: Any, inputs: RankInputs, rows: Sequence[int]) -> list[Any]:
    """Cut the values of a teacher's micro-batch, [labels, ...], into those of each sequence.

    A sequence gets at most the values of as many labels as the policy's sequence has. They are the
    last ones, because sequences of policy and teacher have the same end.
    """
    assert inputs.teachers is not None
    seen = inputs.teachers.views or inputs.samples
    parts, label = [], 0
    for row in rows:
        label += _label_count(seen, row)
        count = min(_label_count(seen, row), _label_count(inputs.samples, row))
        parts.append(values[label - count : label])
    return parts
