"""Checks that sequences in one packed row do not attend to each other."""

import torch
from torch import Tensor

from rl_loop.certify import faults
from rl_loop.certify.check_run import CheckRun, concatenate
from rl_loop.certify.checks.titles import TITLES
from rl_loop.certify.checks.verdict import judge_log_probs
from rl_loop.certify.implementation import checked_scores
from rl_loop.certify.report import CheckResult
from rl_loop.certify.variants import FaultyVariant


def check_packing(check_run: CheckRun) -> CheckResult:
    """Compare scores of sequences in one packed row with their scores alone."""
    title = TITLES["packing"]
    sequences = [*check_run.sequences.short, *check_run.sequences.window]
    ids = [sequence.ids for sequence in sequences]
    scores = checked_scores(
        check_run.implementation, check_run.implementation.score_packed(ids), ids
    )
    actual = concatenate([scored.log_probs for scored in scores])

    row = [token for sequence in ids for token in sequence]
    starts = [sum(len(sequence) for sequence in ids[:i]) for i in range(len(ids))]

    def evaluate(variant: FaultyVariant) -> Tensor:
        # Without a leak a sequence does not depend on its row, so use the results for it alone.
        if not variant.leaky_packing:
            return check_run.expected(sequences, variant)
        packed = check_run.exact.evaluate(row, variant, starts=starts).log_probs
        pieces = []
        for start, sequence in zip(starts, ids, strict=True):
            # Leave out the log-prob of the next sequence's first token, which follows each
            # sequence.
            pieces.append(packed[start : start + len(sequence) - 1])
        return torch.cat(pieces)

    noise = check_run.noise(sequences)
    return judge_log_probs(
        check_run, "packing", title, actual, evaluate, faults.PACKING, noise, faults.PACKING
    )
