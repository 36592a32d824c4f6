"""Adapters on a GPU: TE layers, grouped GEMMs and the merge kernel, against higher precision."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from converters.gathering import WeightGathering
from converters.mapping import split_qkv
from converters.model_weights import export_hf_weights, load_hf_weights
from gptoss_kernels import mxfp4
from megatron_gptoss.checkpoint.loader import load_checkpoint
from megatron_gptoss.config import AdapterConfig, OptimizerConfig, ParallelConfig, Quantization
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.layers import grouped_gemm
from megatron_gptoss.layers.adapters import initialize_adapters, named_adapters
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import build_batch
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.megatron_gptoss.adapted import kept_share_of_small_updates, single_adapters
from tests.support.megatron_gptoss.reference import (
    documents,
    hf_logits,
    hf_loss,
    hf_model,
    mean_cross_entropy,
    save_checkpoint,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("process_groups")]

# full width; all experts are active, because a different routing would hide other errors
WIDE = GptOssModelConfig(num_layers=2, num_experts=8, experts_per_token=8, vocab_size=8192)
ADAPTER = AdapterConfig(
    rank=8, alpha=12, expert_rank=4, targets=("q", "k", "v", "o", "experts", "router")
)
UNMERGED = ADAPTER.model_copy(update={"merge_experts": False})
SAMPLES = documents([300, 41, 700], vocab_size=8192)
TOKENS = int(SAMPLES.loss_tokens.sum())


@pytest.fixture(scope="module")
def base() -> dict[str, torch.Tensor]:
    """Return bf16 weights by Hugging Face name. Expert weights have values of MXFP4."""
    with torch.device("cuda"):
        weights = hf_model(WIDE, std=0.02).state_dict()
    for name, tensor in weights.items():
        weights[name] = tensor.bfloat16()
        if name.endswith(("gate_up_proj", "down_proj")):
            packed = mxfp4.quantize(weights[name].mT.contiguous())
            weights[name] = mxfp4.dequantize(*packed).mT
    return weights


@torch.no_grad()
def adapted(
    base: dict[str, torch.Tensor],
    quantization: Quantization | None = "mxfp4",
    recompute: tuple[str, ...] = (),
    adapter: AdapterConfig = ADAPTER,
    **overrides: Any,
) -> torch.nn.Module:
    parallel = ParallelConfig(recompute=recompute)
    model = build_model(
        WIDE, parallel, torch.bfloat16, adapter=adapter, quantization=quantization, **overrides
    )
    load_hf_weights(model, WIDE, base.__getitem__)
    initialize_adapters(model, seed=0)
    generator = torch.Generator("cuda").manual_seed(0)
    for _, factors in named_adapters(model):
        factors.b.normal_(0, 0.02, generator=generator)
    return model


def plain(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Build a model for full training in bf16."""
    model = build_model(WIDE, ParallelConfig(), torch.bfloat16)
    load_hf_weights(model, WIDE, weights.__getitem__)
    return model


