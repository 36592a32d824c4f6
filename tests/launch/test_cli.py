"""Command line: help, and errors that name the mistake."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from transformers import GptOssConfig
from transformers.models.gpt_oss import GptOssForCausalLM
from typer.testing import CliRunner

from launch.cli import app, command_line
from rl_loop.config.load import dump_config, load_config
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.tracking.run_lock import locked_run
from tests.support.forked_workers import forked_python
from tests.support.launch.forked_command import ForkedCommand
from tests.support.processor_speed import slowness
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
RL, SFT = "configs/rl/tiny_retool.yaml", "configs/sft/tiny_retool.yaml"


def gptoss(*arguments: str, timeout: float = PATIENCE_SECONDS) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from launch.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def gptoss_in_folder(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed entry point with ``folder`` as first entry of PYTHONPATH."""
    paths = os.pathsep.join([".", str(ROOT), str(ROOT / "kernels")])
    return subprocess.run(
        [sys.executable, "-P", "-c", "from gptoss_command import main; main()", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def test_user_module_named_launch_does_not_hide_ours(tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text("raise SystemExit('the wrong launch')\n")
    done = gptoss_in_folder(tmp_path, "config", "tiny_retool", "--changed")
    assert done.returncode == 0, done.stderr
    assert "tiny_retool" in done.stdout


def test_module_that_hides_a_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "converters.py").write_text("")
    done = gptoss_in_folder(tmp_path, "--version")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    hidden = "converters.py hides megatron-gptoss's package converters. Rename it"
    assert hidden in line and str(tmp_path) in line


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["rl"],
        ["sft"],
        ["eval"],
        ["play"],
        ["serve"],
        ["convert"],
        ["convert", "import"],
        ["data"],
        ["data", "preview"],
        ["data", "generate"],
        ["list"],
        ["report"],
        ["doctor"],
        ["launch"],
        ["launch", "start"],
        ["launch", "logs"],
    ],
)
def test_help_explains_every_command(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage" in result.stdout
    for line in result.stdout.splitlines():
        assert not line.strip().endswith("--resume │"), "an option without explanation"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("optimizer.learning_rate=1", "optimizer.learning_rate: unknown key"),
        ("training.steps=many", "training.steps"),
        ("training.steps=0", "training.steps"),
        ("parallel.world_size=3", "parallel.expert"),
        ("parallel.tensor=2", "parallel.world_size (1) must be a multiple"),
        ("rollout.max_episode_tokens=100000", "rollout.max_episode_tokens (100000) exceeds"),
        ("model=huge", "model: huge.yaml is neither in"),
        ("tasks.sources.retool.train_path=x.jsonl", "train_path needs held_out_path"),
        ("steps", "not of the form key=value"),
    ],
)
def test_a_wrong_value_is_named_before_anything_is_written(
    override: str,
    named: str,
    tmp_path: Path,
) -> None:
    extra = ["parallel.expert=2"] if "world_size=3" in override else []
    arguments = ["rl", RL, override, *extra, f"output_dir={tmp_path}"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), "a traceback"
    assert named in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_value_is_named_in_under_two_seconds(tmp_path: Path) -> None:
    before = os.times()
    result = gptoss("rl", RL, "training.steps=many", f"output_dir={tmp_path}")
    after = os.times()
    assert result.returncode == 1
    assert "training.steps" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []
    # Processor time, because other tests run concurrently. Alone, the command takes 2 s. The next
    # test shows why it is fast.
    user = after.children_user - before.children_user
    system = after.children_system - before.children_system
    assert user + system < 4 * slowness()


def test_configurations_and_command_lines_import_nothing_heavy() -> None:
    commands = [
        ["rl", "--help"],
        ["rl", RL, "--no-such-option"],
        ["convert", "import"],
        ["plan", RL],
    ]
    doing = "".join(f"\n    with suppress(SystemExit): main({words})" for words in commands)
    load = f"from rl_loop.config.load import load_rl_config; load_rl_config(Path('{RL}'))"
    heavy = {"torch", "ray", "transformers", "megatron", "matplotlib", "pandas"}
    assert imported_by(load + doing, heavy) == "set()"


