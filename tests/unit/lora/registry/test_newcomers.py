"""Adapters that a request brings under a name that is taken, before their files were read."""

import shutil
import threading

import pytest

from outrider.lora.files.folder import AdapterFiles
from outrider.platform.core.errors import AdapterError
from outrider.platform.core.lora_request import LoRARequest

from ..conftest import admitted, make_request


def pending(manager, name, path, **options):
    """A request that names folders not read yet."""
    request = make_request(name, path, "newcomer")
    request.lora = LoRARequest(name, path=path, **options)
    manager.resolve(request)
    return request


def test_a_newcomer_takes_the_name_once_it_has_been_read(make_manager, folder, monkeypatch):
    manager, gate, real = make_manager(), threading.Event(), AdapterFiles.read
    before = manager.catalog.load(LoRARequest("a", path=folder("a")), pinned=True)

    def read(self, source):
        assert gate.wait(10)
        return real(self, source)

    monkeypatch.setattr(AdapterFiles, "read", read)
    new = pending(manager, "a", folder("b"))
    same, old = pending(manager, "a", folder("b")), admitted(manager, "a", folder("a"))
    assert same.adapter is new.adapter
    assert [(info.digest, info.pinned) for info in manager.catalog.list()] == [(before.digest, True)]
    gate.set()
    while manager.admit(new) is not None:
        manager.wait(10)
    assert [(info.path, info.pinned) for info in manager.catalog.list()] == [(folder("b"), False)]
    assert manager.namespace(old) == bytes.fromhex(before.digest)
    for request in (new, same, old):
        manager.forget(request)
    assert before.digest not in [digest.hex() for digest in manager._residency.pool.digests()]


@pytest.mark.parametrize("broken", ["too large", "no weights", "vanished"])
def test_a_newcomer_that_cannot_be_read_leaves_the_present_adapter(make_manager, folder, tmp_path, monkeypatch, broken):
    """The pin and the rows of the name's present adapter stay."""
    manager = make_manager()
    before = manager.catalog.load(LoRARequest("a", path=folder("a")), pinned=True)
    path = folder("b", rank=9 if broken == "too large" else 4)
    if broken == "no weights":
        (tmp_path / "b" / "adapter_model.safetensors").unlink()
    if broken == "vanished":
        monkeypatch.setattr(AdapterFiles, "read", lambda *a, real=AdapterFiles.read: (shutil.rmtree(path), real(*a))[1])
    new = pending(manager, "a", path)
    manager.wait(10)
    with pytest.raises(AdapterError):
        manager.admit(new)
    assert manager.catalog.list() == [before]
    assert manager._residency.pool.is_pinned(bytes.fromhex(before.digest))
    request = admitted(manager, "a", folder("a"))
    assert manager.namespace(request) == bytes.fromhex(before.digest)
    manager.forget(request)


def test_a_newcomer_gets_the_name_of_one_that_cannot_be_read(make_manager, folder):
    manager = make_manager()
    broken, new = pending(manager, "a", folder("a", rank=9)), pending(manager, "a", folder("b"))
    manager.wait(10)
    with pytest.raises(AdapterError):
        manager.admit(broken)
    while manager.admit(new) is not None:
        manager.wait(10)
    assert [info.path for info in manager.catalog.list()] == [folder("b")]
    manager.forget(new)


@pytest.mark.parametrize("ending", ["load_inplace", "unload"])
def test_a_newcomer_does_not_outlive_an_order(make_manager, folder, ending):
    """It serves those that asked for it, and no longer waits for the name."""
    manager = make_manager()
    manager.catalog.load(LoRARequest("a", path=folder("a")))
    new = pending(manager, "a", folder("b"))
    if ending == "unload":
        manager.catalog.unload("a")
    else:
        manager.catalog.load(LoRARequest("a", path=folder("c")), load_inplace=True)
    registered = manager.catalog.list()
    while manager.admit(new) is not None:
        manager.wait(10)
    assert [info.path for info in manager.catalog.list()] == [info.path for info in registered]
    manager.forget(new)
    assert len(list(manager._registry)) == len(registered)
