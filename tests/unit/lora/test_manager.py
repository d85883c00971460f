"""Registration, versions, admission, errors and the loader thread of the adapter manager."""

import shutil
import threading
from pathlib import Path

import pytest
import torch

from outrider.lora.files.folder import AdapterFiles
from outrider.lora.manager import LOADING
from outrider.lora.registry import catalog as catalog_module
from outrider.platform.core.adapter_files import files_digest
from outrider.platform.core.errors import AdapterError, InvalidUserInputError, NotFoundError
from outrider.platform.core.lora_request import LoRARequest

from .conftest import admitted, level, make_request, settle, tensors

# --- registration ---


def test_load_reads_at_once_and_returns_the_adapter(make_manager, folder):
    manager = make_manager()
    path = folder("a", rank=3)
    info = manager.catalog.load(LoRARequest("a", path=path))
    assert (info.name, info.path, info.rank, info.rows, info.level, info.num_running) == ("a", path, 3, 3, "host", 0)
    assert len(bytes.fromhex(info.digest)) == 32
    assert manager.catalog.list() == [info]
    assert len(manager.catalog.stats().load_seconds) == 1
    assert manager.catalog.stats().load_seconds == []


def test_a_duplicate_name_is_refused_unless_in_place(make_manager, folder):
    manager = make_manager()
    first = manager.catalog.load(LoRARequest("a", path=folder("a")))
    with pytest.raises(InvalidUserInputError, match="already been loaded"):
        manager.catalog.load(LoRARequest("a", path=folder("b")))
    second = manager.catalog.load(LoRARequest("a", path=folder("b")), load_inplace=True)
    assert second.digest != first.digest
    assert [info.digest for info in manager.catalog.list()] == [second.digest]


def test_a_broken_replacement_leaves_the_old_one(make_manager, folder):
    manager = make_manager()
    first = manager.catalog.load(LoRARequest("a", path=folder("a")))
    with pytest.raises(AdapterError, match="rank 9"):
        manager.catalog.load(LoRARequest("a", path=folder("big", rank=9)), load_inplace=True)
    assert manager.catalog.list() == [first]
    assert len(manager.catalog.stats().load_seconds) == 2, "of the failed load, too"


def test_unload_of_an_unknown_name(make_manager):
    with pytest.raises(NotFoundError, match="'x'"):
        make_manager().catalog.unload("x")


def test_unload_lets_running_requests_finish(make_manager, folder):
    manager = make_manager()
    request = admitted(manager, "a", folder("a"))
    manager.catalog.unload("a")
    assert manager.catalog.list() == []
    assert manager.prepare([(request.adapter, 1)]) is not None
    manager.check_integrity()
    manager.forget(request)
    assert len(manager._residency.pool) == len(manager._residency.host) == 0


def test_load_durations_are_bounded_between_two_reads_of_the_statistics(make_manager, folder):
    manager, path = make_manager(), folder("a")
    manager.catalog._load_seconds.extend([1.0] * (2 * catalog_module.MAX_LOAD_SECONDS))
    manager.catalog.load(LoRARequest("a", path=path))
    assert len(manager.catalog.stats().load_seconds) == catalog_module.MAX_LOAD_SECONDS


# --- requests ---


def test_base_requests_need_nothing(make_manager):
    manager, request = make_manager(), make_request()
    manager.resolve(request)
    assert manager.admit(request) is None
    assert manager.namespace(request) == b""
    assert manager.prepare([(request.adapter, 5)]) is None
    manager.forget(request)


def test_first_use_registers_and_waits_alone(make_manager, folder):
    manager = make_manager()
    request, base = make_request("a", folder("a")), make_request()
    manager.resolve(request)
    manager.resolve(base)
    assert manager.admit(base) is None
    while manager.admit(request) is not None:
        assert manager.catalog.stats().waiting == ["a"]
        manager.wait(10)
    assert level(manager, "a") == "device"
    assert manager.catalog.stats().running == ["a"]
    assert manager.namespace(request) == bytes.fromhex(manager.catalog.list()[0].digest)
    manager.forget(request)
    assert manager.catalog.stats().running == []


