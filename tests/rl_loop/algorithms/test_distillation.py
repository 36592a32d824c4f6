"""Distillation from a teacher's most likely tokens: formula, gradients, masks, and a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM

from converters.hf_directory import write_hf_directory
from converters.names import hf_shapes
from converters.random_weights import random_hf_weights
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.log_probs import log_probs_with_candidates
from megatron_gptoss.planning.state_memory import weight_memory
from megatron_gptoss.samples import TrainingSamples
from rl_loop.algorithms.distillation import (
    Divergence,
    forward_kl,
    jensen_shannon,
    reverse_kl,
)
from rl_loop.algorithms.objectives import distillation_objective
from rl_loop.config.errors import ConfigError, StartError
from rl_loop.config.load import load_config
from rl_loop.config.run import SftConfig
from rl_loop.lifecycle.start_checks import check_teacher
from rl_loop.supervised_data import with_all_tokens
from rl_loop.trainer.group import TrainerGroup
from tests.support.distributed import free_port, run_distributed
from tests.support.in_process import RanksOfJob, local_trainer
from tests.support.megatron_gptoss.layouts import LAYOUTS
from tests.support.megatron_gptoss.reference import local_batches, unpack
from tests.support.rl_loop.algorithms import build_sample_batch, in_fp64, samples

ROOT = Path(__file__).parents[3]
VOCAB = 60
TOKENS = 11


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of a policy and a teacher, fp64 [tokens, vocabulary]."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        3 * torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2)
    )


def lumped(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of the ids and of the event of all others, [tokens, k + 1]."""
    p = logits.softmax(-1)
    if ids.shape == p.shape:
        # Without others, whose logarithm would be infinite.
        return p.gather(-1, ids)
    is_other = torch.ones_like(p).scatter_(-1, ids, 0.0)
    return torch.cat([p.gather(-1, ids), (p * is_other).sum(-1, keepdim=True)], dim=-1)


def kl_by_definition(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)


