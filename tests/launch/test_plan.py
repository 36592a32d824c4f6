"""``gptoss plan``: communication of every kind of layer, and the numbers behind each choice."""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from launch.cli import app
from launch.cluster import ClusterConfig
from launch.gpus import KNOWN_GPUS, local_gpu, planned_hardware
from launch.placement import plan_nodes
from launch.plan import attention_plan, disk_plan, step_plan
from launch.submit import describe_launch
from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.packing import schedule
from megatron_gptoss.planning.memory import predict_fullest_stage
from megatron_gptoss.planning.memory_advice import Hardware, layouts_that_fit, memory_plan
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.planning.parameter_counts import parameters_per_gpu
from rl_loop.config.load import load_config, load_run_config
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.config.shipped import shipped_files
from rl_loop.lifecycle.disk_checks import disk_need

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = [*shipped_files("rl"), *shipped_files("sft")]
CONFIG = CONFIGS / "rl/tiny_retool.yaml"
H200 = 150.1
EIGHTY_GB = 75.0
"""Usable GB of a GPU of 80 GB. The value is below that of every such GPU."""
LONG = [
    "model=gpt-oss-20b",
    "parallel.world_size=4",
    "parallel.context=4",
    "training.max_tokens_per_micro_batch=131072",
    "rollout.max_episode_tokens=131072",
    "dtype=bf16",
]


def plan(*overrides: str) -> list[str]:
    config = load_config(CONFIG, RlConfig, list(overrides))
    return attention_plan(config.memory_inputs, config.dtype).splitlines()


def taken(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines if "<- used" in line]


def test_plan_names_scheme_and_traffic_for_each_kind_of_layer() -> None:
    lines = plan(*LONG)
    assert "131072 tokens in 1 sequences, 32768 tokens per rank" in lines[0]
    full, window = taken(lines)
    assert full[:2] == ["12", "full_attention"]
    assert full[2] in ("all_gather", "all_to_all")
    # 2 borders of 127 tokens, each with a key and a value of 8 heads of 64 in bf16, in both
    # directions
    assert window[:4] == [
        "12",
        "sliding_attention",
        "halo",
        f"{2 * 2 * 127 * 2 * 8 * 64 * 2 / 1e6:.2f}",
    ]


def test_plan_uses_configured_attention_scheme() -> None:
    full, window = taken(plan(*LONG, "parallel.context_scheme_full=all_to_all"))
    assert (full[2], window[2]) == ("all_to_all", "halo")
    assert full[-1] == "(set)"


def test_planned_memory_includes_all_models_of_a_run() -> None:
    config = load_config(CONFIG, RlConfig, ["algorithm=ppo", "algorithm.kl.coefficient=0.1"])
    assert config.memory_inputs.auxiliary_models == [
        config.algorithm.critic.optimizer(config.optimizer),
        None,
    ]
    assert load_config(CONFIG, RlConfig, []).memory_inputs.auxiliary_models == []


def test_the_reference_policy_of_adapters_takes_no_memory() -> None:
    overrides = ["algorithm=ppo", "algorithm.kl.coefficient=0.1", "adapter={rank: 4}"]
    config = load_config(CONFIG, RlConfig, overrides)
    assert config.memory_inputs.adapter == config.adapter
    assert config.memory_inputs.auxiliary_models == [
        config.algorithm.critic.optimizer(config.optimizer)
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["training.max_tokens_per_micro_batch=2000", "rollout.max_episode_tokens=800"],
        [
            "parallel.world_size=6",
            "parallel.pipeline=2",
            "parallel.virtual_pipeline=2",
            "rollout.tasks_per_step=5",
        ],
    ],
    ids=str,
)
def test_longest_episodes_fill_the_planned_micro_batches(
    overrides: list[str],
) -> None:
    config = load_config(CONFIG, RlConfig, overrides)
    count = config.rollout.tasks_per_step * config.rollout.samples_per_task
    lengths = np.full(count, config.rollout.max_episode_tokens + 1)
    row, multiple = (
        config.training.max_tokens_per_micro_batch,
        config.parallel.micro_batch_multiple,
    )
    plan = schedule(lengths, row, config.parallel.data, multiple=multiple)
    assert config.memory_inputs.micro_batches == len(plan.micro_batches[0])


