"""Work that waits for other threads, written once: coroutines await it, and callers without an event loop block."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, cast

from ..core.errors import OutriderError

P = ParamSpec("P")
T = TypeVar("T")

Waits: TypeAlias = Generator[Future[Any], None, T]
"""Steps of the work: each future that the work has to wait for is yielded, and is done when the generator goes on."""


class Work(Generic[T]):
    """`await work`, `work.result()` where a thread may wait, or `yield from work` in other work. Used once."""

    def __init__(self, steps: Waits[T]) -> None:
        self._steps = steps

    def __iter__(self) -> Waits[T]:
        return self._steps

    def result(self) -> T:
        """Do the work in this thread."""
        try:
            while True:
                wait((next(self._steps),))
        except StopIteration as end:
            return cast(T, end.value)

    def __await__(self) -> Generator[Any, None, T]:
        return self._run().__await__()

    async def _run(self) -> T:
        try:
            while True:
                future = next(self._steps)
                with contextlib.suppress(Exception):  # the steps raise it
                    # Shielded: a caller that is cancelled ends nothing for the others.
                    await asyncio.shield(asyncio.wrap_future(future))
        except StopIteration as end:
            return cast(T, end.value)


def waits(function: Callable[P, Waits[T]]) -> Callable[P, Work[T]]:
    """Decorate a generator function: its calls return `Work`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Work[T]:
        return Work(function(*args, **kwargs))

    return call


def answer(future: Future[T]) -> Waits[T]:
    """Wait for a future that several may share: each gets a copy of its typed error, since a traceback grows."""
    if not future.done():
        yield future
    try:
        return future.result()
    except OutriderError as error:
        raise type(error)(error.message, param=error.param) from error
