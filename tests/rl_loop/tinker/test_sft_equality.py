"""SFT through the SDK has the bits of ``gptoss sft`` on the same batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.tenant_state import copy_tenant
from rl_loop.config.load import load_config
from rl_loop.config.run import SftConfig
from rl_loop.run_parts import open_supervised_data
from rl_loop.tinker.store import CheckpointName
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.local_rank import LocalRank
from tests.support.rl_loop.tinker_client import MODEL, tinker
from tests.support.rl_loop.tinker_server import KEY, SMALLER, running_server

STEPS = 4
SFT = [
    "adapter={rank: 8, alpha: 16}",
    *SMALLER,
    "sequences_per_step=6",
    "training.steps=4",
    "training.max_tokens_per_micro_batch=1024",
    "optimizer.clip_grad=0.5",
    "optimizer.weight_decay=0.01",
]


def steps_of_sft(config: SftConfig) -> tuple[list[TrainingSamples], dict[str, torch.Tensor]]:
    """Take the steps of ``gptoss sft``, and return their batches and the trained adapter."""
    _, data = open_supervised_data(config)
    batches = [data.take(step) for step in range(STEPS)]
    ranks = LocalRank(config)
    group = TrainerGroup(config, ranks)
    try:
        group.ready()
        for number, samples in enumerate(batches):
            group.sft_step(samples, number)
        return batches, copy_tenant(ranks.worker.trainer)
    finally:
        group.close()


def datums(samples: TrainingSamples) -> list[Any]:
    """Return the sequences of a step with the weights of a mean over its tokens."""
    weight = np.float32(1 / samples.loss_mask.sum())
    cuts = samples.offsets[1:-1]
    rows = zip(np.split(samples.token_ids, cuts), np.split(samples.loss_mask, cuts), strict=True)
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": tokens[1:].astype(np.int64),
                "weights": mask[1:].astype(np.float32) * weight,
            },
        )
        for tokens, mask in rows
    ]


def test_sft_through_the_sdk_equals_the_command(tmp_path: Path) -> None:
    config = load_config(Path("tiny_retool"), SftConfig, SFT)
    batches, expected = steps_of_sft(config)
    optimizer = config.optimizer
    with running_server(tmp_path, [*SMALLER, f"seed={config.seed}"]) as server:
        client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        train = client.create_lora_training_client(base_model=MODEL, rank=8, seed=config.seed)
        for number, samples in enumerate(batches):
            passed = train.result().forward_backward(datums(samples), "cross_entropy")
            settings = tinker.AdamParams(
                learning_rate=optimizer.learning_rate_at(number, STEPS),
                beta1=optimizer.beta1,
                beta2=optimizer.beta2,
                eps=optimizer.eps,
                weight_decay=optimizer.weight_decay,
                grad_clip_norm=optimizer.clip_grad,
            )
            norm = train.result().optim_step(settings).result().metrics["grad_norm"]
            assert math.isfinite(norm)
            passed.result()
        path = train.result().save_state("end").result().path
        name = CheckpointName.parse(path)
        _, found = server.state.store.load(name, server.state.model.base_digest)
        client.close("success").result()
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
