"""What passes between two steps: measured as it is, and not what measuring takes, or waiting for requests."""

import pytest

from outrider.platform.core.batch import RowPlan
from outrider.platform.core.request import Drafts, Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.adaptive import HELD_RESTS, AdaptiveProposer
from outrider.spec_decode.controller import DrafterTraits
from outrider.spec_decode.drafters.base import DraftRow, NoProposer, Proposal, ProposerNeeds, TargetOutput
from outrider.spec_decode.probing import SETTLING
from outrider.spec_decode.step_costs import StepCosts

from .simulated import Clock

STEP, IDLE_GAP, DRAFTING_GAP, LOOK, DRAFTS = 5e-4, 6e-5, 2e-4, 3e-4, 4e-4


class Watching(NoProposer):
    """Drafts, and looks at rests, which takes it a while."""

    def __init__(self, clock):
        self.clock, self.looks = clock, 0

    @property
    def needs(self):
        return ProposerNeeds(watches_rests=True)

    def propose(self, rows, target):
        self.clock.now += DRAFTS if any(row.max_drafts for row in rows) else 0.0
        return [Proposal(Drafts([7] * row.max_drafts), len(row.tokens)) for row in rows]

    def watch_rests(self, spells):
        self.looks += 1
        self.clock.now += LOOK


class Engine:
    """Steps as the runner has them; notes the gaps that are told."""

    def __init__(self):
        self.clock = Clock()
        self.network = Watching(self.clock)
        self.proposer = AdaptiveProposer([(DrafterTraits("eagle3", True), self.network)], 2, self.clock)
        self.controller = self.proposer._controller
        self.gaps, self.drafting_gaps = [], []
        self.controller.costs.add_gap = lambda rows, seconds, steps=1: self.gaps.append((rows, seconds))
        self.controller.costs.add_drafting_gap = lambda rows, seconds: self.drafting_gaps.append((rows, seconds))
        self.rest = 0
        self.drafts = 0

    def request(self, length=4):
        return Request("r", [1] * length, 3, SamplingParams(), seed_key=1)

    def step(self, requests, waited=0.0):
        self.clock.now += (DRAFTING_GAP if self.drafts else IDLE_GAP) + STEP + waited
        if self.rest > 0:
            rows = [RowPlan(r, max(0, len(r.tokens) - 1), 1, 0, True, 0) for r in requests]
            self.proposer.rested(rows, TargetOutput(seconds=STEP))
            self.drafts = 0
        else:
            rows = []
            for r in requests:
                length = len(r.tokens)
                rows.append(DraftRow(r, [*r.tokens, 1], length, length, 2, [], True, length - 1, 0, 0, 0))
            found = self.proposer.propose(rows, TargetOutput(seconds=STEP))
            self.drafts = max(len(made.drafts.token_ids) for made in found)
        for r in requests:
            r.tokens.append(1)
        self.rest = self.proposer.rest

    def told(self):
        self.proposer.snapshot()
        return self.gaps, self.drafting_gaps


@pytest.fixture
def engine():
    return Engine()


def without_drafts(engine, steps):
    """For so many steps nothing is drafted, though drafting goes on: a trial."""
    engine.controller.due = lambda *args: False
    engine.controller._next_decision = engine.controller._trial_ends = engine.controller._step + steps
    for state in engine.proposer._states:
        state.num_drafts = 0


def test_a_trial_without_drafts_measures_the_steps_gaps_and_not_its_own_looks(engine):
    one = engine.request()
    engine.step([one])
    engine.proposer.hold(0, 2)
    engine.step([one])
    assert engine.drafts == 2
    engine.proposer.release()
    without_drafts(engine, 60)
    engine.step([one])  # verifies
    engine.told()
    engine.gaps.clear()
    looks = engine.network.looks
    for _ in range(57):
        engine.step([one])
    assert engine.network.looks == looks, "nobody looks at what it left, step by step"
    for _ in range(4):
        engine.step([one])
    gaps, _ = engine.told()
    assert 57 * (STEP + IDLE_GAP) > SETTLING
    assert gaps
    assert [seconds for _, seconds in gaps] == pytest.approx([IDLE_GAP] * len(gaps))


