"""Tasks that wait for other threads, written once: coroutines await them, callers without an event loop block."""

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

Steps: TypeAlias = Generator[Future[Any], None, T]
"""Steps of a task: each future that it has to wait for is yielded, and is done when the generator resumes."""


class Task(Generic[T]):
    """`await task`, `task.result()` in a thread that may block, or `yield from task` in another task. Used once."""

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps

    def __iter__(self) -> Steps[T]:
        return self._steps

    def result(self) -> T:
        """Run the task in this thread."""
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


def dual(function: Callable[P, Steps[T]]) -> Callable[P, Task[T]]:
    """Decorate a generator function: its calls return `Task`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Task[T]:
        return Task(function(*args, **kwargs))

    return call


def wait_for(future: Future[T]) -> Steps[T]:
    """Wait for a future that several may share: each gets a copy of its typed error, since a traceback grows."""
    if not future.done():
        yield future
    try:
        return future.result()
    except OutriderError as error:
        raise type(error)(error.message, param=error.param) from error
