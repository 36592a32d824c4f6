"""Compares the plugin's sampling with float64, in Triton's interpreter:

TRITON_INTERPRET=1 PYTHONPATH=rl_loop/engines/sglang/plugin:. python THIS_FILE
"""

import math

import gptoss_sampling as sampling
import torch
from torch import Tensor

from tests.support.tolerances import assert_within, log_prob_error

SHAPES = [
    # requests, vocabulary, logits of a slice
    (1, 201_088, 4096),
    (20, 37, 16),
    (10, 48, 16),
    (5, 5, 16),
    (5, 16, 16),
]
LARGEST_UNIFORM = 1 - 2**-53
INFINITY = float("inf")


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor, slice_logits: int) -> Tensor:
    """Return sampled tokens, after a check of their log-probs against float64."""
    sampling.SLICE_LOGITS = slice_logits
    tokens, log_probs = sampling.sample(logits, temperatures, uniforms)
    assert tokens.dtype == torch.int32
    assert log_probs.dtype == torch.float32

    scaled = logits.double() / temperatures.double()[:, None]
    of_tokens = (1, tokens.long()[:, None])
    expected = scaled.log_softmax(-1).gather(*of_tokens)[:, 0]
    bound = log_prob_error(scaled).gather(*of_tokens)[:, 0]
    assert_within(log_probs, expected, bound, logits.shape)
    return tokens.long()


def draw(requests: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits that are slices of wider rows, different temperatures, and uniforms."""
    wide = 4 * torch.randn(requests, vocabulary + 3)
    wide[:, vocabulary:] = 50.0
    logits = wide[:, :vocabulary]
    temperatures = 0.5 + torch.rand(requests)
    return logits, temperatures, torch.rand(requests, 2, dtype=torch.float64)


def invert(logits: Tensor, temperatures: Tensor, uniforms: Tensor, slice_logits: int) -> Tensor:
    """Return the tokens that float64 arithmetic chooses: first a slice, then a token in it."""
    probabilities = (logits.double() / temperatures.double()[:, None]).softmax(-1)
    missing = -logits.shape[1] % slice_logits
    padded = torch.nn.functional.pad(probabilities, (0, missing))
    slices = padded.unflatten(1, (-1, slice_logits))

    chosen = first_above(slices.sum(-1), uniforms[:, 0])
    in_slice = first_above(slices[torch.arange(len(logits)), chosen], uniforms[:, 1])
    return chosen * slice_logits + in_slice


def first_above(weights: Tensor, uniforms: Tensor) -> Tensor:
    sums = weights.cumsum(-1)
    shares = uniforms[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, shares, right=True)[:, 0]


def compare_with_float64() -> None:
    for requests, vocabulary, slice_logits in SHAPES:
        inputs = draw(requests, vocabulary)
        before = inputs[0].clone()
        tokens = sample(*inputs, slice_logits)
        assert torch.equal(tokens, invert(*inputs, slice_logits))
        assert torch.equal(inputs[0], before)


def check_distribution() -> None:
    """Check the frequencies of tokens for rows with two alternating temperatures."""
    requests, vocabulary = 240, 7
    logits = torch.linspace(-1, 1, vocabulary)[torch.randperm(vocabulary)]
    temperatures = torch.tensor([0.9, 3.0]).repeat(requests // 2)
    uniforms = torch.rand(requests, 2, dtype=torch.float64)
    tokens = sample(logits.expand(requests, -1).contiguous(), temperatures, uniforms, 4)

    for first, temperature in enumerate((0.9, 3.0)):
        probabilities = (logits.double() / temperature).softmax(-1)
        check_frequencies(tokens[first::2], probabilities)


def check_frequencies(tokens: Tensor, probabilities: Tensor) -> None:
    """Compare with a chi-square test, at 4 standard deviations of the statistic."""
    counts = torch.bincount(tokens, minlength=len(probabilities))
    expected = len(tokens) * probabilities
    assert expected.min() > 4
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(probabilities) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom), statistic


def check_rare_tokens() -> None:
    """Check that a rare token has exactly the uniforms of its interval."""
    probability = 1e-12
    logits = torch.full((1, 20), -INFINITY)
    logits[0, 3] = 0.0
    logits[0, 18] = math.log(probability)  # the second slice of 16, the first slice of 32
    begins = 1 / (1 + probability)
    for slice_logits, column in ((16, 0), (32, 1)):
        uniforms = torch.full((2, 2), 0.5, dtype=torch.float64)
        uniforms[:, column] = torch.tensor([begins - 1e-14, begins + 1e-14], dtype=torch.float64)
        tokens = sample(logits.expand(2, -1).contiguous(), torch.ones(2), uniforms, slice_logits)
        assert tokens.tolist() == [3, 18], tokens


def check_peaked_rows() -> None:
    """Check rows in which one token has all the probability, at several temperatures."""
    logits = torch.randn(3, 37)
    logits[:, 20] = 60.0
    temperatures = torch.tensor([1.0, 0.05, 1e-6])
    uniforms = torch.tensor([[1e-9] * 2, [0.5] * 2, [LARGEST_UNIFORM] * 2], dtype=torch.float64)
    assert sample(logits, temperatures, uniforms, 16).tolist() == [20, 20, 20]


def check_masked_tokens() -> None:
    """Check that logits of -inf are not sampled, even for extreme and excessive uniforms."""
    allowed = [5, 17, 18, 30]
    logits = torch.full((2, 60), -INFINITY)  # the last slice has no other values
    logits[:, allowed] = torch.randn(2, 4)
    ends = torch.tensor([[0.0, 0.0], [LARGEST_UNIFORM, LARGEST_UNIFORM]], dtype=torch.float64)
    assert sample(logits, torch.ones(2), ends, 16).tolist() == [5, 30]
    # As if rounded sums never exceeded the uniform's share.
    assert sample(logits, torch.ones(2), torch.ones_like(ends), 16).tolist() == [30, 30]


def check_rows_without_probabilities() -> None:
    """Check that such rows give existing tokens and a log-prob that readers reject."""
    logits = torch.randn(3, 37)
    logits[0] = -INFINITY
    logits[1, 20] = float("nan")
    logits[2, 36] = INFINITY
    uniforms = torch.rand(3, 2, dtype=torch.float64)
    tokens, log_probs = sampling.sample(logits, torch.ones(3), uniforms)
    assert log_probs.isnan().all()
    assert ((tokens >= 0) & (tokens < 37)).all()


if __name__ == "__main__":
    torch.manual_seed(0)
    compare_with_float64()
    check_distribution()
    check_rare_tokens()
    check_peaked_rows()
    check_masked_tokens()
    check_rows_without_probabilities()
    print(f"{len(SHAPES)} shapes")