def exact_model(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Build the transformers model in fp32."""
    with torch.device("cuda"):
        model = hf_model(WIDE)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model


@torch.no_grad()
def exact_scores(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    labels = build_batch(SAMPLES).to("cuda").labels
    with torch.device("cuda"):
        log_probs = hf_logits(exact_model(weights), SAMPLES).log_softmax(-1)
    return log_probs.gather(1, labels[:, None])[:, 0]


def exact_gradients(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return gradients by weight name of the adapted layers."""
    model = exact_model(weights)
    with torch.device("cuda"):
        hf_loss(model, SAMPLES).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    holder = build_model(WIDE, ParallelConfig(), torch.float32)
    load_hf_weights(holder, WIDE, gradients.__getitem__)
    return {sequential_name(name): p.detach() for name, p in holder.named_parameters()}


def exported(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in export_hf_weights(model, WIDE)}


@torch.no_grad()
def unmerged_weights(
    base: dict[str, torch.Tensor], model: torch.nn.Module
) -> dict[str, torch.Tensor]:
    """Return the exported weights, with fp32 sums of base and updates for experts."""
    weights = exported(model)
    sent = dict(WeightGathering(model, WIDE).begin(mxfp4_experts=True))
    scale = UNMERGED.alpha / UNMERGED.rank_of_experts(WIDE)
    for name in base:
        if f"{name}.lora_A" in sent:
            a, b = sent[f"{name}.lora_A"], sent[f"{name}.lora_B"]
            weights[name] = base[name].float() + scale * (b.float() @ a.float()).mT
    return weights


def trainer(model: torch.nn.Module, **settings: Any) -> PolicyTrainer:
    return PolicyTrainer(model, OptimizerConfig(**{"clip_grad": 1e9, **settings}))


def relative(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x.double() - exact.double()).norm() / exact.double().norm()).item()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [[300, 0, 1, 77, 0, 900, 13, 0], [0, 0, 0, 0, 0, 0, 0, 5]])
@pytest.mark.parametrize("rank", [8, 32])
def test_grouped_gemms_equal_fp64_gemms_of_each_expert(rows: list[int], rank: int) -> None:
    torch.manual_seed(0)
    total = sum(rows)
    x = draw(total, 2880)
    grad = draw(total, 5760)
    weights = draw(8, 5760, 2880) / 50
    biases = draw(8, 5760)
    a = draw(8, rank, 2880) / 50
    b = draw(8, 5760, rank) / 50
    narrow = draw(total, rank)
    sums = draw(total, 2880)

    # NaN in freed memory shows an expert GEMM that leaves out an expert
    torch.full((8 * 5760 * 2880,), torch.nan, device="cuda", dtype=torch.bfloat16)
    found = {
        "x W^T + bias": grouped_gemm.multiply_by_weights(x, weights, rows, biases),
        "dY W": grouped_gemm.multiply_by_transposed_weights(grad, weights, rows),
        "sums + dY W": grouped_gemm.multiply_by_transposed_weights(
            grad, weights, rows, sums=sums.clone()
        ),
        "x A^T": grouped_gemm.project(x, a.mT, rows),
        "dY B": grouped_gemm.project(grad, b, rows),
        "dB": grouped_gemm.outer_products(grad, narrow, rows),
        "dA": grouped_gemm.outer_products(narrow, x, rows),
    }
    # the same functions process experts in sequence in fp64
    wide = {"x": x, "grad": grad, "weights": weights, "biases": biases, "a": a, "b": b}
    wide = {name: tensor.double() for name, tensor in wide.items()}
    expected = {
        "x W^T + bias": grouped_gemm.multiply_by_weights(
            wide["x"], wide["weights"], rows, wide["biases"]
        ),
        "dY W": grouped_gemm.multiply_by_transposed_weights(wide["grad"], wide["weights"], rows),
        "sums + dY W": grouped_gemm.multiply_by_transposed_weights(
            wide["grad"], wide["weights"], rows, sums=sums.double()
        ),
        "x A^T": grouped_gemm.project(wide["x"], wide["a"].mT, rows),
        "dY B": grouped_gemm.project(wide["grad"], wide["b"], rows),
        "dB": grouped_gemm.outer_products(wide["grad"], narrow.double(), rows),
        "dA": grouped_gemm.outer_products(narrow.double(), wide["x"], rows),
    }
    for name, product in found.items():
        assert product.shape == expected[name].shape, name
        assert torch.isfinite(product).all(), name
        assert relative(product, expected[name]) < 4e-3, name
    for name in ("dA", "dB"):
        for expert, count in enumerate(rows):
            assert (found[name][expert].abs().max() > 0) == (count > 0), name


@pytest.mark.parametrize("kind", ["mxfp4", None])
def test_scores_are_those_of_the_exported_weights(
    kind: Quantization | None, base: dict[str, torch.Tensor]
) -> None:
    model = adapted(base, kind)
    weights = exported(model)
    batch = build_batch(SAMPLES).to("cuda")
    exact = exact_scores(weights)
    theirs = trainer(plain(weights)).score([batch])[0]
    ours = trainer(model).score([batch])[0]
    unmerged = exact_scores(base)
    print("ours:", relative(ours, exact), "plain bf16:", relative(theirs, exact))
    assert relative(ours, exact) < 1.2 * relative(theirs, exact)
    assert relative(unmerged, exact) > 3 * relative(ours, exact)


