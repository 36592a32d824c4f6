"""Episodes while they are played: routes are kept once, and a turn that is taken back leaves nothing."""

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


def sampled(prefix: int, tokens: int, version: int) -> GenerateResult:
    """A turn behind a prefix: every number of it says which turn it is."""
    return GenerateResult(
        output_ids=[version] * tokens,
        output_log_probs=[-version / 4] * tokens,
        finish_reason=FinishReason.STOP,
        weight_versions=[WeightVersionSpan(0, tokens, version)],
        routed_experts=routes(prefix + tokens - 1, version),
    )


def take_turn(draft: EpisodeDraft, tokens: int, version: int) -> GenerateResult:
    turn = sampled(len(draft), tokens, version)
    draft.append("assistant", turn.output_ids, "", turn)
    return turn


def test_every_token_keeps_the_experts_that_it_was_first_processed_with() -> None:
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


def test_a_long_episode_holds_its_routes_once() -> None:
    """The routes of every turn are those of its whole prefix: kept as they come they would weigh
    as much as the square of the turns."""
    draft = EpisodeDraft("t")
    draft.append("prompt", [9], "")
    for turn in range(50):
        take_turn(draft, 10, version=turn)

    def weight(piece: np.ndarray) -> int:
        return piece.nbytes if piece.base is None else weight(piece.base)

    assert sum(weight(piece) for piece in draft._routes) == (len(draft) - 1) * LAYERS * TOP_K


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_turn_that_is_taken_back_leaves_nothing(turns: int) -> None:
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

    # The tokens that the turn read got their routes with it. Its own tokens, and the last token
    # that it read, have the routes of the turn in its place.
    assert isinstance(other.routed_experts, np.ndarray)
    start = other.turns[-1].start
    assert other.routed_experts[start - 2].max() == 7
    assert (other.routed_experts[start - 1 :] == 6).all()


def test_turns_with_and_without_routes_do_not_make_an_episode() -> None:
    draft = EpisodeDraft("algebra/7")
    draft.append("prompt", [9] * 3, "")
    take_turn(draft, 4, version=1)
    without = sampled(len(draft), 4, version=2)
    without.routed_experts = None
    draft.append("assistant", without.output_ids, "", without)
    with pytest.raises(ColumnError, match="column routed_experts of task algebra/7 has 6 rows"):
        draft.to_trajectory()
    assert draft.to_trajectory(with_routes=False).routed_experts is None
