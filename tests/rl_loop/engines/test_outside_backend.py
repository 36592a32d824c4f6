"""Training with a rollout backend in a user's module, named as MODULE:CLASS."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_loop.config.errors import ConfigError
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.run import run_rl
from rl_loop.run_parts import build_tasks
from rl_loop.tracking.run_directory import read_json_lines
from tests.support.forked_workers import local_ray
from tests.support.rl_loop.tiny_runs import RL, Quiet

CONFIG = Path(__file__).parents[3] / "configs/rl/tiny_retool.yaml"

MODULE = '''
"""An engine whose every other turn is a script. The other turns, and all log-probs, are those of the policy."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rl_loop.engines.embedded.backend import build_engine
from rl_loop.engines.protocol import FinishReason, GenerateRequest, GenerateResult, WeightVersionSpan
from rl_loop.engines.backend import EngineConfig, RolloutBackend, ServerProcesses
from rl_loop.weight_sync.source import WeightSource


class Options(EngineConfig):
    """Settings of this backend."""

    script: list[int]
    log: Path
    shares_gpus: bool = False

    @property
    def server_processes(self) -> ServerProcesses:
        return ServerProcesses("server", "rollout.workers", 1, 0, share_trainer_gpus=self.shares_gpus)


class ScriptedEngine:
    """Samples ``script`` on odd seeds, with the log-probs that the policy gives it."""

    def __init__(self, engine: Any, script: list[int]) -> None:
        self.engine, self.script, self.version = engine, script, 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        seed = int(request.episode.rpartition("/")[2])
        if seed % 2 == 0:
            return await self.engine.generate(request)
        if request.on_begin is not None:
            request.on_begin()
        text = request.input_ids + self.script
        log_probs = await self.engine.score(text, request.sampling.temperature)
        count = len(self.script)
        spans = [WeightVersionSpan(0, count, self.version)]
        return GenerateResult(list(self.script), log_probs[-count:], FinishReason.STOP, spans)

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        return await self.engine.score(input_ids, temperature)

    async def abort(self, request_id: str | None = None) -> None:
        await self.engine.abort(request_id)

    async def sync_weights(self, named_tensors: Any, version: int) -> None:
        await self.engine.sync_weights(named_tensors, version)
        self.version = version

    async def close(self) -> None:
        await self.engine.close()


def build(model: Any, dtype: str, script: list[int]) -> ScriptedEngine:
    return ScriptedEngine(build_engine(model, dtype, max_batch_size=16), script)


class ScriptedBackend(RolloutBackend):
    Options = Options

    def note(self, what: str) -> None:
        with self.settings.log.open("a") as log:
            log.write(what + "\\n")

    def engine_factory(self) -> Any:
        return partial(build, self.context.model, self.context.dtype, self.settings.script)

    def sync_weights(self, source: WeightSource, version: int) -> None:
        self.note(f"sync {version}")
        self.workers.load_weights(source.weights(), version)

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        return self.workers.engine_scores(token_ids, temperature)

    def pause(self) -> None:
        self.note("pause")

    def engine_settings(self, names: Sequence[str]) -> dict[str, Any]:
        return {"engine": "scripted"}

    def close(self) -> None:
        self.note("close")
'''


@pytest.fixture(scope="module", autouse=True)
def one_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run Ray. This process and Ray's workers find the module in their search path."""
    directory = tmp_path_factory.mktemp("outside")
    (directory / "my_engine.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(directory)
        patched.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
        with local_ray(num_cpus=2, object_store_bytes=200 << 20):
            yield


def test_run_trains_three_steps_with_a_users_backend(tmp_path: Path) -> None:
    def config(script: list[int]) -> RlConfig:
        engine = f"{{type: 'my_engine:ScriptedBackend', options: {{script: {script}, log: {tmp_path}/log}}}}"
        options = [
            "training.steps=3",
            "evaluate_every=3",
            f"output_dir={tmp_path}",
            f"rollout.engine={engine}",
        ]
        return load_config(CONFIG, RlConfig, [*RL, *options])

    # A malformed turn has a lower reward, so the rewards of the episodes differ.
    script = [build_tasks(config([0])).codec.stop_token_ids[0]]
    run = run_rl(config(script), Quiet())

    steps = [record for record in read_json_lines(run / "metrics.jsonl") if "reward" in record]
    assert len(steps) == 3
    assert all(step["grad_norm"] > 0 for step in steps)
    assert all(step["mismatch/canary_gap"] < 1e-4 for step in steps)
    assert json.loads((run / "summary.json").read_text())["max_ratio_deviation"] == 0

    log = (tmp_path / "log").read_text().splitlines()
    assert log == ["sync 0", "pause", "sync 1", "pause", "sync 2", "pause", "sync 3", "close"]


def test_engines_sleep_before_a_resumed_run_syncs(tmp_path: Path) -> None:
    """A resumed trainer has its optimizer state on the GPU before the first sync."""

    def config(steps: int) -> RlConfig:
        options = f"{{script: [0], log: {tmp_path}/log, shares_gpus: true}}"
        return load_config(
            CONFIG,
            RlConfig,
            [
                *RL,
                f"training.steps={steps}",
                "training.checkpoint_every=1",
                "evaluate_every=9",
                f"output_dir={tmp_path}",
                f"rollout.engine={{type: 'my_engine:ScriptedBackend', options: {options}}}",
            ],
        )

    run_rl(config(1), Quiet())
    log = tmp_path / "log"
    assert log.read_text().splitlines() == ["sync 0", "pause", "sync 1", "close"]
    log.unlink()
    run_rl(config(2), Quiet(), resume=True)
    assert log.read_text().splitlines() == ["pause", "sync 1", "pause", "sync 2", "close"]


def test_options_of_a_users_backend_are_checked_on_load() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine\.script: Field required"):
        load_config(CONFIG, RlConfig, ["rollout.engine.type=my_engine:ScriptedBackend"])
