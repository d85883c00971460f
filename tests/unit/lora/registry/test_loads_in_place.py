"""Loads in place, seen by the requests of the earlier version."""

import pytest

from outrider.platform.core.errors import AdapterError
from outrider.platform.core.lora_request import LoRAMix, LoRAPart, LoRARequest

from ..conftest import admitted, make_request


def test_a_request_that_was_sent_during_a_load_in_place(make_manager, folder):
    """It has the old folder, and means the new version; a user who names that folder means its content."""
    manager = make_manager()
    old = manager.catalog.load(LoRARequest("a", path=folder("a")))
    new = manager.catalog.load(LoRARequest("a", path=folder("b")), load_inplace=True)
    sent = manager.catalog.bind_version(LoRARequest("a", path=old.path, loaded=True))
    assert sent.digest.hex() == new.digest
    mix = LoRAMix((LoRAPart(LoRARequest("a", path=old.path, loaded=True), 0.5),))
    assert [part.version for part in manager.catalog.bind_version(mix).parts] == [sent]
    assert manager.catalog.bind_version(LoRARequest("a", path=old.path)) is not sent
    assert manager.catalog.bind_version(LoRARequest("c", path=old.path, loaded=True)).name == "c"


def test_a_load_in_place_names_the_requests_to_abort(make_manager, folder):
    manager = make_manager()
    running, other = admitted(manager, "a", folder("a")), admitted(manager, "b", folder("b"))
    waiting = make_request("a", folder("a"))
    manager.resolve(waiting)
    mixed = make_request("a", folder("a"))
    mixed.lora = LoRAMix((LoRAPart(mixed.lora, 0.5), LoRAPart(LoRARequest("b", path=folder("b")), 0.5)))
    manager.resolve(mixed)
    replaced = []
    inplace = {"load_inplace": True, "replaced": replaced}
    manager.catalog.load(LoRARequest("a", path=folder("a")), **inplace)
    assert replaced == [], "the same content"
    with pytest.raises(AdapterError):
        manager.catalog.load(LoRARequest("a", path=folder("big", rank=9)), **inplace)
    assert replaced == []
    manager.catalog.load(LoRARequest("a", path=folder("d")), **inplace)
    assert replaced == [running, waiting, mixed]
    for request in (running, waiting, mixed, other):
        manager.forget(request)
