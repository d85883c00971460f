"""Large adapters are read by a thread that runs on idle processors, for a limited time."""

import os
import threading
import time
from types import SimpleNamespace

import pytest

from outrider.lora import step_yield
from outrider.lora.reader import reader_process
from outrider.lora.reader.idle_thread import run_idle
from outrider.lora.reader.reader_process import _answer_between_steps
from outrider.lora.step_yield import CpuYielder, set_yielder, yield_to_steps
from outrider.platform.core.errors import AdapterError


def policy():
    return os.sched_getscheduler(threading.get_native_id())


def idle_threads():
    return [thread for thread in threading.enumerate() if thread.name == "outrider-idle"]


def wait_ended():
    end = time.monotonic() + 20
    while idle_threads() and time.monotonic() < end:
        time.sleep(0.001)
    assert not idle_threads()


@pytest.fixture
def yielder():
    before = step_yield._yielder
    made = CpuYielder()
    set_yielder(made)
    yield made
    set_yielder(before)


@pytest.fixture
def forbidden(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)


class Files:
    """Files of an adapter, whose reading is `read`; each reading's policy is noted."""

    def __init__(self, num_bytes, read):
        self._num_bytes, self._read = num_bytes, read
        self.policies = []

    def num_bytes(self, source):
        return self._num_bytes

    def read(self, source):
        self.policies.append(policy())
        return self._read()


def broken():
    raise AdapterError("it is broken")


def test_the_result_comes_from_an_idle_thread():
    before = policy()
    assert run_idle(lambda check: policy(), 20, print) == os.SCHED_IDLE
    assert policy() == before
    with pytest.raises(AdapterError):
        run_idle(lambda check: broken(), 20, print)


def test_a_thread_that_is_given_up_ends_at_its_next_check():
    def work(check):
        while True:
            check()
            time.sleep(0.001)

    assert run_idle(work, 0.01, print) is None
    wait_ended()


def test_a_late_result_is_discarded():
    given_up, discarded = threading.Event(), []
    assert run_idle(lambda check: given_up.wait(20) and "late", 0.01, discarded.append) is None
    given_up.set()
    wait_ended()
    assert discarded == ["late"]


def test_a_late_error_disturbs_nobody():
    given_up = threading.Event()
    assert run_idle(lambda check: given_up.wait(20) and broken(), 0.01, print) is None
    given_up.set()
    wait_ended()


@pytest.mark.usefixtures("forbidden")
def test_nothing_is_run_if_the_policy_is_forbidden():
    assert run_idle(lambda check: "a result", 20, print) is None


@pytest.mark.parametrize(("num_bytes", "expected"), [((64 << 20) - 1, os.SCHED_OTHER), (64 << 20, os.SCHED_IDLE)])
def test_only_large_adapters_wait_for_idle_processors(yielder, num_bytes, expected):
    files = Files(num_bytes, broken)
    message, memory = _answer_between_steps(None, files, yielder)
    assert (message["error"][1], memory) == ("it is broken", None)
    assert files.policies == [expected]


@pytest.mark.usefixtures("forbidden")
def test_a_large_adapter_is_read_where_the_policy_is_forbidden(yielder):
    files = Files(1 << 30, broken)
    assert "error" in _answer_between_steps(None, files, yielder)[0]
    assert files.policies == [os.SCHED_OTHER]


def test_a_large_adapter_is_read_with_pauses_if_no_processor_is_idle(yielder, monkeypatch):
    monkeypatch.setattr(reader_process, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(reader_process, "IDLE_BYTES_A_SECOND", 1 << 60)
    slept = []

    def read():
        while policy() == os.SCHED_IDLE:
            yield_to_steps()
            time.sleep(0.001)
        monkeypatch.setattr(step_yield, "time", SimpleNamespace(thread_time=lambda: 1e9, sleep=slept.append))
        monkeypatch.setattr(CpuYielder, "_num_runnable", lambda _: 1000)
        yield_to_steps()
        monkeypatch.undo()
        raise AdapterError("it is broken")

    files = Files(1 << 30, read)
    assert "error" in _answer_between_steps(None, files, yielder)[0]
    assert files.policies == [os.SCHED_IDLE, os.SCHED_OTHER]
    assert slept == [pytest.approx(12 * 10e-3)]
    wait_ended()
