"""Plugin that adds sinks to SGLang's torch_native attention, to run GPT-OSS on any CPU."""

from __future__ import annotations

from typing import Any

import torch


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Attend with sinks.

    Args are query [n, heads, d], whose positions are the last ones of key and value [m, groups, d].
    A window of 0 means no window. Returns [n, heads, d].
    """
    share = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(share, dim=1) for x in (key, value))
    scores = torch.einsum("nhd,mhd->hnm", query.float(), key) * scale
    distance = torch.arange(len(key) - len(query), len(key))[:, None] - torch.arange(len(key))[None]
    hidden = (distance < 0) | ((distance >= window) if window else False)
    column = sinks.float()[:, None, None].expand(-1, len(query), 1)
    weights = torch.cat([scores.masked_fill(hidden, float("-inf")), column], dim=-1).softmax(-1)[
        ..., :-1
    ]
    return torch.einsum("hnm,mhd->nhd", weights, value)


def register() -> None:
    torch.cuda.synchronize = lambda *_: None  # SGLang's weight checker calls it on any device
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.torch_native_backend import KVWriteLoc, TorchNativeAttnBackend

    @register_attention_backend(
        "intel_amx"
    )  # GPT-OSS requests it on CPUs, and SGLang uses it if there is no AMX
    @register_attention_backend("torch_native")
    class SinkAttention(TorchNativeAttnBackend):  # type: ignore[misc, no-any-unimported]
        def forward_extend(
            self,
            q: Any,
            k: Any,
            v: Any,
            layer: Any,
            batch: Any,
            save_kv_cache: bool = True,
            sinks: Any = None,
        ) -> torch.Tensor:
            return self._run(
                q, k, v, layer, batch, save_kv_cache, sinks, batch.extend_seq_lens.tolist()
            )

        def forward_decode(
            self,
            q: Any,
            k: Any,
            v: Any,
            layer: Any,
            batch: Any,
            save_kv_cache: bool = True,
            sinks: Any = None,
        ) -> torch.Tensor:
            return self._run(q, k, v, layer, batch, save_kv_cache, sinks, [1] * len(batch.seq_lens))

        def _run(
            self,
            q: Any,
            k: Any,
            v: Any,
            layer: Any,
            batch: Any,
            save: bool,
            sinks: Any,
            new: list[int],
        ) -> torch.Tensor:
            pool = self.token_to_kv_pool
            if save:
                pool.set_kv_buffer(
                    layer, KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), k, v
                )
            keys, values = (
                pool.get_key_buffer(layer.layer_id),
                pool.get_value_buffer(layer.layer_id),
            )
            windowed = layer.sliding_window_size > -1  # the size excludes the query's own key
            queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).split(new)
            done = []
            for query, request, length in zip(
                queries, batch.req_pool_indices, batch.seq_lens.tolist(), strict=True
            ):
                slots = self.req_to_token_pool.req_to_token[request, :length].long()
                if windowed and self.use_sliding_window_kv_pool:
                    slots = pool.translate_loc_from_full_to_swa(slots).long()
                window = layer.sliding_window_size + 1 if windowed else 0
                done.append(attend(query, keys[slots], values[slots], layer.scaling, window, sinks))
            return torch.cat(done).flatten(1).to(q.dtype)
