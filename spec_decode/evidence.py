"""What steps tell of costs and acceptance, until somebody is to decide.

Nothing of it is needed before the next decision. Taken in step by step, it costs a small model several per cent of its
time: after each forward pass the processor's caches hold weights, not this code. So a step only notes what it tells,
and all notes are taken in at once, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MOST = 512
"""Notes that may wait, where nobody decides for long."""


class Evidence:
    """Notes, oldest first."""

    __slots__ = ("_notes",)

    def __init__(self) -> None:
        self._notes: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def note(self, take_in: Callable[..., None], *told: Any) -> None:
        """`take_in(*told)` is to be called before the next decision."""
        self._notes.append((take_in, told))
        if len(self._notes) >= _MOST:
            self.take_in()

    def take_in(self) -> None:
        """Call them all."""
        if self._notes:
            notes, self._notes = self._notes, []
            for take_in, told in notes:
                take_in(*told)
