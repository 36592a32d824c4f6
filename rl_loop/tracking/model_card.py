"""Model card of an export: training, data, results, and commands for serving."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_gptoss.config import ModelConfig
from megatron_gptoss.package_version import package_version
from rl_loop.tracking.run_directory import RunDirectory, atomic_write_text, read_json

KINDS = {"rl": "reinforcement learning", "sft": "supervised fine-tuning"}
"""Descriptions of the commands."""
PARSERS = {
    "harmony": (
        "--reasoning-parser gpt-oss --tool-call-parser gpt-oss",
        "--tool-call-parser openai",
    ),
    "chatml": ("--tool-call-parser qwen25", "--tool-call-parser hermes"),
}
"""Options with which SGLang and vLLM parse a chat format."""


LOST_BY_MERGING = "export_lost_by_merging"
"""Key of ``summary.json``: share of unmerged expert updates that the export lost by rounding."""


@dataclass(frozen=True)
class ModelCardFacts:
    """Facts about a run for the card, from its configuration."""

    name: str
    command: str
    """Command: rl or sft."""
    initial_weights: Path | None
    """Directory of the initial weights. None for random weights."""
    model: ModelConfig
    adapter_rank: int | None
    """Rank of the adapters. None if all weights were trained."""
    dtype: str
    seed: int
    algorithm: str
    """Sentence about advantages and loss. Empty for supervised fine-tuning."""
    data_kind: str
    """Kind of data: Conversations or Tasks."""
    data: dict[str, Any]
    """Configuration of the data sources, without defaults, as JSON."""
    chat_format: Literal["harmony", "chatml"]
    """Chat format of the model."""
    has_released_vocabulary: bool
    """True if the token ids are a released model's. Other servers can parse only these."""


def write_model_card(run: RunDirectory, training: ModelCardFacts) -> None:
    """Write README.md into the export of a finished run. The run's summary must exist."""
    summary = read_json(run.summary)
    has_template = (run.export / "chat_template.jinja").exists()
    atomic_write_text(run.export / "README.md", model_card(training, summary, has_template))


def model_card(training: ModelCardFacts, summary: Mapping[str, Any], has_template: bool) -> str:
    """Return the card in the format of the Hugging Face hub.

    Args:
        training: facts about the run.
        summary: values of ``summary.json``.
        has_template: True if the export has a chat template.
    """
    header = yaml.safe_dump(_header(training), sort_keys=False).strip()
    sections = [
        f"---\n{header}\n---",
        f"# {training.name}",
        _origin(training, summary.get(LOST_BY_MERGING)),
        f"## Data\n\n{_data(training)}",
        f"## Results\n\n{_table(summary)}",
        f"## Serving\n\n{_serving(training, has_template)}",
    ]
    return "\n\n".join(sections) + "\n"


def _header(training: ModelCardFacts) -> dict[str, Any]:
    # The hub reads these fields to show and to find the model.
    header: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [_family(training), "megatron-gptoss", training.command],
    }
    if training.initial_weights is not None:
        header["base_model"] = str(training.initial_weights)
    return header


def _family(training: ModelCardFacts) -> str:
    return training.model.model_type.replace("_", "-")


def _origin(training: ModelCardFacts, lost: float | None) -> str:
    """Describe the training.

    Args:
        training: facts about the run.
        lost: share of the adapters' updates of experts that this model lost by rounding. None if
            training merged experts.
    """
    base = "random weights"
    if training.initial_weights is not None:
        base = f"`{training.initial_weights}`"
    what = "All weights were trained"
    if training.adapter_rank is not None:
        what = f"Adapters of rank {training.adapter_rank} were trained and merged"

    made = (
        f"Architecture {_family(training)}, {training.model.num_parameters:,} parameters, made from {base} by "
        f"{KINDS[training.command]} with megatron-gptoss {package_version()}. {what}, in "
        f"{training.dtype}, seed {training.seed}."
    )
    merged = ""
    if lost is not None:
        merged = (
            "Experts were trained without merging their adapters. This model has merged experts, and rounding to "
            f"{training.dtype} lost {lost:.1%} of the adapters' updates of experts. The adapters of the run, in PEFT's "
            "format, are the trained model."
        )
    return "\n\n".join(filter(None, [made, merged, training.algorithm]))


def _data(training: ModelCardFacts) -> str:
    sources = yaml.safe_dump(training.data, sort_keys=False).strip()
    return f"{training.data_kind}:\n\n```yaml\n{sources}\n```"


def _table(summary: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {_format_value(value)} |" for name, value in summary.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _format_value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _serving(training: ModelCardFacts, has_template: bool) -> str:
    """Return the commands that serve the export, or the reason why a server cannot."""
    ours = "With this project, from the directory of the run:\n\n```\ngptoss serve RUN\n```"
    if not training.has_released_vocabulary:
        return (
            f"{ours}\n\nThe vocabulary was made for this run, so the parsers of other servers do not "
            "support it. transformers can load model and tokenizer."
        )

    sglang, vllm = PARSERS[training.chat_format]
    others = (
        f"```\npython -m sglang.launch_server --model-path DIRECTORY {sglang}\n"
        f"vllm serve DIRECTORY {vllm} --enable-auto-tool-choice\n```"
    )
    missing = ""
    if not has_template:
        missing = (
            "\n\nThis directory has no chat template, because the run did not begin with a Hugging Face "
            "directory. First copy the tokenizer files and `chat_template.jinja` of the base model here."
        )
    return f"{ours}\n\nWith SGLang or vLLM:\n\n{others}{missing}"
