"""Room in host memory and on the device: LRU, limits, ageing and pins, through the manager."""

import threading
import weakref
from queue import SimpleQueue

import pytest

from outrider.lora.manager import ROWS
from outrider.lora.tiers import host_tier
from outrider.lora.tiers.starvation import AGING_SECONDS
from outrider.platform.core.errors import InvalidUserInputError
from outrider.platform.core.lora_request import LoRARequest

from ..conftest import admitted, level, make_request, settle


def test_lru_over_rows(make_manager, folder):
    manager = make_manager(max_lora_rank=4, max_loras=2)
    for name in ("a", "b", "a", "c"):
        manager.forget(admitted(manager, name, folder(name)))
    assert [level(manager, name) for name in "abc"] == ["device", "host", "device"]


def test_an_adapter_takes_the_rows_of_its_rank(make_manager, folder):
    manager = make_manager(max_loras=4, max_lora_rank=8)  # 32 rows
    requests = [admitted(manager, f"a{rank}", folder(f"a{rank}", rank=rank)) for rank in (8, 2, 4)]
    assert manager._residency.pool.num_free == 32 - 14
    for request in requests:
        manager.forget(request)


def test_rows_of_running_requests_are_not_taken(make_manager, folder):
    manager = make_manager(max_lora_rank=4, max_loras=1)
    running, waiting = admitted(manager, "a", folder("a")), make_request("b", folder("b"))
    manager.resolve(waiting)
    manager.wait(10)
    assert settle(manager, waiting) == ROWS
    assert manager.prepare([(running.adapter, 1)]) is not None
    manager.forget(running)
    assert settle(manager, waiting) is None
    manager.forget(waiting)


def test_the_host_tier_is_bounded(make_manager, folder):
    manager = make_manager(max_lora_rank=4, max_loras=1, max_cpu_loras=2)
    for name in "abcd":
        manager.forget(admitted(manager, name, folder(name)))
        assert len(manager._residency.host) <= 2
    assert [level(manager, name) for name in "abcd"] == ["disk", "disk", "host", "device"]


def test_more_adapters_wanted_than_fit_the_host_tier(make_manager, folder):
    manager = make_manager(max_lora_rank=4, max_loras=1, max_cpu_loras=2)
    requests = [make_request(f"a{i}", folder(f"a{i}"), str(i)) for i in range(6)]
    for request in requests:
        manager.resolve(request)
    waiting, order, num_loads = list(requests), [], 0
    for _ in range(200):
        for request in list(waiting):
            if manager.admit(request) is None:
                waiting.remove(request)
                order.append(request.request_id)
                manager.forget(request)
        manager.wait(1)
        num_loads += len(manager.catalog.stats().load_seconds)
        if not waiting:
            break
    assert order == [str(i) for i in range(6)], "first come, first served"
    assert num_loads == 6, "none was evicted before it ran"


def test_requests_that_ended_while_waiting_claim_nothing(make_manager, folder):
    manager = make_manager(max_lora_rank=4, max_loras=1, max_cpu_loras=1)
    gone = make_request("a", folder("a"), "gone")
    manager.resolve(gone)
    manager.wait(10)
    manager.forget(gone)
    manager.forget(admitted(manager, "b", folder("b")))
    assert manager.catalog.stats().waiting == []


def test_the_longest_waiting_adapter_gets_the_rows_next(make_manager, folder):
    now = [0.0]
    manager = make_manager(max_lora_rank=4, max_loras=2, clock=lambda: now[0])
    busy = [admitted(manager, name, folder(name), name) for name in "ab"]
    busy.append(admitted(manager, "b", folder("b"), "b2"))
    starving = make_request("c", folder("c"), "starving")
    manager.resolve(starving)
    manager.wait(10)
    assert settle(manager, starving) == ROWS
    now[0] = AGING_SECONDS / 2
    newer = admitted(manager, "a", folder("a"), "newer")
    now[0] = AGING_SECONDS + 1
    assert settle(manager, starving) == ROWS
    for request in (newer, busy[1]):
        manager.forget(request)
    late = make_request("a", folder("a"), "late")
    manager.resolve(late)
    assert settle(manager, late) == ROWS, "a, with the fewest users, is left to drain"
    busy.append(admitted(manager, "b", folder("b"), "b3"))
    manager.forget(busy[0])
    assert settle(manager, starving) is None
    manager.forget(starving)
    assert settle(manager, late) is None
    for request in (busy[2], busy[3], late):
        manager.forget(request)


