"""Predicted rollouts against measured runs of the RL loop, and warnings about rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch import rollout_plan, rollout_time
from launch.cli import app
from launch.rollout_plan import loop_plan, predict_loop
from launch.rollout_time import EpisodeLengths, RolloutTime, ServerModel, simulate_rollout
from megatron_gptoss.config import AdapterConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.planning.memory_advice import Hardware
from rl_loop.config.errors import ConfigError
from rl_loop.config.load import load_config
from rl_loop.config.rollout_advice import batch_size, rollout_warnings
from rl_loop.config.run import RlConfig
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.engines.sglang.gpu_memory import ServerNeeds
from rl_loop.lifecycle import start_checks

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = [*sorted(CONFIGS.glob("rl/*.yaml")), *sorted(CONFIGS.glob("untested/rl/*.yaml"))]
H200 = 150.1
"""Memory of an H200 in GB."""
LIMITS = [
    "rollout.samples_per_task=8",
    "rollout.max_turns=8",
    "rollout.max_sampled_tokens_per_turn=1024",
    "rollout.max_episode_tokens=4096",
]
MXFP4 = ["quantization=mxfp4", "rollout.engine.quantization=mxfp4"]
NO_GATHERING = "rollout.engine.arguments=[--prefill-delayer-max-delay-passes, '1']"
"""Prefills without delay, as in all measured runs."""
TURN_TOKENS = 185
"""Mean sampled tokens of a turn with ``benchmarks.loop --turn-tokens 300``."""
STEP_MS = {
    (False, 8): 7.41,
    (False, 64): 11.39,
    (False, 256): 13.99,
    (True, 8): 3.72,
    (True, 64): 5.34,
    (True, 256): 8.81,
}
"""Milliseconds per decoding step of the 20B by MXFP4 and requests (docs/performance/mxfp4.md)."""
MODEL = GptOssModelConfig(num_layers=24, num_experts=32)


@dataclass(frozen=True)
class CountingServer(ServerModel):
    """Server that counts the requests of its prefills."""

    prefills: list[int] = field(default_factory=list)

    def prefill_seconds(self, requests: int) -> float:
        self.prefills.append(requests)
        return super().prefill_seconds(requests)


@pytest.mark.parametrize(("workers", "measured"), [(4, 40.9), (16, 40.2)])
def test_rollout_of_full_batches_agrees_with_measured_runs(workers: int, measured: float) -> None:
    """Two runs of ``benchmarks.loop --turn-tokens 300`` with these settings on 4 H200.

    Runs with fewer episodes are compared on docs/performance/loop.md
    (benchmarks/tests/test_predicted_figures.py).
    """
    overrides = [*LIMITS, *MXFP4, "rollout.tasks_per_step=128", f"rollout.workers={workers}"]
    overrides.append(NO_GATHERING)
    config = load_config(CONFIGS / "rl/gpt-oss-20b_1x4.yaml", RlConfig, overrides)
    predicted = predict_loop(config, turn_tokens=TURN_TOKENS).rollout_seconds
    assert predicted == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("mxfp4_experts", "requests"), list(STEP_MS))
def test_predicted_decoding_step_agrees_with_the_measured_step(
    mxfp4_experts: bool, requests: int
) -> None:
    predicted = 1000 * ServerModel(MODEL, mxfp4_experts).step_seconds(requests, context=640)
    assert predicted == pytest.approx(STEP_MS[mxfp4_experts, requests], rel=0.07)


def test_simulated_episode_takes_the_sum_of_its_parts() -> None:
    """One episode of two turns, so no other request shares a step and no batch is full."""
    server = ServerModel(MODEL, mxfp4_experts=True)
    result = simulate_rollout(server, [[300, 400]], slots=8, workers=0.5, tool_seconds=3)
    seconds = 240 / rollout_time.PROMPTS_PER_SECOND + rollout_time.ROLLOUT_EDGES
    seconds += 2 * server.prefill_seconds(1)
    seconds += 300 * server.step_seconds(1, 240) + 400 * server.step_seconds(1, 240 + 300 + 13)
    seconds += rollout_time.WORKER_SECONDS / 0.5 + rollout_time.OUTSIDE_SECONDS + 3
    assert result.seconds == pytest.approx(seconds)
    assert result.tokens == 240 + 300 + 13 + 400


def test_simulated_server_ends_every_turn_and_counts_all_tokens() -> None:
    server = ServerModel(MODEL)
    result = simulate_rollout(server, [[300, 400], [1000]], slots=1, workers=1)
    # Two prompts of 240 tokens, and the output of one tool of 13.
    assert result.tokens == 1700 + 2 * 240 + 13
    both = simulate_rollout(server, [[300, 400], [1000]], slots=2, workers=1)
    assert both.seconds < result.seconds


def test_gathering_makes_fewer_prefills_and_shortens_rollouts() -> None:
    episodes = EpisodeLengths(TURN_TOKENS, 8, 1024, 4096).sample(256)

    def rollout(**settings: int) -> tuple[float, list[int]]:
        server = CountingServer(MODEL, mxfp4_experts=True, **settings)
        return simulate_rollout(server, episodes, 256, workers=4).seconds, server.prefills

    at_once, many = rollout(gather_passes=1)
    gathered, few = rollout()
    assert sum(many) == sum(few) == sum(map(len, episodes))
    # Servers' logs of such a rollout with 64 episodes per worker have 1,134 prefills without
    # gathering.
    assert 950 < len(many) < 1350 and len(few) < len(many) / 5
    assert 0.7 < gathered / at_once < 0.8


def test_requests_wait_a_bounded_time_for_a_common_prefill() -> None:
    """Only the second turn of the short episode is prefilled while others decode."""
    long = [[1000]] * 40

    def server_seconds(passes: int) -> float:
        server = ServerModel(MODEL, mxfp4_experts=True, gather_passes=passes)
        # The wait counts only if the second turn ends last.
        return simulate_rollout(server, [*long, [200, 1023]], 256, workers=1).seconds

    # Four requests would end the gathering, and only one waits. It decodes as many steps alone at
    # the end.
    step = server_seconds(2) - server_seconds(1)
    assert server_seconds(16) - server_seconds(1) == pytest.approx(15 * step, rel=0.01)
    assert step == pytest.approx(
        ServerModel(MODEL, mxfp4_experts=True).step_seconds(1, 1400), rel=0.1
    )


def test_rollout_is_longer_with_few_workers_or_slow_tools() -> None:
    server = ServerModel(MODEL, mxfp4_experts=True)
    episodes = [[50, 50, 50]] * 128

    def seconds(workers: float, tool_seconds: float = 0.0) -> float:
        return simulate_rollout(server, episodes, 256, workers, tool_seconds).seconds

    assert seconds(0.25) > seconds(1) > seconds(4)
    # Three turns have two calls between them. All episodes wait at the same time.
    assert seconds(4, tool_seconds=10) - seconds(4) == pytest.approx(20, abs=1)


def list_warnings(*overrides: str, gigabytes: float | None = H200) -> list[str]:
    path = CONFIGS / "rl/gpt-oss-20b_1x4.yaml"
    config = load_config(path, RlConfig, [*LIMITS, *MXFP4, *overrides])
    return rollout_warnings(config.rollout, config.model, config.dtype, gigabytes)


def test_half_empty_batches_are_reported_with_a_better_value() -> None:
    (warning,) = list_warnings("rollout.tasks_per_step=63")
    assert "rollout.tasks_per_step=63 gives a server 126 episodes, but 256 fit" in warning
    assert "set rollout.tasks_per_step to up to 128" in warning
    assert list_warnings("rollout.tasks_per_step=64") == []
    assert list_warnings("rollout.tasks_per_step=63", gigabytes=None) == []


def test_memory_and_lengths_limit_the_batch_that_is_advised() -> None:
    long = ["rollout.max_episode_tokens=32768", "rollout.max_sampled_tokens_per_turn=4096"]
    config = load_config(
        CONFIGS / "rl/gpt-oss-20b_1x4.yaml",
        RlConfig,
        [*MXFP4, *long, "training.max_tokens_per_micro_batch=32768"],
    )

    def fitting(*arguments: str, tokens: float = 16_384) -> int:
        engine = config.rollout.engine.model_copy(update={"arguments": list(arguments)})
        return batch_size(engine, config.model, config.dtype, H200, tokens)

    # 0.4 of the GPU without weights and activations holds 21.6 windowed and full layers of 2 KiB.
    free = 0.4 * H200 * 1e9 - 14.3e9 - 7.3e9
    assert fitting() == pytest.approx(free / (12 + 0.8 * 12) / 2048 / 16_384, rel=0.05)
    narrow = fitting("--swa-full-tokens-ratio", "0.2")
    assert narrow == pytest.approx(1.5 * fitting(), rel=0.05)
    assert fitting("--swa-full-tokens-ratio=0.2") == narrow
    assert fitting("--swa-full-tokens-ratio", "0.9", "--swa-full-tokens-ratio", "0.2") == narrow
    assert fitting(tokens=1000) == config.rollout.engine.max_running_requests
    assert fitting(tokens=1e9) == 1


def test_unmerged_adapters_leave_less_memory_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan, its warning and the check at the start of a run count 0.35 GB of adapters."""
    path = CONFIGS / "rl/gpt-oss-20b-adapter_1x1_80gb.yaml"
    overrides = [*MXFP4, "adapter.merge_experts=false", "rollout.engine.max_running_requests=9999"]
    config = load_config(path, RlConfig, [*overrides, "rollout.tasks_per_step=1"])
    gigabytes = 84.9

    def fitting(adapter: AdapterConfig | None) -> int:
        engine = config.rollout.engine
        assert isinstance(engine, SglangConfig)
        return batch_size(engine, config.model, config.dtype, gigabytes, 240 + 100, adapter)

    fewer = fitting(None) - fitting(config.unmerged_adapter)
    needs = ServerNeeds.of(config.model, config.dtype, 1)
    # Half of the layers are windowed and keep 0.8x the tokens.
    assert 340 * fewer * needs.token_bytes == pytest.approx(0.35e9, rel=0.02)

    slots: list[int] = []

    def simulate(_server: ServerModel, _episodes: object, batch: int, *_: float) -> RolloutTime:
        slots.append(batch)
        return RolloutTime(1.0, 1)

    monkeypatch.setattr(rollout_plan, "simulate_rollout", simulate)
    turn_tokens = 100 / config.rollout.max_turns
    predict_loop(config, Hardware(gigabytes, "H100"), turn_tokens=turn_tokens)
    assert set(slots) == {fitting(config.unmerged_adapter)}

    def fitting_in_warning(text: str) -> int:
        return int(text.split("episodes, but ")[1].split(" fit")[0])

    arguments = ["plan", str(path), "--gpu-gb", str(gigabytes), "--turn-tokens", str(turn_tokens)]
    printed = CliRunner().invoke(app, [*arguments, *overrides, "rollout.tasks_per_step=1"]).output
    logged = warnings_at_start(config, gigabytes, monkeypatch)
    for text, length in ((printed, turn_tokens), (logged, None)):
        (without,) = rollout_warnings(config.rollout, config.model, config.dtype, gigabytes, length)
        assert fitting_in_warning(text) < fitting_in_warning(without)


