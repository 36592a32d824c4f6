"""Continuous batching: one step samples one token for every running sequence and takes in those that wait.

Nothing here knows of threads or of asyncio, except that each request's future may be cancelled at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from transformers import GptOssForCausalLM

from rl_loop.engines.cached_attention import Segment, StepLayout
from rl_loop.engines.protocol import GenerateRequest, GenerateResult, check_routes
from rl_loop.engines.row_cache import PrefixStore, RowCache, common_prefix
from rl_loop.engines.sampling import sample, sampling_log_probs
from rl_loop.trajectory import FinishReason, WeightVersionSpan

MAX_PREFILL_TOKENS = 8192
"""New prompt tokens that one step takes in, beyond which sequences wait for the next step (one always gets in)."""

WORTH_WAITING = 16
"""A sequence waits one step if another one, taken in now, will save it at least this many tokens of prefill."""

HEAD_CHUNK = 256
"""Positions whose logits exist at a time when a text is scored."""


@dataclass(eq=False)
class RunningSequence:
    """A request on its way: ``tokens`` is the prompt and what was sampled so far."""

    request: GenerateRequest
    future: Future[GenerateResult]
    tokens: list[int] = field(init=False)
    log_probs: list[float] = field(default_factory=list)
    spans: list[WeightVersionSpan] = field(default_factory=list)
    cached_tokens: int = 0
    earlier_routes: torch.Tensor | None = None  # of tokens that were processed with weights that are gone

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.tokens = list(self.request.input_ids)
        self.stops = frozenset(sampling.stop_token_ids)
        generator = torch.Generator()
        if sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(sampling.seed)
        # one number per token, whatever happens to other sequences
        self.uniforms: list[float] = torch.rand(
            sampling.max_new_tokens, generator=generator, dtype=torch.float64
        ).tolist()

    @property
    def sampled(self) -> int:
        return len(self.log_probs)

    def append(self, token: int, log_prob: float, version: int) -> FinishReason | None:
        """Take the next sampled token; returns why the sequence ends with it, if it does."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        n = self.sampled
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = WeightVersionSpan(self.spans[-1].start, n, version)
        else:
            self.spans.append(WeightVersionSpan(n - 1, n, version))
        if token in self.stops:
            return FinishReason.STOP
        return FinishReason.LENGTH if n == self.request.sampling.max_new_tokens else None