def test_admit_release_and_forget_may_be_repeated(make_manager, folder):
    manager = make_manager()
    request = admitted(manager, "a", folder("a"))
    assert manager.admit(request) is None
    assert manager.catalog.list()[0].num_running == 1
    manager.release(request)
    manager.release(request)
    assert manager.catalog.list()[0].num_running == 0
    assert manager.catalog.stats().waiting == ["a"]
    assert manager.admit(request) is None, "as after a preemption"
    manager.forget(request)
    manager.forget(request)
    assert manager.catalog.stats().running == manager.catalog.stats().waiting == []


def test_the_same_content_under_two_names_shares_rows(make_manager, folder, tmp_path):
    manager = make_manager()
    path = folder("a")
    shutil.copytree(path, tmp_path / "copy")
    requests = [admitted(manager, "a", path), admitted(manager, "b", str(tmp_path / "copy"))]
    assert len(manager._residency.pool) == 1
    manager.check_integrity()
    manager.catalog.unload("a")
    manager.forget(requests[0])
    assert level(manager, "b") == "device"
    manager.forget(requests[1])


# --- versions ---


def test_running_requests_keep_their_version(make_manager, folder):
    manager = make_manager()
    old = admitted(manager, "a", folder("a"), "old")
    manager.catalog.load(LoRARequest("a", path=folder("a", seed=77)), load_inplace=True)
    new = admitted(manager, "a", folder("a", seed=77), "new")
    assert manager.namespace(old) != manager.namespace(new)
    batch = manager.prepare([(old.adapter, 1), (new.adapter, 1)])
    assert batch is not None
    manager.check_integrity()
    manager.forget(old)
    assert len(manager._residency.pool) == 1, "the old version is gone with its last request"
    manager.forget(new)


def test_another_path_is_another_version(make_manager, folder):
    manager = make_manager()
    first = admitted(manager, "a", folder("a"))
    second = admitted(manager, "a", folder("b"), "second")
    assert first.adapter is not second.adapter
    assert [info.path for info in manager.catalog.list()] == [second.lora.path]
    for request in (first, second):
        manager.forget(request)


def test_files_that_change_in_place_are_not_noticed_while_in_memory(make_manager, folder):
    manager = make_manager()
    first = admitted(manager, "a", folder("a"))
    second = admitted(manager, "a", folder("a", seed=99), "second")
    assert second.adapter is first.adapter
    for request in (first, second):
        manager.forget(request)


@pytest.mark.parametrize("broken", [False, True])
def test_files_that_changed_while_out_of_memory_are_refused_until_they_are_loaded(make_manager, folder, broken):
    """The registered content, or an error: never silently another one."""
    manager = make_manager(max_loras=1, max_cpu_loras=1)
    manager.forget(admitted(manager, "a", folder("a")))
    manager.forget(admitted(manager, "b", folder("b")))
    path = folder("a", seed=99)
    if broken:
        Path(path, "adapter_model.safetensors").write_bytes(b"half a file")
    for attempt in range(2):
        with pytest.raises(AdapterError, match=r"have changed since it was loaded.*load_inplace"):
            admitted(manager, "a", path, f"late {attempt}")
    with pytest.raises(AdapterError, match="load_inplace" if not broken else "safetensors"):
        manager.catalog.pin("a")
    path = folder("a", seed=99)
    with pytest.raises(AdapterError, match="load_inplace"):
        admitted(manager, "a", path, "later")
    manager.catalog.load(LoRARequest("a", path=path), load_inplace=True)
    manager.forget(admitted(manager, "b", folder("b")))
    manager.forget(admitted(manager, "a", path, "new"))
    folder("a")
    manager.forget(admitted(manager, "b", folder("b")))
    with pytest.raises(AdapterError, match="load_inplace"):
        admitted(manager, "a", path, "last")


