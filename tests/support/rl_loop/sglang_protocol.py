"""A server with SGLang 0.5.17's HTTP protocol, an artificial model and faults on request.

Formats, status codes and orders of events were recorded from the real server:

* Streaming is incremental, with cumulative ``completion_tokens``.
* If a waiting request is aborted, the last token is repeated.
* Unknown tensor names are reported as a success.
* /flush_cache returns 400 while requests run.
* Requests wait while generation is paused.
* Parameter checksums have the layout of SGLang's GPT-OSS.

The model: token n + 1 follows from a hash of tokens 0..n and of all weights. A test therefore knows
every token, and half-loaded weights give tokens of no version. ``sglang_process/sglang`` is a
package that runs this server instead of SGLang.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import math
import os
import pickle
import random
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from aiohttp import web

from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.families.registry import read_hf_config
from rl_loop.cluster.group_authentication import authenticate_groups
from tests.support.rl_loop.decoding_trace import decoding_events, write_trace

VOCAB = 1000
LAYERS, TOP_K, EXPERTS = 2, 2, 4
SERVED_MODEL = GptOssModelConfig(
    num_layers=LAYERS, num_experts=EXPERTS, experts_per_token=TOP_K, hidden_size=32, intermediate_size=48,
    num_attention_heads=4, num_key_value_heads=2, head_size=16, vocab_size=VOCAB, max_length=1024,
)  # fmt: skip
"""Model of a LocalServer without weights."""
RANDOM_WEIGHTS = "random"


def digest(weights: dict[str, torch.Tensor]) -> str:
    whole = 0
    for name in sorted(weights):
        whole = zlib.crc32(
            weights[name].float().numpy().tobytes(), zlib.crc32(name.encode(), whole)
        )
    return str(whole)


def next_token(state: int) -> int:
    return 10 + state % (VOCAB - 10)


def prefix_state(tokens: list[int], weights: str, state: int | None = None) -> int:
    """Continue the hash ``state`` of the tokens before ``tokens``."""
    value = zlib.crc32(weights.encode()) if state is None else state
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
    return value


def log_prob(state: int) -> float:
    return -(state % 4096) / 1024


def sampled_of_turn(ids: list[int], header: list[int]) -> int:
    """Return the number of a turn's tokens in a prompt: those after the last header."""
    for end in range(len(ids), 0, -1):
        if ids[end - len(header) : end] == header:
            return len(ids) - end
    raise ValueError("the prompt does not end with the header of a turn")


