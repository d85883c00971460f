"""Reads and writes concurrent with steps: waits for them, their errors, and the memory afterwards."""

import gc
import shutil
import threading
import weakref

import pytest
import torch

from outrider.lora.files.folder import AdapterFiles
from outrider.lora.manager import LOADING
from outrider.lora.tiers.row_writer import RowWriter
from outrider.platform.core.errors import AdapterError, InvalidRequestError, NotFoundError
from outrider.platform.core.lora_request import LoRARequest

from ..conftest import SIZES, admitted, level, make_request, settle, write_adapter


@pytest.fixture
def gate(monkeypatch):
    """Writes to the device are a thread's, and wait for `gate.set()`."""
    monkeypatch.setattr("outrider.lora.tiers.transfers.AT_ONCE_BYTES", 0)

    event, real = threading.Event(), RowWriter._write

    def write(self, allocation, entry):
        assert event.wait(10)
        real(self, allocation, entry)

    monkeypatch.setattr(RowWriter, "_write", write)
    yield event
    event.set()


def output(manager, request):
    """Delta of one token of ones on the second layer's down_proj."""
    linear, y = manager.linears[3], torch.zeros(1, SIZES["down_proj"][1])
    batch = manager.prepare([(request.adapter, 1)])
    linear.lora.add(y, torch.ones(1, linear.in_features), batch)
    return y


def read_up(manager, request):
    """Until the request's adapter is in host memory."""
    for _ in range(100):
        if request.adapter.digest in manager._residency.host:
            return
        manager.wait(10)
    raise AssertionError


def test_no_request_is_admitted_before_the_rows_are_written(make_manager, folder, gate):
    manager = make_manager()
    request, base = make_request("a", folder("a")), make_request()
    manager.resolve(request)
    read_up(manager, request)
    for _ in range(3):
        assert manager.admit(request) == LOADING
        assert manager.admit(base) is None, "the base model waits for no adapter"
        manager.wait(0.01)
    assert level(manager, "a") == "host"
    gate.set()
    assert settle(manager, request) is None
    assert level(manager, "a") == "device"
    manager.forget(request)


def test_rows_in_flight_are_not_reused(make_manager, folder, gate):
    """Their owner is unloaded while it is written; the next one must not get the rows before that has ended."""
    manager = make_manager(max_loras=1, max_lora_rank=4)
    gone = make_request("a", folder("a"), "gone")
    manager.resolve(gone)
    read_up(manager, gone)
    assert manager.admit(gone) == LOADING
    manager.catalog.unload("a")
    manager.forget(gone)
    assert (manager.catalog.stats().rows_used, manager.catalog.stats().host_bytes) == (4, 0)
    other = make_request("b", folder("b"), "other")
    manager.resolve(other)
    gate.set()
    for _ in range(20):  # the read or the write may end first
        reason = manager.admit(other)
        if reason is None:
            break
        manager.wait(10)
    assert reason is None
    manager.check_integrity()
    adapter = manager._residency.host.get(other.adapter.digest)
    weights = adapter.target.modules()["model.layers.1.mlp.down_proj"]
    torch.testing.assert_close(output(manager, other), torch.ones(1, 24) @ weights.a.T @ weights.b)
    manager.forget(other)


@pytest.mark.parametrize(
    "error", [MemoryError("no memory"), torch.OutOfMemoryError("CUDA out of memory"), OSError("x")]
)
def test_a_write_that_fails(make_manager, folder, monkeypatch, error):
    """Only the adapter's requests get the error, rows and memory are freed, and later requests retry."""
    manager, real = make_manager(max_loras=2, max_lora_rank=4), RowWriter._write
    good = admitted(manager, "good", folder("good"), "good")
    before = manager.catalog.stats()
    bad = [make_request("bad", folder("bad"), str(i)) for i in range(2)]
    for request in bad:
        manager.resolve(request)

    def fail(self, allocation, entry):
        raise error

    monkeypatch.setattr(RowWriter, "_write", fail)
    for request in bad:
        with pytest.raises(AdapterError, match=f"cannot write the adapter .*{type(error).__name__}: {error}"):
            settle(manager, request)
    assert manager.prepare([(good.adapter, 1)]) is not None
    assert (manager.catalog.stats().rows_used, manager.catalog.stats().host_bytes) == (
        before.rows_used,
        before.host_bytes,
    )
    with pytest.raises(AdapterError, match="cannot write"):
        manager.catalog.load(LoRARequest("pinned", path=folder("pinned")), pinned=True)
    assert not any(info.pinned for info in manager.catalog.list())
    monkeypatch.setattr(RowWriter, "_write", real)
    manager.forget(admitted(manager, "bad", folder("bad"), "again"))
    manager.forget(good)