@pytest.mark.parametrize("max_cpu_loras", [1, 2])
def test_a_stream_of_requests_for_one_adapter_does_not_starve_another(make_manager, folder, max_cpu_loras):
    """Also when host memory has room for no more than the device: then the load itself must wait."""
    now = [0.0]
    manager = make_manager(max_lora_rank=4, max_loras=1, max_cpu_loras=max_cpu_loras, clock=lambda: now[0])
    path = folder("a")
    running = {admitted(manager, "a", path, "first"): 0}  # and in which step each began
    starving = make_request("b", folder("b"), "starving")
    manager.resolve(starving)
    waiting = [starving]
    for step in range(40):  # of 0.1 s; one more request for a in each, and each runs for three
        now[0] += 0.1
        waiting.append(make_request("a", path, "stream"))
        manager.resolve(waiting[-1])
        for request in list(waiting):
            if manager.admit(request) is None:
                waiting.remove(request)
                running[request] = step
        manager.check_integrity()
        if starving in running:
            break
        manager.wait(10)
        for request in [request for request, began in running.items() if step - began >= 2]:
            del running[request]
            manager.forget(request)
    assert starving in running
    assert AGING_SECONDS < now[0] < AGING_SECONDS + 1
    for request in [*running, *waiting]:
        manager.forget(request)


def test_only_less_urgent_requests_yield(make_manager, folder):
    now = [0.0]
    manager = make_manager(max_lora_rank=4, max_loras=1, clock=lambda: now[0])
    busy = admitted(manager, "a", folder("a"), "busy", priority=5)
    low = make_request("b", folder("b"), "low", priority=9)
    manager.resolve(low)
    manager.wait(10)
    assert settle(manager, low) == ROWS
    now[0] = AGING_SECONDS + 1
    urgent = admitted(manager, "a", folder("a"), "urgent", priority=-5)
    as_low = make_request("a", folder("a"), "as low, and newer", priority=9)
    manager.resolve(as_low)
    assert settle(manager, as_low) == ROWS
    manager.forget(busy)
    manager.forget(urgent)
    idle = admitted(manager, "a", folder("a"), "idle adapter, urgent request", priority=-5)
    manager.forget(idle)
    assert settle(manager, low) is None
    for request in (low, as_low):
        manager.forget(request)


def test_only_the_adapter_whose_rows_are_needed_yields(make_manager, folder):
    """Another one on the device continues, idle or not, and one that needs new rows waits."""
    now = [0.0]
    manager = make_manager(max_lora_rank=4, max_loras=2, max_cpu_loras=4, clock=lambda: now[0])
    users = [admitted(manager, name, folder(name), name) for name in "ab"]
    late = {name: make_request(name, folder(name), f"{name} late") for name in "cabd"}  # c is the one that starves
    for request in late.values():
        manager.resolve(request)
        manager.wait(10)
    assert settle(manager, late["c"]) == ROWS
    for request in users:
        manager.forget(request)
    now[0] = AGING_SECONDS + 1
    assert settle(manager, late["d"]) == ROWS, "it would take freed rows"
    assert settle(manager, late["a"]) == ROWS, "the least recently used is to be evicted"
    assert settle(manager, late["b"]) is None
    assert settle(manager, late["c"]) is None
    for request in late.values():
        manager.forget(request)


def test_requests_that_do_not_yield_are_not_waited_for(make_manager, folder):
    """A more urgent stream keeps its adapter's rows; the less urgent one's are drained, though it has more users."""
    now = [0.0]
    manager = make_manager(max_lora_rank=4, max_loras=2, clock=lambda: now[0])
    urgent = admitted(manager, "a", folder("a"), "urgent", priority=-5)
    users = [admitted(manager, "b", folder("b"), str(i), priority=9) for i in range(3)]
    starving = make_request("c", folder("c"), "starving")
    manager.resolve(starving)
    manager.wait(10)
    assert settle(manager, starving) == ROWS
    now[0] = AGING_SECONDS + 1
    late = make_request("b", folder("b"), "late", priority=9)
    manager.resolve(late)
    assert settle(manager, late) == ROWS
    for request in users:
        manager.forget(request)
    assert settle(manager, starving) is None
    for request in (urgent, starving, late):
        manager.forget(request)


def test_a_refusal_is_remembered_until_something_changes(make_manager, folder, monkeypatch):
    manager = make_manager(max_lora_rank=4, max_loras=1)
    running, path = admitted(manager, "a", folder("a")), folder("b")
    requests = [make_request("b", path, str(i)) for i in range(100)]
    for request in requests:
        manager.resolve(request)
    manager.wait(10)
    tries, real = [], manager._residency.place
    monkeypatch.setattr(manager._residency, "place", lambda *args: tries.append(args) or real(*args))
    for _ in range(3):
        assert [manager.admit(request) for request in requests] == [ROWS] * 100
    assert len(tries) == 1
    manager.forget(running)
    assert settle(manager, requests[0]) is None
    assert [manager.admit(request) for request in requests] == [None] * 100
    for request in requests:
        manager.forget(request)


