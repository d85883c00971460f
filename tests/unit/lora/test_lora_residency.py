"""Who gets room in host memory and on the device: LRU, limits, ageing and pins, through the manager."""

import pytest

from outrider.lora.manager import ROWS
from outrider.lora.residency import AGING_SECONDS
from outrider.platform.core.errors import InvalidUserInputError
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.request import Status

from .conftest import admitted, level, make_request


def test_lru_over_rows(make_manager, folder):
    manager = make_manager(max_loras=2)
    for name in ("a", "b", "a", "c"):
        manager.release(admitted(manager, name, folder(name)))
    assert [level(manager, name) for name in "abc"] == ["device", "host", "device"]


def test_an_adapter_takes_the_rows_of_its_rank(make_manager, folder):
    manager = make_manager(max_loras=4, max_lora_rank=8)  # 32 rows
    requests = [admitted(manager, f"a{rank}", folder(f"a{rank}", rank=rank)) for rank in (8, 2, 4)]
    assert manager._residency.pool.num_free_rows == 32 - 14
    for request in requests:
        manager.release(request)


def test_rows_of_running_requests_are_not_taken(make_manager, folder):
    manager = make_manager(max_loras=1)
    running, waiting = admitted(manager, "a", folder("a")), make_request("b", folder("b"))
    manager.resolve(waiting)
    manager.wait(10)
    assert manager.admit(waiting) == ROWS
    assert manager.prepare([(running.adapter, 1)]) is not None
    manager.release(running)
    assert manager.admit(waiting) is None
    manager.release(waiting)


def test_the_host_tier_is_bounded(make_manager, folder):
    manager = make_manager(max_loras=1, max_cpu_loras=2)
    for name in "abcd":
        manager.release(admitted(manager, name, folder(name)))
        assert len(manager._residency.host) <= 2
    assert [level(manager, name) for name in "abcd"] == ["disk", "disk", "host", "device"]


def test_more_adapters_wanted_than_fit_the_host_tier(make_manager, folder):
    manager = make_manager(max_loras=1, max_cpu_loras=2)
    requests = [make_request(f"a{i}", folder(f"a{i}"), str(i)) for i in range(6)]
    for request in requests:
        manager.resolve(request)
    waiting, order, num_loads = list(requests), [], 0
    for _ in range(200):
        for request in list(waiting):
            if manager.admit(request) is None:
                waiting.remove(request)
                order.append(request.request_id)
                manager.release(request)
        manager.wait(1)
        num_loads += len(manager.stats().load_seconds)
        if not waiting:
            break
    assert order == [str(i) for i in range(6)], "first come, first served"
    assert num_loads == 6, "none was pushed out before it ran"


def test_requests_that_ended_while_waiting_claim_nothing(make_manager, folder):
    manager = make_manager(max_loras=1, max_cpu_loras=1)
    gone = make_request("a", folder("a"), "gone")
    manager.resolve(gone)
    manager.wait(10)
    gone.status = Status.FINISHED
    manager.release(admitted(manager, "b", folder("b")))
    assert manager.stats().waiting == []


def test_one_that_waited_too_long_gets_the_rows_next(make_manager, folder):
    now = [0.0]
    manager = make_manager(max_loras=2, clock=lambda: now[0])
    busy = [admitted(manager, name, folder(name), name) for name in "ab"]
    busy.append(admitted(manager, "b", folder("b"), "b2"))
    starving = make_request("c", folder("c"), "starving")
    manager.resolve(starving)
    manager.wait(10)
    assert manager.admit(starving) == ROWS
    now[0] = AGING_SECONDS / 2
    newer = admitted(manager, "a", folder("a"), "newer")
    now[0] = AGING_SECONDS + 1
    assert manager.admit(starving) == ROWS
    for request in (newer, busy[1]):
        manager.release(request)
    late = make_request("a", folder("a"), "late")
    manager.resolve(late)
    assert manager.admit(late) == ROWS, "a, with the fewest users, is left to drain"
    busy.append(admitted(manager, "b", folder("b"), "b3"))
    manager.release(busy[0])
    assert manager.admit(starving) is None
    manager.release(starving)
    assert manager.admit(late) is None
    for request in (busy[2], busy[3], late):
        manager.release(request)


# --- pins ---


def test_a_pinned_adapter_stays(make_manager, folder):
    manager = make_manager(max_loras=2)
    info = manager.load(LoRARequest("p", path=folder("p")), pinned=True)
    assert (info.level, info.pinned) == ("device", True)
    for name in "abc":
        manager.release(admitted(manager, name, folder(name)))
    assert level(manager, "p") == "device"
    manager.unload("p")
    assert len(manager._residency.pool) == 1


def test_pins_must_leave_room_for_another(make_manager, folder):
    manager = make_manager(max_loras=2)
    manager.load(LoRARequest("p", path=folder("p")), pinned=True)
    with pytest.raises(InvalidUserInputError, match="cannot pin 'q'"):
        manager.load(LoRARequest("q", path=folder("q")), pinned=True)
    assert [info.name for info in manager.list()] == ["p"]
    assert manager.load(LoRARequest("q", path=folder("q"))).pinned is False


def test_pinned_in_place_moves_the_pin(make_manager, folder):
    manager = make_manager(max_loras=2)
    manager.load(LoRARequest("p", path=folder("p")), pinned=True)
    manager.load(LoRARequest("p", path=folder("q")), pinned=True, load_inplace=True)
    for name in "abc":
        manager.release(admitted(manager, name, folder(name)))
    assert level(manager, "p") == "device"
    assert len(manager._residency.pool) == 2