def warnings_at_start(config: RlConfig, gigabytes: float, monkeypatch: pytest.MonkeyPatch) -> str:
    logged: list[str] = []
    monkeypatch.setattr(start_checks, "smallest_gpu", lambda: ("H100", int(gigabytes * 1e9)))
    monkeypatch.setattr(
        start_checks.logger, "warning", lambda form, *words: logged.append(form % words)
    )
    start_checks.warn_about_rollouts(config)
    return "\n".join(logged)


def test_cache_ratio_that_is_no_number_is_rejected() -> None:
    with pytest.raises(ConfigError, match="--swa-full-tokens-ratio is much, which is not a number"):
        list_warnings("rollout.engine.arguments=[--swa-full-tokens-ratio, much]")


def test_few_rollout_workers_are_reported() -> None:
    (warning,) = list_warnings("rollout.tasks_per_step=128", "rollout.workers=4")
    assert "rollout.workers=4 gives a worker 256 episodes" in warning
    assert "Set rollout.workers=16, or leave it out" in warning
    assert list_warnings("rollout.tasks_per_step=128", "rollout.workers=8") == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configuration_fills_its_servers(path: Path) -> None:
    config = load_config(path, RlConfig)
    warnings = rollout_warnings(config.rollout, config.model, config.dtype, config.gpu_gb or H200)
    assert warnings == []


