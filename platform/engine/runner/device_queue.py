"""The order of steps on the device: work runs in order of submission, and its result is collected later."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class DeviceStopwatch:
    """Time of a device from the watch's construction to its first `stop`, and the gap before it. On a GPU the times are
    those of events of the current stream, and the host waits in `seconds` alone."""

    __slots__ = ("_before", "_begin", "_device", "_end")

    def __init__(self, device: torch.device, before: DeviceStopwatch | None = None) -> None:
        """`before`: watch of the step before, which is stopped unless the step failed."""
        self._device = device
        self._before = None if before is None else before._end
        self._begin = self._now()
        self._end: Any = None

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, first: Any, last: Any) -> float:
        if self._device.type != "cuda":
            return float(last - first)
        return float(first.elapsed_time(last)) / 1000.0  # from milliseconds

    def stop(self) -> None:
        """Stop, unless it is stopped."""
        if self._end is None:
            self._end = self._now()

    def seconds(self) -> float:
        """Seconds from start to stop."""
        if self._device.type == "cuda":
            self._end.synchronize()
        return self._between(self._begin, self._end)

    def gap(self) -> float | None:
        """Seconds between the stop of the watch before and the start of this one: drafting, and time in which the
        device waits for the host. None without a watch before. Call it after `seconds`."""
        return None if self._before is None else self._between(self._before, self._begin)


class Done(Generic[T]):
    """Result of work done, or launched, by the caller's thread. A library future takes microseconds more."""

    __slots__ = ("_error", "_value")

    def __init__(self, work: Callable[[], T]) -> None:
        self._error: Exception | None = None
        try:
            self._value = work()
        except Exception as error:
            self._error = error

    def result(self) -> T:
        """Result of the work, or its error."""
        if self._error is not None:
            raise self._error
        return self._value


class DeviceQueue:
    """Serial work of a device.

    A GPU's work is launched by the caller's thread and not waited for. A CPU's is done by that thread, or, if steps
    overlap, by a separate thread: torch releases Python's lock within its operations.
    """

    def __init__(self, device: torch.device, *, asynchronous: bool) -> None:
        """Prepare a queue for `device`; `asynchronous`: the host may plan and launch a step while another one runs."""
        self.overlaps = asynchronous
        self._device = device
        self._last: Future[Any] | None = None
        self._stopwatch: DeviceStopwatch | None = None
        self._thread: ThreadPoolExecutor | None = None
        if asynchronous and device.type != "cuda":
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="steps")

    def submit(self, work: Callable[[], T]) -> Future[T] | Done[T]:
        """Run `work` after all work before it; its errors are raised by `result` alone. Tensors of the result on
        a GPU may still have to be computed."""
        if self._thread is None:
            return Done(work)
        self._last = future = self._thread.submit(work)
        return future

    def stopwatch(self) -> DeviceStopwatch:
        """Start to time a step, in its work; its gap is the time since the last timed step."""
        self._stopwatch = DeviceStopwatch(self._device, self._stopwatch)
        return self._stopwatch

    def drain(self) -> None:
        """Wait until all is done."""
        if self._last is not None:
            self._last.exception()  # waits
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Wait, and take no more work."""
        self.drain()
        if self._thread is not None:
            self._thread.shutdown()
