"""Pause of an engine, as for a change of its weights: no step computes, and requests that arrive wait for the resume.

    mode     sequences from before the pause                                            frozen
    abort    end with the finish reason "abort" and what they generated                 at once
    wait     finish; those that arrive meanwhile are not admitted                       after the last of them
    keep     stay where they are; at the resume they continue, under the weights of then   at once

Another pause changes the mode for the sequences from before the first one; those that arrived since survive each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.errors import invalid
from ..core.request import Request
from .queue.gates import Gate

if TYPE_CHECKING:
    from .queue.scheduler import Scheduler
    from .runner.pipeline import Pipeline

MODES = ("abort", "wait", "keep")


class Pause(Gate):
    """The pause of one engine; off at first. As a gate it precedes all others."""

    def __init__(self) -> None:
        self.is_on = False
        self.is_frozen = False
        """True while no step may compute."""
        self.drops_kv = False
        """True if new weights drop all KV, and preempt kept sequences."""
        self._before: set[str] = set()  # ids of the sequences from before the pause

    def admit(self, request: Request) -> str | None:
        """Let only the sequences from before a pause start."""
        return "paused" if self.is_on and request.request_id not in self._before else None

    def begin(self, mode: str, scheduler: Scheduler, pipeline: Pipeline, *, drops_kv: bool) -> None:
        """Pause, or change the mode. `drops_kv`: see the attribute; without it kept sequences continue with the KV that
        they have.

        Raises:
            InvalidRequestError: there is no such mode.
        """
        if mode not in MODES:
            raise invalid("mode", f"must be one of {', '.join(MODES)}; got {mode!r}")
        pipeline.settle()
        if not self.is_on:
            self._before = {request.request_id for request in (*scheduler.running, *scheduler.waiting)}
        if mode == "abort":
            scheduler.end(self._before)
        self.is_on, self.is_frozen, self.drops_kv = True, mode == "keep", drops_kv
        if mode != "keep":
            self.observe(scheduler, pipeline)

    def observe(self, scheduler: Scheduler, pipeline: Pipeline) -> None:
        """Note the end of a step: the engine freezes once the sequences from before the pause have ended."""
        if self.is_on and not self.is_frozen and not any(request_id in scheduler for request_id in self._before):
            pipeline.settle()
            self.is_frozen = True

    def end(self) -> None:
        """Resume; does nothing without a pause."""
        self.is_on = self.is_frozen = self.drops_kv = False
        self._before = set()
