"""``gptoss serve``: a checkpoint with OpenAI's API, tested with the official client."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import GptOssConfig, Qwen2Config, Qwen2ForCausalLM

from launch.cli import serving
from rl_loop.chatml.vocabulary import tiny_vocabulary
from rl_loop.config.errors import ConfigError, StartError
from rl_loop.config.load import dump_config, load_rl_config, load_run_config
from rl_loop.config.run import RlConfig
from rl_loop.config.served import load_served_config
from rl_loop.lifecycle.start_checks import check_server_requirements
from rl_loop.served_weights import choose_served_weights
from rl_loop.tasks.codec import build_codec
from tests.support.forked_workers import forked_python
from tests.support.launch.forked_command import ForkedCommand
from tests.support.rl_loop.gateway.policy import Script, learned_model

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/rl/tiny_retool.yaml"


@pytest.fixture(scope="module")
def config() -> RlConfig:
    return load_rl_config(CONFIG, ["dtype=fp32"])


@pytest.fixture(scope="module")
def checkpoint(config: RlConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a model of the configuration's shape to greet."""
    script = Script(build_codec(config))
    architecture = GptOssConfig(**config.model.to_hf_config())
    model = learned_model(architecture, script.lessons()[:2])
    directory = tmp_path_factory.mktemp("checkpoint") / "hf"
    # Its file has the names of all exports.
    model.save_pretrained(directory)
    return directory


