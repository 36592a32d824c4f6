from __future__ import annotations

import pytest
import torch

from megatron_gptoss import distributed, likely_tokens, log_probs, logit_blocks
from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.likely_tokens import greedy_tokens, top_log_probs
from megatron_gptoss.log_probs import log_probs_and_entropy, log_probs_with_candidates
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.allocations import Allocations
from tests.support.tolerances import assert_within, log_prob_error, product_error

HIDDEN = 6
VOCAB = 300
TOKENS = 50
TEMPERATURE = 0.7


@pytest.fixture(autouse=True)
def several_uneven_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (log_probs, likely_tokens):
        monkeypatch.setattr(module, "CHUNK_TOKENS", 20)
    monkeypatch.setattr(logit_blocks, "CHUNK_COLUMNS", 140)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = 3 * torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    return (
        hidden,
        2 * torch.randn(VOCAB, HIDDEN, dtype=torch.float64),
        torch.randint(0, VOCAB, (TOKENS,)),
    )


def expected(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = torch.distributions.Categorical(logits=hidden @ weight.t() / TEMPERATURE)
    return distribution.log_prob(labels), distribution.entropy()


def test_values_and_gradients_equal_categorical_distribution() -> None:
    hidden, weight, labels = inputs()
    ours = [x.clone().requires_grad_() for x in (hidden, weight)]
    theirs = [x.clone().requires_grad_() for x in (hidden, weight)]
    got = log_probs_and_entropy(*ours, labels, TEMPERATURE)
    want = expected(*theirs, labels)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
    weights = torch.randn(2, TOKENS, dtype=torch.float64)
    for values in (got, want):
        sum((w * v).sum() for w, v in zip(weights, values, strict=True)).backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_gradcheck() -> None:
    hidden, weight, labels = inputs()
    leaves = (hidden[:5] / 10).requires_grad_(), weight[:200].clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h, w: log_probs_and_entropy(h, w, labels[:5] % 200, TEMPERATURE), leaves
    )


def draw_candidates(labels: torch.Tensor, k: int = 7) -> torch.Tensor:
    """Return k different ids for each token. The label is among those of every third token."""
    torch.manual_seed(1)
    ids = torch.rand(len(labels), VOCAB).argsort(-1)[:, :k]
    for i in range(0, len(labels), 3):
        ids[i] = (labels[i] + torch.arange(k) * 40) % VOCAB
    return ids


def test_candidates_equal_log_softmax_in_values_and_gradients() -> None:
    hidden, weight, labels = inputs()
    candidates = draw_candidates(labels)
    ours = [x.clone().requires_grad_() for x in (hidden, weight)]
    theirs = [x.clone().requires_grad_() for x in (hidden, weight)]
    got = log_probs_with_candidates(*ours, labels, candidates, TEMPERATURE)
    log_softmax = (theirs[0] @ theirs[1].t() / TEMPERATURE).log_softmax(-1)
    want = (*expected(*theirs, labels), log_softmax.gather(-1, candidates))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
    for values in (got, want):
        torch.manual_seed(2)
        sum((torch.randn_like(v) * v).sum() for v in values).backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_gradient_of_close_distributions_is_not_rounded() -> None:
    """The gradient p - p_teacher is small, and must not have the rounding error of p."""
    hidden, weight, labels = inputs()
    low = hidden.bfloat16(), weight.bfloat16()
    exact = [x.double() for x in low]
    logits = exact[0] @ exact[1].t()
    teacher = (1.002 * logits).softmax(-1)
    want = (logits.softmax(-1) - teacher) @ exact[1]

    ids = torch.arange(VOCAB).expand(TOKENS, VOCAB)
    leaf = low[0].clone().requires_grad_()
    log_probs = log_probs_with_candidates(leaf, low[1], labels, ids)[2]
    (-(teacher * log_probs).sum()).backward()
    assert leaf.grad is not None
    assert (leaf.grad - want).norm() < 0.02 * want.norm()


def test_top_log_probs_equal_topk_of_log_softmax() -> None:
    hidden, weight, _ = inputs()
    for k in (1, 9, 200, VOCAB):
        ids, log_probs = top_log_probs(hidden, weight, k, TEMPERATURE)
        want = (hidden @ weight.t() / TEMPERATURE).log_softmax(-1).topk(k, dim=-1)
        torch.testing.assert_close(log_probs, want.values)
        assert torch.equal(ids, want.indices)


