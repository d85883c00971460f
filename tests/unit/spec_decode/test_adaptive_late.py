"""Choices that are made when a step is planned, while another one runs."""

from __future__ import annotations

import pytest

from outrider.platform.core.batch import RowPlan
from outrider.platform.core.request import NO_DRAFTS, Drafts, Request, Status
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.core.speculative_config import parse_speculative
from outrider.spec_decode.adaptive_factory import make_adaptive
from outrider.spec_decode.adaptive_late import LateAdaptive
from outrider.spec_decode.controller import DrafterTraits
from outrider.spec_decode.drafters.base import DraftRow, LateChooser, LateDrafter, NoProposer, Proposal, TargetOutput

from .simulated import Clock

MOST = 4
OUTPUT = TargetOutput(seconds=0.01)


class Network(NoProposer):
    """Drafts as many as it is asked for."""

    def __init__(self, clock):
        self.clock, self.num_late, self.num_watched = clock, 0, 0

    def propose(self, rows, target):
        return [Proposal(Drafts([7] * row.max_drafts), len(row.tokens)) for row in rows]

    def propose_late(self, rows, target, late):
        self.num_late += 1
        self.clock.now += 0.002
        return self.propose(rows, target)

    def watch_late(self, rows, target, overshoot):
        self.num_watched += 1


class Lookup(NoProposer):
    def propose(self, rows, target):
        return [Proposal(Drafts([9] * row.max_drafts), len(row.tokens)) for row in rows]


class Engine:
    """Plans a step while one runs, where it may, as `Pipeline` does. What prompt lookup drafts is wrong."""

    def __init__(self, proposer, requests, host=0.0, lookup_is_right=False):
        """`host`: seconds that the device waits for it before a step that does not overlap."""
        self.proposer, self.requests = proposer, requests
        self.host, self.lookup_is_right = host, lookup_is_right
        self.under_way = None
        self.in_turn = []  # numbers of the steps whose drafts the host asked for
        self.counts = []  # most drafts after each step
        self.num_steps = 0
        self.pending, self.looked_up, self.num_timed = {}, False, 0

    def plan(self):
        rows = [RowPlan(r, len(r.tokens) - 1, 1 + self.pending.get(r, 0), self.pending.get(r, 0), True, MOST)
                for r in self.requests if r.status is not Status.FINISHED]  # fmt: skip
        self.num_steps += 1
        late = self.proposer.choose(rows)
        proposals = None
        if late:
            drafting = [self.drafted(row, 0) for row in rows]
            proposals = [Proposal(NO_DRAFTS, 0) for _ in rows]
            self.looked_up, looked_up = False, self.looked_up
            if any(row.max_drafts for row in drafting):
                self.num_timed += 1
                proposals = self.proposer.propose_late(drafting, OUTPUT, None)
            self.pending = {row.request: row.max_new_drafts for row in rows}
            self.counts.append(max(self.pending.values()))
        else:
            looked_up = self.looked_up
        return self.num_steps, rows, proposals, looked_up

    @staticmethod
    def drafted(row, accepted):
        end = row.start + 1 + accepted
        return DraftRow(
            row.request, [1] * (end + 1), end, end, row.max_new_drafts, [], True, row.start, 0, row.num_drafts, accepted
        )

    def collect(self, step, accepted):
        number, rows, proposals, looked_up = step
        accepted = 0 if looked_up and not self.lookup_is_right else accepted
        self.proposer._watch.clock.now += 0.01
        ended = [self.drafted(row, min(accepted, row.num_drafts)) for row in rows]
        if proposals is None:
            self.in_turn.append(number)
            found = self.proposer.propose(ended, OUTPUT)
            self.pending = {row.request: len(p.drafts.token_ids) for row, p in zip(rows, found, strict=True)}
            self.looked_up = any(9 in p.drafts.token_ids for p in found)
            self.counts.append(max(self.pending.values()))
        else:
            self.proposer.landed(ended, OUTPUT, proposals)

    def run(self, num_steps, accepted=2):
        for _ in range(num_steps):
            if self.under_way is None:
                self.proposer._watch.clock.now += self.host
            step = self.under_way or self.plan()
            self.under_way = self.plan() if step[2] is not None else None
            self.collect(step, accepted)


