"""Work that takes too long for the event loop: tokenising, parsing, comparing."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="off-loop")
"""Shared with nobody, so that tools which hang on threads of their own do not stop these."""


async def off_loop[**P, T](function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call ``function`` on a thread, so that other episodes go on meanwhile.

    It must always end."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_THREADS, lambda: function(*arguments, **options))
