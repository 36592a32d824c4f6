"""Weights made for the certificate: small, of GPT-OSS's shape, and such that every fault shows.

Trained weights hide faults: biases that are nearly zero, activations that never reach the clamp,
sinks that hardly count, one key of 128 more or less. Here each of them matters. Two sets are made,
so that an update from the one to the other can be watched.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from converters.hf_directory import HfDirectory, write_hf_directory
from converters.model_extras import ModelExtras
from converters.names import hf_shapes
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.named_random import named_generator
from megatron_gptoss.untrusted_files import MAX_LISTING_BYTES, read_bytes
from megatron_gptoss.user_error import UserError
from rl_loop.certify.harmony_tokens import CONVERSATION_TEXT
from rl_loop.harmony.vocabulary import GptOssVocabulary, TinyVocabulary, Vocabulary

Size = Literal["tiny", "small", "gpu"]
Precision = Literal["fp32", "bf16"]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

FIRST = "first"
SECOND = "second"
"""Directories of the two sets of weights."""

BEACON = 7
"""A token that all queries of window layers attend to as long as it is in their window."""
BEACON_KEY = 8.0
"""The beacon's key in the channel of BEACON_SCORE."""


class CertifyError(UserError, ValueError):
    """What is to be certified, or with what, cannot be used; the message says why."""


SIZES: dict[Size, GptOssModelConfig] = {
    # For tests: everything at an eighth of its length.
    "tiny": GptOssModelConfig(
        num_layers=4,
        num_experts=8,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_size=16,
        vocab_size=512,
        sliding_window=16,
        yarn_original_length=512,
        max_length=16_384,
    ),
    # For CPUs: GPT-OSS's own window and lengths.
    "small": GptOssModelConfig(
        num_layers=4,
        num_experts=8,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_size=32,
        vocab_size=512,
    ),
    # Widths that the kernels of GPU engines take.
    "gpu": GptOssModelConfig(
        num_layers=4,
        num_experts=32,
        hidden_size=512,
        intermediate_size=512,
        num_attention_heads=16,
        num_key_value_heads=2,
        vocab_size=512,
    ),
}
"""hidden_size = intermediate_size, as in the released models: a down projection that was transposed
passes every check of shapes."""


@dataclass(frozen=True)
class Weights:
    """One set of weights."""

    config: GptOssModelConfig
    tensors: Mapping[str, Tensor]
    """By Hugging Face name."""
    directory: Path


@cache
def vocabulary() -> TinyVocabulary:
    """Make the vocabulary of the certificate's own models."""
    return TinyVocabulary(SIZES["tiny"].vocab_size, CONVERSATION_TEXT)


def vocabulary_of(directory: Path, size: int) -> Vocabulary | None:
    """Return the vocabulary of a model; None if it is neither GPT-OSS's nor the certificate's."""
    if size == GptOssVocabulary().size:
        return GptOssVocabulary()

    # The certificate's own is known by its tokenizer.
    file = directory / "tokenizer.json"
    own = vocabulary()
    if size != own.size or not file.exists():
        return None
    with tempfile.TemporaryDirectory() as expected:
        own.save(Path(expected))
        own_tokenizer = (Path(expected) / file.name).read_bytes()
        is_own = own_tokenizer == read_bytes(file, MAX_LISTING_BYTES)
    return own if is_own else None


def prepare(directory: Path, size: Size, precision: Precision, seed: int = 0) -> None:
    """Write both sets of weights as Hugging Face directories, with the tokenizer.

    Raises ConversionError if ``directory`` holds them already.
    """
    tokenizer = directory / "tokenizer"
    tokenizer.mkdir(parents=True, exist_ok=True)
    files = vocabulary().save(tokenizer)
    for number, name in enumerate((FIRST, SECOND)):
        config = SIZES[size]
        tensors = designed_weights(config, 2 * seed + number)
        stored = ((key, tensor.to(DTYPES[precision])) for key, tensor in tensors)
        write_hf_directory(directory / name, config, stored, extras=ModelExtras.of_files(files))