def test_bf16_inputs_are_multiplied_and_reduced_in_fp32() -> None:
    hidden, weight, labels = inputs()
    low = hidden.bfloat16(), weight.bfloat16()
    values, _ = log_probs_and_entropy(*low, labels, TEMPERATURE)
    assert values.dtype == torch.float32
    exact = [x.double() for x in low]
    logits = exact[0] @ exact[1].t() / TEMPERATURE
    # The error of a log-prob includes the error of its logit and of the log-sum-exp.
    in_logits = 2 * product_error(exact[0], exact[1].t()).amax(-1) / TEMPERATURE
    in_softmax = log_prob_error(logits).gather(1, labels[:, None])[:, 0]
    assert_within(values, expected(*exact, labels)[0], in_logits + in_softmax)


def test_weight_gradient_is_added_once_per_backward_pass() -> None:
    hidden, weight, labels = inputs()
    plain = weight.clone().requires_grad_()
    buffered = torch.nn.Parameter(weight.clone())
    buffered.main_grad = torch.zeros_like(weight)
    buffered.grad_added_to_main_grad = False
    for parameter in (plain, buffered):
        for _ in range(2):  # two micro-batches
            log_probs_and_entropy(hidden, parameter, labels)[0].sum().backward()
    torch.testing.assert_close(buffered.main_grad, plain.grad)
    assert buffered.grad_added_to_main_grad


def test_no_pass_holds_the_logits_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probs, "CHUNK_TOKENS", 64)
    monkeypatch.setattr(logit_blocks, "CHUNK_COLUMNS", 1024)
    tokens = 2048
    vocab = 16_384
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(vocab, HIDDEN, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))
    with Allocations() as plain:
        (hidden @ weight.t()).log_softmax(-1).gather(1, labels[:, None]).sum().backward()
    with Allocations() as ours:
        sum(x.sum() for x in log_probs_and_entropy(hidden, weight, labels)).backward()
    block = 64 * 1024 * 4
    assert plain.peak > 2 * tokens * vocab * 4
    assert ours.peak < 10 * block + 4 * weight.nbytes + 40 * tokens * 4


def shard(rank: int, port: int) -> tuple[torch.Tensor, ...]:
    distributed.initialize(ParallelConfig(world_size=2, tensor=2), rank, port=port)
    group = torch.distributed.group.WORLD
    hidden, weight, labels = inputs()
    hidden.requires_grad_()
    local = weight.chunk(2)[rank].clone().requires_grad_()
    values, entropy, others = log_probs_with_candidates(
        hidden, local, labels, draw_candidates(labels), TEMPERATURE, group
    )
    (values.sum() + 2 * entropy.sum() + 3 * others.square().sum()).backward()
    greedy = greedy_tokens(hidden, local, group)
    top = top_log_probs(hidden, local, 200, TEMPERATURE, group)
    shown = [tensor.detach() for tensor in (values, entropy, others)]
    return *shown, hidden.grad, local.grad, greedy, *top


def test_a_vocabulary_split_over_two_ranks_gives_the_same() -> None:
    hidden, weight, labels = inputs()
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    want = expected(*leaves, labels)
    log_softmax = (leaves[0] @ leaves[1].t() / TEMPERATURE).log_softmax(-1)
    of_candidates = log_softmax.gather(-1, draw_candidates(labels))
    (want[0].sum() + 2 * want[1].sum() + 3 * of_candidates.square().sum()).backward()
    top = log_softmax.detach().topk(200, dim=-1)

    results = run_distributed(shard, 2, free_port())
    for values, entropy, others, _, _, greedy, top_ids, top_values in results:
        torch.testing.assert_close(values, want[0].detach())
        torch.testing.assert_close(entropy, want[1].detach())
        torch.testing.assert_close(others, of_candidates.detach())
        assert torch.equal(greedy, (hidden @ weight.t()).argmax(-1))
        assert torch.equal(top_ids, top.indices)
        torch.testing.assert_close(top_values, top.values)
    torch.testing.assert_close(results[0][3] + results[1][3], leaves[0].grad)
    torch.testing.assert_close(torch.cat([r[4] for r in results]), leaves[1].grad)


def test_a_temperature_of_zero_is_rejected() -> None:
    with pytest.raises(ValueError, match="temperature"):
        log_probs_and_entropy(*inputs(), 0.0)
