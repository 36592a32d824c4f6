"""Faults of megatron-core 0.19.2 that silently change numbers, and their workarounds.

If one of the first assertions fails, Megatron is fixed and the workaround can be removed.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.tensor_parallel.layers import RowParallelLinear

from converters.model_weights import load_hf_weights
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.families.gpt_oss import layers as gpt_oss_layers
from megatron_gptoss.model import build_model
from megatron_gptoss.packed_sequence import PackedSequence
from megatron_gptoss.packing import build_batch
from megatron_gptoss.trainer import PolicyTrainer
from megatron_gptoss.transformer_settings import build_transformer_config
from tests.support.megatron_gptoss.reference import (
    TINY,
    documents,
    hf_logits,
    hf_model,
    hf_norms_in_full_precision,
    mean_cross_entropy,
)
from tests.support.tolerances import rounding_error

pytestmark = pytest.mark.usefixtures("process_groups")


SAMPLES = documents([20, 13])


def down_projection(linear: type[RowParallelLinear]) -> RowParallelLinear:
    config = build_transformer_config(TINY, ParallelConfig(), torch.float32)
    config.sequence_parallel = (
        True  # as with tensor parallelism, although the group has one rank here
    )
    return linear(
        8, 4, config=config, init_method=torch.nn.init.zeros_, bias=True, input_is_parallel=True, skip_bias_add=True,
        is_expert=True, tp_group=torch.distributed.group.WORLD,
    )  # fmt: skip


def test_expert_biases_are_not_marked_for_a_second_summation() -> None:
    # finalize_model_grads sums parameters with this mark over tensor-parallel ranks, which would
    # double the gradient
    assert down_projection(RowParallelLinear).bias.sequence_parallel is True
    assert down_projection(gpt_oss_layers.ExpertRowParallelLinear).bias.sequence_parallel is False


def test_experts_with_bias_can_be_trained_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> float:
        model = build_model(TINY, ParallelConfig(), torch.float32)
        load_hf_weights(model, TINY, hf_model().state_dict().__getitem__)
        trainer = PolicyTrainer(model, OptimizerConfig())
        return trainer.train_step([build_batch(SAMPLES)], mean_cross_entropy(31), 1e-3).grad_norm

    assert step() > 0
    monkeypatch.setattr(gpt_oss_layers, "ExpertRowParallelLinear", RowParallelLinear)
    with pytest.raises(RuntimeError, match=r"in-?place|view"):
        step()


def test_fused_activation_with_wrong_clamp_is_disabled() -> None:
    reference = hf_model(std=0.4)  # activations that reach the clamp
    exact = hf_model(std=0.4).double()
    exact.config._experts_implementation = "eager"
    with torch.no_grad(), hf_norms_in_full_precision():
        allowed = rounding_error(hf_logits(reference, SAMPLES), hf_logits(exact, SAMPLES))
    batch = build_batch(SAMPLES)

    def distance(**overrides: object) -> float:
        model = build_model(TINY, ParallelConfig(), torch.float32, **overrides)
        load_hf_weights(model, TINY, reference.state_dict().__getitem__)
        with torch.no_grad():
            out = model(
                batch.token_ids[None],
                batch.position_ids[None],
                None,
                packed_seq_params=PackedSequence.of(batch),
            )
            return (out[0] - hf_logits(reference, SAMPLES)).abs().max().item()

    assert not build_transformer_config(TINY, ParallelConfig()).bias_activation_fusion
    assert distance() < allowed < 0.02
    assert distance(bias_activation_fusion=True, activation_func=quick_gelu) > 0.02


def test_deepep_is_rejected_where_it_cannot_run() -> None:
    with pytest.raises(ValueError, match=r"deepep has no effect, because parallel\.expert is 1"):
        ParallelConfig(expert_dispatcher="deepep").check_layout(TINY)
    with pytest.raises(RuntimeError, match="deepep: DeepEP is not available"):
        build_transformer_config(
            TINY, ParallelConfig(world_size=2, expert=2, expert_dispatcher="deepep")
        )
