"""Where the work of steps goes: each piece runs after those given before it, and what it returns is asked for later."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Ticket(Protocol[T_co]):
    """A piece of work that was given to a queue."""

    def value(self) -> T_co:
        """Result of the work, or its error. Tensors on a GPU may still have to be computed."""
        ...

    def seconds(self) -> float:
        """How long the device was at it. To be asked when the host has its results."""
        ...


class DeviceQueue(Protocol):
    """A device that computes one piece of work after the other."""

    @property
    def overlaps(self) -> bool:
        """Whether the host may go on while the work is done."""
        ...

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        """Have `work` done after all work before it. It raises in `Ticket.value` alone."""
        ...

    def mark(self) -> None:
        """For the work itself: what it does from now on is not in `Ticket.seconds`, which does not wait for it."""
        ...

    def drain(self) -> None:
        """Wait until all is done."""
        ...

    def close(self) -> None:
        """Wait, and take no more."""
        ...


class _Done(Generic[T]):
    """A `Ticket` of work that the caller's thread has done, or launched."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._started = time.perf_counter()
        self._value: T | None = None
        self._error: BaseException | None = None
        try:
            self._value = work()
        except Exception as error:
            self._error = error

    def value(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # without an error it is there

    def seconds(self) -> float:
        return time.perf_counter() - self._started


class AtOnce:
    """The host does the work, or waits for it, before it goes on."""

    overlaps = False

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        """See DeviceQueue."""
        return _Done(work)

    def mark(self) -> None:
        """Nothing is left to the device: the host asks for the seconds when all is done."""

    def drain(self) -> None:
        """Nothing is under way."""

    close = drain


class _OnStream(_Done[T]):
    """Launched work, between two events of its stream."""

    def __init__(self, work: Callable[[], T], stream: torch.cuda.Stream) -> None:
        begin, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._begin = begin
        begin.record(stream)
        super().__init__(work)
        self._end.record(stream)

    def end_at(self, event: torch.cuda.Event) -> None:
        """The seconds are those up to `event`, which was recorded before."""
        self._end = event

    def seconds(self) -> float:
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1000.0  # milliseconds


class CudaQueue:
    """The current stream of a GPU: work only launches, and does not wait for what it launched. Times are the device's
    also where steps do not overlap: drafts of the step before may still be under way when one is launched."""

    def __init__(self, device: torch.device, *, overlaps: bool) -> None:
        self._device = device
        self.overlaps = overlaps
        self._marked: torch.cuda.Event | None = None

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        """See DeviceQueue."""
        self._marked = None
        ticket = _OnStream(work, torch.cuda.current_stream(self._device))
        if self._marked is not None:
            ticket.end_at(self._marked)
        return ticket

    def mark(self) -> None:
        """See DeviceQueue."""
        self._marked = torch.cuda.Event(enable_timing=True)
        self._marked.record(torch.cuda.current_stream(self._device))

    def drain(self) -> None:
        """See DeviceQueue."""
        torch.cuda.current_stream(self._device).synchronize()

    close = drain


class _InThread(Generic[T]):
    """A `Ticket` of work in another thread."""

    def __init__(self, future: Future[tuple[T, float]]) -> None:
        self._future = future

    def value(self) -> T:
        return self._future.result()[0]

    def seconds(self) -> float:
        return self._future.result()[1]


class ThreadQueue:
    """A thread in the role of a device: torch releases Python's lock within its operations."""

    overlaps = True

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self._last: Future[object] | None = None
        self._marked: float | None = None

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        """See DeviceQueue."""

        def timed() -> tuple[T, float]:
            self._marked = None
            started = time.perf_counter()
            value = work()
            return value, (self._marked or time.perf_counter()) - started

        future = self._thread.submit(timed)
        self._last = future  # type: ignore[assignment]  # of whatever type
        return _InThread(future)

    def mark(self) -> None:
        """See DeviceQueue."""
        self._marked = time.perf_counter()

    def drain(self) -> None:
        """See DeviceQueue."""
        if self._last is not None:
            self._last.exception()  # waits

    def close(self) -> None:
        """See DeviceQueue."""
        self._thread.shutdown()


def make_queue(device: torch.device, *, asynchronous: bool) -> DeviceQueue:
    """The queue for `device`; `asynchronous`: the host goes on while work is done."""
    if device.type == "cuda":
        return CudaQueue(device, overlaps=asynchronous)
    return ThreadQueue() if asynchronous else AtOnce()
