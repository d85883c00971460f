"""Mixes in the adapter manager: versions bound to their parts, rows, and their end."""

import shutil
import threading
import time

import pytest
import torch

from outrider.lora.device.sites import AdapterHooks
from outrider.lora.files.folder import AdapterFiles
from outrider.lora.registry.mixes import mix_adapters
from outrider.platform.core.errors import AdapterError
from outrider.platform.core.lora_request import LoRARequest

from .. import conftest
from ..conftest import admitted, level, make_linears, tensors, write_adapter
from .mix_requests import added_by, admit, mixed_request, wait_for


@pytest.fixture
def make(make_manager, monkeypatch):
    """Managers that know their linears."""

    def make(**options):
        linears = make_linears()
        monkeypatch.setattr(conftest, "make_linears", lambda: linears)
        manager = make_manager(**options)
        manager.linears = linears
        return manager

    return make


def list_mixes(manager):
    return list(manager._registry._mixes.values())


def test_a_mix_adds_the_deltas_of_its_parts(make, folder):
    manager = make(max_loras=3)
    a, b = folder("a", rank=4), folder("b", rank=2)
    mix = admit(manager, mixed_request(("a", a, 0.7), ("b", b, -1.5)))
    first, second = admitted(manager, "a", a, "1"), admitted(manager, "b", b, "2")
    for site in (0, 1, 3):
        expected = 0.7 * added_by(manager, first, site) - 1.5 * added_by(manager, second, site)
        torch.testing.assert_close(added_by(manager, mix, site), expected, atol=1e-4, rtol=1e-4)
    assert len({manager.namespace(request) for request in (mix, first, second)}) == 3
    assert mix.adapter.rows == 6
    assert manager._residency.pool.num_users(mix.adapter.digest) == 1
    for request in (mix, first, second):
        manager.forget(request)


def test_a_scale_for_one_adapter(make, folder):
    manager = make()
    a = folder("a")
    half, whole = admit(manager, mixed_request(("a", a, 0.5))), admitted(manager, "a", a, "1")
    torch.testing.assert_close(added_by(manager, half), 0.5 * added_by(manager, whole))
    assert half.adapter is not whole.adapter
    for request in (half, whole):
        manager.forget(request)


def test_the_same_mix_is_one_version_and_other_weights_are_another(make, folder):
    manager = make(max_loras=4)
    a, b = folder("a", rank=1), folder("b", rank=1)
    first = admit(manager, mixed_request(("a", a, 0.7), ("b", b, 0.3)))
    second = admit(manager, mixed_request(("b", b, 0.3), ("a", a, 0.7)))
    other = admit(manager, mixed_request(("a", a, 0.3), ("b", b, 0.7)))
    assert first.adapter is second.adapter
    assert len({manager.namespace(r) for r in (first, second, other)}) == 2
    assert [info.name for info in manager.catalog.list()] == ["a", "b"], "parts are registered, mixes are not"
    assert manager.catalog.stats().running == ["a+b"]
    for request in (first, second, other):
        manager.forget(request)


def test_parts_that_are_read_for_a_mix_are_known_then(make, folder):
    """They need not be read again, and are the mix's parts."""
    manager = make()
    a, b = folder("a"), folder("b")
    mix = admit(manager, mixed_request(("a", a, 1), ("b", b, 1)))
    assert [info.rank for info in manager.catalog.list()] == [4, 4]
    assert level(manager, "a") == level(manager, "b") == "host"
    shutil.rmtree(a)
    request = admitted(manager, "a", a, "1")
    for each in (mix, request):
        manager.forget(each)


def test_an_unused_mix_lives_while_it_is_resident(make, folder):
    gone = []
    manager = make(max_loras=2, max_lora_rank=8, max_cpu_loras=3, hooks=on_gone(gone))
    a, b = folder("a"), folder("b")
    for index in range(10):
        request = admit(manager, mixed_request(("a", a, 1 + index), ("b", b, 1)))
        manager.forget(request)
        manager.check_integrity()
        assert len(list_mixes(manager)) <= 3
    assert len(gone) == len(set(gone)) >= 7
    digest = request.adapter.digest
    again = admit(manager, mixed_request(("a", a, 10), ("b", b, 1)))
    assert again.adapter is request.adapter, "still resident"
    assert digest not in gone
    manager.forget(again)
    assert not any(version.num_mixes for version in manager._registry.current() if version.name not in "ab")


def on_gone(gone):
    return AdapterHooks(on_gone=gone.append)


