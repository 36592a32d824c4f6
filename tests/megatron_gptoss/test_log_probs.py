from __future__ import annotations

import pytest
import torch

from megatron_gptoss import distributed
from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.log_probs import log_probs_and_entropy, vocab_parallel_argmax
from tests.distributed import free_port, run_distributed

VOCAB, TOKENS, TEMPERATURE = 24, 50, 0.7


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return 30 * torch.randn(TOKENS, VOCAB, dtype=torch.float64), torch.randint(0, VOCAB, (TOKENS,))


def expected(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = torch.distributions.Categorical(logits=logits / TEMPERATURE)
    return distribution.log_prob(labels), distribution.entropy()


def test_values_and_gradients_equal_those_of_a_categorical_distribution() -> None:
    logits, labels = inputs()
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    weights = torch.randn(2, TOKENS, dtype=torch.float64)
    got, want = log_probs_and_entropy(ours, labels, TEMPERATURE), expected(theirs, labels)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
    sum((w * g).sum() for w, g in zip(weights, got, strict=True)).backward()
    sum((w * g).sum() for w, g in zip(weights, want, strict=True)).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_gradcheck() -> None:
    logits, labels = inputs()
    logits = (logits[:5] / 10).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: log_probs_and_entropy(x, labels[:5], TEMPERATURE), logits)


def test_bf16_logits_are_reduced_in_fp32() -> None:
    logits, labels = inputs()
    low = (logits / 30).bfloat16()
    log_probs, _ = log_probs_and_entropy(low, labels, TEMPERATURE)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected(low.double(), labels)[0], atol=1e-5, rtol=0)


def shard(rank: int, port: int) -> tuple[torch.Tensor, ...]:
    distributed.initialize(ParallelConfig(world_size=2, tensor=2), rank, port=port)
    group = torch.distributed.group.WORLD
    logits, labels = inputs()
    local = logits.chunk(2, dim=-1)[rank].clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(local, labels, TEMPERATURE, group)
    (log_probs.sum() + 2 * entropy.sum()).backward()
    distributed_argmax = vocab_parallel_argmax(local.detach(), group)
    return log_probs.detach(), entropy.detach(), local.grad, distributed_argmax


def test_a_vocabulary_split_over_two_ranks_gives_the_same() -> None:
    logits, labels = inputs()
    whole = logits.clone().requires_grad_()
    want = expected(whole, labels)
    (want[0].sum() + 2 * want[1].sum()).backward()
    results = run_distributed(shard, 2, free_port())
    for log_probs, entropy, _, argmax in results:
        torch.testing.assert_close(log_probs, want[0].detach())
        torch.testing.assert_close(entropy, want[1].detach())
        assert torch.equal(argmax, logits.argmax(-1))
    torch.testing.assert_close(torch.cat([r[2] for r in results], dim=-1), whole.grad)


def test_a_temperature_of_zero_is_refused() -> None:
    logits, labels = inputs()
    with pytest.raises(ValueError, match="temperature"):
        log_probs_and_entropy(logits, labels, 0.0)
