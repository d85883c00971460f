"""What the adaptive proposer measures of short steps: some of them, rightly, and everything that was accepted."""

import random
from types import SimpleNamespace

import pytest

from outrider.platform.core.request import Drafts, Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.acceptance import HOPEFUL
from outrider.spec_decode.adaptive import AdaptiveProposer
from outrider.spec_decode.controller import Controller, DrafterTraits
from outrider.spec_decode.drafters.base import DraftRow, NoProposer, Proposal, TargetOutput
from outrider.spec_decode.rests import WORTH_WAITING
from outrider.spec_decode.steady import MEASURED_ONE_IN, learn

from .simulated import Clock

GAP, DRAFTING = 2e-4, 3e-4


class Network(NoProposer):
    """Takes its time for as many drafts as it is asked for."""

    def __init__(self, clock):
        self.clock = clock

    def propose(self, rows, target):
        self.clock.now += DRAFTING
        return [Proposal(Drafts([7] * row.max_drafts), len(row.tokens)) for row in rows]


class Engine:
    """Steps of as many seconds; all drafts are right."""

    def __init__(self, seconds):
        self.clock = Clock()
        self.proposer = AdaptiveProposer([(DrafterTraits("draft_model", True), Network(self.clock))], 2, self.clock)
        self.seconds, self.told, self.drafts = seconds, {}, {}
        controller = self.proposer.controller
        controller.due = lambda *args: False
        for of, name in (
            (controller.costs, "add_step"),
            (controller.costs, "add_draft"),
            (controller.costs, "add_drafting_gap"),
            (controller.costs, "add_joins"),
            (controller, "verified"),
        ):
            setattr(of, name, self.noting(name))

    def noting(self, name):
        self.told[name] = []
        return lambda *args: self.told[name].append(args)

    def request(self):
        return Request("r", [1, 2, 3], 3, SamplingParams(), seed_key=1)

    def run(self, requests, steps):
        """Returns the drafts of each step."""
        controller, found = self.proposer._controller, []
        for _ in range(steps):
            controller._next_decision = controller._step + 100
            self.clock.now += GAP + self.seconds
            rows = []
            for one in requests:
                count = self.drafts.get(one, 0)
                one.tokens = one.tokens + [7] * (count + 1)
                length = len(one.tokens)
                rows.append(
                    DraftRow(one, one.tokens, length - 1, length - 1, 2, [], True, length - 2 - count, 0, count, count)
                )
            proposals = self.proposer.propose(rows, TargetOutput(seconds=self.seconds))
            for state in self.proposer._states:
                state.drafter, state.num_drafts = 0, 2
            self.drafts = {
                one: len(proposal.drafts.token_ids) for one, proposal in zip(requests, proposals, strict=True)
            }
            found.append([proposal.drafts.token_ids for proposal in proposals])
        self.proposer.snapshot()  # takes in what there is
        return found


@pytest.fixture
def engine():
    return Engine(WORTH_WAITING / 4)


def test_of_short_steps_few_are_measured_and_all_that_was_accepted_counts(engine):
    one = engine.request()
    engine.run([one], 4)
    for told in engine.told.values():
        told.clear()
    found = engine.run([one], 80)
    assert found == [[[7, 7]]] * 80
    assert [outcome for (told,) in engine.told["verified"] for found in told.values() for outcome in found] == [
        (2, 2)
    ] * 80
    assert len(engine.told["verified"]) < 20, "many at once"
    assert 80 // MEASURED_ONE_IN <= len(engine.told["add_step"]) <= 80 / MEASURED_ONE_IN + 2
    assert 80 // MEASURED_ONE_IN <= len(engine.told["add_draft"]) <= 80 / MEASURED_ONE_IN + 2
    assert engine.proposer._controller._step == 84


def test_who_joins_is_drafted_for_without_being_measured(engine):
    """Unless it is to be decided now, or a part of a prompt is computed."""
    one, other, third = (engine.request() for _ in range(3))
    engine.run([one], 4)
    proposer = engine.proposer
    proposer._controller.lane((b"", False)).num_drafts = 2
    for told in engine.told.values():
        told.clear()
    assert proposer._steady.left > 2
    left = proposer._steady.left
    assert engine.run([one, other], 1) == [[[7, 7], [7, 7]]]
    assert (proposer._steady.left, engine.told["add_step"]) == (left - 1, [])
    proposer._controller.due = lambda *args: True
    proposer._controller.decide = lambda *args: None
    engine.run([one, third], 1)
    assert len(engine.told["add_step"]) == 1
    assert engine.told["add_drafting_gap"] == [], "the end of the step before it was not noted"
    assert proposer._states[1] is proposer._known[third]
    assert engine.told["add_joins"] == [(1, 1)], "a step that was the first of its batch"
    assert [len(told) for (told,) in engine.told["verified"] if told] == [1, 1], (
        "drafts of the first request, in both steps"
    )


