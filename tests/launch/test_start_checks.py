"""A run that cannot start prints one line before it imports torch or Ray, and leaves no files."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from converters.hf_directory import written_shapes
from converters.names import hf_shapes
from converters.peft_settings import peft_config
from launch.cluster import ClusterConfig
from launch.node_checks import RAY_PORTS, busy_ports
from megatron_gptoss.config import AdapterConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.config.errors import StartError
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.lifecycle import start_checks
from rl_loop.lifecycle.disk_checks import (
    DiskNeed,
    check_disk,
    checkpoint_bytes,
    checkpoints_at_a_time,
    export_bytes,
    kept_adapter_bytes,
)
from rl_loop.lifecycle.start_checks import (
    check_data,
    check_run_requirements,
    warn_about_rollouts,
    warn_about_sampling,
)
from tests.support.launch.forked_command import Ended, ForkedCommand
from tests.support.processor_speed import slowness

ROOT = Path(__file__).parents[2]
RL, SFT = "configs/rl/tiny_retool.yaml", "configs/sft/tiny_retool.yaml"
RANDOM = "initial_weights=null"
PROGRAM = """
import atexit, sys
atexit.register(lambda: print("heavy:", sorted({"torch", "ray", "megatron"} & set(sys.modules))))
from launch.cli import main
main()
"""


def gptoss(
    *arguments: str,
    before: tuple[str, ...] = (),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-c", PROGRAM, *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def assert_refused(result: subprocess.CompletedProcess[str] | Ended, message: str) -> None:
    assert result.returncode in (1, 2), result.stdout
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("gptoss: ")
    assert re.search(message, lines[0]), lines[0]
    if isinstance(result, Ended):
        assert (result.stdout, result.heavy) == ("", [])
    else:
        assert result.stdout == "heavy: []\n"


def fake_model(path: Path, **changes: object) -> Path:
    """Create a Hugging Face directory of the tiny model with ``changes`` and empty weights."""
    path.mkdir()
    model = load_config(ROOT / RL, RlConfig).model
    (path / "config.json").write_text(json.dumps(model.to_hf_config() | changes))
    (path / "model.safetensors").touch()
    return path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def data(path: Path | str) -> list[str]:
    return [
        f"tasks.sources.retool.train_path={path}",
        f"tasks.sources.retool.held_out_path={path}",
    ]


GOOD_ROW = (
    '{"task_id": "a", "messages": [{"role": "user", "content": "1+1?"}], "ground_truth": "2"}\n'
)
SGLANG = ["rl", RL, RANDOM, "rollout.engine.type=sglang"]
PATH = os.environ["PATH"]

# name of the problem: (arguments, environment, message); FILES is the directory of ``files``
CASES: dict[str, tuple[list[str], dict[str, str], str]] = {
    "weights of rl": (["rl", RL, "initial_weights=/none"], {}, "initial_weights: /none does not exist. `hf download"),
    "weights of sft": (["sft", SFT, "initial_weights=FILES"], {}, "initial_weights: .* is neither .* `hf download"),
    "weights of the warm start": (["rl", RL, "initial_weights=runs/tiny_retool_sft"], {},
                                  "`gptoss sft configs/sft/tiny_retool.yaml` trains it"),
    "released weights": (["rl", RL, "initial_weights=models/gpt-oss-20b"], {},
                         "`hf download openai/gpt-oss-20b --local-dir models/gpt-oss-20b .* downloads it"),
    "an export": (["eval", RL, "--weights", "runs/mine/export"], {}, "--weights: .* `gptoss rl CONFIG --resume`"),
    "chats of an example": (["sft", "configs/sft/tiny_shop.yaml"], {},
                            "`python examples/chat_with_tools.py runs/shop` writes it"),
    "chats": (["sft", "configs/sft/tiny_shop.yaml", "data={path: /none.jsonl}"], {}, "`gptoss data preview CONFIG`"),
    "held-out chats of other chats": (["sft", "configs/sft/tiny_shop.yaml", "data.path=/none.jsonl"], {},
                                      "data.validation_path: runs/shop/held_out.jsonl belongs to the data.path"),
    "weights in a model's directory": (["sft", SFT, "initial_weights=FILES/bare"], {}, "neither model.safetensors"),
    "a shard": (["sft", SFT, "initial_weights=FILES/sharded"], {},
                "names the file model-00002-of-00002.safetensors, which is missing"),
    "the right model": (["sft", SFT, "initial_weights=FILES/other"], {},
                        "a different model.*num_layers is 3 there, but 4 .*sliding_window is 64 there, but 16"),
    "the right Megatron checkpoint": (["rl", RL, "initial_weights=FILES/megatron"], {},
                                      "a different model.*num_layers is 2 there"),
    "a base for adapters": (["rl", RL, "initial_weights=FILES/adapters"], {}, "has adapters without their base model"),
    "adapters to start from": (["rl", RL, RANDOM, "adapter={}", "initial_adapter=/none"], {},
                               "initial_adapter: /none does not exist. `gptoss sft CONFIG` or"),
    "the right adapters": (["rl", RL, RANDOM, "adapter={rank: 4}", "initial_adapter=FILES/rank_8"], {},
                           "initial_adapter: .*rank_8 has adapter.rank 8, but the configuration has 4"),
    "adapters of the right model": (["sft", SFT, RANDOM, "adapter={rank: 4}", "initial_adapter=FILES/other_rank_8"],
                                    {}, "initial_adapter: .*a different model.*num_layers is 2 there"),
    "adapters that can be read": (["rl", RL, RANDOM, "adapter={}", "initial_adapter=FILES/adapters"], {},
                                  "initial_adapter: .*gptoss_config.json has no valid model configuration"),
    "tensors of a PEFT adapter": (["rl", RL, RANDOM, "adapter={}", "initial_adapter=FILES/peft"], {},
                                  "initial_adapter: .*peft has no adapter_model.safetensors"),
    "the rank of a PEFT adapter": (["rl", RL, RANDOM, "adapter={rank: 4}", "initial_adapter=FILES/peft_8"], {},
                                   "initial_adapter: .*adapter_config.json has rank 8 for q, but .* has 4"),
    "the rank of its experts": (["rl", RL, RANDOM, "adapter={rank: 8, expert_rank: 2}", "initial_adapter=FILES/peft_8"],
                                {}, "initial_adapter: .*adapter_config.json has rank 4 for experts, but .* has 2"),
    "the alpha of a PEFT adapter": (["rl", RL, RANDOM, "adapter={rank: 8, alpha: 3}", "initial_adapter=FILES/peft_8"],
                                    {}, "_config.json scales q like lora_alpha 32, but the configuration .* 3"),
    "a PEFT adapter that can be read": (["rl", RL, RANDOM, "adapter={}", "initial_adapter=FILES/dora"], {},
                                        "initial_adapter: .*use_dora is True, which is not supported"),
    "a tokenizer's directory": (["sft", "configs/sft/tiny_dense.yaml", "vocabulary=tokenizer", "tokenizer=/none"], {},
                                "vocabulary=tokenizer: /none does not exist. `hf download"),
    "a whole model to evaluate": (["eval", RL, RANDOM, "adapter={}", "initial_adapter=FILES/rank_8"], {},
                                  "initial_adapter: evaluation needs a whole model, .* as --weights"),
    "the right model of an evaluation": (["eval", RL, "--weights", "FILES/other"], {},
                                         "--weights: .*a different model.*num_layers is 3 there"),
    "weights of an evaluation": (["eval", RL, "--weights", "/none"], {}, "--weights: /none does not exist"),
    "something to evaluate": (["eval", RL, RANDOM], {}, "nothing to evaluate. Pass --weights"),
    "an endpoint that answers": (["eval", RL, "evaluation.endpoint=http://127.0.0.1:1/v1"], {},
                                 r"endpoint: no server answers at http://127.0.0.1:1/v1 \(connection refused\)"),
    "an endpoint's address": (["eval", RL, "evaluation.endpoint=host:8000"], {}, "is not an address such as"),
    "room for a step": (["rl", RL, RANDOM, "rollout.tasks_per_step=100000000"], {},
                        r"a step needs [0-9,.]+ GB of Ray's object store .* Lower rollout.tasks_per_step, "),
    "room for an evaluation": (["eval", RL, RANDOM, "--weights", "/none", "evaluation.samples_per_task=100000000"],
                               {}, "a step needs .* Lower evaluation.samples_per_task, "),
    "SGLang": (SGLANG, {}, "rollout.engine.python: .* has no SGLang"),
    "SGLang's interpreter": ([*SGLANG, "rollout.engine.python=/none/python"], {}, "/none/python is not executable"),
    "bubblewrap": (["rl", RL, RANDOM], {"PATH": "/none"}, "bubblewrap.*install"),
    "the right to isolate": (["rl", RL, RANDOM], {"PATH": f"FILES/failing:{PATH}"}, "No permissions"),
    "data": (["sft", SFT, *data("/none.jsonl")], {}, "retool.train_path: /none.jsonl does not exist. Write one task"),
    "a file of data": (["sft", SFT, *data("FILES")], {}, "cannot be read .Is a directory.. Name a file"),
    "a good row": (["sft", SFT, *data("FILES/rows.jsonl")], {}, "rows.jsonl, line 2: not JSON"),
    "pass rates": (["rl", RL, RANDOM, *data("FILES/good.jsonl"),
                    "tasks.sources.retool.pass_rate={episodes: /none}"], {},
                   "retool.pass_rate.episodes: /none does not exist. `gptoss eval CONFIG --output /none`"),
    "a Ray that lives": (["sft", SFT], {"RAY_ADDRESS": "127.0.0.1:1"}, "but no server answers there .*unset it"),
    "an address of Ray": (["sft", SFT], {"RAY_ADDRESS": "cluster"}, "RAY_ADDRESS is 'cluster', which is not HOST:PORT"),
    "wandb": (["sft", SFT], {"WANDB_PROJECT": "x"}, "WANDB_PROJECT is set, but wandb is not installed"),
    "trackio": (["sft", SFT], {"TRACKIO_PROJECT": "x"}, "TRACKIO_PROJECT is set, but trackio is not installed"),
    "mlflow": (["sft", SFT], {"MLFLOW_TRACKING_URI": "x"}, "MLFLOW_TRACKING_URI is set, but mlflow is not installed"),
    "the vocabulary": (["sft", SFT], {"TIKTOKEN_ENCODINGS_BASE": "/none"}, "/none/o200k_base.tiktoken is missing"),
    "a directory to write in": (["sft", SFT, "output_dir=FILES/rows.jsonl"], {}, "Not a directory"),
    "a place for a directory": (["sft", SFT, "output_dir=/proc/none"], {}, "cannot create the run directory"),
    "a file of rl": (["rl", SFT], {}, "is a configuration of `gptoss sft` .*not of `gptoss rl`"),
    "demonstrations to evaluate": (["eval", SFT], {}, "tiny_retool_sft trains on demonstrations"),
    "a file of sft": (["sft", RL], {}, "is a configuration of `gptoss rl` .*not of `gptoss sft`"),
    "one way to begin": (["sft", SFT, "--resume", "--overwrite"], {}, "exclude each other"),
    "a run": (["sft", SFT, "--resume"], {}, "there is no run to resume"),
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the faulty models, data and programs of ``CASES``."""
    files = tmp_path_factory.mktemp("files")
    sharded = fake_model(files / "sharded")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write(sharded / "model.safetensors.index.json", json.dumps({"weight_map": weight_map}))
    (sharded / "model-00001-of-00002.safetensors").touch()
    write(files / "bare/config.json", (sharded / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    fake_model(files / "other", num_hidden_layers=3, sliding_window=64, layer_types=kinds)
    write(files / "megatron/metadata.json", "{}")
    write(
        files / "megatron/gptoss_config.json",
        GptOssModelConfig(num_layers=2, num_experts=4).model_dump_json(),
    )
    write(files / "adapters/metadata.json", "{}")
    write(files / "adapters/adapter.json", "{}")
    tiny = load_config(ROOT / RL, RlConfig).model
    for name, model in (
        ("rank_8", tiny),
        ("other_rank_8", tiny.model_copy(update={"num_layers": 2})),
    ):
        write(files / name / "gptoss_config.json", model.model_dump_json())
        write(files / name / "adapter.json", '{"base": "", "settings": {"rank": 8}}')
    write(files / "peft/adapter_config.json", "{}")
    model = load_config(ROOT / RL, RlConfig, [RANDOM]).model
    peft = peft_config(model, AdapterConfig(rank=8, alpha=32), base=None)
    for name, settings in (("peft_8", peft), ("dora", {**peft, "use_dora": True})):
        write(files / name / "adapter_config.json", json.dumps(settings))
        write(files / name / "adapter_model.safetensors", "")
    write(files / "rows.jsonl", GOOD_ROW + '{"task_id": \n')
    write(files / "good.jsonl", GOOD_ROW)
    write(files / "failing/bwrap", "#!/bin/sh\necho 'bwrap: No permissions' >&2; exit 1\n").chmod(
        0o755,
    )
    return files


@pytest.mark.parametrize("missing", CASES)
def test_missing_input_is_named_in_one_line_before_any_write(
    missing: str, command: ForkedCommand, files: Path, tmp_path: Path
) -> None:
    arguments, environment, message = CASES[missing]
    arguments = [argument.replace("FILES", str(files)) for argument in arguments]
    environment = {name: value.replace("FILES", str(files)) for name, value in environment.items()}
    if not any(argument.startswith("output_dir") for argument in arguments):
        arguments.append(f"output_dir={tmp_path}/runs")
    there = sorted(files.rglob("*"))
    ended = command.run(*arguments, **environment)
    assert_refused(ended, message)
    # The limit is processor time, because elapsed time depends on concurrent tests.
    assert ended.seconds < 4 * slowness()
    assert list(tmp_path.iterdir()) == []
    assert sorted(files.rglob("*")) == there


@contextmanager
def listening(answer: bytes) -> Iterator[int]:
    """Run a server that sends ``answer`` to the first client. Yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def test_other_server_at_ray_address_is_recognized(command: ForkedCommand, tmp_path: Path) -> None:
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        result = command.run(
            "sft", SFT, f"output_dir={tmp_path}/runs", RAY_ADDRESS=f"127.0.0.1:{port}"
        )
    assert_refused(result, "but the server there is not Ray")


def test_disk_without_space_for_checkpoints_is_named(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ("bwrap", "--dev-bind", "/", "/", "--size", "6000000", "--tmpfs", str(small))
    if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("bubblewrap cannot mount a small file system here")
    result = gptoss("sft", SFT, f"output_dir={small}/runs", before=mount)
    assert_refused(
        result,
        r"6\.0 MB are free in .*needs \S+ [MG]B for 3 checkpoints of .*keep_checkpoints",
    )


def test_resume_suggests_run_for_mistyped_name(command: ForkedCommand, tmp_path: Path) -> None:
    write(tmp_path / "tiny_retool/config.yaml", "name: tiny_retool\n")
    result = command.run("sft", SFT, f"output_dir={tmp_path}", "name=tiny_retol", "--resume")
    assert_refused(result, "tiny_retol: there is no run to resume; did you mean name=tiny_retool")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny_retool"]


def test_rows_use_environment_of_their_source_by_default(
    tmp_path: Path,
) -> None:
    row = {"task_id": "a", "messages": [{"role": "user", "content": "1+1?"}], "ground_truth": "2"}
    path = write(tmp_path / "tasks.jsonl", json.dumps(row))
    source = f"{{environment: retool, held_out_path: '{path}', weight: 0}}"
    check_data(load_config(Path(RL), RlConfig, [f"tasks.sources.another_name={source}"]))


def test_missing_checkpoint_is_named_before_loading(command: ForkedCommand, tmp_path: Path) -> None:
    write(tmp_path / "x/checkpoints/latest", "step_000003")
    assert_refused(
        command.run("sft", SFT, f"output_dir={tmp_path}", "name=x", "--resume"),
        "names step_000003, which is mis",
    )


def test_predicted_checkpoint_size_matches_the_model(tmp_path: Path) -> None:
    config = load_config(ROOT / RL, RlConfig, ["training.steps=5", "training.checkpoint_every=3"])
    parameters = sum(math.prod(shape) for shape in hf_shapes(config.model).values())
    assert config.model.num_parameters == parameters
    assert (
        checkpoint_bytes(config.model, config.dtype) == 12 * parameters
    )  # fp32 weights and two moments
    assert checkpoints_at_a_time(config.training) == 2
    # bf16 weights, fp32 master weights, two moments
    assert checkpoint_bytes(config.model, "bf16") == 14 * parameters
    assert checkpoint_bytes(config.model, "bf16", has_critic=True) == 28 * parameters

    adapter = AdapterConfig(rank=8)
    trained = adapter.num_parameters(config.model)
    assert checkpoint_bytes(config.model, "bf16", adapter=adapter) == 14 * trained


def test_predicted_export_size_matches_the_model() -> None:
    config = load_config(ROOT / RL, RlConfig).model
    shapes = written_shapes(config, quantized=False)
    values = sum(math.prod(shape) for shape in shapes.values())
    assert export_bytes(config, "bf16") == 2 * values
    assert export_bytes(config, "fp32") == 4 * values

    packed = written_shapes(config, quantized=True)
    expected = 0
    for name, shape in packed.items():
        expected += math.prod(shape) * (1 if name.endswith(("_blocks", "_scales")) else 4)
    assert export_bytes(config, "fp32", quantization="mxfp4") == expected


def test_disk_check_includes_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(free=100e9)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    training = load_config(ROOT / RL, RlConfig, ["training.steps=1"]).training
    check_disk(tmp_path, DiskNeed(training, checkpoint=50e9, export=50e9))
    with pytest.raises(
        StartError, match=r"110\.0 GB for 1 checkpoint of 50\.0 GB and an export of 60\.0 GB"
    ):
        check_disk(tmp_path, DiskNeed(training, checkpoint=50e9, export=60e9))

    # The files of a killed export are deleted when the run continues.
    unfinished = tmp_path / "export.partial"
    unfinished.mkdir()
    with (unfinished / "shard-0").open("wb") as file:
        file.truncate(20_000_000_000)
    check_disk(tmp_path, DiskNeed(training, checkpoint=50e9, export=60e9))


def test_disk_check_includes_adapters_of_all_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=100e9)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    options = ["training.steps=95", "training.checkpoint_every=10", "training.keep_checkpoints=1"]
    config = load_config(ROOT / RL, RlConfig, options)
    check_disk(tmp_path, DiskNeed(config.training, checkpoint=20e9, adapters=6e9))
    message = (
        r"110\.0 GB for 2 checkpoints of 20\.0 GB and the adapters of 10 checkpoints, 7\.0 GB each\. "
        r".*lower training\.keep_checkpoints, or set training\.keep_adapters to false"
    )
    with pytest.raises(StartError, match=message):
        check_disk(tmp_path, DiskNeed(config.training, checkpoint=20e9, adapters=7e9))
    # Two of the adapters are on the disk already.
    for step in (10, 20):
        (tmp_path / f"adapters/step_{step:06d}").mkdir(parents=True)
    check_disk(tmp_path, DiskNeed(config.training, checkpoint=20e9, adapters=7e9))

    keeping = ["adapter={rank: 8}", "training.keep_adapters=true"]
    training = load_config(ROOT / RL, RlConfig, keeping).training
    adapter = AdapterConfig(rank=8)
    trained = adapter.num_parameters(config.model)
    assert kept_adapter_bytes(training, config.model, "bf16", adapter) == 2 * trained
    assert kept_adapter_bytes(config.training, config.model, "bf16", adapter) == 0


@contextmanager
def a_server_among_free_ports() -> Iterator[int]:
    """Listen on a port and yield it. The neighboring ports of a Ray are free.

    The ports of that Ray start at three below this port. Ports above 32,767 are ephemeral, so
    concurrent
    tests may get them.
    """
    for port in range(20_003, 32_000, 2 * RAY_PORTS):
        if busy_ports(ClusterConfig(kind="local", ray_port=port - 3)):
            continue
        with socket.create_server(("", port)):
            yield port
        return
    pytest.fail("no free block of ports below 32,000")


def test_port_of_ray_in_use_is_a_node_problem(command: ForkedCommand, tmp_path: Path) -> None:
    with a_server_among_free_ports() as port:
        cluster = ClusterConfig(kind="local", ray_port=port - 3)
        assert busy_ports(cluster) == [f"port {port} is in use, but cluster.ray_port is {port - 3}"]
        cluster_file = write(
            tmp_path / "cluster.yaml",
            f"kind: local\nray_port: {port - 3}\nmin_free_disk: 0\n",
        )
        result = command.run(
            "launch",
            SFT,
            "--sft",
            "--cluster",
            str(cluster_file),
            f"output_dir={tmp_path}/runs",
        )
    assert f"cluster.ray_port: port {port} is in use" in result.stderr
    assert not (tmp_path / "runs").exists()
    assert busy_ports(ClusterConfig(kind="local")) == []


def test_launch_reports_missing_package_at_once(command: ForkedCommand, tmp_path: Path) -> None:
    cluster_file = write(tmp_path / "cluster.yaml", "kind: local\nmin_free_disk: 0\n")
    arguments = [
        "launch",
        SFT,
        "--sft",
        "--cluster",
        str(cluster_file),
        f"output_dir={tmp_path}/runs",
    ]
    assert_refused(
        command.run(*arguments, WANDB_PROJECT="x", XDG_STATE_HOME=str(tmp_path)),
        "wandb is not installed",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.yaml"]


def test_top_p_below_1_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The log-probs are computed without top_p, so the run warns the user."""
    for top_p, warns in ((1.0, False), (0.9, True)):
        caplog.clear()
        config = load_config(Path("tiny_retool"), RlConfig, [f"rollout.top_p={top_p}"])
        warn_about_sampling(config)
        assert ("rollout.top_p=0.9: " in caplog.text) is warns


FAKE_NVIDIA_SMI = """#!/bin/sh
echo NVIDIA H200, 143771, 615
"""


def test_half_empty_servers_give_a_warning_at_the_start(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU on the driver's machine and without ``gpu_gb``, batches are not known."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    path, few = Path("gpt-oss-20b_1x2"), "rollout.tasks_per_step=1"

    def warned(*overrides: str) -> bool:
        caplog.clear()
        warn_about_rollouts(load_config(path, RlConfig, list(overrides)))
        return "rollout.tasks_per_step=1 gives a server 4 episodes" in caplog.text

    assert not warned(few)
    assert warned(few, "gpu_gb=150")
    program = tmp_path / "nvidia-smi"
    program.write_text(FAKE_NVIDIA_SMI)
    program.chmod(0o755)
    assert warned(few)
    assert not warned()


def test_start_checks_include_the_warnings_about_rollouts(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The test environment has no SGLang, which is checked only where workers run.
    monkeypatch.setattr(start_checks, "runs_here", lambda: False)
    overrides = ["rollout.engine={type: sglang}", "rollout.tasks_per_step=1", "gpu_gb=80"]
    overrides += [f"output_dir={tmp_path}", "initial_weights=null"]
    check_run_requirements(load_config(Path("tiny_retool"), RlConfig, overrides))
    assert "rollout.tasks_per_step=1 gives a server" in caplog.text
