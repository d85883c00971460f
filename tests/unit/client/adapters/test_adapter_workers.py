"""The threads in which adapters are fetched, and what their calls share and remember."""

import threading
import time

import pytest

from outrider.platform.client.adapters.sources.shared_calls import SharedCalls, TimedMemory
from outrider.platform.client.adapters.sources.workers import Workers
from outrider.platform.core.errors import AdapterError, OutriderError, OverloadedError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_workers_are_few_and_their_queue_is_bounded():
    gate = threading.Event()
    workers = Workers("test", 2, 3)
    started: list[int] = []

    def job(i: int) -> int:
        started.append(i)
        assert gate.wait(10)
        return i

    futures = [workers.submit(lambda i=i: job(i)) for i in range(2)]
    while len(started) < 2:
        time.sleep(1e-3)
    futures += [workers.submit(lambda i=i: job(i)) for i in range(2, 5)]
    with pytest.raises(OverloadedError):
        workers.submit(lambda: job(9))
    assert started in ([0, 1], [1, 0])
    gate.set()
    assert [future.result(10) for future in futures] == [0, 1, 2, 3, 4]


def test_shared_calls_give_every_caller_an_error_of_its_own(clock):
    calls = SharedCalls(Workers("test", 1, 10), 5.0, clock)

    def fail() -> None:
        raise AdapterError("bad", param="lora_path")

    first = calls.call("k", fail)
    assert first.exception(10) is not None
    errors = []
    while len(errors) < 2:  # the call may still be ending
        try:
            calls.call("k", fail).exception(10)
        except OutriderError as error:
            errors.append(error)
    assert errors[0] is not errors[1]
    assert (errors[0].message, errors[0].param) == ("bad", "lora_path")


def test_timed_memory(clock):
    memory: TimedMemory[str, None] = TimedMemory(2, clock)
    memory.put("a", None, 1.0)
    assert memory.get("a") == (None,)
    clock.now += 1.0
    assert memory.get("a") is None
    for key in "abc":
        memory.put(key, None, 10.0)
    assert [memory.get(key) for key in "abc"] == [None, (None,), (None,)]