def test_command_searches_for_garbage_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Python's default, 700 objects, the search takes a fifth of the time of a start."""
    found: list[int] = []
    monkeypatch.setattr(command_line, "app", lambda: found.append(gc.get_threshold()[0]))
    usual = gc.get_threshold()
    gc.set_threshold(700)
    try:
        command_line.main()
    finally:
        gc.set_threshold(*usual)
    assert found == [20_000]


def test_help_and_completion_do_not_import_config_schema() -> None:
    schema = {"rl_loop.config.every_run", "omegaconf"}
    assert imported_by("main(['--help'])", schema) == "set()"

    name = {"COMP_WORDS": "gptoss rl tiny_ret", "COMP_CWORD": "2"}
    completion = {"_GPTOSS_COMPLETE": "complete_bash", **name}
    assert imported_by("main(prog_name='gptoss')", schema, **completion) == "set()"


def imported_by(doing: str, packages: set[str], **environment: str) -> str:
    """Run ``doing`` in a new process. Return which ``packages`` it has imported, as text."""
    code = f"""
import sys
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from launch.cli import app as main
with suppress(SystemExit), redirect_stdout(StringIO()):
    {doing}
print({packages} & set(sys.modules))
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("gptoss do", "doctor"),
        ("gptoss rl tiny_ret", "tiny_retool"),
        ("gptoss data preview tiny_s", "tiny_shop"),
        ("gptoss rl configs/rl/tiny_g", "configs/rl/tiny_gsm8k.yaml"),
        ("gptoss sft tiny_retool training.st", "training.steps="),
        ("gptoss launch gpt-oss-20b_1x8 --no", "--nodes"),
    ],
)
def test_the_shell_completes_commands_configurations_and_keys(typed: str, completed: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    done = CliRunner().invoke(
        app, prog_name="gptoss", env={"_GPTOSS_COMPLETE": "complete_bash", **words}
    )
    assert completed in done.output.split()


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["rl", "tiny_retol"], "did you mean tiny_retool"),
        (["launch", "stats", "X"], "Did you mean 'status'"),
        (["launch", "sttaus"], "No such command 'sttaus'. Did you mean 'status'"),
        (["launch", "no_such_configuration"], "no such file"),
        (["rl", RL, "optimzer.lr=1"], "optimzer: unknown key; did you mean optimizer?"),
        (["rl", RL, "steps=1"], "steps: unknown key; did you mean training.steps?"),
        (["rl", RL, "qwxz=1"], "qwxz: unknown key\n"),
        (["rl", RL, "tasks.sources=[1]"], "tasks.sources=[1] sets a list where the file has keys"),
    ],
)
def test_typo_error_suggests_the_probable_word(arguments: list[str], answer: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0
    assert answer in done.output


def test_broken_yaml_names_the_file(command: ForkedCommand, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [unclosed\n")
    result = command.run("rl", str(broken))
    assert result.returncode == 1
    assert "broken.yaml: not a YAML file that can be read" in result.stderr


def test_a_directory_is_no_configuration(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["config", str(tmp_path)])
    assert ended.exit_code == 1
    assert ended.output == f"gptoss: {tmp_path} is a directory. Name the YAML file\n"


def test_a_missing_config_is_named(command: ForkedCommand) -> None:
    result = command.run("rl", "configs/rl/none.yaml")
    assert result.returncode == 1
    assert "configs/rl/none.yaml: no such file" in result.stderr


def test_a_missing_model_directory_is_named(command: ForkedCommand, tmp_path: Path) -> None:
    result = command.run("eval", RL, "--weights", str(tmp_path / "none"))
    assert result.returncode == 1
    assert "none does not exist. `hf download MODEL --local-dir " in result.stderr
    assert "Traceback" not in result.stderr


def test_a_bad_line_of_a_task_file_is_named(command: ForkedCommand, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    good = (
        '{"task_id": "a", "messages": [{"role": "user", "content": "1+1?"}], "ground_truth": "2"}'
    )
    tasks.write_text(good + '\n{"task_id": \n')
    (tmp_path / "x").mkdir()
    (tmp_path / "x/metrics.jsonl").write_text('{"step": 0}\n')
    result = command.run(
        "sft", SFT, f"tasks.sources.retool.train_path={tasks}", f"tasks.sources.retool.held_out_path={tasks}",
        f"output_dir={tmp_path}", "name=x", "--overwrite",
    )  # fmt: skip
    assert result.returncode == 1
    assert "tasks.jsonl, line 2" in result.stderr
    assert "loading the policy" not in result.stdout + result.stderr
    assert (tmp_path / "x/metrics.jsonl").exists(), (
        "nothing is overwritten by a run that does not begin"
    )


def test_actor_error_is_one_line_and_keeps_the_earlier_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/metrics.jsonl").write_text('{"step": 0}\n')
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    model = load_config(ROOT / SFT, SftConfig).model
    (damaged / "config.json").write_text(json.dumps(model.to_hf_config()))
    (damaged / "model.safetensors").write_bytes(b"no safetensors")

    options = [f"initial_weights={damaged}", f"output_dir={tmp_path}", "name=x", "--overwrite"]
    command = [*forked_python(), "-m", "launch", "sft", SFT, *options]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )

    assert result.returncode == 1
    *events, line = result.stderr.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \S+ INFO rl_loop\.", event) for event in events)
    assert re.match(rf"gptoss: {re.escape(str(damaged))}/model\.safetensors.*", line)
    assert line.endswith(f"The traceback is in {tmp_path}/x/error.log")
    assert "TrainerProcess" in (tmp_path / "x/error.log").read_text()
    assert (tmp_path / "x/metrics.jsonl").read_text() == '{"step": 0}\n'


def test_an_unknown_fault_is_one_line_that_names_its_traceback(tmp_path: Path) -> None:
    code = """