def read_gpu(path: Path) -> float:
    """Return the GB of the GPU in the first line of a shipped configuration.

    Tiny configurations need no GPU.
    """
    if path.stem.startswith("tiny"):
        return EIGHTY_GB
    comment = path.read_text().split("\nname:")[0]
    named = re.findall(r"\b(H200|80 GB)\b", comment.splitlines()[0])
    assert len(named) == 1, f"the first line of {path.name} must name one GPU"
    return {"H200": H200, "80 GB": EIGHTY_GB}[named[0]]


def test_shipped_configuration_states_hardware_unless_untested() -> None:
    for path in SHIPPED:
        if not path.stem.startswith("tiny"):
            comment = " ".join(path.read_text().split("\nname:")[0].replace("#", " ").split())
            is_untested = "predicts that it fits. It has not been run." in comment
            assert is_untested == ("untested" in path.parts), path
            assert is_untested or re.search(r"It ran (on|with|for) ", comment), path


@pytest.mark.parametrize(
    "path",
    SHIPPED,
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_every_shipped_configuration_fits_the_gpu_that_it_names(path: Path) -> None:
    config = load_config(path, SftConfig if path.parent.name == "sft" else RlConfig)
    if not path.stem.startswith("tiny"):
        assert read_gpu(path) == (config.gpu_gb or H200), "comment and key disagree"
    needed = predict_fullest_stage(config.memory_inputs, read_gpu(path))
    assert needed.peak.total / 1e9 <= read_gpu(path), needed.phases


@pytest.mark.parametrize(
    ("file", "gpus"),
    [
        ("rl/gpt-oss-20b_1x2.yaml", 2),
        ("rl/gpt-oss-20b_1x4.yaml", 4),
        ("rl/gpt-oss-20b_1x4_async.yaml", 4),
        ("untested/rl/gpt-oss-20b_1x4_mxfp4.yaml", 4),
        ("untested/rl/gpt-oss-20b_1x8_80gb.yaml", 8),
        ("untested/rl/gpt-oss-20b_2x8_80gb.yaml", 16),
        ("untested/rl/gpt-oss-20b_4x8_80gb.yaml", 32),
        ("untested/sft/gpt-oss-20b_1x8_80gb.yaml", 8),
        ("untested/sft/gpt-oss-120b_2x8_80gb.yaml", 16),
        ("untested/rl/gpt-oss-20b_1x8.yaml", 8),
        ("rl/gpt-oss-20b_2x8.yaml", 16),
        ("untested/sft/gpt-oss-120b_2x8.yaml", 16),
        ("untested/rl/gpt-oss-120b_4x8.yaml", 32),
        ("untested/rl/gpt-oss-120b_8x8.yaml", 64),
        ("rl/gpt-oss-20b-adapter_1x1.yaml", 1),
        ("rl/gpt-oss-20b-adapter_1x1_80gb.yaml", 1),
        ("rl/gpt-oss-120b-adapter_1x4.yaml", 4),
        ("untested/rl/gpt-oss-120b-adapter_1x8_80gb.yaml", 8),
        ("untested/rl/gpt-oss-20b-adapter_1x1_80gb_gsm8k.yaml", 1),
        ("untested/rl/gpt-oss-20b_1x8_80gb_math.yaml", 8),
        ("untested/rl/gpt-oss-120b-adapter_1x8_80gb_math.yaml", 8),
        ("untested/sft/gpt-oss-20b-adapter_1x1.yaml", 1),
    ],
)
def test_every_example_fits_its_gpus_and_uses_them_all(file: str, gpus: int) -> None:
    config = load_config(CONFIGS / file, SftConfig if "sft/" in file else RlConfig)
    gigabytes = read_gpu(CONFIGS / file)

    engine = config.rollout.engine
    servers = engine.server_processes
    has_servers = isinstance(config, RlConfig)
    assert (servers is not None) == has_servers
    gpus_of_servers = 0
    if servers is not None and not servers.share_trainer_gpus:
        gpus_of_servers = servers.count * servers.gpus_each
    assert gpus == config.parallel.world_size + gpus_of_servers
    if servers is not None:
        weights = 2 * sum(parameters_per_gpu(config.model, ParallelConfig()))
        if engine.has_mxfp4_experts:
            model = config.model
            matrices = 3 * model.num_layers * model.num_experts
            # A scale of one byte belongs to 32 values of half a byte.
            saved = 2 - (0.5 + 1 / 32)
            weights -= saved * matrices * model.intermediate_size * model.hidden_size
        weights /= servers.gpus_each
        # This is the memory for keys and values. A server on a separate GPU has it from the start.
        assert engine.memory_fraction * gigabytes * 1e9 - weights > 10e9

    cluster = ClusterConfig(
        kind="slurm",
        shared_dir="/shared",
        python="python",
        nodes=-(-gpus // 8),
        gpus_per_node=min(gpus, 8),
    )
    rollout = config.rollout if has_servers else None
    assert len(plan_nodes(config.parallel, rollout, cluster)) == cluster.nodes


def test_colocated_servers_must_fit_next_to_the_resting_trainer() -> None:
    def plan_with(fraction: float) -> tuple[int, str]:
        overrides = [f"rollout.engine.memory_fraction={fraction}"]
        training = load_config(
            CONFIGS / "rl/gpt-oss-20b_1x4.yaml",
            RlConfig,
            overrides,
        ).memory_inputs
        plan = memory_plan(training, Hardware(H200))
        return len(layouts_that_fit(training, H200)), plan.splitlines()[0]

    (many, good), (few, bad) = plan_with(0.4), plan_with(0.65)
    assert re.fullmatch(r"fits: the rollout needs \S+ GB of a GPU's 150.1 GB, .* to spare", good)
    assert re.fullmatch(r"does not fit: the rollout needs .* 150.1 GB, \S+ GB too much", bad)
    assert few < many


@pytest.mark.parametrize("context", ["1", "3"])
def test_any_context_size_has_a_plan(context: str) -> None:
    lines = plan(f"parallel.world_size={context}", f"parallel.context={context}")
    assert len(taken(lines)) == (0 if context == "1" else 2)


def test_interleaving_rounds_micro_batches_and_shrinks_bubble() -> None:
    def step(chunks: int) -> tuple[int, float]:
        overrides = [
            "model=gpt-oss-20b",
            "parallel.world_size=4",
            "parallel.pipeline=4",
            "dtype=bf16",
        ]
        overrides += [
            f"parallel.virtual_pipeline={chunks}",
            "training.max_tokens_per_micro_batch=16384",
        ]
        overrides += [
            "rollout.max_episode_tokens=16384",
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


def test_fastest_fitting_layouts_show_memory_time_and_mfu() -> None:
    overrides = [
        *LONG,
        "parallel.world_size=16",
        "parallel.context=1",
        "optimizer.moment_dtype=bf16",
    ]
    overrides += [
        "rollout.max_episode_tokens=16384",
        "training.max_tokens_per_micro_batch=16384",
        "rollout.tasks_per_step=64",
    ]
    config = load_config(CONFIG, RlConfig, overrides)
    configured, title, *rows = step_plan(config.memory_inputs, 80).splitlines()
    assert title == "predicted fastest layouts of the trainer's 16 GPUs that fit:"

    pattern = r"  .*: ([\d.]+) GB, ([\d.]+) s, (\d+) tokens/s/GPU, ([\d.]+)% MFU(?:  <- conf.*)?"
    figures = [[float(text) for text in re.fullmatch(pattern, row).groups()] for row in rows]
    memory, seconds, speed, mfu = zip(*figures, strict=True)
    assert max(memory) <= 80
    assert list(seconds) == sorted(seconds)
    assert list(speed) == sorted(speed, reverse=True)
    assert list(mfu) == sorted(mfu, reverse=True)
    assert 20 < mfu[0] < 60
    assert re.search(r" tokens/s/GPU, [\d.]+% MFU", configured)


def test_step_plan_reports_missing_layout() -> None:
    inputs = load_config(CONFIGS / "untested/rl/gpt-oss-20b_1x8.yaml", RlConfig).memory_inputs
    *_, last = step_plan(inputs, 84.9).splitlines()
    assert last == "no layout of the trainer's 4 GPUs fits"


@pytest.mark.parametrize(
    "name",
    [
        "untested/rl/gpt-oss-20b_1x8_80gb",
        "untested/rl/gpt-oss-120b_8x8",
        "untested/sft/gpt-oss-120b_2x8_80gb",
    ],
)
def test_step_plan_marks_the_configured_layout(name: str) -> None:
    config = load_run_config(CONFIGS / f"{name}.yaml", name.split("/")[-2])
    memory = config.gpu_gb or H200
    sequences = getattr(config, "sequences_per_step", None)
    first, *rows = step_plan(config.memory_inputs, memory, sequences).splitlines()
    (marked,) = [row for row in rows if "<- configured" in row]
    speed = first.partition("): ")[2].partition(" (")[0]
    assert speed in marked, "the configured layout is compared as it is described above"
    assert config.parallel.sizes in marked


def test_step_plan_states_its_lengths() -> None:
    config = load_config(CONFIGS / "untested/rl/gpt-oss-20b_1x8_80gb.yaml", RlConfig)
    text = step_plan(config.memory_inputs, 75)
    assert "with 256 sequences of the maximum 16384 tokens" in text


def test_plan_counts_the_sequences_of_a_supervised_step(capfd: pytest.CaptureFixture[str]) -> None:
    """One micro-batch per rank would give a wrong pipeline estimate: its bubble is one half."""
    with pytest.raises(SystemExit):
        app(["plan", str(CONFIGS / "untested/sft/gpt-oss-120b_2x8.yaml"), "--sft", "--gpu", "h200"])
    said = capfd.readouterr().out
    assert "with 128 sequences of the maximum 16384 tokens" in said
    assert "in 32 micro-batches per data-parallel rank" in said


def test_plan_uses_one_unit_of_memory(capfd: pytest.CaptureFixture[str]) -> None:
    for options in (["--gpu", "h100"], ["--host-gb", "64"]):
        with pytest.raises(SystemExit):
            app(["plan", str(CONFIGS / "untested/rl/gpt-oss-20b_1x8_80gb.yaml"), *options])
    said = capfd.readouterr().out
    assert " GB" in said and "GiB" not in said and "80GB" not in said


VARIANTS = [
    (),
    ("algorithm=ppo", "algorithm.critic.warmup_steps=0", "algorithm.mini_batches=2"),
    ("parallel.recompute=[moe]", "parallel.recompute_layers=1", "optimizer.moment_dtype=fp32"),
]


def layout_overrides(advice: str) -> list[str]:
    """Return overrides for a line of the plan, such as "tensor 2, pipeline 1, expert 8"."""
    return [f"parallel.{part.replace(' ', '=')}" for part in advice.split(", ")]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_advice_of_the_plan_is_valid_and_has_the_promised_memory(path: Path) -> None:
    """The test applies every line of the advice as overrides of the configuration, like a user."""
    kind = SftConfig if path.parent.name == "sft" else RlConfig

    @cache
    def inputs_with(*overrides: str) -> MemoryInputs:
        return load_config(path, kind, [*overrides]).memory_inputs

    # Each configuration has every size of a GPU. Together they have it with every variant.
    variants = itertools.cycle(VARIANTS if kind is RlConfig else VARIANTS[::2])
    for _ in range(SHIPPED.index(path) % len(VARIANTS)):
        next(variants)
    part = "core_attn" if load_config(path, kind).model.num_experts == 0 else "moe"
    applied = 0
    for gigabytes, variant in zip((2, 72, 150.1), variants, strict=False):
        configured = [line.replace("[moe]", f"[{part}]") for line in variant]
        plan = memory_plan(inputs_with(*configured), Hardware(gigabytes))
        advice = parse_advice(plan, configured)
        for overrides, promised in advice:
            needed = predict_fullest_stage(inputs_with(*overrides), gigabytes).peak.total
            assert f"{needed / 1e9:.1f}" == promised, overrides
        applied += len(advice)
    assert applied > 3


def parse_advice(plan: str, configured: list[str]) -> list[tuple[list[str], str]]:
    """Return (overrides, promised GB) of every line of a memory plan."""
    title = "settings that need less memory, each in addition to those above it:\n"
    layouts, _, settings = plan.partition(title)
    advice = []

    # Settings accumulate. The last line is "more GPUs", which is not an override.
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
    path = CONFIGS / "untested/rl/gpt-oss-120b_8x8.yaml"
    config = load_config(path, RlConfig, changes)
    rows = step_plan(config.memory_inputs, H200).partition("GPUs that fit:\n")[2].splitlines()
    assert rows
    for row in rows:
        layout = row.strip().partition(":")[0]
        changed = load_config(path, RlConfig, [*changes, *layout_overrides(layout)]).memory_inputs
        assert f": {predict_fullest_stage(changed, H200).peak.total / 1e9:.1f} GB," in row


FAKE_NVIDIA_SMI = """#!/bin/sh
test "$1" = --query-gpu=name,memory.total,memory.reserved || exit 2
cat <<END
NVIDIA H200, 143771, 615
NVIDIA H100 80GB HBM3, 81559, 551
Graphics Device, [N/A], [N/A]
END
"""


def test_plan_uses_smallest_gpu_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program = tmp_path / "nvidia-smi"
    program.write_text(FAKE_NVIDIA_SMI)
    program.chmod(0o755)
    here = local_gpu()
    assert here is not None and here.name == "NVIDIA H100 80GB HBM3"
    assert here.total_bytes == (81_559 - 551) << 20

    hardware = planned_hardware()
    assert (hardware.gigabytes, hardware.gpu) == (84.9, "NVIDIA H100 80GB HBM3 of this machine")
    assert hardware.host_gigabytes is not None and hardware.host_gigabytes > 1
    assert planned_hardware("h200").gigabytes == H200
    assert planned_hardware("b200", gigabytes=60).gigabytes == 60
    # The GPU of this machine takes precedence over the GPU of the configuration.
    assert planned_hardware(configured_gigabytes=75).gigabytes == 84.9

    for answer in ("exit 9", "echo No devices were found"):
        program.write_text(f"#!/bin/sh\n{answer}\n")
        assert local_gpu() is None
        assert planned_hardware().gigabytes == H200


def plan_command(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run gptoss plan on a configuration for GPUs of 80 GB. Return exit code and output."""
    path = CONFIGS / "rl/gpt-oss-20b-adapter_1x1_80gb.yaml"
    with pytest.raises(SystemExit) as ended:
        app(["plan", str(path), *arguments])
    out, err = capfd.readouterr()
    return ended.value.code, out or err


def test_plan_uses_configured_gpu_memory_without_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no GPU here
    # This needs more memory than a GPU of 80 GB has, and less than an H200 has.
    larger = "training.max_tokens_per_micro_batch=32768"

    status, said = plan_command(capfd)
    assert status == 0
    assert said.startswith("fits")
    assert "\nmemory per GPU of key gpu_gb, " in said
    assert "a GPU's 75 GB" in said.splitlines()[0]

    assert plan_command(capfd, larger)[0] == 1
    assert plan_command(capfd, larger, "--gpu", "h200")[0] == 0
    assert plan_command(capfd, larger, "gpu_gb=null")[0] == 0

    for wrong in ("0", ".inf"):
        status, said = plan_command(capfd, f"gpu_gb={wrong}")
        assert status == 1
        assert " gpu_gb" in said


@pytest.mark.parametrize(
    ("cluster_memory", "said"),
    [
        (None, "memory plan\nfits, but only just: .* of a GPU's 75 GB"),
        (60, "memory plan\ndoes not fit: .* of a GPU's 60 GB"),
    ],
)
def test_dry_run_plans_for_cluster_gpu_or_configured_gpu(
    cluster_memory: float | None, said: str
) -> None:
    config = load_config(CONFIGS / "rl/gpt-oss-20b-adapter_1x1_80gb.yaml", RlConfig)
    cluster = ClusterConfig(
        kind="local",
        python="python",
        gpus_per_node=1,
        gpu_gb=cluster_memory,
    )
    assert re.search(said, describe_launch(config, cluster))


def test_known_h200_memory_equals_nvidia_smi() -> None:
    # 143,771 MiB minus the driver's part. An H200 with no free page showed 143,154 MiB.
    assert KNOWN_GPUS["h200"].total_bytes / (1 << 20) == pytest.approx(143_154, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--gpu", "h200"], 0, "fits: the rollout needs 134.1 GB of a GPU's 150.1 GB, 16.0 GB to"),
        (["--gpu", "H100"], 1, "does not fit: the "),
        (["--gpu-gb", "75"], 1, "of a GPU's 75 GB, "),
        (["--gpu", "h200", "--host-gb", "100"], 1, "GB of a node's 100 GB of memory, "),
        (["--gpu", "gtx"], 1, "Use one of h100, h200, b200"),
        (["--gpu-gb", "-3"], 1, "--gpu-gb -3: must be a finite size above 0"),
    ],
)
def test_plan_command_exits_with_1_if_configuration_does_not_fit(
    options: list[str], status: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", str(CONFIGS / "rl/gpt-oss-20b_1x2.yaml"), *options]
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    assert ended.value.code == status
    out, err = capfd.readouterr()
    assert said in out + err


@pytest.mark.parametrize(
    ("options", "note"),
    [
        (["--gpu", "h100"], "the planned GPU (H100, 84.9 GB)"),
        (["--gpu-gb", "75"], "the planned GPU (GPU, 75 GB)"),
        (["--gpu", "h200"], None),
    ],
)
def test_plan_for_another_gpu_notes_that_times_are_for_h200(
    options: list[str], note: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        app(["plan", str(CONFIGS / "rl/gpt-oss-20b_1x2.yaml"), *options])
    said = capfd.readouterr().out
    assert "an update at H200 rates" in said
    assert (note is None) == ("times are for H200 GPUs" not in said)
    if note is not None:
        assert note in said
        # The note must precede the times.
        assert said.index(note) < said.index("an update at H200 rates")


def test_plan_states_disk_of_checkpoints_and_export() -> None:
    config = load_config(CONFIGS / "rl/gpt-oss-20b_1x4.yaml", RlConfig)
    parameters = config.model.num_parameters
    # bf16 weights, fp32 master weights, two moments. The oldest is deleted after the newest is saved.
    checkpoint, export = 14 * parameters / 1e9, 2 * parameters / 1e9
    assert disk_plan(disk_need(config)) == (
        f"disk: {3 * checkpoint + export:.1f} GB in output_dir, for 3 checkpoints of "
        f"{checkpoint:.1f} GB and an export of {export:.1f} GB, in addition to episodes and logs"
    )
    result = CliRunner().invoke(app, ["plan", "gpt-oss-20b_1x4", "--gpu", "h200"])
    assert disk_plan(disk_need(config)) in result.stdout
