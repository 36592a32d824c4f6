"""SGLang's attention kernels for CPUs in plain torch: with them the stock SGLang serves GPT-OSS without a GPU.

The signatures are those with which SGLang 0.5.17 calls its ``intel_amx`` backend. Other kernels of the package raise.
"""

from __future__ import annotations

from typing import Any

import torch


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: int,
    scale: float,
    window: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [n, heads, d] at positions first ..., key and value [m, groups, d] from position 0 on -> [n, heads, d]."""
    share = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(share, dim=1) for x in (key, value))
    scores = torch.einsum("nhd,mhd->hnm", query.float(), key) * scale
    distance = torch.arange(first, first + len(query))[:, None] - torch.arange(len(key))[None]
    hidden = (distance < 0) | ((distance >= window) if window > 0 else False)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(query), 1)], dim=-1)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1)[..., : len(key)], value)


def extend_attention_cpu(
    q: torch.Tensor, k: Any, v: Any, output: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    request_to_token: torch.Tensor, requests: torch.Tensor, lengths: torch.Tensor, new: torch.Tensor,
    starts: torch.Tensor, longest: int, scale: float, cap: float, cross: Any, window: int, encoder: Any,
    sinks: torch.Tensor | None, tree: Any = None,
) -> None:  # fmt: skip
    for request, length, count, start in zip(requests, lengths.tolist(), new.tolist(), starts.tolist(), strict=True):
        slots = request_to_token[request, :length].long()
        part = slice(start, start + count)
        output[part] = _attend(q[part], keys[slots], values[slots], length - count, scale, window, sinks).to(q.dtype)


def decode_attention_cpu(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, output: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    slots_of_new: torch.Tensor, logits: Any, request_to_token: torch.Tensor, requests: torch.Tensor,
    lengths: torch.Tensor, scale: float, cap: float, cross: Any, window: int, encoder: Any, sinks: torch.Tensor | None,
) -> None:  # fmt: skip
    keys[slots_of_new] = k.view(-1, *keys.shape[1:]).to(keys.dtype)
    values[slots_of_new] = v.view(-1, *values.shape[1:]).to(values.dtype)
    for i, (request, length) in enumerate(zip(requests, lengths.tolist(), strict=True)):
        slots = request_to_token[request, :length].long()
        output[i : i + 1] = _attend(q[i : i + 1], keys[slots], values[slots], length - 1, scale, window, sinks).to(
            q.dtype
        )


for kernel in (extend_attention_cpu, decode_attention_cpu):
    setattr(torch.ops.sgl_kernel, kernel.__name__, kernel)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{name} has no stand-in for CPUs")

    return missing
