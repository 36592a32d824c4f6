"""Checks of decoding and determinism."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_loop.certify import faults
from rl_loop.certify.check_run import CheckRun, concatenate
from rl_loop.certify.checks.titles import TITLES
from rl_loop.certify.checks.verdict import judge_log_probs
from rl_loop.certify.implementation import checked_scores
from rl_loop.certify.probe_sequences import CONTINUATION, PROMPTS, ProbeSequence
from rl_loop.certify.report import CheckOutcome, CheckResult, DiagnosedFault
from rl_loop.certify.variants import EXACT, FaultyVariant, ReferenceModel


def check_decoding(check_run: CheckRun) -> CheckResult:
    """Let the implementation continue prompts across the window's edge, and check the log-probs."""
    title = TITLES["decoding"]
    sequences = []
    actual = []
    for prompt in check_run.sequences.prompts:
        generated = check_run.implementation.generate(prompt.ids, CONTINUATION)
        ids = tuple(int(token) for token in generated.ids)
        vocabulary_size = check_run.weights.config.vocab_size
        # A server can stop early in spite of the request, or return ids of another vocabulary.
        if len(ids) != CONTINUATION or not all(0 <= token < vocabulary_size for token in ids):
            summary = f"requested {CONTINUATION} tokens, got {len(ids)} or invalid ids: {ids[:4]}"
            return CheckResult("decoding", title, CheckOutcome.FAILED, summary)
        sequences.append(ProbeSequence("generated", prompt.ids + ids))
        actual.append(generated.log_probs)

    def evaluate(variant: FaultyVariant, reference: ReferenceModel | None = None) -> Tensor:
        pieces = []
        for sequence in sequences:
            # Score the tokens that the implementation chose, because a different choice between
            # tokens of nearly equal probability is not a fault.
            length = len(sequence.ids) - CONTINUATION
            scored = (reference or check_run.exact).evaluate(
                sequence.ids, variant, prompt_length=length
            )
            pieces.append(scored.log_probs[-CONTINUATION:])
        return torch.cat(pieces)

    noise = (evaluate(EXACT, check_run.rounded) - evaluate(EXACT)).abs()
    # Log-probs are optional in ``SampledSequence``.
    if any(len(log_probs) != CONTINUATION for log_probs in actual):
        return _greedy_result(check_run, title, sequences, noise)
    # Decoding uses other kernels than scoring, so faults that scores do not have are possible.
    candidates = [*faults.DECODING, *faults.SINKS, *faults.WINDOW, *faults.YARN]
    return judge_log_probs(
        check_run,
        "decoding",
        title,
        concatenate(actual),
        evaluate,
        candidates,
        noise,
        faults.DECODING,
        top=PROMPTS,
    )


def _greedy_result(
    check_run: CheckRun, title: str, sequences: Sequence[ProbeSequence], noise: Tensor
) -> CheckResult:
    """Check continuations without log-probs: each token must be the most likely one."""
    gaps = []
    for sequence in sequences:
        evaluated = check_run.exact.evaluate(sequence.ids, check_run.explanation)
        gaps.append((evaluated.best - evaluated.log_probs)[-CONTINUATION:])
    largest = float(torch.cat(gaps).max())
    # The implementation's choice and the best token both have an error, so allow it twice.
    limit = max(check_run.limit(noise), 2 * float(noise.max()))
    summary = f"every token is within {largest:.1e} nats of the most likely one"
    status = CheckOutcome.PASSED if largest <= limit else CheckOutcome.FAILED
    return CheckResult("decoding", title, status, summary)


def check_determinism(check_run: CheckRun) -> CheckResult:
    """Score the sequences again, alone and in other batches."""
    title = TITLES["determinism"]
    sequences = [*check_run.sequences.short, *check_run.sequences.window]
    ids = [sequence.ids for sequence in sequences]
    first = check_run.log_probs(sequences)

    # Different batches show kernels whose results depend on the batch size.
    alone = []
    for sequence in ids:
        (scored,) = checked_scores(
            check_run.implementation, check_run.implementation.score([sequence]), [sequence]
        )
        alone.append(scored.log_probs)
    backwards = checked_scores(
        check_run.implementation, check_run.implementation.score(ids[::-1]), ids[::-1]
    )[::-1]

    differences = {
        "alone": (concatenate(alone) - first).abs(),
        "in another order": (concatenate([s.log_probs for s in backwards]) - first).abs(),
    }

    # Deterministic implementations need equal bits, others only the accuracy of their precision.
    noise = check_run.noise(sequences)
    limit = 0.0 if check_run.implementation.is_deterministic else check_run.mean_limit(noise)

    is_equal = {name: not bool(gaps.any()) for name, gaps in differences.items()}
    summary_of_gaps = ", ".join(
        f"{name} equal bits" if is_equal[name] else f"{name} {gaps.mean():.1e} nats on average"
        for name, gaps in differences.items()
    )
    worst = max(float(gaps.mean()) for gaps in differences.values())
    if worst <= limit:
        return CheckResult("determinism", title, CheckOutcome.PASSED, summary_of_gaps)

    summary = f"{summary_of_gaps}; allowed are {limit:.1e}"
    source = ""
    if check_run.implementation.is_deterministic:
        source = "a deterministic mode that is not deterministic: sgl-project/sglang#19431"
    cause = DiagnosedFault("log-probs of the same sequence vary", source)
    return CheckResult("determinism", title, CheckOutcome.FAILED, summary, (cause,))
