"""Tested implementations: servers, functions, and rejected names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from converters.errors import ConversionError
from converters.upcycling.architecture import UpcycleOptions
from converters.upcycling.convert import upcycle
from launch.cli import app
from megatron_gptoss import host_memory
from rl_loop.certify.harmony_tokens import QUOTING, describe_difference, expected_ids
from rl_loop.certify.implementation import (
    ImplementationError,
    ModelImplementation,
    ScoredSequence,
    checked_scores,
)
from rl_loop.certify.implementations.completions_server import CompletionsServer
from rl_loop.certify.implementations.sglang_server import SglangImplementation
from rl_loop.certify.implementations.transformers_model import TransformersModel
from rl_loop.certify.model import (
    SIZES,
    CertifyError,
    designed_weights,
    find_vocabulary,
    vocabulary,
)
from rl_loop.certify.probe_sequences import ProbeSequences
from rl_loop.certify.report import CheckOutcome
from rl_loop.certify.run import CertifyOptions, certify, check_reference, open_weights
from rl_loop.certify.variants import ReferenceModel
from rl_loop.chatml.vocabulary import tiny_vocabulary
from rl_loop.engines.sglang.config import PLUGIN
from rl_loop.harmony.vocabulary import GptOssVocabulary, harmony_encoding
from tests.support.converters.dense_models import save_dense
from tests.support.megatron_gptoss.dense_reference import LLAMA
from tests.support.rl_loop.certify.loopback_server import LoopbackServer, serving
from tests.support.rl_loop.certify.prepared import Prepared, causes, failed
from tests.support.rl_loop.sglang_protocol import LocalServer
from tests.support.rl_loop.unused_tokens import add_unused_tokens

ROOT = Path(__file__).parents[3]
SERVER = "tests.support.rl_loop.certify.loopback_server"


def skipped(results: dict[str, object]) -> set[str]:
    return {name for name, result in results.items() if result.status is CheckOutcome.SKIPPED}


def test_a_server_of_sglang_passes_what_its_protocol_offers(prepared: Prepared) -> None:
    server = LoopbackServer(TransformersModel(prepared.first.directory, "fp32"))
    with serving(server) as url:
        implementation = SglangImplementation(url, prepared.first.config)
        results = prepared.run_checks(implementation)
        implementation.close()
    assert not failed(results)
    assert skipped(results) == {"packing", "gradients", "routes given"}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["fa3", "triton"])
def test_benchmark_certifies_an_sglang_server(attention: str, tmp_path: Path) -> None:
    """A script replaces SGLang's interpreter, which does not have this project in its path."""
    python = tmp_path / "python"
    paths = f"{ROOT}:{ROOT / 'kernels'}"
    python.write_text(
        "#!/bin/sh\n"
        'test "$1 $2" = "-m sglang.launch_server" || exit 1\n'
        "shift 2\n"
        f'PYTHONPATH="{paths}:$PYTHONPATH" exec {sys.executable} -m {SERVER} "$@"\n'
    )
    python.chmod(0o755)
    seen_by_server = tmp_path / "seen"
    command = [sys.executable, "-m", "benchmarks.sglang", "certify", "--attention", attention]
    command += ["--python", str(python), "--pythonpath", "/of/sglang", "--size", "tiny"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths, "SEEN_BY_SERVER": str(seen_by_server)},
        capture_output=True,
        text=True,
        check=False,
    )
    log = tmp_path / "out" / "server.log"
    assert done.returncode == 0, done.stdout + done.stderr + log.read_text()
    report = json.loads(next((tmp_path / "out").glob("*.json")).read_text())
    statuses = {check["name"]: check["status"] for check in report["results"]}
    assert statuses["agreement"] == statuses["decoding"] == statuses["update"] == "passed"

    seen = json.loads(seen_by_server.read_text())
    assert seen["arguments"][seen["arguments"].index("--attention-backend") + 1] == attention
    patches = seen["environment"]["GPTOSS_SGLANG_PATCHES"].split(",")
    assert ("triton_window" in patches) == (attention == "triton")
    path = seen["environment"]["PYTHONPATH"].removeprefix(f"{paths}:").split(":")
    assert path == [str(PLUGIN), "/of/sglang"]


