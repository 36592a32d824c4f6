"""A dense model that speaks ChatML through the real loop in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from rl_loop.chatml.codec import ChatMl
from rl_loop.config.errors import ConfigError, StartError
from rl_loop.config.every_run import RunConfig
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.config.training import DemonstrationConfig
from rl_loop.export import export_policy, greedy_agreement
from rl_loop.lifecycle.vocabulary_checks import check_chat_format
from rl_loop.run_parts import build_tasks
from rl_loop.tracking.run_directory import read_training_steps
from tests.support.in_process import LocalRollouts, local_loop, local_trainer

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = [
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.intermediate_size=96",
    "model.num_attention_heads=2",
]


def rl_config(directory: Path, *overrides: str) -> RlConfig:
    options = [
        *SMALL,
        f"output_dir={directory}",
        "initial_weights=null",
        "training.steps=2",
        "rollout.tasks_per_step=2",
        "rollout.samples_per_task=6",
        # A random policy ends some episodes with format errors and some at the limit.
        # Their rewards differ.
        "rollout.max_sampled_tokens_per_turn=64",
        "reward.format_error=-2",
        "tasks.held_out_tasks=2",
        "optimizer.lr=1e-2",
        *overrides,
    ]
    return load_config(CONFIGS / "rl/tiny_dense.yaml", RlConfig, options)


def sft_config(directory: Path, *overrides: str) -> SftConfig:
    options = [*SMALL, f"output_dir={directory}", *overrides]
    return load_config(CONFIGS / "sft/tiny_dense.yaml", SftConfig, options)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRollouts]:
    shared = LocalRollouts(rl_config(tmp_path_factory.mktemp("rollouts")))
    yield shared
    shared.close()


def test_dense_sft_trains_on_whole_turns_that_parse(
    tmp_path: Path,
) -> None:
    settings = sft_config(tmp_path)
    tasks = build_tasks(settings)
    samples = tasks.demonstrations(0, 4, DemonstrationConfig(correct_fraction=1.0))
    for i in range(len(samples)):
        span = slice(samples.offsets[i], samples.offsets[i + 1])
        learned = samples.token_ids[span][samples.loss_mask[span]]
        stops = np.flatnonzero(np.isin(learned, tasks.codec.stop_token_ids)) + 1
        # The trained tokens are whole turns that a policy could have sampled.
        *turns, rest = np.split(learned, stops)
        assert len(turns) > 0
        assert len(rest) == 0
        assert all(isinstance(tasks.codec.parse(turn.tolist()), list) for turn in turns)

    trainer = local_trainer(settings)
    try:
        before = trainer.score(samples)[samples.loss_mask].mean()
        for step in (1, 2):
            trainer.sft_step(samples, step)
        after = trainer.score(samples)[samples.loss_mask].mean()
    finally:
        trainer.close()
    assert before < after < 0


def test_dense_rl_has_ratio_1_and_exports_the_policy(
    tmp_path: Path, rollouts: LocalRollouts
) -> None:
    settings = rl_config(tmp_path)
    with local_loop(settings, rollouts) as loop:
        loop.train()
        codec = loop.tasks.codec
        assert isinstance(codec, ChatMl)
        export_policy(loop.trainer, codec, tmp_path / "hf")
        agreement = greedy_agreement(
            loop.trainer, build_tasks(settings), tmp_path / "hf", settings.dtype
        )
    assert agreement.equal == agreement.compared > 0

    steps = read_training_steps(settings.directory / "metrics.jsonl")
    assert len([step for step in steps if "grad_norm" in step]) == 2
    for step in steps:
        assert all(value is not None and math.isfinite(value) for value in step.values())
        assert step.get("ratio/deviation_max", 0) == 0
        assert step["mismatch/canary_gap"] < 1e-5
        assert step.get("mismatch/log_prob_gap_max", 0) < 1e-4
    assert max(step.get("grad_norm", 0) for step in steps) > 0

    # The tokenizer of the export has the tokens and the template of training.
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Compute 12*34+5."}],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert prompt == codec.render_prompt([{"role": "user", "content": "Compute 12*34+5."}])
    assert tokenizer.eos_token_id in codec.stop_token_ids


def test_dense_run_reads_the_tokenizer_of_an_export(tmp_path: Path) -> None:
    settings = sft_config(tmp_path)
    codec = build_tasks(settings).codec
    (tmp_path / "run/export").mkdir(parents=True)
    codec.vocabulary.save(tmp_path / "run/export")
    overrides = [
        "vocabulary=tokenizer",
        f"tokenizer={tmp_path / 'run'}",
        "chatml={system: null, describe_tools: false}",
    ]
    config = rl_config(tmp_path, *overrides)
    check_chat_format(config)
    text = [{"role": "user", "content": "Compute 1*2."}]
    assert build_tasks(config).codec.render_prompt(text) == codec.render_prompt(text)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.routed_experts=true"], r"rollout\.routed_experts: a qwen2 model has no experts"),
        (
            ["algorithm.routing_replay=R2", "algorithm.old_log_probs=forward"],
            r"algorithm\.routing_replay \(R2\): a qwen2 model has no experts",
        ),
        (["ablation.without=[trainer_sinks]"], "a qwen2 model has no attention sinks"),
        (["ablation.router_noise=0.1"], "a qwen2 model has no router"),
    ],
)
def test_gpt_oss_settings_are_rejected_for_a_dense_model(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rl_config(tmp_path, *overrides)


def refused(config: RunConfig, message: str) -> None:
    with pytest.raises(StartError, match=message):
        check_chat_format(config)


def test_settings_of_another_model_family_are_rejected(tmp_path: Path) -> None:
    refused(
        rl_config(tmp_path, "vocabulary=gptoss"), "vocabulary=gptoss does not fit a qwen2 model"
    )
    refused(rl_config(tmp_path, "vocabulary=tokenizer"), "initial_weights, which is null")
    refused(
        sft_config(tmp_path, "demonstrations.history=harmony"),
        "history=harmony is only for Harmony",
    )

    gpt_oss = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, ["vocabulary=gptoss"])
    refused(gpt_oss, r"vocabulary=gptoss has 201088 ids, but model\.vocab_size is \d+")


def test_default_vocabulary_depends_on_family_and_size() -> None:
    dense = load_config(CONFIGS / "rl/smollm2-135m_1x1.yaml", RlConfig).model_dump(mode="json")
    del dense["vocabulary"]
    assert RlConfig.model_validate(dense).vocabulary == "tokenizer"
    gpt_oss = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig).model_dump(mode="json")
    del gpt_oss["vocabulary"]
    assert RlConfig.model_validate(gpt_oss).vocabulary == "tokenizer"
    gpt_oss["model"]["vocab_size"] = 201_088
    assert RlConfig.model_validate(gpt_oss).vocabulary == "gptoss"
