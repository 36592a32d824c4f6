"""Token values returned by updates, compared with those of transformers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from converters.hf_directory import write_hf_directory
from megatron_gptoss import distributed
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.samples import TrainingSamples
from rl_loop.algorithms.config import DistillationConfig
from rl_loop.config.load import load_config
from rl_loop.config.partial_configs import TrainerConfig
from rl_loop.config.run import RlConfig
from rl_loop.data.rollout_batch import RlUpdates
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.local_rank import LocalRank
from rl_loop.trainer.rank_inputs import RankInputStore
from rl_loop.trainer.rank_state import RankPosition
from rl_loop.trainer.step_plan import plan_step
from rl_loop.trainer.worker import TrainerWorker
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.layouts import LAYOUTS
from tests.support.megatron_gptoss.reference import documents, hf_logits, hf_model

CONFIGS = Path(__file__).parents[3] / "configs"
TEMPERATURE = 0.7
SMALL = [
    "model.num_layers=4",
    "model.hidden_size=64",
    "model.intermediate_size=48",
    "model.head_size=16",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=2",
    "rollout.max_episode_tokens=32",
    "training.max_tokens_per_micro_batch=32",
    f"rollout.temperature={TEMPERATURE}",
    "optimizer={lr: 1e-2}",
]
LENGTHS = [30, 5, 18, 26, 11, 2, 23, 9]


def load_settings(directory: Path, *overrides: str) -> TrainerConfig:
    options = [
        *SMALL,
        f"initial_weights={directory}/hf",
        f"output_dir={directory}",
        "name=run",
        *overrides,
    ]
    return load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, options)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with random weights in Hugging Face's format."""
    root = tmp_path_factory.mktemp("initial")
    model = load_settings(root).model
    write_hf_directory(root / "hf", model, hf_model(model, std=0.1).state_dict().items())
    return root


