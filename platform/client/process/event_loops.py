"""Runs a coroutine of one event loop for callers in that loop, in another thread, or without a loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any


class CompletedAwaitable:
    """Awaitable that does not wait: its result is there."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()

    def done(self) -> bool:
        """See asyncio.Future."""
        return True


def in_event_loop() -> bool:
    """Report if the caller runs in an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_in(
    loop: asyncio.AbstractEventLoop | None, work: Callable[[], Coroutine[Any, Any, None]]
) -> CompletedAwaitable | asyncio.Future[None]:
    """Run `work` in `loop` (None: in any loop). A caller in that loop is not blocked; for others the work is done on
    return. When the loop is closed nothing is done."""
    if loop is not None and loop.is_closed():
        return CompletedAwaitable()
    if in_event_loop():
        return asyncio.ensure_future(work())
    if loop is None:
        asyncio.run(work())
    elif loop.is_running():  # in another thread
        asyncio.run_coroutine_threadsafe(work(), loop).result()
    else:
        loop.run_until_complete(work())
    return CompletedAwaitable()
