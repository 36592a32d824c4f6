"""One turn at an SGLang server: the request body, and checks of the streamed response.

Servers are not trusted. An impossible response raises ServerError, which names the server. The
tokens that the turn had before are kept.
"""

import asyncio
import base64
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_gptoss.config import ModelConfig
from megatron_gptoss.routes import route_dtype
from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.protocol import (
    GenerateRequest,
    GenerateResult,
    NewTokens,
    TokenChoice,
    check_routes,
    fault_in_ids,
    fault_in_log_probs,
)
from rl_loop.engines.sglang.client import RequestRejectedError, ServerError, SglangClient
from rl_loop.infrastructure import describe

FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
STREAM_INTERVAL = 32
"""Tokens per chunk of a stream. A turn loses at most this many tokens if its server ends."""


@dataclass(eq=False)
class StreamedTurn:
    """A turn in flight: its request and its result so far."""

    request: GenerateRequest
    result: GenerateResult = field(
        default_factory=lambda: GenerateResult([], [], FinishReason.ABORT)
    )
    aborted: bool = False
    """True if the caller has aborted the turn."""
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    """Time limit, set by an abort. It ends the turn even if the server does not respond."""
    failures: Counter[str] = field(default_factory=Counter)
    """Number of this turn's faults, by server address."""
    client: SglangClient | None = None
    """Client of the server that works on the turn. None between two servers."""
    server_request_id: str = ""
    """Id of the turn's latest request to a server. An abort names it."""

    def next_body(self) -> dict[str, object]:
        """Return the body of a request that continues from the tokens so far."""
        sampling = self.request.sampling
        output_ids = self.result.output_ids

        # Every attempt has a new id, because the previous one may still be running.
        self.server_request_id = f"{self.request.request_id}#{uuid.uuid4().hex[:12]}"
        return {
            "rid": self.server_request_id,
            # The tokens so far become a part of the prompt, so any server can continue the turn.
            "input_ids": self.request.input_ids + output_ids,
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens - len(output_ids),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "stop_token_ids": list(sampling.stop_token_ids),
                "sampling_seed": sampling.seed,
                # Clients that read the stream get every token at once.
                "stream_interval": STREAM_INTERVAL if self.request.on_tokens is None else 1,
            },
            "return_logprob": True,
            "top_logprobs_num": self.request.top_log_probs,
            "return_routed_experts": self.request.return_routed_experts,
            "routed_experts_start_len": self.request.routes_start,
            "stream": True,
        }


@dataclass(frozen=True)
class Chunk:
    """Checked content of one stream chunk."""

    ids: list[int]
    log_probs: list[float]
    top_log_probs: list[list[TokenChoice]]
    """Most likely tokens of each position. Empty lists if not requested."""
    version: int
    """Weight version that sampled the tokens."""
    finish: dict[str, Any] | None
    """Reason why the stream ended, ``{"type": ...}``. None if the stream continues."""
    meta: dict[str, Any]
    """``meta_info`` of the chunk, unmodified."""


