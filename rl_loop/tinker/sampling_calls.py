"""Calls of sampling clients."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_loop.engines.protocol import SamplingParams
from rl_loop.tinker.errors import bad_request
from rl_loop.tinker.fields import read, read_optional
from rl_loop.tinker.futures import RequestFuture
from rl_loop.tinker.policy import SampleRequest, Samples
from rl_loop.tinker.scheduler import SampleOperation
from rl_loop.tinker.state import Sampler, TinkerState
from rl_loop.tinker.store import CheckpointName
from rl_loop.tinker.training_calls import check_base_model
from rl_loop.tinker.wire import write_samples

MAX_SAMPLES = 1024
"""Maximum number of samples of one request."""
PART_SAMPLES = 64
"""Number of continuations in a part of a request."""
UNSUPPORTED = (
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "record_stability_info",
)
"""Options that are not served."""


class SamplingCalls:
    """Sampling sessions and their requests."""

    def __init__(self, state: TinkerState) -> None:
        """Serve a server's samplers."""
        self._state = state

    def create_session(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create a sampling session for the base or for a checkpoint."""
        state = self._state
        session_id = state.session(owner, body.get("session_id"))
        sampler_id = f"{session_id}:sample:{read(body, 'sampling_session_seq_id', int)}"
        path = read_optional(body, "model_path", str)
        snapshot = state.base_snapshot
        if path is None:
            check_base_model(state, body.get("base_model"))
        elif sampler_id not in state.samplers:
            name = CheckpointName.parse(path)
            facts = state.checkpoint(owner, name)
            state.store.check_base(name, facts, state.model.base_digest)
            if name.kind == "external_weights":
                raise bad_request(f"{name} is for other programs. Sample from other weights")
            snapshot = state.snapshots.link(facts.rank, state.store.tensors(name))
        # A repeated call keeps the snapshot of the first one.
        sampler = Sampler(sampler_id, session_id, snapshot, path)
        state.samplers.setdefault(sampler_id, sampler)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def describe(self, owner: str, sampler_id: str) -> dict[str, Any]:
        """Describe a sampling session."""
        sampler = self._state.sampler(owner, sampler_id)
        return {
            "sampler_id": sampler.sampler_id,
            "base_model": self._state.model.api_name,
            "model_path": sampler.model_path,
        }

    def sample(self, owner: str, body: Mapping[str, Any]) -> tuple[RequestFuture, list[str]]:
        """Sample continuations of a prompt.

        Returns:
            The future of the request, and the id of each continuation.
        """
        state = self._state
        sampler = state.sampler(owner, body.get("sampling_session_id"))
        name = f"{sampler.sampler_id}/{read(body, 'seq_id', int)}"
        request = self._read_request(name, body)
        sequence_ids = [f"{name}/{number}" for number in request.numbers]
        request_id = f"{name}/sample"
        known = state.futures.find(request_id)
        if known is not None:
            return known, sequence_ids
        state.scheduler.check_room()
        state.futures.check_room(sampler.session_id)
        future = state.futures.add(request_id, sampler.session_id)
        operation = SampleOperation(sampler.snapshot, split(request), future, combine)
        state.scheduler.add_sample(operation)
        return future, sequence_ids

    def _read_request(self, name: str, body: Mapping[str, Any]) -> SampleRequest:
        """Read a request. Raises ApiError."""
        for option in UNSUPPORTED:
            if body.get(option):
                raise bad_request(f"{option} is not served here")
        prompt = read_prompt(read(body, "prompt", dict), self._state.model.vocabulary_size)
        count = read(body, "num_samples", int, 1)
        if not 1 <= count <= MAX_SAMPLES:
            raise bad_request(f"num_samples ({count}) must be from 1 to {MAX_SAMPLES}")
        last = read_optional(body, "prompt_logprobs_last_n", int)
        if last is not None and not 1 <= last < len(prompt):
            raise bad_request(
                f"prompt_logprobs_last_n ({last}) must be from 1 to {len(prompt) - 1}"
            )
        return SampleRequest(
            name=name,
            prompt=prompt,
            numbers=range(count),
            sampling=self._read_sampling(read(body, "sampling_params", dict), len(prompt)),
            scores_prompt=read(body, "prompt_logprobs", bool, False),
            last_scored=last,
        )

    def _read_sampling(self, options: Mapping[str, Any], prompt_tokens: int) -> SamplingParams:
        """Read the parameters of continuations. Raises ApiError."""
        model = self._state.model
        free = model.max_tokens - prompt_tokens
        max_tokens = read(options, "max_tokens", int, max(free, 1))
        if not 1 <= max_tokens <= free:
            raise bad_request(
                f"prompt ({prompt_tokens} tokens) and max_tokens ({max_tokens}) exceed the context "
                f"of {model.max_tokens} tokens"
            )
        if read(options, "top_k", int, -1) > 0:
            raise bad_request("top_k is not served here. Use top_p, or leave it out")
        temperature, top_p = (
            read(options, "temperature", float, 1.0),
            read(options, "top_p", float, 1.0),
        )
        if not 0 <= temperature <= 100 or not 0 < top_p <= 1:
            raise bad_request(f"temperature ({temperature:g}) or top_p ({top_p:g}) is out of range")
        return SamplingParams(
            max_new_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            stop_token_ids=self._read_stop(options.get("stop")),
            seed=read_optional(options, "seed", int),
        )

    def _read_stop(self, stop: object) -> tuple[int, ...]:
        """Return the ids that end a continuation. None stands for the end of a turn."""
        if stop is None:
            return self._state.limits.stop_token_ids
        if not isinstance(stop, list) or not all(type(one) is int for one in stop):
            raise bad_request("stop must be a list of token ids. Texts are not served here")
        return tuple(stop)


def read_prompt(prompt: Mapping[str, Any], vocabulary_size: int) -> list[int]:
    """Return the tokens of a prompt. Raises ApiError."""
    tokens: list[int] = []
    for chunk in read(prompt, "chunks", list):
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            raise bad_request("prompt: the model reads text only, not images or audio")
        tokens += read(chunk, "tokens", list)
    if not tokens:
        raise bad_request("prompt has no tokens")
    if not all(type(token) is int and 0 <= token < vocabulary_size for token in tokens):
        raise bad_request(f"prompt has ids that are not integers from 0 to {vocabulary_size - 1}")
    return tokens


def split(request: SampleRequest) -> list[tuple[SampleRequest, int]]:
    """Return the parts of a request, each with its number of continuations."""
    parts = []
    for first in range(0, len(request.numbers), PART_SAMPLES):
        numbers = request.numbers[first : first + PART_SAMPLES]
        # The first part has the scores of the prompt.
        scores = request.scores_prompt and first == 0
        parts.append((replace(request, numbers=numbers, scores_prompt=scores), len(numbers)))
    return parts


def combine(results: Sequence[Samples]) -> bytes:
    """Return the answer of a request from the results of its parts."""
    sequences = [sequence for result in results for sequence in result.sequences]
    return write_samples(sequences, results[0].prompt_log_probs)
