"""Writes docs/reference: configuration keys and public API from docstrings, fields of requests.

    python scripts/reference.py            # write the pages
    python scripts/reference.py --check    # exit with status 1 if the pages are outdated

Docstrings of fields become the descriptions of keys, so a key without a docstring is an error.
Functions and classes are read from the source with griffe, without an import.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAliasType, Union, get_args, get_origin

import griffe
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from launch.cluster import ClusterConfig
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.families.registry import FAMILIES
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.config.tinker import TinkerConfig
from rl_loop.gateway.answer_fields import ANSWERS, AnswerFields
from rl_loop.gateway.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    RESPONSES_FIELDS,
    FieldBehavior,
    RequestFields,
)

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs/reference"
NOTICE = "<!-- Made by scripts/reference.py from the docstrings: change those. -->"

API: dict[str, dict[str, list[str]]] = {
    "Kernels: torch only": {
        "gptoss_kernels.sink_attention.api": ["sink_attention"],
        "gptoss_kernels.mxfp4.api": ["quantize", "dequantize", "fake_quantize"],
    },
    "The policy on Megatron-Core": {
        "megatron_gptoss.model": ["build_model"],
        "megatron_gptoss.token_columns": ["Column", "TokenColumns"],
        "megatron_gptoss.samples": ["TrainingSamples"],
        "megatron_gptoss.packing": ["PackedBatch", "pack", "build_batch"],
        "megatron_gptoss.packed_sequence": ["PackedSequence"],
        "megatron_gptoss.scorer": ["LogProbScorer"],
        "megatron_gptoss.trainer": ["PolicyTrainer"],
        "megatron_gptoss.step_results": [
            "LossOutput",
            "PassStatistics",
            "UpdateStatistics",
            "StepStatistics",
        ],
    },
    "Runs": {
        "rl_loop.config.load": ["load_config"],
        "rl_loop.run": ["run_sft", "run_rl"],
        "rl_loop.tracking.progress": ["Progress", "SilentProgress"],
        "rl_loop.tracking.run_directory": ["metric_curve"],
    },
    "Checkpoints": {
        "converters.torch_dist": ["import_checkpoint", "export_checkpoint"],
        "converters.verify": ["verify"],
        "converters.model_weights": ["load_hf_weights", "export_hf_weights"],
    },
    "Checks of implementations": {
        "rl_loop.certify.implementation": [
            "ModelImplementation",
            "ScoredSequence",
            "SampledSequence",
            "UnsupportedOperationError",
        ],
        "rl_loop.certify.run": ["certify", "CertifyOptions"],
    },
    "Environments": {
        "rl_loop.environments.base": [
            "Environment",
            "Task",
            "StepResult",
            "EnvironmentOptions",
            "ScriptedPolicy",
        ],
        "rl_loop.environments.scripted_messages": ["think", "final", "function_call"],
        "rl_loop.environments.tool_calls": [
            "ToolError",
            "UnknownToolError",
            "parse_recipient",
            "parse_arguments",
        ],
    },
    "Episodes": {
        "rl_loop.data.trajectory": ["Trajectory", "TrajectoryGroup", "FinishReason", "Turn"],
        "rl_loop.tracking.episode_files": ["list_files"],
    },
    "Losses and advantages": {
        "rl_loop.algorithms.advantages": [
            "BatchRewards",
            "sample_advantages",
            "generalized_advantages",
        ],
        "rl_loop.algorithms.policy_loss": ["LossInputs", "PolicyLoss", "ppo_loss", "bounded_exp"],
    },
    "Rollout backends": {
        "rl_loop.engines.protocol": [
            "RolloutEngine",
            "WeightHolder",
            "ServerClient",
            "GenerateRequest",
            "SamplingParams",
            "GenerateResult",
        ],
        "rl_loop.engines.backend": ["RolloutBackend", "EngineConfig", "BackendContext"],
        "rl_loop.weight_sync.source": ["WeightSource"],
    },
}
"""Contents of the API reference, by chapter and module: extension points and stable functions."""

MAX_CELL_WORDS = 25
"""Words of a table cell. Longer descriptions continue in a list below the table."""


# ---- configuration


@dataclass(frozen=True)
class Section:
    """A class of settings, and the first key that has it."""

    key: str
    model: type[BaseModel]


FILES: dict[str, type[BaseModel]] = {
    "gptoss rl": RlConfig,
    "gptoss sft": SftConfig,
    "gptoss tinker": TinkerConfig,
    "gptoss launch": ClusterConfig,
}
"""Settings of the kinds of files, by the command that reads them."""


def configuration_page() -> str:
    """Return the page with every configuration key, by section, with type, default and meaning."""
    lines = [
        NOTICE,
        "# Configuration reference",
        "",
        "All keys that a YAML file or the command line (`optimizer.lr=1e-6`) can set. Other keys are rejected.",
        "`gptoss config CONFIG` prints all values of a configuration and their sources. Keys of a cluster file are set",
        "in that file only.",
        "",
    ]
    sections = list(_all_sections())
    lines += [f"- [{_title(section)}](#{_anchor(_title(section))})" for section in sections]
    for section in sections:
        lines += ["", f"## {_title(section)}", "", *_paragraph(_read_summary(section.model)), ""]
        lines += _key_table(section)
    return "\n".join(lines) + "\n"


def _key_table(section: Section) -> list[str]:
    """Return a table of a section's keys, and a list with the ends of long descriptions."""
    rows = ["| key | type, default | meaning |", "|---|---|---|"]
    details: list[str] = []
    for name, field in section.model.model_fields.items():
        meaning, more = _split_description(_description(section, name, field))
        kind = ", ".join([_type_text(field.annotation), *_limits(field.metadata)])
        rows.append(f"| `{name}` | {_cell(kind)}; {_cell(_default_text(field))} | {meaning} |")
        if more:
            details.append(f"- `{name}`: {more}")
    return [*rows, "", *details] if details else rows


