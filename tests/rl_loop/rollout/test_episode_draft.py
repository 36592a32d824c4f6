"""Unfinished episodes: routes of their tokens, and removal of their last turn."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_gptoss.token_columns import ColumnError
from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.protocol import GenerateResult
from rl_loop.rollout.episode_draft import EpisodeDraft

LAYERS, TOP_K = 3, 2


def routes(tokens: int, filler: int) -> np.ndarray:
    return np.full((tokens, LAYERS, TOP_K), filler, dtype=np.uint8)


def sampled(draft: EpisodeDraft, tokens: int, version: int) -> GenerateResult:
    """Return a turn with the routes that a draft lacks. Every number in it equals ``version``."""
    processed = len(draft) + tokens - 1
    return GenerateResult(
        output_ids=[version] * tokens,
        output_log_probs=[-version / 4] * tokens,
        finish_reason=FinishReason.STOP,
        weight_versions=[WeightVersionSpan(0, tokens, version)],
        routed_experts=routes(processed - draft.routed_tokens, version),
    )


def take_turn(draft: EpisodeDraft, tokens: int, version: int) -> GenerateResult:
    turn = sampled(draft, tokens, version)
    draft.append("assistant", turn.output_ids, "", turn)
    return turn


def test_token_keeps_the_routes_of_its_first_processing() -> None:
    draft = EpisodeDraft("t")
    draft.append("prompt", [9] * 4, "")
    take_turn(draft, 3, version=1)
    draft.append("tool", [8] * 2, "")
    take_turn(draft, 5, version=2)

    episode = draft.to_trajectory()
    episode.validate()
    assert episode.token_ids.tolist() == [9] * 4 + [1] * 3 + [8] * 2 + [2] * 5
    assert episode.loss_mask.tolist() == [False] * 4 + [True] * 3 + [False] * 2 + [True] * 5
    assert episode.sampled_tokens == 8
    # The last token of a turn is first an input of the next turn.
    assert isinstance(episode.routed_experts, np.ndarray)
    assert episode.routed_experts[:, 0, 0].tolist() == [1] * 6 + [2] * 7
    assert episode.routed_experts.dtype == np.uint8


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_removed_turn_does_not_change_the_episode(turns: int) -> None:
    def play(draft: EpisodeDraft) -> EpisodeDraft:
        draft.append("prompt", [9] * 3, "")
        for version in range(turns):
            take_turn(draft, 4, version)
            draft.append("tool", [8] * 2, "")
        return draft

    plain, retried = play(EpisodeDraft("t")), play(EpisodeDraft("t"))
    take_turn(retried, 6, version=7)
    retried.remove_last_turn()
    for draft in (plain, retried):
        take_turn(draft, 5, version=6)

    one, other = plain.to_trajectory(), retried.to_trajectory()
    for name in ("token_ids", "loss_mask", "rollout_log_probs"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert (one.turns, one.weight_versions) == (other.turns, other.weight_versions)
    assert one.sampled_tokens == other.sampled_tokens

    # Tokens that the removed turn read keep its routes. The new turn gives the routes of its
    # sampled tokens and of the last token before them.
    assert isinstance(other.routed_experts, np.ndarray)
    start = other.turns[-1].start
    assert other.routed_experts[start - 2].max() == 7
    assert (other.routed_experts[start - 1 :] == 6).all()


def test_mixing_turns_with_and_without_routes_is_an_error() -> None:
    draft = EpisodeDraft("algebra/7")
    draft.append("prompt", [9] * 3, "")
    take_turn(draft, 4, version=1)
    without = sampled(draft, 4, version=2)
    without.routed_experts = None
    draft.append("assistant", without.output_ids, "", without)
    with pytest.raises(ColumnError, match="column routed_experts of task algebra/7 has 6 rows"):
        draft.to_trajectory()
    assert draft.to_trajectory(with_routes=False).routed_experts is None
