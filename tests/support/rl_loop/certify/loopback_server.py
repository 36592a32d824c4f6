"""A local server with SGLang's /generate and OpenAI's completions, and a real model.

As a program it accepts the command line of SGLang's server, so that
``benchmarks/sglang/certify.py`` can start it, and writes its arguments to the file SEEN_BY_SERVER.

Responses have the format that ``sglang_protocol`` and ``rl_loop.engines.sglang`` know from the real
server. Completions follow vLLM's documentation.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from aiohttp import web

from rl_loop.certify.implementations.transformers_model import TransformersModel


class LoopbackServer:
    """Responds with the outputs of ``model``."""

    def __init__(self, model: TransformersModel, zero_routes: bool = False) -> None:
        self.model = model
        self.zero_routes = zero_routes
        self.calls: list[str] = []

    async def start(self, port: int = 0) -> str:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health_generate", self.health)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/update_weights_from_disk", self.update)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self.runner.cleanup()

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def server_info(self, request: web.Request) -> web.Response:
        info = {"version": "0.5.17", "attention_backend": "eager"}
        return web.json_response(info | {"enable_return_routed_experts": True})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append("/generate")
        ids = body.get("input_ids") or self.model.tokenize(body["text"])
        (scored,) = self.model.score([ids])
        tokens = body["sampling_params"]["max_new_tokens"]
        generated = self.model.generate(ids, tokens)
        # Like SGLang 0.5.17, which never reports the last id of a vocabulary.
        told = [0 if i == self.model.model.config.vocab_size - 1 else i for i in ids]
        meta: dict[str, Any] = {
            "input_token_logprobs": [
                [p, i, None] for p, i in zip([None, *scored.log_probs], told, strict=True)
            ],
            "output_token_logprobs": [
                [p, i, None] for p, i in zip(generated.log_probs, generated.ids, strict=True)
            ],
        }
        if body.get("return_routed_experts"):
            assert scored.routes is not None
            # All tokens but the sampled one: one more than the prompt's inputs.
            routes = np.concatenate([scored.routes, scored.routes[-1:]]).astype(np.int32)
            if self.zero_routes:
                routes[:] = 0
            meta["routed_experts"] = base64.b64encode(routes.tobytes()).decode()
        return web.json_response({"output_ids": list(generated.ids), "meta_info": meta})

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["load_format"] == "auto"
        self.model.load_weights(Path(body["model_path"]))
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "gpt-oss"}]})

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = body["prompt"]
        ids = self.model.tokenize(prompt) if isinstance(prompt, str) else prompt
        generated = self.model.generate(ids, body["max_tokens"])
        log_probs: list[float | None] = list(generated.log_probs)
        if body.get("echo"):
            (scored,) = self.model.score([ids])
            log_probs = [None, *scored.log_probs, *log_probs]
        choice = {
            "token_ids": list(generated.ids),
            "prompt_token_ids": ids,
            "logprobs": {"token_logprobs": log_probs},
        }
        return web.json_response({"choices": [choice]})


class Server(Protocol):
    """This server, or the scripted one of ``sglang_protocol``."""

    async def start(self) -> str: ...

    async def stop(self) -> None: ...


@contextmanager
def serving(server: Server) -> Iterator[str]:
    """Yield the address of a server that runs in a thread."""
    loop = asyncio.new_event_loop()
    url = loop.run_until_complete(server.start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield url
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def serve(directory: Path, port: int) -> None:
    """Serve the model of ``directory`` until the process is killed."""
    await LoopbackServer(TransformersModel(directory, "bf16")).start(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--port", type=int)
    options, others = parser.parse_known_args()
    seen = {"arguments": others, "environment": dict(os.environ)}
    Path(os.environ["SEEN_BY_SERVER"]).write_text(json.dumps(seen))
    asyncio.run(serve(options.model_path, options.port))
