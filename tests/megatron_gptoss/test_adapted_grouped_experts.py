"""Adapted experts in grouped GEMMs equal experts computed in sequence, in outputs and gradients."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from converters.model_weights import export_hf_weights
from megatron_gptoss.checkpoint.base_digest import base_digest
from megatron_gptoss.checkpoint.state import model_state
from megatron_gptoss.config import OptimizerConfig, ParallelConfig, Quantization
from megatron_gptoss.gpu_memory import release_cached_memory
from megatron_gptoss.layers import adapted_grouped_experts, grouped_gemm
from megatron_gptoss.layers.adapted_grouped_experts import AdaptedGroupedExperts
from megatron_gptoss.layers.scratch_memory import scratch_memory
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import PackedBatch, build_batch
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.megatron_gptoss.adapted import ADAPTER, MODEL, adapted_model, single_adapters
from tests.support.megatron_gptoss.reference import documents, mean_cross_entropy

pytestmark = pytest.mark.usefixtures("process_groups")


SAMPLES = documents([34, 2, 9, 21])
TOKENS = int(SAMPLES.loss_tokens.sum())


def batches() -> list[PackedBatch]:
    return [build_batch(SAMPLES, [0, 1]), build_batch(SAMPLES, [2, 3])]


def grouped_and_sequential(
    quantization: Quantization | None = None, **settings: Any
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return the same model with grouped GEMMs and with sequential experts."""
    adapter = ADAPTER.model_copy(update=settings)
    sequential = adapted_model(ParallelConfig(), adapter, quantization=quantization)
    grouped = adapted_model(
        ParallelConfig(), adapter, quantization=quantization, moe_grouped_gemm=True
    )
    assert isinstance(grouped.decoder.layers[0].mlp.experts, AdaptedGroupedExperts)
    return grouped, sequential


# expert ranks that are multiples of 8, and others
@pytest.mark.parametrize(("quantization", "expert_rank"), [(None, 8), ("mxfp4", 3)])
def test_grouped_training_equals_sequential_experts(
    quantization: Quantization | None, expert_rank: int
) -> None:
    trainers = [
        PolicyTrainer(model, OptimizerConfig(clip_grad=1e9))
        for model in grouped_and_sequential(quantization, expert_rank=expert_rank)
    ]
    gradients: list[dict[str, torch.Tensor]] = [{}, {}]
    for step in range(2):
        losses = []
        for trainer, found in zip(trainers, gradients, strict=True):
            statistics = trainer.train_step(batches(), mean_cross_entropy(TOKENS), 3e-3)
            losses.append(statistics.sums["loss"])
            if step == 0:
                for name, adapter in single_adapters(trainer.module):
                    for factor, gradient in adapter.gradients.items():
                        found[f"{name}.{factor}"] = gradient.clone()
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)

    grouped, sequential = gradients
    assert grouped.keys() == sequential.keys()
    for name, expected in sequential.items():
        error = (grouped[name] - expected).abs().max() / expected.abs().max()
        assert error < 1e-5, f"gradient of {name} is off by {error:.1e}"
        assert expected.abs().max() > 0


def test_grouped_names_exports_and_digest_equal_sequential_ones() -> None:
    formats: tuple[Quantization | None, ...] = (None, "mxfp4")
    for quantization in formats:
        grouped, sequential = grouped_and_sequential(quantization)
        for names in ("named_parameters", "named_buffers"):
            found = [(name, x.shape) for name, x in getattr(grouped, names)()]
            assert found == [(name, x.shape) for name, x in getattr(sequential, names)()]
        saved = model_state(grouped)["0"]
        assert {name: x.key for name, x in saved.items()} == {
            name: x.key for name, x in model_state(sequential)["0"].items()
        }
        assert len(saved) == sum(p.requires_grad for p in grouped.parameters())
        assert base_digest(grouped) == base_digest(sequential)

        expected = {name: x.clone() for name, x in export_hf_weights(sequential, MODEL)}
        for name, tensor in export_hf_weights(grouped, MODEL):
            assert torch.equal(tensor, expected[name]), name


def test_experts_that_get_no_token_have_a_gradient_of_zero() -> None:
    model, _ = grouped_and_sequential()
    experts = model.decoder.layers[1].mlp.experts
    row_counts = [0, 3, 0, 0, 2, 0, 4, 0]
    x = torch.randn(9, MODEL.hidden_size, requires_grad=True)
    output, _ = experts(x, torch.tensor(row_counts), torch.rand(9))
    output.square().sum().backward()

    assert len(list(experts.adapters.parameters())) == 4
    for name, parameter in experts.adapters.named_parameters():
        for gradient, count in zip(parameter.grad, row_counts, strict=True):
            assert (gradient.abs().max() > 0) == (count > 0), name


def test_experts_accept_zero_tokens() -> None:
    model, _ = grouped_and_sequential("mxfp4")
    experts = model.decoder.layers[0].mlp.experts
    x = torch.randn(0, MODEL.hidden_size, requires_grad=True)
    output, _ = experts(x, torch.zeros(MODEL.num_experts, dtype=torch.int64), torch.rand(0))
    output.sum().backward()
    assert output.shape == (0, MODEL.hidden_size)
    assert all((p.grad == 0).all() for p in experts.parameters() if p.requires_grad)


def count_merges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    merges: list[int] = []
    merge = adapted_grouped_experts.merge

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        merges.append(1)
        return merge(*args, **kwargs)

    monkeypatch.setattr(adapted_grouped_experts, "merge", counting)
    return merges


