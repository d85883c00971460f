"""Protection of the server and its pages: headers, the origins of web pages, file descriptors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp

from ...core.errors import PermissionDeniedError
from .connections import MAX_REFUSED

logger = logging.getLogger(__name__)

SECURITY_HEADERS = [
    ("x-content-type-options", "nosniff"),  # JSON that quotes a prompt is never run as a page
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
]
"""Headers of every answer."""

_OTHER_FILES = 256
"""File descriptors in addition to connections: adapters, the database, sockets of the engine."""


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


def check_origin(request: Request, allowed: Sequence[str] = ()) -> None:
    """Refuse a call that a page of another site has made a browser send: of a route whose body need not be JSON, which
    would make the browser ask first.

    Raises:
        PermissionDeniedError: the page's origin is neither the server's nor `allowed`.
    """
    origin = request.headers.get("origin")
    if origin is None or origin in allowed or "*" in allowed:
        return
    if urlsplit(origin).netloc != request.headers.get("host"):
        raise PermissionDeniedError("A page of another site may not call this route")


def allow_connections(wanted: int) -> int:
    """Number of the `wanted` connections that the process may have; its limit of open files is raised if it can
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
    allowed = max(1, (soft - _OTHER_FILES) // 2)  # the other half for connections that are refused with an answer
    if allowed < wanted:
        logger.warning("open files are limited to %d: at most %d connections, not %d", soft, allowed, wanted)
    return min(wanted, allowed)
