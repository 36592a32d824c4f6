"""Updates with ``training.share_prefixes`` equal those without it, for every kind of training.

Log-probs, returned columns, statistics and gradients are compared in fp32. The model's own checks are
in tests/megatron_gptoss/test_shared_prefix_models.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from converters.hf_directory import write_hf_directory
from converters.names import hf_shapes
from converters.random_weights import random_hf_weights
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.samples import TrainingSamples
from rl_loop.config.every_run import RunConfig
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.local_rank import LocalRank
from tests.support.distributed import free_port, run_distributed
from tests.support.in_process import RanksOfJob
from tests.support.megatron_gptoss.branching import branching_samples
from tests.support.megatron_gptoss.layouts import LAYOUTS
from tests.support.rl_loop.trainer.adapter_rank import ADAPTER, CONFIGS
from tests.support.rl_loop.trainer.adapter_rank import base as base
from tests.support.rl_loop.trainer.adapter_rank import no_group_is_left as no_group_is_left

BAR = 1e-5
"""Allowed difference relative to the largest value of a tensor, in fp32."""
SMALL = [
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.intermediate_size=32",
    "model.head_size=16",
    "optimizer={lr: 1e-2}",
    "training.max_tokens_per_micro_batch=200",
]
RL_SMALL = [*SMALL, "rollout.max_episode_tokens=100", "algorithm.old_log_probs=forward"]
SHARED = ["training.min_shared=2"]
FEATURES: dict[str, list[str]] = {
    "ppo": [],
    "gspo": ["algorithm.policy_loss=gspo"],
    "R2": ["algorithm.routing_replay=R2"],
    "R3": ["algorithm.routing_replay=R3"],
    "KL": ["algorithm.kl={coefficient: 0.1}"],
    "critic": ["algorithm.critic={warmup_steps: 0}", "algorithm.advantage=gae"],
    "distillation": ["algorithm.distillation={teacher: BASE/teacher, loss: reverse_kl}"],
    "recomputed": ["parallel.recompute=[core_attn, moe, layernorm]"],
    "mxfp4": ["quantization=mxfp4"],
    "adapter": [ADAPTER, "algorithm.kl={coefficient: 0.1}"],
    "adapter on mxfp4": [ADAPTER, "quantization=mxfp4"],
    "adapter with a critic": [
        ADAPTER,
        "algorithm.critic={warmup_steps: 0}",
        "algorithm.advantage=gae",
    ],
}


@pytest.fixture(scope="module")
def models(base: Path) -> Path:
    """Return ``base`` with a teacher of other weights than the policy's."""
    model = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, RL_SMALL).model
    tensors = random_hf_weights(model, seed=3)
    write_hf_directory(
        base / "teacher", model, ((name, tensors(name)) for name in hf_shapes(model))
    )
    return base


def features(base: Path, *names: str) -> list[str]:
    """Return the overrides of a run from ``base`` with the features."""
    options = [option for name in names for option in FEATURES[name]]
    return [
        f"initial_weights={base}/hf",
        *(option.replace("BASE", str(base)) for option in options),
    ]


def rl_config(directory: Path, *overrides: str) -> RlConfig:
    options = [*RL_SMALL, f"output_dir={directory}", *overrides]
    return load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, options)


def build_samples(model: ModelConfig) -> TrainingSamples:
    """Return trees with all columns of an update. A few of their routes are unequal."""
    samples = branching_samples(
        5, trees=3, longest=15, model=model, with_routes=True, unequal_routes=0.02
    )
    rng = np.random.default_rng(0)
    columns = {
        name: rng.normal(size=samples.tokens).astype(np.float32)
        for name in ("values", "returns", "reference_log_probs")
    }
    return replace(samples.with_columns(**columns), groups=np.arange(len(samples)))


def compute_results(config: RunConfig, samples: TrainingSamples) -> dict[str, Any]:
    """Return log-probs, estimates, statistics and gradients of one update."""
    return results_on_rank(config, samples, LocalRank(config))


def results_on_rank(config: RunConfig, samples: TrainingSamples, rank: LocalRank) -> dict[str, Any]:
    trainer = TrainerGroup(config, rank)
    trainer.ready()
    try:
        found: dict[str, Any] = {"log-probs": trainer.score(samples.without_routes())}
        if isinstance(config, RlConfig):
            if config.algorithm.routing_replay != "R3":
                samples = samples.without_routes()
            found |= trainer.compute_estimates(samples)
            updates = trainer.rl_step(samples, 0)
            (update,) = updates.policy
            found |= {"new log-probs": updates.tokens.log_probs, "entropy": updates.tokens.entropy}
            saved = updates.shared_tokens
            for critic in updates.critic:
                found |= {f"critic/{name}": value for name, value in critic.sums.items()}
        else:
            update = trainer.sft_step(samples.without_routes(), 0)
            saved = update.shared_tokens
        # The number of routes is that of the computed tokens.
        sums = {k: v for k, v in update.sums.items() if not k.startswith("routes_")}
        found |= sums | {"gradient norm": update.grad_norm}
        for owner in (rank.worker.trainer, rank.worker.critic):
            if owner is not None:
                found |= {
                    f"{type(owner).__name__}/{name}": p.main_grad.clone()
                    for name, p in owner.module.named_parameters()
                    if p.requires_grad
                }
        return {"values": found, "saved": saved}
    finally:
        trainer.close()


