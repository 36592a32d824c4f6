"""Predicted columns of docs/performance against the predictions of the product.

Tables of training steps list one case of ``benchmarks.train`` per row, in the order of the section's
commands. Tables of RL loops name a run of docs/performance/loop.md or a ``gptoss plan`` command.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.train import adapters, cases
from launch.gpus import KNOWN_GPUS
from launch.plan import UpdatePrediction, predict_update
from launch.rollout_plan import LoopPrediction, predict_loop
from megatron_gptoss.config import OptimizerConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.planning.memory import (
    MemoryPrediction,
    predict_fullest_stage,
    predict_stage_memory,
)
from megatron_gptoss.planning.memory_advice import Hardware
from rl_loop.config.load import load_rl_config
from rl_loop.config.run import RlConfig

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/performance"
CONFIGURATION = re.compile(r"\S+\.yaml")
GIGABYTES = {gpu.name: gpu.total_bytes / 1e9 for gpu in KNOWN_GPUS.values()}

Row = dict[str, str]


# ---- pages


def section(page: str, heading: str) -> str:
    """Return the text below a heading of a page, up to the next heading."""
    text = (PAGES / page).read_text()
    _, found, rest = text.partition(f"\n## {heading}\n")
    assert found, f"{page} has no heading {heading}"
    return rest.partition("\n## ")[0]


def tables(text: str) -> list[list[Row]]:
    """Return all tables of a text as rows of {column: cell}."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        lines = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in block.split("\n")[:-1]
        ]
        columns, _, *rows = lines
        assert len(set(columns)) == len(columns), f"two columns have the same name: {columns}"
        found.append([dict(zip(columns, row, strict=True)) for row in rows])
    return found


def commands(text: str) -> list[list[str]]:
    """Return the words of all shell commands of a text."""
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines]


def assert_shown(shown: str, predicted: float) -> None:
    """Assert that a cell is a prediction, rounded to the digits of the cell."""
    value = shown.strip("*").removesuffix("%").replace(",", "")
    digits = len(value.partition(".")[2])
    scale = 100 if "%" in shown else 1
    # Slightly more than half of the last digit, because binary fractions of halves are inexact.
    assert float(value) == pytest.approx(predicted * scale, abs=0.51 * 10**-digits)


# ---- training steps


def parse_cases(text: str) -> Iterator[tuple[int, argparse.Namespace]]:
    """Yield the GPUs and the arguments of every case in commands with ``benchmarks.train``."""
    for words in commands(text):
        if "benchmarks.train" not in words:
            continue
        gpus = int(words[words.index("--nproc_per_node") + 1]) if words[0] == "torchrun" else 1
        words = words[words.index("benchmarks.train") + 1 :]
        first = cases.argument_parser().parse_args(words)
        yield gpus, first
        for also in first.also:
            yield gpus, cases.argument_parser().parse_args(shlex.split(also))


def build_trainer(args: argparse.Namespace, optimizer: OptimizerConfig) -> SimpleNamespace:
    """Return the parts of a trainer that the predictions of ``benchmarks.train`` read."""
    model = GptOssModelConfig(num_layers=args.layers, num_experts=args.experts)
    chunk = SimpleNamespace(config=SimpleNamespace(architecture=model))
    return SimpleNamespace(chunks=[chunk], config=optimizer)


def build_batches(args: argparse.Namespace) -> list[SimpleNamespace]:
    return [SimpleNamespace(tokens=args.sequences * args.length)] * args.micro_batches


def step_trainer(args: argparse.Namespace) -> SimpleNamespace:
    """Return the trainer of a case of ``benchmarks.train step`` or ``memory``."""
    optimizer = OptimizerConfig(
        gradient_dtype=args.gradients, moment_dtype=args.moments, offload_fraction=args.offload
    )
    return build_trainer(args, optimizer)


STEP_TABLES = [
    ("training.md", "4 H200", "4 H200"),
    ("layers_and_pipelines.md", "1 H200", "1 H200"),
    ("layers_and_pipelines.md", "Pipelines, 2 H200", "Pipelines, 2 H200"),
    ("layers_and_pipelines.md", "Pipelines, 2 H100", "Pipelines, 2 H200"),
    (
        "layers_and_pipelines.md",
        "Layouts without pipeline, 2 H200",
        "Layouts without pipeline, 2 H200",
    ),
    ("layers_and_pipelines.md", "4 H200", "4 H200"),
    ("context_parallel.md", "Training step, 4 H200", "Training step, 4 H200"),
    (
        "predictions.md",
        "Layers of the 120B, expert parallelism 8",
        "Layers of the 120B, expert parallelism 8",
    ),
]  # page, heading of the table, heading of the commands


