"""Models compute shared prefixes once, with the log-probs and gradients of whole sequences.

Everything is float64, so that the two orders of summation differ by far less than a wrong term. The
advantages and old log-probs of a shared token differ between its sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from converters.model_weights import export_hf_weights, load_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.critic import ValueTrainer, make_critic
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import PackedBatch, build_batch, schedule
from megatron_gptoss.planning.flops import training_flops
from megatron_gptoss.prefix_tree import PrefixKeys, PrefixSharing, SortedPrefixes
from megatron_gptoss.routes import route_digests
from megatron_gptoss.routing_replay import RoutingReplay
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.scorer import alignment
from megatron_gptoss.step_results import LossFunction, LossOutput
from megatron_gptoss.trainer import PolicyTrainer
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.objectives import distillation_objective, policy_objective
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.branching import branching_samples
from tests.support.megatron_gptoss.layouts import layout_cases, selected_layouts
from tests.support.megatron_gptoss.reference import TINY, float64_training, hf_model
from tests.support.tolerances import assert_within

BAR = 1e-12
"""Allowed difference relative to the largest value of a tensor, 4,500 units in the last place."""
BARS = {torch.float32: 1e-5, torch.float64: BAR}
"""Allowed difference from whole sequences in float64, by dtype."""
DTYPES = [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64]
PPO = AlgorithmConfig(old_log_probs="forward")
GSPO = AlgorithmConfig(policy_loss={"type": "gspo"}, old_log_probs="forward")
LONGEST = 400

# Windows that are shorter than most segments, and longer than a path.
CASES = {
    "window 3, PPO": (3, PPO, False, 1),
    "window 8, PPO, few segments": (8, PPO, False, 6),
    "window 8, GSPO, R3": (8, GSPO, True, 1),
    "window 64, GSPO, R3, few segments": (64, GSPO, True, 6),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 4": {},
    "context 2": {"context": 2},
    "context 2, forced schemes": {
        "context": 2,
        "context_scheme_full": "all_gather",
        "context_scheme_window": "halo",
    },
    "context 4": {"context": 4},
    "context 2, tensor 2": {"context": 2, "tensor": 2},
    "context 2, tensor 2, expert 2": {"context": 2, "tensor": 2, "expert": 2},
    "context 2, expert 4": {"context": 2, "expert": 4},
    "context 2, pipeline 2": {"context": 2, "pipeline": 2},
    "context 2, virtual pipeline": {"context": 2, "pipeline": 2, "virtual_pipeline": 2},
    "tensor 2, pipeline 2, recomputed": {
        "tensor": 2,
        "pipeline": 2,
        "recompute": ("core_attn", "moe", "layernorm"),
    },
}


def build_trainer(
    config: GptOssModelConfig,
    parallel: ParallelConfig,
    kind: type[PolicyTrainer] = PolicyTrainer,
    dtype: torch.dtype = torch.float64,
) -> PolicyTrainer:
    """Return a trainer, or critic, of a random model."""
    model = build_model(config, parallel, dtype)
    load_hf_weights(model, config, hf_model(config, std=0.15).state_dict().__getitem__)
    if kind is ValueTrainer:
        model = make_critic(model)
        for chunk in [module for module in model.modules() if hasattr(module, "output_layer")]:
            torch.manual_seed(1)
            torch.nn.init.normal_(chunk.output_layer.weight, std=0.2)
    return kind(model, OptimizerConfig(clip_grad=1e9))


@contextlib.contextmanager
def joined_rank(
    parallel: ParallelConfig, rank: int, port: int, dtype: torch.dtype = torch.float64
) -> Iterator[None]:
    """Join the process group for training."""
    distributed.initialize(parallel, rank, port=port)
    try:
        with float64_training() if dtype == torch.float64 else contextlib.nullcontext():
            yield
    finally:
        distributed.shutdown()


@pytest.fixture
def one_rank() -> Iterator[None]:
    with joined_rank(ParallelConfig(), 0, free_port()):
        yield


def gradients(trainer: PolicyTrainer, batches: list[PackedBatch], loss: LossFunction) -> Any:
    """Return the gradients by parameter, after a step that changes nothing."""
    trainer.train_step(batches, loss, learning_rate=0.0)
    return {name: p.main_grad.clone() for name, p in trainer.module.named_parameters()}


def assert_equal(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], bar: float = BAR
) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        assert expected.abs().max() > 0, name
        assert_within(got[name].double(), expected, bar * float(expected.abs().max()), name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("one_rank")
def test_gradients_are_those_of_whole_sequences(case: str) -> None:
    window, algorithm, with_routes, min_shared = CASES[case]
    trainer = build_trainer(TINY.model_copy(update={"sliding_window": window}), ParallelConfig())
    samples = branching_samples(1, with_routes=with_routes)
    if with_routes:
        trainer.replay = RoutingReplay(trainer.module)
    objective = policy_objective(algorithm, torch.from_numpy(samples.loss_tokens), LONGEST)

    whole = build_batch(samples)
    shared = build_batch(samples, align=8, sharing=PrefixSharing(min_shared))
    assert shared.tokens < whole.tokens / 2
    want_scores, got_scores = (trainer.score([batch])[0] for batch in (whole, shared))
    assert_within(got_scores[: whole.tokens], want_scores, BAR * float(want_scores.abs().max()))
    want = gradients(trainer, [whole], objective)
    assert any("softmax_offset" in name for name in want)
    assert_equal(gradients(trainer, [shared], objective), want)


@pytest.mark.usefixtures("one_rank")
def test_values_of_a_critic_are_those_of_whole_sequences() -> None:
    trainer = build_trainer(TINY, ParallelConfig(), ValueTrainer)
    samples = branching_samples(2)
    whole, shared = build_batch(samples), build_batch(samples, align=8, sharing=PrefixSharing(1))

    def loss(values: torch.Tensor, batch: PackedBatch) -> LossOutput:
        error = values - batch.column("advantages")
        return LossOutput(torch.where(batch.loss_mask, error.square(), 0.0).sum())

    want, got = (trainer.score([batch])[0] for batch in (whole, shared))
    assert_within(got[: whole.tokens], want, BAR * float(want.abs().max()))
    assert_equal(gradients(trainer, [shared], loss), gradients(trainer, [whole], loss))


@pytest.mark.usefixtures("one_rank")
def test_distillation_is_that_of_whole_sequences() -> None:
    trainer = build_trainer(TINY, ParallelConfig())
    samples = branching_samples(2)
    results = []
    for batch in (build_batch(samples), build_batch(samples, align=8, sharing=PrefixSharing(1))):
        ids, log_probs = next(trainer.top_log_probs([batch], 5))
        # A teacher that is not the policy.
        batch = replace(batch, teacher_top_ids=ids, teacher_top_log_probs=log_probs.double() - 0.3)
        loss = distillation_objective(int(samples.loss_tokens.sum()))
        results.append((ids, trainer.greedy_tokens([batch])[0], gradients(trainer, [batch], loss)))
    (ids, greedy, want), (shared_ids, shared_greedy, got) = results
    assert torch.equal(shared_ids[: len(ids)], ids)
    assert torch.equal(shared_greedy[: len(ids)], greedy)
    assert_equal(got, want)


@pytest.mark.usefixtures("one_rank")
def test_recorded_routes_are_replayed_on_shared_tokens() -> None:
    trainer = build_trainer(TINY, ParallelConfig())
    samples = branching_samples(1)
    batch = build_batch(samples, align=8, sharing=PrefixSharing(1))
    loss = policy_objective(PPO, torch.from_numpy(samples.loss_tokens), LONGEST)
    want = gradients(trainer, [batch], loss)

    trainer.replay = RoutingReplay(trainer.module)
    trainer.replay.start_recording()
    trainer.score([batch])
    recorded = trainer.replay.recorded()[0]
    assert len(recorded.layers[0]) == batch.tokens
    trainer.replay.agreement()
    batch = replace(batch, recorded_routes=recorded)
    assert_equal(gradients(trainer, [batch], loss), want)
    # The step reads the counts, so count a forward pass.
    trainer.score([batch])
    counts = trainer.replay.agreement()
    real = int((~batch.is_padding).sum())
    assert counts["routes_compared"] == counts["routes_agreeing"] == real * TINY.num_layers


@pytest.mark.usefixtures("one_rank")
def test_speed_counts_the_arithmetic_of_shared_prefixes_once() -> None:
    trainer = build_trainer(TINY, ParallelConfig())
    common = list(range(20))
    samples = TrainingSamples.join(
        [{"token_ids": [*common, last, 1], "loss_mask": [1] * 22} for last in (50, 51)]
    )
    batch = build_batch(samples, sharing=PrefixSharing(1))
    loss = policy_objective(PPO, torch.from_numpy(samples.loss_tokens), LONGEST)
    columns = {name: torch.zeros(42) for name in ("advantages", "rollout_log_probs")}
    step = trainer.train_step([replace(batch, **columns)], loss, learning_rate=0.0)
    flops = training_flops(TINY, [21, 21]) - training_flops(TINY, [20])
    assert step.tflops_per_gpu * step.seconds * 1e12 == pytest.approx(flops)
    assert step.tokens_per_second_per_gpu * step.seconds == pytest.approx(42)


# -- parallel layouts ----------------------------------------------------------------------------

SAMPLES = branching_samples(4, trees=4, with_routes=True)
MAX_TOKENS = 200
"""Less than the tokens of some trees, which are cut."""


def train(
    parallel: ParallelConfig,
    rank: int,
    port: int,
    sharing: PrefixSharing | None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Return all gradients by Hugging Face name (on rank 0), and the log-probs of every sample."""
    with joined_rank(parallel, rank, port, dtype):
        trainer = build_trainer(TINY, parallel, dtype=dtype)
        trainer.replay = RoutingReplay(trainer.module)
        prefixes = None
        if sharing is not None:
            digests = [route_digests(row) for row in SAMPLES.routed_experts]
            keys = PrefixKeys.of(SAMPLES, range(len(SAMPLES)), digests=digests)
            prefixes = SortedPrefixes(keys)
        plan = schedule(
            SAMPLES.lengths,
            MAX_TOKENS,
            parallel.data,
            multiple=parallel.micro_batch_multiple,
            prefixes=prefixes,
            min_shared=1 if sharing is None else sharing.min_shared,
        )
        own = plan.micro_batches[parallel_state.get_data_parallel_rank()]
        batches = [
            build_batch(SAMPLES, sequences, alignment(), sharing=sharing) for sequences in own
        ]
        scores = {}
        for batch, values in zip(batches, trainer.score(batches), strict=True):
            for sample_id in batch.sample_ids[batch.sample_ids >= 0].unique().tolist():
                scores[sample_id] = values[batch.sample_ids == sample_id]
        objective = policy_objective(
            GSPO,
            torch.from_numpy(SAMPLES.loss_tokens),
            LONGEST,
            parallel_state.get_context_parallel_group(),
        )
        trainer.train_step(batches, objective, learning_rate=0.0)
        for parameter in trainer.module.parameters():
            parameter.data = parameter.main_grad.clone()
        named = {name: tensor.clone() for name, tensor in export_hf_weights(trainer.module, TINY)}
        saved = sum(len(batch.labels) - batch.tokens for batch in batches)
        return {"gradients": named, "scores": scores, "saved": saved}


