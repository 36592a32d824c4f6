"""Commands that create missing inputs of a run, for error messages."""

import shlex
from pathlib import Path

from rl_loop.config.load import read_yaml
from rl_loop.config.shipped import shipped_directories, shipped_files

HUB_NAMES = {
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B-Instruct",
}
"""Directory names in shipped configurations, and the names of their models on the hub."""

ONLY_OF_RELEASE = ' --exclude "original/*" "metal/*"'
"""Options of ``hf download`` that leave out copies of the weights in other formats."""

EXAMPLES = {
    "shop": "python examples/chat_with_tools.py",
    "clerk": "python examples/clerk_agent.py",
}
"""Programs that write the directories below runs/ that shipped configurations read."""


def how_to_make(key: str, path: Path) -> str:
    """Return a sentence with the command that creates a missing file or directory.

    Args:
        key: configuration key or option that names the path.
        path: missing path.
    """
    name = key.rpartition(".")[2]
    if name in ("initial_weights", "--weights", "tokenizer"):
        return how_to_make_weights(path)
    if name == "initial_adapter":
        return (
            "`gptoss sft CONFIG` or `gptoss rl CONFIG` with `adapter` trains adapters. Name its "
            "run directory, or the adapter/ in it"
        )
    if name == "episodes":
        return f"`gptoss eval CONFIG --output {path}` writes it"
    return how_to_make_data(key, path)


def how_to_make_weights(path: Path) -> str:
    """Return a sentence with the command that creates or downloads a model at ``path``."""
    config = _find_sft_config(path)
    if config is not None:
        return f"`gptoss sft {config}` trains it"
    if path.parent.name.startswith("checkpoints"):
        return "`ls` lists the checkpoints of the run"
    if path.name == "export":
        return (
            f"The run {path.parent} writes it at its end. Continue the run with `gptoss rl "
            "CONFIG --resume`"
        )
    hub_name = HUB_NAMES.get(path.name.lower())
    if hub_name is not None:
        options = ONLY_OF_RELEASE if hub_name.startswith("openai/") else ""
        directory = shlex.quote(str(path))
        return f"`hf download {hub_name} --local-dir {directory}{options}` downloads it"
    return (
        f"`hf download MODEL --local-dir {shlex.quote(str(path))}` downloads a model there. Or "
        "name the directory of a run"
    )


def how_to_make_data(key: str, path: Path) -> str:
    """Return a sentence that tells how to create a data file."""
    program = EXAMPLES.get(path.parent.name)
    if program is not None and path.parent.parent.name == "runs":
        return f"`{program} {path.parent}` writes it"
    if key.startswith("tasks."):
        return (
            "Write one task per line (docs/tasks.md, Formats of files), or name a data set of the "
            f"hub: {key}=hub:NAME:SPLIT"
        )
    return (
        "Write one conversation per line (docs/data.md), or name a data set of the hub: "
        f"{key}=hub:NAME:SPLIT. `gptoss data preview CONFIG` shows what is read"
    )


def _find_sft_config(path: Path) -> Path | None:
    """Return the shipped configuration of ``gptoss sft`` whose run directory contains ``path``."""
    for file in shipped_files("sft"):
        # The path may be the run, one of its checkpoints or its export.
        if read_yaml(file).get("name") in path.parts:
            folder = file.parent.relative_to(next(shipped_directories()))
            return Path("configs") / folder / file.name
    return None
