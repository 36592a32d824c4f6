"""The checks. Each takes an examination and returns its result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rl_loop.certify import faults
from rl_loop.certify.certificate import Cause, CheckResult, Sight, Status
from rl_loop.certify.diagnosis import Explanation, explain
from rl_loop.certify.examination import TOP, Examination, Which, gap, joined
from rl_loop.certify.faults import Fault
from rl_loop.certify.harmony_tokens import (
    CONVERSATION,
    QUOTING,
    HarmonyMessage,
    describe_difference,
)
from rl_loop.certify.model import BEACON
from rl_loop.certify.reference import EXACT, Reference, Variant, combined
from rl_loop.certify.subject import NotOffered, checked_scores
from rl_loop.certify.texts import CONTINUATION, PROMPTS, Text

QUANTILES = (0.5, 0.95, 0.99)
SURE_MARGIN = {"fp32": 1e-3, "bf16": 0.5}
"""By how much a router's choice must be clear, in logits, for it to be asked of a subject."""
ROUTES_AGREEING = 0.98
"""Share of clear choices that a subject must share."""

TITLES = {
    "agreement": "log-probs of every position and class of token",
    "packing": "sequences in one row do not see one another",
    "routes returned": "routed experts that come back",
    "routes given": "routed experts that are given (routing replay)",
    "harmony": "Harmony's special tokens",
    "decoding": "tokens that are decoded one by one, across the window's edge",
    "determinism": "the same numbers again, alone and among others",
    "gradients": "sinks in the backward pass, and all other gradients",
    "update": "an update of all weights, and back",
}
"""What is checked, in a few words."""


# -- log-probs -------------------------------------------------------------------------------------


def check_agreement(exam: Examination) -> CheckResult:
    """Compare log-probs of all texts, and find out which faults explain what differs."""
    title = TITLES["agreement"]
    texts = exam.texts.all
    answered = exam.log_probs(texts)
    gaps = (answered - exam.expected(texts, EXACT)).abs()
    noise = exam.noise(texts)
    table = _gap_table(exam, gaps, noise)

    # A fault of few tokens is lost in the mean of all: every kind of text is judged by itself.
    groups = (exam.texts.short, exam.texts.window, exam.texts.long)
    apart = [group for group in groups if not _agrees(exam, group, EXACT)]
    if not apart:
        mean = gap(answered, exam.expected(texts, EXACT))
        summary = (
            f"{len(gaps)} tokens differ by {mean:.1e} nats on average, {gaps.max():.1e} at most"
        )
        return CheckResult("agreement", title, Status.PASSED, summary, table=table)

    explanation = _explain_scores(exam)
    if explanation.is_good:
        exam.explanation = explanation.variant
        exam.found = list(explanation.faults)
    summary = _describe(explanation)
    causes = _causes(explanation)
    return CheckResult("agreement", title, Status.FAILED, summary, causes, table=table)