class ResponseReader:
    """Reader of one model's streamed responses."""

    def __init__(self, model: ModelConfig) -> None:
        self._routes_shape = (-1, model.num_layers, model.experts_per_token)
        self._num_experts = model.num_experts
        self._vocab_size = model.vocab_size

    def read(
        self,
        content: dict[str, Any],
        turn: StreamedTurn,
        start: int,
        url: str,
        min_version: int,
    ) -> Chunk:
        """Return the checked content of one chunk.

        Args:
            content: chunk as the server sent it.
            turn: turn with the chunks before.
            start: number of tokens that the turn had when the stream began.
            url: address of the server.
            min_version: lowest accepted weight version.

        Returns:
            The chunk. It has no tokens if the server only repeated the last one.

        Raises:
            ServerError: if the chunk is malformed or its values are impossible.
        """
        with _malformed_chunks_as_faults(url):
            meta = content["meta_info"]
            version = _checked_version(meta, turn, url, min_version)
            # Checked in every chunk, because ``end_turn`` uses it as a key.
            finish = _checked_finish(meta, url)

            # The server counts the tokens of this stream. Tokens of earlier attempts do not count.
            ids = content["output_ids"]
            total = meta["completion_tokens"]
            received = len(turn.result.output_ids) - start
            if total == received:
                # SGLang repeats the last token of a request that is aborted in its queue.
                return Chunk([], [], [], version, finish, meta)

            entries = meta["output_token_logprobs"]
            _check_counts(ids, entries, received, total, url)
            _check_limit(ids, turn, url)
            log_probs = [entry[0] for entry in entries]
            if ids:
                fault = fault_in_ids(ids, self._vocab_size) or fault_in_log_probs(log_probs)
                if fault is not None:
                    raise ServerError(f"{url}, weights {version}: {fault}")
            return Chunk(
                ids=[int(token) for token in ids],
                log_probs=[float(log_prob) for log_prob in log_probs],
                top_log_probs=self._read_top(meta, len(ids), turn.request.top_log_probs, url),
                version=version,
                finish=finish,
                meta=meta,
            )

    def _read_top(
        self, meta: dict[str, Any], tokens: int, count: int, url: str
    ) -> list[list[TokenChoice]]:
        """Return the most likely tokens of each position.

        Args:
            meta: ``meta_info`` of the chunk.
            tokens: number of positions.
            count: requested number per position.
            url: address of the server.

        Raises:
            ServerError: if their number differs from the request, or values are impossible.
        """
        if count == 0:
            return [[] for _ in range(tokens)]
        rows = meta["output_top_logprobs"]
        expected = min(count, self._vocab_size)
        if len(rows) != tokens or any(len(row) != expected for row in rows):
            raise ServerError(f"{url}: top_logprobs do not have {expected} entries per token")
        top = [[(entry[1], entry[0]) for entry in row] for row in rows]
        listed = [choice for row in top for choice in row]
        if listed:
            fault = fault_in_ids([token for token, _ in listed], self._vocab_size)
            fault = fault or fault_in_log_probs([log_prob for _, log_prob in listed])
            if fault is not None:
                raise ServerError(f"{url}, top_logprobs: {fault}")
        return top

    def append(self, turn: StreamedTurn, chunk: Chunk, url: str) -> None:
        """Append a chunk to the turn's result.

        Args:
            turn: turn to extend.
            chunk: chunk from ``read``.
            url: address of the server.

        Raises:
            ServerError: if the chunk reports a failure of the server, or its expert indices cannot
                be read.
            RuntimeError: if an expert index is out of range.
        """
        result = turn.result
        if chunk.finish is not None:
            # SGLang reports an internal failure as an abort with an HTTP status code.
            is_abort = chunk.finish["type"] == "abort"
            if is_abort and (chunk.finish.get("status_code") or 0) >= 500:
                raise ServerError(f"{url}: {chunk.finish.get('message')}")

            if turn.request.return_routed_experts:
                # The last sampled token was never an input of the model, so it has no experts.
                inputs = len(turn.request.input_ids) + len(result.output_ids) + len(chunk.ids) - 1
                tokens = inputs - turn.request.routes_start
                # Before the tokens are appended: if this raises, the turn continues without the
                # chunk.
                result.routed_experts = self._read_routes(chunk.meta, tokens)

        result.output_ids += chunk.ids
        result.output_log_probs += chunk.log_probs
        _extend_versions(result.weight_versions, len(chunk.ids), chunk.version)
        if turn.request.on_tokens is not None and chunk.ids:
            turn.request.on_tokens(NewTokens(chunk.ids, chunk.log_probs, chunk.top_log_probs))

    def _read_routes(self, meta: dict[str, Any], tokens: int) -> np.ndarray | None:
        """Return the expert indices of ``tokens`` tokens.

        Args:
            meta: ``meta_info`` of the last chunk.
            tokens: expected number of tokens.

        Returns:
            uint8 or int16 [tokens, layers, top_k]. None if the server sent none.

        Raises:
            ServerError: if they cannot be read, or their number of tokens is wrong.
            RuntimeError: if an index is out of range.
        """
        # ``check_routes_present`` reports missing experts, because it is not a fault of this
        # server.
        if tokens == 0 or "routed_experts" not in meta:
            return None

        try:
            # SGLang sends int32 numbers as base64.
            data = base64.b64decode(meta["routed_experts"])
            routes = np.frombuffer(data, dtype=np.int32).reshape(self._routes_shape)
        except (TypeError, ValueError) as error:
            raise ServerError(f"routed experts cannot be read: {describe(error)}") from error
        if len(routes) != tokens:
            raise ServerError(
                f"the server returned routed experts of {len(routes)} tokens, expected {tokens}"
            )
        # Checked before the cast: a smaller dtype would turn invalid indices into valid ones.
        return check_routes(routes, self._num_experts).astype(route_dtype(self._num_experts))


