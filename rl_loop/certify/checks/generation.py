"""Checks of decoding and determinism."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_loop.certify import faults
from rl_loop.certify.certificate import CheckOutcome, CheckResult, DiagnosedFault
from rl_loop.certify.checks.titles import TITLES
from rl_loop.certify.checks.verdict import explain_answers
from rl_loop.certify.examination import Examination, joined
from rl_loop.certify.subject import checked_scores
from rl_loop.certify.texts import CONTINUATION, PROMPTS, ProbeText
from rl_loop.certify.variants import EXACT, FaultyVariant, ReferenceModel


def check_decoding(exam: Examination) -> CheckResult:
    """Let the subject continue prompts across the window's edge, and check the log-probs."""
    title = TITLES["decoding"]
    texts = []
    answered = []
    for prompt in exam.texts.prompts:
        generated = exam.subject.generate(prompt.ids, CONTINUATION)
        ids = tuple(int(token) for token in generated.ids)
        vocabulary_size = exam.weights.config.vocab_size
        # A server can stop early in spite of the request, or return ids of another vocabulary.
        if len(ids) != CONTINUATION or not all(0 <= token < vocabulary_size for token in ids):
            summary = f"requested {CONTINUATION} tokens, got {len(ids)} or invalid ids: {ids[:4]}"
            return CheckResult("decoding", title, CheckOutcome.FAILED, summary)
        texts.append(ProbeText("generated", prompt.ids + ids))
        answered.append(generated.log_probs)

    def evaluate(variant: FaultyVariant, reference: ReferenceModel | None = None) -> Tensor:
        pieces = []
        for text in texts:
            # Score the tokens that the subject chose: another choice between near-tied tokens is no
            # fault.
            length = len(text.ids) - CONTINUATION
            scored = (reference or exam.exact).evaluate(text.ids, variant, prompt_length=length)
            pieces.append(scored.log_probs[-CONTINUATION:])
        return torch.cat(pieces)

    noise = (evaluate(EXACT, exam.rounded) - evaluate(EXACT)).abs()
    # Log-probs are optional in ``SampledText``.
    if any(len(log_probs) != CONTINUATION for log_probs in answered):
        return _greedy_result(exam, title, texts, noise)
    # Decoding uses other kernels than scoring, so faults that scores do not have are possible.
    candidates = [*faults.DECODING, *faults.SINKS, *faults.WINDOW, *faults.YARN]
    return explain_answers(
        exam,
        "decoding",
        title,
        joined(answered),
        evaluate,
        candidates,
        noise,
        faults.DECODING,
        top=PROMPTS,
    )


def _greedy_result(
    exam: Examination, title: str, texts: Sequence[ProbeText], noise: Tensor
) -> CheckResult:
    """Check continuations without log-probs: each token must be the most likely one."""
    worse = []
    for text in texts:
        evaluated = exam.exact.evaluate(text.ids, exam.explanation)
        worse.append((evaluated.best - evaluated.log_probs)[-CONTINUATION:])
    largest = float(torch.cat(worse).max())
    # The subject's choice and the best token both have an error, so allow it twice.
    limit = max(exam.limit(noise), 2 * float(noise.max()))
    summary = f"every token is within {largest:.1e} nats of the most likely one"
    status = CheckOutcome.PASSED if largest <= limit else CheckOutcome.FAILED
    return CheckResult("decoding", title, status, summary)


def check_determinism(exam: Examination) -> CheckResult:
    """Score the texts again, alone and in other batches."""
    title = TITLES["determinism"]
    texts = [*exam.texts.short, *exam.texts.window]
    ids = [text.ids for text in texts]
    first = exam.log_probs(texts)

    # Different batches show kernels whose results depend on the batch size.
    alone = []
    for text in ids:
        (scored,) = checked_scores(exam.subject, exam.subject.score([text]), [text])
        alone.append(scored.log_probs)
    backwards = checked_scores(exam.subject, exam.subject.score(ids[::-1]), ids[::-1])[::-1]

    differences = {
        "alone": (joined(alone) - first).abs(),
        "in another order": (joined([s.log_probs for s in backwards]) - first).abs(),
    }

    # Deterministic subjects need equal bits, others only the accuracy of their precision.
    noise = exam.noise(texts)
    limit = 0.0 if exam.subject.is_deterministic else exam.mean_limit(noise)

    is_equal = {name: not bool(gaps.any()) for name, gaps in differences.items()}
    figures = ", ".join(
        f"{name} equal bits" if is_equal[name] else f"{name} {gaps.mean():.1e} nats on average"
        for name, gaps in differences.items()
    )
    worst = max(float(gaps.mean()) for gaps in differences.values())
    if worst <= limit:
        return CheckResult("determinism", title, CheckOutcome.PASSED, figures)

    summary = f"{figures}; allowed are {limit:.1e}"
    source = ""
    if exam.subject.is_deterministic:
        source = "a deterministic mode that is not deterministic: sgl-project/sglang#19431"
    cause = DiagnosedFault("log-probs of the same text vary", source)
    return CheckResult("determinism", title, CheckOutcome.FAILED, summary, (cause,))