def every_layout(rank: int, dtype: torch.dtype, ports: dict[str, int]) -> dict[str, Any]:
    """Train in the layouts that have a port."""
    torch.set_num_threads(1)
    sharing = PrefixSharing(2)
    return {
        name: train(ParallelConfig(world_size=4, **LAYOUTS[name]), rank, port, sharing, dtype)
        for name, port in ports.items()
    }


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return train(ParallelConfig(), 0, free_port(), None)


@pytest.fixture(scope="module", params=DTYPES)
def four_ranks(request: pytest.FixtureRequest) -> tuple[list[dict[str, Any]], float]:
    """Return the results of all ranks, and the allowed difference from whole sequences."""
    ports = {name: free_port() for name in selected_layouts(request)}
    return run_distributed(every_layout, 4, request.param, ports), BARS[request.param]


CASES_OF_LAYOUTS = layout_cases(
    LAYOUTS,
    slow=["context 2", "context 2, tensor 2", "context 2, expert 4", "context 2, pipeline 2"],
)


@pytest.mark.parametrize("layout", CASES_OF_LAYOUTS)
def test_layouts_have_the_gradients_of_whole_sequences(
    layout: str, whole: dict[str, Any], four_ranks: tuple[list[dict[str, Any]], float]
) -> None:
    ranks, bar = four_ranks
    assert max(rank[layout]["saved"] for rank in ranks) > 100
    assert_equal(ranks[0][layout]["gradients"], whole["gradients"], bar)


@pytest.mark.parametrize("layout", CASES_OF_LAYOUTS)
def test_layouts_have_the_log_probs_of_whole_sequences(
    layout: str, whole: dict[str, Any], four_ranks: tuple[list[dict[str, Any]], float]
) -> None:
    ranks, bar = four_ranks
    seen: dict[int, torch.Tensor] = {}
    for rank in ranks:
        seen |= rank[layout]["scores"]
    assert_equal(seen, whole["scores"], bar)
