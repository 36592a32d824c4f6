"""Shows the tokens of a turn while the engine samples them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rl_loop.engines.protocol import (
    GenerateRequest,
    GenerateResult,
    NewTokens,
    RolloutEngine,
    TokenChoice,
)


@dataclass(eq=False)
class TurnObserver:
    """Tokens of one turn, as sampled so far."""

    top_log_probs: int = 0
    """Number of most likely tokens to collect for each position."""
    on_change: Callable[[], None] = lambda: None
    """Called after new tokens."""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top: list[list[TokenChoice]] = field(default_factory=list)
    """Most likely tokens of each position."""
    read: list[int] = field(default_factory=list)
    """Tokens that ``take`` has returned."""

    def restart(self, begin: int) -> None:
        """Drop the tokens from ``begin`` on, because the engine samples them again."""
        del self.ids[begin:], self.log_probs[begin:], self.top[begin:]

    def add(self, tokens: NewTokens) -> None:
        """Append tokens."""
        self.ids += tokens.ids
        self.log_probs += tokens.log_probs
        self.top += tokens.top_log_probs
        self.on_change()

    def take(self) -> NewTokens:
        """Return the tokens since the last call."""
        begin = len(self.read)
        self.read += self.ids[begin:]
        return NewTokens(self.ids[begin:], self.log_probs[begin:], self.top[begin:])

    def is_prefix_of(self, ids: list[int]) -> bool:
        """Return True if all tokens that were read are the first ones of the complete turn."""
        return self.read == ids[: len(self.read)]


class ObservedEngine:
    """An engine whose turns can be observed. All other calls reach the engine unchanged."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self._observers: dict[str, tuple[TurnObserver, int]] = {}
        """Observer of a turn and the number of its prompt tokens, by episode and turn."""

    @contextmanager
    def observing(self, turn: str, prompt_tokens: int, observer: TurnObserver) -> Iterator[None]:
        """Let an observer see the tokens of a turn.

        Args:
            turn: ``EPISODE/turn``, the beginning of the turn's request ids.
            prompt_tokens: number of tokens before the turn.
            observer: observer of the turn.
        """
        self._observers[turn] = observer, prompt_tokens
        try:
            yield
        finally:
            del self._observers[turn]

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one continuation."""
        observed = self._observers.get(request.request_id.rsplit("/", 1)[0])
        if observed is None:
            return await self.engine.generate(request)
        observer, prompt_tokens = observed
        # The first tokens of an interrupted turn are a part of its next request.
        observer.restart(len(request.input_ids) - prompt_tokens)
        return await self.engine.generate(
            replace(request, on_tokens=observer.add, top_log_probs=observer.top_log_probs)
        )

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Return log-probs of a text."""
        return await self.engine.score(input_ids, temperature)

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all."""
        await self.engine.abort(request_id)

    async def close(self) -> None:
        """Release all resources of the engine."""
        await self.engine.close()