def lumped_kl(policy: torch.Tensor, teacher: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence over the ids and the event of all others, from its definition."""
    return kl_by_definition(lumped(teacher, ids), lumped(policy, ids))


def jsd_by_definition(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    m = 0.3 * p + 0.7 * q
    return 0.3 * kl_by_definition(p, m) + 0.7 * kl_by_definition(q, m)


DIVERGENCES: dict[str, tuple[Divergence, Callable[..., torch.Tensor]]] = {
    "forward_kl": (forward_kl, kl_by_definition),
    "reverse_kl": (reverse_kl, lambda p, q: kl_by_definition(q, p)),
    "jsd": (partial(jensen_shannon, beta=0.3), jsd_by_definition),
}
"""Our function, and the formula of the probabilities of teacher and policy."""


@pytest.mark.parametrize("k", [1, 5, 30])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergence_and_its_gradient_equal_the_formula(name: str, k: int) -> None:
    function, formula = DIVERGENCES[name]
    policy, teacher = distributions()
    ids = teacher.topk(k, dim=-1).indices
    ours, theirs = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    got = function(ours.log_softmax(-1).gather(-1, ids), teacher.log_softmax(-1).gather(-1, ids))
    want = formula(lumped(teacher, ids), lumped(theirs, ids))
    torch.testing.assert_close(got, want)
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("k", [5, VOCAB])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_fp32_gradient_of_the_model_equals_the_formula(name: str, k: int) -> None:
    """From hidden states and output weight, through the blocks of logits, at a temperature."""
    function, formula = DIVERGENCES[name]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, 8, generator=generator)
    weight = torch.randn(VOCAB, 8, generator=generator)
    teacher = distributions()[1]
    ids = teacher.topk(k, dim=-1).indices
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    _, _, log_probs = log_probs_with_candidates(hidden, weight, ids[:, 0], ids, temperature=1.5)
    got = function(log_probs, teacher.log_softmax(-1).gather(-1, ids).float()).mean()

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    policy = exact[0] @ exact[1].t() / 1.5
    want = formula(lumped(teacher, ids), lumped(policy, ids)).mean()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(got, leaves), torch.autograd.grad(want, exact), strict=True
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-6)


def test_forward_kl_over_the_vocabulary_is_exact_in_fp32() -> None:
    """The rest is rounding error, and must not reach the loss or the gradient."""
    policy, teacher = distributions()
    ids = teacher.topk(VOCAB, dim=-1).indices
    leaf = policy.float().requires_grad_()
    got = forward_kl(
        leaf.log_softmax(-1).gather(-1, ids), teacher.float().log_softmax(-1).gather(-1, ids)
    )
    want = kl_div(
        policy.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    got.sum().backward()
    gradient = policy.softmax(-1) - teacher.softmax(-1)
    torch.testing.assert_close(leaf.grad.double(), gradient, atol=1e-6, rtol=1e-5)


def test_objective_ignores_tokens_outside_of_the_loss() -> None:
    batch = in_fp64(build_sample_batch(samples(), align=4))
    generator = torch.Generator().manual_seed(1)
    log_probs = torch.randn(batch.tokens, 3, generator=generator).double().log_softmax(-1) - 1
    teacher = torch.randn(batch.tokens, 3, generator=generator).double().log_softmax(-1) - 0.5
    outside = ~batch.loss_mask
    log_probs[outside] = torch.nan
    teacher[outside] = torch.nan
    batch.teacher_top_log_probs = teacher
    leaf = log_probs.requires_grad_()
    labels = leaf.detach()[:, 0]

    output = distillation_objective(20)(labels, labels, batch, leaf)
    want = forward_kl(leaf[batch.loss_mask], teacher[batch.loss_mask])
    torch.testing.assert_close(output.loss, want.sum() / 20)
    assert output.sums["tokens"] == batch.loss_mask.sum() < batch.tokens
    mass = teacher[batch.loss_mask].exp().sum()
    torch.testing.assert_close(output.sums["distillation/teacher_mass"], mass)
    output.loss.backward()
    assert torch.equal(leaf.grad[outside], torch.zeros_like(leaf.grad[outside]))
    assert leaf.grad[batch.loss_mask].abs().min() > 0


def test_all_tokens_but_the_first_are_in_the_loss() -> None:
    joined = with_all_tokens(TrainingSamples.join(samples((5, 9))))
    assert joined.loss_tokens.tolist() == [4, 8]
    assert np.flatnonzero(~joined.loss_mask).tolist() == [0, 5]


# ---- a trainer with a teacher


def save(directory: Path, config: ModelConfig, seed: int) -> Path:
    tensors = ((name, random_hf_weights(config, seed)(name)) for name in hf_shapes(config))
    write_hf_directory(directory, config, tensors)
    return directory


def dense_config() -> ModelConfig:
    dense = load_config(ROOT / "configs/sft/tiny_dense.yaml", SftConfig, ["model.num_layers=2"])
    return dense.model.model_copy(update={"vocab_size": 576})


def load_distillation(teacher: Path, *overrides: str) -> SftConfig:
    """Return a run of the tiny GPT-OSS with a teacher."""
    options = [
        "model.num_layers=2",
        f"loss={{type: distillation, teacher: {teacher}}}",
        f"output_dir={teacher.parent}",
        "optimizer={lr: 3.0e-3, warmup_steps: 0, schedule: constant}",
        "initial_weights=null",
        *overrides,
    ]
    return load_config(ROOT / "configs/sft/tiny_retool.yaml", SftConfig, options)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "teacher", dense_config(), seed=3)


@pytest.mark.parametrize("top_k", [8, 576])
def test_student_approaches_the_teachers_distribution(
    teacher: Path, top_k: int, tmp_path: Path
) -> None:
    student = save(tmp_path / "student", load_distillation(teacher).model, seed=4)
    settings = load_distillation(teacher, f"loss.top_k={top_k}", f"initial_weights={student}")
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 576, (1, n), generator=generator) for n in (40, 25, 60)]
    data = with_all_tokens(
        TrainingSamples.join(
            [{"token_ids": row[0].tolist(), "loss_mask": [0] * row.numel()} for row in rows]
        )
    )
    trainer = local_trainer(settings)
    try:
        of_teacher = trainer.teacher_score(data)
        updates = [trainer.sft_step(data, step) for step in range(12)]
    finally:
        trainer.close()

    # The first update has the divergence of both models in transformers.
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (student, teacher)
    ]
    expected, divergences = [], []
    for row in rows:
        with torch.no_grad():
            policy, other = (model(row).logits[0, :-1].double() for model in models)
        log_probs = other.log_softmax(-1).gather(-1, row[0, 1:, None])[:, 0]
        expected += [0.0, *log_probs.tolist()]
        ids = other.topk(top_k, dim=-1).indices
        divergences.append(lumped_kl(policy, other, ids))
    assert of_teacher is not None
    np.testing.assert_allclose(of_teacher, expected, atol=1e-4)
    kl = [update.sums["loss"] / update.sums["tokens"] for update in updates]
    assert kl[0] == pytest.approx(torch.cat(divergences).mean().item(), abs=1e-4)
    assert updates[0].sums["tokens"] == 40 + 25 + 60 - 3
    assert kl[-1] < 0.7 * kl[0]


def test_unsuitable_teachers_are_rejected_before_the_run(teacher: Path, tmp_path: Path) -> None:
    check_teacher("loss.teacher", teacher, load_distillation(teacher))
    with pytest.raises(StartError, match=r"loss\.teacher: .*absent has no config\.json"):
        check_teacher("loss.teacher", tmp_path / "absent", load_distillation(tmp_path / "absent"))

    other = save(tmp_path / "other", dense_config().model_copy(update={"vocab_size": 512}), 0)
    with pytest.raises(StartError, match=r"has 512 token ids, but model\.vocab_size is 576"):
        check_teacher("loss.teacher", other, load_distillation(other))

    (teacher / "tokenizer.json").write_text('{"added_tokens": [], "model": {"vocab": {"a": 0}}}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [], "model": {"vocab": {"b": 0}}}')
    with pytest.raises(StartError, match="have different tokens"):
        check_teacher("loss.teacher", teacher, load_distillation(teacher, f"tokenizer={tmp_path}"))
    (teacher / "tokenizer.json").unlink()

    # Options of experts and of the backward pass are ignored for a dense teacher.
    options = "parallel={world_size: 4, tensor: 2, expert: 4, recompute: [moe_act]}"
    check_teacher("loss.teacher", teacher, load_distillation(teacher, options, "dtype=bf16"))
    deep = save(tmp_path / "deep", dense_config().model_copy(update={"num_layers": 3}), 0)
    with pytest.raises(StartError, match=r"not fit the layout: parallel\.pipeline"):
        check_teacher(
            "loss.teacher", deep, load_distillation(deep, "parallel={world_size: 2, pipeline: 2}")
        )
    with pytest.raises(ConfigError, match=r"loss\.top_k \(577\) exceeds model\.vocab_size"):
        load_distillation(teacher, "loss.top_k=577")
    with pytest.raises(ConfigError, match=r"loss\.teacher"):
        load_config(ROOT / "configs/sft/tiny_retool.yaml", SftConfig, ["loss=distillation"])


def test_plan_counts_the_weights_of_the_teacher(teacher: Path) -> None:
    with_teacher = load_distillation(teacher).memory_inputs
    without = load_distillation(teacher, "loss=cross_entropy").memory_inputs
    difference = weight_memory(with_teacher, 0) - weight_memory(without, 0)
    assert difference == pytest.approx(2 * dense_config().num_parameters, rel=1e-6)


# ---- layouts of two ranks

DISTILLED = ("expert", "interleaved", "tensor+sequence", "context")


def distil(settings: SftConfig, rank: int, port: int) -> dict[str, Any]:
    """Return the teacher's columns by sequence, and the results of two updates."""
    ranks = RanksOfJob(settings, rank, port)
    trainer = TrainerGroup(settings, ranks)
    trainer.ready()
    try:
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randint(0, 576, (n,), generator=generator) for n in (40, 25, 60, 7, 31)]
        data = with_all_tokens(
            TrainingSamples.join(
                [{"token_ids": row.tolist(), "loss_mask": [0] * len(row)} for row in rows]
            )
        )
        batches = local_batches(data, 64, settings.parallel)
        columns: dict[int, Any] = {}
        tops = ranks.worker.teachers.scorers[0].top_log_probs(batches, 8)
        for batch, (ids, log_probs) in zip(batches, tops, strict=True):
            both = torch.cat([ids.double(), log_probs.double()], dim=1)
            columns |= unpack(both, batch)

        before = trainer.teacher_score(data)
        updates = [trainer.sft_step(data, step) for step in range(2)]
        after = trainer.teacher_score(data)
        assert before is not None and after is not None
        return {
            "columns": columns,
            "teacher": before,
            "is frozen": np.array_equal(before, after),
            "losses": [update.sums["loss"] / update.sums["tokens"] for update in updates],
            "mass": updates[0].sums["distillation/teacher_mass"],
            "norms": [update.grad_norm for update in updates],
        }
    finally:
        trainer.close()


