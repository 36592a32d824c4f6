"""Output of ``gptoss list``: the shipped configurations, their hardware, predicted fit and real runs."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.gpus import KNOWN_GPUS, planned_hardware
from launch.placement import gpus_needed
from megatron_gptoss.planning.memory import predict_fullest_stage
from megatron_gptoss.planning.memory_advice import PREDICTION_TOLERANCE, Hardware, exceeds_memory
from rl_loop.config.errors import ConfigError
from rl_loop.config.every_run import RunConfig
from rl_loop.config.load import load_run_config, read_yaml
from rl_loop.config.run import RlConfig
from rl_loop.config.shipped import UNTESTED, shipped_files

WIDTH_OF_A_PIPE = 180
"""Columns of the table if standard output is not a terminal. Every row fits into one line."""
RAN = re.compile(r"It (?:ran|runs) (.+?)(?:,|\.? \(|\.(?: |$))")
"""Sentence about the real run in the first lines of a configuration."""
CPU_ONLY = "CPU cores"
"""Words of this sentence if the configuration does not need a GPU."""


@dataclass(frozen=True)
class ListedConfig:
    """A shipped configuration. Values are None if the configuration cannot be loaded here."""

    name: str
    command: str
    """rl or sft."""
    path: str
    description: str
    """First sentence of the file."""
    ran: str | None
    """Hardware and length of the real run, such as "for 5 steps on 4 H200". None without a run."""
    model: str
    method: str | None = None
    """Trained weights, their format, and the estimator of advantages or the distillation."""
    gpus: int | None = None
    """GPUs of trainer and engines together. 0 if the configuration runs on CPUs."""
    fit: str | None = None
    """"fits", "tight" (less free memory than PREDICTION_TOLERANCE) or "too large"."""
    needed_gb: float | None = None
    """Predicted peak of the fullest GPU, in GB (1e9 bytes)."""
    gpu_gb: float | None = None
    """Memory of the planned GPU, in GB (1e9 bytes)."""
    error: str | None = None
    """Reason why the configuration cannot be loaded."""

    def matches(self, gpus: int | None, model: str | None, ran: bool, must_fit: bool) -> bool:
        """Return True if the configuration passes all filters.

        Args:
            gpus: largest number of GPUs; None for any.
            model: part of the model's name; None for any.
            ran: whether to leave out configurations that never ran.
            must_fit: whether to leave out configurations that are too large for their GPU.
        """
        if gpus is not None and (self.gpus is None or self.gpus > gpus):
            return False
        if model is not None and model.lower() not in self.model.lower():
            return False
        if ran and self.ran is None:
            return False
        return not must_fit or self.fit in ("fits", "tight")


def listed_configs(commands: Sequence[str], fits: str | None = None) -> list[ListedConfig]:
    """Return the shipped configurations of some commands. Configurations that never ran come last.

    Args:
        commands: rl and sft, or one of them.
        fits: name of a GPU, or its memory in GB. None for this machine's GPU, or without one for the
            GPU of each configuration.

    Raises:
        ConfigError: ``fits`` is neither of them.
    """
    # One call per size, because planned_hardware asks nvidia-smi.
    hardware = cache(lambda gigabytes: _hardware(fits, gigabytes))
    rows = []
    for command in commands:
        for path in shipped_files(command):
            about = _config_facts(path, command)
            try:
                config = load_run_config(path, command)
            except ConfigError as error:
                rows.append(ListedConfig(**about, error=" ".join(str(error).split())))
                continue
            rollout = config.rollout if config.samples else None
            rows.append(
                ListedConfig(
                    **about,
                    method=_method(config),
                    gpus=0
                    if CPU_ONLY in (about["ran"] or "")
                    else gpus_needed(config.parallel, rollout),
                    **_prediction(config, hardware(config.gpu_gb)),
                )
            )
    return rows


def _hardware(fits: str | None, configured: float | None) -> Hardware:
    """Return the GPU of a plan. ``fits`` as in ``listed_configs``, ``configured`` is gpu_gb."""
    if fits is None:
        return planned_hardware(configured_gigabytes=configured)
    if fits.lower() in KNOWN_GPUS:
        return planned_hardware(gpu=fits)
    try:
        gigabytes = float(fits)
    except ValueError:
        gigabytes = math.nan
    if not 0 < gigabytes < math.inf:
        raise ConfigError(
            f"--fits {fits}: must be one of {', '.join(KNOWN_GPUS)}, or the memory of a GPU in GB"
        )
    return planned_hardware(gigabytes=gigabytes)


def _config_facts(path: Path, command: str) -> dict[str, Any]:
    """Return the fields of ListedConfig that do not need a valid configuration."""
    header = path.read_text().split("\nname:")[0]
    text = " ".join(line.removeprefix("#").strip() for line in header.splitlines())
    match = None if UNTESTED in path.parts else RAN.search(text)
    return {
        "name": path.stem,
        "command": command,
        "path": str(path),
        # A period inside a file name has no space after it.
        "description": text.split(". ")[0].removesuffix(".") + ".",
        "ran": match and match[1],
        "model": read_yaml(path)["model"],
    }


def _method(config: RunConfig) -> str:
    """Return the trained weights and the objective of a configuration in a few words."""
    words = ["all weights" if config.adapter is None else "adapters"]
    if config.quantization is not None:
        words.append(config.quantization)
    if isinstance(config, RlConfig) and config.algorithm.advantage.type != "none":
        words.insert(0, config.algorithm.advantage.type)
    if config.teachers:
        words.insert(0, "distillation")
    return ", ".join(words)


def _prediction(config: RunConfig, hardware: Hardware) -> dict[str, Any]:
    """Return the fields of ListedConfig about memory."""
    inputs = config.memory_inputs
    needed = predict_fullest_stage(inputs, hardware.gigabytes).peak.total / 1e9
    if exceeds_memory(inputs, hardware):
        fit = "too large"
    else:
        fit = "fits" if needed <= (1 - PREDICTION_TOLERANCE) * hardware.gigabytes else "tight"
    return {"fit": fit, "needed_gb": round(needed, 1), "gpu_gb": hardware.gigabytes}


def as_json(rows: Sequence[ListedConfig]) -> list[dict[str, Any]]:
    """Return the rows as JSON values."""
    return [asdict(row) for row in rows]


def print_configs(rows: Sequence[ListedConfig]) -> None:
    """Print a table of configurations."""
    table = Table(box=None, pad_edge=False)
    for title in ("name", "command", "model", "method"):
        table.add_column(title, no_wrap=title == "name")
    table.add_column("GPUs", justify="right")
    table.add_column("GB of a GPU", no_wrap=True)
    table.add_column("ran")
    for row in rows:
        # The prediction includes CUDA's memory, which a run on CPUs does not have.
        memory = "-"
        if row.gpus is None:
            memory = "?"
        elif row.gpus > 0:
            memory = f"{row.fit}: {row.needed_gb:g} of {row.gpu_gb:g}"
        cells = [row.name, row.command, row.model, row.method or "?"]
        cells += ["?" if row.gpus is None else str(row.gpus), memory, row.ran or "no"]
        table.add_row(*cells)

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_OF_A_PIPE)
    console.print(table, markup=False, highlight=False)
