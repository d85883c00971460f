"""The publisher of KV events: vLLM's frames, replay, and engines that never wait."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

import msgspec
import pytest
import zmq

from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.kv_events import parse_kv_events
from outrider.platform.engine import kv_publisher
from outrider.platform.engine.engine_core import EngineCore
from outrider.platform.engine.kv_publisher import KVEventPublisher, is_listening
from outrider.platform.engine.memory.cache_events import DEVICE, CacheEvents

from ...kv_consumer import AllBlocksCleared, decode

END = b"\xff" * 8
SECONDS = 20


@pytest.fixture
def start():
    """Makes publishers on free ports of this machine."""
    with contextlib.ExitStack() as ends:

        def make(rank=0, **fields):
            fields = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", **fields}
            config = parse_kv_events({"enable_kv_cache_events": True, **fields}, rank)
            publisher = KVEventPublisher(config, rank, CacheEvents(4), 4)
            ends.callback(publisher.close)
            return publisher

        yield make


@pytest.fixture
def connect():
    """Makes sockets of a subscriber."""
    with zmq.Context() as context:

        def make(kind, endpoint):
            socket = context.socket(kind)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, 1000 * SECONDS)
            socket.connect(endpoint)
            return socket

        yield make
        context.destroy(linger=0)


def publish(publisher, *numbers):
    """One batch for each number, the hash that is removed."""
    for number in numbers:
        publisher.events.removed(number.to_bytes(16), DEVICE)
        publisher.flush()


def subscribed(publisher, connect, topic=b""):
    """A subscriber that has received a batch: those that follow arrive too."""
    socket = connect(zmq.SUB, publisher.source.endpoint)
    socket.subscribe(topic)
    for _ in range(SECONDS * 100):
        publish(publisher, 0)
        if socket.poll(10):
            while socket.poll(100):
                socket.recv_multipart()
            return socket
    raise AssertionError("nothing was received")


def replay(connect, publisher, first):
    """Frames of the answer to a request for replay."""
    with connect(zmq.DEALER, publisher.source.replay_endpoint) as socket:
        socket.send_multipart([b"", first.to_bytes(8)])
        found = []
        while not found or found[-1][-2] != END:
            found.append(socket.recv_multipart())
        return found


def replayed(connect, publisher, first, count):
    """The batches of a replay, once there are `count`: the last ones may be on their way to the sender."""
    deadline = time.monotonic() + SECONDS
    while len(frames := replay(connect, publisher, first)[:-1]) < count:
        assert time.monotonic() < deadline, f"{len(frames)} batches of {count}"
    return [(int.from_bytes(number), decode(payload)) for _, _, number, payload in frames]


def hashes(batch):
    return [name for event in batch.events for name in event.block_hashes]


def test_a_message_has_topic_number_and_payload(start, connect):
    publisher = start(rank=3, topic="kv@pod@model", endpoint="tcp://127.0.0.1:0")
    socket = subscribed(publisher, connect, b"kv@pod")
    number = publisher.num_batches
    publish(publisher, 1, 2**64 - 1)
    for offset, name in enumerate((1, 2**64 - 1)):
        topic, frame, payload = socket.recv_multipart()
        assert (topic, int.from_bytes(frame)) == (b"kv@pod@model", number + offset)
        batch = decode(payload)
        assert (batch.data_parallel_rank, hashes(batch)) == (3, [name])
        assert batch.ts > 1e9
        assert msgspec.msgpack.decode(payload)[1][0]["type"] == "BlockRemoved"


def test_a_step_without_events_sends_nothing(start):
    publisher = start()
    publisher.flush()
    assert publisher.num_batches == 0


def test_replay_begins_where_it_is_asked_to(start, connect):
    publisher = start(topic="t")
    publish(publisher, *range(5))
    replayed(connect, publisher, 0, 5)
    *batches, end = replay(connect, publisher, 3)
    assert end == [b"", b"", END, b""]
    assert [frames[:3] for frames in batches] == [[b"", b"t", (n).to_bytes(8)] for n in (3, 4)]
    assert [hashes(decode(frames[3])) for frames in batches] == [[3], [4]]
    assert replay(connect, publisher, 5) == [[b"", b"", END, b""]]


def test_the_buffer_of_replay_is_bounded(start, connect):
    publisher = start(buffer_steps=3)
    publish(publisher, *range(10))
    replayed(connect, publisher, 9, 1)
    assert [number for number, _ in replayed(connect, publisher, 0, 3)] == [7, 8, 9]


def test_a_request_client_is_answered_too(start, connect):
    publisher = start()
    publish(publisher, 7)
    replayed(connect, publisher, 0, 1)
    socket = connect(zmq.REQ, publisher.source.replay_endpoint)
    socket.send((0).to_bytes(8))
    assert hashes(decode(socket.recv_multipart()[2])) == [7]


@pytest.mark.parametrize(
    "wrong", [[b"x"], [b"", b"1234567"], [b"x", bytes(8)], [b"", bytes(8), b""], [b"", bytes(5000)]]
)
def test_wrong_requests_for_replay_are_ignored(start, connect, wrong):
    publisher = start()
    connect(zmq.DEALER, publisher.source.replay_endpoint).send_multipart(wrong)
    publish(publisher, 1)
    assert len(replayed(connect, publisher, 0, 1)) == 1


def test_a_full_queue_drops_batches_and_uses_up_their_numbers(start, connect, monkeypatch):
    resumed = threading.Event()
    run = kv_publisher._Sender.run
    monkeypatch.setattr(kv_publisher._Sender, "run", lambda sender: resumed.wait(SECONDS) and run(sender))
    publisher = start(max_queue_size=5)
    publish(publisher, *range(100))
    assert publisher.num_batches == 100
    assert publisher.num_dropped == 94  # one more than the queue holds is on its way
    resumed.set()
    assert len(replayed(connect, publisher, 0, 6)) == 6
    deadline = time.monotonic() + SECONDS
    # ZeroMQ checks only about once a millisecond whether the queue has room again.
    while publisher.num_batches - publisher.num_dropped == 6:
        assert time.monotonic() < deadline, "the queue has no room again"
        publish(publisher, 7)
    last = publisher.num_batches - 1
    assert [number for number, _ in replayed(connect, publisher, 0, 7)] == [*range(6), last]


def test_a_subscriber_that_does_not_read_misses_batches(start, connect):
    publisher = start(hwm=1)
    slow = subscribed(publisher, connect)
    slow.close()
    stuck = connect(zmq.SUB, publisher.source.endpoint)
    stuck.setsockopt(zmq.RCVHWM, 1)
    stuck.subscribe(b"")
    before, dropped = publisher.num_batches, publisher.num_dropped
    publish(publisher, *range(1000))
    assert publisher.num_batches == before + 1000
    assert publisher.num_dropped == dropped
    assert [number for number, _ in replayed(connect, publisher, before, 1000)] == [*range(before, before + 1000)]


def test_the_last_batch_says_that_nothing_is_cached(start, connect):
    publisher = start()
    socket = subscribed(publisher, connect)
    publisher.close()
    assert decode(socket.recv_multipart()[2]).events == [AllBlocksCleared()]
    publisher.close()  # again does nothing


def test_a_port_that_is_taken_is_an_error_that_names_it(start):
    taken = start().source
    for name, address in (("endpoint", taken.endpoint), ("replay_endpoint", taken.replay_endpoint)):
        address = address.replace("127.0.0.1", "*")
        with pytest.raises(InvalidRequestError, match=f"{name} .*Address already in use") as error:
            start(**{name: address})
        assert error.value.param == "kv_events_config"


def test_an_address_of_another_machine_is_connected_to(start, connect):
    assert [is_listening(address) for address in (
        "tcp://*:1", "tcp://[::]:1", "tcp://127.0.0.1:0", "ipc:///x", "inproc://x", "tcp://router:1", "tcp://10.0.0.1:1"
    )] == [True] * 5 + [False] * 2  # fmt: skip
    router = zmq.Context.instance().socket(zmq.SUB)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    router.subscribe(b"")
    publisher = start(endpoint=f"tcp://127.0.0.1:{port}")
    for _ in range(SECONDS * 100):
        publish(publisher, 0)
        if router.poll(10):
            break
    assert hashes(decode(router.recv_multipart(zmq.NOBLOCK)[2])) == [0]
    router.close(linger=0)


@pytest.mark.parametrize("missing", ["zmq", "msgspec"])
def test_a_missing_library_is_an_error_that_says_so(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "outrider.platform.engine.kv_publisher")
    with pytest.raises(InvalidRequestError, match=f"needs pyzmq and msgspec, and {missing} is missing") as error:
        EngineCore(EngineArgs(kv_events_config={"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:0"}))
    assert error.value.param == "kv_events_config"
