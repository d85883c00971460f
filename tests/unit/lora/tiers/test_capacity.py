"""Capacity: rows of the device by number or by bytes, adapters that run at once, bytes of host memory."""

from dataclasses import replace

import pytest
import torch

from outrider.lora.device.layout import LoraWeights, OwnRows
from outrider.lora.manager import LOADING, MAX_LORAS, ROWS
from outrider.platform.core.errors import AdapterError, InvalidRequestError, InvalidUserInputError
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.sizes import format_bytes, parse_bytes

from ..conftest import HIDDEN, admitted, level, make_request, module, settle


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        ("1000", 1000),
        ("512MiB", 512 << 20),
        ("2GB", 2 * 10**9),
        ("1.5 gib", 3 << 29),
        ("7 kb", 7000),
        ("1TiB", 1 << 40),
        ("3B", 3),
    ],
)
def test_sizes(value, expected):
    assert parse_bytes("lora_memory", value) == expected


@pytest.mark.parametrize(
    "value", [0, -1, True, 1.5, "", "MiB", "-3MB", "1 2", "5 mibs", "1e9", "0", "inf", None, "٣", []]
)
def test_no_sizes(value):
    with pytest.raises(InvalidRequestError, match=r"^lora_memory must be a number of bytes") as error:
        parse_bytes("lora_memory", value)
    assert error.value.param == "lora_memory"


def test_a_size_is_shown_exactly():
    assert format_bytes(1536) == "1536 bytes (1.5 KiB)"
    assert format_bytes(3) == "3 bytes"


def row_bytes(manager):
    return sum(sites.row_bytes for sites in manager._transfers._writer._sites)


def test_rows_by_default_and_by_bytes(make_manager):
    manager = make_manager(max_loras=3, max_lora_rank=4)
    assert manager.catalog.stats().num_rows == 12
    size = row_bytes(manager)
    assert make_manager(max_lora_rank=4, memory_bytes=20 * size - 1).catalog.stats().num_rows == 19
    with pytest.raises(InvalidRequestError) as error:
        make_manager(max_lora_rank=4, memory_bytes=4 * size - 1)
    assert error.value.param == "lora_memory"
    assert f"lora_memory of {4 * size - 1} bytes" in error.value.message
    assert f"takes {4 * size} bytes" in error.value.message


def test_idle_adapters_stay_while_rows_last(make_manager, folder):
    manager = make_manager(max_loras=1, max_lora_rank=8, max_cpu_loras=8)  # 8 rows
    for name in "abcd":
        manager.forget(admitted(manager, name, folder(name, rank=2)))
    assert [level(manager, name) for name in "abcd"] == ["device"] * 4
    assert manager.catalog.stats().rows_used == 8
    manager.forget(admitted(manager, "e", folder("e", rank=3)))
    assert [level(manager, name) for name in "abcde"] == ["host", "host", "device", "device", "device"]


def test_at_most_max_loras_run(make_manager, folder):
    manager = make_manager(max_loras=2, max_lora_rank=8, max_cpu_loras=8)
    running = [admitted(manager, name, folder(name, rank=2), name) for name in "ab"]
    third = make_request("c", folder("c", rank=2))
    manager.resolve(third)
    assert settle(manager, third) == MAX_LORAS
    assert level(manager, "c") == "device", "it waits there"
    assert admitted(manager, "b", folder("b", rank=2), "again").adapter is running[1].adapter
    manager.forget(running[0])
    assert settle(manager, third) is None
    for request in (*running[1].adapter.running, third):
        manager.forget(request)


def test_admission_looks_at_the_rows_needed(make_manager, folder):
    """A small adapter runs in rows that a large one cannot use."""
    manager = make_manager(max_loras=8, max_lora_rank=4, max_cpu_loras=8, memory_bytes=6 * row_bytes(make_manager()))
    running = [admitted(manager, "a", folder("a", rank=4), "a")]
    large, small = make_request("l", folder("l", rank=3)), make_request("s", folder("s", rank=2))
    for request in (large, small):
        manager.resolve(request)
    assert [settle(manager, request) for request in (large, small)] == [ROWS, None]
    manager.forget(running[0])
    assert settle(manager, large) is None
    for request in (large, small):
        manager.forget(request)