@pytest.mark.parametrize("how", ["unload", "load_inplace"])
def test_a_mix_is_unloaded_with_a_part_and_running_requests_finish(make, folder, how):
    gone = []
    manager = make(max_loras=4, hooks=on_gone(gone))
    a, b, c = (folder(name) for name in "abc")
    for name, path in (("a", a), ("b", b)):
        manager.catalog.load(LoRARequest(name, path=path))
    running = admit(manager, mixed_request(("a", a, 0.7), ("b", b, 0.3)))
    waiting = mixed_request(("a", a, 0.5), ("b", b, 0.5))
    manager.resolve(waiting)  # not read yet
    before = added_by(manager, running)
    if how == "unload":
        manager.catalog.unload("b")
    else:
        manager.catalog.load(LoRARequest("b", path=c), load_inplace=True)
    manager.check_integrity()
    assert not list_mixes(manager)
    wait_for(manager, waiting)
    new_path = b if how == "unload" else c
    new = admit(manager, mixed_request(("a", a, 0.7), ("b", new_path, 0.3)))
    assert torch.equal(added_by(manager, running), before)
    assert new.adapter is not running.adapter
    changed = not torch.equal(added_by(manager, new), before)
    assert changed == (how == "load_inplace")
    digest = running.adapter.digest
    manager.release(running)  # preempted: it continues with its first content
    assert torch.equal(added_by(manager, wait_for(manager, running)), before)
    for request in (running, waiting):
        manager.forget(request)
    assert (digest in gone) == changed, "the content is the same after an unload and a first use"
    manager.forget(new)


def test_waiting_mixes_finish_on_the_parts_that_they_were_asked_with(make, folder):
    """The part's old content is gone from disk; the copy in memory is enough."""
    manager = make(max_loras=4)
    a, b, c = (folder(name) for name in "abc")
    for name, path in (("a", a), ("b", b)):
        manager.catalog.load(LoRARequest(name, path=path))
    plain = admitted(manager, "b", b, "1")
    expected = added_by(manager, plain)
    manager.forget(plain)
    waiting = mixed_request(("a", a, 0), ("b", b, 2))
    manager.resolve(waiting)
    shutil.rmtree(b)
    manager.catalog.load(LoRARequest("b", path=c), load_inplace=True)
    wait_for(manager, waiting)
    torch.testing.assert_close(added_by(manager, waiting), 2 * expected)
    manager.forget(waiting)


def test_unloading_with_abort_names_the_requests_of_mixes(make, folder):
    manager = make(max_loras=4)
    a, b = folder("a"), folder("b")
    mix = admit(manager, mixed_request(("a", a, 0.7), ("b", b, 0.3)))
    waiting = mixed_request(("a", a, 0.1), ("b", b, 0.3))
    manager.resolve(waiting)
    other = admitted(manager, "a", a, "1")
    assert set(manager.catalog.unload("b", "abort")) == {mix, waiting}
    for request in (mix, waiting, other):
        manager.forget(request)


def test_rank_may_exceed_the_limit_of_one_adapter_but_not_the_pool(make, folder):
    manager = make(max_loras=2, max_lora_rank=8)
    paths = {name: folder(name, rank=8) for name in "abc"}
    two = admit(manager, mixed_request(*((n, paths[n], 1) for n in "ab")))
    assert two.adapter.rows == 16
    manager.forget(two)
    three = mixed_request(*((n, paths[n], 1) for n in "abc"))
    manager.resolve(three)
    with pytest.raises(AdapterError, match=r"a:1.0\+b:1.0\+c:1.0.* 24 rank rows.* 16"):
        wait_for(manager, three)
    manager.check_integrity()
    plain = admitted(manager, "c", paths["c"], "1")
    manager.forget(plain)


def test_a_mix_for_which_the_pinned_leave_no_room(make, folder):
    manager = make(max_loras=3, max_lora_rank=8)
    paths = {name: folder(name, rank=8) for name in "abcd"}
    manager.catalog.load(LoRARequest("d", path=paths["d"]), pinned=True)
    mix = mixed_request(*((n, paths[n], 1) for n in "abc"))
    manager.resolve(mix)
    with pytest.raises(AdapterError, match=r"24 rank rows.*pinned adapters leave 16"):
        wait_for(manager, mix)


def test_a_broken_part_fails_the_mix_and_is_named(make, folder, tmp_path):
    manager = make()
    a = folder("a")
    broken = tmp_path / "broken"
    write_adapter(broken)
    (broken / "adapter_model.safetensors").write_bytes(b"nothing")
    good = admitted(manager, "a", a, "1")
    mix = mixed_request(("a", a, 1), ("x", str(broken), 1))
    manager.resolve(mix)
    with pytest.raises(AdapterError, match=r"adapter 'x': .*not a valid safetensors"):
        wait_for(manager, mix)
    assert [info.name for info in manager.catalog.list()] == ["a"], "a broken adapter is not registered"
    assert not list_mixes(manager)
    manager.check_integrity()
    write_adapter(broken)
    again = admit(manager, mixed_request(("a", a, 1), ("x", str(broken), 1)))
    for request in (good, again):
        manager.forget(request)


def test_a_missing_folder_is_refused_at_once_and_registers_nothing(make, folder):
    manager = make()
    with pytest.raises(AdapterError, match="nowhere"):
        manager.resolve(mixed_request(("a", folder("a"), 1), ("x", "/nowhere", 1)))
    assert manager.catalog.list() == []


