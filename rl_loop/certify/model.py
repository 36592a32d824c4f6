"""Small synthetic GPT-OSS weights for the checks.

Trained weights hide faults: biases are nearly zero, activations do not reach the clamp, sinks have
little weight, and one more key of 128 hardly matters. These weights make every fault visible. There
are two sets, so that an update from the first to the second can be tested.
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
from megatron_gptoss.config.precision import Precision, torch_dtype
from megatron_gptoss.families.gpt_oss.config import RELEASED_VOCABULARY, GptOssModelConfig
from megatron_gptoss.named_random import named_generator
from megatron_gptoss.user_error import UserError
from rl_loop.certify.harmony_tokens import CONVERSATION_TEXT
from rl_loop.chat.tokenizer_vocabulary import TOKENIZER_FILE, added_tokens, read_vocabulary
from rl_loop.harmony.vocabulary import (
    GptOssVocabulary,
    HarmonyTokenizer,
    TinyVocabulary,
    Vocabulary,
)

Size = Literal["tiny", "small", "gpu"]

FIRST = "first"
SECOND = "second"
"""Directory names of the two sets of weights."""

BEACON = 7
"""Beacon: a token that all queries of window layers attend to while it is in their window."""
BEACON_KEY = 8.0
"""Size of the beacon's key in the slowest rotary channel."""


class CertifyError(UserError, ValueError):
    """Implementation, weights or option that cannot be used."""


SIZES: dict[Size, GptOssModelConfig] = {
    # For tests: about an eighth of the lengths.
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
    # For CPUs: GPT-OSS's window and lengths.
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
    # For GPUs: sizes that the kernels of engines support.
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
"""hidden_size equals intermediate_size, as in the released models. Therefore checks of shapes do
not detect a transposed down projection."""


@dataclass(frozen=True)
class WeightSet:
    """One set of weights."""

    config: GptOssModelConfig
    tensors: Mapping[str, Tensor]
    """Tensors by Hugging Face name."""
    directory: Path


@cache
def vocabulary() -> TinyVocabulary:
    """Return the vocabulary of the synthetic models."""
    # TinyVocabulary splits the text of its corpus as GPT-OSS's vocabulary does.
    return TinyVocabulary(SIZES["tiny"].vocab_size, CONVERSATION_TEXT)


def find_vocabulary(directory: Path, size: int) -> Vocabulary | None:
    """Return the vocabulary of a model. None if it lacks Harmony's special tokens.

    Raises:
        TokenizerError: if the tokenizer cannot be read.
    """
    # Models with GPT-OSS's ids need no tokenizer.
    if size == RELEASED_VOCABULARY:
        return GptOssVocabulary()
    if not (directory / TOKENIZER_FILE).exists():
        return None
    if not added_tokens(directory).issuperset(HarmonyTokenizer.required_tokens):
        return None
    return read_vocabulary(HarmonyTokenizer, directory, size)


def prepare(directory: Path, size: Size, precision: Precision, seed: int = 0) -> None:
    """Write both sets of weights as Hugging Face directories, with the tokenizer.

    Args:
        directory: parent of the directories.
        size: key of SIZES.
        precision: dtype of the tensors.
        seed: seed of the weights.

    Raises:
        ConversionError: if the directories already exist.
    """
    tokenizer = directory / "tokenizer"
    tokenizer.mkdir(parents=True, exist_ok=True)
    files = vocabulary().save(tokenizer)
    for number, name in enumerate((FIRST, SECOND)):
        config = SIZES[size]
        # Seeds 2s and 2s + 1, so that different values of ``seed`` share no set of weights.
        tensors = designed_weights(config, 2 * seed + number)
        stored = ((key, tensor.to(torch_dtype(precision))) for key, tensor in tensors)
        write_hf_directory(directory / name, config, stored, extras=ModelExtras.of_files(files))


@contextmanager
def prepare_model(directory: Path | None, size: Size, precision: Precision) -> Iterator[Path]:
    """Yield ``directory``, or a temporary directory with new weights if it is None."""
    if directory is not None:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="gptoss-certify-") as made:
        prepare(Path(made), size, precision)
        yield Path(made)


