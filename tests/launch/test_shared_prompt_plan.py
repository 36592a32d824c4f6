"""Predictions of updates whose sequences share prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launch.cli import app
from launch.plan import (
    SharedPrompts,
    planned_row,
    predict_update,
    shared_prompts,
    step_plan,
)
from megatron_gptoss.planning.flops import forward_flops, training_flops
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig, SftConfig

CONFIG = Path(__file__).parents[2] / "configs/rl/gpt-oss-20b_1x4.yaml"
LENGTHS = ["rollout.max_episode_tokens=9000", "training.max_tokens_per_micro_batch=32768"]


def config(*overrides: str) -> RlConfig:
    return load_config(CONFIG, RlConfig, [*LENGTHS, *overrides])


def inputs(*overrides: str) -> MemoryInputs:
    return config(*overrides).memory_inputs


def test_rows_are_filled_with_groups_that_may_be_cut() -> None:
    # 24,000 tokens of the first group, and one sequence of the second.
    row = planned_row(inputs(), SharedPrompts(16, 8000))
    assert row.lengths == [8000, *[9000] * 16]
    assert row.starts == [0, *[8000] * 16]
    assert row.tokens == 24_000 and row.sequence_tokens == 16 * 9000
    wide = planned_row(replace(inputs(), tokens=34_000), SharedPrompts(16, 8000))
    assert wide.lengths[17:] == [8000, 9000, 9000]
    assert wide.tokens == 34_000
    # Without sharing, a shorter sequence fills the row.
    assert planned_row(inputs(), None).lengths == [9000, 9000, 9000, 5768]
    # A prompt cannot be longer than the sequence.
    assert planned_row(inputs(), SharedPrompts(2, 20_000)).lengths == [8999, 9000, 9000] * 3


def test_arithmetic_of_shared_tokens_counts_once() -> None:
    model = inputs().model
    two = forward_flops(model, [50, 60, 60], [0, 50, 50])
    assert two == 2 * forward_flops(model, [60]) - forward_flops(model, [50])
    assert training_flops(model, [50, 60], [0, 50]) == training_flops(model, [60])
    assert training_flops(model, [50, 60], [0, 50], frozen_base=True) == training_flops(
        model, [60], frozen_base=True
    )


def test_shared_prompts_take_fewer_micro_batches_and_less_time() -> None:
    base = inputs("rollout.tasks_per_step=32", "rollout.samples_per_task=16")
    whole = predict_update(base)
    shared = predict_update(base, shared=SharedPrompts(16, 8000))
    # 512 sequences on 4 data-parallel ranks: 32 groups.
    assert shared.micro_batches == 8 and shared.computed_tokens == 32 * 24_000
    assert whole.computed_tokens == whole.tokens
    assert shared.tokens == 512 * 9000
    assert shared.tokens_per_second / whole.tokens_per_second == pytest.approx(5.3, abs=0.3)
    # A row that holds one sequence has nothing to share.
    alone = replace(base, tokens=9000)
    assert predict_update(alone, shared=SharedPrompts(16, 8000)).step == predict_update(alone).step


def test_plan_describes_sharing_only_if_the_run_shares_prompts() -> None:
    shares = config("training.share_prefixes=prompts")
    assert shared_prompts(shares, 8000) == SharedPrompts(shares.rollout.samples_per_task, 8000)
    for other, tokens in (
        (config(), 8000),
        (shares, 63),
        (
            config(
                "training.share_prefixes=all",
                "rollout.samples_per_task=1",
                "algorithm.advantage={type: reinforce}",
            ),
            8000,
        ),
    ):
        assert shared_prompts(other, tokens) is None
    prompts = shared_prompts(shares, 8000)
    text = step_plan(shares.memory_inputs, 141, None, prompts)
    assert "with 8 sequences per prompt of 8000 tokens, which they share: " in text
    assert "which they share" not in step_plan(shares.memory_inputs, 141)


SFT_CONFIG = CONFIG.parents[1] / "untested/sft/gpt-oss-20b-adapter_1x1.yaml"
SFT_LENGTHS = [
    "data={path: chats.jsonl, max_tokens: 9000}",
    "training.max_tokens_per_micro_batch=32768",
    "sequences_per_step=64",
    "training.share_prefixes=prompts",
]


def sft_config(*overrides: str) -> SftConfig:
    return load_config(SFT_CONFIG, SftConfig, [*SFT_LENGTHS, *overrides])


def test_conversations_of_a_step_share_their_system_prompt(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        app(["plan", str(SFT_CONFIG), "--sft", "--prompt-tokens", "8000", *SFT_LENGTHS])
    # A micro-batch has 8,000 + 24 x 1,000 tokens, so 64 sequences take 3.
    printed = capfd.readouterr().out
    assert (
        "with 64 sequences per prompt of 8000 tokens, which they share: 96000 computed tokens "
        "(85% saved) in 3 micro-batches per data-parallel rank: "
    ) in printed
    # 224,000 keys take 2 KiB each, and 5x as much in the backward pass.
    assert "x as fast; copied keys take up to 2.3 GB in one layer at a time\n" in printed


def test_supervised_runs_without_common_prompts_plan_none(tmp_path: Path) -> None:
    assert shared_prompts(sft_config(), 8000) == SharedPrompts(64, 8000)
    for nothing in ("training.share_prefixes=off", "sequences_per_step=1"):
        assert shared_prompts(sft_config(nothing), 8000) is None
    # With every token in the loss, a sequence has no prompt, but equal tokens.
    distilled = f"loss={{type: distillation, teacher: {tmp_path}}}"
    assert shared_prompts(sft_config(distilled), 8000) is None
    for shares in ("training.share_prefixes=all", "loss.all_tokens=false"):
        assert shared_prompts(sft_config(distilled, shares), 8000) == SharedPrompts(64, 8000)


def test_copied_keys_are_those_of_an_attention_call() -> None:
    base = inputs()
    row = planned_row(base, SharedPrompts(16, 8000))
    # 16 paths of 9,000 keys and the prompt, 8 kv heads, a key and a value of 64 numbers in bf16.
    assert row.copied_key_bytes(base) == (16 * 9000 + 8000) * 8 * 2 * 64 * 2
    # A call copies at most 512 MiB: those of 2 of the 8 heads.
    wide = planned_row(replace(base, tokens=120_000), SharedPrompts(64, 8000))
    assert sum(wide.lengths) * 2048 > 512 << 20
    assert wide.copied_key_bytes(base) == sum(wide.lengths) * 512