def serve(*arguments: str) -> subprocess.Popen[str]:
    command = [*forked_python(), "-m", "launch", "serve", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def next_line(process: subprocess.Popen[str], start: str) -> str:
    """Return the next line of output that starts with ``start``.

    The tokenizers library prints warnings to standard output, too.
    """
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        if line.startswith(start):
            return line
        printed.append(line)
    raise AssertionError(f"no line starts with {start!r}: {printed}, {process.communicate()[1]}")


def test_checkpoint_is_served_until_sigterm(config: RlConfig, checkpoint: Path) -> None:
    process = serve(str(CONFIG), "--weights", str(checkpoint), "--port", "0", "--name", "tiny")
    assert process.stdout is not None
    try:
        first = next_line(process, "serving ")
        assert first.startswith("serving tiny at http://127.0.0.1:"), first
        base_url = first.split(" at ")[1].split(";")[0]
        key = process.stdout.readline().removeprefix("API key: ").strip()

        with openai.OpenAI(base_url=base_url, api_key=key) as client:
            assert [model.id for model in client.models.list()] == ["tiny"]
            response = client.responses.create(model="tiny", input="Hi", temperature=0)
            assert response.output_text == "Hello"

            # The model has 1,024 positions.
            with pytest.raises(openai.BadRequestError) as refusal:
                client.responses.create(model="tiny", input="1 " * 2000)
            assert refusal.value.code == "context_length_exceeded"
            # The server continues after a failed request.
            again = client.responses.create(model="tiny", input="Hi", temperature=0)
            assert again.output_text == "Hello"
        stranger = openai.OpenAI(base_url=base_url, api_key="guessed")
        with stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """Create a Hugging Face directory of a dense model with random weights and a tokenizer."""
    vocabulary = tiny_vocabulary(512, "Hello")
    vocabulary.save(tmp_path)
    architecture = load_rl_config(ROOT / "configs/rl/tiny_dense.yaml").model
    Qwen2ForCausalLM(Qwen2Config(**architecture.to_hf_config())).save_pretrained(tmp_path)
    return tmp_path


def test_a_dense_directory_has_its_own_vocabulary(dense: Path) -> None:
    served = load_served_config(dense)
    assert served.vocabulary == "tokenizer"
    assert served.tokenizer_source == dense
    check_server_requirements(served, None)
    # Overrides replace the defaults of the model family.
    with pytest.raises(StartError, match="vocabulary=gptoss does not fit a qwen2 model"):
        check_server_requirements(load_served_config(dense, ["vocabulary=gptoss"]), None)


@pytest.mark.slow
def test_a_dense_directory_is_served_in_chatml(dense: Path) -> None:
    process = serve(str(dense), "dtype=fp32", "--port", "0")
    assert process.stdout is not None
    try:
        first = next_line(process, "serving ")
        assert first.startswith("serving qwen2 at http://127.0.0.1:"), first
        base_url = first.split(" at ")[1].split(";")[0]
        key = process.stdout.readline().removeprefix("API key: ").strip()
        with openai.OpenAI(base_url=base_url, api_key=key) as client:
            completion = client.chat.completions.create(
                model="qwen2", messages=[{"role": "user", "content": "Hi"}], max_tokens=1
            )
        messages = [{"role": "user", "content": "Hi"}]
        prompt = build_codec(load_served_config(dense)).render_prompt(messages)
        assert completion.usage is not None
        assert completion.usage.prompt_tokens == len(prompt)
        assert completion.usage.completion_tokens == 1
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def test_unservable_directory_is_named(
    command: ForkedCommand, checkpoint: Path, tmp_path: Path
) -> None:
    for arguments, named in (
        ([str(CONFIG), "initial_weights=null"], "there is no model. Pass --weights"),
        ([str(CONFIG), "--weights", str(tmp_path)], f"--weights: {tmp_path} is neither"),
        ([str(tmp_path)], f"{tmp_path} is neither a run (config.yaml) nor a Hugging Face"),
        ([str(tmp_path / "absent.yaml")], "no such file"),
        ([str(checkpoint)], "there is no tokenizer.json in"),
        (
            [str(CONFIG), "--weights", str(checkpoint), "--max-tokens", "5000"],
            "--max-tokens 5000 exceeds the 1024 positions of the model",
        ),
    ):
        result = command.run("serve", *arguments)
        assert result.returncode == 1
        assert named in result.stderr
        assert "Traceback" not in result.stderr


def test_a_run_is_served_from_its_export_or_else_its_checkpoints(
    config: RlConfig, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_served_config(tmp_path).initial_weights == tmp_path
    (tmp_path / "export").mkdir()
    (tmp_path / "export/config.json").write_text("{}")
    served = load_served_config(tmp_path, ["dtype=bf16"])
    assert served.initial_weights == tmp_path / "export"
    assert served.model == config.model
    assert served.dtype == "bf16"

    # A supervised run can be served, too.
    supervised = load_run_config(ROOT / "configs/sft/tiny_retool.yaml", "sft")
    (tmp_path / "config.yaml").write_text(dump_config(supervised))
    assert load_served_config(tmp_path).model == supervised.model


@pytest.fixture
def resumed_run(config: RlConfig, tmp_path: Path) -> Path:
    """Create a run directory with an export of step 100 and a checkpoint of step 120."""
    text = dump_config(config.model_copy(update={"initial_weights": Path("models/base")}))
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "export").mkdir()
    (tmp_path / "export/config.json").write_text("{}")
    (tmp_path / "summary.json").write_text('{"steps": 100}')
    checkpoint = tmp_path / "checkpoints/step_000120"
    checkpoint.mkdir(parents=True)
    (checkpoint / "training_state.json").write_text("{}")
    (tmp_path / "checkpoints/latest").write_text(checkpoint.name)
    return tmp_path


def test_newer_checkpoint_is_served_instead_of_export(resumed_run: Path) -> None:
    served = choose_served_weights(resumed_run)
    assert load_served_config(resumed_run).initial_weights == served.path == resumed_run
    assert served.description.endswith("serving its newest checkpoint, after step 120")
    assert served.describe_newer_weights("BASE") is None

    # A new export takes precedence, because it has been compared with the trained weights.
    (resumed_run / "summary.json").write_text('{"steps": 120}')
    served = choose_served_weights(resumed_run)
    assert load_served_config(resumed_run).initial_weights == resumed_run / "export"
    assert served.description.endswith("serving its export, after step 120")


@pytest.mark.parametrize("summary", [None, "{", "[]", '{"steps": "many"}'])
def test_checkpoint_is_served_when_age_of_export_is_unknown(
    resumed_run: Path, summary: str | None
) -> None:
    (resumed_run / "summary.json").unlink()
    if summary is not None:
        (resumed_run / "summary.json").write_text(summary)
    assert choose_served_weights(resumed_run).path == resumed_run

    # If the newest checkpoint is missing, the export is served.
    (resumed_run / "checkpoints/latest").write_text("step_000140")
    served = choose_served_weights(resumed_run)
    assert served.path == resumed_run / "export"
    assert served.description.endswith("its export, of an unknown step")


def test_newer_adapters_without_base_name_the_merge_command(
    resumed_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = resumed_run / "checkpoints/step_000120"
    (checkpoint / "adapter.json").write_text("{}")
    caplog.set_level(logging.INFO, "launch")

    def say(**arguments: Any) -> list[str]:
        """Return the log messages until the command fails on the unreadable weights."""
        caplog.clear()
        with pytest.raises(StartError):
            serving.serve(resumed_run, **arguments)
        return caplog.messages

    step, newer = say()
    assert step == f"{resumed_run}: serving its export, after step 100"
    assert newer.startswith(
        f"{checkpoint} is newer (step 120), but has adapters without their base model"
    )
    assert f"gptoss convert merge models/base {checkpoint} DIR" in newer

    # Weights from another directory do not belong to a step of this run.
    assert say(weights=resumed_run / "absent") == []
    assert say(overrides=["initial_weights=absent"]) == []


def test_a_hugging_face_directory_needs_no_configuration(tmp_path: Path) -> None:
    model = load_rl_config(CONFIG, ["model=gpt-oss-20b", "vocabulary=gptoss"]).model
    (tmp_path / "config.json").write_text(json.dumps(model.to_hf_config()))
    served = load_served_config(tmp_path, ["rollout.engine.max_batch_size=2"])
    assert served.model == model
    assert served.vocabulary == "gptoss"
    assert served.initial_weights == tmp_path
    assert served.rollout.engine.max_batch_size == 2  # type: ignore[union-attr]

    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="model_type is None"):
        load_served_config(tmp_path)