def test_a_part_whose_files_changed_since_it_was_read(make, folder, tmp_path):
    """Evicted from memory and overwritten: the mix is refused until the part is loaded again, as the adapter is."""
    manager = make(max_loras=1, max_cpu_loras=2)
    a, b = folder("a"), folder("b")
    first = admit(manager, mixed_request(("a", a, 0.7), ("b", b, 0.3)))
    before = added_by(manager, first)
    manager.forget(first)
    for name in "cdef":
        manager.forget(admitted(manager, name, folder(name), name))
    assert level(manager, "a") == level(manager, "b") == "disk"
    assert not list_mixes(manager)
    write_adapter(tmp_path / "b", seed=99)
    changed = mixed_request(("a", a, 0.7), ("b", b, 0.3))
    manager.resolve(changed)
    with pytest.raises(AdapterError, match="load_inplace"):
        wait_for(manager, changed)
    manager.catalog.load(LoRARequest("b", path=b), load_inplace=True)
    second = admit(manager, mixed_request(("a", a, 0.7), ("b", b, 0.3)))
    assert not torch.allclose(added_by(manager, second), before)
    plain = mixed_request(("b", b, 1))
    manager.forget(second)
    admit(manager, plain)
    digests = {info.name: info.digest for info in manager.catalog.list()}
    assert digests["b"] == manager.namespace(plain).hex()
    manager.forget(plain)


def test_a_mix_with_newcomers_gives_them_their_names(make, folder):
    manager = make(max_loras=3)
    old, new, b = folder("old"), folder("new"), folder("b")
    plain = admitted(manager, "a", old, "1")
    mix = admit(manager, mixed_request(("a", new, 0.5), ("b", b, 0.5)))
    assert {info.name: info.path for info in manager.catalog.list()} == {"a": new, "b": b}
    for request in (plain, mix):
        manager.forget(request)


def test_a_preempted_mix_goes_on_with_its_content(make, folder):
    manager = make(max_loras=1, max_cpu_loras=2, max_lora_rank=8)
    a, b = folder("a"), folder("b")
    mix = admit(manager, mixed_request(("a", a, 0.7), ("b", b, 0.3)))
    before = added_by(manager, mix)
    manager.release(mix)
    shutil.rmtree(a)
    shutil.rmtree(b)
    manager.forget(admitted(manager, "c", folder("c", rank=8), "1"))
    wait_for(manager, mix)
    assert torch.equal(added_by(manager, mix), before)
    manager.forget(mix)


def test_the_manager_serves_the_mixed_weights(make, folder):
    manager = make()
    a, b = folder("a", rank=3), folder("b", rank=5)
    mix = admit(manager, mixed_request(("a", a, 0.25), ("b", b, 4)))
    host = manager._residency.host
    parts = {version.name: host.get(version.digest) for version in manager._registry.current()}
    expected = mix_adapters([(parts["a"], 0.25), (parts["b"], 4)])
    assert mix.adapter.digest == expected.digest
    served = host.get(expected.digest).target.modules()
    assert all(torch.equal(served[name].b, weights.b) for name, weights in expected.target.modules().items())
    manager.forget(mix)


def test_dora_is_served_alone_and_refused_in_mixes(make, folder):
    state = tensors(rank=4, seed=1)
    state |= {
        name.replace("lora_B", "lora_magnitude_vector"): torch.ones(len(tensor))
        for name, tensor in state.items()
        if "lora_B" in name
    }
    manager = make()
    for linear in manager.linears:
        for slot in linear.weight_slots().values():
            slot.load(torch.randn(slot.shape))
    path, plain = folder("dora", state=state, use_dora=True), folder("plain")
    alone = admit(manager, mixed_request(("dora", path, 1)))
    for parts in ([("dora", path, 0.5)], [("dora", path, 1), ("plain", plain, 1)]):
        mix = mixed_request(*parts)
        manager.resolve(mix)
        with pytest.raises(AdapterError, match="adapter 'dora' uses DoRA"):
            wait_for(manager, mix)
    assert not list_mixes(manager)
    manager.forget(alone)


def test_reads_that_end_together(make, folder, monkeypatch):
    """Handling the first of them does not drop the unused version of the second too early: its content would stay for
    ever."""
    manager, gate, read = make(), threading.Event(), AdapterFiles.read
    monkeypatch.setattr(AdapterFiles, "read", lambda files, source: gate.wait(30) and read(files, source))
    first, second = mixed_request(("a", folder("a"), 0.5)), mixed_request(("b", folder("b"), 0.5))
    for request in (first, second):
        manager.resolve(request)
    manager.forget(second)
    manager.catalog.unload("b")
    gate.set()
    results, deadline = manager._transfers._threads._results, time.monotonic() + 30
    while results.qsize() < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    wait_for(manager, first)
    manager.check_integrity()
    manager.forget(first)
