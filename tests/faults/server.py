"""Server with SGLang's protocol that samples from the policy and injects faults on request.

``sglang_process/sglang`` runs it instead of SGLang. The protocol is that of the tests' local
server. Tokens, log-probs and routes are those of the embedded engine with the trainer's weights, so
the loop learns and checks of log-probs are meaningful.

An answer depends only on the weights and its prompt. It is computed alone and from its first token,
even if another server had started the turn. Therefore, runs are equal bit by bit, independent of
the faults of their servers.

Orders are files as in engine.py. The server also executes those of engine.py and the following:

    bucket  a bit of a tensor flips in transit
    keep    a tensor keeps its old bytes in a sync that the server reports as complete
    cut     all connections are closed in the middle of an answer
    fault   "die PATH:N": the process exits at the N-th call of a path (``FAULT_FILE``)
"""

import argparse
import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from converters.names import hf_shapes
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.config.precision import DTYPE_NAMES
from megatron_gptoss.families.registry import read_hf_config
from rl_loop.data.trajectory import FinishReason
from rl_loop.engines.embedded.backend import build_engine
from rl_loop.engines.protocol import GenerateRequest, GenerateResult, SamplingParams
from rl_loop.engines.sglang.fleet import comparison_interval
from tests.faults.engine import DAMAGED, FaultyEngine, Options, flip_exponent, take_order
from tests.support.rl_loop.sglang_protocol import LocalServer, sampled_of_turn
from tests.support.rl_loop.sglang_protocol import main as serve

ORDERS_EVERY = 0.05
"""Seconds between two checks for an order that no request triggers."""


class ServerOptions(Options):
    """Settings of a server, from the environment variable POLICY_SERVER."""

    header: list[int]
    """Last tokens of the prompt of a turn."""