def test_parts_of_prompts_and_caps_are_no_matter_of_going_on(engine):
    """A part of a prompt is asked about as ever; a row gets no more drafts than were decided, and than it may have."""
    one, other = engine.request(), engine.request()
    engine.run([one], 4)
    proposer = engine.proposer
    assert proposer._steady.left > 2

    def row(request, **fields):
        length = len(request.tokens)
        given = {"max_drafts": 2, "sampled": True, "start": length - 1, **fields}
        return DraftRow(request, request.tokens, length, length, block_table=[], **given)

    asked = []
    network = proposer._first
    make = network.propose
    network.propose = lambda rows, target: asked.append([row.max_drafts for row in rows]) or make(rows, target)
    proposer._states[0].num_drafts = 1
    proposer._steady.begin([one], proposer._states)
    proposer.propose([row(one)], TargetOutput(seconds=engine.seconds))
    proposer.propose([row(one, max_drafts=0)], TargetOutput(seconds=engine.seconds))
    assert asked == [[1], [0]]
    left = proposer._steady.left
    assert left > 0
    proposer.propose([row(one), row(other, sampled=False, max_drafts=0)], TargetOutput(seconds=engine.seconds))
    assert proposer._steady.left == 0, "measured, if its time is known"


def test_prompts_of_who_joins_are_counted(engine):
    one, other = engine.request(), engine.request()
    engine.run([one], 4)
    proposer, counted, steps = engine.proposer, [], []
    proposer.snapshot()
    proposer._controller.workload = SimpleNamespace(computed=lambda *counts: counted.append(counts), had=steps.extend)
    length = len(other.tokens)
    rows = [
        DraftRow(one, [*one.tokens, 1], len(one.tokens), len(one.tokens), 2, [], True, len(one.tokens) - 3, 0, 2, 2),
        DraftRow(other, [*other.tokens, 1], length, length, 2, [], True, 0),
    ]
    proposer.propose(rows, TargetOutput(seconds=engine.seconds))
    proposer.snapshot()
    assert [sum(counts) for counts in zip(*counted, strict=True)] == [length, 4, 1]
    assert not any(count for _, count in steps), "a prompt was computed in it"
    counted.clear()
    one.tokens, other.tokens, ended = [*one.tokens, 7, 7, 7], [*other.tokens, 7], len(other.tokens) + 1
    rows = [
        DraftRow(one, one.tokens, len(one.tokens), len(one.tokens), 0, [], True, len(one.tokens) - 3, 0, 2, 2),
        DraftRow(other, other.tokens, ended - 1, ended, 2, [], True, ended - 2),
    ]
    proposer.propose(rows, TargetOutput(seconds=engine.seconds))
    proposer.snapshot()
    assert [sum(counts) for counts in zip(*counted, strict=True)] == [0, 2 + 1, 0], "a draft ended the first"


def test_what_is_measured_is_right_whoever_comes_and_goes(engine):
    requests = [engine.request() for _ in range(3)]
    for number in range(1, 80):
        engine.run(requests[: 1 + number % 3], 1 + number % 5)
    gaps = [seconds for _, seconds in engine.told["add_drafting_gap"]]
    assert len(gaps) > 5
    assert gaps == pytest.approx([GAP] * len(gaps)), "no step is taken for a gap"
    drafting = [seconds for _, _, seconds in engine.told["add_draft"]]
    assert drafting == pytest.approx([DRAFTING] * len(drafting))


def test_a_step_that_is_measured_knows_that_the_one_before_it_drafted():
    engine = Engine(0.9 * WORTH_WAITING)
    one = engine.request()
    engine.run([one], 3)
    for _ in range(30):
        engine.run([one], 1)
        assert engine.proposer.is_settling or engine.proposer._steady.left, "the next one is measured"


def test_while_held_every_step_is_measured_and_none_counts(engine):
    one = engine.request()
    engine.run([one], 4)
    assert engine.proposer._steady.left
    engine.proposer.hold(0, 2)
    for told in engine.told.values():
        told.clear()
    engine.run([one], 8)
    assert len(engine.told["add_step"]) == 8
    assert engine.told["verified"] == []


def test_long_steps_are_all_measured():
    engine = Engine(WORTH_WAITING)
    one = engine.request()
    engine.run([one], 4)
    engine.told["add_step"].clear()
    engine.run([one], 20)
    assert len(engine.told["add_step"]) == 20


def test_busy_time_goes_on_while_nothing_is_measured(engine):
    one, budget = engine.request(), engine.proposer._controller._budget
    engine.run([one], 8)
    before = budget.elapsed  # after which there was nobody to tell it
    engine.run([one], 40)
    assert budget.elapsed - before == pytest.approx(40 * (engine.seconds + DRAFTING), rel=0.01)


def test_the_last_step_before_a_decision_ends_as_others(engine):
    """One that has no step after it to go unmeasured: how long the next one takes is known."""
    one, controller = engine.request(), engine.proposer._controller
    engine.run([one], 4)
    for left in (1, 2, 3):
        controller._next_decision = controller._step + left
        found = engine.proposer._next_unmeasured([], engine.seconds)
        assert found == left - 1
    controller._next_decision = controller._step
    assert engine.proposer._next_unmeasured([], engine.seconds) == 0


