"""Links, commands, quoted errors and the reference in the documentation are correct."""

from __future__ import annotations

import ast
import doctest
import importlib
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent, indent

import pytest
import typer
import yaml
from typer.testing import CliRunner

from launch.cli import app
from rl_loop.config.load import load_run_config
from rl_loop.config.run import RlConfig
from rl_loop.config.shipped import find_config, shipped_files
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.environments import Task, make_offline_environment
from rl_loop.run_parts import build_tasks
from rl_loop.tracking.metrics import StepMetrics
from rl_loop.tracking.step_metrics import add_rollout_metrics
from scripts.reference import API, configuration_page
from tests.support.forked_workers import forked_python

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
PACKAGES = ("kernels", "megatron_gptoss", "converters", "rl_loop", "launch")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.S | re.M)


@cache
def list_anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    anchors = set()
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.M):
        kept = [letter for letter in heading.lower() if letter.isalnum() or letter in " -_"]
        anchors.add("".join(kept).replace(" ", "-"))
    return anchors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in list_anchors(file), f"{page.name}: {target}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    linked = {(ROOT / "docs" / path).resolve() for path in re.findall(r"\]\(([\w/.-]+)", index)}
    pages = set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs/README.md"}
    assert pages <= linked


# ---- commands


def commands_in(page: Path) -> Iterator[list[str]]:
    """Yield the ``gptoss`` commands in a page's code as lists of words. Skip synopses."""
    text = re.sub(r" *\\\n *", " ", page.read_text())
    for line in re.findall(r"^(?: {4,})?((?:\.venv/bin/)?gptoss .*)$", text, flags=re.M):
        command = re.split(r" {2,}#| # | {3,}", line)[0]
        is_synopsis = re.search(r"\[[\w(-]+[ =].*\]|\.\.\.|\|", command)
        has_placeholder = re.search(r"[=_]S\b|ENV", command)
        is_output = re.match(r"gptoss \d", command)
        if is_synopsis or has_placeholder or is_output:
            continue
        yield shlex.split(command)[1:]


COMMANDS = [
    pytest.param(words, id=f"{page.stem}: {' '.join(words)[:60]}")
    for page in PAGES
    for words in commands_in(page)
]


def test_documentation_has_commands() -> None:
    assert len(COMMANDS) > 50


@pytest.mark.parametrize("words", COMMANDS)
def test_documented_commands_are_valid(words: list[str]) -> None:
    """Command names, options, argument counts, configurations and overrides are valid."""
    command = typer.main.get_command(app)
    arguments = words
    while hasattr(command, "commands"):
        if words[0].startswith("--"):
            assert words[0] in [name for option in command.params for name in option.opts]
            return
        if arguments[0] not in command.commands and command.name in ("launch", "certify"):
            arguments = [next(iter(command.commands)), *arguments]
        command = command.commands[arguments[0]]
        arguments = arguments[1:]
    context = command.make_context(command.name, list(arguments))

    path = context.params.get("path")
    is_shipped = path is not None and str(path).startswith("configs/") and (ROOT / path).is_file()
    kind = path.parent.name if path is not None else None
    if str(path).startswith("configs/") and kind in ("rl", "sft"):
        assert is_shipped or path.stem in ("guessing", "shop"), path
    overrides = context.params.get("overrides")
    if is_shipped and "algorithm=sapo" not in (overrides or []):  # a file that the reader writes
        load_run_config(ROOT / path, kind, overrides)


def test_one_gpu_guide_continues_from_the_base_of_its_chats() -> None:
    """RL accepts the adapters of SFT only with equal base and adapter settings."""
    page = ROOT / "docs/getting_started/one_gpu.md"
    runs = {words[0]: words[1:] for words in commands_in(page) if words[0] in ("sft", "rl")}
    sft = load_run_config(ROOT / runs["sft"][0], "sft", runs["sft"][1:])
    rl = load_run_config(ROOT / runs["rl"][0], "rl", runs["rl"][1:])
    assert rl.initial_adapter == sft.output_dir / sft.name
    for key in ("model", "initial_weights", "adapter", "quantization"):
        assert getattr(rl, key) == getattr(sft, key), key


CHEAP = {"plan", "config", "--version"}
RUN = [
    parameter
    for parameter in COMMANDS
    if parameter.values[0][0] in CHEAP or "--dry-run" in parameter.values[0]
]


@pytest.mark.parametrize("words", RUN)
def test_documented_commands_without_a_run_succeed(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "CONFIG" in words:
        words = [{"CONFIG": "tiny_retool", "NAME": "local"}.get(word, word) for word in words]
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert done.output.strip()


# ---- quoted errors


@cache
def texts_in_the_code() -> list[str]:
    """Return all strings of the product. An ellipsis replaces each placeholder of an f-string."""

    class Texts(ast.NodeVisitor):
        def __init__(self) -> None:
            self.found: list[str] = []

        def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            self.found.append("".join(map(str, parts)))

        def visit_Constant(self, node: ast.Constant) -> None:
            if isinstance(node.value, str):
                self.found.append(node.value)

    texts = Texts()
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            texts.visit(ast.parse(file.read_text()))
    return texts.found


def is_in_the_code(quoted: str) -> bool:
    """Return True if a string of the code contains the longest part of ``quoted``."""
    pieces = [piece.strip() for piece in quoted.split("…") if len(piece.strip()) > 2]
    longest = max(pieces, key=len)
    return any(longest in text for text in texts_in_the_code())


def quotations() -> list[str]:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    first_cells = re.findall(r"^\| (`.*?`)[^|]*\|", page, flags=re.M)
    return [cell.strip("`") for cell in first_cells]


OF_OTHERS = {"CUDA out of memory"}
"""Messages of torch."""


def test_messages_of_troubleshooting_page_exist_in_the_code() -> None:
    quoted = quotations()
    assert len(quoted) > 25
    unknown = [text for text in quoted if text not in OF_OTHERS and not is_in_the_code(text)]
    assert not unknown
    assert not is_in_the_code("… nobody has written this message …")


# ---- the reference


def test_reference_equals_docstrings() -> None:
    program = [sys.executable, "scripts/reference.py", "--check"]
    done = subprocess.run(
        program,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_reference_has_every_key_of_shipped_configurations() -> None:
    page = configuration_page()
    for command in ("rl", "sft"):
        for file in shipped_files(command):
            for key in load_run_config(file, command).model_dump():
                assert f"| `{key}` |" in page, key
    assert sum(len(names) for modules in API.values() for names in modules.values()) > 30


# ---- programs of pages, with their output

PAGES_WITH_PROGRAMS = ("library.md", "hyperparameters.md", "design/algorithms.md", "rewards.md")
PROGRAMS = {
    page: re.findall(
        r"^```python\n(.*?)^```\n\n```\n(.*?)^```",
        (ROOT / "docs" / page).read_text(),
        flags=re.S | re.M,
    )
    for page in PAGES_WITH_PROGRAMS
}


def run_python(code: str, directory: Path = ROOT, is_fresh: bool = False) -> str:
    """Run a program in a directory, and return its output.

    Args:
        code: the program.
        directory: its working directory.
        is_fresh: use a new interpreter instead of a fork that has imported large packages.
    """
    python = [sys.executable] if is_fresh else forked_python()
    done = subprocess.run(
        [*python, "-c", code],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        pytest.param(code, printed, id=f"{page} {number}")
        for page, programs in PROGRAMS.items()
        for number, (code, printed) in enumerate(programs)
    ],
)
def test_programs_of_pages_print_the_shown_output(code: str, printed: str) -> None:
    assert run_python(code) == printed


@pytest.mark.parametrize(
    ("page", "least"),
    [
        ("library.md", 7),
        ("hyperparameters.md", 1),
        ("design/algorithms.md", 4),
        ("rewards.md", 1),
    ],
)
def test_pages_have_output_for_every_program(page: str, least: int) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert len(PROGRAMS[page]) == text.count("```python\n") >= least


MODULES_WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("kernels.")
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if "    >>> " in path.read_text()
]


@pytest.mark.parametrize("module", MODULES_WITH_EXAMPLES)
def test_docstring_examples_print_the_shown_values(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


HEAVY = {"torch", "megatron", "ray", "transformers", "datasets"}
"""Packages whose import takes a second, or hundreds of megabytes."""


WITHOUT_TORCH = """
import importlib, sys
sys.modules["torch"] = None
for name in {}:
    try:
        importlib.import_module(name)
    except ImportError:
        print(name)
"""
"""Program that prints which modules need torch."""


def test_library_imports_only_the_listed_large_packages() -> None:
    page = (ROOT / "docs/library.md").read_text()
    section = page.partition("## Import cost")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \| [\d.]+ \| \d+ MB \| (\w+)", section, flags=re.M)
    assert len(rows) == 8
    modules = {"none": [], "torch": []}
    for cell, listed in rows:
        modules[listed] += re.findall(r"`([\w.]+)`", cell)
    program = "import sys, {}\nprint(*sys.modules)"
    for listed, names in modules.items():
        loaded = run_python(program.format(", ".join(names)), is_fresh=True).split()
        assert HEAVY & {*loaded} == {listed} - {"none"}, names

    # Each of the modules with torch needs it.
    failing = run_python(WITHOUT_TORCH.format(modules["torch"]), is_fresh=True).split()
    assert failing == modules["torch"]


def test_mcp_example_plays_its_episode_and_loads(tmp_path: Path) -> None:
    page = (ROOT / "docs/mcp_example.md").read_text()
    blocks = re.findall(r"^```(?:python|json|yaml)?\n(.*?)^```", page, flags=re.S | re.M)
    server, train, held_out, program, printed, tasks = blocks
    files = {"shop_server.py": server, "train.jsonl": train, "held_out.jsonl": held_out}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert run_python(program, tmp_path) == printed

    shipped = yaml.safe_load((ROOT / "configs/rl/gpt-oss-20b-adapter_1x1.yaml").read_text())
    (tmp_path / "shop.yaml").write_text(yaml.safe_dump(shipped | yaml.safe_load(tasks)))
    (command,) = re.findall(r"^    gptoss rl shop.yaml (.*)", page, flags=re.M)
    overrides = command.replace("CHECKOUT", str(ROOT)).split()
    config = load_run_config(tmp_path / "shop.yaml", "rl", overrides)
    assert isinstance(config, RlConfig)
    assert config.tasks.sources["shop"].environment == "mcp"
    # Defaults of both would end the run: a folder that does not exist, a Python without SGLang.
    assert config.initial_weights == ROOT / "models/gpt-oss-20b"
    assert config.rollout.engine.python == "/opt/sglang/bin/python"


# ---- the pages about tasks and one step


def named_blocks(page: str) -> dict[str, str]:
    """Return the code blocks of a page that have a file name. Steps of a list indent theirs."""
    blocks = re.findall(r"^ *```\w+ (\S+)\n(.*?)^ *```", page, flags=re.S | re.M)
    return {name: dedent(text) for name, text in blocks}


def test_tasks_page_writes_its_rows_and_configurations_load(tmp_path: Path) -> None:
    page = (ROOT / "docs/tasks.md").read_text()
    files = named_blocks(page)
    printed = run_python(files.pop("make_tasks.py"), tmp_path)
    assert f"```\n{printed}" in page
    assert (tmp_path / "train.jsonl").read_text().splitlines()[0] in page
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        load_run_config(tmp_path / name, "sft" if "_sft" in name else "rl", None)
    assert len(files) == 4


def test_rewards_page_writes_its_tasks_and_configurations_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/rewards.md").read_text()
    files = named_blocks(page)
    printed = indent(run_python(files.pop("make_tasks.py"), tmp_path), "   ")
    assert f"   ```\n{printed}   ```" in page
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = load_run_config(tmp_path / "target.yaml", "rl", None)
    assert config.algorithm.shaping["length"].options == {"tokens": 40}
    tasks = build_tasks(load_run_config(tmp_path / "curriculum.yaml", "rl", None))
    assert tasks.selects_tasks
    assert tasks.select(0, 48, step=0) == list(range(48))
    assert len(files) == 3


def output_blocks(page: str) -> list[str]:
    """Return the code blocks of a page without a language."""
    blocks = re.findall(r"^```(.*?)\n(.*?)^```$", page, flags=re.S | re.M)
    return [text for language, text in blocks if not language]


def run_gptoss(*words: str, directory: Path) -> str:
    """Run ``gptoss`` in a directory as a user would, and return its output."""
    done = subprocess.run(
        [*forked_python(), "-m", "launch", *words],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def is_shown(shown: str, printed: str) -> bool:
    """Return True if a page shows this output. Durations and the places of "..." may differ."""
    pattern = re.escape(shown).replace(re.escape("..."), "(?:.|\n)*")
    pattern = re.sub(r"\d+:\d\d", r"\\d+:\\d\\d", pattern)
    pattern = re.sub(r"(tokens/s\\ )[\d,]+", r"\1[\\d,]+", pattern)
    return re.fullmatch(pattern, printed) is not None


@pytest.mark.slow
def test_one_step_page_shows_what_its_programs_print(tmp_path: Path) -> None:
    """Run all commands and programs of docs/one_step.md, as a reader would."""
    tasks = (ROOT / "docs/tasks.md").read_text()
    page = (ROOT / "docs/one_step.md").read_text()
    files = named_blocks(tasks) | named_blocks(page)
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    run_python(files["make_tasks.py"], tmp_path)
    fine_tuning = run_gptoss("sft", "pens_sft.yaml", directory=tmp_path)
    step = run_gptoss("rl", "pens.yaml", "name=one_step", "training.steps=1", directory=tmp_path)
    programs = [name for name in named_blocks(page) if name != "read_step.py"]
    printed = {name: run_python(files[name], tmp_path) for name in programs}

    assert re.search(r"computed (\S+), recorded \1$", printed["show_group.py"], flags=re.M)
    (loss,) = re.findall(r"step 1/1 .* loss (\S+)", step)
    assert printed["show_loss.py"].startswith(f"loss {loss} over ")

    # The last bits of a sum decide some tokens. Equal losses of a fine-tuning show equal kernels.
    if not any(is_shown(shown, fine_tuning) for shown in output_blocks(tasks)):
        pytest.skip("the pages have the numbers of another processor")
    _, *outputs = output_blocks(page)
    for shown, actual in zip(outputs, [step, *printed.values()], strict=True):
        assert is_shown(shown, actual), actual


# ---- pages for people who change the code


def test_files_that_show_a_step_define_the_named_functions() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.partition("Five files show a step")[2].partition("\n\n`rl_loop/session.py`")[0]
    items = re.split(r"^\d\. ", section, flags=re.M)[1:]
    assert len(items) == 5
    text = "".join((ROOT / re.findall(r"`([\w/]+\.py)`", item)[0]).read_text() for item in items)
    for name in re.findall(r"`(?:\w+\.)?([a-z_]+)`", section):
        assert f"{name}(" in text, name


def test_metric_of_an_episode_has_the_documented_name() -> None:
    """The page's code runs in an environment, and its number has the page's name."""
    page = (ROOT / "docs/metrics.md").read_text()
    row = re.search(r"^\| an episode \| `self\.(.*?)` in .* \| `(.*?)` \|$", page, flags=re.M)
    assert row is not None
    call, name = row.groups()
    task = Task("t", [{"role": "user", "content": "1 + 1"}], "2", environment="gsm8k")
    end = eval(
        f"environment.{call}",
        {
            "environment": make_offline_environment(task),
            "score": 1.0,
            "answer": "2",
        },
    )
    episode = Trajectory(
        "t",
        token_ids=[1, 2],
        loss_mask=[0, 1],
        rollout_log_probs=[0.0, -1.0],
        reward=end.reward,
        reward_parts=end.reward_parts,
    )
    metrics = StepMetrics(step=1)
    add_rollout_metrics(metrics, [TrajectoryGroup("t", [episode])])
    assert metrics.values()[name] == 3.0


# ---- sizes

WORDS = {"README.md": 550, "docs/status.md": 700}
RESULT_WORDS = 900
UNRELEASED_WORDS = 2200
TEST_NAME_CHARACTERS = 60


def test_pages_are_short() -> None:
    pages = {ROOT / name: words for name, words in WORDS.items()}
    pages |= {page: RESULT_WORDS for page in (ROOT / "docs/performance").glob("*.md")}
    too_long = {
        str(page.relative_to(ROOT)): words
        for page, limit in pages.items()
        if (words := len(page.read_text().split())) > limit
    }
    assert not too_long


def test_changes_of_a_release_are_short() -> None:
    unreleased = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert unreleased.startswith("Unreleased")
    assert len(unreleased.split()) <= UNRELEASED_WORDS


def test_names_of_tests_are_short() -> None:
    names = {
        name
        for folder in ("tests", "benchmarks")
        for file in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"\bdef (test_\w+)", file.read_text())
    }
    assert len(names) > 1000
    assert not {name for name in names if len(name) > TEST_NAME_CHARACTERS}


# ---- commands of results


WRITES_ITS_RUN = ("--write-initial", "--shaped")
"""Options with which a benchmark writes the run that it names."""

WRITTEN_ELSEWHERE = {"shared_prefixes": {"runs/tiny_order_sft"}}
"""Runs whose commands are on a page that the results page links."""


def bash_lines(page: Path) -> list[str]:
    """Return the lines of a page's bash blocks, with continued lines joined and loops unrolled."""
    text = re.sub(r" *\\\n *", " ", page.read_text())
    lines = []
    for block in re.findall(r"^```bash\n(.*?)^```", text, flags=re.M | re.S):
        for line in block.splitlines():
            loop = re.fullmatch(r"for name in (.*); do (.*); done", line)
            if loop is None:
                lines.append(line)
                continue
            names, commands = loop.groups()
            lines += [
                command.replace("$name", name)
                for name in names.split()
                for command in commands.split("; ")
            ]
    return lines


def runs_of(line: str) -> tuple[set[str], set[str]]:
    """Return the run directories that a command reads, and those that it writes."""
    words = [word for word in shlex.split(line) if word != "PYTHONPATH=."]
    if words[0] == "gptoss" and words[1] in ("sft", "rl"):
        path = find_config(Path(words[2]), words[1])
        config = load_run_config(path, words[1], words[3:])
        starts = (config.initial_weights, getattr(config, "initial_adapter", None))
        reads = {str(start) for start in starts if str(start).startswith("runs/")}
        return reads, {str(config.output_dir / config.name)}

    named = {
        # A run writes its export.
        word.rpartition("=")[2].removesuffix("/export")
        for option, word in itertools.pairwise(words)
        if "runs/" in word and option not in ("--out", "--work")
    }
    reads_them = "benchmarks" in line and not any(option in words for option in WRITES_ITS_RUN)
    return (named, set()) if reads_them else (set(), named)


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs/performance").glob("*.md")), ids=lambda page: page.stem
)
def test_commands_of_results_find_their_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier commands of a page write every run that a command reads, and each run once."""
    monkeypatch.chdir(ROOT)
    written = set(WRITTEN_ELSEWHERE.get(page.stem, ()))
    trained: set[str] = set()
    for line in bash_lines(page):
        reads, writes = runs_of(line)
        assert reads <= written, line
        written |= writes
        if re.search(r"gptoss (sft|rl) ", line):
            assert not writes & trained, line
            trained |= writes
