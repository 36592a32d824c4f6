"""Compares the token ids of conversations with openai-harmony's."""

from collections.abc import Callable

from rl_loop.certify.check_run import CheckRun
from rl_loop.certify.checks.titles import TITLES
from rl_loop.certify.harmony_tokens import (
    CONVERSATION,
    QUOTING,
    HarmonyMessage,
    describe_difference,
)
from rl_loop.certify.implementation import UnsupportedOperationError
from rl_loop.certify.report import CheckOutcome, CheckResult, DiagnosedFault


def check_harmony(check_run: CheckRun) -> CheckResult:
    """Compare the token ids of a conversation with a tool call with openai-harmony's."""
    title = TITLES["harmony"]
    if check_run.vocabulary is None:
        raise UnsupportedOperationError(f"{check_run.first_directory} has an unknown vocabulary")

    # Any of these operations is enough for a verdict.
    attempts: list[tuple[str, Callable[[], list[int]], tuple[HarmonyMessage, ...]]] = [
        ("a tool call", lambda: check_run.implementation.render(CONVERSATION), CONVERSATION),
        ("a tool that quotes", lambda: check_run.implementation.render(QUOTING), QUOTING),
        # Without QUOTING: in a plain text, quoted names mean the special tokens.
        (
            "the text of a tool call",
            lambda: check_run.implementation.tokenize(
                "".join(message.text for message in CONVERSATION)
            ),
            CONVERSATION,
        ),
    ]

    compared = []
    wrong = []
    for name, operation, messages in attempts:
        try:
            ids = operation()
        except UnsupportedOperationError:
            continue

        compared.append(name)
        difference = describe_difference(messages, ids, check_run.vocabulary)
        if difference is not None:
            wrong.append(difference)

    if not compared:
        raise UnsupportedOperationError(
            f"{check_run.implementation.name} supports neither rendering nor tokenizing"
        )
    if not wrong:
        summary = f"{', '.join(compared)}: the ids equal those of openai-harmony"
        return CheckResult("harmony", title, CheckOutcome.PASSED, summary)

    source = "openai/harmony#27, openai/harmony#53"
    # Several operations can show the same difference.
    causes = tuple(DiagnosedFault(difference, source) for difference in dict.fromkeys(wrong))
    return CheckResult("harmony", title, CheckOutcome.FAILED, wrong[0], causes)
