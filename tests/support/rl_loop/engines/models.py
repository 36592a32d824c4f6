"""A tiny GPT-OSS with random parameters, and the results of a plain forward pass."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from rl_loop.engines.embedded.engine import TransformersEngine
from rl_loop.engines.protocol import GenerateRequest, SamplingParams

VOCAB = 96
LAYERS, TOP_K = 4, 3


def tiny_config(intermediate_size: int = 24) -> GptOssConfig:
    """Return a model with a window of 8 (shorter than texts), hidden != intermediate, and YaRN."""
    return GptOssConfig(
        num_hidden_layers=LAYERS,
        hidden_size=32,
        intermediate_size=intermediate_size,
        num_local_experts=6,
        num_experts_per_tok=TOP_K,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        pad_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )


def reference_model(
    seed: int = 0, dtype: torch.dtype = torch.float32, intermediate_size: int = 24
) -> GptOssForCausalLM:
    """Return a model with eager attention. Biases and sinks are random, so that tests see them."""
    torch.manual_seed(seed)
    model = GptOssForCausalLM(tiny_config(intermediate_size)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.15)
    return model.to(dtype)


def build_engine(model: GptOssForCausalLM, **options: object) -> TransformersEngine:
    """Return an engine with a copy of the model's weights."""
    engine = TransformersEngine.from_config(model.config, dtype=model.dtype, **options)
    asyncio.run(engine.sync_weights(model.state_dict().items(), 1))
    return engine


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


_ids = itertools.count()


def request(
    tokens: list[int], new: int, *, routes: bool = False, **sampling: object
) -> GenerateRequest:
    return GenerateRequest(f"r{next(_ids)}", tokens, SamplingParams(new, **sampling), routes)  # type: ignore[arg-type]


def plain_log_probs(
    model: GptOssForCausalLM, tokens: list[int], temperature: float = 1.0
) -> list[float]:
    """Return the log-probs of tokens[1:] from one forward pass without a cache."""
    logits = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0].double()
    return (
        torch.log_softmax(logits / temperature, -1)
        .gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        .tolist()
    )


def plain_routes(model: GptOssForCausalLM, tokens: list[int]) -> np.ndarray:
    """Return routes [len(tokens) - 1, layers, top_k] from one forward pass without a cache."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.router.register_forward_hook(
            lambda _module, _input, output: seen.append(output[2])
        )
        for layer in model.model.layers
    ]
    model(torch.tensor([tokens[:-1]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1).numpy()


@contextmanager
def held(engine: TransformersEngine) -> Iterator[None]:
    """Keep the engine's thread busy, so that requests during that time start in the same step."""
    release = threading.Event()
    engine._thread.submit(release.wait)
    try:
        yield
    finally:
        release.set()