import sys
from launch import cli, doctor
def fail(): raise KeyError("a fault of ours")
doctor.print_doctor = fail
sys.argv = ["gptoss", "doctor"]
cli.main()
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert result.returncode == 1
    (log,) = tmp_path.glob("gptoss-error-*.log")
    assert result.stderr == f"gptoss: KeyError: 'a fault of ours'. The traceback is in {log}\n"
    assert "in fail" in log.read_text()


@pytest.mark.parametrize("option", ["--resume", "--overwrite"])
def test_a_second_run_of_one_name_is_rejected(
    command: ForkedCommand, option: str, tmp_path: Path
) -> None:
    with locked_run(tmp_path / "x"):
        (tmp_path / "x/config.yaml").write_text("name: x\n")
        result = command.run("sft", SFT, f"output_dir={tmp_path}", "name=x", option)
        assert (tmp_path / "x/config.yaml").exists()
    assert result.returncode == 1
    assert re.fullmatch(
        rf"gptoss: {tmp_path}/x is in use by process {os.getpid()} on .*\n",
        result.stderr,
    )


def test_closed_output_goes_to_a_file_and_the_run_continues(tmp_path: Path) -> None:
    """``gptoss rl ... | tee log`` does this: Ctrl-C kills tee, and the run must survive."""
    code = f"""
import sys, time
from pathlib import Path
from launch.output import keep_output_in_log
keep_output_in_log(Path({str(tmp_path / "output.log")!r}))
print("heard")
sys.stdin.readline()
print("not heard")
print("nor this", file=sys.stderr)
Path({str(tmp_path / "went on")!r}).touch()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin and process.stdout and process.stderr

    # Close both pipes between two lines of the program.
    assert process.stdout.readline() == b"heard\n"
    process.stdout.close()
    process.stderr.close()
    process.stdin.write(b"\n")
    process.stdin.close()

    assert process.wait(30) == 0
    assert (tmp_path / "went on").exists()
    assert (tmp_path / "output.log").read_text() == "not heard\nnor this\n"


def test_closed_pipe_is_not_an_error() -> None:
    """``gptoss plan CONFIG | head`` does this."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "launch", "plan", "gpt-oss-20b_1x4"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.wait(PATIENCE_SECONDS) == 128 + signal.SIGPIPE
    assert process.stderr.read() == b""
    process.stderr.close()