def test_weights_are_merged_again_only_after_another_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, sequential = grouped_and_sequential()
    first, second = (layer.mlp.experts for layer in model.decoder.layers)
    x = torch.randn(16, MODEL.hidden_size, requires_grad=True)
    counts = torch.full((MODEL.num_experts,), 2)
    probs = torch.rand(16)
    merges = count_merges(monkeypatch)

    # The last layer finds both of its matrices. Those of the other layer are overwritten.
    hidden, _ = first(x, counts, probs)
    output, _ = second(hidden, counts, probs)
    assert len(merges) == 4
    output.square().sum().backward()
    assert len(merges) == 6

    gradient = x.grad.clone()
    x.grad = None
    hidden, _ = sequential.decoder.layers[0].mlp.experts(x, counts, probs)
    output, _ = sequential.decoder.layers[1].mlp.experts(hidden, counts, probs)
    output.square().sum().backward()
    torch.testing.assert_close(x.grad, gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max())


def test_only_last_lease_is_valid_and_memory_is_released() -> None:
    memory = scratch_memory("test", torch.device("cpu"), torch.float32)
    small = memory.lease(torch.Size((2, 3)))
    small.tensor.fill_(1)
    assert small.read() is small.tensor
    large = memory.lease(torch.Size((4, 5)))
    assert small.read() is None
    assert large.read().shape == (4, 5)
    again = memory.lease(torch.Size((2, 3)))
    assert again.tensor.data_ptr() == large.tensor.data_ptr()

    assert scratch_memory("test", torch.device("cpu"), torch.float32) is memory
    release_cached_memory()
    assert scratch_memory("test", torch.device("cpu"), torch.float32) is not memory
    # a lease keeps its memory after the release of the cache
    assert again.read() is again.tensor


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def merged_matrices() -> int:
    """Return the number of tensors in this process with the size of a layer's merged experts."""
    sizes = {
        MODEL.num_experts * 2 * MODEL.intermediate_size * MODEL.hidden_size,
        MODEL.num_experts * MODEL.hidden_size * MODEL.intermediate_size,
    }
    tensors = (thing for thing in gc.get_objects() if type(thing) is torch.Tensor)
    return sum(tensor.numel() in sizes for tensor in tensors)


def test_merged_weights_are_freed_on_release() -> None:
    model, _ = grouped_and_sequential("mxfp4")
    trainer = PolicyTrainer(model, OptimizerConfig())
    release_cached_memory()
    with without_garbage_collection():
        before = merged_matrices()
        for _ in range(3):
            trainer.train_step(batches(), mean_cross_entropy(TOKENS), 3e-3)
            release_cached_memory()
            assert merged_matrices() == before
        trainer.score(batches())
        assert merged_matrices() > before, "what is counted is not what is merged"


def test_a_model_that_was_moved_computes_the_same() -> None:
    model, _ = grouped_and_sequential("mxfp4")
    expected = torch.cat(PolicyTrainer(model, OptimizerConfig()).score(batches()))
    model, _ = grouped_and_sequential("mxfp4")
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                tensor.data = tensor.data.clone()
    assert torch.equal(
        torch.cat(PolicyTrainer(model, OptimizerConfig()).score(batches())), expected
    )


def test_mxfp4_experts_need_only_the_memory_of_their_blocks() -> None:
    model = build_model(
        MODEL, ParallelConfig(), adapter=ADAPTER, quantization="mxfp4", moe_grouped_gemm=True
    )
    storages = {}
    for _, tensor in (*model.named_parameters(), *model.named_buffers()):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    tensors = [*model.parameters(), *model.buffers()]
    assert sum(storages.values()) == sum(x.nbytes for x in tensors)


def test_the_input_of_the_first_layer_has_a_gradient() -> None:
    # Otherwise, recomputed layers have no gradient, and their adapters get none.
    model, _ = grouped_and_sequential(targets=("experts",))
    seen = []
    hook = lambda module, inputs: seen.append(inputs[0].requires_grad)  # noqa: E731
    model.decoder.layers[0].input_layernorm.register_forward_pre_hook(hook)
    trainer = PolicyTrainer(model, OptimizerConfig())
    trainer.train_step(batches(), mean_cross_entropy(TOKENS), 1e-3)
    assert seen == [True, True]
    seen.clear()
    trainer.score(batches())
    assert seen == [False, False]


# -- expert GEMMs ------------------------------------------------------------------------------


def test_grouped_gemms_equal_single_expert_gemms() -> None:
    torch.manual_seed(0)
    row_counts = [3, 0, 5]
    x = torch.randn(8, 6)
    weights = torch.randn(3, 4, 6)
    biases = torch.randn(3, 4)
    experts = [0] * 3 + [2] * 5

    expected = torch.stack([weights[e] @ row for e, row in zip(experts, x, strict=True)])
    torch.testing.assert_close(
        grouped_gemm.multiply_by_weights(x, weights, row_counts, biases),
        expected + biases[experts],
    )
    torch.testing.assert_close(grouped_gemm.project(x, weights.mT, row_counts), expected)
    back = grouped_gemm.multiply_by_transposed_weights(expected, weights, row_counts)
    for row, expert, product in zip(expected, experts, back, strict=True):
        torch.testing.assert_close(product, row @ weights[expert])

    outer = grouped_gemm.outer_products(expected, x, row_counts)
    torch.testing.assert_close(outer[0], expected[:3].t() @ x[:3])
    assert (outer[1] == 0).all()
    torch.testing.assert_close(outer[2], expected[3:].t() @ x[3:])
