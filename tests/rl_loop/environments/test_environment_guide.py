"""Code and commands of docs/environments.md are extracted and run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.forked_workers import forked_python
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs/environments.md"
GPTOSS = 'gptoss() { $GPTOSS_PYTHON -m launch "$@"; }\n'
"""Shell function for the installed command, with the code of this checkout."""


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """Directory with the files of the guide."""
    files = re.findall(r"```\w+ (\S+)\n(.*?)```", GUIDE.read_text(), flags=re.S)
    expected = [
        "guessing.py",
        "test_guessing.py",
        "configs/sft/guessing.yaml",
        "configs/rl/guessing.yaml",
    ]
    assert [name for name, _ in files] == expected
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for name, code in files:
        (tmp_path / name).write_text(code)
    return tmp_path


def run(workplace: Path, *command: str) -> str:
    """Return the output of a command, or of Python with options, which must succeed."""
    python = forked_python()
    paths = os.pathsep.join([str(workplace), str(ROOT), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    environment["GPTOSS_PYTHON"] = shlex.join(python)
    done = subprocess.run(
        [*python, *command] if command[0].startswith("-") else command,
        cwd=workplace,
        env=environment,
        text=True,
        capture_output=True,
        timeout=2 * PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_guides_environment_has_40_lines_and_passes_its_test(workplace: Path) -> None:
    lines = [line for line in (workplace / "guessing.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 45
    said = run(
        workplace,
        "-m",
        "pytest",
        "-q",
        "test_guessing.py",
        "-p",
        "no:cacheprovider",
    )
    assert "2 passed" in said


ROWS = """
import sys
from pathlib import Path

from rl_loop.config.load import load_run_config
from rl_loop.tasks.codec import build_codec
from rl_loop.tasks.source import TaskMixture

config = load_run_config(Path(sys.argv[1]), "sft", [])
tasks = TaskMixture(config.tasks, build_codec(config))
tasks.check_demonstrations()
print(tasks.train(0, 1)[0].environment)
"""


def test_guides_rows_of_a_file_are_demonstrated(workplace: Path) -> None:
    """The method, the row and the source of "Read tasks from a file" fit the guide's class."""
    section = GUIDE.read_text().partition("## 6. Read tasks from a file")[2]
    blocks = re.findall(r"```(\w+)\n(.*?)```", section, flags=re.S)[:3]
    assert [kind for kind, _ in blocks] == ["python", "json", "yaml"]
    method, row, source = [text for _, text in blocks]
    with (workplace / "guessing.py").open("a") as module:
        module.write(f"\n{method}")
    for name in ("train", "test"):
        (workplace / f"{name}.jsonl").write_text(row.replace("a1", name))
    sft = yaml.safe_load((workplace / "configs/sft/guessing.yaml").read_text())
    (workplace / "rows.yaml").write_text(yaml.safe_dump(sft | yaml.safe_load(source)))

    said = run(workplace, "-c", ROWS, "rows.yaml")

    assert said.strip() == "guessing:GuessingEnvironment"


def test_guides_played_episodes_have_the_shown_output(workplace: Path) -> None:
    section = GUIDE.read_text().partition("## 4. Play an episode")[2].partition("\n## 5.")[0]
    shown = re.findall(r"```bash\n(.*?)```\n\n```\n(.*?)```", section, flags=re.S)
    assert len(shown) == 3
    module = workplace / "guessing.py"
    correct = module.read_text()
    mistaken = correct.replace(
        'parse_arguments(arguments).get("number")', 'parse_arguments(arguments)["number"]'
    )
    assert mistaken != correct

    # The second episode has the mistake of the text. The status of an invalid episode is 1.
    cases = [(correct, 0), (mistaken, 1), (correct, 0)]
    for (command, output), (code, status) in zip(shown, cases, strict=True):
        module.write_text(code)
        said = run(workplace, "bash", "-c", f"{GPTOSS}{command}[ $? = {status} ]")
        position = 0
        for part in output.split("...\n"):
            position = said.find(part, position)
            assert position >= 0, f"not in the output: {part}\n{said}"
            position += len(part)
        assert said.endswith(output.rpartition("...\n")[2])


@pytest.mark.slow
def test_guides_commands_train_a_policy_that_improves(workplace: Path) -> None:
    commands = re.search(r"```bash\n(export PYTHONPATH=\.\n.*?)```", GUIDE.read_text(), flags=re.S)[
        1
    ]
    assert commands.count("gptoss ") == 2
    # Only the search path differs from the guide, because the package is not installed here.
    pasted = commands.replace("PYTHONPATH=.", "PYTHONPATH=.:$PYTHONPATH")

    said = run(workplace, "bash", "-euc", GPTOSS + pasted)

    assert "report: runs/guessing/report.html" in said.replace("\n", "")
    records = [
        json.loads(line)
        for line in (workplace / "runs/guessing/metrics.jsonl").read_text().splitlines()
    ]
    steps = [record for record in records if "reward" in record]
    rewards = [step["reward"] for step in steps]
    assert len(steps) == 12
    assert all(step["grad_norm"] > 0 for step in steps), "a step had nothing to learn from"
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.3, rewards
    held_out = [record["held_out/accuracy"] for record in records if "held_out/accuracy" in record]
    assert held_out[-1] > held_out[0], held_out
