"""The model card of an export: what was trained, from what, how well it does, and how to serve it."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import yaml

from rl_loop.config.load import RELEASED_VOCABULARY
from rl_loop.config.run import RlConfig, RunConfig, SftConfig
from rl_loop.tracking.run_directory import RunDirectory, atomic_write_text, read_json


def write_model_card(run: RunDirectory, config: RunConfig) -> None:
    """Write README.md into the export of a finished run, from its configuration and summary."""
    figures = read_json(run.summary)
    has_template = (run.export / "chat_template.jinja").exists()
    atomic_write_text(run.export / "README.md", model_card(config, figures, has_template))


def model_card(config: RunConfig, figures: Mapping[str, Any], has_template: bool) -> str:
    """Return the card as Hugging Face's hub reads it.

    Args:
        config: of the run.
        figures: of its ``summary.json``.
        has_template: whether the export holds a chat template.
    """
    header = yaml.safe_dump(_header(config), sort_keys=False).strip()
    sections = [
        f"---\n{header}\n---",
        f"# {config.name}",
        _origin(config),
        f"## Data\n\n{_data(config)}",
        f"## Results\n\n{_table(figures)}",
        f"## Serving\n\n{_serving(config, has_template)}",
    ]
    return "\n\n".join(sections) + "\n"


def _header(config: RunConfig) -> dict[str, Any]:
    header: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["gpt-oss", "megatron-gptoss", config.command],
    }
    if config.initial_weights is not None:
        header["base_model"] = str(config.initial_weights)
    return header


def _origin(config: RunConfig) -> str:
    kind = "on-policy reinforcement learning"
    if isinstance(config, SftConfig):
        kind = "supervised fine-tuning"
    base = "random weights"
    if config.initial_weights is not None:
        base = f"`{config.initial_weights}`"
    what = "All weights were trained"
    if config.adapter is not None:
        what = f"Adapters of rank {config.adapter.rank} were trained and merged"

    lines = [
        f"GPT-OSS architecture, {config.model.num_parameters:,} parameters, made from {base} by {kind} with "
        f"megatron-gptoss {version('megatron-gptoss')}. {what}, in {config.dtype}, seed {config.seed}."
    ]
    if isinstance(config, RlConfig):
        algorithm = config.algorithm
        lines.append(
            f"Advantages: {algorithm.advantage}; loss: {algorithm.policy_loss}; {config.rollout.tasks_per_step} tasks "
            f"with {config.rollout.samples_per_task} episodes each per step; learning rate {config.optimizer.lr:g}."
        )
    return "\n\n".join(lines)


def _data(config: RunConfig) -> str:
    if isinstance(config, SftConfig) and config.data is not None:
        sources = config.data.model_dump(mode="json", exclude_defaults=True)
        return f"Conversations:\n\n```yaml\n{yaml.safe_dump(sources, sort_keys=False).strip()}\n```"
    sources = config.tasks.model_dump(mode="json", exclude_defaults=True)
    return f"Tasks:\n\n```yaml\n{yaml.safe_dump(sources, sort_keys=False).strip()}\n```"


def _table(figures: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {_figure(value)} |" for name, value in figures.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _figure(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _serving(config: RunConfig, has_template: bool) -> str:
    """Say with which commands the export can be served, and what is in the way of others."""
    ours = "With this project, from the directory of the run:\n\n```\ngptoss serve RUN\n```"
    # Only the released vocabulary's answers can be parsed by others.
    if config.model.vocab_size != RELEASED_VOCABULARY:
        return (
            f"{ours}\n\nIts vocabulary is a small one of its own, which no other server's Harmony parser knows; "
            "transformers loads model and tokenizer."
        )

    others = (
        "```\npython -m sglang.launch_server --model-path DIRECTORY --reasoning-parser gpt-oss "
        "--tool-call-parser gpt-oss\n"
        "vllm serve DIRECTORY --tool-call-parser openai --enable-auto-tool-choice\n```"
    )
    missing = ""
    if not has_template:
        missing = (
            "\n\nThere is no chat template in this directory, as the run did not begin with a Hugging Face directory: "
            "copy tokenizer files and `chat_template.jinja` of the base model here first."
        )
    return f"{ours}\n\nWith SGLang or vLLM:\n\n{others}{missing}"
