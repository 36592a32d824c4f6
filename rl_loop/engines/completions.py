"""RolloutEngine for a completions endpoint that accepts and returns token ids, as vLLM's does.

For evaluation only, because such an endpoint has no weight sync.
"""

import asyncio
from typing import Any

import aiohttp

from megatron_gptoss.user_error import UserError
from rl_loop.data.trajectory import FinishReason
from rl_loop.engines.protocol import GenerateRequest, GenerateResult

SEED_LIMIT = 1 << 31
"""Exclusive upper bound of the seeds that are sent. Every server accepts smaller ones."""


class EndpointError(UserError, RuntimeError):
    """The endpoint cannot be used. The message names it."""


class CompletionsEngine:
    """Client of one endpoint.

    Args:
        url: base address, which ends with ``/v1``.
        model: name of the model at the endpoint.
        max_concurrent_requests: maximum number of running requests.
    """

    def __init__(self, url: str, model: str, max_concurrent_requests: int = 64) -> None:
        self._url = f"{url.rstrip('/')}/completions"
        self._model = model
        self._timeouts: dict[str, asyncio.Timeout] = {}
        """Timeout of each running request, by request id.

        It has no deadline until an abort sets one.
        """
        self._slots = asyncio.Semaphore(max_concurrent_requests)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one continuation.

        Raises:
            EndpointError: if the endpoint fails. The message contains the address and the response.
        """
        try:
            # The timeout has no deadline. An abort sets the deadline to now.
            async with asyncio.timeout(None) as self._timeouts[request.request_id]:
                return await self._complete(request)
        except TimeoutError:
            # The response comes as a whole, so an aborted request has no partial tokens.
            return GenerateResult([], [], FinishReason.ABORT)
        finally:
            del self._timeouts[request.request_id]

    async def _complete(self, request: GenerateRequest) -> GenerateResult:
        body = self._request_body(request)
        try:
            async with self._slots:
                # After the wait for a slot, which must not count towards the episode's time limit.
                if request.on_begin is not None:
                    request.on_begin()
                choice = await self._post(body)
            return _read_choice(choice, request.sampling.stop_token_ids, self._url)
        except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
            raise EndpointError(f"{self._url} cannot be used: {error!r}") from error

    def _request_body(self, request: GenerateRequest) -> dict[str, Any]:
        sampling = request.sampling
        # The project's seeds have 63 bits, which some servers do not accept.
        seed = sampling.seed
        if seed is not None:
            seed %= SEED_LIMIT
        return {
            "model": self._model,
            "prompt": request.input_ids,
            "max_tokens": sampling.max_new_tokens,
            "seed": seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            # Log-probs of the sampled token, without alternatives.
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the only choice of the response."""
        async with self._session.post(self._url, json=body) as response:
            if response.status != 200:
                text = await response.text()
                raise EndpointError(f"{self._url} answered {response.status}: {text[:300]}")
            # aiohttp would reject JSON with another content type.
            completion = await response.json(content_type=None)
        choice: dict[str, Any] = completion["choices"][0]
        return choice

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Raise EndpointError, because a completions endpoint does not score."""
        raise EndpointError(f"{self._url} only samples and does not score texts")

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all if ``request_id`` is None. An aborted request has no tokens."""
        for name, timeout in self._timeouts.items():
            if request_id in (None, name) and not timeout.expired():
                timeout.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


def _read_choice(
    choice: dict[str, Any],
    stop_token_ids: tuple[int, ...],
    url: str,
) -> GenerateResult:
    """Convert a choice of a response. Missing log-probs become 0.

    Raises:
        EndpointError: if the choice has no token ids.
    """
    ids = choice.get("token_ids")
    if not isinstance(ids, list):
        raise EndpointError(
            f"{url} does not return token ids. Use a server that supports return_token_ids, such "
            "as vLLM"
        )

    token_log_probs = (choice.get("logprobs") or {}).get("token_logprobs") or []
    # Evaluation does not read log-probs, so missing ones can be 0.
    log_probs = [float(value or 0.0) for value in token_log_probs][: len(ids)]

    # Every other reason ends the turn as if its limit was reached: its tokens are not a complete
    # turn.
    reason = FinishReason.LENGTH
    if choice.get("finish_reason") == "stop":
        reason = FinishReason.STOP

        # Some servers omit the sampled stop token from the ids and return it as "stop_reason".
        ends_with_stop = bool(ids) and ids[-1] in stop_token_ids
        if not ends_with_stop and choice.get("stop_reason") in stop_token_ids:
            ids = [*ids, choice["stop_reason"]]

    log_probs += [0.0] * (len(ids) - len(log_probs))
    return GenerateResult(ids, log_probs, reason)
