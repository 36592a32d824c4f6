"""Continuous batching: a step samples one token per sequence and admits waiting sequences."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from gptoss_kernels.logits import fp32_logits
from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.embedded.kv_cache import CacheSegment, RowCache, StepLayout, common_prefix
from rl_loop.engines.embedded.sampling import (
    allowed_log_probs,
    sample,
    sampling_log_probs,
    top_tokens,
)
from rl_loop.engines.protocol import (
    GenerateRequest,
    GenerateResult,
    NewTokens,
    TokenChoice,
    TokenMatcher,
    check_routes,
)

MAX_PREFILL_TOKENS = 8192
"""Maximum prompt tokens of one step. One sequence is always admitted, even if it is longer."""
MIN_SHARED_PREFILL = 16
"""Minimum prompt tokens that a sequence saves by waiting one step for another sequence's prefix."""
HEAD_CHUNK = 256
"""Positions whose logits are computed at a time when a text is scored."""


@dataclass(eq=False)
class RunningSequence:
    """A request in flight."""

    request: GenerateRequest
    future: Future[GenerateResult] = field(default_factory=Future)
    """Future of the result. Cancelling it frees the sequence's row."""
    log_probs: list[float] = field(default_factory=list)
    """Log-probs of the sampled tokens, in nats."""
    cached_tokens: int = 0
    """Number of prompt tokens that were found in the cache."""
    on_begin: Callable[[], None] = lambda: None
    """Called on the engine's thread when the sequence leaves the queue."""
    on_tokens: Callable[[NewTokens], None] | None = None
    """Called on the engine's thread with each sampled token."""
    tokens: list[int] = field(init=False)
    """Tokens of the prompt and sampled tokens so far."""
    matcher: TokenMatcher | None = field(init=False, default=None)
    """Constraint on the sampled tokens."""
    allowed: np.ndarray | None = field(init=False, default=None)
    """Tokens that the constraint allows next, bool [vocab]."""
    uniforms: list[float] = field(init=False)
    """Random number in [0, 1) for each token, drawn in advance."""

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.tokens = list(self.request.input_ids)
        if self.request.new_matcher is not None:
            self.matcher = self.request.new_matcher()
            self.allowed = self.matcher.allowed()

        # One number per token, independent of other sequences.
        generator = torch.Generator()
        if sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(sampling.seed)
        uniforms = torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64)
        self.uniforms = uniforms.tolist()

    def append(self, token: int, log_prob: float, likely: list[TokenChoice]) -> FinishReason | None:
        """Append the next sampled token. Return the finish reason if the sequence ends with it.

        Args:
            token: sampled token.
            log_prob: its log-prob, in nats.
            likely: most likely tokens of its position, as many as requested.

        Raises:
            RuntimeError: if the constraint cannot be evaluated for the next token.
        """
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if self.on_tokens is not None:
            self.on_tokens(NewTokens([token], [log_prob], [likely]))
        # First the stop token: with it the turn is complete, even at the limit.
        if token in self.request.sampling.stop_token_ids:
            return FinishReason.STOP
        if len(self.log_probs) == self.request.sampling.max_new_tokens:
            return FinishReason.LENGTH
        if self.matcher is not None:
            self.matcher.accept([token])
            self.allowed = self.matcher.allowed()
        return None


