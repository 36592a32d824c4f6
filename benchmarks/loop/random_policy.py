"""Random weights of a policy that calls Python: what ``benchmarks.loop`` starts from.

A model of random weights never ends a turn, so every episode would be one long turn and no tool
would run. Here a few channels of the residual stream are set aside, which the layers neither read
nor write: they carry from the embedding to the head what the next token's logits are biased by.
After "assistant" the header of a call and ``print(7) #`` follow almost surely; then comes text, as
random as the layers' output makes it, whose every token ends the turn with the same probability.
So all turns are calls that run, their lengths are geometrically distributed, and log-probs and
routes of the text depend on all layers, as a trained model's do.
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
"""What every call runs; the text behind it is a comment."""
BREAKS = ("\n", "\r", "\0")
"""What would end the comment."""
LAYERS_VARIANCE = 0.3
"""Of what all layers together add to a residual stream of variance 1, about."""
BIAS_STD = 0.1
"""Of biases, where what goes through the matrices has a variance of about 1."""
CERTAIN = 100.0
"""Logit of a token that always follows."""
IMPOSSIBLE = -30.0
"""Logit of a token that never does."""


@dataclass(frozen=True)
class NextTokens:
    """How the next token depends on the last one."""

    chain: list[int]
    """Each of these ids is followed by the next one."""
    impossible: list[int]
    """Ids that follow nothing but their predecessor in the chain."""
    end: int
    """The id that ends a turn."""
    turn_tokens: int
    """Mean length of the text before it."""

    @property
    def channels(self) -> int:
        """Of the residual stream that are set aside: one for all tokens, one for each link."""
        return len(self.chain)


def next_tokens(harmony: Harmony, turn_tokens: int) -> NextTokens:
    """Find the ids of a call's header and program, and of what must not appear in its text.

    Raises ValueError if the header needs the same token twice with different successors."""
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
    """Draw all weights by Hugging Face name, one tensor at a time.

    Matrices keep the variance of what goes through them; those that write to the residual stream
    are smaller by the square root of twice the layers, as GPT-2's are. Biases are smaller, but not
    zero: one that is lost on the way to a server has to be seen in the mismatch."""
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
    # Experts are [experts, in, out], everything else is [out, in].
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
    """Read the marks: ``head`` [vocabulary, width] times the normalized residual stream."""
    vocabulary, width = head.shape
    common = _common_mark(width)
    link_mark = _link_mark(width)
    text_rms = math.sqrt(1 + LAYERS_VARIANCE + common**2 / width)
    link_rms = math.sqrt(1 + LAYERS_VARIANCE + (common**2 + link_mark**2) / width)

    head[:, : following.channels] = 0
    head[following.impossible, 0] = IMPOSSIBLE * text_rms / common
    for link, token in enumerate(following.chain[1:], start=1):
        head[token, link] = CERTAIN * link_rms / link_mark

    # All other tokens together weigh exp(variance of their logits / 2) each.
    others = vocabulary - len(following.impossible)
    logit_variance = (1 + LAYERS_VARIANCE) / text_rms**2
    log_weight = math.log(others) + logit_variance / 2
    # Nothing random in its own logit: every token of the text ends the turn alike.
    head[following.end] = 0
    head[following.end, 0] = (log_weight - math.log(following.turn_tokens)) * text_rms / common


def _common_mark(width: int) -> float:
    return math.sqrt(width) / 2


def _link_mark(width: int) -> float:
    return math.sqrt(width)
