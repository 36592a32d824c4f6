"""Threads for work that must not run on the event loop: slow functions, and users' functions."""

import asyncio
import contextvars
import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

MAX_HUNG_CALLS = 64
"""Maximum calls of one function that hang at the same time. Each keeps a thread until it
returns."""

_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="off-loop")
"""Threads for this project's functions only, so that a user's hanging function does not block
them."""

_hanging: Counter[str] = Counter()
"""Abandoned calls that have not returned, by the name of their function."""
_lock = threading.Lock()
"""Guards ``_hanging``."""

logger = logging.getLogger(__name__)


async def run_in_thread[**P, T](
    function: Callable[P, T], *arguments: P.args, **options: P.kwargs
) -> T:
    """Call ``function`` on a thread, so that other episodes continue in the meantime.

    The function must return, because 2 threads serve all callers. Use ``call_user_code`` for
    users' functions, which get a separate thread.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_THREADS, lambda: function(*arguments, **options))


class TooManyHungCallsError(RuntimeError):
    """Too many calls of a user's function hang, so it is not called. The message names it."""


async def call_user_code[T](function: Callable[[], T], name: str) -> T:
    """Call a user's function on a separate thread.

    A function that hangs keeps only its thread: later calls get other threads, and the process can
    end. The caller limits the time by cancelling.

    Args:
        function: the user's function, without arguments.
        name: name of the function in messages.

    Raises:
        TooManyHungCallsError: MAX_HUNG_CALLS earlier calls of the function hang.
    """
    if _hanging[name] >= MAX_HUNG_CALLS:
        raise TooManyHungCallsError(
            f"{name}: {MAX_HUNG_CALLS} calls have not returned, so no further call is started. Add a time "
            "limit to this function"
        )

    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()
    call = _Call(function, loop, result, name)
    # The function sees the caller's context variables. A daemon thread does not keep the process
    # from exiting, while threads of an executor are joined at exit.
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(call.run,), name=name[:60], daemon=True)
    thread.start()
    try:
        return await result
    except asyncio.CancelledError:
        call.abandon()
        raise


class _Call:
    """One call of a user's function."""

    def __init__(
        self,
        function: Callable[[], Any],
        loop: asyncio.AbstractEventLoop,
        result: "asyncio.Future[Any]",
        name: str,
    ) -> None:
        self._function = function
        self._loop = loop
        self._result = result
        self._name = name
        self._has_returned = False
        self._is_abandoned = False

    def run(self) -> None:
        """Call the function and pass its result or exception to the event loop."""
        value: Any = None
        error: BaseException | None = None
        try:
            value = self._function()
        # A thread swallows SystemExit, and the caller would wait without end.
        except BaseException as raised:
            error = raised
        with _lock:
            self._has_returned = True
            if self._is_abandoned:
                _hanging[self._name] -= 1
        # The event loop may be closed already.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._hand_over, value, error)

    def abandon(self) -> None:
        """Record that no caller waits for this call."""
        with _lock:
            if self._has_returned:
                return
            self._is_abandoned = True
            _hanging[self._name] += 1
            hanging = _hanging[self._name]
        logger.warning(
            "%s did not return within its time limit. Its hanging calls: %d", self._name, hanging
        )

    def _hand_over(self, value: Any, error: BaseException | None) -> None:
        # The caller was cancelled.
        if self._result.done():
            return
        if error is None:
            self._result.set_result(value)
        # asyncio's futures reject StopIteration, because it would end the awaiting coroutine.
        elif isinstance(error, StopIteration):
            self._result.set_exception(RuntimeError(f"{self._name} raised StopIteration"))
        else:
            self._result.set_exception(error)