class SequenceScheduler:
    """All sequences of one model: running ones, with a cache row each, and waiting ones."""

    def __init__(
        self, model: PreTrainedModel, max_batch_size: int, reuses_prefixes: bool = True
    ) -> None:
        """Create a scheduler without sequences.

        Args:
            model: model to run.
            max_batch_size: maximum number of running sequences.
            reuses_prefixes: whether sequences use keys and values that other sequences computed.
                They come from batches of different shapes, so the last bits of results depend on
                earlier requests.
        """
        self.model = model
        self.weight_version: int | None = None
        """Version of the model's weights. None before the first sync."""
        self.steps = 0
        """Number of forward passes for generation so far."""
        self._max_batch_size = max_batch_size
        self._reuses_prefixes = reuses_prefixes
        self._running: list[RunningSequence] = []
        """Sequences by their row in the cache."""
        self._waiting: deque[RunningSequence] = deque()
        self.drop_cache()

        # The model does not return the router's choices, so a hook on every router records them.
        # Dense models have no router.
        self._routes: dict[int, torch.Tensor] = {}
        """Experts in the last forward pass, [tokens, top_k], by layer."""
        for index, layer in enumerate(model.model.layers):
            if hasattr(layer.mlp, "router"):
                layer.mlp.router.register_forward_hook(partial(self._record_routes, index))

        # Models with different kinds of layers need a mask per kind, others need one mask.
        self._no_masks: dict[str, None] | None = None
        if getattr(model.config, "layer_types", None):
            self._no_masks = {"full_attention": None, "sliding_attention": None}

    def _record_routes(
        self,
        layer: int,
        router: object,
        inputs: object,
        output: tuple[torch.Tensor, ...],
    ) -> None:
        """Store the experts that a router has chosen. Called by a forward hook."""
        _logits, _weights, indices = output
        self._routes[layer] = indices  # [tokens, top_k]

    def drop_cache(self) -> None:
        """Drop all keys and values. Call it only if no sequence is running."""
        self._cache = RowCache(
            self.model.config,
            rows=2 * self._max_batch_size,
            dtype=self.model.lm_head.weight.dtype,
            device=self.model.device,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, sequence: RunningSequence) -> None:
        """Queue a sequence.

        Raises:
            ValueError: if another unfinished sequence has its request id.
        """
        request_id = sequence.request.request_id
        for other in (*self._running, *self._waiting):
            if other.request.request_id == request_id and not other.future.done():
                name = f"request {request_id}"
                raise ValueError(f"{name} is already running. Request ids must be unique")
        self._waiting.append(sequence)

    def step(self) -> None:
        """Sample one token for every running sequence, after admitting waiting ones that fit."""
        self._drop_cancelled()

        # Read before new sequences are admitted: these rows decode.
        decoding = [len(sequence.tokens) - 1 for sequence in self._running]
        new_tokens = [sequence.tokens[-1] for sequence in self._running]
        segments = self._admit()
        if not self._running:
            return
        for segment in segments:
            new_tokens += self._running[segment.row].tokens[segment.past :]

        # All rows of a step have one capacity, so reserve it for the longest sequence.
        self._cache.reserve(max(len(sequence.tokens) for sequence in self._running))
        # The flat input: one token per decoding row, then the new tokens of admitted sequences.
        layout = StepLayout(decoding, segments, self._cache, self.model.device)
        with torch.inference_mode():
            hidden = self._forward(new_tokens, layout)
            # Recorded for every token, because a later request may need them for a cached prefix.
            if self._routes:
                routes = torch.stack([self._routes[i] for i in range(len(self._routes))], dim=1)
                routes = routes.to(self._cache.routes.dtype)
                self._cache.routes[layout.rows, layout.positions] = routes

            # Only the last token of a sequence needs logits, 200,000 numbers.
            logits = fp32_logits(hidden[layout.last_tokens()], self.model.lm_head.weight)
            tokens, log_probs, likely = self._sample(logits)
        self.steps += 1

        # From the end, because the last row moves into the gap of a row that ends.
        for row in reversed(range(len(tokens))):
            try:
                reason = self._running[row].append(tokens[row], log_probs[row], likely[row])
            # The constraint belongs to this sequence only, so the others continue.
            except RuntimeError as error:
                self._finish(row, FinishReason.ABORT, error)
                continue
            if reason is not None:
                self._finish(row, reason)

    def _drop_cancelled(self) -> None:
        """Remove cancelled sequences."""
        # From the end, because _finish moves the last row into the gap.
        for row in reversed(range(len(self._running))):
            if self._running[row].future.cancelled():
                self._finish(row, FinishReason.ABORT)
        self._waiting = deque(s for s in self._waiting if not s.future.cancelled())

    def _forward(self, tokens: list[int], layout: StepLayout) -> torch.Tensor:
        """Return the last hidden states [tokens, hidden_size] of the flat input."""
        output = self.model.model(
            input_ids=torch.tensor([tokens], device=self.model.device),
            position_ids=layout.positions[None],
            # row_cache_attention reads the layout instead of masks.
            attention_mask=self._no_masks,
            use_cache=False,
            layout=layout,
        )
        return output.last_hidden_state[0]

    def _sample(
        self, logits: torch.Tensor
    ) -> tuple[list[int], list[float], list[list[TokenChoice]]]:
        """Sample a token for each running sequence.

        Args:
            logits: [sequences, vocab_size].

        Returns:
            Tokens, their log-probs, and the most likely tokens of each row, as many as requested.

        Raises:
            RuntimeError: if a log-prob is not finite.
        """
        device = logits.device
        params = [sequence.request.sampling for sequence in self._running]
        temperatures = torch.tensor([p.temperature for p in params], device=device)
        greedy = torch.tensor([p.temperature == 0 for p in params], device=device)
        top_ps = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
        # Token i of a sequence takes its number i, in every batch.
        uniforms = [sequence.uniforms[len(sequence.log_probs)] for sequence in self._running]

        log_probs = sampling_log_probs(logits, temperatures)
        tokens = sample(
            allowed_log_probs(log_probs, [sequence.allowed for sequence in self._running]),
            uniforms=torch.tensor(uniforms, dtype=torch.float64, device=device),
            greedy=greedy,
            top_ps=top_ps,
        )

        sampled_log_probs = log_probs.gather(1, tokens[:, None])[:, 0]
        if not torch.isfinite(sampled_log_probs).all():
            raise RuntimeError(
                f"weights {self.weight_version}: the model's logits are not finite. The weights "
                "contain NaN or infinities, or a value overflows"
            )
        counts = [sequence.request.top_log_probs for sequence in self._running]
        return tokens.tolist(), sampled_log_probs.tolist(), top_tokens(log_probs, counts)

    def _admit(self) -> list[CacheSegment]:
        """Assign rows and cached prefixes to waiting sequences.

        Returns:
            The remaining tokens to process, in the order of the flat input.
        """
        segments: list[CacheSegment] = []
        deferred: list[RunningSequence] = []
        decoding = len(self._running)
        first = decoding

        while self._waiting and len(self._running) < self._max_batch_size:
            sequence = self._waiting.popleft()
            prompt = sequence.tokens[:-1]  # the last token is always processed, for its logits
            source, cached = self._longest_prefix(prompt, decoding)
            if self._shares_more_with_admitted(prompt, cached, decoding):
                deferred.append(sequence)
                continue

            # Bounds memory and time of one step. A longer prompt is admitted as the first one.
            length = len(sequence.tokens) - cached
            prefill_tokens = first - decoding + length
            if segments and prefill_tokens > MAX_PREFILL_TOKENS:
                self._waiting.appendleft(sequence)
                break

            row = len(self._running)
            self._cache.begin(row, source, cached)
            sequence.cached_tokens = cached
            self._running.append(sequence)
            sequence.on_begin()
            segments.append(CacheSegment(first=first, length=length, past=cached, row=row))
            first += length

        # Return them to the front of the queue, in their original order.
        self._waiting.extendleft(reversed(deferred))
        return segments

    def _shares_more_with_admitted(self, prompt: list[int], cached: int, decoding: int) -> bool:
        """Return True if a sequence admitted in this step will cache much more of ``prompt``."""
        # Samples of one prompt arrive together. The first prefills it, the others wait one step.
        for admitted in self._running[decoding:]:
            shared = common_prefix(admitted.tokens, prompt, longer_than=cached)
            if shared - cached >= MIN_SHARED_PREFILL:
                return True
        return False

    def _longest_prefix(self, prompt: list[int], decoding: int) -> tuple[int, int]:
        """Return the cache row with the longest prefix of ``prompt``, and the prefix's length.

        Rows after the first ``decoding`` ones, whose sequences were admitted in this step, are
        empty.
        """
        if not self._reuses_prefixes:
            return len(self._running), 0

        # The last token of a running sequence is not in the cache yet.
        running = [sequence.tokens[:-1] for sequence in self._running[:decoding]]
        best_row = len(self._running)
        best_length = 0
        for row, tokens in enumerate([*running, *self._cache.tokens[decoding:]]):
            shared = common_prefix(tokens, prompt, longer_than=best_length)
            if shared > best_length:
                best_row = row
                best_length = shared
        return best_row, best_length

    def _finish(self, row: int, reason: FinishReason, error: Exception | None = None) -> None:
        """Set the result of one row's sequence, and move the last sequence into its row.

        Args:
            row: row of the sequence.
            reason: its finish reason.
            error: exception in place of a result. None if there is none.
        """
        sequence = self._running[row]
        last = self._running[-1]

        # Keys, values and expert indices exist for all tokens except the last sampled one.
        processed = sequence.tokens[:-1]
        if error is None:
            self._set_result(sequence, reason, self._cache.routes[row, : len(processed)])
        elif sequence.future.set_running_or_notify_cancel():
            sequence.future.set_exception(error)

        self._running[row] = last
        self._running.pop()
        self._cache.finish(
            row,
            processed,
            last_row=len(self._running),
            last_length=len(last.tokens) - 1,
        )
        if not self._reuses_prefixes and not self._running:
            # The capacity is that of the longest sequence so far. It affects the memory layout of
            # keys, and thereby the last bits of results.
            self.drop_cache()

    def _set_result(
        self,
        sequence: RunningSequence,
        reason: FinishReason,
        routes: torch.Tensor | None,
    ) -> None:
        """Set the result of a sequence, unless its future was cancelled.

        Args:
            sequence: sequence that has ended.
            reason: its finish reason.
            routes: uint8 or int16 [processed tokens, layers, top_k]. None if it never ran.
        """
        # From here on the future cannot be cancelled, so setting the result cannot fail.
        if not sequence.future.set_running_or_notify_cancel():
            return

        recorded: np.ndarray | None = None
        if sequence.request.return_routed_experts and routes is not None:
            try:
                # A copy, because another sequence will use the row.
                recorded = check_routes(
                    routes[sequence.request.routes_start :].to("cpu", copy=True).numpy(),
                    self.model.config.num_local_experts,
                )
            except RuntimeError as error:
                sequence.future.set_exception(error)
                return

        sampled = sequence.tokens[len(sequence.request.input_ids) :]
        versions = []
        if sampled:
            assert self.weight_version is not None, "the engine has refused the request"
            versions = [WeightVersionSpan(0, len(sampled), self.weight_version)]
        result = GenerateResult(
            output_ids=sampled,
            output_log_probs=sequence.log_probs,
            finish_reason=reason,
            weight_versions=versions,
            routed_experts=recorded,
            cached_tokens=sequence.cached_tokens,
            request_id=sequence.request.request_id,
        )
        sequence.future.set_result(result)

    def abort(self, request_id: str | None) -> None:
        """End one request, or all if None. Its result are the tokens so far."""
        # From the end, because ``_finish`` moves the last row into the gap.
        for row in reversed(range(len(self._running))):
            if request_id in (None, self._running[row].request.request_id):
                self._finish(row, FinishReason.ABORT)

        for sequence in list(self._waiting):
            if request_id in (None, sequence.request.request_id):
                self._waiting.remove(sequence)
                self._set_result(sequence, FinishReason.ABORT, routes=None)

    def fail(self, error: BaseException) -> None:
        """Fail every request with ``error``, and drop the cache, which may be partially written."""
        # The cause is known, but not the request that caused it, so all of them fail.
        for sequence in (*self._running, *self._waiting):
            if sequence.future.set_running_or_notify_cancel():
                request_id = sequence.request.request_id
                failure = RuntimeError(
                    f"request {request_id}: the rollout engine failed: {error!r}"
                )
                failure.__cause__ = error
                sequence.future.set_exception(failure)
        self._running.clear()
        self._waiting.clear()
        self.drop_cache()

    def score(self, tokens: list[int], temperature: float) -> list[float]:
        """Return log p(tokens[i] | tokens[:i]) for i >= 1, without using the cache.

        Args:
            tokens: text, at least 2 tokens.
            temperature: divisor of the logits.

        Returns:
            len(tokens) - 1 natural logs.
        """
        whole_text = CacheSegment(first=0, length=len(tokens) - 1, past=0, row=0)
        layout = StepLayout(
            decoding=[],
            segments=[whole_text],
            cache=None,
            device=self.model.device,
        )

        scores: list[float] = []
        with torch.inference_mode():
            hidden = self._forward(tokens[:-1], layout)
            targets = torch.tensor(tokens[1:], device=hidden.device)
            # In chunks, because the logits of a long text have several GB.
            for start in range(0, len(targets), HEAD_CHUNK):
                chunk = slice(start, start + HEAD_CHUNK)
                logits = fp32_logits(hidden[chunk], self.model.lm_head.weight)
                temperatures = logits.new_full((len(logits),), temperature)
                log_probs = sampling_log_probs(logits, temperatures)
                scores.extend(log_probs.gather(1, targets[chunk, None])[:, 0].tolist())
        return scores
