"""Publishes the events of the prefix cache over ZeroMQ in vLLM's wire form. Needs pyzmq and msgspec.

    PUB     [topic, sequence number, payload]
    ROUTER  [first sequence number wanted] -> [topic, sequence number, payload] ..., ["", -1, ""]

A sequence number has 8 bytes, the most significant first; a payload is the msgpack array [time, events,
data_parallel_rank], and an event a map with a `type`.

The engine's process publishes, since it has the events: the API process, which has one core for all its clients, would
only pass them on. An engine that is started again starts with an empty cache and with sequence number 0, which says so.

The engine encodes a step's events and leaves them in a queue, at a few microseconds; a thread sends them. Neither waits
for a subscriber: ZeroMQ drops what a slow one has no room for, and a batch that finds the queue full is dropped here.
Its number is used up, so a subscriber sees the gap.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque

import msgspec
import zmq

from ..core.errors import InvalidRequestError
from ..core.kv_events import KVEventsConfig, KVEventSource, split_tcp
from .memory.cache_events import CacheEvents

logger = logging.getLogger(__name__)

BLOCK_HASH = "blake2b-128, low 64 bits"
_END = (-1).to_bytes(8, signed=True)
"""Sequence number of the end of a replay, and of the queue."""
_STOP_MS = 1000
"""Longest wait for the last batches to leave."""
_MAX_REQUEST = 4096
"""Most bytes of a message from a subscriber: its topics, or a request for replay. Who sends more is disconnected."""


def is_listening(endpoint: str) -> bool:
    """True if a PUB socket binds an address, and does not connect to a subscriber's: vLLM's rule, and port 0."""
    tcp = split_tcp(endpoint)
    return tcp is None or "*" in tcp[0] or "::" in tcp[0] or tcp[1] == 0


class KVEventPublisher:
    """Sends what `events` has recorded. One thread calls it."""

    def __init__(self, config: KVEventsConfig, rank: int, events: CacheEvents, block_size: int) -> None:
        """Open the sockets.

        Raises:
            InvalidRequestError: an address cannot be used, as when another server has the port.
        """
        self.num_batches = 0
        """Batches so far: the next sequence number."""
        self.num_dropped = 0
        """Number of batches among them that found the queue full."""
        self.events, self._rank = events, rank
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        try:
            pub = self._socket(zmq.PUB, config.hwm)
            endpoint = _open(pub, config.endpoint, "endpoint", bind=is_listening(config.endpoint))
            router, replay_endpoint = None, config.replay_endpoint
            if replay_endpoint is not None:
                # A client that does not read has room for one whole answer.
                router = self._socket(zmq.ROUTER, config.buffer_steps + 1)
                replay_endpoint = _open(router, replay_endpoint, "replay_endpoint", bind=True)
            self._queue, taken = self._socket(zmq.PUSH, config.max_queue_size), self._socket(zmq.PULL, 1)
            taken.bind("inproc://queue")
            self._queue.connect("inproc://queue")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.source = KVEventSource(rank, endpoint, replay_endpoint, config.topic, block_size, BLOCK_HASH)
        sender = _Sender(pub, router, taken, config.topic.encode(), config.buffer_steps)
        self._thread = threading.Thread(target=sender.run, name="kv-events", daemon=True)
        self._thread.start()
        logger.info("KV events are published on %s; they have the tokens of all prompts", endpoint)

    def _socket(self, kind: int, most: int) -> zmq.Socket[bytes]:
        """A socket whose queues to and from each peer are bounded."""
        socket = self._context.socket(kind)
        socket.set_hwm(most)
        socket.linger, socket.maxmsgsize = _STOP_MS, _MAX_REQUEST
        return socket

    def flush(self) -> None:
        """Send the events since the last call as one batch, if there are any."""
        events = self.events.take()
        if not events:
            return
        payload = self._encoder.encode((time.time(), events, self._rank))
        try:
            self._queue.send_multipart((self.num_batches.to_bytes(8), payload), zmq.NOBLOCK)
        except zmq.Again:
            self.num_dropped += 1
        self.num_batches += 1

    def close(self) -> None:
        """Publish that nothing is cached any more, send what waits, for a second at most, and close the sockets."""
        if self._context.closed:
            return
        self.events.cleared()
        self.flush()
        self._queue.sndtimeo = _STOP_MS
        with contextlib.suppress(zmq.Again):
            self._queue.send_multipart((_END, b""))
            self._thread.join(_STOP_MS / 1000)
        self._context.destroy()


class _Sender:
    """The thread's side: it owns the sockets of subscribers."""

    def __init__(
        self,
        pub: zmq.Socket[bytes],
        router: zmq.Socket[bytes] | None,
        queue: zmq.Socket[bytes],
        topic: bytes,
        num_kept: int,
    ) -> None:
        self._pub, self._router, self._queue, self._topic = pub, router, queue, topic
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=num_kept if router is not None else 0)

    def run(self) -> None:
        """Send batches and answer requests for replay, until the queue's end."""
        poller = zmq.Poller()
        poller.register(self._queue, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        try:
            while True:
                ready = {socket for socket, _ in poller.poll()}
                if self._queue in ready:
                    number, payload = self._queue.recv_multipart()
                    if number == _END:
                        return
                    self._pub.send_multipart((self._topic, number, payload))  # never waits: the socket is a PUB
                    self._kept.append((number, payload))
                if self._router in ready:
                    self._replay()
        except zmq.ContextTerminated:
            pass
        finally:
            for socket in (self._pub, self._router, self._queue):
                if socket is not None:
                    socket.close()

    def _replay(self) -> None:
        """Answer a request with the batches from a number on that are still kept, the oldest first."""
        assert self._router is not None
        request = self._router.recv_multipart()
        if len(request) != 3 or request[1] or len(request[2]) != 8:
            logger.warning("A request for replay has not the form [empty, sequence number of 8 bytes]")
            return
        client, first = request[0], request[2]
        for number, payload in self._kept:
            if number >= first:  # of equal lengths: as numbers
                self._router.send_multipart((client, b"", self._topic, number, payload))
        self._router.send_multipart((client, b"", b"", _END, b""))


def _open(socket: zmq.Socket[bytes], endpoint: str, name: str, *, bind: bool) -> str:
    """Bind or connect a socket; returns the address, with the port that the system has chosen for 0."""
    tcp = split_tcp(endpoint)
    socket.ipv6 = tcp is not None and ":" in tcp[0]
    try:
        if not bind:
            socket.connect(endpoint)
            return endpoint
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise InvalidRequestError(
            f"kv_events_config: {name} {endpoint!r} cannot be used: {error.strerror}", param="kv_events_config"
        ) from error
    if tcp is None or tcp[1]:
        return endpoint
    bound = split_tcp(socket.get_string(zmq.LAST_ENDPOINT))
    assert bound is not None
    return f"tcp://{tcp[0]}:{bound[1]}"