def assert_equal(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        expected = torch.as_tensor(expected).double()
        difference = (torch.as_tensor(got[name]).double() - expected).abs().max()
        assert difference <= BAR * max(float(expected.abs().max()), 1e-3), name


def compare(whole: RunConfig, shared: RunConfig) -> None:
    samples = build_samples(whole.model)
    want, got = compute_results(whole, samples), compute_results(shared, samples)
    assert want["saved"] is None
    assert got["saved"].tokens == samples.tokens - len(samples)
    assert got["saved"].computed < 0.75 * got["saved"].tokens
    assert_equal(got["values"], want["values"])


SLOW = ("gspo", "KL", "mxfp4", "critic", "distillation", "adapter")
"""Features that another one in FEATURES has, too, and the loss of a sequence."""


@pytest.mark.parametrize(
    "feature",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FEATURES],
)
def test_updates_equal_those_of_whole_sequences(feature: str, models: Path, tmp_path: Path) -> None:
    options = features(models, feature)
    whole = rl_config(tmp_path, *options)
    compare(whole, rl_config(tmp_path, "training.share_prefixes=all", *SHARED, *options))


def test_dense_models_share_prefixes(tmp_path: Path) -> None:
    options = [
        "model.num_layers=2",
        "initial_weights=null",
        "training.max_tokens_per_micro_batch=200",
        "rollout.max_episode_tokens=100",
        f"output_dir={tmp_path}",
    ]
    whole, shared = (
        load_config(CONFIGS / "rl/tiny_dense.yaml", RlConfig, [*options, *sharing])
        for sharing in ([], ["training.share_prefixes=all", *SHARED])
    )
    compare(whole, shared)


@pytest.mark.parametrize("loss", ["cross_entropy", "distillation"])
def test_supervised_updates_equal_whole_sequences(loss: str, models: Path, tmp_path: Path) -> None:
    options = [*SMALL, f"output_dir={tmp_path}", f"initial_weights={models}/hf"]
    if loss == "distillation":
        options.append(f"loss={{type: distillation, teacher: {models}/teacher}}")
    whole, shared = (
        load_config(CONFIGS / "sft/tiny_retool.yaml", SftConfig, [*options, *sharing])
        for sharing in ([], ["training.share_prefixes=all", *SHARED])
    )
    compare(whole, shared)


# -- ranks ---------------------------------------------------------------------------------------


def layout_config(layout: str, directory: Path) -> RlConfig:
    parallel = {"world_size": 2, **PAIRS[layout]}
    return rl_config(
        directory,
        *features(directory, *LAID_OUT),
        "training.share_prefixes=all",
        *SHARED,
        *(f"parallel.{key}={value}" for key, value in parallel.items()),
    )


LAID_OUT = ("R3", "critic", "distillation")
PAIRS = {name: LAYOUTS[name] for name in ("data", "pipeline", "tensor+sequence", "context")}


def every_layout(rank: int, ports: list[int], directory: Path) -> dict[str, dict[str, Any]]:
    """Return the values of the driver in each layout. Gradients are parts and are left out."""
    torch.set_num_threads(1)
    found = {}
    for layout, port in zip(PAIRS, ports, strict=True):
        config = layout_config(layout, directory)
        result = results_on_rank(
            config, build_samples(config.model), RanksOfJob(config, rank, port)
        )
        assert result["saved"].computed < 0.75 * result["saved"].tokens
        found[layout] = {k: v for k, v in result["values"].items() if "Trainer/" not in k}
    return found


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> dict[str, dict[str, Any]]:
    found = run_distributed(every_layout, 2, [free_port() for _ in PAIRS], models)
    return found[0]


@pytest.fixture(scope="module")
def whole(models: Path) -> dict[str, Any]:
    config = rl_config(models, *features(models, *LAID_OUT))
    values = compute_results(config, build_samples(config.model))["values"]
    return {k: v for k, v in values.items() if "Trainer/" not in k}


@pytest.mark.parametrize("layout", PAIRS)
def test_ranks_return_the_values_of_whole_sequences(
    layout: str, two_ranks: dict[str, dict[str, Any]], whole: dict[str, Any]
) -> None:
    assert_equal(two_ranks[layout], whole)