def test_unmerged_scores_are_those_of_the_sums_in_fp32(base: dict[str, torch.Tensor]) -> None:
    """An update of 1e-3 of the weights changes the scores as in fp32. Merged, it loses a part."""
    batch = build_batch(SAMPLES).to("cuda")
    model = adapted(base, adapter=UNMERGED)
    weights = unmerged_weights(base, model)
    exact = exact_scores(weights)
    found = {"unmerged": trainer(model).score([batch])[0]}
    found["merged"] = trainer(adapted(base)).score([batch])[0]
    found["base"] = trainer(plain(base)).score([batch])[0]
    errors = {name: relative(scores, exact) for name, scores in found.items()}
    print("errors:", errors)
    assert errors["unmerged"] < 1.2 * errors["merged"]
    assert errors["base"] > 3 * errors["unmerged"]


def test_updates_below_the_last_bit_are_kept() -> None:
    kept = kept_share_of_small_updates("cuda")
    print(f"kept share of small updates: {kept:.3f}")
    assert 0.9 < kept < 1.1, kept


def test_unmerged_experts_train_like_merged_experts(base: dict[str, torch.Tensor]) -> None:
    """Gradients of both models differ by rounding only, with and without recomputation."""
    batch = build_batch(SAMPLES).to("cuda")
    gradients = []
    for adapter, recompute in (
        (ADAPTER, ()),
        (UNMERGED, ()),
        (UNMERGED, ("moe", "layernorm")),
        (UNMERGED, ("moe_act",)),
    ):
        ours = trainer(adapted(base, recompute=recompute, adapter=adapter))
        ours.train_step([batch], mean_cross_entropy(TOKENS), learning_rate=1e-9)
        found = {}
        for name, single in single_adapters(ours.module):
            for factor, gradient in single.gradients.items():
                found[f"{name}.{factor}"] = gradient.clone()
        gradients.append(found)
    merged, *unmerged = gradients
    for found in unmerged:
        errors = {name: relative(found[name], expected) for name, expected in merged.items()}
        print("largest differences:", sorted(errors.items(), key=lambda item: -item[1])[:3])
        assert max(errors.values()) < 0.1, max(errors, key=errors.__getitem__)


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [("mxfp4", ()), (None, ()), ("mxfp4", ("moe", "layernorm")), ("mxfp4", ("moe_act",))],
)
def test_gradients_are_those_of_the_explicit_merged_weights(
    kind: Quantization | None, recompute: tuple[str, ...], base: dict[str, torch.Tensor]
) -> None:
    model = adapted(base, kind, recompute)
    weights = exported(model)
    batch = build_batch(SAMPLES).to("cuda")
    ours = trainer(model)
    ours.train_step([batch], mean_cross_entropy(TOKENS), learning_rate=1e-9)

    # full training in bf16 gives the error to compare with
    full_training = trainer(plain(weights))
    full_training.train_step([batch], mean_cross_entropy(TOKENS), learning_rate=1e-9)
    in_bf16 = {
        sequential_name(name): p.main_grad for name, p in full_training.module.named_parameters()
    }
    in_fp32 = exact_gradients(weights)
    errors: dict[str, tuple[float, float]] = {}

    for name, adapter in single_adapters(model):
        layer, target = re.fullmatch(r"(.*)\.adapters\.(\w+)", name).groups()
        exact = expected_gradients(adapter, in_fp32[f"{layer}.weight"], target)
        full = expected_gradients(adapter, in_bf16[f"{layer}.weight"], target)
        for factor, want, theirs in zip("ab", exact, full, strict=True):
            error = relative(adapter.gradients[factor], want)
            errors[f"{name}.{factor}"] = (error, relative(theirs, want))
    worst = sorted(errors.items(), key=lambda x: -x[1][0] / x[1][1])[:4]
    print("gradients, ours and from full training in bf16:", worst)
    for name, (error, of_full_training) in errors.items():
        assert error < 1.5 * of_full_training + 1e-2, name


