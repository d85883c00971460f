"""Where drafts are only launched, what they took is learned a step later, from the device."""

from __future__ import annotations

from typing import ClassVar

from outrider import SamplingParams
from outrider.platform.core.request import Drafts, Request
from outrider.spec_decode.adaptive import AdaptiveProposer
from outrider.spec_decode.controller import DrafterTraits
from outrider.spec_decode.drafters.base import DraftRow, NoProposer, Proposal, TargetOutput
from outrider.spec_decode.step_costs import StepCosts

from .simulated import Clock


class Launching(NoProposer):
    """Takes a second of the host to launch two drafts for each row."""

    def __init__(self, clock):
        self._clock = clock

    def propose(self, rows, target):
        self._clock.now += 1.0
        return [Proposal(Drafts([5, 6]), len(row.tokens)) for row in rows]


class Timer:
    """The device is at it for five seconds."""

    made: ClassVar[list] = []

    def __init__(self):
        self.stopped = False
        self.made.append(self)

    def stop(self):
        self.stopped = True

    def seconds(self):
        assert self.stopped
        return 5.0


def test_the_devices_seconds_count_for_drafts_and_not_as_a_gap(monkeypatch):
    drafts, gaps, steps = [], [], []
    monkeypatch.setattr(StepCosts, "add_draft", lambda self, drafter, size, seconds: drafts.append(seconds))
    for name in ("add_gap", "add_drafting_gap"):
        monkeypatch.setattr(StepCosts, name, lambda self, rows, seconds, *more: gaps.append(seconds))
    clock = Clock()
    proposer = AdaptiveProposer([(DrafterTraits("draft_model", True), Launching(clock))], 2, clock, timer=Timer)
    controller = proposer.controller
    monkeypatch.setattr(controller, "stepped", lambda seconds, number: steps.append(seconds))
    monkeypatch.setattr(controller, "due", lambda *args: False)
    request = Request("r", [1, 2, 3], 2, SamplingParams(), seed_key=1)
    row = DraftRow(request, request.tokens, 2, 2, 2, [], True, 2)
    proposer.propose([row], TargetOutput(seconds=3.0))
    Timer.made.clear()
    for state in proposer._states:
        state.drafter, state.num_drafts = 0, 2
    proposer.snapshot()  # takes in what there is
    drafts[:], gaps[:], steps[:] = [], [], []
    proposer.propose([row], TargetOutput(seconds=3.0))
    assert len(Timer.made) == 1
    proposer.snapshot()
    assert drafts == [], "the device is still at it"
    clock.now += 4.0 + 3.0 + 0.25  # the rest of drafting, the target, and what the host took beside
    proposer.propose([row], TargetOutput(seconds=3.0))
    proposer.snapshot()
    assert drafts == [5.0]
    assert gaps[-1] == 0.25
    assert steps[-1] - steps[-2] == 4.0, "a step's seconds have those of the drafting before it"