def test_a_server_whose_routes_are_zero_fails_by_that_name(prepared: Prepared) -> None:
    server = LoopbackServer(TransformersModel(prepared.first.directory, "fp32"), zero_routes=True)
    with serving(server) as url:
        implementation = SglangImplementation(url, prepared.first.config)
        results = prepared.run_checks(implementation, "routes returned")
        implementation.close()
    assert causes(results) == {"all returned routes are zero"}
    assert failed(results) == {"routes returned"}


def test_a_server_of_completions_passes_what_its_protocol_offers(prepared: Prepared) -> None:
    server = LoopbackServer(TransformersModel(prepared.first.directory, "fp32"))
    with serving(server) as url:
        implementation = CompletionsServer(f"{url}/v1")
        results = prepared.run_checks(implementation)
        implementation.close()
    assert not failed(results)
    assert skipped(results) == {
        "packing", "gradients", "routes given", "routes returned", "update",
    }  # fmt: skip


def test_a_server_with_another_model_is_not_certified(prepared: Prepared) -> None:
    """The mock server uses the recorded protocol with an invented model."""
    with serving(LocalServer()) as url:
        implementation = SglangImplementation(url, prepared.first.config)
        results = prepared.run_checks(implementation, "window", "decoding")
        implementation.close()
    assert failed(results) == {"agreement", "window", "decoding"}
    assert not causes(results)
    assert "the response lacks a field of SGLang" in results["decoding"].summary