# --- pins ---


def test_a_pin_without_room_is_refused_and_changes_nothing(make_manager, folder):
    manager = make_manager(max_lora_rank=4, max_loras=2)
    users = [admitted(manager, name, folder(name), name) for name in "ab"]
    with pytest.raises(InvalidUserInputError, match="cannot pin 'p' now") as caught:
        manager.catalog.load(LoRARequest("p", path=folder("p")), pinned=True)
    assert caught.value.info().param == "pinned"
    assert [info.name for info in manager.catalog.list()] == ["a", "b"]
    assert len(manager._residency.host) == 2
    manager.check_integrity()
    manager.forget(users.pop())
    assert manager.catalog.load(LoRARequest("p", path=folder("p")), pinned=True).level == "device"
    manager.forget(users.pop())


def test_a_pinned_adapter_may_be_replaced_when_the_rest_is_busy(make_manager, folder):
    manager = make_manager(max_lora_rank=4, max_loras=2)
    manager.catalog.load(LoRARequest("p", path=folder("p")), pinned=True)
    user = admitted(manager, "a", folder("a"))
    on_p = admitted(manager, "p", folder("p"), "on p")
    with pytest.raises(InvalidUserInputError, match="cannot pin"):
        manager.catalog.load(LoRARequest("p", path=folder("q")), pinned=True, load_inplace=True)
    manager.check_integrity()
    manager.forget(on_p)
    assert manager.catalog.load(LoRARequest("p", path=folder("q")), pinned=True, load_inplace=True).level == "device"
    manager.forget(user)


def test_a_pinned_adapter_stays(make_manager, folder):
    manager = make_manager(max_lora_rank=4, max_loras=2)
    info = manager.catalog.load(LoRARequest("p", path=folder("p")), pinned=True)
    assert (info.level, info.pinned) == ("device", True)
    for name in "abc":
        manager.forget(admitted(manager, name, folder(name)))
    assert level(manager, "p") == "device"
    manager.catalog.unload("p")
    assert len(manager._residency.pool) == 1


def test_pins_must_leave_room_for_another(make_manager, folder):
    manager = make_manager(max_lora_rank=4, max_loras=2)
    manager.catalog.load(LoRARequest("p", path=folder("p")), pinned=True)
    with pytest.raises(InvalidUserInputError, match="cannot pin 'q'"):
        manager.catalog.load(LoRARequest("q", path=folder("q")), pinned=True)
    assert [info.name for info in manager.catalog.list()] == ["p"]
    assert manager.catalog.load(LoRARequest("q", path=folder("q"))).pinned is False


def test_pinned_in_place_moves_the_pin(make_manager, folder):
    manager = make_manager(max_lora_rank=4, max_loras=2)
    manager.catalog.load(LoRARequest("p", path=folder("p")), pinned=True)
    manager.catalog.load(LoRARequest("p", path=folder("q")), pinned=True, load_inplace=True)
    for name in "abc":
        manager.forget(admitted(manager, name, folder(name)))
    assert level(manager, "p") == "device"
    assert len(manager._residency.pool) == 2


def test_the_adapter_to_evict_is_found_without_a_full_scan(make_manager, folder, monkeypatch):
    """The first unused one in order: with thousands in memory, checking more would delay a step."""
    manager = make_manager(max_loras=2, max_cpu_loras=24)
    for index in range(24):
        manager.catalog.load(LoRARequest(f"n{index}", path=folder(f"n{index}", seed=index)))
    request = admitted(manager, "n0", folder("n0", seed=0))
    asked = []
    registry = manager._registry
    is_held = registry.is_held
    monkeypatch.setattr(registry, "is_held", lambda digest: asked.append(digest) or is_held(digest))
    manager.catalog.load(LoRARequest("new", path=folder("new", seed=99)))
    assert len(asked) <= 2
    assert [info.name for info in manager.catalog.list() if info.level == "disk"] == ["n1"]
    manager.forget(request)


def test_a_large_adapter_is_freed_in_another_thread(make_manager, folder, monkeypatch):
    monkeypatch.setattr(host_tier, "_SLOW_TO_FREE", 1)
    manager = make_manager(max_lora_rank=4, max_loras=1, max_cpu_loras=1)
    request = admitted(manager, "a", folder("a"))
    freed: SimpleQueue[threading.Thread] = SimpleQueue()
    (digest,) = manager._residency.host
    rows = manager._residency.host.peek(digest).target.linears.data
    weakref.finalize(rows, lambda: freed.put(threading.current_thread()))
    del rows
    manager.forget(request)
    manager.forget(admitted(manager, "b", folder("b")))  # evicts it
    assert freed.get(timeout=10).name.startswith("outrider-later")