def test_an_existing_run_is_not_overwritten(command: ForkedCommand, tmp_path: Path) -> None:
    run = tmp_path / "tiny_retool"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 0}\n')
    result = command.run("rl", RL, f"output_dir={tmp_path}")
    assert result.returncode == 1
    assert "already has a run" in result.stderr
    assert "--resume" in result.stderr
    assert (run / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_final_hint_of_a_run_is_a_valid_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation reads the run's own configuration file, which includes overrides."""
    trained, evaluated = [], []

    def run_rl(config: RlConfig, *arguments: object, **options: object) -> Path:
        trained.append(config)
        config.directory.mkdir(parents=True)
        (config.directory / "config.yaml").write_text(dump_config(config))
        return config.directory

    def run_evaluation(config: RlConfig, *arguments: object) -> list[object]:
        evaluated.append((config, *arguments))
        return []

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("rl_loop.run.run_rl", run_rl)
    monkeypatch.setattr("rl_loop.run.run_evaluation", run_evaluation)
    monkeypatch.setattr("launch.output.keep_output_in_log", lambda file: None)
    monkeypatch.setattr("launch.progress.describe_outcome", lambda directory: "")
    monkeypatch.setattr("launch.report.build_report", lambda directory: "")
    monkeypatch.setattr("launch.evaluation_table.print_evaluation", lambda *episodes: None)
    # The weights are not read here. Another test checks whether they fit the model.
    check = "rl_loop.lifecycle.start_checks.check_evaluation_requirements"
    monkeypatch.setattr(check, lambda *arguments: None)

    overrides = [f"output_dir={tmp_path / 'my runs'}", "model.num_layers=2", "rollout={workers: 1}"]
    ended = CliRunner().invoke(app, ["rl", RL, *overrides])
    assert ended.exit_code == 0, ended.output
    hint = ended.output.splitlines()[-1].removeprefix("evaluate the exported checkpoint: gptoss ")

    copied = CliRunner().invoke(app, shlex.split(hint))
    assert copied.exit_code == 0, copied.output
    ((config, weights, _),) = evaluated
    assert config == trained[0]
    assert weights == config.directory / "export"


def all_commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, group
    for name, command in getattr(group, "commands", {}).items():
        yield from all_commands(command, (*words, name))


@pytest.mark.parametrize("width", ["60", "80", "120"])
def test_help_breaks_lines_once(width: str) -> None:
    """Lines are broken for the width only. Line breaks of the source are removed."""
    for words, _ in all_commands(typer.main.get_command(app)):
        output = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": width}).output
        lines = [line.removeprefix("│").removesuffix("│") for line in output.splitlines()]
        for line, following in itertools.pairwise(lines):
            start = len(following) - len(following.lstrip())
            is_continued = (
                following.strip() and start == len(line) - len(line.lstrip()) and start > 4
            )
            if not is_continued or "[" in following:
                continue
            first_word = following.split()[0]
            room = len(line) - len(line.rstrip()) - 1
            assert len(first_word) >= room, (words, line, following)


def test_verify_takes_both_orders(tmp_path: Path) -> None:
    hf, megatron = tmp_path / "hf", tmp_path / "megatron"
    model = load_config(
        ROOT / "configs/rl/tiny_retool.yaml", RlConfig, ["model.num_layers=2"]
    ).model
    GptOssForCausalLM(GptOssConfig(**model.to_hf_config())).save_pretrained(hf)

    def run(*words: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["convert", *map(str, words)])
        return result.exit_code, result.output

    assert run("import", hf, megatron)[0] == 0
    for order in ((hf, megatron), (megatron, hf)):
        code, output = run("verify", *order)
        assert code == 0, output
    for words, command in (
        (("import", megatron, "new"), f"gptoss convert export {megatron} new"),
        (("export", hf, "new"), f"gptoss convert import {hf} new"),
    ):
        code, output = run(*words)
        assert code == 1 and command in output, output