def read_weights(directory: Path) -> WeightSet:
    """Read a Hugging Face directory. Raises ConversionError or CertifyError if it is invalid."""
    opened = HfDirectory(directory)
    # HfDirectory also reads dense models, which have no sinks and no experts to check.
    if not isinstance(opened.config, GptOssModelConfig):
        raise CertifyError(
            f"{directory}: model_type is {opened.config.model_type}, expected gpt_oss. Only GPT-OSS "
            "models can be certified"
        )
    tensors = {name: opened.get(name) for name in opened.names()}
    return WeightSet(opened.config, tensors, directory)


def designed_weights(config: GptOssModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors in fp32 by Hugging Face name.

    Values depend only on the seed and the name.
    """
    for name, shape in hf_shapes(config).items():
        noise = torch.randn(shape, generator=named_generator(seed, name))
        yield name, _scale_noise(name, noise, config)


def _scale_noise(name: str, noise: Tensor, config: GptOssModelConfig) -> Tensor:
    """Scale standard normal ``noise`` to a tensor's distribution."""
    # A projection with this standard deviation keeps the scale of its normalized input.
    width = config.hidden_size**-0.5
    if "norm" in name:
        # Not exactly 1, because a norm whose weight is ignored would not be noticed.
        return 1 + 0.1 * noise
    if name.endswith("embed_tokens.weight"):
        # Only the beacon uses the last channel.
        noise[:, -1] = 0
        # As large as all other channels together, so that RMSNorm makes it sqrt(hidden_size / 2).
        noise[BEACON, -1] = config.hidden_size**0.5
        return noise
    if name.endswith("lm_head.weight"):
        # Logits with a standard deviation of about 2: neither uniform nor certain.
        return 2 * width * noise

    layer = int(name.split(".")[2])
    if "self_attn" in name:
        # The window layers of GPT-OSS are the even ones.
        return _scale_attention_noise(name, noise, config, has_beacon=layer % 2 == 0)
    if name.endswith("router.weight"):
        return 2 * width * noise
    # Half the size of the other logits, so that it decides which experts are chosen.
    if name.endswith("router.bias"):
        return noise
    # A fifth of the channels exceeds the clamp of 7. Some of them do so only because of the bias.
    if name.endswith("gate_up_proj"):
        return 4 * width * noise
    if name.endswith("gate_up_proj_bias"):
        return 4 * noise
    if name.endswith("down_proj_bias"):
        return 0.3 * noise
    # Clamped activations reach 7 x 8 = 56. Keep experts from outweighing the residual stream.
    return 0.15 * config.intermediate_size**-0.5 * noise


def _scale_attention_noise(
    name: str, noise: Tensor, config: GptOssModelConfig, has_beacon: bool
) -> Tensor:
    """Scale ``noise`` to the distribution of an attention tensor."""
    width = config.hidden_size**-0.5
    if name.endswith("sinks"):
        # A sink has the weight of all keys in a window together.
        return math.log(config.sliding_window) + noise
    if name.endswith(("o_proj.weight", "o_proj.bias")):
        return 2 * (config.num_attention_heads * config.head_size) ** -0.5 * noise
    if name.endswith("v_proj.weight"):
        return width * noise
    if name.endswith("v_proj.bias"):
        return 0.3 * noise

    tensor = 1.2 * width * noise if name.endswith("weight") else 0.5 * noise
    if has_beacon:
        # The slowest pair of rotary channels hardly rotates within a window.
        # In transformers a pair has the channels i and i + head_size / 2, and small i rotate faster.
        heads = tensor.unflatten(0, (-1, config.head_size))
        slowest = config.head_size // 2 - 1
        if name.endswith("k_proj.weight"):
            # The key depends only on the beacon's input channel, so all other tokens have none.
            heads[:, slowest] = 0
            # This cancels the sqrt(hidden_size / 2) of the beacon's channel, so the key is
            # BEACON_KEY.
            heads[:, slowest, -1] = BEACON_KEY * 2**0.5 * width
        elif name.endswith("q_proj.bias"):
            heads[:, slowest] = _beacon_query(config)
    return tensor


def _beacon_query(config: GptOssModelConfig) -> float:
    """Return the query that gives the beacon e^3 times the weight of a whole window."""
    # YaRN multiplies queries and keys by this factor, so scores by its square.
    concentration = 0.1 * math.log(config.yarn_factor) + 1
    score = math.log(config.sliding_window) + 3
    return score * config.head_size**0.5 / (BEACON_KEY * concentration**2)
