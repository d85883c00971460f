"""Memory that request bodies take together."""

from __future__ import annotations

import ctypes
import sys

from ...core.errors import OverloadedError

BODIES_IN_MEMORY = 32
"""Number of bodies of the largest size that are held at once, while they arrive and are read."""


class BodyMemory:
    """Bound on the memory of all bodies that arrive, or wait to be admitted: many clients that each send a long one
    slowly, or send many to wait, would otherwise fill the memory."""

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
        """Take memory for a further piece.

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
    """Give freed memory back to the system; glibc would keep it in pieces."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
