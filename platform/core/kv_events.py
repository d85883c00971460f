"""KV events as users configure them: the fields of a `kv_events_config`, which are vLLM's, checked; and where a
server's events are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, replace
from typing import Any

from .errors import InvalidRequestError
from .option import declared_options, option
from .text import did_you_mean

MAX_RANK = 4095
"""Largest `data_parallel_rank`."""
MAX_TOPIC = 1024
"""Longest topic, in bytes: it is the first part of each message."""
_MAX_PORT = 65535
_MAX_COUNT = 1_000_000
"""Most messages of each queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """KV events."""

    enable_kv_cache_events: bool = option(False, "publish the blocks that the prefix cache stores and removes")
    publisher: str = option(
        MISSING, "zmq, or null, which publishes nothing (default: zmq, if events are enabled)", choices=("zmq", "null")
    )
    endpoint: str = option(
        "tcp://*:5557",
        "address of the PUB socket. It listens there if the host is * or ::, the port is 0 (any free one), or the "
        "address begins with ipc:// or inproc://; else it connects to a subscriber that listens",
    )
    replay_endpoint: str | None = option(
        None, "address of the ROUTER socket that sends past batches again (default: none)"
    )
    buffer_steps: int = option(10_000, "batches kept for replay", within=(0, _MAX_COUNT))
    hwm: int = option(
        100_000, "batches that wait for a slow subscriber; it misses those beyond", within=(1, _MAX_COUNT)
    )
    max_queue_size: int = option(
        100_000, "batches that wait to be sent; those beyond are dropped and counted", within=(1, _MAX_COUNT)
    )
    topic: str = option("", "first part of each message, which subscribers filter by; llm-d wants kv@POD@MODEL")


KV_EVENTS_OPTIONS = declared_options(KVEventsConfig)


@dataclass(slots=True)
class KVEventSource:
    """Where one engine publishes its events. The first four fields are those of vLLM's `/kv_event_sources`."""

    data_parallel_rank: int
    endpoint: str
    """Address of the PUB socket. A host of * means all of the engine's machine."""
    replay_endpoint: str | None
    topic: str
    block_size: int
    """Tokens in a block."""
    block_hash: str
    """The form of hashes: they are names of blocks, which only the engine can compute."""


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"kv_events_config: {message}", param="kv_events_config")


def parse_kv_events(config: Mapping[str, Any] | None, rank: int = 0) -> KVEventsConfig | None:
    """Check a `kv_events_config` as users write it; None: nothing is published. A field that is None counts as not
    given.

    Args:
        rank: `data_parallel_rank`, by which the ports are raised, as in vLLM.

    Raises:
        InvalidRequestError: something is wrong with it; the message names the field and the limit.
    """
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise _wrong(f"it must be an object with enable_kv_cache_events, got {config!r}")
    given = {name: value for name, value in config.items() if value is not None}
    unknown = [name for name in given if name not in KV_EVENTS_OPTIONS]
    if unknown:
        hint = did_you_mean(str(unknown[0]), KV_EVENTS_OPTIONS)
        raise _wrong(f"unknown field {unknown[0]!r}{hint}; known are {', '.join(KV_EVENTS_OPTIONS)}")
    for name, value in given.items():
        try:
            KV_EVENTS_OPTIONS[name].check(value)
        except InvalidRequestError as error:
            raise _wrong(error.message) from None
    if given and "enable_kv_cache_events" not in given and given.get("publisher") != "null":
        raise _wrong("enable_kv_cache_events is missing; true publishes events, false does not")
    result = KVEventsConfig(**{"publisher": "zmq", **given})
    if len(result.topic.encode()) > MAX_TOPIC:
        raise _wrong(f"topic must have at most {MAX_TOPIC} bytes")
    replay = result.replay_endpoint
    result = replace(
        result,
        endpoint=_endpoint("endpoint", result.endpoint, rank),
        replay_endpoint=None if replay is None else _endpoint("replay_endpoint", replay, rank),
    )
    return result if result.enable_kv_cache_events and result.publisher == "zmq" else None


def split_tcp(endpoint: str) -> tuple[str, int] | None:
    """(host, port) of a tcp:// address; None for another one, and for one without a number as port."""
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) < 10
    is_tcp = endpoint.startswith("tcp://") and host and colon and is_number
    return (host, int(port)) if is_tcp else None


def _endpoint(name: str, endpoint: str, rank: int) -> str:
    """The address of this rank. Port 0 is any free one for all of them."""
    tcp = split_tcp(endpoint)
    if tcp is not None:
        host, port = tcp
        if port + rank > _MAX_PORT:
            more = f" and data_parallel_rank {rank}" if rank else ""
            raise _wrong(f"{name} {endpoint!r}{more}: a port is at most {_MAX_PORT}")
        return f"tcp://{host}:{port + rank if port else 0}"
    scheme, separator, address = endpoint.partition("://")
    if scheme not in ("ipc", "inproc") or not separator or not address:
        raise _wrong(f"{name} must be tcp://HOST:PORT, ipc://PATH or inproc://NAME, got {endpoint!r}")
    return f"{endpoint}_dp{rank}" if rank else endpoint