def layout_config(teacher: Path, student: Path, layout: Mapping[str, int], ranks: int) -> SftConfig:
    parallel = ", ".join(
        f"{key}: {value}" for key, value in {"world_size": ranks, **layout}.items()
    )
    return load_distillation(
        teacher,
        "model.num_layers=4",
        "loss.top_k=8",
        f"initial_weights={student}",
        f"parallel={{{parallel}}}",
        "training.max_tokens_per_micro_batch=64",
    )


def distil_in_every_layout(
    rank: int, ports: list[int], teacher: Path, student: Path
) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        name: distil(layout_config(teacher, student, LAYOUTS[name], 2), rank, port)
        for name, port in zip(DISTILLED, ports, strict=True)
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return directories of a dense teacher and a GPT-OSS student with four layers each."""
    root = tmp_path_factory.mktemp("four_layers")
    teacher = save(root / "teacher", dense_config().model_copy(update={"num_layers": 4}), seed=3)
    model = load_distillation(teacher, "model.num_layers=4").model
    return teacher, save(root / "student", model, seed=4)


@pytest.fixture(scope="module")
def one_rank(models: tuple[Path, Path]) -> dict[str, Any]:
    return distil(layout_config(*models, {}, 1), 0, free_port())


@pytest.fixture(scope="module")
def two_ranks(models: tuple[Path, Path]) -> list[dict[str, Any]]:
    ports = [free_port() for _ in DISTILLED]
    return run_distributed(distil_in_every_layout, 2, ports, *models)


@pytest.mark.parametrize("layout", DISTILLED)
def test_teachers_columns_equal_those_of_one_process(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    columns: dict[int, Any] = {}
    for rank in two_ranks:
        columns |= rank[layout]["columns"]
        np.testing.assert_allclose(rank[layout]["teacher"], one_rank["teacher"], atol=1e-5)
        assert rank[layout]["is frozen"]
    assert columns.keys() == one_rank["columns"].keys() == set(range(5))
    for number, column in columns.items():
        np.testing.assert_allclose(column, one_rank["columns"][number], atol=1e-5)


@pytest.mark.parametrize("layout", DISTILLED)
def test_distillation_in_every_layout_equals_one_process(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    assert one_rank["losses"][1] < one_rank["losses"][0]
    for rank in two_ranks:
        got = rank[layout]
        assert got["mass"] == pytest.approx(one_rank["mass"], rel=1e-5)
        assert got["losses"][0] == pytest.approx(one_rank["losses"][0], rel=1e-5)
        assert got["norms"][0] == pytest.approx(one_rank["norms"][0], rel=1e-4)
        # Adam divides every gradient by its own size, so rounding of small ones is visible.
        assert got["losses"][1] == pytest.approx(one_rank["losses"][1], rel=1e-3)