def oversized(manager, rows):
    """An adapter of more rows than the largest rank, as the sum of several."""
    read, weights = manager._files.read, LoraWeights(torch.zeros(rows, 24), torch.zeros(rows, HIDDEN))

    def more(source):
        adapter = read(source)
        return replace(adapter, target=adapter.target.layout.pack({module(0, "down_proj"): weights}))

    manager._files.read = more


def test_more_rows_than_there_are(make_manager, folder):
    manager = make_manager(max_loras=2, max_lora_rank=4)
    oversized(manager, 9)
    with pytest.raises(AdapterError, match="'a' takes 9 rank rows, and the device has 8; raise lora_memory"):
        manager.catalog.load(LoRARequest("a", path=folder("a")))
    request = make_request("a", folder("a"))
    manager.resolve(request)
    with pytest.raises(AdapterError, match="takes 9 rank rows"):
        settle(manager, request)
    assert (manager.catalog.list(), len(manager._residency.host)) == ([], 0)


def test_more_rows_than_pins_leave(make_manager, folder):
    manager = make_manager(max_loras=2, max_lora_rank=4)
    manager.catalog.load(LoRARequest("p", path=folder("p", rank=2)), pinned=True)
    oversized(manager, 7)
    request = make_request("a", folder("a"))
    manager.resolve(request)
    with pytest.raises(AdapterError, match="'a' takes 7 rank rows, and the pinned adapters leave 6"):
        settle(manager, request)
    manager.catalog.unpin("p")
    manager.forget(admitted(manager, "a", folder("a")))


# --- device memory in addition to rank rows ---


