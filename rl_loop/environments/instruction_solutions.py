"""Texts of the scripted policy that satisfy IFEval's constraints.

A solution takes a text and the arguments of its constraint, and returns a changed text. Solutions are
applied in the order of this file: those that add words come before those that wrap or convert the
whole text. Constraints that a plain text satisfies leave it unchanged. A few combinations are
impossible in this way. Prompts contain only constraints whose solutions were checked together.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol


class ConstraintSolution(Protocol):
    """Function that changes a text so that it satisfies one constraint."""

    def __call__(self, text: str, /, **arguments: Any) -> str: ...


SOLUTIONS: dict[str, ConstraintSolution] = {}
"""Solutions by the name of the constraint, in the order of application."""


def solution[Function: Callable[..., str]](constraint: str) -> Callable[[Function], Function]:
    """Return a decorator that registers the solution of a constraint."""

    def register(function: Function) -> Function:
        SOLUTIONS[constraint] = function
        return function

    return register


def write_solution(topic: str, constraints: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """Return a text about ``topic`` that satisfies constraints, given as (name, arguments)."""
    # SOLUTIONS has the order in which this file registers the solutions.
    order = list(SOLUTIONS)
    text = f"This is a note about {topic}."
    for name, arguments in sorted(constraints, key=lambda constraint: order.index(constraint[0])):
        text = SOLUTIONS[name](text, **arguments)
    return text


def _least(count: int, relation: str) -> int:
    """Return the smallest number of occurrences that satisfies a constraint."""
    # Zero occurrences satisfy "less than".
    return count if relation == "at least" else 0


@solution("detectable_format:constrained_response")
def _say_yes(text: str, **_: Any) -> str:
    return "My answer is yes."


@solution("keywords:existence")
def _append_keywords(text: str, keywords: list[str], **_: Any) -> str:
    return f"{text} {' '.join(keywords)}"


@solution("keywords:frequency")
def _repeat_keyword(text: str, keyword: str, frequency: int, relation: str) -> str:
    return text + f" {keyword}" * _least(frequency, relation)


@solution("keywords:forbidden_words")
def _avoid_words(text: str, **_: Any) -> str:
    return text


@solution("keywords:letter_frequency")
def _repeat_letter(text: str, letter: str, let_frequency: int, let_relation: str) -> str:
    return text + f" {letter}" * _least(let_frequency, let_relation)


@solution("length_constraints:number_words")
def _append_words(text: str, num_words: int, relation: str) -> str:
    return text + " more" * _least(num_words, relation)


@solution("length_constraints:number_paragraphs")
def _separate_paragraphs_by_stars(text: str, num_paragraphs: int) -> str:
    return "\n***\n".join([text] * num_paragraphs)


@solution("length_constraints:nth_paragraph_first_word")
def _begin_paragraph_with(
    text: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> str:
    paragraphs = []
    for number in range(1, num_paragraphs + 1):
        # IFEval also asks for the paragraph behind the last one, which no text has.
        paragraphs.append(f"{first_word} {text}" if number == nth_paragraph else text)
    return "\n\n".join(paragraphs)


@solution("detectable_content:number_placeholders")
def _append_placeholders(text: str, num_placeholders: int) -> str:
    return text + " [name]" * num_placeholders


@solution("detectable_format:number_bullet_lists")
def _append_bullets(text: str, num_bullets: int) -> str:
    return text + "\n* so" * num_bullets


@solution("detectable_format:number_highlighted_sections")
def _append_highlights(text: str, num_highlights: int) -> str:
    return text + " *so*" * num_highlights


@solution("detectable_format:multiple_sections")
def _repeat_in_sections(text: str, section_spliter: str, num_sections: int) -> str:
    return "\n".join(f"{section_spliter} {number}\n{text}" for number in range(1, num_sections + 1))


@solution("detectable_content:postscript")
def _append_postscript(text: str, postscript_marker: str) -> str:
    return f"{text}\n{postscript_marker} so"


@solution("detectable_format:title")
def _put_title_first(text: str, **_: Any) -> str:
    return f"<<so>>\n{text}"


@solution("combination:two_responses")
def _respond_twice(text: str, **_: Any) -> str:
    return f"{text}\n******\nor {text}"


@solution("detectable_format:json_format")
def _wrap_in_json(text: str, **_: Any) -> str:
    return f'["{text}"]'


@solution("startend:end_checker")
def _end_with(text: str, end_phrase: str) -> str:
    return f"{text} {end_phrase}"


@solution("change_case:english_lowercase")
def _lower(text: str, **_: Any) -> str:
    return text.lower()


@solution("change_case:english_capital")
def _upper(text: str, **_: Any) -> str:
    return text.upper()


@solution("punctuation:no_comma")
def _remove_commas(text: str, **_: Any) -> str:
    return text.replace(",", "")


@solution("startend:quotation")
def _quote(text: str, **_: Any) -> str:
    return f'"{text}"'
