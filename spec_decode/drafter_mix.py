"""Several drafters, each of which serves some of a step's rows, and what each of them takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..platform.core.request import NO_DRAFTS
from .controller import Controller
from .device_timer import Timer
from .drafters.base import Drafter, DraftRow, Proposal, TargetOutput
from .evidence import Evidence
from .lanes import RowState
from .step_costs import DraftSize
from .stopwatch import Stopwatch

USUAL_LAG = 2
"""Tokens that a drafter computes anyway before its first draft: the newest one, and one whose draft was the last."""


class Launched(NamedTuple):
    """Drafting that a device does while the host goes on."""

    drafter: int
    size: DraftSize
    on_host: float
    """Seconds that it took to launch it."""
    timer: Timer


class Drafters:
    """The first one sees all rows, whatever is asked of it, and may own layers."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        controller: Controller,
        evidence: Evidence,
        watch: Stopwatch,
        timer: Callable[[], Timer] | None,
    ) -> None:
        """`evidence`: for `controller`, of what drafting takes and who drafted. `timer`: where drafts are only
        launched, and the device takes its time."""
        self._drafters = drafters
        self._controller = controller
        self._evidence = evidence
        self._watch = watch
        self._timer = timer
        self.has_layers = bool(drafters[0].needs.kv_layers)
        """Whether the first one has to compute every token before it drafts."""
        self.seconds = 0.0
        """That all of them took since this was set to 0, where it was measured."""
        self.launched: list[Launched] = []
        """What the device may not have made yet."""

    def __iter__(self) -> Iterator[Drafter]:
        return iter(self._drafters)

    def __len__(self) -> int:
        return len(self._drafters)

    def _watch_all(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Nobody is asked for anything: what the first drafter answers then."""
        for drafter in self._drafters:
            drafter.watch(rows, target)
        return self._without_drafts(rows)

    def propose(
        self,
        rows: Sequence[DraftRow],
        states: Sequence[RowState],
        target: TargetOutput,
        *,
        measures: bool,
        counts: bool,
    ) -> list[Proposal]:
        """One proposal for each row, with drafts as was decided, so far as the row may have some.

        Args:
            states: Of the rows.
            measures: Whether it is noted what that takes.
            counts: Whether it is noted who drafted.
        """
        asked_for = [(state, min(state.num_drafts, row.max_drafts)) for row, state in zip(rows, states, strict=True)]
        if not any(count for _, count in asked_for):
            return self._watch_all(rows, target)
        results: list[Proposal] = []
        for index, drafter in enumerate(self._drafters):
            asked = {at: count for at, (state, count) in enumerate(asked_for) if count and state.drafter == index}
            if not asked:
                drafter.watch(rows, target)
                if index == 0:
                    results = self._without_drafts(rows)
                continue
            seen = range(len(rows)) if index == 0 else asked
            own_rows = [_asking(rows[at], asked.get(at, 0)) for at in seen]
            found = self._measured(index, own_rows, target) if measures else drafter.propose(own_rows, target)
            if index == 0:
                results = found
            else:  # what is computed is the first drafter's to say
                for at, proposal in zip(seen, found, strict=True):
                    results[at] = Proposal(proposal.drafts, results[at].num_draft_computed)
            if counts:
                answers = [(asked_for[at][0], count, len(results[at].drafts.token_ids)) for at, count in asked.items()]
                self._evidence.note(self._controller.proposed, index, answers)
        return results

    def take_in_launched(self) -> float:
        """Note what drafting took that the device has made by now; returns its seconds after the host's."""
        launched, self.launched = self.launched, []
        behind = 0.0
        for drafter, size, on_host, timer in launched:
            seconds = timer.seconds()
            self._evidence.note(self._controller.costs.add_draft, drafter, size, max(seconds, on_host))
            behind += max(0.0, seconds - on_host)
        return behind

    def _measured(self, index: int, rows: list[DraftRow], target: TargetOutput) -> list[Proposal]:
        watch = self._watch
        timer = self._timer() if self._timer is not None else None
        began, running = watch.clock(), watch.running()
        found = self._drafters[index].propose(rows, target)
        seconds = watch.clock() - began
        self.seconds += seconds
        if timer is not None:
            timer.stop()
            self.launched.append(Launched(index, self._size(index, rows), seconds, timer))
        elif watch.has_run(running, seconds):
            self._evidence.note(self._controller.costs.add_draft, index, self._size(index, rows), seconds)
        return found

    def _without_drafts(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        if self.has_layers:
            return [Proposal(NO_DRAFTS, row.num_draft_valid) for row in rows]
        return [Proposal(NO_DRAFTS, len(row.tokens)) for row in rows]

    def _size(self, drafter: int, rows: Sequence[DraftRow]) -> DraftSize:
        """What drafting for `rows` is made of."""
        served = passes = lag = 0
        mixed = False
        for row in rows:
            if row.max_drafts:
                served += 1
                passes = max(passes, row.max_drafts)
                if self.has_layers:
                    lag += max(0, len(row.tokens) - row.num_draft_valid - USUAL_LAG - row.num_accepted)
            mixed = mixed or not row.sampled
        if drafter > 0 or lag <= 4 * served:
            lag = 0
        return DraftSize(served, passes, lag, mixed and drafter == 0)


def _asking(row: DraftRow, count: int) -> DraftRow:
    """`row`, asking for `count` drafts."""
    return row if row.max_drafts == count else row._replace(max_drafts=count)
