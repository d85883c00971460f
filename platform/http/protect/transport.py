"""A client's transport that counts what is written, and closes so that the last answer arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_SECONDS = 2.0
"""Seconds for a client to read its answer and close, after we have closed our side."""


class ClientTransport:
    """Stand-in for asyncio's transport.

    To close a connection while the client still sends makes the system reset it, and the answer is lost with what was
    not read. So our side is closed first, and the rest when the client has closed its own (RFC 9112, 9.6).
    """

    def __init__(self, transport: Any, is_arriving: Callable[[], bool]) -> None:
        """`is_arriving` returns True while the client is in the middle of a request."""
        self._transport = transport
        self._is_arriving = is_arriving
        self._lingering_since: float | None = None
        self.written = 0
        """Bytes handed over, whether they have left or not."""

    def write(self, data: bytes) -> None:
        """See asyncio."""
        if self._lingering_since is None:
            self.written += len(data)
            self._transport.write(data)

    def is_closing(self) -> bool:
        """See asyncio."""
        return self._lingering_since is not None or self._transport.is_closing()

    def close(self) -> None:
        """Close when all that was written has left and the client has read it."""
        if self.is_closing():
            return
        if not self._is_arriving():
            self._transport.close()
            return
        self._lingering_since = asyncio.get_running_loop().time()
        self._transport.write_eof()
        self._transport.resume_reading()

    def lingers_too_long(self, now: float) -> bool:
        """True when the client should have closed its side by now."""
        return self._lingering_since is not None and now - self._lingering_since > LINGER_SECONDS

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
