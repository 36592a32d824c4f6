"""The command `gptoss data generate`. ``tests/rl_loop/test_self_written.py`` has the conversations."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from launch.cli import app
from rl_loop.chatml.vocabulary import tiny_vocabulary
from tests.support.converters.dense_models import save_dense
from tests.support.megatron_gptoss.dense_reference import LLAMA


def generate(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["data", "generate", *arguments])
    return result.exit_code, result.output


def test_generate_prints_its_progress_and_continues(tmp_path: Path) -> None:
    config = LLAMA.model_copy(update={"vocab_size": 512, "max_length": 512})
    model = save_dense(tmp_path / "model", config)
    tiny_vocabulary(config.vocab_size, "").save(model)
    (model / "chat_template.jinja").write_text(
        "<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n<|im_start|>assistant\n"
    )
    out = tmp_path / "out.jsonl"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "Why?"}\n{"text": "How?"}\n{"text": "When?"}\n')

    options = ["--prompts", str(prompts), "--column", "text", "--max-tokens", "9", "--batch", "2"]
    code, output = generate(str(model), str(out), *options)
    assert code == 0, output
    assert output.splitlines()[0] == "0 of 3 conversations"
    assert output.splitlines()[-2:] == ["3 of 3 conversations", str(out)]
    written = [json.loads(line)["messages"][0]["content"] for line in out.read_text().splitlines()]
    assert sorted(written) == ["How?", "When?", "Why?"]

    code, output = generate(str(model), str(out), *options)
    assert (code, output.splitlines()) == (0, ["3 of 3 conversations", str(out)])


def test_generate_needs_one_source_of_questions(tmp_path: Path) -> None:
    paths = [str(tmp_path / "model"), str(tmp_path / "out.jsonl")]
    for options in ([], ["--conversations", "3", "--prompts", "questions.jsonl"]):
        code, output = generate(*paths, *options)
        assert code == 2 and "give either --conversations or --prompts" in output
    code, output = generate(*paths, "--prompts", "questions.jsonl")
    assert code == 1 and "questions.jsonl: there is no such file" in output