def _checked_version(meta: dict[str, Any], turn: StreamedTurn, url: str, min_version: int) -> int:
    """Return the weight version of a chunk.

    Raises:
        ServerError: if the version is too old or invalid, or the chunk belongs to another request.
    """
    version = str(meta.get("weight_version"))
    if not version.isdigit() or int(version) < min_version:
        raise ServerError(
            f"{url} answered with weights {version!r}, but the policy has {min_version} or later"
        )

    # Tokens of another request would have valid ids and log-probs, so no later check finds them.
    if meta.get("id", turn.server_request_id) != turn.server_request_id:
        raise ServerError(f"{url} sent the response to request {meta['id']!r}")
    return int(version)


def _checked_finish(meta: dict[str, Any], url: str) -> dict[str, Any] | None:
    """Return the finish reason of a chunk. None if the stream continues.

    Raises:
        ServerError: if the reason is unknown.
    """
    finish: dict[str, Any] | None = meta.get("finish_reason")
    if finish is not None and finish["type"] not in FINISH_REASONS:
        raise ServerError(f"{url}: the finish reason {finish['type']!r} is unknown")
    return finish


def _check_limit(ids: list[int], turn: StreamedTurn, url: str) -> None:
    """Raise ServerError if a chunk has more tokens than are left of the turn."""
    # More tokens than requested would exceed the limits of the episode.
    room = turn.request.sampling.max_new_tokens - len(turn.result.output_ids)
    if len(ids) > room:
        raise ServerError(
            f"{url}: the server returned {len(ids)} tokens, but {room} were left of max_new_tokens"
        )


def _check_counts(ids: list[int], entries: list[Any], received: int, total: int, url: str) -> None:
    """Check that no chunk was lost or repeated.

    With --incremental-streaming-output a chunk contains only the new tokens.

    Args:
        ids: tokens of the chunk.
        entries: [log-prob, token id, ...] of every token of the chunk.
        received: tokens in all earlier chunks.
        total: tokens in all chunks, as counted by the server.
        url: address of the server.

    Raises:
        ServerError: if the numbers do not match.
    """
    if received + len(ids) != total or [entry[1] for entry in entries] != ids:
        raise ServerError(
            f"{url}: {len(ids)} tokens and {len(entries)} log-probs after {received} of {total} "
            "do not match. Start the server with --incremental-streaming-output"
        )


@contextmanager
def _malformed_chunks_as_faults(url: str) -> Iterator[None]:
    """Raise ServerError if the code in the context meets a malformed chunk."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(f"{url}: a chunk cannot be read: {describe(error)}") from error


def check_routes_present(turn: StreamedTurn, url: str) -> None:
    """Check that tokens came with expert indices if the request needs them.

    Raises:
        RequestRejectedError: if the indices are missing.
    """
    needs_routes = turn.request.return_routed_experts and turn.result.output_ids
    # All servers have the same options, so another server would not return them either.
    if needs_routes and turn.result.routed_experts is None:
        raise RequestRejectedError(
            f"{url} returned no routed experts for request {turn.request.request_id}. Start the "
            "server with --enable-return-routed-experts"
        )


def end_turn(turn: StreamedTurn, reason: str, url: str) -> None:
    """Set the finish reason of a turn.

    Raises:
        ServerError: if the turn has no token and was not aborted.
    """
    turn.result.finish_reason = FINISH_REASONS[reason]
    if not turn.result.output_ids and turn.result.finish_reason is not FinishReason.ABORT:
        raise ServerError(f"{url}: the response has no token, and its finish reason is {reason!r}")


def _extend_versions(spans: list[WeightVersionSpan], tokens: int, version: int) -> None:
    """Append ``tokens`` tokens of weights ``version`` to adjacent spans, in place."""
    if tokens == 0:
        return
    # A weight sync within a turn starts another span.
    if spans and spans[-1].version == version:
        last = spans.pop()
        spans.append(WeightVersionSpan(last.start, last.end + tokens, version))
    else:
        start = spans[-1].end if spans else 0
        spans.append(WeightVersionSpan(start, start + tokens, version))
