"""The threads in which adapters are fetched, and the results that their calls share."""

import threading
import time

import pytest

from outrider.platform.client.adapters.sources.shared_calls import SharedCalls
from outrider.platform.client.waiting import Task, wait_for
from outrider.platform.core.errors import AdapterError, OverloadedError, ShuttingDownError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_threads_are_few_and_their_queue_is_bounded():
    gate = threading.Event()
    calls = SharedCalls("test", 2, 3)
    started: list[int] = []

    def job(i: int) -> int:
        started.append(i)
        assert gate.wait(10)
        return i

    futures = [calls.call(i, lambda i=i: job(i)) for i in range(2)]
    while len(started) < 2:
        time.sleep(1e-3)
    futures += [calls.call(i, lambda i=i: job(i)) for i in range(2, 5)]
    with pytest.raises(OverloadedError):
        calls.call(9, lambda: job(9))
    assert started in ([0, 1], [1, 0])
    gate.set()
    assert [future.result(10) for future in futures] == [0, 1, 2, 3, 4]


def test_every_caller_gets_an_error_of_its_own(clock):
    calls = SharedCalls("test", 1, 10, clock)

    def fail() -> None:
        raise AdapterError("bad", param="lora_path")

    errors = []
    for _ in range(2):
        with pytest.raises(AdapterError) as caught:
            Task(wait_for(calls.call("k", fail, nothing_seconds=5.0))).result()
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert (errors[0].message, errors[0].param) == ("bad", "lora_path")


def test_answers_are_kept_for_a_while(clock):
    calls = SharedCalls("test", 1, 10, clock)
    made: list[str] = []

    def ask(key: str, result: str | None = "x") -> None:
        calls.call(key, lambda: made.append(key) or result, 10.0, 1.0).result(10)

    for key, result in (("a", "x"), ("b", None)) * 2:
        ask(key, result)
    assert made == ["a", "b"]
    clock.now += 1.0
    ask("a")
    ask("b", None)
    assert made == ["a", "b", "b"], "that there is nothing is kept for a shorter time"
    calls.drop("a")
    ask("a")
    assert made == ["a", "b", "b", "a"]


def test_waiting_requests_can_be_failed(clock):
    calls, gate = SharedCalls("test", 1, 10, clock), threading.Event()
    waiting = calls.call("k", lambda: gate.wait(10), 100.0)
    calls.fail_waiting(ShuttingDownError("the end"))
    with pytest.raises(ShuttingDownError):
        waiting.result(10)
    gate.set()
    assert calls.call("k", lambda: 5).result(10) == 5, "a later call asks again"
