"""Steps of ``gptoss plan`` with rollouts, and the effect of ``algorithm.max_staleness``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.cli import app
from launch.plan import predict_update, scoring_seconds, step_plan
from launch.rollout_plan import LoopPrediction, loop_plan, predict_loop
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig

CONFIGS = Path(__file__).parents[2] / "configs"
ASYNC = CONFIGS / "rl/gpt-oss-20b_1x4_async.yaml"


def load(path: Path) -> RlConfig:
    return load_config(path, RlConfig)


def build_prediction(*, training: float, engines: float, rollout: float) -> LoopPrediction:
    return LoopPrediction(training, engines, rollout, tokens_per_gpu=900.0)


def build_plan(config: RlConfig) -> str:
    return loop_plan(config)


def test_staleness_helps_until_trainer_or_engines_are_saturated() -> None:
    prediction = build_prediction(training=10.0, engines=4.0, rollout=35.0)
    assert [prediction.step_seconds(k) for k in range(6)] == [45.0, 22.5, 15.0, 11.25, 10.0, 10.0]
    assert prediction.bound(3) == "rollout"
    assert prediction.bound(4) == "trainer"
    assert prediction.fastest_staleness == 4

    by_engines = build_prediction(training=10.0, engines=20.0, rollout=35.0)
    assert by_engines.fastest_staleness == 2
    assert by_engines.bound(2) == "engines"


def test_idle_time_is_step_time_minus_work() -> None:
    prediction = build_prediction(training=10.0, engines=20.0, rollout=35.0)
    # Steps take 45, 22.5 and 20 s. Each GPU has 900 tokens per step.
    idle = [(prediction.trainer_idle_fraction(k), prediction.engines_idle(k)) for k in range(3)]
    assert idle == [
        (pytest.approx(35 / 45), pytest.approx(25 / 45)),
        (pytest.approx(12.5 / 22.5), pytest.approx(2.5 / 22.5)),
        (0.5, 0.0),
    ]
    assert [prediction.tokens_per_second(k) for k in range(3)] == [20.0, 40.0, 45.0]


def test_tokens_per_gpu_count_trainer_and_server_gpus() -> None:
    """512 episodes use about half of their 16,384 tokens, on 4 trainer GPUs and 4 servers."""
    config = load(CONFIGS / "untested/rl/gpt-oss-20b_1x8.yaml")
    prediction = predict_loop(config)
    assert prediction.tokens_per_gpu == pytest.approx(512 * 16_384 / 2 / 8, rel=0.1)


def test_colocated_engines_add_no_gpus() -> None:
    """128 episodes use about half of their 16,384 tokens. 4 GPUs both decode and train."""
    config = load(CONFIGS / "rl/gpt-oss-120b-adapter_1x4.yaml")
    prediction = predict_loop(config)
    assert prediction.tokens_per_gpu == pytest.approx(128 * 16_384 / 2 / 4, rel=0.1)
    seconds = prediction.rollout_seconds + prediction.update_seconds
    assert prediction.step_seconds(0) == seconds
    speed = f"{prediction.tokens_per_gpu / seconds:.0f} tokens/s/GPU"
    plan = build_plan(config)
    longest = config.rollout.max_response_tokens
    assert (
        f"with 128 episodes of {longest / 2:.0f} sampled tokens on average (assumption: 0.5 of"
        in plan
    )
    assert f": {seconds:.1f} s, of which" in plan and speed in plan


def test_plan_table_depends_on_lengths_and_tool_seconds() -> None:
    def rows(*arguments: str) -> list[list[str]]:
        result = CliRunner().invoke(app, ["plan", str(ASYNC), "--gpu", "h200", *arguments])
        assert result.exit_code == 0, result.output
        lines = result.output.splitlines()
        (first,) = (
            n for n, line in enumerate(lines) if "max_staleness" in line and "s/step" in line
        )
        return [line.split() for line in lines[first + 1 : first + 7]]

    quick, slow, short = (
        rows(),
        rows("--tool-seconds", "60"),
        rows("rollout.max_episode_tokens=4096"),
    )
    assert [row[0] for row in quick] == ["0", "1", "2", "3", "4", "8"]
    assert quick[1][-2:] == ["<-", "configured"]
    assert quick[0][2] == "1.00"
    seconds = [float(row[1]) for row in quick]
    assert seconds == sorted(seconds, reverse=True)
    # 8 turns have 7 calls between them. Long episodes reach their limit in fewer turns.
    assert float(slow[0][1]) - seconds[0] == pytest.approx(7 * 60, rel=0.15)
    assert float(short[0][1]) < seconds[0]


def test_no_prediction_for_alternating_or_unknown_engines() -> None:
    colocated = load(CONFIGS / "rl/gpt-oss-20b-adapter_1x1.yaml")
    assert "alternate (algorithm.max_staleness 0)" in build_plan(colocated)
    embedded = load(CONFIGS / "rl/tiny_retool.yaml")
    assert build_plan(embedded) == ("rollouts: no prediction for engines of type embedded")


def test_plan_predicts_the_time_of_the_teachers(tmp_path: Path) -> None:
    """A teacher of the policy's size takes the forward third of the arithmetic, once per step."""
    plain = load(ASYNC)
    assert "teacher" not in build_plan(plain) + step_plan(plain.memory_inputs, 141)
    for name, layers in (("same", 24), ("half", 12)):
        teacher = plain.model.model_copy(
            update={"num_layers": layers, "layer_types": plain.model.layer_types[:layers]}
        )
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(teacher.to_hf_config()))
    key = "algorithm.distillation"
    of = {
        name: load_config(ASYNC, RlConfig, [f"{key}.teacher={tmp_path / name}"])
        for name in ("same", "half")
    }
    seconds = {name: scoring_seconds(each.memory_inputs) for name, each in of.items()}
    step = predict_update(plain.memory_inputs).step
    assert plain.parallel.pipeline == 1
    assert seconds["same"] == pytest.approx(step.arithmetic / 3 + (step.experts + step.tensor) / 2)
    assert 0.4 < seconds["half"] / seconds["same"] < 0.7

    before, after = predict_loop(plain), predict_loop(of["same"])
    assert after.update_seconds - before.update_seconds == pytest.approx(after.scoring_seconds)
    assert f"(teacher's scoring {after.scoring_seconds:.1f} s of it)" in build_plan(of["same"])
    shown = f"the teacher's scoring of these sequences: {seconds['same']:.2f} s"
    assert shown in step_plan(of["same"].memory_inputs, 141)

    # Each of two teachers scores half of the sequences.
    sources = "tasks.sources={a: {environment: retool}, b: {environment: retool}}"
    teachers = f"{{a: {tmp_path / 'same'}, b: {tmp_path / 'half'}}}"
    both = load_config(ASYNC, RlConfig, [sources, f"{key}={{teachers: {teachers}}}"])
    mean = (seconds["same"] + seconds["half"]) / 2
    assert scoring_seconds(both.memory_inputs) == pytest.approx(mean)