def test_the_command_writes_text_json_and_html(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["certify", "transformers", "--weights", str(prepared.directory), "--only", "sinks"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["passed"] is True
    assert [result["name"] for result in content["results"]] == ["agreement", "sinks"]
    assert (tmp_path / "report.txt").read_text().strip() in done.output
    page = (tmp_path / "report.html").read_text()
    assert "sinks are absent" in page
    assert "prefers-color-scheme: dark" in page
    assert "http" not in page.replace("http-equiv", "")


class Silent(ModelImplementation):
    """Implementation that gives all tokens the same log-prob and supports nothing else."""

    name = "<script>alert(1)</script>"

    def __init__(self, directory: Path, precision: str) -> None:
        pass

    def score(self, sequences: Sequence[Sequence[int]]) -> list[ScoredSequence]:
        return [ScoredSequence([-6.24] * (len(sequence) - 1)) for sequence in sequences]


def test_a_function_by_its_name_fails_with_exit_code_1(prepared: Prepared, tmp_path: Path) -> None:
    name = f"{__name__}:Silent"
    command = ["certify", name, "--weights", str(prepared.directory), "--out", str(tmp_path)]
    command += ["--only", "sinks"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "No known fault explains it" in " ".join(done.output.split())
    assert "<script>" not in (tmp_path / "report.html").read_text()


def test_quoted_special_tokens_that_become_tokens_are_named() -> None:
    words = vocabulary()
    text = "".join(message.text for message in QUOTING)
    injected = words.from_harmony(harmony_encoding().encode(text, allowed_special="all"))
    assert describe_difference(QUOTING, expected_ids(QUOTING, words), words) is None
    difference = describe_difference(QUOTING, injected, words)
    assert difference is not None
    assert "in a message's content becomes the special token" in difference

    ids = expected_ids(QUOTING, words)
    ids[2], ids[3] = ids[3], ids[2]
    assert "ids differ from position 2 on" in str(describe_difference(QUOTING, ids, words))


def upcycled(directory: Path, options: UpcycleOptions) -> Path:
    config = LLAMA.model_copy(update={"vocab_size": 512})
    dense = save_dense(directory / "dense", config)
    tiny_vocabulary(config.vocab_size, "").save(dense)
    add_unused_tokens(dense, 6)
    tokens = list(range(60))
    upcycle(dense, directory / "upcycled", options, tokens, torch.float32)
    return directory / "upcycled"


def test_harmony_of_an_upcycled_model_is_checked(tmp_path: Path) -> None:
    """Its tokenizer is the dense model's, with other names of unused tokens."""
    weights = upcycled(tmp_path, UpcycleOptions(sliding_window=8, harmony=True))
    checks = ("harmony", "decoding")
    report = certify(CertifyOptions("trainer", weights, only=checks))
    statuses = {result.name: result.status for result in report.results}
    assert statuses["agreement"] == statuses["harmony"] == CheckOutcome.PASSED
    # The trainer does not decode. The prompts of this check fit the small window.
    assert statuses["decoding"] == CheckOutcome.SKIPPED


def test_chatml_tokenizer_has_no_vocabulary_of_harmony(tmp_path: Path) -> None:
    weights = upcycled(tmp_path, UpcycleOptions(sliding_window=8))
    assert find_vocabulary(weights, 512) is None
    assert isinstance(find_vocabulary(weights, 201_088), GptOssVocabulary)


def test_window_that_no_text_shows_is_named(tmp_path: Path) -> None:
    weights = upcycled(tmp_path, UpcycleOptions(sliding_window=LLAMA.max_length))
    with pytest.raises(
        CertifyError, match=r"config\.json: .* to test a window of 512, .* Certify a model with"
    ):
        certify(CertifyOptions("trainer", weights))


# ---- rejected implementations


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nobody"], "unknown implementation 'nobody'"),
        (["http://127.0.0.1:9"], "--weights must name the weights of the server"),
        (["no.such.module:thing"], "cannot be imported"),
        (
            ["transformers", "--only", "everything"],
            "unknown check everything. Known checks: agreement",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_arguments_are_one_line(
    prepared: Prepared, words: list[str], message: str, tmp_path: Path
) -> None:
    if words[0] in ("transformers", "no.such.module:thing"):
        words = [*words, "--weights", str(prepared.directory)]
    done = CliRunner().invoke(app, ["certify", *words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert message in done.output
    assert len(done.output.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"config\.json"):
        certify(CertifyOptions("transformers", tmp_path))


def test_a_server_that_is_not_there_is_named(prepared: Prepared) -> None:
    with pytest.raises(ImplementationError, match=r"127\.0\.0\.1:9"):
        SglangImplementation("http://127.0.0.1:9", prepared.first.config)
    with pytest.raises(ImplementationError, match=r"127\.0\.0\.1:9"):
        CompletionsServer("http://127.0.0.1:9/v1")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "0 answers for 1 sequences"),
        ([ScoredSequence([-1.0])], "for a sequence of 3 tokens, expected 2"),
        ([ScoredSequence([-1.0, float("nan")])], "the log-prob of token 2 is nan"),
    ],
    ids=str,
)
def test_answers_that_cannot_be_any_are_failures(
    answer: list[ScoredSequence], message: str
) -> None:
    with pytest.raises(ImplementationError, match=message):
        checked_scores(ModelImplementation(), answer, [[1, 2, 3]])


def test_models_beyond_this_machines_memory_are_refused(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    with pytest.raises(CertifyError, match="GB of memory"):
        open_weights(prepared.directory)


# ---- the reference


def test_a_reference_that_is_wrong_judges_nobody(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prepared.first.config
    check_reference(prepared.first, ProbeSequences(config, ()))

    # The activation's limit is 7.1 instead of 7.
    wrong = config.model_copy(update={"swiglu_limit": 7.1})
    exact = ReferenceModel.__init__

    def with_another_limit(
        self: ReferenceModel, config: object, *rest: object, **more: object
    ) -> None:
        exact(self, wrong, *rest, **more)

    monkeypatch.setattr(ReferenceModel, "__init__", with_another_limit)
    with pytest.raises(CertifyError, match="no check is possible"):
        check_reference(prepared.first, ProbeSequences(config, ()))


@pytest.mark.parametrize("size", ["tiny", "small", "gpu"])
def test_sizes_have_the_shape_of_gpt_oss(size: str) -> None:
    config = SIZES[size]
    assert config.layer_types[:2] == ["sliding_attention", "full_attention"]
    assert config.hidden_size == config.intermediate_size
    assert config.max_length >= config.yarn_original_length + 200
    if size != "tiny":
        assert config.sliding_window == 128
        assert config.yarn_original_length == 4096


def test_designed_weights_use_every_part_of_the_model() -> None:
    weights = dict(designed_weights(SIZES["tiny"], 0))
    reference = ReferenceModel(SIZES["tiny"], weights)
    sequences = ProbeSequences(SIZES["tiny"], (1, 2))
    used = set()
    for sequence in (*sequences.short, *sequences.window):
        routes = reference.evaluate(sequence.ids).routes
        used |= {(layer, int(e)) for layer in range(4) for e in routes[:, layer].unique()}
    assert len(used) == 4 * 8
    bias = weights["model.layers.0.mlp.experts.gate_up_proj_bias"]
    assert 0.02 < float((bias.abs() > 7).float().mean()) < 0.3
    assert torch.equal(
        weights["lm_head.weight"], dict(designed_weights(SIZES["tiny"], 0))["lm_head.weight"]
    )
    assert np.isfinite(float(bias.sum()))
