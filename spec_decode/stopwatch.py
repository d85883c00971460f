"""How long a step takes, and whether that says anything of the steps that follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from .probing import SETTLING, SOON_SETTLED

if TYPE_CHECKING:
    from ..platform.core.request import Request

LONGEST_GAP = 1.0
"""Seconds between two steps after which the engine was idle, not slow."""
_UNDISTURBED = 0.8
"""Share of its time that a thread must have been running, for that time to count: another process had the rest."""


class Row(Protocol):
    """What a step computed of a request."""

    @property
    def request(self) -> Request:
        """Whose tokens they are."""
        ...

    @property
    def start(self) -> int:
        """Position of the first one."""
        ...


def begin_all(rows: Sequence[Row]) -> bool:
    """Whether all rows of a step are in their prompts: the engine may have waited for them, however busy it is now."""
    return all(row.start < row.request.num_prompt_tokens for row in rows)


class Stopwatch:
    """Two clocks, and what they said at the end of the last step."""

    __slots__ = ("_cpu_clock", "_ended", "_settles", "clock", "is_undisturbed")

    def __init__(self, clock: Callable[[], float], cpu_clock: Callable[[], float] | None = None) -> None:
        """`clock`: seconds; `cpu_clock`: those that the thread was running, where it is the thread that computes."""
        self.clock = clock
        self._cpu_clock = cpu_clock or clock
        self._ended: tuple[float, float] | None = None
        self._settles = 0.0  # when a step without drafts will be like others
        self.is_undisturbed = True
        """Whether no other process had the processor between the last two times that the gap was asked for."""

    def end(self) -> None:
        """A step ends now, drafting included."""
        self._ended = (self.clock(), self._cpu_clock())

    def lose(self) -> None:
        """The end of a step is not noted: nobody will know how long the next one takes."""
        self._ended = None

    def gap_before(self, began: float, computing: float, num_steps: int) -> float | None:
        """Seconds that each of `num_steps` steps took, since the last end and until `began`, beyond those that they
        were `computing` together; None where no end was noted, or no step came after it. An idle time is not divided by
        any number of steps."""
        if self._ended is None or num_steps == 0:
            return None
        spent = began - self._ended[0]
        self.is_undisturbed = self.has_run(self._ended[1], spent)
        between = spent - computing
        return between / num_steps if between < LONGEST_GAP else between

    def running(self) -> float:
        """Seconds that the thread was running so far."""
        return self._cpu_clock()

    def has_run(self, running: float, spent: float) -> bool:
        """Whether the thread had the processor in the last `spent` seconds; `running`: as it was before them."""
        return self._cpu_clock() - running >= _UNDISTURBED * spent

    # ------------------------------------------------------------------ settling

    def unsettle(self) -> None:
        """Drafts were computed now: caches hold what that left there."""
        self._settles = self.clock() + SETTLING

    @property
    def is_settling(self) -> bool:
        """Whether steps without drafts take longer now than they will."""
        return self.clock() < self._settles

    @property
    def was_settled(self) -> bool:
        """Whether steps without drafts took as long as they will when the last end was noted."""
        return self._ended is not None and self._ended[0] >= self._settles

    def has_settled(self, seconds: float) -> bool:
        """Whether a step without drafts that has ended now, and took `seconds`, is like those that follow."""
        return seconds >= SOON_SETTLED or self.clock() - seconds >= self._settles