@contextmanager
def prepared(directory: Path | None, size: Size, precision: Precision) -> Iterator[Path]:
    """Yield ``directory``, or without one a temporary directory with weights that are made."""
    if directory is not None:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="gptoss-certify-") as made:
        prepare(Path(made), size, precision)
        yield Path(made)


def read_weights(directory: Path) -> Weights:
    """Read a Hugging Face directory. Raises ConversionError or CertifyError naming what is wrong."""
    opened = HfDirectory(directory)
    if not isinstance(opened.config, GptOssModelConfig):
        raise CertifyError(f"{directory}: model_type is {opened.config.model_type}, not gpt_oss")
    tensors = {name: opened.get(name) for name in opened.names()}
    return Weights(opened.config, tensors, directory)


def designed_weights(config: GptOssModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors, fp32, by Hugging Face name.

    They depend on the seed and their name only.
    """
    for name, shape in hf_shapes(config).items():
        noise = torch.randn(shape, generator=named_generator(seed, name))
        yield name, _designed(name, noise, config)


def _designed(name: str, noise: Tensor, config: GptOssModelConfig) -> Tensor:
    """Scale standard normal ``noise`` to what a tensor should be."""
    width = config.hidden_size**-0.5
    if "norm" in name:
        return 1 + 0.1 * noise
    if name.endswith("embed_tokens.weight"):
        # The last channel belongs to the beacon: nobody else is seen by it.
        noise[:, -1] = 0
        noise[BEACON, -1] = config.hidden_size**0.5
        return noise
    if name.endswith("lm_head.weight"):
        return 2 * width * noise

    layer = int(name.split(".")[2])
    if "self_attn" in name:
        return _designed_attention(name, noise, config, has_beacon=layer % 2 == 0)
    if name.endswith("router.weight"):
        return 2 * width * noise
    if name.endswith("router.bias"):
        return noise
    # One channel of five is beyond the clamp of 7; of them some would be without the bias, too.
    if name.endswith("gate_up_proj"):
        return 4 * width * noise
    if name.endswith("gate_up_proj_bias"):
        return 4 * noise
    if name.endswith("down_proj_bias"):
        return 0.3 * noise
    return 0.15 * config.intermediate_size**-0.5 * noise


def _designed_attention(
    name: str, noise: Tensor, config: GptOssModelConfig, has_beacon: bool
) -> Tensor:
    """The same for the tensors of attention."""
    width = config.hidden_size**-0.5
    if name.endswith("sinks"):
        # As much as all keys of a window together.
        return math.log(config.sliding_window) + noise
    if name.endswith(("o_proj.weight", "o_proj.bias")):
        return 2 * (config.num_attention_heads * config.head_size) ** -0.5 * noise
    if name.endswith("v_proj.weight"):
        return width * noise
    if name.endswith("v_proj.bias"):
        return 0.3 * noise

    tensor = 1.2 * width * noise if name.endswith("weight") else 0.5 * noise
    if has_beacon:
        # The slowest pair of rotary channels hardly turns within a window.
        heads = tensor.unflatten(0, (-1, config.head_size))
        slowest = config.head_size // 2 - 1
        if name.endswith("k_proj.weight"):
            heads[:, slowest] = 0
            heads[:, slowest, -1] = BEACON_KEY * 2**0.5 * width
        elif name.endswith("q_proj.bias"):
            heads[:, slowest] = _beacon_query(config)
    return tensor


def _beacon_query(config: GptOssModelConfig) -> float:
    """Return the query that gives the beacon e^3 times the weight of a whole window."""
    concentration = 0.1 * math.log(config.yarn_factor) + 1
    score = math.log(config.sliding_window) + 3
    return score * config.head_size**0.5 / (BEACON_KEY * concentration**2)
