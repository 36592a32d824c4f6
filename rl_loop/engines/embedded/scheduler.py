"""Continuous batching: one step samples one token for every running sequence and takes in those that wait."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch
from transformers import GptOssForCausalLM

from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.embedded.kv_cache import RowCache, Segment, StepLayout, common_prefix
from rl_loop.engines.embedded.sampling import sample, sampling_log_probs
from rl_loop.engines.protocol import GenerateRequest, GenerateResult, check_routes

# new prompt tokens that one step takes in, beyond which sequences wait for the next step (one always gets in)
MAX_PREFILL_TOKENS = 8192

# a sequence waits one step if another one, taken in now, will save it at least this many tokens of prefill
WORTH_WAITING = 16

# positions whose logits exist at a time when a text is scored
HEAD_CHUNK = 256


@dataclass(eq=False)
class RunningSequence:
    """A request on its way: ``tokens`` is the prompt and what was sampled so far."""

    request: GenerateRequest
    future: Future[GenerateResult] = field(default_factory=Future)
    log_probs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    on_begin: Callable[[], None] = lambda: None
    """Called, on the engine's thread, when the sequence leaves the queue."""

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.tokens = list(self.request.input_ids)
        generator = torch.Generator()
        generator.manual_seed(generator.seed() if sampling.seed is None else sampling.seed)
        # one number per token, whatever happens to other sequences
        uniforms = torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64)
        self.uniforms: list[float] = uniforms.tolist()

    def append(self, token: int, log_prob: float) -> FinishReason | None:
        """Take the next sampled token; returns why the sequence ends with it, if it does."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if token in self.request.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.log_probs) == self.request.sampling.max_new_tokens else None


class BatchedGeneration:
    """All sequences of one model: those that run, one cache row each, and those that wait."""

    def __init__(self, model: GptOssForCausalLM, max_batch_size: int) -> None:
        self.model = model
        self.weight_version = 0
        self.steps = 0  # forward passes of generation so far
        self._max_batch_size = max_batch_size
        self._running: list[RunningSequence] = []  # index = cache row
        self._waiting: deque[RunningSequence] = deque()
        self.drop_cache()
        self._routes: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(model.model.layers):
            layer.mlp.router.register_forward_hook(partial(self._record_routes, index))

    def _record_routes(self, index: int, router: object, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        self._routes[index] = output[2]  # of (logits, weights, indices): [tokens, top_k]

    def drop_cache(self) -> None:
        """Forget all keys and values. Only when no sequence is running."""
        rows, dtype = 2 * self._max_batch_size, self.model.lm_head.weight.dtype
        self._cache = RowCache(self.model.config, rows, dtype, self.model.device)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, sequence: RunningSequence) -> None:
        """Raises ValueError if its request id is that of another one on its way."""
        name = sequence.request.request_id
        if any(s.request.request_id == name and not s.future.done() for s in (*self._running, *self._waiting)):
            raise ValueError(f"request {name} is already running: request ids must be unique")
        self._waiting.append(sequence)

    def step(self) -> None:
        """Process all running sequences' last tokens and the waiting ones' prompts, and sample one token for each."""
        for row in reversed(range(len(self._running))):
            if self._running[row].future.cancelled():
                self._finish(row, FinishReason.ABORT)
        self._waiting = deque(sequence for sequence in self._waiting if not sequence.future.cancelled())
        decoding = [len(sequence.tokens) - 1 for sequence in self._running]
        new_tokens = [sequence.tokens[-1] for sequence in self._running]
        segments = self._admit()
        if not self._running:
            return
        for segment in segments:
            new_tokens += self._running[segment.row].tokens[segment.past :]
        self._cache.reserve(max(len(sequence.tokens) for sequence in self._running))
        layout = StepLayout(decoding, segments, self._cache, self.model.device)
        with torch.inference_mode():
            hidden = self._forward(new_tokens, layout)
            routes = torch.stack([self._routes[i] for i in range(len(self._routes))], dim=1)
            self._cache.routes[layout.rows, layout.positions] = routes.to(torch.int16)
            tokens, log_probs = self._sample(self.model.lm_head(hidden[layout.last_tokens()]))
        self.steps += 1
        for row in reversed(range(len(tokens))):  # from the end, because a row that ends is filled with the last one
            reason = self._running[row].append(tokens[row], log_probs[row])
            if reason is not None:
                self._finish(row, reason)

    def _forward(self, tokens: list[int], layout: StepLayout) -> torch.Tensor:
        """Last hidden states [tokens, hidden_size]; ``layout`` says which token belongs where."""
        inputs = {"input_ids": torch.tensor([tokens], device=self.model.device), "position_ids": layout.positions[None]}
        mask = {"full_attention": None, "sliding_attention": None}
        output = self.model.model(**inputs, attention_mask=mask, use_cache=False, layout=layout)
        return output.last_hidden_state[0]

    def _sample(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        device = logits.device
        params = [sequence.request.sampling for sequence in self._running]
        log_probs = sampling_log_probs(logits, torch.tensor([p.temperature for p in params], device=device))
        uniforms = [sequence.uniforms[len(sequence.log_probs)] for sequence in self._running]
        numbers = torch.tensor(uniforms, dtype=torch.float64, device=device)
        greedy = torch.tensor([p.temperature == 0 for p in params], device=device)
        top_ps = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
        tokens = sample(log_probs, numbers, greedy, top_ps)
        chosen = log_probs.gather(1, tokens[:, None])[:, 0]
        if not torch.isfinite(chosen).all():
            weights = f"weights {self.weight_version}"
            raise RuntimeError(f"the model's logits are not finite: {weights} hold NaN or infinities, or overflow")
        return tokens.tolist(), chosen.tolist()

    def _admit(self) -> list[Segment]:
        """Give waiting sequences a row and as much of a cached prefix as there is; returns what is left to process."""
        segments: list[Segment] = []
        deferred: list[RunningSequence] = []
        decoding = first = len(self._running)
        while self._waiting and len(self._running) < self._max_batch_size:
            sequence = self._waiting.popleft()
            prompt = sequence.tokens[:-1]  # the last token is always processed: its logits are needed
            source, cached = self._longest_prefix(prompt, decoding)
            admitted = (other.tokens for other in self._running[decoding:])
            if any(common_prefix(tokens, prompt, cached) - cached >= WORTH_WAITING for tokens in admitted):
                deferred.append(sequence)
                continue
            length = len(sequence.tokens) - cached
            if segments and first - decoding + length > MAX_PREFILL_TOKENS:
                self._waiting.appendleft(sequence)
                break
            row = len(self._running)
            self._cache.begin(row, source, cached)
            sequence.cached_tokens = cached
            self._running.append(sequence)
            sequence.on_begin()
            segments.append(Segment(first, length, cached, row))
            first += length
        self._waiting.extendleft(reversed(deferred))
        return segments

    def _longest_prefix(self, prompt: list[int], decoding: int) -> tuple[int, int]:
        """The cache row that begins with most tokens of ``prompt``, and their number. The sequences behind the first
        ``decoding`` ones have only been admitted: there is nothing in their rows yet."""
        best, length = len(self._running), 0
        known = [*(s.tokens[:-1] for s in self._running[:decoding]), *self._cache.tokens[decoding:]]
        for row, tokens in enumerate(known):
            if (shared := common_prefix(tokens, prompt, length)) > length:
                best, length = row, shared
        return best, length

    def _finish(self, row: int, reason: FinishReason) -> None:
        """Answer the sequence of one row and fill the gap that it leaves with the last one."""
        sequence, last = self._running[row], self._running[-1]
        processed = sequence.tokens[:-1]
        self._answer(sequence, reason, self._cache.routes[row, : len(processed)])
        self._running[row] = last
        self._running.pop()
        self._cache.finish(row, processed, len(self._running), len(last.tokens) - 1)

    def _answer(self, sequence: RunningSequence, reason: FinishReason, routes: torch.Tensor | None) -> None:
        if not sequence.future.set_running_or_notify_cancel():
            return
        sampled = sequence.tokens[len(sequence.request.input_ids) :]
        versions = [WeightVersionSpan(0, len(sampled), self.weight_version)] if sampled else []
        experts = None
        try:
            if sequence.request.return_routed_experts and routes is not None:
                recorded = routes.to("cpu", copy=True).numpy()
                experts = check_routes(recorded, self.model.config.num_local_experts)
        except RuntimeError as error:
            sequence.future.set_exception(error)
        else:
            result = GenerateResult(sampled, sequence.log_probs, reason, versions, experts, sequence.cached_tokens)
            sequence.future.set_result(result)

    def abort(self, request_id: str | None) -> None:
        """Answer one request, or all, with what was sampled so far."""
        for row in reversed(range(len(self._running))):
            if request_id in (None, self._running[row].request.request_id):
                self._finish(row, FinishReason.ABORT)
        for sequence in list(self._waiting):
            if request_id in (None, sequence.request.request_id):
                self._waiting.remove(sequence)
                self._answer(sequence, FinishReason.ABORT, None)

    def fail(self, error: BaseException) -> None:
        """Give every request the error, and forget the cache, which may be half written."""
        for sequence in (*self._running, *self._waiting):
            if sequence.future.set_running_or_notify_cancel():
                failure = RuntimeError(f"request {sequence.request.request_id}: the rollout engine failed: {error!r}")
                failure.__cause__ = error
                sequence.future.set_exception(failure)
        self._running.clear()
        self._waiting.clear()
        self.drop_cache()

    def score(self, tokens: list[int], temperature: float) -> list[float]:
        """log p(tokens[i] | tokens[:i]) for i >= 1, natural logs at the temperature, without touching the cache."""
        layout = StepLayout([], [Segment(0, len(tokens) - 1, 0, 0)], None, self.model.device)
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