def sequential_name(name: str) -> str:
    """Return the name of a grouped expert's weight in layers with adapters."""
    return re.sub(
        r"\.experts\.(linear_fc\d)\.weight(\d+)$", r".experts.local_experts.\2.\1.weight", name
    )


def expected_gradients(
    adapter: Any, gradient: torch.Tensor, target: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if target in ("q", "k", "v"):
        parts = split_qkv(gradient, groups=WIDE.num_key_value_heads, head_size=WIDE.head_size)
        gradient = parts["qkv".index(target)]
    gradient = gradient.double()
    a = adapter.a.detach().double()
    b = adapter.b.detach().double()
    return adapter.scale * b.T @ gradient, adapter.scale * gradient @ a.T


def test_bases_and_recomputation_modes_train_equally(base: dict[str, torch.Tensor]) -> None:
    batch = build_batch(SAMPLES).to("cuda")
    losses = {}
    cases: list[tuple[Quantization | None, tuple[str, ...]]] = [
        (None, ()),
        ("mxfp4", ()),
        ("mxfp4", ("moe", "layernorm")),
        ("mxfp4", ("moe_act", "layernorm", "core_attn")),
    ]
    for kind, recompute in cases:
        model = adapted(base, kind, recompute)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        ours = trainer(model)
        steps = []
        for _ in range(2):
            step = ours.train_step([batch, batch], mean_cross_entropy(2 * TOKENS), 1e-3)
            assert step.parameters_updated
            steps.append((step.sums["loss"], step.grad_norm))
        losses[kind, recompute] = steps
        ours.score([batch])
        for name, parameter in model.named_parameters():
            changed = not torch.equal(parameter, before[name])
            assert changed == (".adapters." in name), name

    first = losses[None, ()]
    assert first[1][0] < first[0][0]
    for steps in losses.values():
        for got, want in zip(steps, first, strict=True):
            assert got == pytest.approx(want, rel=1e-2)


def test_expert_only_adapters_train_in_the_first_layer(
    base: dict[str, torch.Tensor],
) -> None:
    adapter = AdapterConfig(rank=8, alpha=16, targets=("experts",))
    model = adapted(base, recompute=("moe", "layernorm"), adapter=adapter)
    batch = build_batch(SAMPLES).to("cuda")
    trainer(model).train_step([batch], mean_cross_entropy(TOKENS), learning_rate=1e-9)
    for name, adapter in single_adapters(model):
        for factor, gradient in adapter.gradients.items():
            assert gradient.abs().max() > 0, f"{name}.{factor}"


def test_mxfp4_model_never_holds_its_experts_in_bf16() -> None:
    config = WIDE.model_copy(update={"num_layers": 4, "num_experts": 32, "experts_per_token": 4})
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = build_model(
        config, ParallelConfig(), torch.bfloat16, adapter=ADAPTER, quantization="mxfp4"
    )
    held = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    blocks = sum(buffer.numel() for _, buffer in model.named_buffers())
    in_bf16 = 4 * 32 * 3 * 2880 * 2880 * 2
    others = sum(p.numel() * p.element_size() for p in model.parameters())
    assert blocks < 0.27 * in_bf16
    assert held < 1.05 * (blocks + others)
    # only one layer is rearranged at a time
    assert peak - held < blocks / 3


def test_a_resumed_trainer_continues(base: dict[str, torch.Tensor], tmp_path: Path) -> None:
    batch = build_batch(SAMPLES).to("cuda")

    def steps(ours: PolicyTrainer) -> list[float]:
        return [
            ours.train_step([batch], mean_cross_entropy(TOKENS), 1e-3).sums["loss"]
            for _ in range(2)
        ]

    first = trainer(adapted(base))
    steps(first)
    save_checkpoint(tmp_path, first, 2, {"step": 2})
    expected = steps(first)
    # the same base in dense format, with different adapters
    model = adapted(base, None)
    initialize_adapters(model, seed=1)
    other = trainer(model)
    load_checkpoint(tmp_path / "step_000002", other)
    assert steps(other) == pytest.approx(expected, rel=1e-3)
