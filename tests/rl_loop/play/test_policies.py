"""Written turns end where an engine would end them."""

from __future__ import annotations

import pytest

from rl_loop.data.trajectory import FinishReason
from rl_loop.engines.protocol import GenerateRequest, ModelShape, SamplingParams, check_result
from rl_loop.play.policies import as_sampled


@pytest.mark.parametrize(
    ("ids", "kept", "reason"),
    [
        ([1, 2, 9], [1, 2, 9], FinishReason.STOP),
        ([1, 9, 2, 8], [1, 9], FinishReason.STOP),
        ([8, 9], [8], FinishReason.STOP),
        ([1, 2, 3, 4, 9], [1, 2, 3, 4], FinishReason.LENGTH),
        ([1, 2, 3, 9], [1, 2, 3, 9], FinishReason.STOP),
    ],
)
def test_turn_ends_at_its_first_stop_token_or_the_limit(
    ids: list[int], kept: list[int], reason: FinishReason
) -> None:
    sampling = SamplingParams(max_new_tokens=4, stop_token_ids=(8, 9))
    result = as_sampled(ids, sampling)
    assert (result.output_ids, result.finish_reason) == (kept, reason)
    # The loop checks results of every engine.
    check_result(GenerateRequest("e/0/0", [0], sampling), result, ModelShape(10))
