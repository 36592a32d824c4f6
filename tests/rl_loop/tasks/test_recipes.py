"""Shipped recipes with real data: published formats, and early errors.

The hub is not available here, so folders with rows of the published columns replace its data sets.
``load_dataset`` accepts a folder instead of a name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_loop.config.errors import ConfigError
from rl_loop.config.load import load_rl_config
from rl_loop.harmony.codec import Harmony
from rl_loop.tasks.source import TaskMixture
from rl_loop.tasks.task_file import TaskFileError

MATH = ["gpt-oss-20b_1x8_80gb_math", "gpt-oss-120b-adapter_1x8_80gb_math"]
RECIPES = [*MATH, "gpt-oss-20b-adapter_1x1_80gb_gsm8k"]

DAPO_MATH: list[dict[str, Any]] = [
    {
        "prompt": f"How many subsets has a set of {i} elements?",
        "solution": str(2**i),
        "data_source": "math_dapo",
        "source_prompt": [{"content": f"Solve ... of {i} elements?", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(2**i), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"id-{i}"},
    }
    for i in range(5)
]
AIME: list[dict[str, Any]] = [
    {
        "id": i,
        "problem": f"Find the remainder when $7^{{{i}}}$ is divided by 1000.",
        "solution": "By squaring.",
        "answer": f"{7**i % 1000:03}",
        "url": "https://example.org",
        "year": "2024",
    }
    for i in range(3)
]
GSM8K, GSM8K_TEST = (
    [
        {
            "question": f"{who} has {i} pears and 1,000 nuts. How many?",
            "answer": f"Add.\n#### 1,00{i}",
        }
        for i in range(4)
    ]
    for who in ("Ann", "Bob")
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write folders with rows in the columns of the published data sets."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("hub")
    published = {"dapo": DAPO_MATH, "aime": AIME, "gsm8k": GSM8K, "gsm8k_test": GSM8K_TEST}
    for name, rows in published.items():
        (folder / name).mkdir()
        pq.write_table(pa.Table.from_pylist(rows), folder / name / "train.parquet")
    return folder


def open_tasks(recipe: str, harmony: Harmony, train: Path, held_out: Path) -> TaskMixture:
    """Return the tasks of a recipe with folders in place of the hub."""
    (name,) = load_rl_config(Path(recipe)).tasks.sources
    places = [
        f"tasks.sources.{name}.{key}=hub:{folder}:train"
        for key, folder in (("train_path", train), ("held_out_path", held_out))
    ]
    config = load_rl_config(Path(recipe), places)
    return TaskMixture(config.tasks, harmony, config.rollout.max_episode_tokens)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("recipe", MATH)
def test_math_recipes_use_a_stateful_interpreter(recipe: str, hub: Path, full: Harmony) -> None:
    tasks = open_tasks(recipe, full, hub / "dapo", hub / "aime")
    trained = {task.messages[-1]["content"]: task for task in tasks.train(0, 5)}
    assert set(trained) == {row["prompt"] for row in DAPO_MATH}
    eight = trained["How many subsets has a set of 3 elements?"]
    assert eight.ground_truth == "8"
    assert eight.messages[0] == {"role": "developer", "content": r"Use python. Answer in \boxed{}."}

    assert [task.ground_truth for task in tasks.held_out()] == ["001", "007", "049"]
    assert "stateful Jupyter" in full.decode(tasks.prompt_ids(eight))


def test_gsm8k_recipe_uses_no_tools(hub: Path, full: Harmony) -> None:
    tasks = open_tasks(RECIPES[-1], full, hub / "gsm8k", hub / "gsm8k_test")
    assert sorted(task.ground_truth for task in tasks.train(0, 4)) == [
        "1000",
        "1001",
        "1002",
        "1003",
    ]
    assert len(tasks.held_out()) == 4
    assert "python" not in full.decode(tasks.prompt_ids(tasks.held_out()[0]))


def test_unreadable_data_set_is_named(hub: Path, full: Harmony) -> None:
    """``Session._open_data`` reads tasks before Ray, torch and the weights."""
    with pytest.raises(TaskFileError, match=r"hub:.*/nowhere:train: cannot be read"):
        open_tasks(RECIPES[-1], full, hub / "nowhere", hub / "gsm8k_test")


def test_hub_name_without_a_split_is_a_config_error() -> None:
    place = "tasks.sources.math.held_out_path=hub:HuggingFaceH4/aime_2024"
    with pytest.raises(
        ConfigError,
        match=r"tasks.sources.math: hub:.*aime_2024 is not the name of a data set\. Use hub:NAME:SPLIT",
    ):
        load_rl_config(Path(MATH[0]), [place])


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_names_hub_data_and_the_documented_engine_path(recipe: str) -> None:
    config = load_rl_config(Path(recipe))
    (source,) = config.tasks.sources.values()
    assert source.train_path and source.train_path.startswith("hub:")
    assert source.held_out_path and source.held_out_path.startswith("hub:")
    assert config.rollout.engine.python == "/opt/sglang/bin/python"