def with_embeddings(manager, num_bytes, names="a"):
    """Let adapters of these names bring embeddings of their own."""
    read, own = manager._files.read, {"model.embed_tokens": OwnRows(torch.zeros(1, num_bytes // 4), None)}

    def more(source):
        adapter = read(source)
        named = source.path[-1] in names
        return replace(adapter, target=adapter.target._replace(own_rows=own)) if named else adapter

    manager._files.read = more


def test_embeddings_of_an_adapter_count_as_rank_rows(make_manager, folder):
    size = row_bytes(make_manager())
    manager = make_manager(max_loras=4, max_lora_rank=4, max_cpu_loras=8, memory_bytes=10 * size)
    with_embeddings(manager, 3 * size + 4)
    for name in "bcd":
        manager.forget(admitted(manager, name, folder(name, rank=2)))
    assert manager.catalog.stats().rows_used == 6
    running = admitted(manager, "a", folder("a", rank=2))  # counts as 6
    assert [level(manager, name) for name in "abcd"] == ["device", "host", "device", "device"]
    assert (manager.catalog.stats().rows_used, manager.catalog.find("a").rows) == (10, 2)
    waiting = make_request("e", folder("e", rank=4), "e")
    manager.resolve(waiting)
    assert settle(manager, waiting) is None, "the two small ones are evicted"
    other = make_request("b", folder("b", rank=1), "b")
    manager.resolve(other)
    assert settle(manager, other) == ROWS, "two rank rows are free, and count as the embeddings"
    manager.forget(running)
    assert settle(manager, other) is None
    assert level(manager, "a") == "host"
    for request in (waiting, other):
        manager.forget(request)
    manager.check_integrity()


def test_more_embeddings_than_the_device_has_memory_for(make_manager, folder):
    size = row_bytes(make_manager())
    manager = make_manager(max_lora_rank=4, memory_bytes=8 * size)
    with_embeddings(manager, 6 * size + 4)
    wanted = rf"'a' takes memory of 9 rank rows \(2, and {6 * size + 4} bytes.*the device has 8; raise lora_memory"
    with pytest.raises(AdapterError, match=wanted):
        manager.catalog.load(LoRARequest("a", path=folder("a", rank=2)))
    unlimited = make_manager(max_loras=1, max_lora_rank=4)
    with_embeddings(unlimited, 6 * size + 4)
    unlimited.forget(admitted(unlimited, "a", folder("a", rank=4)))


def test_pinned_embeddings_leave_room_for_another_adapter(make_manager, folder):
    size = row_bytes(make_manager())
    manager = make_manager(max_loras=2, max_lora_rank=4, memory_bytes=8 * size)
    with_embeddings(manager, 3 * size)
    with pytest.raises(InvalidUserInputError, match="would leave 3 of 8 rank rows"):
        manager.catalog.load(LoRARequest("a", path=folder("a", rank=2)), pinned=True)
    manager.catalog.load(LoRARequest("a", path=folder("a1/a", rank=1)), pinned=True)
    oversized(manager, 5)
    request = make_request("b", folder("b"))
    manager.resolve(request)
    with pytest.raises(AdapterError, match="'b' takes 5 rank rows, and the pinned adapters leave 4"):
        settle(manager, request)


# --- bytes of host memory ---


def entry_bytes(make_manager, folder, rank=4):
    manager = make_manager()
    info = manager.catalog.load(LoRARequest("probe", path=folder("probe", rank=rank)))
    assert info.num_bytes == manager.catalog.stats().host_bytes > 0
    return info.num_bytes


def test_the_host_tier_is_bounded_in_bytes(make_manager, folder):
    size = entry_bytes(make_manager, folder)
    manager = make_manager(max_loras=1, max_cpu_loras=100, max_lora_rank=8, max_cpu_bytes=3 * size)
    for name in "abcdef":
        manager.forget(admitted(manager, name, folder(name)))
        assert manager.catalog.stats().host_bytes <= 3 * size
    assert sum(info.level == "disk" for info in manager.catalog.list()) == 3


def test_one_adapter_larger_than_the_host_tier(make_manager, folder):
    size = entry_bytes(make_manager, folder)
    manager = make_manager(max_cpu_bytes=size - 1)
    request = make_request("a", folder("a"))
    manager.resolve(request)
    with pytest.raises(AdapterError, match=rf"takes {size} bytes.* there are {size - 1} bytes.*max_cpu_lora_memory"):
        settle(manager, request)
    assert manager.catalog.stats().host_bytes == 0


def test_eight_adapters_load_in_turn_within_a_byte_limit(make_manager, folder):
    """Eight are wanted at once, room is for one and a half."""
    size = entry_bytes(make_manager, folder)
    manager = make_manager(max_loras=1, max_cpu_loras=100, max_lora_rank=8, max_cpu_bytes=3 * size // 2)
    waiting = [make_request(name, folder(name), name) for name in "abcdefgh"]
    for request in waiting:
        manager.resolve(request)
    order = []
    for _ in range(400):
        for request in list(waiting):
            if manager.admit(request) is None:
                waiting.remove(request)
                order.append(request.request_id)
                manager.forget(request)
        manager.wait(1)
    assert "".join(order) == "abcdefgh"


def test_pins_leave_half_of_the_bytes(make_manager, folder):
    size = entry_bytes(make_manager, folder)
    manager = make_manager(max_loras=8, max_cpu_loras=100, max_cpu_bytes=3 * size)
    assert manager.catalog.load(LoRARequest("a", path=folder("a")), pinned=True).pinned
    with pytest.raises(InvalidUserInputError, match=f"{2 * size} bytes.*more than half of {3 * size}"):
        manager.catalog.load(LoRARequest("b", path=folder("b")), pinned=True)
    assert [info.name for info in manager.catalog.list()] == ["a"]


def test_a_host_tier_full_of_running_adapters_makes_others_wait(make_manager, folder):
    manager = make_manager(max_loras=2, max_cpu_loras=2)
    running = [admitted(manager, name, folder(name), name) for name in "ab"]
    other = make_request("c", folder("c"))
    manager.resolve(other)
    assert settle(manager, other) == LOADING
    assert manager.catalog.stats().load_seconds[2:] == [], "it was not even read"
    manager.forget(running[0])
    assert settle(manager, other) is None
    for request in (running[1], other):
        manager.forget(request)
