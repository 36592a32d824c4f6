"""SGLang server, through its /generate endpoint."""

import asyncio
import base64
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.certify.implementation import (
    ImplementationError,
    ModelImplementation,
    SampledSequence,
    ScoredSequence,
    UnsupportedOperationError,
)
from rl_loop.engines.sglang.client import RequestRejectedError, ServerError, SglangClient
from rl_loop.engines.sglang.scored_tokens import parse_log_probs

CONCURRENT_REQUESTS = 8
"""Number of concurrent requests: enough for the server to batch them."""
UPDATE_SECONDS = 600.0


class SglangImplementation(ModelImplementation):
    """Server at ``url``, started with the weights of the first directory.

    ``deterministic`` is True if it was started with --enable-deterministic-inference.
    """

    def __init__(self, url: str, config: GptOssModelConfig, deterministic: bool = False) -> None:
        self._url = url.rstrip("/")
        self._config = config
        self._runner = asyncio.Runner()
        self._client = SglangClient(self._url)
        self._slots = asyncio.Semaphore(CONCURRENT_REQUESTS)
        self.is_deterministic = deterministic
        try:
            info = self._run(self._client.call("/server_info"))
        # The caller has no object to close yet.
        except ImplementationError:
            self.close()
            raise
        settings = [str(info.get(key, "?")) for key in ("version", "attention_backend")]
        self._returns_routes = bool(info.get("enable_return_routed_experts", False))
        self.name = f"SGLang {' '.join(settings)} at {self._url}"

    def _run[T](self, calls: Coroutine[Any, Any, T]) -> T:
        try:
            return self._runner.run(calls)
        except (ServerError, RequestRejectedError) as error:
            raise ImplementationError(str(error)) from error
        # Responses of other servers lack the fields that are read here.
        except (LookupError, TypeError, ValueError) as error:
            raise ImplementationError(
                f"{self._url}: the response lacks a field of SGLang ({error!r}). Give the URL of an "
                "SGLang server"
            ) from error

    def score(self, sequences: Sequence[Sequence[int]]) -> list[ScoredSequence]:
        """Score prompts without the prefix cache. Include routes if the server returns them."""

        async def score_all() -> list[ScoredSequence]:
            return await asyncio.gather(*(self._score(list(sequence)) for sequence in sequences))

        return self._run(score_all())

    async def _score(self, sequence: list[int]) -> ScoredSequence:
        body = {
            "input_ids": sequence,
            # The response to the one sampled token includes the routes of the whole prompt.
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
            # By default SGLang returns the log-probs of sampled tokens only.
            "logprob_start_len": 0,
            "return_routed_experts": self._returns_routes,
        }
        async with self._slots:
            response = await self._client.call("/generate", body)
        meta = response["meta_info"]
        log_probs = parse_log_probs(meta["input_token_logprobs"], sequence, self._url)
        return ScoredSequence(log_probs, self._routes(meta, len(sequence)))

    def _routes(self, meta: dict[str, Any], tokens: int) -> np.ndarray | None:
        """Return the routes of a sequence's inputs, int32 [tokens - 1, layers, top_k]."""
        if not meta.get("routed_experts"):
            return None
        shape = (-1, self._config.num_layers, self._config.experts_per_token)
        # SGLang sends the bytes of int32 [tokens, layers, top_k] in base64.
        data = base64.b64decode(meta["routed_experts"])
        return np.frombuffer(data, dtype=np.int32).reshape(shape)[: tokens - 1]

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> SampledSequence:
        """Decode greedily."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
            },
            "return_logprob": True,
        }
        entries = self._run(self._entries(body, "output_token_logprobs"))
        return SampledSequence(
            [entry[1] for entry in entries], [float(entry[0]) for entry in entries]
        )

    async def _entries(self, body: dict[str, Any], kind: str) -> list[Any]:
        """Return [log-prob, token id, text] of every token in a response."""
        response = await self._client.call("/generate", body)
        entries: list[Any] = response["meta_info"][kind]
        return entries

    def tokenize(self, text: str) -> list[int]:
        """Send text instead of ids and return the ids that were scored."""
        body = {
            "text": text,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        try:
            entries = self._run(self._entries(body, "input_token_logprobs"))
        except ImplementationError as error:
            # For example with --skip-tokenizer-init.
            raise UnsupportedOperationError(
                f"{self.name} does not tokenize text: {error}"
            ) from error
        return [entry[1] for entry in entries]

    def load_weights(self, directory: Path) -> None:
        """Let the server load another directory, which must be accessible to it."""
        # Prefixes in the cache were computed with the old weights. The server may have another
        # working directory, so the path must be absolute.
        body = {"model_path": str(directory.resolve()), "load_format": "auto", "flush_cache": True}
        call = self._client.call("/update_weights_from_disk", body, seconds=UPDATE_SECONDS)
        self._run(call)

    def close(self) -> None:
        """Close all connections."""
        self._runner.run(self._client.close())
        self._runner.close()
