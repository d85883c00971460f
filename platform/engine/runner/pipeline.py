"""Runs steps in order; the next one is planned and prepared while one runs, if the runner supports it.

    device  |  step 1         |  step 2         |  step 3
    host    1  2                 |1| 3             |2| 4            n: plan and launch; |n|: commit

So the device need not wait for the host, which gets sampled tokens and accepted drafts a step late. At most one step is
in flight when the next is launched. If that cannot be planned yet (`Scheduler.can_plan_next`) it is launched right
after the commit, and the host delivers tokens while it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ...core.batch import StepPlan, StepResult
from ...core.messages import TokenDelta
from ..queue.scheduler import Scheduler
from .model_runner import Launched, ModelRunner

IDLE_WAIT_SECONDS = 0.05
"""Longest wait of an empty step for the gates of queued sequences."""


class Pipeline:
    """Runs steps. Between two calls of `step` at most one is in flight."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, wait: Callable[[float], None]) -> None:
        """`wait(seconds)` waits at most so long for the gates of queued sequences."""
        self._scheduler = scheduler
        self._runner = runner
        self._wait = wait
        self._in_flight: deque[Launched] = deque()  # oldest first
        self._deltas: list[TokenDelta] = []  # of committed steps, for the caller of `step`
        self.num_steps = 0
        """Number of steps that computed anything."""

    @property
    def is_idle(self) -> bool:
        """True when nothing is in flight, and all deltas have been returned."""
        return not self._in_flight and not self._deltas

    def step(self) -> list[TokenDelta]:
        """Run one step and return its deltas. An error in a step, or in the launch of one, discards all steps in
        flight: their sequences are unchanged, and are scheduled again. Committed deltas are returned by the next
        call."""
        try:
            if not self._in_flight:
                self._launch()
            if not self._in_flight and self._scheduler.num_waiting:
                self._wait(IDLE_WAIT_SECONDS)
            if self._in_flight and self._scheduler.can_plan_next(self._in_flight[0].plan):
                self._launch()
            self._commit()
            if self._runner.overlaps and not self._in_flight:
                self._launch()
        except BaseException:
            self.abandon()
            raise
        deltas, self._deltas = self._deltas, []
        return deltas

    def flush(self) -> list[TokenDelta]:
        """Commit the steps in flight without launching another; returns all deltas that there are."""
        self.settle()
        self._commit()  # of no step: sequences that ended outside of one
        deltas, self._deltas = self._deltas, []
        return deltas

    def settle(self) -> None:
        """Commit the steps in flight; their deltas are returned by the next call of `step` or `flush`. Errors are as in
        `step`."""
        try:
            while self._in_flight:
                self._commit()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Wait for the steps in flight, and discard them."""
        try:
            self._runner.drain()
        finally:
            self._in_flight.clear()
            self._scheduler.abandon()

    def _launch(self) -> None:
        plan = self._scheduler.schedule()
        if not plan.rows:
            return
        before = self._in_flight[-1] if self._in_flight else None
        self._in_flight.append(self._runner.launch(plan, before))
        if self._runner.overlaps:
            self._scheduler.launched(plan)

    def _commit(self) -> None:
        """Commit the oldest step in flight, if there is one, and draft for the next."""
        if not self._in_flight:
            self._deltas += self._scheduler.commit(StepPlan(), StepResult([]))
            return
        launched = self._in_flight.popleft()
        result = self._runner.collect(launched)
        self._deltas += self._scheduler.commit(launched.plan, result)
        self.num_steps += 1
        self._scheduler.observe(launched.plan, self._runner.draft(launched, result))