@pytest.mark.parametrize(("page", "heading", "of_commands"), STEP_TABLES)
def test_predicted_training_steps_equal_the_plan(
    page: str, heading: str, of_commands: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rows,) = tables(section(page, heading))
    found = list(parse_cases(section(page, of_commands)))
    # The first rows of a table may have the commands of another table.
    assert len(found) == len(rows) or (heading != of_commands and len(found) > len(rows))

    compared = 0
    for row, (gpus, args) in zip(rows, found, strict=False):
        monkeypatch.setattr(cases.dist, "get_world_size", lambda gpus=gpus: gpus)
        if args.case == "stock":
            assert "stock" in next(iter(row.values()))
            continue
        tokens = args.sequences * args.length * args.micro_batches * gpus
        # Ranks of these layouts compute the same tokens.
        tokens //= args.context * args.tensor * args.pipeline
        predicted = cases.predicted_step(args, step_trainer(args), build_batches(args))
        seconds = predicted["predicted_seconds"]
        expected = {
            "Predicted peak, GB": predicted["predicted_peak_gb"],
            "Predicted step, s": seconds,
        }
        if page == "predictions.md":
            expected = {
                "Step, s": seconds,
                "tokens/s/GPU": tokens / seconds / gpus,
                "All-to-all, share of the step": predicted["predicted_all_to_all_share"],
                "Tensors in the update, GB": predicted["predicted_peak_gb"],
            }
        for column, value in expected.items():
            if row.get(column, "-") != "-":
                assert_shown(row[column], value)
                compared += 1
    assert compared > 0


def test_predicted_memory_of_a_trainer_equals_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    text = section("memory.md", "Trainer without servers, H200")
    (rows,) = tables(text)
    ((gpus, args),) = parse_cases(text)
    monkeypatch.setattr(cases.dist, "get_world_size", lambda: gpus)
    inputs = cases.memory_inputs(args, step_trainer(args), build_batches(args))
    estimate = predict_stage_memory(inputs, GIGABYTES["H200"])
    for row in rows:
        phase = estimate.phase(row["Phase"])
        assert_shown(row["Tensors, predicted GB"], phase.trainer / 1e9)
        assert_shown(row["Whole GPU, predicted GB"], phase.total / 1e9)


