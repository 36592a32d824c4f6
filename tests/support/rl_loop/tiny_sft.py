"""Configuration of tiny SFT runs on conversations."""

from __future__ import annotations

from pathlib import Path

from rl_loop.config.load import load_config
from rl_loop.config.run import SftConfig
from tests.support.rl_loop.tiny_runs import SMALL

ROOT = Path(__file__).parents[3]
TINY = [
    *SMALL,
    "model.vocab_size=600",
    "sequences_per_step=4",
    "training.steps=6",
    "optimizer.warmup_steps=0",
]


def config(path: Path, *overrides: str) -> SftConfig:
    options = [
        *TINY,
        f"data.path={path}",
        "data.validation_path=null",
        f"output_dir={path.parent}",
    ]
    return load_config(ROOT / "configs/sft/tiny_shop.yaml", SftConfig, [*options, *overrides])