def test_files_come_back(make_manager, folder):
    manager = make_manager(max_loras=1, max_cpu_loras=1)
    first = admitted(manager, "a", folder("a"))
    manager.forget(first)
    manager.forget(admitted(manager, "b", folder("b")))
    with pytest.raises(AdapterError, match="load_inplace"):
        admitted(manager, "a", folder("a", seed=99), "changed")
    again = admitted(manager, "a", folder("a"), "again")
    assert manager.namespace(again) == manager.namespace(first)
    manager.forget(again)


def test_an_adapter_registered_by_another_server(make_manager, folder):
    path = folder("a")
    digest = files_digest(path)
    manager = make_manager()
    manager.catalog.register([LoRARequest("a", path=path, digest=digest)])
    manager.forget(admitted(manager, "a", path))
    manager.catalog.register([LoRARequest("b", path=folder("b"), digest=digest)])
    with pytest.raises(AdapterError, match="load_inplace"):
        admitted(manager, "b", folder("b"), "other")
    manager.catalog.load(LoRARequest("b", path=folder("b")), load_inplace=True)
    manager.forget(admitted(manager, "b", folder("b"), "loaded"))


def test_a_waiting_request_never_gets_other_content(make_manager, folder):
    manager = make_manager(max_loras=1, max_cpu_loras=1)
    manager.forget(admitted(manager, "a", folder("a")))
    late = make_request("a", folder("a"), "late")
    manager.resolve(late)
    manager.forget(admitted(manager, "b", folder("b"), "urgent", priority=-1))
    folder("a", seed=99)
    assert manager.admit(late) == LOADING
    manager.wait(10)
    with pytest.raises(AdapterError, match="have changed"):
        manager.admit(late)


@pytest.mark.parametrize("ending", ["load_inplace", "unload"])
def test_a_preempted_request_goes_on_with_its_version(make_manager, folder, tmp_path, ending):
    """Independent of changes to the name, the files and the memory while it waits."""
    now = [0.0]
    manager = make_manager(max_loras=1, max_cpu_loras=2, clock=lambda: now[0])
    old = admitted(manager, "a", folder("a"), "old")
    version, content = old.adapter, manager.namespace(old)
    now[0] = 3.0
    manager.release(old)
    assert version.waiting[old] == 0.0, "it has waited since it was added"
    if ending == "unload":
        manager.catalog.unload("a")
        shutil.rmtree(tmp_path / "a")
    else:
        manager.catalog.load(LoRARequest("a", path=folder("a", seed=77)), load_inplace=True)
    for name in "bcd":
        manager.forget(admitted(manager, name, folder(name), name, priority=-1))
        manager.check_integrity()
    assert manager.admit(old) is None
    assert manager.namespace(old) == content == version.digest
    assert manager.prepare([(old.adapter, 1)]) is not None
    manager.forget(old)
    assert version not in list(manager._registry)
    assert content not in manager._residency.host
    assert content not in manager._residency.pool


def test_a_preempted_request_of_an_adapter_still_registered_keeps_its_content(make_manager, folder):
    manager = make_manager(max_loras=1, max_cpu_loras=1)
    old = admitted(manager, "a", folder("a"), "old")
    manager.release(old)
    other = make_request("b", folder("b"), "urgent", priority=-1)
    manager.resolve(other)
    assert manager.admit(other) == LOADING, "host memory has room for one, and a request has begun with it"
    folder("a", seed=99)
    assert manager.admit(old) is None
    manager.forget(old)
    assert settle(manager, other) is None
    manager.forget(other)


def test_requests_for_an_adapter_that_is_queued_to_load_share_one_version(make_manager, folder, monkeypatch):
    parsed, real = [], AdapterFiles.read

    def read(self, source):
        parsed.append(source.path)
        return real(self, source)

    monkeypatch.setattr(AdapterFiles, "read", read)
    manager = make_manager(max_loras=1, max_cpu_loras=1)
    busy, path = admitted(manager, "a", folder("a")), folder("b")
    requests = [make_request("b", path, str(i)) for i in range(50)]
    for request in requests:
        manager.resolve(request)
        assert manager.admit(request) == LOADING
    assert len({request.adapter for request in requests}) == 1
    manager.forget(busy)
    assert settle(manager, requests[0]) is None
    assert [manager.admit(request) for request in requests] == [None] * 50
    assert parsed.count(path) == 1
    for request in requests:
        manager.forget(request)


