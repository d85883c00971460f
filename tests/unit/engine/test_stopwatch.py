"""Times of steps: on a GPU those of events, which the host reads when the step has ended anyway."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from outrider.platform.engine.runner import device_queue
from outrider.platform.engine.runner.device_queue import DeviceQueue


class Stream:
    """A device that works through what the host has queued. Times are in milliseconds."""

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.num_waits = 0

    def launch(self, milliseconds: float) -> None:
        """Queue work. The device begins it when all earlier work is done."""
        self.device = max(self.device, self.host) + milliseconds

    def event(self, *, enable_timing: bool) -> Event:
        """Stand-in for `torch.cuda.Event`."""
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, -1.0

    def record(self, stream: object) -> None:
        self.at = max(self.stream.device, self.stream.host)

    def synchronize(self) -> None:
        self.stream.num_waits += 1
        self.stream.host = max(self.stream.host, self.at)

    def elapsed_time(self, end: Event) -> float:
        assert end.at <= self.stream.host, "the host reads an event that has not come"
        return end.at - self.at


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    cuda = SimpleNamespace(Event=made.event, current_stream=lambda device: made)
    monkeypatch.setattr(device_queue, "torch", SimpleNamespace(cuda=cuda))
    return made


def test_a_step_and_its_gap_have_the_times_of_the_device(stream: Stream) -> None:
    """The host launches two steps ahead, and drafting between them takes 3 ms."""
    queue, watches = DeviceQueue(torch.device("cuda"), asynchronous=True), []
    for _ in range(2):
        watches.append(queue.stopwatch())
        stream.launch(10.0)
        watches[-1].stop()
        stream.launch(3.0)
        stream.host += 0.5
    assert stream.num_waits == 0
    assert [watch.seconds() for watch in watches] == pytest.approx([0.01, 0.01])
    assert watches[0].gap() is None
    assert watches[1].gap() == pytest.approx(0.003)
    assert stream.num_waits == 2


def test_a_host_that_is_late_counts_as_a_gap(stream: Stream) -> None:
    queue = DeviceQueue(torch.device("cuda"), asynchronous=False)
    first = queue.stopwatch()
    stream.launch(10.0)
    first.stop()
    stream.host = 17.0
    second = queue.stopwatch()
    stream.launch(4.0)
    second.stop()
    assert second.seconds() == pytest.approx(0.004)
    assert second.gap() == pytest.approx(0.007)


def test_a_step_that_failed_has_no_end() -> None:
    queue = DeviceQueue(torch.device("cpu"), asynchronous=False)
    queue.stopwatch()
    watch = queue.stopwatch()
    watch.stop()
    assert watch.gap() is None