def test_plan_prints_warnings_and_uses_the_length_of_turns() -> None:
    def plan(*arguments: str) -> str:
        path = str(CONFIGS / "untested/rl/gpt-oss-20b_1x4_mxfp4.yaml")
        result = CliRunner().invoke(app, ["plan", path, "--gpu", "h200", *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    assert "warning: " not in plan()
    assert "warning: rollout.workers=1 gives a worker 576 episodes" in plan("rollout.workers=1")
    # Short turns need less cache, so 256 episodes fit instead of 147.
    short = plan("--turn-tokens", "100")
    assert "with 576 episodes of 8 turns of 100 tokens and 0 s per tool call" in short
    assert "warning: " not in short
    fewer = plan("--turn-tokens", "100", "rollout.tasks_per_step=60")
    assert "gives a server 120 episodes, but 256 fit" in fewer


def test_plan_for_h100_uses_its_decoding_rate() -> None:
    path = CONFIGS / "untested/rl/gpt-oss-20b_1x8_80gb.yaml"
    config = load_config(path, RlConfig)
    slow, fast = (predict_loop(config, Hardware(84.9, gpu)) for gpu in ("NVIDIA H100 80GB", "H200"))
    assert 1.3 < slow.rollout_seconds / fast.rollout_seconds < 1.43
    assert slow.update_seconds == fast.update_seconds
    plan = loop_plan(config, Hardware(84.9, "NVIDIA H100 80GB"))
    assert plan.startswith("a step at H100 rates (rollout) and H200 rates (update) with 256 ")
