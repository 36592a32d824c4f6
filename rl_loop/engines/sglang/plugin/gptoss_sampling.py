"""Sampling of tokens and their log-probs in one pass over the logits.

SGLang 0.5.17 samples with about 16 kernels of torch, each of which passes over fp32 [requests,
vocabulary]: temperature, softmax, checks, noise, argmax, log-probs of the whole vocabulary. With
256 requests of GPT-OSS on an H200 they took 1.1 ms of a decoding step of 13.4 ms
(``benchmarks.sglang decode --profile``). One pass over the logits would take 43 us.

This module divides a row into slices. The first kernel reads all logits and stores the largest
logit and the sum of exponentials of each slice. The second kernel, with one program per request,
chooses a slice by these sums, reads this slice again, and chooses one of its tokens. Each choice
compares a uniform random number with the cumulative sum of the weights (inversion). Therefore no
noise per token is needed. The sums also give the log-prob.

Weights are fp32. Their cumulative sums and the random numbers are fp64. A token's probability has a
relative error of a few millionths and an absolute error of 2^-53 (1.1e-16). A probability of 1e-13
is therefore correct to about 1/1000. ``torch.multinomial`` divides by exponential noise. On a GPU
this noise is at least 2^-24, in steps of about that size, so that tokens below 1e-8 are sampled too
rarely or never.

SGLang samples requests that need more than temperature and log-probs.
"""

# Triton interprets parameter annotations, so its kernels have none.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SLICE_LOGITS = 4096
"""Logits per slice. GPT-OSS's vocabulary has 50 slices."""
WEIGHING_WARPS = 4
"""Warps of a program that reads a slice: 32 logits per thread, all of them loaded at once."""
CHOOSING_WARPS = 8
"""Warps of a program that chooses: a slice is 16 fp64 numbers per thread."""
LOG2_E = tl.constexpr(1.4426950408889634)


def fits(logits: Tensor) -> bool:
    """Return True if the kernels can read these logits [requests, vocabulary]."""
    return logits.dtype == torch.float32 and logits.stride(1) == 1 and len(logits) > 0


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample a token of each row with probability softmax(logits / temperature).

    A logit of -inf is never sampled. A row that contains NaN or +inf, or only -inf, gets a log-prob
    of NaN and an arbitrary token of the vocabulary.

    Args:
        logits: [requests, vocabulary], for which ``fits`` is true. Not changed.
        temperatures: fp32 [requests], contiguous, positive.
        uniforms: fp64 [requests, 2], contiguous, uniform in [0, 1). They choose slice and token.

    Returns:
        int32 [requests]: tokens. fp32 [requests]: their log-probs at these temperatures, in nats.
    """
    requests, vocabulary = logits.shape
    slices = triton.cdiv(vocabulary, SLICE_LOGITS)
    largest = logits.new_empty(requests, slices)
    sums = logits.new_empty(requests, slices)
    tokens = logits.new_empty(requests, dtype=torch.int32)
    log_probs = logits.new_empty(requests)

    _weigh_slices_kernel[(slices, requests)](
        logits,
        logits.stride(0),
        vocabulary,
        temperatures,
        slices,
        largest,
        sums,
        SLICE_LOGITS=SLICE_LOGITS,
        num_warps=WEIGHING_WARPS,
    )
    _choose_token_kernel[(requests,)](
        logits,
        logits.stride(0),
        vocabulary,
        temperatures,
        uniforms,
        slices,
        largest,
        sums,
        tokens,
        log_probs,
        SLICE_LOGITS=SLICE_LOGITS,
        # ``tl.arange`` needs a power of two.
        SLICES=triton.next_power_of_2(slices),
        num_warps=CHOOSING_WARPS,
    )
    return tokens, log_probs


@triton.jit
def _weigh_slices_kernel(
    logits,
    logits_stride,
    vocabulary,
    temperatures,
    slices,
    largest_out,
    sums_out,
    SLICE_LOGITS: tl.constexpr,
):
    # Grid: slices, requests.
    number = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)  # its product with the stride exceeds 32 bits
    column = number * SLICE_LOGITS + tl.arange(0, SLICE_LOGITS)
    row = logits + request * logits_stride
    logit = tl.load(row + column, mask=column < vocabulary, other=float("-inf"))

    largest = tl.max(logit, 0)
    weight = _weights(logit, largest, tl.load(temperatures + request))
    tl.store(largest_out + request * slices + number, largest)
    tl.store(sums_out + request * slices + number, tl.sum(weight, 0))


@triton.jit
def _choose_token_kernel(
    logits,
    logits_stride,
    vocabulary,
    temperatures,
    uniforms,
    slices,
    largest_in,
    sums_in,
    tokens_out,
    log_probs_out,
    SLICE_LOGITS: tl.constexpr,
    SLICES: tl.constexpr,
):
    # Grid: requests.
    request = tl.program_id(0).to(tl.int64)
    row = logits + request * logits_stride
    temperature = tl.load(temperatures + request)

    # The sums of all slices, relative to the largest logit of the row.
    number = tl.arange(0, SLICES)
    is_slice = number < slices
    place = request * slices + number
    slice_largest = tl.load(largest_in + place, mask=is_slice, other=float("-inf"))
    slice_sum = tl.load(sums_in + place, mask=is_slice, other=0.0)
    largest = tl.max(slice_largest, 0)
    slice_weight = slice_sum.to(tl.float64) * _weights(slice_largest, largest, temperature)
    chosen_slice = _choose(slice_weight, tl.load(uniforms + 2 * request), SLICES)

    # The weights of this slice, as in the first kernel.
    column = chosen_slice * SLICE_LOGITS + tl.arange(0, SLICE_LOGITS)
    logit = tl.load(row + column, mask=column < vocabulary, other=float("-inf"))
    weight = _weights(logit, tl.max(logit, 0), temperature).to(tl.float64)
    in_slice = _choose(weight, tl.load(uniforms + 2 * request + 1), SLICE_LOGITS)
    token = chosen_slice * SLICE_LOGITS + in_slice

    # In fp64, so that only the result is rounded.
    below_largest = tl.load(row + token).to(tl.float64) - largest.to(tl.float64)
    log_prob = below_largest / temperature.to(tl.float64) - tl.log(tl.sum(slice_weight, 0))
    tl.store(tokens_out + request, token)
    tl.store(log_probs_out + request, log_prob.to(tl.float32))


@triton.jit
def _weights(logit, largest, temperature):
    """Return exp((logit - largest) / temperature)."""
    # If all logits are -inf, their difference would be NaN. The weights must be 0.
    reference = tl.where(largest == float("-inf"), 0.0, largest)
    # The subtraction comes first, because the difference of two logits is nearly exact, while a
    # division would round numbers of 20 or 30. div_rn, because Triton's division of fp32 numbers is
    # not rounded correctly.
    return tl.exp2((logit - reference) * tl.div_rn(LOG2_E, temperature))


@triton.jit
def _choose(weight, uniform, SIZE: tl.constexpr):
    """Return a number below SIZE with a probability proportional to its weight.

    It is the first number whose cumulative sum exceeds ``uniform`` times the total.
    """
    number = tl.arange(0, SIZE)
    # The sums are computed as a tree, so the last bits of a later sum can be smaller. Therefore
    # weights of 0 are excluded, and if rounding leaves no number, the last one with a weight is
    # returned.
    can_be_chosen = weight > 0
    exceeds = tl.cumsum(weight, 0) > uniform * tl.sum(weight, 0)
    first = tl.min(tl.where(can_be_chosen & exceeds, number, SIZE), 0)
    last = tl.max(tl.where(can_be_chosen, number, 0), 0)
    return tl.minimum(first, last)


# -- SGLang's sampler ------------------------------------------------------------------------------


def install() -> None:
    """Let SGLang's sampler sample with these kernels."""
    from sglang.srt.layers import sampler

    sampler.Sampler.forward = fused_forward(sampler)


