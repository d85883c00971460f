"""The bound on everything that waits in one server, wherever it waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ...core.errors import InvalidRequestError, OverloadedError


class Bounds(NamedTuple):
    """Bounds of an engine's start, in sequences."""

    max_waiting: int | None = None
    """None: any number."""
    num_seats: int = 0
    """Sequences that it runs at once."""


class QueueBound:
    """Counts the sequences that wait: W = P + max(0, E - S), where P wait for slots of their tenant or key, E have
    been passed to the engine and have not ended, and S is the number of its seats. Belongs to one event loop.

    W grows when a request comes, and only then is it checked: with a slot it leaves P for E, which adds at most as
    much to W as it takes away. So no request in the queue is refused later. The engine refuses by the same
    rule (E <= S + the bound), and never comes to it here.
    """

    def __init__(self, bounds: Callable[[], Bounds] = Bounds) -> None:
        """`bounds`: asked whenever a request comes; the engine may not have started yet."""
        self.bounds = bounds
        self.num_for_slots = 0
        self.num_in_engine = 0

    @property
    def num_waiting(self) -> int:
        """W."""
        return self.num_for_slots + max(0, self.num_in_engine - self.bounds().num_seats)

    def check(self, count: int, *, for_slots: bool = False) -> None:
        """Refuse `count` more sequences if too many of them would have to wait.

        Args:
            for_slots: They wait for slots first; else they go to the engine at once.

        Raises:
            OverloadedError: too many wait now.
            InvalidRequestError: there will never be room for so many.
        """
        most, seats = self.bounds()
        if most is None:
            return
        if count > seats + most:
            raise InvalidRequestError(
                f"the request is for {count} sequences (n x prompts); this server runs {seats} at once (max_num_seqs) "
                f"and lets {most} wait (max_num_queued_reqs)",
                param="n",
            )
        would_wait = max(0, self.num_in_engine - seats) + count if for_slots else self.num_in_engine + count - seats
        if would_wait > 0 and self.num_for_slots + would_wait > most:
            raise OverloadedError(
                f"{self.num_waiting} sequences wait already, and this request is for {count} more "
                f"(max_num_queued_reqs is {most})"
            )

    @contextlib.contextmanager
    def wait_for_slots(self, count: int) -> Iterator[None]:
        """Count sequences that wait for slots; `check` has let them."""
        self.num_for_slots += count
        try:
            yield
        finally:
            self.num_for_slots -= count

    @contextlib.contextmanager
    def enter_engine(self, count: int) -> Iterator[Callable[[int], None]]:
        """Count sequences that the engine gets. What is called when some of them have ended; at the end all have.

        Raises:
            OverloadedError, InvalidRequestError: as `check`.
        """
        self.check(count)
        remaining = count
        self.num_in_engine += count

        def leave(ended: int) -> None:
            nonlocal remaining
            remaining -= ended
            self.num_in_engine -= ended

        try:
            yield leave
        finally:
            self.num_in_engine -= remaining