@pytest.mark.parametrize("error", [MemoryError("no memory"), RuntimeError("DefaultCPUAllocator: can't allocate")])
def test_a_read_that_runs_out_of_memory(make_manager, folder, monkeypatch, error):
    real = AdapterFiles.read

    def read(self, source):
        if source.path.endswith("bad"):
            raise error
        return real(self, source)

    monkeypatch.setattr(AdapterFiles, "read", read)
    manager = make_manager()
    bad, good = make_request("bad", folder("bad")), make_request("good", folder("good"))
    for request in (bad, good):
        manager.resolve(request)
    with pytest.raises(AdapterError, match=type(error).__name__):
        settle(manager, bad)
    with pytest.raises(AdapterError, match=f"cannot load .*{type(error).__name__}"):
        manager.catalog.load(LoRARequest("now", path=bad.lora.path))
    assert settle(manager, good) is None
    manager.catalog.unload("good")
    manager.forget(good)
    assert (manager.catalog.stats().host_bytes, manager.catalog.stats().rows_used) == (0, 0)


def test_an_adapter_registered_and_deleted(make_manager, folder):
    manager = make_manager()
    path = folder("a")
    manager.catalog.register([LoRARequest("a", path=path), LoRARequest("b", path=folder("b"))])
    assert [(info.level, info.digest) for info in manager.catalog.list()] == [("disk", "")] * 2
    shutil.rmtree(path)
    request = make_request("a", path)
    manager.resolve(request)
    with pytest.raises(AdapterError, match="does not exist"):
        settle(manager, request)
    assert {info.name for info in manager.catalog.list()} == {"a", "b"}, "the name stays"
    manager.forget(admitted(manager, "a", folder("a"), "back"))
    manager.forget(admitted(manager, "b", folder("b"), "b"))


def test_registering_is_all_or_nothing(make_manager, folder, tmp_path):
    manager = make_manager()
    good = LoRARequest("a", path=folder("a"))
    for bad, error in (
        (LoRARequest("b", path=str(tmp_path / "none")), "does not exist"),
        (LoRARequest("a", path=folder("c")), "given twice"),
    ):
        with pytest.raises(InvalidRequestError, match=error):
            manager.catalog.register([good, bad])
        assert manager.catalog.list() == []
    manager.catalog.register([good])
    with pytest.raises(InvalidRequestError, match="already been loaded"):
        manager.catalog.register([good])


# --- memory ---


def weak_tensors(manager, request):
    """Weak references to the weights of the request's adapter."""
    adapter = manager._residency.host.get(request.adapter.digest)
    return [weakref.ref(part.linears.data) for part in adapter.packed]


@pytest.mark.parametrize("ending", ["unload", "load_inplace", "abort", "eviction"])
def test_memory_is_really_freed(make_manager, folder, ending):
    manager = make_manager(max_loras=1, max_cpu_loras=1, max_lora_rank=4)
    request = admitted(manager, "a", folder("a"))
    kept = weak_tensors(manager, request)
    assert all(ref() is not None for ref in kept)
    if ending == "eviction":
        manager.forget(request)
        request = admitted(manager, "b", folder("b"), "b")
    elif ending == "load_inplace":
        manager.catalog.load(LoRARequest("a", path=folder("a", seed=7)), load_inplace=True)
        assert all(ref() is not None for ref in kept), "a request still runs on it"
    else:
        ended = manager.catalog.unload("a", "abort" if ending == "abort" else "drain")
        assert ended == ([request] if ending == "abort" else [])
    manager.forget(request)
    del request
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    expected = 0 if ending in ("unload", "abort", "load_inplace") else 1
    assert len(manager._residency.host) == expected
    assert (manager.catalog.stats().host_bytes > 0) == bool(expected)


def test_a_packed_adapter_has_no_second_copy(make_manager, folder):
    manager = make_manager()
    info = manager.catalog.load(LoRARequest("a", path=folder("a")))
    adapter = manager._residency.host.get(bytes.fromhex(info.digest))
    data = adapter.target.linears.data.untyped_storage().data_ptr()
    assert {t.untyped_storage().data_ptr() for w in adapter.target.modules().values() for t in (w.a, w.b)} == {data}