@pytest.fixture
def made():
    clock = Clock()
    traits = [DrafterTraits("draft_model", True), DrafterTraits("ngram", False)]
    network = Network(clock)
    return LateAdaptive([(traits[0], network), (traits[1], Lookup())], MOST, clock), network


def request(name="r"):
    return Request(name, [1, 2, 3], 2, SamplingParams(), seed_key=1, status=Status.RUNNING)


def decide(proposer, count, drafter=0):
    """From now on."""

    def decided(rows, prompt_tokens):
        for row in rows:
            row.drafter, row.num_drafts = drafter, min(count, row.limit)

    proposer.controller.decide = decided


def test_the_decision_knows_how_long_answers_are_by_now(made):
    proposer, _ = made
    one, seen = request(), []
    one.tokens += [4] * 6
    proposer.controller.due = lambda *args: True
    proposer.controller.decide = lambda rows, prompt_tokens: seen.append([row.num_outputs for row in rows])
    Engine(proposer, [one]).run(3)
    assert seen
    assert all(found == [one.num_output_tokens] for found in seen)


def test_only_a_late_drafter_chooses_late():
    config = parse_speculative({"method": "medusa", "model": "m"})
    made = make_adaptive(Network(Clock()), config, asynchronous=True, kind=LateAdaptive)
    assert isinstance(made, LateDrafter)
    assert isinstance(made, LateChooser)
    assert not isinstance(make_adaptive(Network(Clock()), config), LateDrafter)


def test_the_controllers_own_decisions_overlap_but_for_trials(made):
    proposer, network = made
    engine = Engine(proposer, [request()])
    engine.run(200)
    assert network.num_late > 150
    trials = len(engine.in_turn)
    assert 0 < trials < 30, "of prompt lookup: the step that drafts, and the one that verifies"
    assert trials % 2 == 0
    assert engine.in_turn[1::2] == [number + 1 for number in engine.in_turn[::2]]


def test_each_step_counts_once_whoever_decides(made):
    proposer, _ = made
    engine = Engine(proposer, [request()])
    engine.run(300)
    assert len(engine.in_turn) > 0
    assert proposer.controller._step == engine.num_steps
    booked = proposer.controller._budget.elapsed + proposer._unbooked
    assert booked == pytest.approx(0.01 * 300 + 0.002 * engine.num_timed, abs=0.01)


def test_a_trial_is_over_when_its_drafts_are_verified(made):
    proposer, _ = made
    one = request()
    engine = Engine(proposer, [one])
    engine.run(60)
    lane = proposer.controller.lane((b"", False))
    before = lane.rates[1].evidence
    while not lane.on_trial:
        engine.run(1)
    engine.run(2)
    assert not lane.on_trial
    assert lane.rates[1].evidence > before


def test_numbers_are_those_decided_and_go_to_the_plan(made):
    proposer, network = made
    engine = Engine(proposer, [request(), request()])
    engine.run(3)
    proposer.controller.due = lambda *args: True
    for count in (3, 1, 0, 2):
        decide(proposer, count)
        mark = network.num_late
        engine.run(4)
        assert engine.counts[-2:] == [count] * 2
        assert (network.num_late > mark + 1) is (count > 0)
    decide(proposer, 2, drafter=1)
    mark = len(engine.in_turn)
    engine.run(5)
    assert len(engine.in_turn) >= mark + 4, "prompt lookup is the host's"
    decide(proposer, 2)
    engine.run(3)
    mark = len(engine.in_turn)
    engine.run(5)
    assert len(engine.in_turn) == mark


