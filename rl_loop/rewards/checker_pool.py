"""Judges answers of the policy in separate processes, so that they do not delay other episodes."""

import asyncio
from typing import Any

from rl_loop.forked_pool import CallLimitError, ForkedPool, PoolError


class CheckerError(RuntimeError):
    """A checker could not run: it did not start, it died, or its data is missing.

    The failure says nothing about the answer. An episode whose reward raises this error is
    invalid, not wrong.
    """


class CheckerPool(ForkedPool):
    """Process pool for questions with untrusted answers of the policy."""

    def judge(self, question: Any, *, too_expensive: Any, control: Any = None) -> Any:
        """Return the function's verdict. Can be called from any thread.

        Args:
            question: argument of the function.
            too_expensive: verdict on an answer that exceeds the limits of a question, or kills the
                processes that judge it.
            control: see ``ForkedPool.ask``.

        Raises:
            CheckerError: if no process can be started, no process answers any question, or
                processes die while the machine is out of memory.
        """
        try:
            return self.ask(question, control)
        except CallLimitError:
            return too_expensive
        except PoolError as error:
            raise CheckerError(str(error)) from None

    async def judge_async(self, question: Any, *, too_expensive: Any, control: Any = None) -> Any:
        """Run ``judge`` on a thread, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self.threads,
            lambda: self.judge(question, too_expensive=too_expensive, control=control),
        )