# --- ends ---


def test_unload_with_abort_ends_every_version(make_manager, folder):
    manager = make_manager(max_loras=2, max_lora_rank=8)
    old = admitted(manager, "a", folder("a"), "old")
    manager.catalog.load(LoRARequest("a", path=folder("a", seed=7)), load_inplace=True)
    new, waiting = admitted(manager, "a", folder("a", seed=7), "new"), make_request("a", folder("a", seed=7), "waiting")
    manager.resolve(waiting)
    assert set(manager.catalog.unload("a", "abort")) == {old, new, waiting}
    for request in (old, new, waiting):
        manager.forget(request)
    assert manager.catalog.stats().rows_used == 0
    with pytest.raises(NotFoundError):
        manager.catalog.unload("a", "abort")
    with pytest.raises(InvalidRequestError, match="drain, abort") as error:
        manager.catalog.unload("a", "now")
    assert error.value.param == "mode"


def test_abort_after_a_drain_began(make_manager, folder):
    manager = make_manager()
    request = admitted(manager, "a", folder("a"))
    manager.catalog.unload("a")
    assert manager.catalog.unload("a", "abort") == [request]
    manager.forget(request)
    assert manager.catalog.stats().rows_used == 0


# --- prefetch ---


def test_prefetch_brings_an_adapter_to_the_device(make_manager, folder):
    manager = make_manager()
    request = make_request("a", folder("a"))
    manager.resolve(request)
    for _ in range(4):
        manager.prefetch(request)
        manager.wait(10)
    assert level(manager, "a") == "device"
    assert manager.catalog.list()[0].num_running == 0
    assert manager.admit(request) is None, "at once"
    manager.forget(request)


def test_prefetch_takes_nothing_from_a_more_urgent_request(make_manager, folder):
    manager = make_manager(max_loras=1, max_lora_rank=4, max_cpu_loras=4)
    first, second = (make_request(name, folder(name), name) for name in "ab")
    for request in (first, second):
        manager.resolve(request)
    for _ in range(6):
        for request in (first, second):
            manager.prefetch(request)
        manager.wait(10)
    assert [level(manager, name) for name in "ab"] == ["device", "host"]
    assert manager.admit(first) is None
    for request in (first, second):
        manager.forget(request)


def test_prefetch_leaves_errors_to_admission(make_manager, folder):
    manager = make_manager()
    request = make_request("a", folder("a", rank=9))
    manager.resolve(request)
    for _ in range(3):
        manager.prefetch(request)
        manager.wait(10)
    with pytest.raises(AdapterError, match="rank 9"):
        manager.admit(request)


# --- the threads ---


@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["large", "small"])
def test_small_adapters_are_written_by_the_thread_that_steps(make_manager, tmp_path, monkeypatch, limit):
    monkeypatch.setattr("outrider.lora.tiers.transfers.AT_ONCE_BYTES", limit)
    manager, writers = make_manager(), []
    write = manager._transfers._writer._write
    monkeypatch.setattr(
        manager._transfers._writer, "_write", lambda *a: (writers.append(threading.current_thread().name), write(*a))
    )
    request = make_request("a", write_adapter(tmp_path / "a"))
    manager.resolve(request)
    assert settle(manager, request) is None
    assert writers == ["lora-loader" if limit == 0 else threading.current_thread().name]
    manager.check_integrity()


def test_no_request_overtakes_a_small_transfer(make_manager, folder):
    manager = make_manager()
    first, second = make_request("a", folder("a")), make_request("a", folder("a"))
    manager.resolve(first)
    manager.resolve(second)
    read_up(manager, first)
    assert manager.admit(first) is None, "not only at its next request"
    assert manager.admit(second) is None


def test_broken_weights_fail_alone(make_manager, tmp_path, folder):
    """Garbage instead of weights, in a registered folder."""
    manager = make_manager()
    path = write_adapter(tmp_path / "bad")
    (tmp_path / "bad" / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    manager.catalog.register([LoRARequest("bad", path=path)])
    bad, good = make_request("bad", path), make_request("good", folder("good"))
    for request in (bad, good):
        manager.resolve(request)
    with pytest.raises(AdapterError, match="safetensors"):
        settle(manager, bad)
    assert settle(manager, good) is None
    manager.forget(good)