@pytest.mark.parametrize("heading", ["H200", "H100, 80 GB", "Base, recomputation and rank, H200"])
def test_predicted_adapter_steps_equal_the_plan(
    heading: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = section("adapters.md", heading)
    (rows,) = tables(text)
    found = []
    for words in commands(text):
        gpus = words[words.index("--nproc_per_node") + 1] if words[0] == "torchrun" else "1"
        words = words[words.index("adapters") + 1 :]
        args = adapters.argument_parser().parse_args(words)
        # A case that runs twice is a range in one row.
        found += [(gpus, args, case) for case in dict.fromkeys(args.cases)]
    for row, (gpus, args, case) in zip(rows, found, strict=True):
        monkeypatch.setenv("WORLD_SIZE", gpus)
        trainer = build_trainer(args, OptimizerConfig())
        if row["Predicted peak, GB"] != "-":
            predicted = adapters.predicted_peak(args, trainer, case, build_batches(args))
            assert_shown(row["Predicted peak, GB"], predicted)


# ---- RL loops


def planned(words: list[str]) -> tuple[RlConfig, float]:
    """Return configuration and GPU memory in GB of the words of a command."""
    (path,) = (word for word in words if CONFIGURATION.fullmatch(word))
    overrides = [word for word in words if re.match(r"[a-z_.]+=", word)]
    gpu = "H100" if "80gb" in path else "H200"
    return load_rl_config(ROOT / path, overrides), GIGABYTES[gpu]


def predict_memory(config: RlConfig, gigabytes: float) -> MemoryPrediction:
    return predict_fullest_stage(config.memory_inputs, gigabytes)


def loop_command(run: str) -> list[str]:
    """Return the words of a run of docs/performance/loop.md.

    Args:
        run: name of the run, which may go on after the name in the table of settings.
    """
    text = section("loop.md", "Reproduce")
    (command,) = commands(text)
    ((row,),) = ([row for row in table if run.startswith(row["Run"])] for table in tables(text))
    (name,) = re.findall(r"\((?:\.\./)*(configs/\S+)\)", row["Configuration (`configs/rl`)"])
    words = [name, *(word for word in command if not CONFIGURATION.fullmatch(word))]
    return words + shlex.split(row["Appended settings"].replace("`", " ").replace(",", " "))


def loop_estimate(run: str) -> MemoryPrediction:
    """Return the predicted memory of a run of docs/performance/loop.md."""
    return predict_memory(*planned(loop_command(run)))


LOOP_TABLES = [
    ("Whole GPU in RL loops, H200", "total"),
    ("Whole GPU in RL loops, H100", "total"),
    ("Trainer's tensors in RL loops, H200", "trainer"),
    ("Trainer's tensors in RL loops, H100", "trainer"),
]


@pytest.mark.parametrize(("heading", "part"), LOOP_TABLES)
def test_predicted_memory_of_loops_equals_the_plan(heading: str, part: str) -> None:
    (rows,) = tables(section("memory.md", heading))
    predicted = [row for row in rows if row["GB"] == "predicted"]
    assert predicted
    for row in predicted:
        phases = {
            phase.name: getattr(phase, part) / 1e9 for phase in loop_estimate(row["Run"]).phases
        }
        if "first_sync" in phases:
            phases["sync"] = max(phases["first_sync"], phases["sync"])
            phases["scoring"] = phases["first_scoring"]
        for phase, shown in list(row.items())[2:]:
            assert (shown == "-") == (phase not in phases)
            if shown != "-":
                assert_shown(shown, phases[phase])


RECOMMENDED = "configs/untested/rl/gpt-oss-20b_1x4_mxfp4.yaml"
"""Recommended configuration of the 20B for 4 H200."""
SAMPLED_SHARE = 185 / 300
"""Mean sampled tokens of a turn, per token of ``benchmarks.loop --turn-tokens``.

Tokens/s times step, per turn, without prompts and tool outputs: 182 to 192 for 300, and 92 for 150.
"""
MOST_DEVIATION = 0.15
"""Largest deviation of a predicted rollout from the middle of the measured range."""


@pytest.mark.parametrize(("heading", "gpu"), [("H200", "H200"), ("H100, 80 GB", "H100")])
def test_predicted_rollouts_equal_the_plan_and_agree_with_runs(heading: str, gpu: str) -> None:
    (rows,) = tables(section("loop.md", heading))
    page = " ".join((PAGES / "loop.md").read_text().split())
    for row in rows:
        words = loop_command(row["Run"])
        shown = row["Rollout, predicted s"]
        # Rollouts on separate GPUs overlap with the update.
        assert (shown == "-") == ("2 + 2 H200" in row["Run"])
        if shown == "-":
            continue
        config, gigabytes = planned(words)
        last = len(words) - 1 - words[::-1].index("--turn-tokens")
        turn_tokens = SAMPLED_SHARE * int(words[last + 1])
        hardware = Hardware(gigabytes, gpu)
        predicted = predict_loop(config, hardware, turn_tokens=turn_tokens).rollout_seconds
        assert_shown(shown, predicted)

        bounds = [float(bound) for bound in row["Rollout, s"].split("-")]
        deviation = predicted / (sum(bounds) / len(bounds)) - 1
        if abs(deviation) > MOST_DEVIATION:
            sentence = f"{row['Run']}: its rollout is predicted {deviation:.0%} too long"
            assert sentence in page, "the page names every prediction that is far off"


def prediction(words: list[str]) -> tuple[LoopPrediction, UpdatePrediction, MemoryPrediction]:
    """Return the loop, the full update and the memory that the words of a command describe."""
    config, gigabytes = planned(words)
    inputs = config.memory_inputs
    loop = predict_loop(config)
    return loop, predict_update(inputs), predict_memory(config, gigabytes)


def test_predicted_shipped_configurations_equal_the_plan() -> None:
    (rows,) = tables(section("loop.md", "Shipped configurations, predicted"))
    speeds = {}
    for row in rows:
        (path,) = re.findall(r"\((?:\.\./)*(configs/\S+)\)", row["Configuration"])
        loop, _, _ = prediction([path])
        assert_shown(row["Rollout, s"], loop.rollout_seconds)
        assert_shown(row["Update, s"], loop.update_seconds)
        assert_shown(row["tokens/s/GPU"], loop.tokens_per_second(0))
        if row["GPUs"] == "4":
            speeds[path] = loop.tokens_per_second(0)
    assert max(speeds, key=lambda path: speeds[path]) == RECOMMENDED
    assert RECOMMENDED in (ROOT / "docs/getting_started/one_node.md").read_text()


def test_predicted_steps_of_the_120b_equal_the_plan() -> None:
    text = section("predictions.md", "120B with adapters, servers on the trainer's GPUs")
    (rows,) = tables(text)
    four, eight = map(prediction, commands(text))
    for column, (loop, update, memory) in {"4 GPUs": four, "8 GPUs": eight}.items():
        gigabytes = {phase.name: phase.total / 1e9 for phase in memory.phases}
        expected = {
            "Step without syncs, s": loop.step_seconds(0),
            "Update, s": loop.update_seconds,
            "Loop, tokens/s/GPU": loop.tokens_per_second(0),
            "Update, tokens/s/GPU": update.tokens_per_second,
            "Memory at the start, GB": gigabytes["start"],
            "Memory in the first sync, GB": gigabytes["first_sync"],
            "Memory in rollouts, GB": gigabytes["rollout"],
            "Memory in the first scoring, GB": gigabytes["first_scoring"],
            "Memory in the update, GB": gigabytes["update"],
        }
        assert [row["Quantity"] for row in rows] == list(expected)
        for row in rows:
            assert_shown(row[f"{column}, predicted"], expected[row["Quantity"]])


def test_predicted_staleness_of_the_20b_equals_the_plan() -> None:
    text = section("predictions.md", "20B, four trainer GPUs and four servers")
    (rows,) = tables(text)
    (command,) = commands(text)
    loop, _, memory = prediction(command)
    for row in rows:
        staleness = int(row["`algorithm.max_staleness`"])
        assert_shown(row["Step, s"], loop.step_seconds(staleness))
        assert_shown(row["tokens/s/GPU"], loop.tokens_per_second(staleness))
        assert_shown(row["Trainer idle"], loop.trainer_idle_fraction(staleness))
        assert_shown(row["Servers idle"], loop.engines_idle(staleness))
    assert f"{loop.update_seconds:.1f} s and {memory.peak.total / 1e9:.1f} GB" in text


def test_predicted_layouts_of_the_120b_equal_the_plan() -> None:
    text = section("predictions.md", "120B, all weights, 16 to 64 GPUs")
    (rows,) = tables(text)
    (command,) = commands(text)
    for row in rows:
        overrides = [] if row["Overrides"] == "none" else shlex.split(row["Overrides"].strip("`"))
        _, update, memory = prediction([*command, *overrides])
        assert f"{update.tokens / 1e6:.1f} million tokens" in text
        assert_shown(row["Tensors, GB"], memory.phase("update").trainer / 1e9)
        assert_shown(row["Whole GPU, GB"], memory.peak.total / 1e9)
        assert ("does not fit" in row["Layout"]) == (memory.peak.total > GIGABYTES["H200"] * 1e9)
        assert_shown(row["Update, s"], update.step.total)
        assert_shown(row["tokens/s/GPU"], update.tokens_per_second)
        assert_shown(row["All-to-all, s"], update.step.experts)
        assert_shown(row["Bubble, s"], update.step.bubble)


def test_predicted_memory_on_8_h100_equals_the_plan() -> None:
    text = section("predictions.md", "120B with adapters, 8 H100")
    (rows,) = tables(text)
    (command,) = commands(text)
    _, _, memory = prediction(command)
    for row in rows:
        phase = memory.phase(row["Phase"].replace(" ", "_"))
        assert_shown(row["Tensors, GB"], phase.trainer / 1e9)
        assert_shown(row["Whole GPU, GB"], phase.total / 1e9)
    assert max(float(row["Whole GPU, GB"]) for row in rows) == round(memory.peak.total / 1e9, 1)
