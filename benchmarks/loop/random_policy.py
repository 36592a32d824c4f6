"""Random weights of a policy that calls Python, for ``benchmarks.loop``.

A model with ordinary random weights never ends a turn, so every episode would be one long turn
without tools. Here, the layers neither read nor write a few channels of the residual stream. These
channels carry the bias of the next token's logits from the embedding to the head.

After "assistant", the header of a call and ``print(7) #`` follow almost certainly. Text follows,
which depends on the layers' random output. Every token of the text ends the turn with the same
probability. Therefore, all turns are calls that run, and their lengths have a geometric
distribution. Log-probs and routes of the text depend on all layers, as in a trained model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from converters.names import hf_shapes
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.harmony.codec import Harmony, ParsedMessage

PROGRAM = "print(7) #"
"""Program of every call. The text after it is a comment."""
BREAKS = ("\n", "\r", "\0")
"""Characters that would end the comment."""
LAYERS_VARIANCE = 0.3
"""Approximate variance that all layers add to a residual stream of variance 1."""
BIAS_STD = 0.1
"""Standard deviation of biases. Activations have a variance of about 1."""
CERTAIN = 100.0
"""Logit of a token that always follows."""
IMPOSSIBLE = -30.0
"""Logit of a token that never follows."""


@dataclass(frozen=True)
class NextTokens:
    """Dependence of the next token on the last one."""

    chain: list[int]
    """Ids of which each is followed by the next one."""
    impossible: list[int]
    """Ids that follow only their predecessor in the chain."""
    end: int
    """Id that ends a turn."""
    turn_tokens: int
    """Mean number of text tokens in a turn."""

    @property
    def channels(self) -> int:
        """Number of reserved channels of the residual stream: one for all tokens, one per link."""
        return len(self.chain)


def next_tokens(harmony: Harmony, turn_tokens: int) -> NextTokens:
    """Return the ids of a call's header and program, and those that must not appear in its text.

    Args:
        harmony: codec of the run.
        turn_tokens: mean number of text tokens in a turn.

    Raises:
        ValueError: if the header needs the same token twice with different successors.
    """
    call = ParsedMessage("analysis", "python", "code", PROGRAM)
    *header, end = harmony.render_assistant([call], "<|call|>")
    chain = [harmony.assistant_header[-1], *header]
    if len(set(chain)) < len(chain):
        raise ValueError(f"a token of the call's header repeats: {chain}")

    impossible = []
    for token in range(harmony.vocabulary.size):
        text = harmony.decode_token(token)
        is_special = text.startswith("<|") and text.endswith("|>")
        if token != end and (is_special or any(mark in text for mark in BREAKS)):
            impossible.append(token)
    return NextTokens(chain, impossible, end, turn_tokens)


def policy_weights(
    config: GptOssModelConfig, following: NextTokens, dtype: torch.dtype, device: str, seed: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all weights by Hugging Face name, one tensor at a time.

    Matrices keep the variance of activations. Those that write to the residual stream are divided
    by the square root of twice the number of layers, as in GPT-2. Biases are small but not zero, so
    that a bias that is lost in a weight sync increases the mismatch.

    Args:
        config: configuration of the model.
        following: dependence of the next token on the last one.
        dtype: dtype of the weights.
        device: device of the weights.
        seed: seed of the random numbers.
    """
    generator = torch.Generator(device).manual_seed(seed)
    aside = following.channels

    for name, shape in hf_shapes(config).items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name == "model.embed_tokens.weight":
            tensor.normal_(0, 1, generator=generator)
            _mark_tokens(tensor, following)
        elif name == "lm_head.weight":
            tensor.normal_(0, shape[-1] ** -0.5, generator=generator)
            _bias_next_tokens(tensor, following)
        elif "norm" in name:
            tensor.fill_(1)
            if name != "model.norm.weight":
                tensor[:aside] = 0
        elif name.endswith("sinks"):
            tensor.normal_(0, 1, generator=generator)
        elif name.endswith("bias"):
            _draw_bias(name, tensor, config, aside, generator)
        else:
            _draw_matrix(name, tensor, config, aside, generator)
        yield name, tensor


def _draw_matrix(
    name: str,
    tensor: torch.Tensor,
    config: GptOssModelConfig,
    aside: int,
    generator: torch.Generator,
) -> None:
    # Experts are [experts, in, out], all other matrices are [out, in].
    is_expert = tensor.dim() == 3
    inputs = tensor.shape[1] if is_expert else tensor.shape[-1]
    std = inputs**-0.5
    writes_residual = name.endswith(("o_proj.weight", "down_proj"))
    if writes_residual:
        std /= math.sqrt(2 * config.num_layers)
    tensor.normal_(0, std, generator=generator)

    if writes_residual and is_expert:
        tensor[:, :, :aside] = 0
    elif writes_residual:
        tensor[:aside] = 0


def _draw_bias(
    name: str,
    tensor: torch.Tensor,
    config: GptOssModelConfig,
    aside: int,
    generator: torch.Generator,
) -> None:
    tensor.normal_(0, BIAS_STD, generator=generator)
    if name.endswith(("o_proj.bias", "down_proj_bias")):
        tensor /= math.sqrt(2 * config.num_layers)
        tensor[..., :aside] = 0


def _mark_tokens(embedding: torch.Tensor, following: NextTokens) -> None:
    """Set channel 0 for every token, and channel i for link i of the chain."""
    width = embedding.shape[1]
    embedding[:, : following.channels] = 0
    embedding[:, 0] = _common_mark(width)
    for link, token in enumerate(following.chain[:-1], start=1):
        embedding[token, link] = _link_mark(width)


def _bias_next_tokens(head: torch.Tensor, following: NextTokens) -> None:
    """Set the head's weights [vocabulary, width], which read the marks of the residual stream."""
    vocabulary, width = head.shape
    common = _common_mark(width)
    link_mark = _link_mark(width)
    text_rms = math.sqrt(1 + LAYERS_VARIANCE + common**2 / width)
    link_rms = math.sqrt(1 + LAYERS_VARIANCE + (common**2 + link_mark**2) / width)

    head[:, : following.channels] = 0
    head[following.impossible, 0] = IMPOSSIBLE * text_rms / common
    for link, token in enumerate(following.chain[1:], start=1):
        head[token, link] = CERTAIN * link_rms / link_mark

    # On average, each other token has the weight exp(variance of the logits / 2).
    others = vocabulary - len(following.impossible)
    logit_variance = (1 + LAYERS_VARIANCE) / text_rms**2
    log_weight = math.log(others) + logit_variance / 2
    # The logit of the end has no random part, so every token ends the turn equally likely.
    head[following.end] = 0
    head[following.end, 0] = (log_weight - math.log(following.turn_tokens)) * text_rms / common


def _common_mark(width: int) -> float:
    return math.sqrt(width) / 2


def _link_mark(width: int) -> float:
    return math.sqrt(width)