class PolicyServer(LocalServer):
    """Server that answers with the deterministic embedded engine."""

    def __init__(self, model: ModelConfig, dtype: str, settings: ServerOptions) -> None:
        super().__init__()
        self.dtype = dtype
        precision = {name: key for key, name in DTYPE_NAMES.items()}[dtype]
        engine = build_engine(model, precision, 16, deterministic=settings.deterministic)
        self.fault_file = settings.orders / "fault"
        self._engine = FaultyEngine(engine, settings)
        self._model = model
        self._orders = settings.orders
        self._header = settings.header
        # True if the engine uses the newest weights. Otherwise the next request loads them.
        self._is_current = True
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        url = await super().start(host, port)
        self._tasks.add(asyncio.create_task(self._follow_orders()))
        return url

    async def _follow_orders(self) -> None:
        """Close all connections on order, as soon as an answer is in flight."""
        while True:
            await asyncio.sleep(ORDERS_EVERY)
            if not self.running or not take_order(self._orders, "cut"):
                continue
            assert self.runner is not None and self.runner.server is not None
            for connection in self.runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()

    # -- generation -------------------------------------------------------------------------------

    async def score(self, ids: list[int]) -> dict[str, Any]:
        await self._load_engine()
        log_probs = await self._engine.score(ids)
        entries = [
            [log_prob, token, None] for log_prob, token in zip([None, *log_probs], ids, strict=True)
        ]
        meta = {"input_token_logprobs": entries, "weight_version": self.version}
        return {"output_ids": [], "meta_info": meta}

    async def _stream(
        self, request: web.Request, body: dict[str, Any], fault: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        aborted = self.running[body["rid"]] = asyncio.Event()
        try:
            start, result = await self._answer(body)
            interval = body["sampling_params"]["stream_interval"]
            sent = start
            while sent < len(result.output_ids) and not aborted.is_set():
                end = min(sent + interval, len(result.output_ids))
                is_last = end == len(result.output_ids)
                await self._send(response, _chunk(body, result, start, sent, end, is_last), fault)
                sent = end
                await asyncio.sleep(self.token_seconds * interval)
            if sent < len(result.output_ids):
                chunk = _chunk(body, result, start, sent, sent, is_last=False)
                chunk["meta_info"]["finish_reason"] = {"type": "abort"}
                await self._send(response, chunk, fault)
            await response.write(b"data: [DONE]\n\n")
        except ConnectionError:  # the client has disconnected
            pass
        finally:
            del self.running[body["rid"]]
        return response

    async def _answer(self, body: dict[str, Any]) -> tuple[int, GenerateResult]:
        """Generate the turn from its first token. Return how many tokens the client already has."""
        await self._load_engine()
        params = body["sampling_params"]
        ids = body["input_ids"]
        start = sampled_of_turn(ids, self._header)
        request = GenerateRequest(
            request_id=body["rid"],
            input_ids=ids[: len(ids) - start],
            sampling=SamplingParams(
                max_new_tokens=params["max_new_tokens"] + start,
                temperature=params["temperature"],
                top_p=params["top_p"],
                stop_token_ids=tuple(params["stop_token_ids"]),
                seed=params["sampling_seed"],
            ),
            return_routed_experts=body["return_routed_experts"],
            routes_start=body["routed_experts_start_len"],
        )
        result = await self._engine.generate(request)
        is_same = result.output_ids[:start] == ids[len(ids) - start :]
        assert is_same or result.request_id != body["rid"], "a turn goes on as it has not begun"
        return start, result

    # -- weights ----------------------------------------------------------------------------------

    async def update_weight_version(self, request: web.Request) -> web.Response:
        self._is_current = False
        return await super().update_weight_version(request)

    def _load(self, tensors: dict[str, torch.Tensor]) -> web.Response:
        self._is_current = False
        if DAMAGED in tensors and take_order(self._orders, "bucket"):
            tensors[DAMAGED] = flip_exponent(tensors[DAMAGED])
        kept = self._compared_tensor()
        if kept in tensors and kept in self.weights and take_order(self._orders, "keep"):
            del tensors[kept]
        return super()._load(tensors)

    def _compared_tensor(self) -> str:
        """Return the tensor whose checksum the current sync compares; "" if there is none."""
        if not self.version.isdigit():
            return ""
        coming = int(self.version) + 1
        if coming % comparison_interval(self._model.num_layers):
            return ""
        layer = coming % self._model.num_layers
        return f"model.layers.{layer}.self_attn.q_proj.weight"

    async def _load_engine(self) -> None:
        """Load the server's weights into the engine, even if a sync has sent only half of them."""
        async with self._loading:
            if self._is_current or set(self.weights) != set(hf_shapes(self._model)):
                return
            self._is_current = True
            version = int(self.version) if self.version.isdigit() else 0
            await self._engine.sync_weights(self.weights.items(), version)


def _chunk(
    body: dict[str, Any], result: GenerateResult, start: int, sent: int, end: int, is_last: bool
) -> dict[str, Any]:
    """Make the chunk with tokens [sent, end) of a turn. The client already had ``start`` tokens."""
    ids = result.output_ids[sent:end]
    log_probs = result.output_log_probs[sent:end]
    version = result.weight_versions[0].version if result.weight_versions else 0
    meta: dict[str, Any] = {
        "id": result.request_id,
        "finish_reason": None,
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": end - start,
        "cached_tokens": 0,
        "weight_version": str(version),
        "output_token_logprobs": [
            [log_prob, token, None] for log_prob, token in zip(log_probs, ids, strict=True)
        ],
    }
    if is_last:
        reason = "stop" if result.finish_reason is FinishReason.STOP else "length"
        meta["finish_reason"] = {"type": reason}
        if result.routed_experts is not None:
            routes = result.routed_experts.astype("int32")
            meta["routed_experts"] = base64.b64encode(routes.tobytes()).decode()
    return {"output_ids": ids, "meta_info": meta}


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    arguments, _ = parser.parse_known_args()
    settings = ServerOptions(**json.loads(os.environ["POLICY_SERVER"]))
    serve(PolicyServer(read_hf_config(arguments.model_path), arguments.dtype, settings))
