"""``gptoss plan``: the communication of every kind of layer, with the numbers behind the
choice."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from launch.cluster import ClusterConfig
from launch.placement import place
from launch.plan import attention_plan, step_plan
from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.packing import schedule
from megatron_gptoss.planning.memory import fits, parameters_per_gpu, worst_stage
from megatron_gptoss.planning.memory_advice import layouts_that_fit, memory_plan
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig, SftConfig

CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG = CONFIGS / "rl/tiny_retool.yaml"
H200 = 141e9
LONG = [
    "model=gpt-oss-20b",
    "parallel.world_size=4",
    "parallel.context=4",
    "training.max_tokens_per_micro_batch=131072",
    "rollout.max_tokens=131072",
    "dtype=bfloat16",
]


def plan(*overrides: str) -> list[str]:
    config = load_config(CONFIG, RlConfig, list(overrides))
    return attention_plan(config.memory_inputs, config.dtype).splitlines()


def taken(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines if "<- taken" in line]


def test_it_names_a_scheme_for_each_kind_of_layer_and_what_it_sends() -> None:
    lines = plan(*LONG)
    assert "131072 tokens in 1 sequences, 32768 tokens per rank" in lines[0]
    full, window = taken(lines)
    assert full[:2] == ["12", "full_attention"]
    assert full[2] in ("all_gather", "all_to_all")
    # two borders of 127 tokens, each with a key and a value of 8 heads of 64 in bf16, there and
    # back
    assert window[:4] == [
        "12",
        "sliding_attention",
        "halo",
        f"{2 * 2 * 127 * 2 * 8 * 64 * 2 / 1e6:.2f}",
    ]


def test_a_scheme_set_by_the_user_is_the_one_taken() -> None:
    full, window = taken(plan(*LONG, "parallel.context_scheme_full=all_to_all"))
    assert (full[2], window[2]) == ("all_to_all", "halo")
    assert full[-1] == "(set)"


def test_the_memory_of_a_run_is_that_of_all_its_models() -> None:
    config = load_config(CONFIG, RlConfig, ["algorithm=ppo", "algorithm.kl.coefficient=0.1"])
    assert config.memory_inputs.auxiliary_models == [config.algorithm.critic.optimizer, None]
    assert load_config(CONFIG, RlConfig, []).memory_inputs.auxiliary_models == []


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["training.max_tokens_per_micro_batch=2000", "rollout.max_tokens=800"],
        [
            "parallel.world_size=6",
            "parallel.pipeline=2",
            "parallel.virtual_pipeline=2",
            "rollout.tasks_per_step=5",
        ],
    ],
    ids=str,
)
def test_the_longest_episodes_fill_as_many_micro_batches_as_the_plan_says(
    overrides: list[str],
) -> None:
    config = load_config(CONFIG, RlConfig, overrides)
    count = config.rollout.tasks_per_step * config.rollout.samples_per_task
    lengths = np.full(count, config.rollout.max_tokens + 1)
    row, multiple = (
        config.training.max_tokens_per_micro_batch,
        config.parallel.micro_batch_multiple,
    )
    plan = schedule(lengths, row, config.parallel.data, multiple=multiple)
    assert config.memory_inputs.micro_batches == len(plan.micro_batches[0])


@pytest.mark.parametrize(
    ("file", "gpus"),
    [
        ("rl/gpt-oss-20b_1x4.yaml", 4),
        ("rl/gpt-oss-20b_1x8.yaml", 8),
        ("rl/gpt-oss-20b_2x8.yaml", 16),
        ("sft/gpt-oss-120b_2x8.yaml", 16),
        ("rl/gpt-oss-120b_4x8.yaml", 32),
        ("rl/gpt-oss-120b_8x8.yaml", 64),
    ],
)
def test_every_example_fits_its_gpus_and_uses_them_all(file: str, gpus: int) -> None:
    config = load_config(CONFIGS / file, SftConfig if file.startswith("sft") else RlConfig)
    training = config.memory_inputs
    assert fits(training, worst_stage(training), 135)

    engine = config.rollout.engine
    servers = engine.server_processes
    has_servers = isinstance(config, RlConfig)
    assert (servers is not None) == has_servers
    gpus_of_servers = 0
    if servers is not None and not servers.share_trainer_gpus:
        gpus_of_servers = servers.count * servers.gpus_each
    assert gpus == config.parallel.world_size + gpus_of_servers
    if servers is not None:
        weights = 2 * sum(parameters_per_gpu(config.model, ParallelConfig())) / servers.gpus_each
        assert engine.memory_fraction * H200 - weights > 10e9  # for keys and values

    cluster = ClusterConfig(
        kind="slurm",
        shared_dir="/shared",
        python="python",
        nodes=-(-gpus // 8),
        gpus_per_node=min(gpus, 8),
    )
    rollout = config.rollout if has_servers else None
    assert len(place(config.parallel, rollout, cluster)) == cluster.nodes


def test_servers_on_the_trainers_gpus_must_fit_beside_what_the_trainer_keeps() -> None:
    def plan_with(fraction: float) -> tuple[int, str]:
        overrides = [f"rollout.engine.memory_fraction={fraction}"]
        training = load_config(
            CONFIGS / "rl/gpt-oss-20b_1x4.yaml",
            RlConfig,
            overrides,
        ).memory_inputs
        return len(layouts_that_fit(training, 135)), memory_plan(training, 135).splitlines()[0]

    (many, good), (few, bad) = plan_with(0.4), plan_with(0.6)
    assert good.endswith(": 119.0 GB; 70.8 GB while servers have 40%")
    assert bad.endswith(
        ": 119.0 GB; 70.8 GB while servers have 60%, more than the 135 GB of the GPU",
    )
    assert few < many


@pytest.mark.parametrize("context", ["1", "3"])
def test_any_context_size_has_a_plan(context: str) -> None:
    lines = plan(f"parallel.world_size={context}", f"parallel.context={context}")
    assert len(taken(lines)) == (0 if context == "1" else 2)


def test_an_interleaved_pipeline_gets_a_multiple_of_its_stages_as_micro_batches_and_a_shorter_bubble() -> (
    None
):
    def step(chunks: int) -> tuple[int, float]:
        overrides = [
            "model=gpt-oss-20b",
            "parallel.world_size=4",
            "parallel.pipeline=4",
            "dtype=bfloat16",
        ]
        overrides += [
            f"parallel.virtual_pipeline={chunks}",
            "training.max_tokens_per_micro_batch=16384",
        ]
        overrides += [
            "rollout.max_tokens=16384",
            "rollout.tasks_per_step=1",
            "rollout.samples_per_task=6",
        ]
        text = step_plan(load_config(CONFIG, RlConfig, overrides).memory_inputs, 141)
        return int(text.split(" micro-batches")[0].split()[-1]), float(
            re.search(r"bubble ([\d.]+)", text)[1],
        )

    (few, plain), (many, interleaved) = step(1), step(3)
    assert (few, many) == (6, 8)
    assert interleaved == pytest.approx(plain / 3, abs=0.01)


def test_the_fastest_layouts_that_fit_come_with_memory_time_and_mfu() -> None:
    overrides = [
        *LONG,
        "parallel.world_size=16",
        "parallel.context=1",
        "optimizer.moment_dtype=bf16",
    ]
    overrides += [
        "rollout.max_tokens=16384",
        "training.max_tokens_per_micro_batch=16384",
        "rollout.tasks_per_step=64",
    ]
    config = load_config(CONFIG, RlConfig, overrides)
    configured, title, *rows = step_plan(config.memory_inputs, 80).splitlines()
    assert title == "the fastest layouts that fit, as predicted:"

    pattern = r"  .*: ([\d.]+) GB, ([\d.]+) s, (\d+) tokens/s/GPU, ([\d.]+)% MFU"
    figures = [[float(text) for text in re.fullmatch(pattern, row).groups()] for row in rows]
    memory, seconds, speed, mfu = zip(*figures, strict=True)
    assert max(memory) <= 80
    assert list(seconds) == sorted(seconds)
    assert list(speed) == sorted(speed, reverse=True)
    assert list(mfu) == sorted(mfu, reverse=True)
    assert 20 < mfu[0] < 60
    assert re.search(r" tokens/s/GPU, [\d.]+% MFU", configured)


SHIPPED = sorted(path for kind in ("rl", "sft") for path in (CONFIGS / kind).glob("*.yaml"))
VARIANTS = [
    (),
    ("algorithm=ppo", "algorithm.critic.warmup_steps=0", "algorithm.mini_batches=2"),
    ("parallel.recompute=[moe]", "parallel.recompute_layers=1", "optimizer.moment_dtype=fp32"),
]


def layout_overrides(advice: str) -> list[str]:
    """Overrides that set what a line of the plan says, such as "tensor 2, pipeline 1, context 1,
    expert 8"."""
    return [f"parallel.{part.replace(' ', '=')}" for part in advice.split(", ")]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_whatever_the_plan_advises_validates_and_is_predicted_as_promised(path: Path) -> None:
    """The user's way: every line of the text, applied as overrides on top of what is
    configured."""
    kind = SftConfig if path.parent.name == "sft" else RlConfig
    applied = 0
    for variant in VARIANTS if kind is RlConfig else VARIANTS[::2]:
        for gigabytes in (2, 72, 135):
            inputs = load_config(path, kind, list(variant)).memory_inputs
            advice = advice_of(memory_plan(inputs, gigabytes), list(variant))
            for overrides, promised in advice:
                needed = worst_stage(load_config(path, kind, overrides).memory_inputs)
                assert f"{needed.total / 1e9:.1f}" == promised, overrides
            applied += len(advice)
    assert applied > 3


