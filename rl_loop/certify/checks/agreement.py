"""Compares log-probs of all sequences and finds the faults that explain differences."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_loop.certify import faults
from rl_loop.certify.check_run import TOP, CheckRun, gap
from rl_loop.certify.checks.forward import FORWARD
from rl_loop.certify.checks.titles import TITLES
from rl_loop.certify.checks.verdict import describe, list_causes
from rl_loop.certify.fault_diagnosis import FaultExplanation, explain
from rl_loop.certify.faults import ModelFault
from rl_loop.certify.model import BEACON
from rl_loop.certify.probe_sequences import ProbeSequence
from rl_loop.certify.report import CheckOutcome, CheckResult
from rl_loop.certify.variants import EXACT, FaultyVariant

QUANTILES = (0.5, 0.95, 0.99)


def check_agreement(check_run: CheckRun) -> CheckResult:
    """Compare log-probs of all sequences, and find faults that explain differences."""
    title = TITLES["agreement"]
    sequences = check_run.sequences.all
    actual = check_run.log_probs(sequences)
    gaps = (actual - check_run.expected(sequences, EXACT)).abs()
    noise = check_run.noise(sequences)
    table = _gap_table(check_run, gaps, noise)

    # The overall mean hides a fault of few tokens, so each kind of sequence is judged separately.
    groups = (check_run.sequences.short, check_run.sequences.window, check_run.sequences.long)
    apart = [group for group in groups if not _agrees(check_run, group, EXACT)]
    if not apart:
        mean = gap(actual, check_run.expected(sequences, EXACT))
        summary = (
            f"{len(gaps)} tokens differ by {mean:.1e} nats on average, {gaps.max():.1e} at most"
        )
        return CheckResult("agreement", title, CheckOutcome.PASSED, summary, table=table)

    explanation = _explain_scores(check_run)
    if explanation.is_good:
        # Later checks compare with this variant, so that none reports these faults
        # under another name.
        check_run.explanation = explanation.variant
        check_run.found_faults = list(explanation.faults)
    summary = describe(explanation)
    causes = list_causes(explanation)
    return CheckResult("agreement", title, CheckOutcome.FAILED, summary, causes, table=table)


def _agrees(
    check_run: CheckRun, sequences: Sequence[ProbeSequence], variant: FaultyVariant
) -> bool:
    """Return True if precision explains the gap between the implementation and a variant."""
    noise = check_run.noise(sequences)
    actual = check_run.log_probs(sequences)
    expected = check_run.expected(sequences, variant)
    is_close = gap(actual, expected) <= check_run.mean_limit(noise)

    # The largest gaps show faults of few tokens. Routers with tied choices cause large gaps, too,
    # so compare with the reference's own largest gaps.
    count = max(TOP // 2, len(noise) // 50)
    gaps = (actual - expected).abs()
    largest = gaps.topk(min(count, len(gaps))).values.median()
    expected_largest = noise.topk(min(count, len(gaps))).values.median()
    allowed = max(3 * float(expected_largest), check_run.limit(noise))
    return is_close and float(largest) <= allowed


def _explain_scores(check_run: CheckRun) -> FaultExplanation:
    """Find the faults that explain the scores of all sequences."""
    candidates = [fault for check in FORWARD for fault in check.list_faults(check_run)]

    # Long sequences take most of the time, so evaluate them only with the faults that remain.
    near = [*check_run.sequences.short, *check_run.sequences.window]
    start = EXACT
    causes: tuple[ModelFault, ...] = ()
    before = gap(
        check_run.log_probs(check_run.sequences.all),
        check_run.expected(check_run.sequences.all, EXACT),
    )

    if not _agrees(check_run, near, EXACT):
        explanation = explain(
            check_run.log_probs(near),
            lambda variant: check_run.expected(near, variant),
            candidates,
            _strict_limit(check_run, near),
            EXACT,
        )
        start = explanation.variant
        causes = explanation.faults

    # Only faults of positions (YaRN, windows) are visible in long sequences alone.
    if not _agrees(check_run, check_run.sequences.long, start):
        # The long sequence has the faults of short sequences, too, so continue from these.
        far = explain(
            check_run.log_probs(check_run.sequences.long),
            lambda variant: check_run.expected(check_run.sequences.long, variant),
            [*faults.YARN, *faults.WINDOW],
            _strict_limit(check_run, check_run.sequences.long),
            start,
        )
        start = far.variant
        causes = (*causes, *far.faults)

    after = gap(
        check_run.log_probs(check_run.sequences.all),
        check_run.expected(check_run.sequences.all, start),
    )
    # Judge by the criterion of the check, not by the mean that the search minimizes.
    groups = (check_run.sequences.short, check_run.sequences.window, check_run.sequences.long)
    is_complete = all(_agrees(check_run, group, start) for group in groups)
    return FaultExplanation(causes, start, before, after, is_complete)


def _strict_limit(check_run: CheckRun, sequences: Sequence[ProbeSequence]) -> float:
    """Return half the limit of the mean gap. Below it no explanation is sought."""
    return max(check_run.mean_limit(check_run.noise(sequences)) / 2, 1e-12)


def _gap_table(check_run: CheckRun, gaps: Tensor, noise: Tensor) -> tuple[tuple[str, ...], ...]:
    """Return the table of gaps by position and class of token."""
    # The first token of a sequence has no log-prob.
    positions = torch.cat(
        [torch.arange(1, len(sequence.ids)) for sequence in check_run.sequences.all]
    )
    labels = torch.cat([torch.tensor(sequence.ids[1:]) for sequence in check_run.sequences.all])
    special = torch.isin(labels, torch.tensor(check_run.sequences.special_ids, dtype=torch.long))
    config = check_run.weights.config
    window, length = config.sliding_window, config.yarn_original_length

    groups = {
        "all": torch.ones_like(special),
        f"position 1 to {window - 1}": positions < window,
        f"position {window} to {length - 1}": (positions >= window) & (positions < length),
        f"position {length} and on": positions >= length,
        "special tokens": special,
        # The weights are built around the beacon, so its log-probs are not typical.
        "other tokens": ~special & (labels != BEACON),
    }
    rows: list[tuple[str, ...]] = [
        ("", "tokens", "mean", "p50", "p95", "p99", "max", "mean in its precision")
    ]
    for name, members in groups.items():
        # Without a vocabulary there are no special tokens.
        if not members.any():
            continue
        chosen = gaps[members]
        quantiles = [float(chosen.quantile(q)) for q in QUANTILES]
        statistics = (float(chosen.mean()), *quantiles, float(chosen.max()))
        numbers = [f"{number:.1e}" for number in (*statistics, float(noise[members].mean()))]
        rows.append((name, str(len(chosen)), *numbers))
    return tuple(rows)
