"""Protection of the server and its pages: headers, the origins of web pages, memory for bodies, file descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ...core.errors import OverloadedError
from .connections import MAX_REFUSED

logger = logging.getLogger(__name__)

SECURITY_HEADERS = [
    ("x-content-type-options", "nosniff"),  # JSON that quotes a prompt is never run as a page
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
]
"""Headers of every answer."""

BODIES_IN_MEMORY = 32
"""Longest bodies that are held at once, while they arrive and are read."""

_OTHER_FILES = 256
"""File descriptors beside connections: adapters, the database, sockets of the engine."""


class BodyMemory:
    """Bounds what the bodies of all requests take together that arrive, or wait to be admitted: many clients that each
    send a long one slowly, or send many to wait, would otherwise fill the memory."""

    def __init__(self, max_bytes: int) -> None:
        self.free = max_bytes
        """Bytes that may still be taken."""

    def body(self) -> HeldBody:
        """One request's share, nothing at first."""
        return HeldBody(self)


class HeldBody:
    """Memory that one body takes, until it is closed."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._taken = 0

    def take(self, num_bytes: int) -> None:
        """A further piece has come.

        Raises:
            OverloadedError: too many long bodies are here.
        """
        if num_bytes > self._memory.free:
            raise OverloadedError("Too many long requests arrive or wait at once; try again in a moment")
        self._memory.free -= num_bytes
        self._taken += num_bytes

    def close(self) -> None:
        """Give all of it back; a second call does nothing."""
        self._memory.free += self._taken
        self._taken = 0


def give_back_memory() -> None:
    """Give what has been freed back to the system; glibc keeps it else in the pieces that it was taken in."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app`, which web pages of `origins` may call; "*" means all. Keys come in a header, never in a cookie, so that a
    page has only what its user gave it."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        allow_headers=["*"],
        expose_headers=["*"],
    )


def allow_connections(wanted: int) -> int:
    """Number of the `wanted` connections that the process may have; its limit of open files is raised where it can
    be."""
    try:
        import resource
    except ImportError:  # not on Windows
        return wanted
    needed = wanted + MAX_REFUSED + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    if soft >= needed:
        return wanted
    allowed = max(1, (soft - _OTHER_FILES) // 2)  # the other half for those that are told so
    if allowed < wanted:
        logger.warning("open files are limited to %d: at most %d connections, not %d", soft, allowed, wanted)
    return min(wanted, allowed)