# --- errors ---


def test_a_path_that_is_no_folder_is_refused_at_once(make_manager, tmp_path):
    manager = make_manager()
    with pytest.raises(AdapterError, match="does not exist"):
        manager.resolve(make_request("a", str(tmp_path / "none")))
    assert manager.catalog.list() == []


def test_a_broken_adapter_fails_its_own_requests_and_may_be_repaired(make_manager, folder):
    manager = make_manager()
    good = admitted(manager, "good", folder("good"))
    broken = [make_request("a", folder("a", rank=9), str(i)) for i in range(2)]
    for request in broken:
        manager.resolve(request)
    manager.wait(10)
    for request in broken:
        with pytest.raises(AdapterError, match="rank 9 exceeds"):
            manager.admit(request)
    assert [info.name for info in manager.catalog.list()] == ["good"]
    assert manager.prepare([(good.adapter, 1)]) is not None
    manager.forget(admitted(manager, "a", folder("a", rank=4), "again"))
    manager.forget(good)


def test_an_adapter_whose_files_vanish_fails_only_when_it_must_be_read_again(make_manager, folder):
    manager = make_manager(max_loras=1, max_cpu_loras=1)
    path = folder("a")
    first = admitted(manager, "a", path)
    shutil.rmtree(path)
    manager.forget(first)
    manager.forget(admitted(manager, "a", path, "still in memory"))
    manager.forget(admitted(manager, "b", folder("b")))
    request = make_request("a", path, "gone")
    manager.resolve(request)
    manager.wait(10)
    with pytest.raises(AdapterError, match="does not exist"):
        manager.admit(request)
    manager.forget(admitted(manager, "a", folder("a"), "back"))


def test_an_unforeseen_error_in_the_thread_is_one_adapters_error(make_manager, folder, monkeypatch):
    real = AdapterFiles.read

    def read(self, source):
        if source.path.endswith("bad"):
            raise MemoryError("no room")
        return real(self, source)

    monkeypatch.setattr(AdapterFiles, "read", read)
    manager = make_manager()
    request = make_request("bad", folder("bad"))
    manager.resolve(request)
    manager.wait(10)
    with pytest.raises(AdapterError, match="MemoryError: no room"):
        manager.admit(request)
    manager.forget(admitted(manager, "a", folder("a")))


# --- the thread ---


def test_loading_does_not_block_and_close_ends_the_threads(make_manager, folder, monkeypatch):
    gate, real = threading.Event(), AdapterFiles.read

    def read(self, source):
        assert gate.wait(10)
        return real(self, source)

    monkeypatch.setattr(AdapterFiles, "read", read)
    monkeypatch.setattr("outrider.lora.tiers.transfers.AT_ONCE_BYTES", 0)
    manager = make_manager()
    request = make_request("a", folder("a"))
    manager.resolve(request)
    assert manager.admit(request) == LOADING
    manager.wait(0.01)
    assert manager.admit(request) == LOADING
    gate.set()
    assert settle(manager, request) is None
    manager.forget(request)
    threads = list(manager._transfers._threads._threads)
    manager.close()
    assert len(threads) == 2
    assert not any(thread.is_alive() for thread in threads)


def test_wait_returns_at_once_when_nothing_loads(make_manager):
    waiting = threading.Thread(target=make_manager().wait, args=(1000,), daemon=True)
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive()


def test_modules_that_an_adapter_leaves_alone(make_manager, folder):
    manager = make_manager()
    request = admitted(manager, "a", folder("a", state=tensors(modules=("v_proj",), layers=(1,))))
    linear, batch = manager.linears[0], manager.prepare([(request.adapter, 1)])
    y = torch.zeros(1, 32)
    linear.lora.add(y, torch.ones(1, linear.in_features), batch)
    assert not y.any()
    manager.forget(request)