def build_samples(model: ModelConfig, excluded: tuple[int, ...] = ()) -> TrainingSamples:
    """Return random episodes. The episodes in ``excluded`` have no tokens in the loss."""
    samples = documents(LENGTHS, vocab_size=model.vocab_size)
    is_learned = samples.loss_mask.copy()
    for number in excluded:
        is_learned[samples.offsets[number] : samples.offsets[number + 1]] = False
    signs = np.repeat([1.0, -1.0] * (len(LENGTHS) // 2), LENGTHS).astype(np.float32)
    guesses = np.where(is_learned, np.float32(-4), np.float32(0))
    return replace(samples, loss_mask=is_learned).with_columns(
        advantages=np.where(is_learned, signs, np.float32(0)), rollout_log_probs=guesses
    )


def compute_expected(model: ModelConfig, samples: TrainingSamples) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probs and entropies by transformers, 0 for the first token of every sample."""
    with torch.no_grad():
        logits = hf_logits(hf_model(model, std=0.1), samples).double() / TEMPERATURE
    labels = np.concatenate([row[1:] for row in samples.rows("token_ids")])
    distribution = torch.distributions.Categorical(logits=logits)

    is_label = np.ones(samples.tokens, dtype=bool)
    is_label[samples.offsets[:-1]] = False
    log_probs = np.zeros(samples.tokens)
    log_probs[is_label] = distribution.log_prob(torch.from_numpy(labels).long()).numpy()
    entropy = np.zeros(samples.tokens)
    entropy[is_label] = distribution.entropy().numpy()
    return log_probs, entropy


Answer = tuple[RankPosition, RlUpdates]


def updates_on_rank(
    rank: int, ports: list[int], trainers: list[TrainerConfig], samples: TrainingSamples
) -> list[Answer]:
    """Return the place of the rank in each trainer and its result."""
    return [
        update_on_rank(rank, port, settings, samples)
        for port, settings in zip(ports, trainers, strict=True)
    ]


def update_on_rank(
    rank: int, port: int, settings: TrainerConfig, samples: TrainingSamples
) -> Answer:
    worker = TrainerWorker(settings, rank, "127.0.0.1", port, 1)
    try:
        position = worker.position()
        plan = plan_step(samples, settings, settings.algorithm.mini_batches)
        inputs = RankInputStore(lambda value: value).store(samples, plan)
        return position, worker.rl_step(inputs[position.data], 0)
    finally:
        distributed.shutdown()


class AnsweredRanks:
    """Mock ranks with recorded results."""

    def __init__(self, answers: list[Answer]) -> None:
        self.positions = [position for position, _ in answers]
        self.updates = [updates for _, updates in answers]

    def ready(self) -> list[RankPosition]:
        return self.positions

    def store(self, value: Any) -> Any:
        return value

    def call(self, method: str, arguments: Any, result_ranks: Any) -> list[RlUpdates]:
        return [self.updates[rank] for rank in result_ranks]

    def close(self) -> None: ...


def run_updates(trainers: list[TrainerConfig], samples: TrainingSamples) -> list[RlUpdates]:
    """Take a step with each trainer. All have one layout, with one process per rank."""
    world = trainers[0].parallel.world_size
    ports = [free_port() for _ in trainers]
    answers = run_distributed(updates_on_rank, world, ports, trainers, samples)

    updates = []
    for settings, of_ranks in zip(trainers, zip(*answers, strict=True), strict=True):
        group = TrainerGroup(settings, AnsweredRanks(list(of_ranks)))
        group.ready()
        updates.append(group.rl_step(samples, 0))
    return updates


def update(settings: TrainerConfig, samples: TrainingSamples) -> RlUpdates:
    """Take a step with one process per rank of the layout."""
    (updates,) = run_updates([settings], samples)
    return updates


def layout_options(name: str) -> list[str]:
    options = [f"parallel.{key}={value}" for key, value in LAYOUTS[name].items()]
    return ["parallel.world_size=2", *options]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_values_of_every_layout_equal_transformers(layout: str, directory: Path) -> None:
    settings = load_settings(directory, *layout_options(layout))
    samples = build_samples(settings.model)
    updates = update(settings, samples)

    log_probs, entropy = compute_expected(settings.model, samples)
    assert updates.tokens is not None
    np.testing.assert_allclose(updates.tokens.log_probs, log_probs, atol=2e-5)
    np.testing.assert_allclose(updates.tokens.entropy, entropy, atol=2e-5)
    assert updates.tokens.entropy.dtype == updates.tokens.log_probs.dtype == np.float32

    assert not any(step.token_values for step in updates.policy), "sent once, and not by all"
    assert updates.policy[0].maxima["ratio/deviation_max"] == 0


def test_old_log_probs_precede_the_first_mini_batch(
    directory: Path,
) -> None:
    settings = load_settings(
        directory, "algorithm.mini_batches=2", "algorithm.old_log_probs=forward"
    )
    samples = build_samples(settings.model)
    updates = update(settings, samples)
    assert len(updates.policy) == 2

    log_probs, entropy = compute_expected(settings.model, samples)
    assert updates.tokens is not None
    np.testing.assert_allclose(updates.tokens.log_probs, log_probs, atol=2e-5)
    # The second mini-batch has every other sample, and follows the update of the first one.
    off = np.abs(updates.tokens.entropy - entropy)
    rows = [off[start:end].max() for start, end in pairwise(samples.offsets)]
    assert max(rows[::2]) < 2e-5 < 1e-3 < min(rows[1::2])


def test_token_values_without_an_update_are_nan(directory: Path) -> None:
    settings = load_settings(directory, "algorithm.mini_batches=2")
    samples = build_samples(settings.model, excluded=(1, 3, 5, 7))
    updates = update(settings, samples)
    assert updates.skipped == 1 and updates.tokens is not None

    log_probs, _ = compute_expected(settings.model, samples)
    for number, (start, end) in enumerate(pairwise(samples.offsets)):
        found = updates.tokens.log_probs[start:end]
        if number % 2 == 0:
            np.testing.assert_allclose(found, log_probs[start:end], atol=2e-5)
        else:
            assert found[0] == 0 and np.isnan(found[1:]).all()


def test_critic_warmup_returns_no_token_values(directory: Path) -> None:
    settings = load_settings(directory, "algorithm=ppo", "algorithm.critic.warmup_steps=1")
    columns = {"values": np.zeros(sum(LENGTHS), np.float32)}
    samples = build_samples(settings.model).with_columns(**columns, returns=columns["values"])
    updates = update(settings, samples)
    assert updates.policy == [] and len(updates.critic) == 1
    assert updates.tokens is None


def test_running_trainer_continues_with_a_changed_algorithm(directory: Path) -> None:
    settings = load_settings(directory, "name=changed")
    algorithm = settings.algorithm
    samples = build_samples(settings.model)
    rank = LocalRank(settings)
    trainer = TrainerGroup(settings, rank)
    trainer.ready()
    try:
        assert len(trainer.rl_step(samples, 0).policy) == 1
        # Group and ranks must agree on the number of mini-batches.
        trainer.change_algorithm(algorithm.model_copy(update={"mini_batches": 2}))
        updates = trainer.rl_step(samples, 1)
        assert (len(updates.policy), updates.skipped) == (2, 0)

        with pytest.raises(ValueError, match=r"algorithm\.routing_replay cannot change"):
            trainer.change_algorithm(algorithm.model_copy(update={"routing_replay": "R2"}))
        teacher = DistillationConfig(teacher=Path("teacher"))
        with pytest.raises(ValueError, match=r"algorithm\.distillation cannot change"):
            trainer.change_algorithm(algorithm.model_copy(update={"distillation": teacher}))
        assert len(trainer.rl_step(samples, 2).policy) == 2
    finally:
        trainer.close()