def test_evidence_comes_in_order_and_is_booked_on_who_drafted(made):
    proposer, _ = made
    seen = []
    proposer.controller.verified = lambda outcomes: [
        seen.append((state.proposed_by, *found)) for state, (found,) in outcomes.items()
    ]
    proposer.controller.due = lambda *args: True
    engine = Engine(proposer, [request()])
    script = [(0, 3), (0, 1), (1, 2), (1, 4), (0, 2), (0, 0), (0, 4)]
    for drafter, count in script:
        decide(proposer, count, drafter)
        engine.run(1, accepted=1)
    made_by = {(0, 3), (0, 1), (1, 2), (1, 4), (0, 2)}
    assert {(drafter, drafts) for drafter, drafts, _ in seen} <= made_by | {(0, 4)}
    numbers = [drafts for _, drafts, _ in seen]
    assert numbers == [count for count in engine.counts if count][: len(numbers)]
    assert len(numbers) >= 4


def test_of_requests_that_have_ended_nothing_is_learned(made):
    proposer, _ = made
    seen = []
    proposer.controller.verified = seen.extend
    ends, stays = request("ends"), request("stays")
    engine = Engine(proposer, [ends, stays])
    engine.run(12)
    proposer.snapshot()  # takes in what there is
    assert seen
    state = proposer._known[ends]
    ends.status = Status.FINISHED  # by what was committed last; its row in the step under way is computed in vain
    mark = len(seen)
    assert ends in [row.request for row in engine.under_way[1]]
    engine.run(3)
    proposer.snapshot()
    assert state not in seen[mark:]
    assert len(seen) > mark
    assert set(proposer._known) == {stays}


def test_times_of_late_drafts_are_the_devices_and_failed_steps_leave_none(made):
    proposer, _ = made
    taken = []
    proposer.controller.costs.add_draft = lambda drafter, size, seconds: taken.append((drafter, size.passes, seconds))
    proposer.controller.due = lambda *args: True
    decide(proposer, 3)
    engine = Engine(proposer, [request()])
    engine.run(4)
    engine.under_way = None  # an error: it never lands
    engine.run(3)
    proposer.snapshot()
    assert all(entry == (0, 3, pytest.approx(0.002)) for entry in taken)
    assert len(taken) == 4 + 3 - 1, "the last are known a step later"
    assert len(proposer._timed) <= 1


def test_while_held_every_row_gets_that_number(made):
    proposer, _ = made
    engine = Engine(proposer, [request()])
    for drafter, count, late in ((0, 0, True), (0, 2, True), (1, 3, False)):
        proposer.hold(drafter, count)
        engine.run(3)
        mark = len(engine.in_turn)
        engine.run(3)
        assert engine.counts[-2:] == [count] * 2
        assert (len(engine.in_turn) == mark) is late
    assert proposer.controller._step == 0
    assert proposer.controller.lane((b"", False)).rates[0].evidence == 0.0, "nothing is learned of acceptance"
    proposer.release()
    engine.run(10)
    assert proposer.controller._step > 5


def test_a_spell_without_drafts_only_watches(made):
    proposer, network = made
    proposer.controller.due = lambda *args: True
    decide(proposer, 0)
    engine = Engine(proposer, [request()])
    engine.run(6)
    assert engine.in_turn == []
    assert network.num_late == 0
    assert engine.counts == [0] * 7


@pytest.mark.parametrize(("host", "best"), [(0.0, 1), (0.008, 0)])
def test_what_the_device_waits_for_the_host_is_part_of_prompt_lookups_price(made, host, best):
    """It is as often right as the network, and takes no time: worth it where steps need not overlap."""
    proposer, _ = made
    engine = Engine(proposer, [request()], host, lookup_is_right=True)
    engine.run(1500)
    lane = proposer.controller.lane((b"", False))
    assert lane.drafter == best
    assert proposer.controller.costs.draft_curve(1, 1)(2) == pytest.approx(host, abs=1e-3)
    mark = len(engine.in_turn)
    engine.run(100)
    assert (len(engine.in_turn) - mark > 50) is (best == 1)
