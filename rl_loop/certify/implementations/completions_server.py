"""Server under test with OpenAI's completions API, such as vLLM.

The server must accept token ids as prompts and echo their log-probs.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp

from rl_loop.certify.implementation import (
    ImplementationError,
    ModelImplementation,
    SampledSequence,
    ScoredSequence,
    UnsupportedOperationError,
)

SHOWN_CHARACTERS = 300
"""Maximum length of a response that an error quotes."""


class CompletionsServer(ModelImplementation):
    """Server at ``url``, which ends with ``/v1``. The API has neither updates nor routes."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self.name = f"the server at {self._url}"
        self._runner = asyncio.Runner()
        try:
            models = self._runner.run(self._call("GET", "/models", None))
            # Requests must name a model. A server under test has only one.
            self._model = models["data"][0]["id"]
        except (LookupError, TypeError) as error:
            self.close()
            raise ImplementationError(
                f"{self._url}/models: the response contains no model name ({error!r})"
            ) from error
        except ImplementationError:
            self.close()
            raise

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        # No limit on the total, because the log-probs of a long sequence may take minutes to
        # compute.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=300)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, f"{self._url}{path}", json=body) as response,
            ):
                text = await response.text()
                if response.status != 200:
                    quoted = text[:SHOWN_CHARACTERS]
                    raise ImplementationError(
                        f"{self._url}{path}: HTTP {response.status}: {quoted}"
                    )
                # With None, aiohttp accepts JSON that the server declares as another content type.
                return await response.json(content_type=None)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ImplementationError(f"{self._url}{path}: {error!r}") from error

    def _complete(self, prompt: object, **options: object) -> dict[str, Any]:
        """Return the only choice of a response."""
        body = {"model": self._model, "prompt": prompt, "temperature": 0, **options}
        response = self._runner.run(self._call("POST", "/completions", body))
        try:
            choice: dict[str, Any] = response["choices"][0]
        except (LookupError, TypeError) as error:
            raise ImplementationError(
                f"{self._url}/completions: the response contains no choices ({response})"
            ) from error
        return choice

    def score(self, sequences: Sequence[Sequence[int]]) -> list[ScoredSequence]:
        """Let the server echo prompts with log-probs, one request at a time."""
        results = []
        for sequence in sequences:
            choice = self._complete(list(sequence), max_tokens=1, echo=True, logprobs=1)
            log_probs = (choice.get("logprobs") or {}).get("token_logprobs") or []
            # The first token has no log-prob. After the prompt comes the entry of the sampled
            # token.
            if len(log_probs) < len(sequence) or None in log_probs[1 : len(sequence)]:
                raise ImplementationError(
                    f"{self._url} does not echo the log-probs of a prompt of {len(sequence)} tokens"
                )
            results.append(ScoredSequence([float(value) for value in log_probs[1 : len(sequence)]]))
        return results

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> SampledSequence:
        """Decode greedily. The server must return token ids."""
        choice = self._complete(
            list(prompt),
            max_tokens=max_new_tokens,
            logprobs=1,
            # Both are extensions of OpenAI's API, as in vLLM.
            return_token_ids=True,
            ignore_eos=True,
        )
        ids = choice.get("token_ids")
        if not isinstance(ids, list):
            raise UnsupportedOperationError(f"{self.name} does not return token ids")
        log_probs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        return SampledSequence(ids, [float(value) for value in log_probs])

    def tokenize(self, text: str) -> list[int]:
        """Send text and return the ids that the server reports for it."""
        choice = self._complete(text, max_tokens=1, return_token_ids=True)
        ids = choice.get("prompt_token_ids")
        if not isinstance(ids, list):
            raise UnsupportedOperationError(
                f"{self.name} does not return the token ids of a prompt"
            )
        return ids

    def close(self) -> None:
        """Close the event loop."""
        self._runner.close()