class BatchedGeneration:
    """All sequences of one model: those that run, one cache row each, and those that wait."""

    def __init__(
        self, model: GptOssForCausalLM, max_batch_size: int, prefix_cache_tokens: int, weight_version: int
    ) -> None:
        self.model = model
        self.weight_version = weight_version
        self.steps = 0  # forward passes of generation so far
        self._config = model.config
        self._max_batch_size = max_batch_size
        self._rows: list[RunningSequence] = []  # index = cache row
        self._waiting: deque[RunningSequence] = deque()
        self._prefixes = PrefixStore(prefix_cache_tokens)
        self._cache: RowCache | None = None
        self._routes: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(model.model.layers):
            layer.mlp.router.register_forward_hook(self._record_routes(index))

    def _record_routes(self, index: int) -> Callable[[torch.nn.Module, object, tuple[torch.Tensor, ...]], None]:
        def hook(module: torch.nn.Module, arguments: object, output: tuple[torch.Tensor, ...]) -> None:
            self._routes[index] = output[2]  # of (logits, weights, indices): [tokens, top_k]

        return hook

    @property
    def has_work(self) -> bool:
        return bool(self._rows or self._waiting)

    def live_requests(self) -> set[str]:
        return {sequence.request.request_id for sequence in (*self._rows, *self._waiting)}

    def add(self, sequence: RunningSequence) -> None:
        self._waiting.append(sequence)

    # one step

    def step(self) -> None:
        """Process all running sequences' last tokens and the waiting ones' prompts, and sample one token for each."""
        self._drop_cancelled()
        decoding = len(self._rows)
        segments = self._admit(decoding)
        if not self._rows:
            return
        cache = self._ready_cache(max(len(sequence.tokens) for sequence in self._rows))
        positions = [len(sequence.tokens) - 1 for sequence in self._rows[:decoding]]
        new_tokens = [sequence.tokens[-1] for sequence in self._rows[:decoding]]
        for sequence, segment in zip(self._rows[decoding:], segments, strict=True):
            new_tokens.extend(sequence.tokens[segment.past :])
        layout = self._layout(positions, segments, cache)
        with torch.inference_mode():
            hidden = self._forward(new_tokens, layout)
            cache.write_routes(layout.slots, torch.stack([self._routes[i] for i in range(len(self._routes))], dim=1))
            logits = self.model.lm_head(hidden[layout.last_tokens()] if segments else hidden)
            tokens, log_probs = self._sample(logits)
        self.steps += 1
        self._take(tokens, log_probs)

    def _forward(self, tokens: list[int], layout: StepLayout) -> torch.Tensor:
        """Last hidden states [tokens, hidden_size]; ``layout`` says which token belongs where."""
        device = layout.positions.device
        self._routes.clear()
        output = self.model.model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=layout.positions[None],
            attention_mask={"full_attention": None, "sliding_attention": None},
            use_cache=False,
            layout=layout,
        )
        return output.last_hidden_state[0]

    def _layout(self, positions: list[int], segments: list[Segment], cache: RowCache | None) -> StepLayout:
        return StepLayout(positions, segments, cache, self._config.sliding_window, self._dtype, self.model.device)

    @property
    def _dtype(self) -> torch.dtype:
        return self.model.lm_head.weight.dtype

    def _ready_cache(self, length: int) -> RowCache:
        if self._cache is None:
            self._cache = RowCache(self._config, self._max_batch_size, self._dtype, self.model.device)
        self._cache.reserve(length)
        return self._cache

    def _sample(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        device = logits.device
        params = [sequence.request.sampling for sequence in self._rows]
        log_probs = sampling_log_probs(logits, torch.tensor([p.temperature for p in params], device=device))
        uniforms = [sequence.uniforms[sequence.sampled] for sequence in self._rows]
        greedy = [p.temperature == 0 for p in params]
        top_ps = [p.top_p for p in params]
        tokens = sample(
            log_probs,
            torch.tensor(uniforms, dtype=torch.float64, device=device),
            torch.tensor(greedy, device=device) if any(greedy) else None,
            torch.tensor(top_ps, dtype=torch.float64, device=device) if min(top_ps) < 1 else None,
        )
        chosen = log_probs.gather(1, tokens[:, None])[:, 0]
        if not torch.isfinite(chosen).all():
            raise RuntimeError(
                f"the model's logits are not finite: weights {self.weight_version} hold NaN or infinities, or overflow"
            )
        return tokens.tolist(), chosen.tolist()

    def _take(self, tokens: list[int], log_probs: list[float]) -> None:
        """Give each row its token and let the finished ones go, keeping the active rows at the front."""
        finished: list[tuple[int, FinishReason]] = []
        for row, (sequence, token, log_prob) in enumerate(zip(self._rows, tokens, log_probs, strict=True)):
            reason = sequence.append(token, log_prob, self.weight_version)
            if reason is not None:
                finished.append((row, reason))
        for row, reason in reversed(finished):
            self._finish_row(row, reason)

    # admission

    def _admit(self, decoding: int) -> list[Segment]:
        """Give waiting sequences a row and as much of a cached prefix as there is; returns what is left to process."""
        segments: list[Segment] = []
        budget = MAX_PREFILL_TOKENS
        first = decoding
        deferred: list[RunningSequence] = []
        while self._waiting and len(self._rows) < self._max_batch_size:
            sequence = self._waiting.popleft()
            prompt = sequence.tokens[:-1]  # the last token is always processed: its logits are needed
            entry, cached = self._prefixes.match(prompt)
            source = None
            for row, other in enumerate(self._rows[:decoding]):
                shared = common_prefix(other.tokens[:-1], prompt, cached)
                if shared > cached:
                    source, cached = row, shared
            if any(
                common_prefix(leader.tokens, prompt, cached) - cached >= WORTH_WAITING
                for leader in self._rows[decoding:]
            ):
                deferred.append(sequence)
                continue
            length = len(sequence.tokens) - cached
            if segments and length > budget:
                self._waiting.appendleft(sequence)
                break
            row = len(self._rows)
            cache = self._ready_cache(len(sequence.tokens))
            if source is not None:
                cache.copy_row(source, row, cached)
            elif entry is not None:
                cache.load(row, entry, cached)
            if not sequence.sampled:
                sequence.cached_tokens = cached
            self._rows.append(sequence)
            segments.append(Segment(first, length, cached, row))
            first += length
            budget -= length
        self._waiting.extendleft(reversed(deferred))
        return segments

    # endings

    def _finish_row(self, row: int, reason: FinishReason | None) -> None:
        """Answer the sequence of one row (unless its caller is gone: reason None) and close the gap it leaves."""
        sequence = self._rows[row]
        cache = self._ready_cache(0)
        if reason is not None:
            self._answer(sequence, reason, cache.routes(row, len(sequence.tokens) - 1))
        self._prefixes.add(cache.snapshot(row, sequence.tokens[:-1]))
        last = self._rows.pop()
        if last is not sequence:
            cache.copy_row(len(self._rows), row, len(last.tokens) - 1)
            self._rows[row] = last

    def _answer(self, sequence: RunningSequence, reason: FinishReason, routes: torch.Tensor | None) -> None:
        if not sequence.future.set_running_or_notify_cancel():
            return
        try:
            checked = None
            if sequence.request.return_routed_experts:
                joined = _join_routes(sequence.earlier_routes, routes)
                if joined is not None:
                    checked = check_routes(joined.numpy(), self._config.num_local_experts)
            result = GenerateResult(
                output_ids=sequence.tokens[len(sequence.request.input_ids) :],
                output_log_probs=sequence.log_probs,
                finish_reason=reason,
                weight_versions=sequence.spans,
                routed_experts=checked,
                cached_tokens=sequence.cached_tokens,
            )
        except Exception as error:
            sequence.future.set_exception(error)
        else:
            sequence.future.set_result(result)

    def _drop_cancelled(self) -> None:
        for row in reversed(range(len(self._rows))):
            if self._rows[row].future.cancelled():
                self._finish_row(row, None)
        self._waiting = deque(sequence for sequence in self._waiting if not sequence.future.cancelled())

    def abort(self, request_id: str | None, waiting: bool = True) -> None:
        """Answer one request, or all, with what was sampled so far; optionally only those that have started."""
        for row in reversed(range(len(self._rows))):
            if request_id in (None, self._rows[row].request.request_id):
                self._finish_row(row, FinishReason.ABORT)
        kept: deque[RunningSequence] = deque()
        for sequence in self._waiting:
            started = sequence.sampled > 0
            if request_id in (None, sequence.request.request_id) and (waiting or started):
                self._answer(sequence, FinishReason.ABORT, None)
            else:
                kept.append(sequence)
        self._waiting = kept

    def fail(self, error: BaseException) -> None:
        """Give every request the error, and forget the cache, which may be half written."""
        for sequence in (*self._rows, *self._waiting):
            if sequence.future.set_running_or_notify_cancel():
                failure = RuntimeError(f"request {sequence.request.request_id}: the rollout engine failed: {error!r}")
                failure.__cause__ = error
                sequence.future.set_exception(failure)
        self._rows.clear()
        self._waiting.clear()
        self.drop_cache()

    # weights and memory

    def preempt(self) -> None:
        """Send running sequences back to wait, with their tokens; their keys and values will be computed anew."""
        for row, sequence in enumerate(self._rows):
            routes = self._ready_cache(0).routes(row, len(sequence.tokens) - 1)
            sequence.earlier_routes = _join_routes(sequence.earlier_routes, routes)
        self._waiting.extendleft(reversed(self._rows))
        self._rows.clear()

    def drop_cache(self) -> None:
        """Free all keys and values. Only when no row is running."""
        self._prefixes.clear()
        self._cache = None

    def score(self, tokens: list[int], temperature: float) -> list[float]:
        """log p(tokens[i] | tokens[:i]) for i >= 1, natural logs at the temperature, without touching the cache."""
        layout = self._layout([], [Segment(0, len(tokens) - 1, 0, None)], None)
        scores: list[float] = []
        with torch.inference_mode():
            hidden = self._forward(tokens[:-1], layout)
            targets = torch.tensor(tokens[1:], device=hidden.device)
            for start in range(0, len(targets), HEAD_CHUNK):
                part = slice(start, start + HEAD_CHUNK)
                logits = self.model.lm_head(hidden[part])
                log_probs = sampling_log_probs(logits, logits.new_full((len(logits),), temperature))
                scores.extend(log_probs.gather(1, targets[part, None])[:, 0].tolist())
        return scores


def _join_routes(earlier: torch.Tensor | None, routes: torch.Tensor | None) -> torch.Tensor | None:
    """The routes a token was first processed with stay: they made the log-probs that were returned."""
    if earlier is None or routes is None:
        return routes if earlier is None else earlier
    return torch.cat([earlier, routes[len(earlier) :]])
