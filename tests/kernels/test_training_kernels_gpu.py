"""The Triton kernels of the training step against their formulas in fp64."""

import pytest
import torch

from gptoss_kernels.rotary import rotate_heads
from gptoss_kernels.swiglu import clamped_swiglu
from megatron_gptoss.layers.rotary import apply_rotary
from megatron_gptoss.log_probs import log_probs_and_entropy

pytestmark = pytest.mark.gpu


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x.double().cpu() - exact).norm() / exact.norm()).item()


def compare(function, reference, inputs, bound=3e-3):
    """Compare ``function`` on bf16 CUDA inputs with ``reference`` on the same values in fp64.

    The comparison includes outputs and gradients.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    exact = [x.detach().double().cpu().requires_grad_() for x in inputs]
    out, want = function(*leaves), reference(*exact)
    grad = torch.randn(out.shape, device="cuda", dtype=out.dtype)
    out.backward(grad)
    want.backward(grad.double().cpu())
    assert error(out.detach(), want.detach()) < bound
    for leaf, like in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert error(leaf.grad, like.grad) < bound


@pytest.mark.parametrize(("rows", "width"), [(300, 2880), (1, 48), (7, 1024)])
def test_expert_activation_and_gradients_match_fp64(rows: int, width: int) -> None:
    torch.manual_seed(0)
    x = (5 * torch.randn(rows, 2 * width, device="cuda")).bfloat16()  # many values exceed the clamp
    probs = torch.rand(rows, device="cuda")
    compare(
        lambda x, p: clamped_swiglu(x, p, 7.0), lambda x, p: clamped_swiglu(x, p, 7.0), [x, probs]
    )


def test_an_expert_without_tokens_is_no_error() -> None:
    empty = torch.empty(0, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    clamped_swiglu(empty, torch.empty(0, device="cuda"), 7.0).sum().backward()
    assert empty.grad.shape == (0, 96)


@pytest.mark.parametrize("heads", [64, 5])
def test_rotation_of_strided_heads_and_gradient_match_fp64(heads: int) -> None:
    torch.manual_seed(0)
    whole = torch.randn(200, heads, 128, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(200, 1, 32, device="cuda") * 100
    cos, sin = angles.cos(), angles.sin()
    reference = lambda x: apply_rotary(x, cos.double().cpu(), sin.double().cpu())  # noqa: E731
    compare(lambda x: rotate_heads(x, cos, sin), reference, [whole[..., :64]])


@pytest.mark.parametrize("accumulate", [True, False])
def test_log_probs_entropy_and_gradients_match_fp64(accumulate: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(9000, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(13_001, 64, device="cuda", dtype=torch.bfloat16) / 4
    labels = torch.randint(0, 13_001, (9000,), device="cuda")
    h, w = hidden.clone().requires_grad_(), torch.nn.Parameter(weight.clone())
    if accumulate:
        w.main_grad, w.grad_added_to_main_grad = torch.ones_like(w, dtype=torch.float32), False
    values, entropy = log_probs_and_entropy(h, w, labels, 0.7)
    (values.sum() + 0.5 * entropy.sum()).backward()
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    distribution = torch.distributions.Categorical(logits=exact[0] @ exact[1].t() / 0.7)
    (distribution.log_prob(labels).sum() + 0.5 * distribution.entropy().sum()).backward()
    assert (values - distribution.log_prob(labels)).abs().max() < 1e-4
    assert (entropy - distribution.entropy()).abs().max() < 1e-4
    assert error(h.grad, exact[0].grad.cpu()) < 4e-3
    assert error(w.main_grad - 1 if accumulate else w.grad, exact[1].grad.cpu()) < 4e-3