class LocalServer:
    """The server.

    Args:
        faults: fraction of generate requests with a fault.
        seed: seed of the faults.
        token_seconds: time per token, in seconds.
        chunk: tokens per chunk of a stream.
    """

    def __init__(
        self, *, faults: float = 0.0, seed: int = 0, token_seconds: float = 0.0, chunk: int = 8
    ) -> None:
        self.faults, self.random, self.token_seconds, self.chunk = (
            faults,
            random.Random(seed),
            token_seconds,
            chunk,
        )
        self.weights: dict[str, torch.Tensor] = {}
        self.version = "default"
        self.dtype = "bfloat16"
        self.drops = self.transposes = (
            ""  # name of a tensor that is not loaded, or loaded transposed, with "success"
        )
        self.says: list[int] = []  # tokens of every response; empty for the model's tokens
        self.ranks = 1
        self.zero_routes = self.hangs = self.rejects = False
        self.always = ""  # fault of every response
        self.fault_file: Path | None = None  # see _take_fault
        self.calls_before_fault = 0
        self.met: list[str] = []
        self.served: list[str] = []
        self.calls: list[str] = []
        self.paused = asyncio.Event()
        self.paused.set()  # set: not paused
        self.running: dict[str, asyncio.Event] = {}
        self.cache: set[int] = set()
        self.groups: dict[str, Any] = {}
        self.profile: dict[str, Any] = {}  # arguments of start_profile
        self.runner: web.AppRunner | None = None
        self.api_key = ""  # required on all paths except health checks, as in SGLang
        self.url = ""
        self._digest: str | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        app = web.Application(middlewares=[self._note], client_max_size=1 << 30)
        for path in ("/health_generate", "/model_info", "/server_info"):
            app.router.add_get(path, getattr(self, path[1:]))
        app.router.add_get("/v1/loads", self.loads)
        posts = "generate abort_request pause_generation continue_generation flush_cache update_weight_version"
        posts += " init_weights_update_group update_weights_from_distributed"
        posts += " update_weights_from_tensor update_weights_from_disk release_memory_occupation"
        posts += " resume_memory_occupation weights_checker start_profile stop_profile"
        for name in posts.split():
            app.router.add_post(f"/{name}", getattr(self, name))
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, host, port, backlog=2048)
        await site.start()
        self.url = f"http://{host}:{self.runner.addresses[0][1]}"
        return self.url

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> Any:
        authorization = request.headers.get("Authorization", "")
        is_public = request.path.startswith(("/health", "/metrics"))
        if self.api_key and not is_public and authorization != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        self.calls.append(request.path)
        fault = self._take_fault(request.path)
        if fault == "die":
            os._exit(1)
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "cut":
            request.transport.close()
            return web.Response()
        if fault == "refuse":
            message = "Failed to update parameter online: CUDA out of memory."
            return web.json_response({"success": False, "message": message}, status=400)
        return await handler(request)

    def _take_fault(self, path: str) -> str | None:
        """Return the fault that ``fault_file`` requests.

        "die /path:n" ends the process at the n-th call of a path after the file was created. Other
        faults are hang, cut and refuse. The first process that reads the file deletes it.
        """
        try:
            kind, where = self.fault_file.read_text().split() if self.fault_file else ("", "")
        except (OSError, ValueError):
            kind, where = "", ""
        if not kind:
            self.calls_before_fault = 0
            return None

        ordered_path, _, count = where.partition(":")
        if path != ordered_path:
            return None
        self.calls_before_fault += 1
        if self.calls_before_fault < int(count or 1):
            return None
        try:
            self.fault_file.unlink()
        except FileNotFoundError:  # another process was first
            return None
        return kind

    @property
    def digest(self) -> str:
        if self._digest is None:
            self._digest = digest(self.weights) if self.weights else RANDOM_WEIGHTS
        return self._digest

    # generation

    async def health_generate(self, request: web.Request) -> web.Response:
        await self.paused.wait()
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version, "model_type": "gpt_oss"})

    async def server_info(self, request: web.Request) -> web.Response:
        info = {
            "device": "cpu",
            "dtype": self.dtype,
            "attention_backend": "intel_amx",
            "tp_size": self.ranks,
        }
        info |= {"groups": len(self.groups)}  # SGLang does not report it
        return web.json_response(
            info | {"ep_size": 1, "enable_dp_attention": False, "version": "0.5.17"}
        )

    async def loads(self, request: web.Request) -> web.Response:
        load = {"dp_rank": 0, "num_running_reqs": len(self.running), "num_waiting_reqs": 0}
        return web.json_response({"version": "0.5.17", "loads": [load]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        await self.paused.wait()
        if self.rejects:
            return web.json_response({"error": {"message": "input is too long"}}, status=400)
        if not body.get("stream"):
            return web.json_response(await self.score(body["input_ids"]))
        fault = self._draw_fault()
        if fault:
            self.note_fault(fault)
        if fault == "500":
            return web.Response(status=500, text="Internal Server Error")
        if fault == "drop":
            request.transport.close()
            return web.Response()
        if fault == "latency":
            await asyncio.sleep(0.2)
        self.served.append(body["rid"])
        return await self._stream(request, body, fault)

    def _draw_fault(self) -> str:
        return self.random.choice(FAULTS) if self.random.random() < self.faults else self.always

    def note_fault(self, fault: str) -> None:
        self.met.append(fault)

    def sample(self, ids: list[int], body: dict[str, Any], state: int) -> int:
        """Return the next token of a response.

        Args:
            ids: prompt and sampled tokens.
            body: the request.
            state: hash of ``ids``.
        """
        if self.says:
            return self.says[len(ids) - len(body["input_ids"])]
        return next_token(state)

    async def score(self, ids: list[int]) -> dict[str, Any]:
        entries: list[list[Any]] = [[None, ids[0], None]]
        state = prefix_state(ids[:1], self.digest)
        for token in ids[1:]:
            state = prefix_state([token], "", state)
            entries.append([log_prob(state), token, None])
        return {
            "output_ids": [],
            "meta_info": {"input_token_logprobs": entries, "weight_version": self.version},
        }

    async def _stream(
        self, request: web.Request, body: dict[str, Any], fault: str
    ) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        rid, params, ids = body["rid"], body["sampling_params"], list(body["input_ids"])
        aborted = self.running[rid] = asyncio.Event()
        try:
            state, cached = self._prefill(ids)
            sent, pending, finish = 0, [], None
            for n in range(1, params["max_new_tokens"] + 1):
                if self.token_seconds or n % self.chunk == 1:
                    await asyncio.sleep(self.token_seconds)
                while self.hangs:
                    await asyncio.sleep(1)
                # Not aborted: the request continues after a pause that keeps requests.
                if not aborted.is_set():
                    await self.paused.wait()
                if aborted.is_set():
                    finish = {"type": "abort", "message": "Aborted by AbortReq."}
                    break
                token = self.sample(ids, body, state)
                state = prefix_state([token], "", state)
                self.cache.add(state)
                ids.append(token)
                pending.append([log_prob(state), token, None])
                if token in params["stop_token_ids"]:
                    finish = {"type": "stop", "matched": token}
                elif n == params["max_new_tokens"]:
                    finish = {"type": "length", "length": n}
                if finish:
                    break
                if len(pending) == self.chunk:
                    sent += len(pending)
                    await self._send(
                        answer, self._chunk(body, pending, sent, cached, None, ids), fault
                    )
                    pending = []
                    if fault == "broken":
                        request.transport.close()
                        return answer
                    if fault == "nonsense":
                        await answer.write(b"data: {}}\n\n")
            sent += len(pending)
            chunk = self._chunk(body, pending, sent, cached, finish, ids)
            if fault in LIES and pending:
                LIES[fault](chunk)
            await self._send(answer, chunk, fault)
            await answer.write(b"data: [DONE]\n\n")
            return answer
        except ConnectionResetError:  # the client has disconnected
            return answer
        finally:
            del self.running[rid]

    def _prefill(self, ids: list[int]) -> tuple[int, int]:
        state, cached = prefix_state([], self.digest), 0
        for n, token in enumerate(ids, 1):
            state = prefix_state([token], "", state)
            if state in self.cache and n < len(ids):
                cached = n
            self.cache.add(state)
        return state, cached

    def _chunk(
        self,
        body: dict[str, Any],
        tokens: list[Any],
        sent: int,
        cached: int,
        finish: Any,
        ids: list[int],
    ) -> dict[str, Any]:
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": sent,
            "cached_tokens": cached,
            "weight_version": self.version,
            "output_token_logprobs": tokens,
        }
        if finish and body.get("return_routed_experts"):
            routes = np.zeros((len(ids) - 1, LAYERS, TOP_K), dtype=np.int32)
            if not self.zero_routes:
                routes[..., 1] = 1 + np.arange(len(ids) - 1)[:, None] % (EXPERTS - 1)
            routes = routes[body["routed_experts_start_len"] :]
            meta["routed_experts"] = base64.b64encode(routes.tobytes()).decode()
        return {"output_ids": [entry[1] for entry in tokens], "meta_info": meta}

    async def _send(self, answer: web.StreamResponse, chunk: dict[str, Any], fault: str) -> None:
        data = b"data: " + json.dumps(chunk).encode() + b"\n\n"
        pieces = [data[i : i + 97] for i in range(0, len(data), 97)] if fault == "slow" else [data]
        for piece in pieces:
            await answer.write(piece)
            if fault == "slow":
                await asyncio.sleep(0.005)

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.hangs:
            await asyncio.sleep(60)
        for rid, event in self.running.items():
            if body.get("abort_all") or rid == body["rid"]:
                event.set()
        return web.Response()

    async def start_profile(self, request: web.Request) -> web.Response:
        self.profile = await request.json()
        return web.Response(text="Start profiling.\n")

    async def stop_profile(self, request: web.Request) -> web.Response:
        name = f"{self.profile['profile_id']}-TP-0.trace.json.gz"
        write_trace(Path(self.profile["output_dir"]) / name, decoding_events())
        return web.Response(text="Stop profiling. This will take some time.\n")

    # weights

    async def pause_generation(self, request: web.Request) -> web.Response:
        self.paused.clear()
        if (await request.json())["mode"] == "abort":
            for event in self.running.values():
                event.set()
            while self.running:
                await asyncio.sleep(0.01)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        self.paused.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, request: web.Request) -> web.Response:
        if self.running:
            return web.Response(status=400, text="Flush cache failed.")
        self.cache.clear()
        return web.Response(text="Cache flushed.")

    async def update_weight_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.version})

    async def init_weights_update_group(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["group_name"] in self.groups:
            return web.json_response({"success": False, "message": "already created"}, status=400)
        self.groups[body["group_name"]] = await asyncio.to_thread(_join, body)
        return web.json_response({"success": True, "message": "Succeeded"})

    async def update_weights_from_distributed(self, request: web.Request) -> web.Response:
        body = await request.json()

        def receive() -> list[torch.Tensor]:
            tensors = [
                torch.empty(s, dtype=getattr(torch, d))
                for s, d in zip(body["shapes"], body["dtypes"], strict=True)
            ]
            for work in [
                self.groups[body["group_name"]].broadcast(tensor, 0) for tensor in tensors
            ]:
                work.wait()
            return tensors

        return self._load(dict(zip(body["names"], await asyncio.to_thread(receive), strict=True)))

    async def update_weights_from_tensor(self, request: web.Request) -> web.Response:
        payloads = (await request.json())["serialized_named_tensors"]
        if len(payloads) != self.ranks:
            message = f"{self.ranks} ranks got {len(payloads)} payloads"
            return web.json_response({"success": False, "message": message}, status=400)

        # Each rank opens a separate tensor, as in SGLang, whose later ranks overwrite this bias
        # before the first rank may have read it.
        of_ranks = [dict(pickle.loads(base64.b64decode(payload))) for payload in payloads]
        for opened in of_ranks[1:]:
            for name, tensor in opened.items():
                if name.endswith(".experts.down_proj_bias"):
                    tensor.zero_()
        return self._load({name: tensor.clone() for name, tensor in of_ranks[0].items()})

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        from converters.hf_directory import HfDirectory

        body = await request.json()
        if body.get("load_format") != "auto":
            return web.json_response(
                {"success": False, "message": "Failed to get model loader: dummy"}, status=400
            )
        directory = HfDirectory(body["model_path"])
        return self._load({name: directory.get(name) for name in directory.names()})

    def _load(self, tensors: dict[str, torch.Tensor]) -> web.Response:
        """Load tensors. Unknown names are ignored, as in SGLang."""
        tensors.pop(self.drops, None)
        self.weights |= {
            n: t.mT.contiguous() if n == self.transposes else t for n, t in tensors.items()
        }
        self._digest = None
        return web.json_response(
            {"success": True, "message": "Succeeded to update parameter online."}
        )

    async def weights_checker(self, request: web.Request) -> web.Response:
        assert (await request.json()) == {"action": "checksum"}
        ranks = [self._checksums(rank) for rank in range(self.ranks)]
        whole = hashlib.sha256(
            "".join(rank["per_gpu_checksum"] for rank in ranks).encode()
        ).hexdigest()
        body = {
            "success": True,
            "message": "Success.",
            "ranks": ranks,
            "per_engine_checksum": whole,
        }
        return web.json_response(body)

    def _checksums(self, rank: int) -> dict[str, Any]:
        held = self._current(rank)
        whole = hashlib.sha256(
            "".join(name + held[name] for name in sorted(held)).encode()
        ).hexdigest()
        sizes = {
            "tp_size": self.ranks,
            "dp_rank": 0,
            "dp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "size": self.ranks,
        }
        return {
            "checksums": held,
            "per_gpu_checksum": whole,
            "parallelism_info": sizes | {"tp_rank": rank, "rank": rank},
        }

    def _current(self, rank: int) -> dict[str, str]:
        """Return the checksums of a rank's parameters."""
        held = server_parameters(self.weights, rank, self.ranks, getattr(torch, self.dtype))
        return {name: _bytes_hash(tensor) for name, tensor in held.items()}

    async def release_memory_occupation(self, request: web.Request) -> web.Response:
        assert not self.running
        self.weights, self._digest = {}, None
        return web.Response()

    async def resume_memory_occupation(self, request: web.Request) -> web.Response:
        return web.Response()


def server_parameters(
    weights: dict[str, torch.Tensor], rank: int, ranks: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Return the parameters that SGLang's GptOssForCausalLM has on one rank.

    Args:
        tensors: Hugging Face tensors.
        dtype: dtype of the server.
        rank: tensor-parallel rank.
        ranks: tensor-parallel size.
    """

    def shard(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        size = tensor.shape[dim] // ranks
        return tensor.narrow(dim, rank * size, size)

    parameters: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        tensor = tensor.bfloat16() if name.endswith("sinks") else tensor.to(dtype)
        if ".q_proj." in name:
            parts = [weights.get(name.replace(".q_proj.", f".{x}_proj.")) for x in "qkv"]
            if all(part is not None for part in parts):
                fused = torch.cat([shard(part.to(dtype), 0) for part in parts])
                parameters[name.replace(".q_proj.", ".qkv_proj.")] = fused
        elif name.endswith("gate_up_proj"):
            parameters[name.replace("gate_up_proj", "w13_weight")] = shard(
                tensor.transpose(-2, -1), 1
            )
        elif name.endswith("gate_up_proj_bias"):
            parameters[name.replace("gate_up_proj_bias", "w13_weight_bias")] = shard(
                tensor.float(), 1
            )
        elif name.endswith("down_proj"):
            parameters[name.replace("down_proj", "w2_weight")] = shard(tensor.transpose(-2, -1), 2)
        elif name.endswith("down_proj_bias"):
            parameters[name.replace("down_proj_bias", "w2_weight_bias")] = (
                torch.zeros(tensor.shape) if rank else tensor.float()
            )
        elif name.endswith(("sinks", "embed_tokens.weight", "lm_head.weight")):
            parameters[name] = shard(tensor, 0)
        elif name.endswith("o_proj.weight"):
            parameters[name] = shard(tensor, 1)
        elif ".k_proj." not in name and ".v_proj." not in name:
            parameters[name] = tensor
    return parameters


def _bytes_hash(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{int.from_bytes(hashlib.sha256(data).digest()[:8], 'big'):016x}"


def _change_first(chunk: dict[str, Any], log_prob: Any = 0.0, token: Any = None) -> None:
    """Replace the log-prob or the token at the first position of a chunk."""
    entry = chunk["meta_info"]["output_token_logprobs"][0]
    if token is None:
        entry[0] = log_prob
    else:
        entry[1] = chunk["output_ids"][0] = token


def _drop_log_prob(chunk: dict[str, Any]) -> None:
    del chunk["meta_info"]["output_token_logprobs"][0]


def _send_surplus(chunk: dict[str, Any]) -> None:
    """Add 1,000 more tokens than requested."""
    chunk["meta_info"]["output_token_logprobs"] += [[-1.0, 11, None]] * 1000
    chunk["meta_info"]["completion_tokens"] += 1000
    chunk["output_ids"] += [11] * 1000


LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "NaN": lambda chunk: _change_first(chunk, math.nan),
    "infinity": lambda chunk: _change_first(chunk, -math.inf),
    "null": lambda chunk: _change_first(chunk, None),
    "positive": lambda chunk: _change_first(chunk, 0.5),
    "text": lambda chunk: _change_first(chunk, "-1.0"),
    "foreign id": lambda chunk: _change_first(chunk, token=VOCAB),
    "negative id": lambda chunk: _change_first(chunk, token=-1),
    "fewer log-probs": _drop_log_prob,
    "surplus": _send_surplus,
    "no reason": lambda chunk: chunk["meta_info"].update(finish_reason={"type": "boredom"}),
    "no numbers": lambda chunk: chunk["meta_info"].pop("completion_tokens"),
    "another's": lambda chunk: chunk["meta_info"].update(id="another turn"),
    "wrong shape": lambda chunk: chunk.update(meta_info=[]),
}
"""Changes of the last chunk of a response that give well-formed JSON with impossible contents."""

FAULTS = ("500", "drop", "broken", "nonsense", "slow", "latency", *LIES)


def _join(body: dict[str, Any]) -> Any:
    timeout = timedelta(seconds=120)
    rank, world, name = body["rank_offset"], body["world_size"], body["group_name"]
    store: dist.Store
    if body["master_address"] == "file.invalid":  # same convention as the real servers' plugin
        file = Path(os.environ["GPTOSS_STORE_DIR"]) / f"store-{body['master_port']}"
        store = dist.FileStore(str(file), world)
        store.set_timeout(timeout)
    else:
        store = dist.TCPStore(
            body["master_address"], body["master_port"], world, is_master=False, timeout=timeout
        )
    prefixed = dist.PrefixStore(name, store)
    authenticate_groups()
    helper: Any = dist.distributed_c10d._new_process_group_helper
    group, _ = helper(
        world, rank, [], dist.Backend("gloo"), prefixed, group_name=name, timeout=timeout
    )
    return group


async def _main(server: LocalServer, arguments: argparse.Namespace) -> None:
    if "FAULT_FILE" in os.environ:
        server.fault_file = Path(os.environ["FAULT_FILE"])
    await server.start(arguments.host, arguments.port)
    await asyncio.Event().wait()


def main(server: LocalServer | None = None) -> None:
    """Serve like ``sglang.launch_server``, until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--config", type=Path)
    arguments, _ = parser.parse_known_args()
    described = json.loads((arguments.model_path / "config.json").read_text())
    assert described["swiglu_limit"] == 7.0
    token_seconds = float(os.environ.get("TOKEN_SECONDS", "0"))
    if server is None and "quantization_config" in described:
        from tests.support.rl_loop.mxfp4_server import Mxfp4Server

        model = read_hf_config(arguments.model_path)
        server = Mxfp4Server(model, arguments.tp_size, token_seconds=token_seconds)
    server = server or LocalServer(token_seconds=token_seconds)
    server.ranks = arguments.tp_size
    server.says = json.loads(os.environ.get("SAYS", "[]"))
    if arguments.config is not None:
        server.api_key = yaml.safe_load(arguments.config.read_text())["api-key"]
    asyncio.run(_main(server, arguments))