def test_no_gap_is_taken_where_the_engine_may_have_waited(engine):
    one, other = engine.request(), engine.request(length=2)
    engine.proposer.hold(0, 2)  # each step is measured
    for requests, is_told in (([one], True), ([one], True), ([one, other], True), ([engine.request(length=2)], False)):
        engine.step([one])
        before = len(engine.told()[1])
        engine.step(requests, waited=0.3)  # nobody waits for who is there: that was the machine
        assert len(engine.told()[1]) - before == is_told


def test_rests_after_idleness_are_timed_from_their_first_step(engine):
    engine.controller.due = lambda *args: False
    engine.controller.rest_on = lambda states: 50
    engine.controller._mode.drafting = False
    one = engine.request()
    engine.step([one])
    engine.controller._next_decision = engine.controller._step + 30
    engine.step([one])
    assert engine.rest > 20
    for _ in range(9):
        engine.step([one])
    other = engine.request(length=2)
    engine.step([other], waited=0.7)
    other.num_prompt_tokens = 2  # it is through
    while engine.rest != 50:
        engine.step([other])
    gaps, _ = engine.told()
    assert gaps[-1] == (1, pytest.approx(IDLE_GAP)), "not a 20th of the time that nobody was there"


def test_a_gap_is_that_of_its_number_of_rows(engine):
    """A batch that has drained leaves nothing of its gaps with the one request that is left."""
    engine.controller.due = lambda *args: False
    engine.controller.rest_on = lambda states: 50
    engine.controller._mode.drafting = False
    batch = [engine.request() for _ in range(8)]
    engine.step(batch)
    engine.controller._next_decision = engine.controller._step + 30
    engine.step(batch)
    for _ in range(15):
        engine.step(batch, waited=1e-3)  # such a batch takes the host so long
    while engine.rest != 50:
        engine.step(batch[:1])
    gaps, _ = engine.told()
    assert gaps[-1] == (1, pytest.approx(IDLE_GAP))


def test_while_held_without_drafts_gaps_are_those_of_rests(engine):
    """As they will be: whoever is not asked for drafts takes less time."""
    one = engine.request()
    engine.proposer.hold(0, 0)
    for _ in range(3 * HELD_RESTS):
        engine.step([one])
        assert engine.rest > 0
    engine.proposer.hold(0, 2)
    assert engine.proposer.rest == 0
    engine.step([one])
    engine.step([one])
    assert engine.drafts == 2, "one step later: it was planned already"


def test_each_number_of_rows_has_its_gap():
    costs = StepCosts([True])
    for _ in range(30):
        for rows, idle, drafting in ((1, 4e-5, 1e-4), (4, 6e-5, 1.6e-4), (16, 1.2e-4, 3.5e-4)):
            costs.add_gap(rows, idle)
            costs.add_drafting_gap(rows, drafting)
    assert costs.host_seconds(1) == pytest.approx(4e-5, rel=0.1)
    assert costs.host_seconds(16) == pytest.approx(1.2e-4, rel=0.1)
    assert costs.host_seconds(1) < costs.host_seconds(8) < costs.host_seconds(16) < costs.host_seconds(32)
    assert costs.drafting_seconds(16) == pytest.approx(2.3e-4, rel=0.1)


def test_a_mean_of_many_gaps_counts_for_more_than_one():
    one, many = StepCosts([True]), StepCosts([True])
    for costs, steps in ((one, 1), (many, 100)):
        for _ in range(20):
            costs.add_gap(1, 3e-4)
        for _ in range(10):
            costs.add_gap(1, 1e-4, steps)
    assert many.host_seconds(1) < one.host_seconds(1)


def test_gaps_do_not_move_what_is_thought_of_the_machines_speed():
    costs = StepCosts([True])
    for _ in range(20):
        costs.add_step(1, 1, 1e-3)
        costs.add_gap(1, 1e-4)
    before = costs.target_curve(1)(1)
    for _ in range(50):
        costs.add_gap(1, 1e-3)
    assert costs.target_curve(1)(1) == before
