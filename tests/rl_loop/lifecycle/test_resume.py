"""Changed keys at a resume, and their rejection if they would invalidate the run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rl_loop.config.errors import ConfigError
from rl_loop.config.every_run import RunConfig
from rl_loop.config.load import dump_config, load_config
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.lifecycle.resume import changes_since, differences, write_config
from rl_loop.tracking.run_directory import RunDirectory, atomic_write_text, start_run

CONFIGS = Path(__file__).parents[3] / "configs"


def config(tmp_path: Path, *overrides: str, kind: type[RunConfig] = RlConfig) -> Any:
    file = CONFIGS / kind.command / "tiny_retool.yaml"
    return load_config(file, kind, ["initial_weights=null", f"output_dir={tmp_path}", *overrides])


def make_run(earlier: RunConfig, saved: bool = True) -> RunDirectory:
    run = start_run(earlier.directory, dump_config(earlier))
    if saved:
        run.checkpoints.mkdir()
        (run.checkpoints / "latest").write_text("step_000003")
    return run


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        (["optimizer.lr=0.5"], "optimizer.lr: 0.002 -> 0.5"),
        (["training.steps=7"], "training.steps: "),
        (["rollout.max_tool_calls=1"], "rollout.max_tool_calls: "),
        (["training.checkpoint_every=3"], "training.checkpoint_every: "),
        (["algorithm.kl={apply_to: loss, coefficient: 0.1}"], "algorithm.kl: null -> {"),
        (["parallel.world_size=2"], "parallel.world_size: 1 -> 2"),
        (["initial_weights=/elsewhere"], "initial_weights: null -> /elsewhere"),
    ],
)
def test_allowed_change_is_listed(overrides: list[str], shown: str, tmp_path: Path) -> None:
    run = make_run(config(tmp_path, "optimizer.lr=2e-3"))
    (change,) = changes_since(run, config(tmp_path, "optimizer.lr=2e-3", *overrides))
    assert str(change).startswith(shown)


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ([], ["model.num_layers=2"], "model.num_layers: 4 -> 2"),
        ([], ["model=tiny_words"], "model.vocab_size: 576 -> 1024"),
        ([], ["dtype=bf16"], "dtype: fp32 -> bf16"),
        ([], ["vocabulary=gptoss"], "vocabulary: tiny -> gptoss"),
        ([], ["tasks.seed=5"], "tasks.seed: 0 -> 5"),
        ([], ["tasks.sources.retool.weight=0.5"], "tasks.sources.retool.weight: 1.0 -> 0.5"),
        ([], ["rollout.tasks_per_step=3"], "rollout.tasks_per_step: "),
        ([], ["parallel.world_size=2", "parallel.expert=2"], "parallel.expert: 1 -> 2"),
        (["algorithm.advantage=gae", "algorithm.critic={}"], [], "algorithm.critic: {"),
        ([], ["adapter={rank: 4}"], "adapter: null -> {"),
        (["adapter={rank: 4}"], [], "adapter: {"),
        (["adapter={rank: 4}"], ["adapter={rank: 8}"], "adapter.rank: 4 -> 8"),
        (["adapter={rank: 4}"], ["adapter={rank: 4, targets: [q]}"], "adapter.targets: "),
        (["algorithm.kl={apply_to: loss, coefficient: 0.1}"],
         ["algorithm.kl={apply_to: loss, coefficient: 0.1}", "initial_weights=/elsewhere"],
         "initial_weights: null -> /elsewhere"),
    ],
)  # fmt: skip
def test_forbidden_change_is_rejected_with_both_values(
    before: list[str], now: list[str], named: str, tmp_path: Path
) -> None:
    run = make_run(config(tmp_path, *before))
    kept = run.config.read_text()
    with pytest.raises(ConfigError, match=rf"--resume cannot change .*{re.escape(named)}"):
        changes_since(run, config(tmp_path, *now))
    assert run.config.read_text() == kept


def test_rejection_names_a_start_for_another_run(tmp_path: Path) -> None:
    """Checkpoints of a run with adapters do not contain the whole model."""

    def offered(run: RunDirectory, *overrides: str) -> str:
        with pytest.raises(ConfigError) as refused:
            changes_since(run, config(tmp_path, *overrides))
        return str(refused.value).partition("name=ANOTHER ")[2]

    whole = make_run(config(tmp_path, "name=whole"))
    assert offered(whole, "name=whole", "seed=1") == f"initial_weights={whole.path}"

    adapters = make_run(config(tmp_path, "name=adapters", "adapter={rank: 4}"))
    same = ["name=adapters", "adapter={rank: 4}", "seed=1"]
    assert offered(adapters, *same) == f"initial_adapter={adapters.path}"
    others = ["name=adapters", "adapter={rank: 8}"]
    assert "gptoss convert merge BASE CHECKPOINT MERGED" in offered(adapters, *others)
    adapters.export.mkdir()
    (adapters.export / "config.json").write_text("{}")
    assert offered(adapters, *others) == f"initial_weights={adapters.export}"


def test_model_is_compared_by_values_when_a_run_resumes(tmp_path: Path) -> None:
    model = config(tmp_path).model
    for name, layers in (("first", model.num_layers), ("moved", model.num_layers), ("other", 1)):
        (tmp_path / name).mkdir()
        content = model.model_copy(update={"num_layers": layers}).to_hf_config()
        (tmp_path / name / "config.json").write_text(json.dumps(content))

    run = make_run(config(tmp_path, f"model={tmp_path}/first"))
    assert changes_since(run, config(tmp_path, f"model={tmp_path}/moved")) == []
    with pytest.raises(ConfigError, match=r"model\.num_layers: "):
        changes_since(run, config(tmp_path, f"model={tmp_path}/other"))


def test_base_of_adapters_may_move_and_be_quantized(tmp_path: Path) -> None:
    """The digest in the checkpoint detects another base."""
    options = ["adapter={rank: 4}", "algorithm.kl={coefficient: 0.1}"]
    run = make_run(config(tmp_path, *options))
    moved = config(tmp_path, *options, "initial_weights=/elsewhere", "quantization=mxfp4")
    changes = {change.key for change in changes_since(run, moved)}
    assert changes == {"initial_weights", "quantization"}

    whole = make_run(config(tmp_path, "name=whole"))
    with pytest.raises(ConfigError, match="was trained with the other expert format"):
        changes_since(whole, config(tmp_path, "name=whole", "quantization=mxfp4"))


def test_initial_adapter_may_move_unless_it_is_the_reference(
    tmp_path: Path,
) -> None:
    options = ["adapter={rank: 4}", "initial_adapter=/first"]
    run = make_run(config(tmp_path, *options))
    moved = config(tmp_path, "adapter={rank: 4}", "initial_adapter=/second")
    assert {change.key for change in changes_since(run, moved)} == {"initial_adapter"}

    kl = "algorithm.kl={coefficient: 0.1}"
    run = make_run(config(tmp_path, *options, kl, "name=with_reference"))
    moved = config(tmp_path, "adapter={rank: 4}", "initial_adapter=/second", kl)
    with pytest.raises(ConfigError, match="they are the reference policy of"):
        changes_since(run, moved)


def test_other_initial_weights_are_rejected_before_a_checkpoint(tmp_path: Path) -> None:
    run = make_run(config(tmp_path), saved=False)
    with pytest.raises(ConfigError, match="no checkpoint exists yet"):
        changes_since(run, config(tmp_path, "initial_weights=/elsewhere"))


def test_another_path_to_the_same_file_is_not_a_change(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    before, now = {"a": str(tmp_path / "data")}, {"a": f"{tmp_path}/x/../link"}
    assert [change.key for change in differences(before, now)] == ["a"], "there is no x"
    assert differences(before, {"a": str(tmp_path / "link")}) == []


def test_resume_of_a_run_of_another_command_is_rejected(tmp_path: Path) -> None:
    run = make_run(config(tmp_path, kind=SftConfig))
    with pytest.raises(
        ConfigError, match="is a run of `gptoss sft`, so `gptoss rl` cannot continue it"
    ):
        changes_since(run, config(tmp_path, f"name={run.path.name}"))


def test_key_missing_in_the_old_run_counts_as_its_default(tmp_path: Path) -> None:
    earlier = config(tmp_path)
    run = make_run(earlier)
    lines = [
        line
        for line in run.config.read_text().splitlines()
        if not line.startswith("evaluate_every")
    ]
    atomic_write_text(run.config, "\n".join(lines))
    (change,) = changes_since(run, config(tmp_path, "evaluate_every=77"))
    assert str(change) == "evaluate_every: 10 -> 77"


def test_written_configuration_keeps_its_history_and_loads(tmp_path: Path) -> None:
    run = make_run(config(tmp_path, "optimizer.lr=0.1"))
    for step, rate in ((3, 0.2), (5, 0.3)):
        now = config(tmp_path, f"optimizer.lr={rate}")
        write_config(run, now, changes_since(run, now), step)
    assert run.config.read_text().splitlines()[:2] == [
        "# from step 4 on: optimizer.lr: 0.1 -> 0.2",
        "# from step 6 on: optimizer.lr: 0.2 -> 0.3",
    ]
    assert load_config(run.config, RlConfig).optimizer.lr == 0.3


def test_fewer_steps_than_were_trained_are_rejected(tmp_path: Path) -> None:
    """Otherwise weights of step 3 would be evaluated and exported as step 2."""
    run = make_run(config(tmp_path))
    with pytest.raises(ConfigError, match=r"training\.steps: 80 -> 2 .*already has 3 steps"):
        changes_since(run, config(tmp_path, "training.steps=2"))
    assert changes_since(run, config(tmp_path, "training.steps=3"))
