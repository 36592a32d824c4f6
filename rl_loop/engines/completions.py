"""RolloutEngine over an OpenAI-compatible completions endpoint that takes and returns token ids (vLLM and others). For
evaluation: such an endpoint offers no weight sync."""

import asyncio
from collections.abc import Iterable
from typing import Any

import aiohttp
import torch

from megatron_gptoss.user_error import UserError
from rl_loop.data.trajectory import FinishReason
from rl_loop.engines.protocol import GenerateRequest, GenerateResult


class EndpointError(UserError, RuntimeError):
    """The endpoint cannot be used; the message names it."""


class CompletionsEngine:
    """``url`` ends with ``/v1``; ``model`` is its name there. At most ``concurrency`` requests run at a time."""

    def __init__(self, url: str, model: str, concurrency: int = 64) -> None:
        self._url, self._model = f"{url.rstrip('/')}/completions", model
        self._running: dict[str, asyncio.Timeout] = {}
        self._slots = asyncio.Semaphore(concurrency)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Raises EndpointError naming the address and what it answered."""
        try:
            async with asyncio.timeout(None) as self._running[request.request_id]:
                return await self._complete(request)
        except TimeoutError:  # only an abort sets a limit
            return GenerateResult([], [], FinishReason.ABORT)
        finally:
            del self._running[request.request_id]

    async def _complete(self, request: GenerateRequest) -> GenerateResult:
        sampling = request.sampling
        seed = None if sampling.seed is None else sampling.seed % (1 << 31)
        body = {
            "model": self._model, "prompt": request.input_ids, "max_tokens": sampling.max_new_tokens, "seed": seed,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "logprobs": 0, "return_token_ids": True,
            "stop_token_ids": list(sampling.stop_token_ids), "skip_special_tokens": False,
        }  # fmt: skip
        try:
            async with self._slots:
                if request.on_begin is not None:
                    request.on_begin()
                return _result(await self._post(body), sampling.stop_token_ids, self._url)
        except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
            raise EndpointError(f"{self._url} cannot be used: {error!r}") from error

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """The only choice of the endpoint's answer."""
        async with self._session.post(self._url, json=body) as response:
            if response.status != 200:
                raise EndpointError(f"{self._url} answered {response.status}: {(await response.text())[:300]}")
            choice: dict[str, Any] = (await response.json(content_type=None))["choices"][0]
            return choice

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        raise EndpointError(f"{self._url} is for sampling only")

    async def abort(self, request_id: str | None = None) -> None:
        for name, limit in self._running.items():
            if request_id in (None, name) and not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def sync_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        raise EndpointError(f"{self._url} keeps its own weights")

    async def close(self) -> None:
        await self._session.close()


def _result(choice: dict[str, Any], stop_token_ids: tuple[int, ...], url: str) -> GenerateResult:
    ids = choice.get("token_ids")
    if not isinstance(ids, list):
        raise EndpointError(f"{url} does not return token ids: it must know return_token_ids, as vLLM does")
    given = (choice.get("logprobs") or {}).get("token_logprobs") or []
    log_probs = [float(value or 0.0) for value in given][: len(ids)]
    stopped = choice.get("finish_reason") == "stop"
    if stopped and (not ids or ids[-1] not in stop_token_ids) and choice.get("stop_reason") in stop_token_ids:
        ids = [*ids, choice["stop_reason"]]  # some servers name the stop token that was sampled apart
    log_probs += [0.0] * (len(ids) - len(log_probs))
    return GenerateResult(ids, log_probs, FinishReason.STOP if stopped else FinishReason.LENGTH)
