"""Whether SGLang servers hold what they were sent: checksums of a sample, taken on both sides.

SGLang's GPT-OSS cannot be asked for a tensor (``/get_weights_by_name`` is an error for this model), but its
``/weights_checker`` hashes every parameter where it lies: QKV in one, experts output-major, biases of experts in fp32,
each rank its own shard. Here the same numbers come from Hugging Face tensors as they pass on their way to the servers.

Sources: ``srt/models/gpt_oss.py``, ``srt/utils/weight_checker.py`` and ``kernels/ops/memory/gpu_tensor_hash.py`` of
SGLang 0.5.17."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron_gptoss.config import ModelConfig

VOCABULARY_PADDING = 64  # SGLang's; padded embeddings are not compared
SPLIT = {"sinks": 0, "embed_tokens.weight": 0, "lm_head.weight": 0, "o_proj.weight": 1, "w13_weight": 1, "w2_weight": 2}
SPLIT["w13_weight_bias"] = 1  # the dimension that tensor-parallel ranks share; of others each has all
PIECE = 1 << 24  # bytes: what a hash works on at a time, or one expert
TILE = 8192  # words of 32 bits; from here on constants of SGLang's hash on GPUs
HALVES = ((0x27D4EB2D, 0x243F6A88, 15), (0x165667B1, 0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF, 13))  # factor, seed, turn
MIX = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))  # shift, factor
SPLIT_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def sampled_parameters(config: ModelConfig, version: int) -> dict[str, list[str]]:
    """SGLang's parameters to compare after sync ``version``, and the Hugging Face tensors that each is made of: all of
    one layer and one outside the layers. Other versions bring all others their turn."""
    layer = f"model.layers.{version % config.num_layers}"
    outside = ["model.norm.weight"]
    if config.vocab_size % VOCABULARY_PADDING == 0:
        outside += ["model.embed_tokens.weight", "lm_head.weight"]
    whole = "input_layernorm.weight post_attention_layernorm.weight mlp.router.weight mlp.router.bias"
    whole += " self_attn.sinks self_attn.o_proj.weight self_attn.o_proj.bias"
    names = [outside[version % len(outside)], *(f"{layer}.{name}" for name in whole.split())]
    parameters = {name: [name] for name in names}
    for kind in ("weight", "bias"):
        parameters[f"{layer}.self_attn.qkv_proj.{kind}"] = [f"{layer}.self_attn.{x}_proj.{kind}" for x in "qkv"]
    for name, source in (("w13_weight", "gate_up_proj"), ("w2_weight", "down_proj")):
        for tail in ("", "_bias"):
            parameters[f"{layer}.mlp.experts.{name}{tail}"] = [f"{layer}.mlp.experts.{source}{tail}"]
    return parameters


class WeightSample:
    """The samples of some versions in one. ``server_info`` is what a server answers to /server_info."""

    def __init__(self, config: ModelConfig, versions: range, ranks: int, server_info: dict[str, Any]) -> None:
        self._groups, self._ranks, self._info = config.num_key_value_heads, ranks, server_info
        self._sources = {name: s for version in versions for name, s in sampled_parameters(config, version).items()}
        if server_info["ep_size"] > 1 or server_info["enable_dp_attention"]:  # who has what else is not known here
            self._sources = {name: s for name, s in self._sources.items() if "norm" in name or "router" in name}
        self._parameters = {source: name for name, sources in self._sources.items() for source in sources}
        self._passed: dict[str, torch.Tensor] = {}
        self._expected: dict[str, list[str]] = {}

    def watch(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors; those of the sample are hashed as they pass."""
        for name, tensor in named:
            if parameter := self._parameters.get(name):
                self._passed[name] = tensor
                sources = self._sources[parameter]
                if all(source in self._passed for source in sources):
                    parts = [self._passed.pop(source) for source in sources]
                    self._expected[parameter] = [self._checksum(parameter, parts, r) for r in range(self._ranks)]
                    del parts
            yield name, tensor
            del tensor  # or it would outlive its bucket

    def first_difference(self, answer: dict[str, Any]) -> str | None:
        """Hugging Face tensors that a server with this answer to /weights_checker does not hold as they were sent."""
        for parameter, expected in self._expected.items():
            for rank in answer["ranks"]:
                if rank["checksums"].get(parameter) != expected[rank["parallelism_info"]["tp_rank"]]:
                    return ", ".join(self._sources[parameter])
        return None

    def _checksum(self, parameter: str, parts: list[torch.Tensor], rank: int) -> str:
        dtype = getattr(torch, self._info["dtype"])
        if parameter.endswith("_weight_bias"):
            dtype = torch.float32
        elif parameter.endswith("sinks"):
            dtype = torch.float32 if self._info["attention_backend"] == "trtllm_mha" else torch.bfloat16
        parts = [part.to(dtype) for part in self._shard(parameter, parts, rank)]
        return f"{_cpu_hash(parts) if self._info['device'] == 'cpu' else gpu_hash(parts):016x}"

    def _shard(self, parameter: str, parts: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """What tensor-parallel ``rank`` holds of ``parameter``: views to be joined along dim 0."""
        if "qkv_proj" in parameter:  # ranks share key and value heads if they are more
            shards = [min(self._ranks, heads) for heads in (self._ranks, self._groups, self._groups)]
            return [part.chunk(n)[rank * n // self._ranks] for part, n in zip(parts, shards, strict=True)]
        (part,) = parts
        if parameter.endswith("w2_weight_bias"):
            return [torch.zeros_like(part) if rank else part]  # the ranks' outputs are added up
        if parameter.endswith(("w13_weight", "w2_weight")):
            part = part.mT
        dim = next((dim for end, dim in SPLIT.items() if parameter.endswith(end)), None)
        return [part if dim is None else part.chunk(self._ranks, dim)[rank]]


def _pieces(parts: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of all parts in order, uint8."""
    for part in parts:
        rows = max(1, PIECE * len(part) // part.nbytes)
        for piece in part.split(rows):
            yield piece.contiguous().view(-1).view(torch.uint8)


def _cpu_hash(parts: list[torch.Tensor]) -> int:
    digest = hashlib.sha256()
    for piece in _pieces(parts):
        digest.update(piece.cpu().numpy())
    return int.from_bytes(digest.digest()[:8], "big")


def gpu_hash(parts: list[torch.Tensor]) -> int:
    """What SGLang's Triton kernel computes, on any device: per tile two sums of 32 bits, over words mixed with their
    places; the sum of 64 bits over the tiles is mixed once more."""
    size, first = -(-sum(part.nbytes for part in parts) // 4) * 4, 0
    total = torch.zeros((), dtype=torch.int64, device=parts[0].device)
    for tiles in _tiles(parts):
        place = torch.arange(first, first + tiles.numel(), dtype=torch.int32, device=tiles.device).view_as(tiles)
        first += tiles.numel()
        for factor, seed, turn in HALVES:
            word = place * factor
            word += _int32(seed)
            word ^= (place << turn) | (place >> (32 - turn))
            word ^= tiles
            half = _mixed(_mixed(word).sum(1, dtype=torch.int32) ^ _int32(size)).long() & 0xFFFFFFFF
            total += (half << 32 if factor == HALVES[0][0] else half).sum()
    value = int(total) & (1 << 64) - 1
    for shift, factor in SPLIT_MIX:
        value = (value ^ value >> shift) * factor & (1 << 64) - 1
    return value


def _tiles(parts: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The words of all parts, int32 [tiles, TILE], in the end the [1, rest], padded to whole words."""
    rest = torch.empty(0, dtype=torch.uint8, device=parts[0].device)
    for piece in _pieces(parts):
        rest = torch.cat([rest, piece])
        whole = rest.numel() // (4 * TILE) * 4 * TILE
        yield rest[:whole].view(torch.int32).view(-1, TILE)
        rest = rest[whole:]
    if rest.numel():
        yield torch.cat([rest, rest.new_zeros(-rest.numel() % 4)]).view(torch.int32)[None]


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """The finalizer of MurmurHash3, in place."""
    for shift, factor in MIX:
        words ^= (words >> shift) & (1 << 32 - shift) - 1  # >> keeps the sign
        words *= _int32(factor)
    return words


def _int32(value: int) -> int:
    """The signed integer with the lowest 32 bits of ``value``."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