def _split_description(text: str) -> tuple[str, str]:
    """Return the first sentences of a description, which fit a table cell, and the others."""
    first, *others = re.split(r"(?<=[.]) ", _cell(text))
    while others and len(f"{first} {others[0]}".split()) <= MAX_CELL_WORDS:
        first = f"{first} {others.pop(0)}"
    return first, " ".join(others)


def _all_sections() -> Iterator[Section]:
    """Yield the sections of all kinds of files. Each class appears once."""
    seen: set[type[BaseModel]] = set()
    waiting = [Section(key, model) for key, model in FILES.items()]
    while waiting:
        section = waiting.pop(0)
        if section.model in seen:
            continue
        seen.add(section.model)
        yield section

        is_top_level = section.key in FILES
        inner = []
        for name, field in section.model.model_fields.items():
            key = name if is_top_level else f"{section.key}.{name}"
            inner += [Section(key, model) for model in _models_in(field.annotation)]
        # The nested sections of the top level precede its other sections.
        position = len(waiting) if is_top_level else 0
        waiting[position:position] = inner


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the classes of settings in a type annotation, in order."""
    if isinstance(annotation, TypeAliasType):
        return _models_in(annotation.__value__)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        # A file has the keys of one family of models, not those of the common base.
        return [*FAMILIES] if annotation is ModelConfig else [annotation]
    models = []
    for argument in get_args(annotation):
        models += _models_in(argument)
    return models


def _title(section: Section) -> str:
    if section.key == "gptoss launch":
        return "Cluster file of gptoss launch"
    if section.key in FILES:
        return f"Top level of {section.key}"
    return f"{section.key}: {section.model.__name__}"


def _description(section: Section, name: str, field: FieldInfo) -> str:
    if not field.description:
        raise SystemExit(
            f"{section.model.__module__}.{section.model.__name__}.{name}: no docstring"
        )
    return field.description


def _type_text(annotation: Any) -> str:
    """Describe the allowed values of a key."""
    if isinstance(annotation, TypeAliasType):
        return _type_text(annotation.__value__)
    if annotation is type(None):
        return "null"

    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        inner, *metadata = arguments
        found = [item for part in metadata for item in getattr(part, "metadata", [part])]
        return " ".join([_type_text(inner), *_limits(found)])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_text(argument) for argument in arguments))
    if origin is list:
        return f"list of {_type_text(arguments[0])}"
    if origin is dict:
        return f"mapping of {_type_text(arguments[0])} to {_type_text(arguments[1])}"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {_type_text(arguments[0])}"
    if origin is tuple:
        return f"{len(arguments)} values: {', '.join(map(_type_text, arguments))}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"section {annotation.__name__}"
    names = {str: "text", Path: "path", bool: "true or false", Any: "anything"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _limits(metadata: list[Any]) -> list[str]:
    """Describe the bounds of a number."""
    limits = []
    for item in metadata:
        for kind, sign, name in (
            (Gt, ">", "gt"),
            (Ge, "≥", "ge"),
            (Lt, "<", "lt"),
            (Le, "≤", "le"),
        ):
            if isinstance(item, kind):
                limits.append(f"{sign} {getattr(item, name)}")
    return limits


def _default_text(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, BaseModel):
        return "its defaults"
    # The page must not depend on the path of this machine's interpreter.
    if default == sys.executable:
        return "the interpreter that runs"
    texts = {None: "null", True: "true", False: "false", "": "empty"}
    is_simple = default is None or isinstance(default, bool | str)
    if is_simple and default in texts:
        return f"`{texts[default]}`"
    return f"`{default}`"


# ---- API


def api_page() -> str:
    """Return the page with the functions and classes of API, their signatures and docstrings."""
    lines = [
        NOTICE,
        "# API reference",
        "",
        "Classes and functions that other programs may import, and the interfaces that they may implement.",
        "",
    ]
    lines += [f"- [{chapter}](#{_anchor(chapter)})" for chapter in API]
    loader = griffe.GriffeLoader(search_paths=[ROOT, ROOT / "kernels"], allow_inspection=False)
    for chapter, modules in API.items():
        lines += ["", f"## {chapter}"]
        for path, names in modules.items():
            package = path.partition(".")[0]
            # It reads all modules of the package, so read each package once.
            if package not in loader.modules_collection:
                loader.load(package)
            module = loader.modules_collection[path]
            for name in names:
                lines += ["", f"### `{path}.{name}`", "", *_member_lines(module[name])]
    return "\n".join(lines) + "\n"


def _member_lines(member: Any) -> list[str]:
    """Return the lines that describe a function or a class."""
    if not member.docstring:
        raise SystemExit(f"{member.path}: no docstring")
    if member.is_function:
        return ["```python", _signature(member), "```", "", *_paragraph(member.docstring.value)]

    lines = _paragraph(member.docstring.value)
    attributes = [
        attribute
        for attribute in member.attributes.values()
        if attribute.is_public and attribute.docstring
    ]
    if attributes:
        lines += ["", "| attribute | meaning |", "|---|---|"]
        for attribute in attributes:
            kind = f": {attribute.annotation}" if attribute.annotation else ""
            lines.append(
                f"| `{_cell(attribute.name + kind)}` | {_cell(attribute.docstring.value)} |"
            )
    for function in member.functions.values():
        is_shown = function.is_public and function.docstring and not function.name.startswith("__")
        if is_shown:
            lines += ["", "```python", _signature(function), "```", ""]
            lines += _paragraph(function.docstring.value)
    return lines


def _signature(function: Any) -> str:
    """Return the signature of a function, with one argument per line if it is long."""
    arguments = []
    keyword_only = griffe.ParameterKind.keyword_only
    names_follow = False
    for parameter in function.parameters:
        if parameter.kind is keyword_only and not names_follow:
            arguments.append("*")
        names_follow = names_follow or parameter.kind in (
            keyword_only,
            griffe.ParameterKind.var_positional,
        )
        star = {"variadic positional": "*", "variadic keyword": "**"}.get(parameter.kind.value, "")
        text = f"{star}{parameter.name}"
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        has_default = parameter.default is not None and not star
        if has_default:
            text += f" = {parameter.default}"
        arguments.append(text)

    result = f" -> {function.returns}" if function.returns is not None else ""
    keyword = "async def" if "async" in function.labels else "def"
    line = f"{keyword} {function.name}({', '.join(arguments)}){result}"
    if len(line) <= 100:
        return line
    inner = "".join(f"    {argument},\n" for argument in arguments)
    return f"{keyword} {function.name}(\n{inner}){result}"


# ---- fields of requests


def openai_page() -> str:
    """Return the page with every field of requests to the gateway."""
    lines = [
        "<!-- Made by scripts/reference.py from rl_loop/gateway/fields.py and answer_fields.py: change them. -->",
        "# Fields of OpenAI's API",
        "",
        "Fields of requests to the [gateway](../gateway.md) and `gptoss serve`. Tests send every row with OpenAI's",
        "Python client. A refused field returns status 400, type `invalid_request_error`, and the code and `param` of",
        "its row. Fields without a row are refused, too. `null` is the same as an absent field.",
    ]
    dialects = {
        "Chat completions": CHAT_FIELDS,
        "Completions": COMPLETION_FIELDS,
        "Responses": RESPONSES_FIELDS,
    }
    for title, rows in dialects.items():
        lines += ["", f"## {title}", "", *_field_lines(rows)]
    lines += [
        "",
        "## Answers",
        "",
        "An empty field is absent, null, `[]` or `{}`, and so are all fields in it. Tests compare every row with",
        "answers of the embedded engine, and the rows with the fields of OpenAI's Python client.",
    ]
    for title, answer in ANSWERS.items():
        lines += ["", f"### {title}", "", *_answer_lines(answer)]
    return "\n".join(lines) + "\n"


def _answer_lines(rows: AnswerFields) -> list[str]:
    lines = ["| field | value | note |", "|---|---|---|"]
    for row in rows.values():
        value = "set" if row.is_set else "empty"
        if row.is_extension:
            value += ", extension"
        lines.append(f"| `{row.name}` | {value} | {row.note} |")
    return lines


def _field_lines(rows: RequestFields) -> list[str]:
    lines = ["| field | example | behavior | error | note |", "|---|---|---|---|---|"]
    for row in rows:
        error = ""
        if row.behavior is FieldBehavior.REFUSED:
            error = f"`{row.code}`, `{row.error_param}`"
        note = row.note
        if row.neutral:
            accepted = ", ".join(f"`{json.dumps(value)}`" for value in row.neutral)
            note = f"{note}; accepted: {accepted}"
        example = f"`{json.dumps(row.example)}`"
        cells = [f"`{row.name}`", example, row.behavior.value, error, note]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return lines


# ---- Markdown


def _read_summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip()


def _paragraph(text: str) -> list[str]:
    """Convert a docstring to Markdown, with arguments and errors as lists, and examples as code."""
    text, _, example = text.partition("\nExample:\n")
    lines = []
    is_list = False
    for line in text.replace("``", "`").splitlines():
        heading = line.strip().removesuffix(":")
        if heading in ("Args", "Returns", "Raises", "Yields") and line.rstrip().endswith(":"):
            lines += [f"**{heading}**", ""]
            is_list = heading in ("Args", "Raises")
        elif line.startswith("    ") and is_list:
            entry = line[4:]
            lines.append(entry if entry.startswith(" ") else f"- {entry}")
        else:
            lines.append(line.removeprefix("    "))
    if example:
        code = textwrap.dedent(example).strip()
        lines += ["", "**Example**", "", "```pycon", *code.splitlines(), "```"]
    return lines


def _cell(text: str) -> str:
    """Convert a docstring to the contents of one table cell."""
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")


def _anchor(title: str) -> str:
    """Return GitHub's anchor of a heading."""
    kept = [letter for letter in title.lower() if letter.isalnum() or letter in " -_"]
    return "".join(kept).replace(" ", "-")


# ---- the program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args()

    outdated = []
    pages = {
        "configuration.md": configuration_page(),
        "api.md": api_page(),
        "openai_api.md": openai_page(),
    }
    for name, text in pages.items():
        page = PAGES / name
        if options.check:
            if not page.exists() or page.read_text() != text:
                outdated.append(str(page.relative_to(ROOT)))
        else:
            page.parent.mkdir(exist_ok=True)
            page.write_text(text)
    if outdated:
        sys.exit(
            f"not what the source says: {', '.join(outdated)}; run python scripts/reference.py"
        )


if __name__ == "__main__":
    main()
