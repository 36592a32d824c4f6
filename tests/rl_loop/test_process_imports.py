"""Imports of a run's processes at their start, which delay every start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = "configs/rl/tiny_retool.yaml"

HEAVY = ("megatron", "transformers", "torch._dynamo", "sglang", "matplotlib", "pandas")
"""Modules that take up to a second or more to import."""

DRIVER = """
import os, sys
from contextlib import nullcontext
from pathlib import Path

from launch.cli import app
from ray import cloudpickle
from rl_loop import session
from rl_loop.rollout.pool import RolloutPool
from rl_loop.rollout.worker_actors import WorkerActors
from rl_loop.trainer.rank_state import RankPosition
from rl_loop.trainer.ray_ranks import RayRanks

arguments, heavy, worker = sys.argv[1].split(), sys.argv[2].split(), Path(sys.argv[3])

def engines_are_waited_for(pool):
    # All that a driver does before its first step is done.
    workers = pool._workers
    made_of = (workers._worker_class, workers._config, workers._engine_factory)
    worker.write_bytes(cloudpickle.dumps(made_of))
    print("heavy:", *[name for name in heavy if name in sys.modules], flush=True)
    os._exit(0)

# No Ray: what is imported does not depend on the actors.
session.ray_session = lambda store_bytes: nullcontext()
session.check_running_store = lambda need: None
RayRanks.__init__ = lambda self, settings: None
RayRanks.ready = lambda self: [RankPosition(0, True)]
WorkerActors._create = lambda self, index: None
RolloutPool.ready = engines_are_waited_for
app(arguments)
"""

WORKER = """
import pickle, sys
from pathlib import Path

heavy = sys.argv[1].split()
worker_class, settings, engine_factory = pickle.loads(Path(sys.argv[2]).read_bytes())

import rl_loop.engines.sglang.engine
print("heavy:", *[name for name in heavy if name in sys.modules])

worker_class(settings, engine_factory, 1)
print("heavy:", *[name for name in heavy if name in sys.modules])
"""


def heavy_imports(program: str, *arguments: str) -> list[list[str]]:
    """Run a program and return the modules of HEAVY in each of its reports."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    said = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("heavy:")]
    assert said, done.stdout
    return said


def test_slow_modules_are_imported_only_by_the_embedded_engine(tmp_path: Path) -> None:
    run = f"rl {CONFIG} initial_weights=null output_dir={tmp_path / 'runs'}"
    worker = tmp_path / "worker"
    assert heavy_imports(DRIVER, run, " ".join(HEAVY), str(worker)) == [[]]

    # A client of servers needs none of them. A model of transformers imports torch's compiler.
    client, embedded = heavy_imports(WORKER, " ".join(HEAVY), str(worker))
    assert client == []
    assert embedded == ["transformers", "torch._dynamo"]