def fused_forward(sampler: Any) -> Callable[..., Tensor]:
    """Return a replacement of ``Sampler.forward`` in SGLang's module ``sampler``.

    It returns int32 [requests]: tokens. It calls the original for batches that the kernels do not
    support.
    """
    original = sampler.Sampler.forward

    @wraps(original)
    def forward(
        self: Any,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        positions: Tensor,
    ) -> Tensor:
        # These kernels return the log-prob of the sampled token only.
        wants_more = return_logprob and (
            sampler.SGLANG_RETURN_ORIGINAL_LOGPROB
            or any(number > 0 for number in top_logprobs_nums)
            or any(token_ids is not None for token_ids in token_ids_logprobs)
        )
        if (
            wants_more
            or not has_only_temperatures(self, sampling_info)
            or not fits(logits_output.next_token_logits)
        ):
            return original(
                self,
                logits_output,
                sampling_info,
                return_logprob,
                top_logprobs_nums,
                token_ids_logprobs,
                positions,
            )

        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        # All ranks of a server choose equal tokens: torch's GPU generator has the same seed on
        # every rank, and every rank draws the same numbers from it, as with torch.multinomial.
        uniforms = torch.rand(len(logits), 2, dtype=torch.float64, device=logits.device)
        tokens, log_probs = sample(logits, sampling_info.temperatures.flatten(), uniforms)
        if return_logprob:
            logits_output.next_token_logprobs = log_probs
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens

    return forward


def has_only_temperatures(sampler: Any, sampling_info: Any) -> bool:
    """Return True if a batch is sampled only with temperatures.

    Args:
        sampler: SGLang's Sampler.
        sampling_info: SGLang's SamplingBatchInfo.
    """
    # A greedy request in a mixed batch has top_k 1.
    return not (
        sampling_info.is_all_greedy
        or sampling_info.need_top_k_sampling
        or sampling_info.need_top_p_sampling
        or sampling_info.need_min_p_sampling
        or sampling_info.sampling_seed is not None
        or any(sampling_info.return_sampling_masks or [])
        or sampler.enable_deterministic
        or sampler.rl_on_policy_target is not None
        or sampler.use_ascend_backend
    )
