"""Loader threads: concurrent reads, their bytes, and the order of waits."""

import threading
from pathlib import Path

import pytest

from outrider.lora.device.sites import AdapterHooks
from outrider.lora.files.folder import AdapterFiles
from outrider.lora.tiers.loader_threads import LoaderThreads
from outrider.platform.core.errors import AdapterError, InvalidUserInputError, NotFoundError
from outrider.platform.core.lora_request import LoRARequest

from ..conftest import make_request, settle

SECONDS = 10
"""Longest wait of a test that passes: only one that fails waits so long."""


class Gate:
    """Counts work in flight, and holds it until `open` is set."""

    def __init__(self):
        self.open = threading.Event()
        self.now, self.most, self.names = 0, 0, []
        self._changed = threading.Condition()

    def through(self, name):
        with self._changed:
            self.now += 1
            self.most = max(self.most, self.now)
            self.names.append(name)
            self._changed.notify_all()
        assert self.open.wait(SECONDS)
        with self._changed:
            self.now -= 1
        return name

    def wait_for(self, count):
        """Wait until `count` jobs have begun; returns whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.names) >= count, SECONDS)


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.open.set()


@pytest.fixture
def reads(gate, monkeypatch):
    """Reads of files wait at the gate."""
    real = AdapterFiles.read
    monkeypatch.setattr(
        AdapterFiles, "read", lambda self, source: (gate.through(source.path[-1]), real(self, source))[1]
    )
    return gate


def finished(loader):
    found = []
    while loader.num_in_flight:
        found += loader.wait(SECONDS)
    return found


# --- in an engine ---


def test_adapters_of_requests_are_read_at_once(make_manager, folder, reads):
    manager = make_manager(max_loras=4, max_cpu_loras=4, hooks=AdapterHooks(num_readers=3))
    requests = [make_request(name, folder(name), name) for name in "abcd"]
    for request in requests:
        manager.resolve(request)
    assert reads.wait_for(3), "three are read at once"
    reads.open.set()
    assert [settle(manager, request) for request in requests] == [None] * 4
    assert reads.most == 3
    for request in requests:
        manager.forget(request)


def test_calls_and_requests_share_the_threads(make_manager, folder, reads):
    manager = make_manager(hooks=AdapterHooks(num_readers=2))
    request = make_request("a", folder("a"))
    manager.resolve(request)
    loads = {name: LoRARequest(name, path=folder(name)) for name in "bc"}
    pending = {name: manager.catalog.start("load", {"request": lora}) for name, lora in loads.items()}
    assert reads.wait_for(2)
    assert sorted(reads.names) == ["a", "b"], "in request order"
    assert not any(load.done() for load in pending.values())
    reads.open.set()
    assert [load.result().level for load in pending.values()] == ["host", "host"]
    assert settle(manager, request) is None
    assert reads.most == 2
    assert len(reads.names) == 3, "each is read once"
    manager.forget(request)


def test_a_call_for_files_that_cannot_be_read(make_manager, tmp_path):
    manager = make_manager()
    load = manager.catalog.start("load", {"request": LoRARequest("a", path=str(tmp_path / "none"))})
    with pytest.raises(AdapterError, match="none"):
        load.result()
    assert manager.catalog.list() == []


@pytest.mark.parametrize("meanwhile", ["nothing", "unload", "other folder"])
def test_a_pin_whose_adapter_is_unloaded_or_replaced_while_its_files_are_read(make_manager, folder, reads, meanwhile):
    catalog = make_manager(hooks=AdapterHooks(num_readers=2)).catalog
    old = LoRARequest("a", path=folder("a"))
    catalog.register([old])
    pin = catalog.start("pin", {"name": "a"})
    assert reads.wait_for(1)
    if meanwhile == "nothing":
        reads.open.set()
        assert pin.result().pinned
        return
    catalog.unload("a")
    if meanwhile == "unload":
        reads.open.set()
        with pytest.raises(NotFoundError):
            pin.result()
        assert catalog.list() == []
        return
    catalog.register([LoRARequest("a", path=folder("b"))])
    reads.open.set()
    with pytest.raises(InvalidUserInputError, match="replaced"):
        pin.result()
    (info,) = catalog.list()
    assert info.path == folder("b")
    assert not info.pinned


def test_a_call_that_waits_for_files_finishes_reads_that_hold_its_room(make_manager, folder, reads):
    paths = {name: folder(name) for name in "ab"}
    size = sum(file.stat().st_size for file in Path(paths["a"]).iterdir())
    manager = make_manager(hooks=AdapterHooks(num_readers=2), max_cpu_bytes=2 * size - 1)
    request = make_request("a", paths["a"])
    manager.resolve(request)
    assert reads.wait_for(1)
    reads.open.set()
    assert manager.catalog.load(LoRARequest("b", path=paths["b"])).name == "b"
    assert reads.names == ["a", "b"]
    manager.forget(request)


# --- bytes ---


def test_jobs_wait_for_room(gate):
    loader = LoaderThreads(num_threads=4, max_bytes=100)
    for name, size in (("a", 60), ("b", 40), ("c", 30), ("d", 10)):
        loader.submit(lambda name=name: gate.through(name), num_bytes=lambda size=size: size)
    assert gate.wait_for(2)
    assert sorted(gate.names) == ["a", "b"], "the two fill it, and no smaller one overtakes the third"
    gate.open.set()
    assert sorted(finished(loader)) == ["a", "b", "c", "d"]
    loader.close()


def test_bytes_are_held_until_the_result_is_taken(gate):
    loader = LoaderThreads(num_threads=4, max_bytes=100)
    gate.open.set()
    for name in "ab":
        loader.submit(lambda name=name: gate.through(name), num_bytes=lambda: 80)
    assert gate.wait_for(1)
    threading.Event().wait(0.05)
    assert gate.names == ["a"]
    assert finished(loader) == ["a", "b"]
    assert loader.num_in_flight == 0, "these are not among the results of `poll`"
    loader.close()


def test_a_job_larger_than_the_room_runs_alone(gate):
    loader = LoaderThreads(num_threads=2, max_bytes=100)
    loader.submit(lambda: gate.through("large"), num_bytes=lambda: 1000)
    loader.submit(lambda: gate.through("small"), num_bytes=lambda: 1)
    assert gate.wait_for(1)
    gate.open.set()
    assert finished(loader) == ["large", "small"]
    assert gate.most == 1
    loader.close()


# --- jobs ---


def test_short_jobs_do_not_wait_for_long_ones():
    loader, going, order = LoaderThreads(), threading.Event(), []
    loader.submit(lambda: (going.wait(SECONDS), "read 1")[1])
    loader.submit(lambda: "read 2")
    for name in ("write 1", "write 2"):
        loader.submit_short(lambda name=name: name)
    while len(order) < 2:
        order += loader.wait(SECONDS)
    going.set()
    assert [*order, *finished(loader)] == ["write 1", "write 2", "read 1", "read 2"]
    loader.close()


def test_work_done_synchronously_is_returned_like_other_work():
    loader, going = LoaderThreads(), threading.Event()
    loader.submit(lambda: (going.wait(SECONDS), "read")[1])
    loader.add_result("write")
    assert loader.num_in_flight == 2
    assert loader.poll() == ["write"]
    assert loader.num_in_flight == 1
    going.set()
    assert loader.wait(SECONDS) == ["read"]
    loader.close()


def test_jobs_not_begun_are_dropped_when_the_loader_closes():
    loader, started, going, done = LoaderThreads(), threading.Event(), threading.Event(), []
    loader.submit(lambda: (started.set(), going.wait(SECONDS), "first")[2])
    loader.submit(lambda: done.append(1))
    assert started.wait(SECONDS)
    threading.Timer(0.05, going.set).start()
    loader.close()
    assert done == []
    assert loader.wait(SECONDS) == ["first"]
    assert loader.num_in_flight == 0


def test_a_job_that_waits_for_room_is_dropped_too(gate):
    loader, sized = LoaderThreads(num_threads=2, max_bytes=100), threading.Event()
    loader.submit(lambda: gate.through("a"), num_bytes=lambda: 80)
    assert gate.wait_for(1)
    loader.submit(lambda: gate.through("b"), num_bytes=lambda: (sized.set(), 80)[1])
    assert sized.wait(SECONDS)
    threading.Timer(0.05, gate.open.set).start()
    loader.close()
    assert loader.poll() == ["a"]
    assert (gate.names, loader.num_in_flight) == (["a"], 0)
