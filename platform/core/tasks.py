"""Tasks of an event loop that end together or are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def cancel(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks and wait until they have ended. One that has ended, and None, is left alone."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def run_all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of coroutines that run at once; one that fails ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)
