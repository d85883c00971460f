"""Large adapters are read by a thread that runs on idle processors, for a limited time."""

import os
import threading
import time

import pytest

from outrider.lora.adapter import AdapterSource
from outrider.lora.reader import reader_client, reader_process
from outrider.lora.reader.idle_thread import run_idle
from outrider.lora.reader.reader_messages import decode_adapter
from outrider.lora.reader.reader_process import BetweenSteps
from outrider.lora.step_yield import LARGE_BYTES
from outrider.platform.core.errors import AdapterError

from ..conftest import write_adapter
from ..reading import Both, assert_same

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="this system has no SCHED_IDLE")


def policy():
    return os.sched_getscheduler(threading.get_native_id())


def idle_threads():
    return [thread for thread in threading.enumerate() if thread.name == "outrider-idle"]


def wait_ended():
    end = time.monotonic() + 30
    while idle_threads() and time.monotonic() < end:
        time.sleep(0.001)
    assert not idle_threads()


@pytest.fixture(autouse=True)
def raised(monkeypatch):
    """Errors that ended a thread."""
    errors = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    yield errors
    assert errors == []


@pytest.fixture(autouse=True)
def _batch(monkeypatch, request):
    """SCHED_BATCH instead of SCHED_IDLE, under which threads would hardly run while other tests do."""
    if "real_policy" not in request.fixturenames:
        monkeypatch.setattr(os, "SCHED_IDLE", os.SCHED_BATCH)


@pytest.fixture
def real_policy():
    """SCHED_IDLE."""


@pytest.fixture
def forbidden(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)


@pytest.fixture
def at_once(monkeypatch):
    """The time limit passes at once."""
    monkeypatch.setattr(reader_process, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(reader_process, "IDLE_BYTES_A_SECOND", 1 << 60)


class Yielder:
    """Notes what it is told, as "pauses" or "checks"."""

    def __init__(self):
        self.begun = []
        self.check = None

    def begin(self, num_bytes, check=None):
        self.begun.append("pauses" if check is None else "checks")
        self.check = check


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


@pytest.mark.usefixtures("real_policy")
def test_the_result_comes_from_an_idle_thread():
    before = policy()
    assert run_idle(lambda check: policy(), 200, print) == os.SCHED_IDLE != os.SCHED_BATCH
    assert policy() == before


def test_an_error_is_raised_by_the_caller_too():
    with pytest.raises(AdapterError):
        run_idle(lambda check: broken(), 20, print)


def test_a_thread_that_is_given_up_ends_at_its_next_check():
    def work(check):
        while True:
            check()
            time.sleep(0.001)

    assert run_idle(work, 0.01, print) is None
    wait_ended()


@pytest.mark.parametrize(("end", "discarded"), [(lambda: "late", ["late"]), (broken, [])], ids=["result", "error"])
def test_what_comes_late_is_discarded(end, discarded):
    given_up, found = threading.Event(), []
    assert run_idle(lambda check: given_up.wait(20) and end(), 0.01, found.append) is None
    given_up.set()
    wait_ended()
    assert found == discarded


@pytest.mark.usefixtures("forbidden")
def test_nothing_is_run_if_the_policy_is_forbidden():
    assert run_idle(lambda check: "a result", 20, print) is None


def test_a_policy_may_be_refused_late(monkeypatch):
    given_up = threading.Event()

    def refuse(*_):
        given_up.wait(20)
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert run_idle(lambda check: "a result", 0.01, print) is None
    given_up.set()
    wait_ended()


@pytest.mark.parametrize(("num_bytes", "is_idle"), [(LARGE_BYTES - 1, False), (LARGE_BYTES, True)])
def test_only_large_adapters_wait_for_idle_processors(num_bytes, is_idle):
    files, yielder = Files(num_bytes, broken), Yielder()
    message, memory = BetweenSteps(files, yielder).answer(None)
    assert (message["error"][1], memory) == ("it is broken", None)
    assert files.policies == [os.SCHED_IDLE if is_idle else policy()]
    assert yielder.begun == ["checks" if is_idle else "pauses"]


@pytest.mark.usefixtures("forbidden")
def test_a_large_adapter_is_read_with_pauses_if_the_policy_is_forbidden():
    files, yielder = Files(LARGE_BYTES, broken), Yielder()
    assert "error" in BetweenSteps(files, yielder).answer(None)[0]
    assert (files.policies, yielder.begun) == ([policy()], ["pauses"])


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("busy_seconds", "second"), [(60.0, ["pauses"]), (0.0, ["checks", "pauses"])])
def test_a_large_adapter_is_read_with_pauses_if_no_processor_is_idle(monkeypatch, busy_seconds, second):
    """The next one does not wait again at once."""
    monkeypatch.setattr(reader_process, "BUSY_SECONDS", busy_seconds)
    yielder = Yielder()
    ended = []

    def read():
        check = yielder.check
        try:
            while policy() == os.SCHED_IDLE:
                check()
                time.sleep(0.001)
        except BaseException as error:
            ended.append(isinstance(error, Exception))
            raise
        broken()

    answering = BetweenSteps(Files(LARGE_BYTES, read), yielder)
    for expected in (["checks", "pauses"], second):
        yielder.begun.clear()
        assert "error" in answering.answer(None)[0]
        assert yielder.begun == expected
        wait_ended()
    assert not any(ended), "no handler of the files' errors takes it for one"


@pytest.fixture(scope="module")
def both():
    with Both() as made:
        yield made


def test_the_rows_are_the_same(both, tmp_path, monkeypatch):
    monkeypatch.setattr(reader_process, "LARGE_BYTES", 0)
    path, yielder = write_adapter(tmp_path / "a"), Yielder()
    message, memory = BetweenSteps(both.make_files(), yielder).answer(AdapterSource(str(path)))
    assert yielder.begun == ["checks"]
    try:
        assert_same(decode_adapter(message["adapter"], memory, both.files), both.by_thread(path))
    finally:
        os.close(memory)


@pytest.mark.usefixtures("at_once")
def test_the_memory_of_a_late_answer_is_freed(both, tmp_path):
    given_up, source = threading.Event(), AdapterSource(str(write_adapter(tmp_path / "a")))
    before = os.listdir("/proc/self/fd")

    def read():
        if policy() == os.SCHED_IDLE:
            given_up.wait(20)
        return both.files.read(source)

    message, memory = BetweenSteps(Files(LARGE_BYTES, read), Yielder()).answer(source)
    assert "adapter" in message
    os.close(memory)
    given_up.set()
    wait_ended()
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("num_bytes", [LARGE_BYTES, 168 << 20, 64 << 30])
def test_the_engine_waits_for_both_ways_to_read(num_bytes):
    idle = reader_process.IDLE_SECONDS + num_bytes / reader_process.IDLE_BYTES_A_SECOND
    assert reader_client.READ_SECONDS + num_bytes / reader_client.BYTES_A_SECOND >= 2 * idle
