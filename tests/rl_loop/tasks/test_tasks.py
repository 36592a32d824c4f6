"""Tasks of a run: mixtures, order, filters, and held-out tasks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rl_loop.config.errors import ConfigError
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.data.mixture import BLOCK
from rl_loop.environments import Task
from rl_loop.run_parts import build_tasks
from rl_loop.tasks.source import TaskMixture
from rl_loop.tasks.task_file import TaskFileError

SFT = Path("configs/sft/tiny_retool.yaml")


def source(*overrides: str) -> TaskMixture:
    return build_tasks(load_config(SFT, SftConfig, ["model.vocab_size=1024", *overrides]))


def write(path: Path, questions: list[str]) -> Path:
    tasks = [
        Task(f"t{i}", [{"role": "user", "content": text}], "1") for i, text in enumerate(questions)
    ]
    path.write_text("".join(task.to_json() + "\n" for task in tasks))
    return path


def from_files(train: Path, held_out: Path, *more: str) -> TaskMixture:
    place = "tasks.sources.retool"
    return source(f"{place}.train_path={train}", f"{place}.held_out_path={held_out}", *more)


def texts(tasks: list[Task]) -> list[str]:
    return [task.messages[-1]["content"] for task in tasks]


def test_sources_are_mixed_by_weight_and_positions_are_stable() -> None:
    overrides = [
        "tasks.sources.gsm8k.environment=gsm8k",
        "tasks.sources.gsm8k.weight=3",
        "tasks.held_out_tasks=10",
    ]
    tasks = source(*overrides)
    found = tasks.train(0, 5 * BLOCK)
    assert Counter(task.environment for task in found) == {
        "gsm8k": 15 * BLOCK // 4,
        "retool": 5 * BLOCK // 4,
    }
    assert source(*overrides).train(131, 40) == found[131:171]
    assert len({task.task_id for task in found}) == len(found)
    assert {task.environment for task in tasks.held_out()} == {"gsm8k", "retool"}


def test_no_generated_training_task_has_a_held_out_prompt() -> None:
    tasks = source(
        "tasks.sources={gsm8k: {environment: gsm8k, options: {max_number: 4}}}",
        "tasks.held_out_tasks=200",
    )
    assert not set(texts(tasks.train(0, 500))) & set(texts(tasks.held_out()))


def test_file_is_shuffled_each_epoch_without_losing_tasks(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [f"What is {i}?" for i in range(50)])
    tasks = from_files(train, write(tmp_path / "held.jsonl", ["What is x?"]))
    first, second = texts(tasks.train(0, 50)), texts(tasks.train(50, 50))
    assert sorted(first) == sorted(second) == sorted(f"What is {i}?" for i in range(50))
    assert first != second
    assert texts(tasks.train(37, 30)) == (first + second)[37:67]


def test_training_tasks_with_a_held_out_prompt_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    story = "A farmer has seven brown goats and sells three of them at the market on Monday"
    form = "Solve this and put the last line of your work in a box with the answer only please:"
    questions = [f"{form} {i}+1" for i in range(40)]
    train = write(
        tmp_path / "train.jsonl",
        [*questions, f"{story}. How many are left?", "what IS x ?", "What is y?"],
    )
    tasks = from_files(
        train, write(tmp_path / "held.jsonl", [f"Once, {story}!", "What is x?", f"{form} 77*7"])
    )
    found = set(texts(tasks.train(0, 41)))
    assert found == {*questions, "What is y?"}, (
        "the words of a form that many share give nothing away"
    )
    assert "2 of 43 training tasks are left out" in caplog.text


def test_near_copies_of_conversations_are_found_by_user_messages(tmp_path: Path) -> None:
    story = "A farmer has seven brown goats and sells three of them at the market on Monday"
    train, held_out = tmp_path / "train.jsonl", tmp_path / "held.jsonl"

    def turns(*said: str) -> str:
        roles = ["developer", "user", "assistant", "user"]
        rows = [
            {"role": role, "content": text}
            for role, text in zip(roles, ["Be brief.", *said], strict=True)
        ]
        return json.dumps({"prompt": rows, "reward_model": {"ground_truth": "4"}}) + "\n"

    train.write_text(
        turns(f"{story}!", "I see.", "How many?") + turns("One goat more?", "Yes.", "How many?")
    )
    held_out.write_text(turns(f"Now: {story}.", "Fine.", "And then?"))
    (kept,) = from_files(train, held_out).train(0, 1)
    assert kept.messages[1]["content"] == "One goat more?"


def test_tasks_are_filtered_by_pass_rate(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", ["never", "always", "sometimes", "unknown"])
    lines = [("t0", 0), ("t0", 0), ("t1", 1), ("t1", 1), ("t2", 0), ("t2", 1)]
    episodes = tmp_path / "episodes.jsonl"
    rest = {"sample": 0, "answer": None, "category": "retool"}
    records = [
        {"task_id": task, "reward_parts": {"correct": correct}, **rest} for task, correct in lines
    ]
    episodes.write_text("".join(json.dumps(record) + "\n" for record in records))
    held_out = write(tmp_path / "held.jsonl", ["x"])
    tasks = from_files(train, held_out, f"tasks.sources.retool.pass_rate.episodes={episodes}")
    assert set(texts(tasks.train(0, 4))) == {"sometimes", "unknown"}
    episodes.write_text("{}\n")
    with pytest.raises(TaskFileError, match=r"episodes\.jsonl: not the episodes of an evaluation"):
        from_files(train, held_out, f"tasks.sources.retool.pass_rate.episodes={episodes}")


def test_pass_rates_of_other_tasks_are_an_error(tmp_path: Path) -> None:
    train, held_out = (
        write(tmp_path / "train.jsonl", ["a", "b"]),
        write(tmp_path / "held.jsonl", ["x"]),
    )
    episodes = tmp_path / "episodes.jsonl"
    record = {
        "task_id": "other-0",
        "reward_parts": {"correct": 1},
        "sample": 0,
        "answer": None,
        "category": "retool",
    }
    episodes.write_text(json.dumps(record) + "\n")
    with pytest.raises(
        TaskFileError,
        match=r"contains no training task of tasks.sources.retool, such as",
    ):
        from_files(train, held_out, f"tasks.sources.retool.pass_rate.episodes={episodes}")

    # An evaluation with train.jsonl as held-out tasks of a source of this name writes such records.
    evaluated = [
        task.task_id for task in from_files(held_out, train, "tasks.held_out_tasks=9").held_out()
    ]
    episodes.write_text(
        "".join(json.dumps({**record, "task_id": name}) + "\n" for name in evaluated[:1])
    )
    tasks = from_files(train, held_out, f"tasks.sources.retool.pass_rate.episodes={episodes}")
    assert set(texts(tasks.train(0, 4))) == {"b"}


def test_no_two_tasks_have_the_same_id(tmp_path: Path) -> None:
    """Task ids name requests to the engine and group the episodes of an evaluation."""
    rows = [{"problem": f"What is {i} + {i + 1}?", "answer": str(2 * i + 1)} for i in range(8)]
    other = [{"problem": f"What is {i} * 7?", "answer": str(7 * i)} for i in range(8)]
    for name, records in (("rows", rows), ("other", other)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    own, own_other = (
        write(tmp_path / f"{name}.jsonl", [f"{name} {i}" for i in range(8)]) for name in "ab"
    )
    files = {
        "retool": ("rows", "other"),
        "second": ("rows", "other"),
        "third": (own.stem, own_other.stem),
    }
    overrides = [
        "tasks.held_out_tasks=8",
        "tasks.sources.generated={environment: retool, weight: 1}",
    ]
    for name, (train, held_out) in files.items():
        paths = (
            f"train_path: '{tmp_path / train}.jsonl', held_out_path: '{tmp_path / held_out}.jsonl'"
        )
        overrides.append(f"tasks.sources.{name}={{environment: retool, {paths}}}")

    tasks = source(*overrides)
    held_out = [task.task_id for task in tasks.held_out()]
    train = {(task.task_id, task.messages[-1]["content"]) for task in tasks.train(0, 4 * BLOCK)}
    assert len(set(held_out)) == len(held_out) == 32
    assert len({task_id for task_id, _ in train}) == len(train)
    assert not {task_id for task_id, _ in train} & set(held_out)


def test_bad_task_file_is_reported_before_heavy_imports(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"problem": "1+1?"}\n')
    bad = f"tasks.sources.retool={{environment: retool, held_out_path: '{tmp_path / 'bad.jsonl'}', weight: 0}}"
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from rl_loop.config.load import load_config\n"
        "from rl_loop.config.run import SftConfig\n"
        "from rl_loop.tasks.task_file import TaskFileError\n"
        "from rl_loop.run_parts import build_tasks\n"
        "try:\n"
        f"    overrides = [{bad!r}, 'tasks.sources.a.environment=retool']\n"
        f"    build_tasks(load_config(Path({str(SFT)!r}), SftConfig, overrides))\n"
        "except TaskFileError as error:\n"
        "    print(error)\n"
        "print([name for name in ('torch', 'megatron', 'ray') if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    message, imported = result.stdout.splitlines()
    assert message.startswith(
        f"{tmp_path / 'bad.jsonl'}, line 1: environment ReToolEnvironment needs the key 'answer'"
    )
    assert imported == "[]"


def test_rows_of_published_data_are_read_from_jsonl_and_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows: dict[str, list[dict[str, Any]]] = {
        "retool": [
            {
                "prompt": [{"role": "user", "content": "1+1?"}],
                "reward_model": {"ground_truth": "2"},
            },
            {
                "prompt": [{"role": "user", "content": "why?"}],
                "reward_model": {"ground_truth": "because"},
            },
        ],
        "gsm8k": [{"question": "How many?", "answer": "So 1 thousand.\n#### 1,000"}],
        "instructions": [
            {
                "key": 1,
                "prompt": "Hi",
                "instruction_id_list": ["punctuation:no_comma"],
                "kwargs": [{"n": None}],
            }
        ],
    }
    for environment, records in rows.items():
        jsonl, parquet = tmp_path / f"{environment}.jsonl", tmp_path / f"{environment}.parquet"
        jsonl.write_text("".join(json.dumps(record) + "\n" for record in records))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), parquet)
        for path in (jsonl, parquet):
            one = f"{{environment: {environment}, held_out_path: '{path}', weight: 0}}"
            (task,) = source(f"tasks.sources.other={one}", "tasks.held_out_tasks=1").held_out()[1:]
            assert task.environment == environment
            assert (
                task.ground_truth
                == {"retool": "2", "gsm8k": "1000", "instructions": ""}[environment]
            )


def test_numeric_only_keeps_aime_rows_with_numeric_answers(tmp_path: Path) -> None:
    path = tmp_path / "aime.jsonl"
    answers = ["204", r"\frac{1}{2}", "3/4", "-7", "x+1"]
    path.write_text("".join(json.dumps({"Problem": f"p{a}", "Answer": a}) + "\n" for a in answers))
    place = f"{{environment: retool, held_out_path: '{path}', weight: 0"
    for numeric, wanted in (("true", ["204", "3/4", "-7"]), ("false", answers)):
        tasks = source(
            f"tasks.sources.aime={place}, options: {{numeric_only: {numeric}}}}}",
            "tasks.held_out_tasks=9",
        )
        assert [t.ground_truth for t in tasks.held_out()[9:]] == wanted


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tasks.sources.retool.environment=chess", "there is no environment 'chess'"),
        ("tasks.sources.retool.environment=os:path", "there is no environment 'os:path'"),
        ("tasks.sources.retool.environment=nowhere:X", "cannot be imported"),
        ("tasks.sources.retool.options.color=1", "color"),
        ("tasks.sources.retool.weight=0", "every source has weight 0"),
        ("tasks.sources.retool.held_out_path=x.jsonl", "Set train_path, or weight=0"),
        ("tasks.sources.retool.pass_rate.episodes=x", "pass_rate selects the tasks of train_path"),
    ],
)
def test_wrong_source_is_a_config_error(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        load_config(SFT, SftConfig, [override])


def test_bad_record_is_named_with_its_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(
        '{"question": "a", "answer": "#### 1"}\n\n{"question": "b"}\n'
    )
    bad = f"{{environment: gsm8k, held_out_path: '{tmp_path / 'bad.jsonl'}', weight: 0}}"
    with pytest.raises(
        TaskFileError,
        match=r"bad\.jsonl, line 3: environment Gsm8kEnvironment needs the key 'answer'",
    ):
        source(f"tasks.sources.other={bad}")


def rl_source(*overrides: str) -> TaskMixture:
    return build_tasks(
        load_config(
            Path("configs/rl/tiny_retool.yaml"), RlConfig, ["model.vocab_size=1024", *overrides]
        )
    )


def test_tasks_with_too_long_prompts_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    questions = [("1 " * 3000 if i % 5 == 0 else "") + f"What is {i}?" for i in range(50)]
    train, held_out = (
        write(tmp_path / "train.jsonl", questions),
        write(tmp_path / "held.jsonl", ["1 " * 3000, "x?"]),
    )
    place = "tasks.sources.retool"
    tasks = rl_source(f"{place}.train_path={train}", f"{place}.held_out_path={held_out}")
    assert sorted(texts(tasks.train(0, 40))) == sorted(f"What is {i}?" for i in range(50) if i % 5)
    assert texts(tasks.held_out()) == ["x?"]
    assert len(tasks.unusable) == 11
    (warning,) = caplog.messages
    assert "11 tasks are left out: the prompt of task" in warning
    assert "\n" not in warning

    for path, other in ((train, held_out), (held_out, train)):
        write(path, ["1 " * 3000])
        with pytest.raises(
            TaskFileError, match=r"tasks\.sources\.retool: no (training|held-out) task is usable"
        ):
            rl_source(f"{place}.train_path={train}", f"{place}.held_out_path={held_out}")
        write(other, ["x?"])


def test_generated_tasks_with_too_long_prompts_are_replaced() -> None:
    environment = "tests.support.rl_loop.unreliable_tools:UnreliableEnvironment"
    options = f"{{environment: '{environment}', options: {{long_prompts: 0.4}}}}"
    overrides = [
        f"tasks.sources.tools={options}",
        "tasks.sources.retool.weight=0",
        "tasks.held_out_tasks=20",
    ]
    tasks = rl_source(*overrides)
    found, held_out = tasks.train(0, 50), tasks.sources["tools"].held_out
    assert max(len(text) for text in texts(found + held_out)) < 100
    assert 5 < len(held_out) < 20
    assert rl_source(*overrides).train(20, 30) == found[20:]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("tasks_without_prompt", "returned a task without the key 'prompt'; it has question"),
        ("tasks_with_a_list_as_prompt", "cannot be used: 'prompt' must be text, not list"),
        ("tasks_as_texts", "returned str, expected a dict"),
    ],
)
def test_generated_row_that_is_no_task_is_rejected(function: str, reason: str) -> None:
    programs = "tests.support.rl_loop.agents.programs"
    options = f"{{agent: '{programs}:plain', tasks: '{programs}:{function}'}}"
    with pytest.raises(TaskFileError) as raised:
        source(
            "model.vocab_size=201088",
            "vocabulary=gptoss",
            f"tasks.sources.mine={{environment: black_box, options: {options}}}",
        )
    message = str(raised.value)
    assert message.startswith(f"tasks.sources.mine: {programs}:{function}('held_out', 0, 0) ")
    assert message.endswith(reason)