def test_what_was_noted_while_held_is_no_part_of_the_first_decision(engine):
    one, proposer = engine.request(), engine.proposer
    proposer.hold(0, 2)
    engine.run([one], 4)
    engine.told["add_step"].clear()
    proposer._evidence.note(proposer._controller.costs.add_step, 1, 1, engine.seconds)
    proposer.release()
    assert engine.told["add_step"], "release takes it in"


def test_who_is_drafted_for_by_another_is_learned_from_all_the_same(engine):
    """Steps go on unmeasured where prompt lookup drafts; whose drafts they are is known when they are verified."""
    one, proposer = engine.request(), engine.proposer
    engine.run([one], 4)
    assert proposer._steady.left > 3
    state, noted = proposer._states[0], []
    proposer._drafters._drafters.append(Network(engine.clock))
    state.lane.rates.append(state.lane.rates[0])
    state._rates.append(None)
    state.drafter = 1
    proposer._controller.proposed = lambda drafter, answers: [
        (noted.append(drafter), setattr(row, "proposed_by", drafter)) for row, _, _ in answers
    ]
    proposer._controller.verified = lambda outcomes: noted.extend(("of", row.proposed_by) for row in outcomes)
    snapshot, proposer.snapshot = proposer.snapshot, lambda: None  # nothing is taken in before it must be
    for _ in range(3):
        state.drafter = 1
        proposer._steady.begin([one], [state])
        engine.run([one], 1)
    snapshot()
    assert noted == [("of", 0), 1, ("of", 1), 1, ("of", 1), 1]


def test_busy_time_that_was_not_told_yet_counts_for_who_joins(engine):
    one, other, asked = engine.request(), engine.request(), []
    engine.run([one], 4)
    proposer = engine.proposer
    proposer._controller.due = lambda *args: asked.append(args) or False
    proposer.snapshot = lambda: None  # nobody looks
    engine.run([one], 2)
    engine.run([one, other], 1)
    assert asked == [(2, False, pytest.approx(2 * (engine.seconds + DRAFTING), rel=0.2))]


def test_what_steady_steps_brought_is_learned_in_full_and_in_no_order_of_rows():
    """Requests of one lane, of which the last is the worst: its drafts were not verified after all others."""
    controller = Controller([DrafterTraits("draft_model", True)], 4)
    states = [controller.new_row((b"", True)) for _ in range(4)]
    chances, generator = (0.9, 0.9, 0.9, 0.2), random.Random(0)
    for _ in range(8):
        told = [[(state, []) for state in states] for _ in range(2)]  # as if one had come, and gone at once
        for number in range(31):
            for chance, (_, numbers) in zip(chances, told[number >= 20], strict=True):
                numbers += (4, next((n for n in range(4) if generator.random() > chance), 4), 4, 4)
        for state in states:
            state.proposed_by = 0
        learn(controller, told)
        controller.lane((b"", True)).rates[0].probabilities  # noqa: B018 - where changes are noticed
    rates = controller.lane((b"", True)).rates[0]
    assert rates.epoch == 0, "the text is the same all the time"
    assert rates.probabilities[0] == pytest.approx(0.725, abs=0.06)
    assert states[3].rates_of(0).factor < 0.6 < 1.0 < states[0].rates_of(0).factor
    assert [state.proposed_by for state in states] == [0] * 4
    assert controller.workload._outputs > 1000
    assert controller.lane((b"new", True)).rates[0].probabilities[0] == pytest.approx(0.725, abs=0.06)
    unknown = controller.lane((b"new", False)).rates[0].probabilities[0]
    assert unknown == pytest.approx(HOPEFUL.probability), "of others nothing is known"


def test_drafts_that_were_not_there_in_steady_steps_are_counted():
    controller = Controller([DrafterTraits("ngram", False)], 4)
    state = controller.new_row((b"", True))
    learn(controller, [[(state, [0, 0, 4, 0] * 40)]])
    assert state.lane.rates[0].available[0] < 0.1
    assert state.proposed_by == -1


def test_a_decision_that_nobody_may_gain_from_waits_for_one_step(engine):
    """All are at their ends, and others begin; where none ever may have drafts it is not put off for ever."""
    one, decided = engine.request(), []
    engine.run([one], 4)
    proposer = engine.proposer
    controller = proposer._controller
    controller.due = lambda *args: True
    controller.decide = lambda rows, tokens: decided.append(len(rows))

    def step(max_drafts):
        proposer._steady.left = 0
        length = len(one.tokens)
        row = DraftRow(one, one.tokens, length, length, max_drafts, [], True, length - 1)
        proposer.propose([row], TargetOutput(seconds=engine.seconds))
        return len(decided)

    assert [step(count) for count in (0, 2, 2, 0, 0, 0, 0)] == [0, 1, 2, 2, 3, 3, 4]
    controller._mode.drafting = False
    assert [step(count) for count in (0, 0, 0)] == [5, 6, 7], "while resting it is not decided in vain"