def _agrees(exam: Examination, texts: Sequence[Text], variant: Variant) -> bool:
    """Whether precision explains how far the subject is from a variant."""
    noise = exam.noise(texts)
    answered = exam.log_probs(texts)
    expected = exam.expected(texts, variant)
    is_close = gap(answered, expected) <= exam.mean_limit(noise)

    # The largest gaps stand for faults of few tokens. Routers that choose between equals make
    # large ones, too, so they are compared with the largest of the reference's own.
    count = max(TOP // 2, len(noise) // 50)
    gaps = (answered - expected).abs()
    largest = gaps.topk(min(count, len(gaps))).values.median()
    expected_largest = noise.topk(min(count, len(gaps))).values.median()
    allowed = max(3 * float(expected_largest), exam.limit(noise))
    return is_close and float(largest) <= allowed


def _explain_scores(exam: Examination) -> Explanation:
    """Find the faults that explain the scores of all texts."""
    candidates = [fault for check in FORWARD for fault in check.faults_of(exam)]

    # The long texts take most of the time: they are looked at with what is left of the faults.
    near = [*exam.texts.short, *exam.texts.window]
    start = EXACT
    found: tuple[Fault, ...] = ()
    before = gap(exam.log_probs(exam.texts.all), exam.expected(exam.texts.all, EXACT))
    if not _agrees(exam, near, EXACT):
        explanation = explain(
            exam.log_probs(near),
            lambda variant: exam.expected(near, variant),
            candidates,
            _strict_limit(exam, near),
            EXACT,
        )
        start = explanation.variant
        found = explanation.faults
    if not _agrees(exam, exam.texts.long, start):
        far = explain(
            exam.log_probs(exam.texts.long),
            lambda variant: exam.expected(exam.texts.long, variant),
            [*faults.YARN, *faults.WINDOW],
            _strict_limit(exam, exam.texts.long),
            start,
        )
        start = far.variant
        found = (*found, *far.faults)

    after = gap(exam.log_probs(exam.texts.all), exam.expected(exam.texts.all, start))
    groups = (exam.texts.short, exam.texts.window, exam.texts.long)
    is_complete = all(_agrees(exam, group, start) for group in groups)
    return Explanation(found, start, before, after, is_complete)


def _strict_limit(exam: Examination, texts: Sequence[Text]) -> float:
    """Return the mean gap that the reference's own precision has: below it nothing is explained."""
    return max(exam.mean_limit(exam.noise(texts)) / 2, 1e-12)


def _describe(explanation: Explanation) -> str:
    """Say in a sentence what explains how much."""
    distance = f"tokens differ by {explanation.before:.1e} nats on average"
    if not explanation.faults or not explanation.is_good:
        return f"{distance}, and no known fault explains it"
    names = " and ".join(fault.name for fault in explanation.faults)
    if explanation.is_complete:
        return f"{distance}, and by {explanation.after:.1e} from the reference in which {names}"
    return (
        f"{distance}; {names} would explain a part and leaves {explanation.after:.1e}, "
        "so there is something else, too"
    )


def _causes(explanation: Explanation) -> tuple[Cause, ...]:
    if not explanation.is_good:
        return ()
    return tuple(Cause(fault.name, fault.source) for fault in explanation.faults)


def _gap_table(exam: Examination, gaps: Tensor, noise: Tensor) -> tuple[tuple[str, ...], ...]:
    """Make the table of gaps by position and class of token."""
    positions = torch.cat([torch.arange(1, len(text.ids)) for text in exam.texts.all])
    labels = torch.cat([torch.tensor(text.ids[1:]) for text in exam.texts.all])
    special = torch.isin(labels, torch.tensor(exam.texts.special_ids, dtype=torch.long))
    config = exam.weights.config
    window, length = config.sliding_window, config.yarn_original_length

    groups = {
        "all": torch.ones_like(special),
        f"position 1 to {window - 1}": positions < window,
        f"position {window} to {length - 1}": (positions >= window) & (positions < length),
        f"position {length} and on": positions >= length,
        "special tokens": special,
        "other tokens": ~special & (labels != BEACON),
    }
    rows: list[tuple[str, ...]] = [
        ("", "tokens", "mean", "p50", "p95", "p99", "max", "mean in its precision")
    ]
    for name, members in groups.items():
        if not members.any():
            continue
        chosen = gaps[members]
        quantiles = [float(chosen.quantile(q)) for q in QUANTILES]
        figures = (float(chosen.mean()), *quantiles, float(chosen.max()))
        numbers = [f"{figure:.1e}" for figure in (*figures, float(noise[members].mean()))]
        rows.append((name, str(len(chosen)), *numbers))
    return tuple(rows)


@dataclass(frozen=True)
class ForwardCheck:
    """A kind of fault that shows in scores."""

    name: str
    title: str
    kind: str
    """Of the texts: an attribute of Texts."""
    faults: tuple[Fault, ...] = ()

    def faults_of(self, exam: Examination) -> tuple[Fault, ...]:
        """Return the faults that a model of this shape can have."""
        if self.name == "orientation":
            return faults.orientation_faults(exam.weights.config)
        return self.faults

    def __call__(self, exam: Examination) -> CheckResult:
        """Look for each of the faults where it would show most."""
        texts = getattr(exam.texts, self.kind)
        mine = self.faults_of(exam)
        own = [fault for fault in exam.found if fault in mine]
        if own:
            sights = exam.sights(mine, texts, EXACT)
            names = " and ".join(fault.name for fault in own)
            causes = tuple(Cause(fault.name, fault.source) for fault in own)
            return CheckResult(self.name, self.title, Status.FAILED, names, causes, sights)

        sights = exam.sights(mine, texts, exam.explanation)
        beside = " beside what was found elsewhere" if exam.found else ""
        return _judged(self.name, self.title, sights, beside)


def _judged(name: str, title: str, sights: tuple[Sight, ...], beside: str = "") -> CheckResult:
    """Return the result that sights have when no fault was named."""
    visible = [sight for sight in sights if sight.is_visible]
    if not visible:
        reason = "in this precision, with these weights, none of the faults would show"
        return CheckResult(name, title, Status.NOT_VISIBLE, reason, sights=sights)

    worst = max(visible, key=lambda sight: sight.deviation / sight.limit)
    if worst.deviation > worst.limit:
        summary = (
            f"where '{worst.fault}' would show, tokens differ by {worst.deviation:.1e} nats, and "
            f"precision explains {worst.limit:.1e}; no known fault gives these numbers{beside}"
        )
        return CheckResult(name, title, Status.FAILED, summary, sights=sights)

    least = min(visible, key=lambda sight: sight.visible / sight.limit)
    summary = (
        f"{len(visible)} of {len(sights)} faults would show, by {least.visible:.1e} nats or more "
        f"where {least.limit:.1e} is the limit; found is {worst.deviation:.1e} at most{beside}"
    )
    return CheckResult(name, title, Status.PASSED, summary, sights=sights)


FORWARD = (
    ForwardCheck("window", "which keys a window layer sees", "window", faults.WINDOW),
    ForwardCheck("sinks", "sinks in the forward pass", "short", faults.SINKS),
    ForwardCheck("yarn", "rotary positions, beyond YaRN's original length", "long", faults.YARN),
    ForwardCheck("router", "the router: its bias and its softmax", "short", faults.ROUTER),
    ForwardCheck("activation", "the experts' clamped activation", "short", faults.ACTIVATION),
    ForwardCheck("interleaving", "gate and up in turn", "short", faults.INTERLEAVING),
    ForwardCheck("orientation", "square weights the right way round", "short"),
    ForwardCheck("biases", "biases of attention and experts", "short", faults.BIASES),
)


def check_packing(exam: Examination) -> CheckResult:
    """Compare sequences that lie in one row with the same ones alone."""
    title = TITLES["packing"]
    texts = [*exam.texts.short, *exam.texts.window]
    ids = [text.ids for text in texts]
    scores = checked_scores(exam.subject, exam.subject.score_packed(ids), ids)
    answered = joined([scored.log_probs for scored in scores])

    row = [token for text in ids for token in text]
    starts = [sum(len(text) for text in ids[:i]) for i in range(len(ids))]

    def evaluate(variant: Variant) -> Tensor:
        if not variant.leaky_packing:
            return exam.expected(texts, variant)
        whole = exam.exact.evaluate(row, variant, starts=starts).log_probs
        pieces = []
        for start, text in zip(starts, ids, strict=True):
            pieces.append(whole[start : start + len(text) - 1])
        return torch.cat(pieces)

    noise = exam.noise(texts)
    return _explained(
        exam, "packing", title, answered, evaluate, faults.PACKING, noise, faults.PACKING
    )


def _explained(
    exam: Examination,
    name: str,
    title: str,
    answered: Tensor,
    evaluate: Callable[[Variant], Tensor],
    candidates: Sequence[Fault],
    noise: Tensor,
    shown: Sequence[Fault],
    top: int = TOP,
) -> CheckResult:
    """Return the result of log-probs that are not plain scores: look, and explain what is seen."""
    # A fault of the code is there whatever the weights; one of the weights may be gone by now.
    start = min((EXACT, exam.explanation), key=lambda variant: gap(answered, evaluate(variant)))
    expected = evaluate(start)

    def with_fault(fault: Fault) -> Tensor:
        return evaluate(combined(start, fault.variant))

    sights = exam.look(shown, with_fault, answered, expected, noise, top)
    result = _judged(name, title, sights)
    is_close = gap(answered, expected) <= exam.mean_limit(noise)
    if result.status is not Status.FAILED and is_close:
        return result

    explanation = explain(answered, evaluate, candidates, exam.mean_limit(noise) / 2, start)
    return CheckResult(
        name, title, Status.FAILED, _describe(explanation), _causes(explanation), sights
    )


# -- routes ----------------------------------------------------------------------------------------


def check_returned_routes(exam: Examination) -> CheckResult:
    """Compare the experts that the subject says it used with those that the model uses."""
    title = TITLES["routes returned"]
    texts = [*exam.texts.short, *exam.texts.window]
    returned = [scored.routes for scored in exam.scored(texts)]
    if any(routes is None for routes in returned):
        raise NotOffered(f"{exam.subject.name} does not return routed experts")

    config = exam.weights.config
    agreeing = compared = 0
    for routes, text in zip(returned, texts, strict=True):
        expected = exam.evaluated(text, exam.explanation)
        answered = np.asarray(routes)
        shape = (len(text.ids) - 1, config.num_layers, config.experts_per_token)
        if answered.shape != shape:
            summary = f"routes have the shape {answered.shape}, expected {shape}"
            return CheckResult("routes returned", title, Status.FAILED, summary)
        same = np.sort(answered, -1) == np.sort(expected.routes.numpy(), -1)
        is_clear = expected.margins.numpy() > SURE_MARGIN[exam.precision]
        agreeing += int((same.all(-1) & is_clear).sum())
        compared += int(is_clear.sum())

    share = agreeing / max(compared, 1)
    summary = f"{agreeing} of {compared} clear choices of routers are the reference's ({share:.1%})"
    if share >= ROUTES_AGREEING:
        return CheckResult("routes returned", title, Status.PASSED, summary)
    causes = _route_causes(exam, texts, [np.asarray(routes) for routes in returned])
    return CheckResult("routes returned", title, Status.FAILED, summary, causes)


def _route_causes(
    exam: Examination, texts: Sequence[Text], returned: Sequence[np.ndarray]
) -> tuple[Cause, ...]:
    """Name what is wrong with routes."""
    if not any(routes.any() for routes in returned):
        source = "SGLang with the MoE backend triton_kernel: docs/sglang.md"
        return (Cause("every route that comes back is zero", source),)

    expected = [exam.evaluated(text, exam.explanation).routes.numpy() for text in texts]

    def share(change: Callable[[np.ndarray], np.ndarray]) -> float:
        """Return how many routes are right once they are changed so."""
        same = []
        for answered, wanted in zip(returned, expected, strict=True):
            is_equal = np.sort(change(answered), -1) == np.sort(wanted, -1)
            same.append(is_equal.all(-1).mean())
        return float(np.mean(same))

    if share(lambda routes: np.roll(routes, 1, axis=0)) > 0.8:
        return (Cause("routes come back one token too early"),)
    if share(lambda routes: np.roll(routes, -1, axis=0)) > 0.8:
        return (Cause("routes come back one token too late"),)
    if share(lambda routes: routes[:, ::-1]) > 0.8:
        return (Cause("routes come back in the wrong order of layers"),)
    return ()


def check_given_routes(exam: Examination) -> CheckResult:
    """Give other experts than the router would choose, and see whether they are taken."""
    title = TITLES["routes given"]
    texts = exam.texts.short
    ids = [text.ids for text in texts]
    experts = exam.weights.config.num_experts
    routes = [(exam.evaluated(text).routes + 1) % experts for text in texts]
    scores = checked_scores(
        exam.subject, exam.subject.score_with_routes(ids, [r.numpy() for r in routes]), ids
    )
    answered = joined([scored.log_probs for scored in scores])

    def expected(reference: Reference, given: bool, variant: Variant) -> Tensor:
        pieces = []
        for text, route in zip(ids, routes, strict=True):
            chosen = route if given else None
            pieces.append(reference.evaluate(text, variant, routes=chosen).log_probs)
        return torch.cat(pieces)

    wanted = expected(exam.exact, True, exam.explanation)
    noise = (expected(exam.rounded, True, EXACT) - expected(exam.exact, True, EXACT)).abs()
    distance = gap(answered, wanted)
    limit = exam.mean_limit(noise)
    summary = f"tokens differ by {distance:.1e} nats on average, precision explains {limit:.1e}"
    if distance <= limit:
        return CheckResult("routes given", title, Status.PASSED, summary)
    causes: tuple[Cause, ...] = ()
    if gap(answered, expected(exam.exact, False, exam.explanation)) <= limit:
        causes = (Cause("routes that are given are ignored"),)
    return CheckResult("routes given", title, Status.FAILED, summary, causes)


# -- tokens ----------------------------------------------------------------------------------------


def check_harmony(exam: Examination) -> CheckResult:
    """Compare the ids of a conversation with a tool call with those of openai-harmony."""
    title = TITLES["harmony"]
    if exam.vocabulary is None:
        raise NotOffered(f"{exam.first_directory} has a vocabulary that is not known here")

    done = []
    wrong = []
    attempts: list[tuple[str, Callable[[], list[int]], tuple[HarmonyMessage, ...]]] = [
        ("a tool call", lambda: exam.subject.render(CONVERSATION), CONVERSATION),
        ("a tool that quotes", lambda: exam.subject.render(QUOTING), QUOTING),
        (
            "the text of a tool call",
            lambda: exam.subject.tokenize("".join(message.text for message in CONVERSATION)),
            CONVERSATION,
        ),
    ]
    for name, answer, messages in attempts:
        try:
            ids = answer()
        except NotOffered:
            continue
        done.append(name)
        difference = describe_difference(messages, ids, exam.vocabulary)
        if difference is not None:
            wrong.append(difference)

    if not done:
        raise NotOffered(f"{exam.subject.name} offers neither rendering nor tokenizing")
    if not wrong:
        summary = f"{', '.join(done)}: the ids are those of openai-harmony"
        return CheckResult("harmony", title, Status.PASSED, summary)
    source = "openai/harmony#27, openai/harmony#53"
    causes = tuple(Cause(difference, source) for difference in dict.fromkeys(wrong))
    return CheckResult("harmony", title, Status.FAILED, wrong[0], causes)


# -- generation ------------------------------------------------------------------------------------


def check_decoding(exam: Examination) -> CheckResult:
    """Let texts be continued across the window's edge, and score what came."""
    title = TITLES["decoding"]
    texts = []
    answered = []
    for prompt in exam.texts.prompts:
        generated = exam.subject.generate(prompt.ids, CONTINUATION)
        ids = tuple(int(token) for token in generated.ids)
        vocabulary_size = exam.weights.config.vocab_size
        if len(ids) != CONTINUATION or not all(0 <= token < vocabulary_size for token in ids):
            summary = f"{CONTINUATION} tokens were asked for, {len(ids)} came: {ids[:4]}"
            return CheckResult("decoding", title, Status.FAILED, summary)
        texts.append(Text("generated", prompt.ids + ids))
        answered.append(generated.log_probs)

    def evaluate(variant: Variant, reference: Reference | None = None) -> Tensor:
        pieces = []
        for text in texts:
            length = len(text.ids) - CONTINUATION
            scored = (reference or exam.exact).evaluate(text.ids, variant, prompt_length=length)
            pieces.append(scored.log_probs[-CONTINUATION:])
        return torch.cat(pieces)

    noise = (evaluate(EXACT, exam.rounded) - evaluate(EXACT)).abs()
    if any(len(log_probs) != CONTINUATION for log_probs in answered):
        return _greedy_result(exam, title, texts, noise)
    candidates = [*faults.DECODING, *faults.SINKS, *faults.WINDOW, *faults.YARN]
    return _explained(
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
    exam: Examination, title: str, texts: Sequence[Text], noise: Tensor
) -> CheckResult:
    """Judge continuations without log-probs: were they the most likely ones?"""
    worse = []
    for text in texts:
        evaluated = exam.exact.evaluate(text.ids, exam.explanation)
        worse.append((evaluated.best - evaluated.log_probs)[-CONTINUATION:])
    largest = float(torch.cat(worse).max())
    limit = max(exam.limit(noise), 2 * float(noise.max()))
    summary = f"no token is more than {largest:.1e} nats less likely than the likeliest one"
    status = Status.PASSED if largest <= limit else Status.FAILED
    return CheckResult("decoding", title, status, summary)


def check_determinism(exam: Examination) -> CheckResult:
    """Score the same texts again, one by one and among others."""
    title = TITLES["determinism"]
    texts = [*exam.texts.short, *exam.texts.window]
    ids = [text.ids for text in texts]
    first = exam.log_probs(texts)
    alone = []
    for text in ids:
        (scored,) = checked_scores(exam.subject, exam.subject.score([text]), [text])
        alone.append(scored.log_probs)
    backwards = checked_scores(exam.subject, exam.subject.score(ids[::-1]), ids[::-1])[::-1]

    differences = {
        "alone": (joined(alone) - first).abs(),
        "in another order": (joined([s.log_probs for s in backwards]) - first).abs(),
    }
    noise = exam.noise(texts)
    limit = 0.0 if exam.subject.is_deterministic else exam.mean_limit(noise)
    is_equal = {name: not bool(gaps.any()) for name, gaps in differences.items()}
    figures = ", ".join(
        f"{name} equal bits" if is_equal[name] else f"{name} {gaps.mean():.1e} nats on average"
        for name, gaps in differences.items()
    )
    worst = max(float(gaps.mean()) for gaps in differences.values())
    if worst <= limit:
        return CheckResult("determinism", title, Status.PASSED, figures)
    summary = f"{figures}; allowed are {limit:.1e}"
    source = ""
    if exam.subject.is_deterministic:
        source = "a deterministic mode that is none: sgl-project/sglang#19431"
    cause = Cause("the same text has other log-probs from time to time", source)
    return CheckResult("determinism", title, Status.FAILED, summary, (cause,))


# -- training --------------------------------------------------------------------------------------

GRADIENT_FLOORS = {"fp32": 1e-4, "bf16": 2e-2}
"""Relative error of a tensor's gradient that is always allowed."""
MOVED_TENSORS = 4
"""Tensors in which a fault of the backward pass is looked for."""


def check_gradients(exam: Examination) -> CheckResult:
    """Compare the gradients of all tensors, sinks among them."""
    title = TITLES["gradients"]
    texts = [*exam.texts.short, exam.texts.window[0]]
    answered = exam.subject.gradients([text.ids for text in texts])
    expected = exam.gradients(texts, exam.explanation)
    missing = sorted(set(expected) - set(answered))
    if missing:
        summary = f"{len(missing)} tensors have no gradient, such as {missing[0]}"
        cause = _missing_gradients(missing)
        return CheckResult("gradients", title, Status.FAILED, summary, cause)

    rounded = exam.gradients(texts, EXACT, "rounded")
    own_error = _relative(rounded, exam.gradients(texts, EXACT))
    errors = _relative(answered, expected)
    known = (*faults.SINK_GRADIENTS, *faults.OTHER_GRADIENTS)
    with_fault = {}
    sights = []
    for fault in known:
        with_fault[fault] = exam.gradients(texts, combined(exam.explanation, fault.variant))
        moved = _relative(with_fault[fault], expected)
        names = sorted(moved, key=lambda name: -moved[name])[:MOVED_TENSORS]
        limit = max(_gradient_limit(exam, own_error[name]) for name in names)
        visible = float(np.median([moved[name] for name in names]))
        deviation = float(np.median([errors[name] for name in names]))
        sights.append(
            Sight(fault.name, fault.source, visible, deviation, limit, visible >= 1.5 * limit)
        )

    table = _gradient_table(exam, errors, own_error)
    wrong = [name for name in errors if errors[name] > _gradient_limit(exam, own_error[name])]
    worst = max(errors, key=lambda name: errors[name])
    if not wrong:
        summary = f"{len(errors)} tensors, relative error {errors[worst]:.1e} at most ({worst})"
        return CheckResult(
            "gradients", title, Status.PASSED, summary, sights=tuple(sights), table=table
        )

    distances = {fault: _mean_error(answered, with_fault[fault]) for fault in known}
    closest = min(distances, key=lambda fault: distances[fault])
    summary = f"{len(wrong)} of {len(errors)} tensors are off, {worst} by {errors[worst]:.1e}"
    causes: tuple[Cause, ...] = ()
    if distances[closest] < 0.3 * _mean_error(answered, expected):
        causes = (Cause(closest.name, closest.source),)
    return CheckResult("gradients", title, Status.FAILED, summary, causes, tuple(sights), table)


def _missing_gradients(missing: Sequence[str]) -> tuple[Cause, ...]:
    if all(name.endswith("sinks") for name in missing):
        dropped = faults.SINK_GRADIENTS[0]
        return (Cause(dropped.name, dropped.source),)
    return ()


def _relative(answered: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative error of every tensor."""
    errors = {}
    for name, wanted in expected.items():
        given = answered[name].detach().to("cpu", torch.float64)
        difference = (given - wanted.double()).norm()
        errors[name] = float(difference / wanted.double().norm().clamp(min=1e-30))
    return errors


def _mean_error(answered: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the mean relative error, of no tensor more than 2: a gradient that should be zero
    has no relative error."""
    return float(np.mean([min(error, 2.0) for error in _relative(answered, expected).values()]))


def _gradient_limit(exam: Examination, own_error: float) -> float:
    return max(3 * own_error, GRADIENT_FLOORS[exam.precision])


def _gradient_table(
    exam: Examination, errors: dict[str, float], own: dict[str, float]
) -> tuple[tuple[str, ...], ...]:
    """Make the table of the largest relative error by kind of tensor."""
    kinds: dict[str, list[str]] = {}
    for name in errors:
        kind = ".".join(part for part in name.split(".")[1:] if not part.isdigit())
        kinds.setdefault(kind, []).append(name)
    rows: list[tuple[str, ...]] = [("", "relative error", "in its precision")]
    for kind, names in kinds.items():
        largest = max(errors[name] for name in names)
        rows.append((kind, f"{largest:.1e}", f"{max(own[name] for name in names):.1e}"))
    return tuple(rows)


# -- weights ---------------------------------------------------------------------------------------


def check_update(exam: Examination) -> CheckResult:
    """Give the subject the second set of weights, look whether it has all of it, and go back."""
    title = TITLES["update"]
    if exam.second is None:
        raise NotOffered("there is no second set of weights")
    texts = [*exam.texts.short, exam.texts.window[0]]
    before = exam.log_probs(texts)

    exam.subject.update(exam.second.directory)
    ids = [text.ids for text in texts]
    scores = checked_scores(exam.subject, exam.subject.score(ids), ids)
    updated = joined([scored.log_probs for scored in scores])
    exam.subject.update(exam.first_directory)
    again = checked_scores(exam.subject, exam.subject.score(ids), ids)

    def evaluate(variant: Variant, which: Which = "updated") -> Tensor:
        return exam.expected(texts, variant, which)

    candidates = faults.update_faults(exam.weights.config)
    noise = (evaluate(EXACT, "updated_rounded") - evaluate(EXACT)).abs()
    result = _explained(
        exam, "update", title, updated, evaluate, candidates, noise, _sample(candidates)
    )

    # What was wrong with the weights at the beginning may have been mended on the way.
    returned = joined([scored.log_probs for scored in again])
    back = min(gap(returned, before), gap(returned, exam.expected(texts, EXACT)))
    summary = f"{result.summary}; back at the first weights tokens differ by {back:.1e} nats"
    result = replace(result, summary=summary)
    if result.status is Status.PASSED and back > exam.mean_limit(noise):
        cause = Cause("the second update did not bring the first weights back")
        result = replace(result, status=Status.FAILED, causes=(cause,))
    return result


def _sample(candidates: Sequence[Fault]) -> list[Fault]:
    """Leave out most of the experts: that each would show is computed for one of a layer."""
    shown = []
    layers = set()
    for fault in candidates:
        if fault.variant.stale_expert is not None:
            layer = fault.variant.stale_expert[0]
            if layer in layers:
                continue
            layers.add(layer)
        shown.append(fault)
    return shown


CHECKS: dict[str, Callable[[Examination], CheckResult]] = {
    "agreement": check_agreement,
    **{check.name: check for check in FORWARD},
    "packing": check_packing,
    "gradients": check_gradients,
    "harmony": check_harmony,
    "routes returned": check_returned_routes,
    "routes given": check_given_routes,
    "decoding": check_decoding,
    "determinism": check_determinism,
    "update": check_update,
}
"""In their order: the first one finds the faults that the others are told of."""
TITLES |= {check.name: check.title for check in FORWARD}