def advice_of(plan: str, configured: list[str]) -> list[tuple[list[str], str]]:
    """Return (overrides, GB that the plan promises with them) of every line of a memory plan."""
    layouts, _, settings = plan.partition("to take less, one after the other:\n")
    advice = []

    # Settings add up. The last line is "more GPUs", which depends on who has them.
    overrides = list(configured)
    for line in settings.splitlines()[:-1]:
        text, _, promised = line.strip().removesuffix(" GB").rpartition(": ")
        overrides.append(text)
        advice.append((list(overrides), promised))

    for line in layouts.partition("that fit:\n")[2].splitlines():
        text, _, promised = line.strip().removesuffix(" GB").rpartition(": ")
        advice.append(([*configured, *layout_overrides(text)], promised))
    return advice


def test_the_fastest_layouts_validate_too() -> None:
    changes = [
        "parallel.last_stage_layers=null",
        "parallel.virtual_pipeline=3",
        "rollout.tasks_per_step=2",
    ]
    path = CONFIGS / "rl/gpt-oss-120b_8x8.yaml"
    config = load_config(path, RlConfig, changes)
    rows = (
        step_plan(config.memory_inputs, 135).partition("that fit, as predicted:\n")[2].splitlines()
    )
    assert rows
    for row in rows:
        layout = row.strip().partition(":")[0]
        needed = worst_stage(
            load_config(path, RlConfig, [*changes, *layout_overrides(layout)]).memory_inputs,
        )
        assert f": {needed.total / 1e9:.1f} GB," in row
