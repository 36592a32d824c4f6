"""Variants of the claims are valid configurations, and their runs become one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.learning import claims
from benchmarks.learning.reference_model import MODEL, ROOT, Plan
from megatron_gptoss.families.registry import model_config
from rl_loop.config.load import load_config, read_yaml
from rl_loop.config.run import RlConfig, SftConfig

UPCYCLED = ROOT / MODEL.replace("smollm2-135m", "smollm2-135m_upcycled")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    model = tmp_path / "healed"
    model.mkdir()
    config = model_config(dict(read_yaml(UPCYCLED))).to_hf_config()
    (model / "config.json").write_text(json.dumps(config))
    return Plan(
        model, tmp_path / "work", 4, 2, tmp_path, False, (), sft_overrides=claims.WARM_START
    )


def test_every_variant_is_a_valid_configuration(plan: Plan) -> None:
    command, path, *options = plan.sft()
    assert command == "sft"
    warm_start = load_config(Path(path), SftConfig, options)
    assert warm_start.model.num_experts == 4
    assert warm_start.load_balancing > 0

    variants = claims.select_variants([*claims.CLAIMS])
    changed = {}
    for variant, overrides in variants.items():
        command, path, *options = plan.rl(1, claims.build_run_name(variant, 1), overrides)
        assert command == "rl"
        assert options.pop(options.index("--resume-or-new"))
        changed[variant] = load_config(Path(path), RlConfig, [*options])
    baseline = changed.pop(claims.BASELINE)
    for variant, config in changed.items():
        assert config.name != baseline.name
        same_name = config.model_copy(update={"name": baseline.name})
        assert same_name != baseline, f"{variant} changes nothing"


def write_run(directory: Path, accuracy: float, rewards: list[float]) -> None:
    directory.mkdir(parents=True)
    summary = {
        "held_out_accuracy_sft": 0.25,
        "held_out_accuracy_rl": accuracy,
        "max_ratio_deviation": 0.0,
        "seconds": 90,
    }
    (directory / "summary.json").write_text(json.dumps(summary))
    steps = [
        {"step": step, "reward": reward, "grad_norm": 1.0 + step, "mismatch/kl_k3": 1e-4 * step}
        for step, reward in enumerate(rewards, start=1)
    ]
    evaluation = {"step": 4, "held_out/accuracy": accuracy}
    lines = [json.dumps(record) for record in [*steps, evaluation]]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_table_has_a_row_for_every_variant_and_seed(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"all_correct-{seed}", 0.5, [0.1, 0.2, 0.3, 0.4])
        write_run(tmp_path / f"attention_frozen-{seed}", 0.3, [0.1, 0.1, 0.1, 0.2])
    lines = claims.table(tmp_path, ["attention"], [0, 1]).splitlines()
    assert lines[2] == (
        "|  | all correct | 0 | 0.250 | 0.500 | 0.100, 0.400 | 3.50, 5.00 | 4.0e-04 | 0.0e+00 | 1.5 |"
    )
    assert lines[4].startswith(
        "| attention | attention frozen | 0 | 0.250 | 0.300 | 0.100, 0.200 |"
    )
    assert len(lines) == 6
