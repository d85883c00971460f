"""The composing proposer: who is called with what, what comes back, and what is kept of requests."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.platform.core.batch import RowPlan
from outrider.platform.core.request import NO_DRAFTS, Drafts, Request, Status
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.core.speculative_config import parse_speculative
from outrider.spec_decode.adaptive import HELD_RESTS, AdaptiveProposer
from outrider.spec_decode.adaptive_factory import make_adaptive
from outrider.spec_decode.controller import DrafterTraits
from outrider.spec_decode.drafters.base import DraftRow, NoProposer, Proposal, ProposerNeeds, TargetOutput
from outrider.spec_decode.drafters.ngram import NgramProposer
from outrider.spec_decode.rests import LONGEST_WAIT, MOST_KEPT, MOST_WAITING


class Noting:
    """A workload that hands on what it is told."""

    prompts_per_token = 0.0
    answer_length = math.inf

    def __init__(self, computed) -> None:
        self.computed, self.steps_by_rows = computed, {}

    def had(self, row_steps):
        """Not handed on."""


TRAITS = (DrafterTraits("draft_model", True), DrafterTraits("ngram", False))


class Recording(NoProposer):
    """Drafts its number as often as it may; says that it lags by one where it drafts nothing."""

    def __init__(self, number: int) -> None:
        self.number, self.calls, self.watched, self.forgotten, self.bound = number, [], 0, [], None
        self.rested_steps = 0

    @property
    def needs(self) -> ProposerNeeds:
        return ProposerNeeds(aux_layers=(self.number,), watches_rests=True)

    def bind(self, kv, prepare_adapters):
        self.bound = kv

    def forget_adapter(self, digest):
        self.forgotten.append(digest)

    def watch(self, rows, target):
        self.watched += 1

    def watch_rests(self, spells):
        self.rested_steps += sum(len(steps.targets) for steps in spells)

    def propose(self, rows, target):
        self.calls.append([(row.request, row.max_drafts) for row in rows])
        return [
            Proposal(Drafts([self.number] * row.max_drafts), len(row.tokens) + row.max_drafts - 1)
            if row.max_drafts
            else Proposal(NO_DRAFTS, len(row.tokens) - 1)
            for row in rows
        ]


@pytest.fixture
def parts():
    drafters = [Recording(0), Recording(1)]
    return AdaptiveProposer(list(zip(TRAITS, drafters, strict=True)), 4, iter(range(10**9)).__next__), drafters


def request(digest=b""):
    made = Request("r", [1, 2, 3], 3, SamplingParams(), seed_key=1)
    made.text_namespace = (b"", digest)
    return made


def row(request, max_drafts=4, sampled=True, **fields):
    length = len(request.tokens)
    return DraftRow(request, request.tokens, length - 1, length - 1, max_drafts, [], sampled, length - 2, **fields)


def plan(request, num_tokens=1, samples=True):
    return RowPlan(request, len(request.tokens) - num_tokens, num_tokens, 0, samples, 0)


OUTPUT = TargetOutput(seconds=0.01)
SHORT = TargetOutput(seconds=0.001)


def test_a_neural_drafter_gets_a_fallback_and_a_lookup_does_not():
    neural = make_adaptive(Recording(0), parse_speculative({"method": "eagle3", "model": "m"}))
    _, fallback = neural._drafters
    assert isinstance(fallback, NgramProposer)
    assert fallback._min_n == 2, "one token that repeats says little where a network was not right"
    assert neural.needs.aux_layers == (0,)
    alone = make_adaptive(NgramProposer(1, 5), parse_speculative({"method": "ngram"}))
    assert len(alone._drafters) == 1


def test_binding_and_forgetting_reach_all(parts):
    proposer, drafters = parts
    proposer.bind(["kv"], None)
    proposer.propose([row(request(b"x"))], OUTPUT)
    proposer.forget_adapter(b"x")
    assert [d.bound for d in drafters] == [["kv"]] * 2
    assert [d.forgotten for d in drafters] == [[b"x"]] * 2
    assert not proposer.snapshot()


def test_the_first_drafter_sees_every_step(parts):
    proposer, (first, _) = parts
    requests = [request(), request(b"a")]
    for step in range(30):
        rows = [row(requests[0], sampled=step > 3, max_drafts=4 if step > 3 else 0), row(requests[1])]
        proposer.propose(rows, OUTPUT)
    assert len(first.calls) + first.watched == 30
    assert all([r for r, _ in call] == requests for call in first.calls)


def test_the_fallbacks_drafts_come_with_the_neural_drafters_kv(parts):
    proposer, (first, second) = parts
    one, other = request(b"a"), request(b"b")
    rows = [row(one), row(other)]
    proposer.propose(rows, OUTPUT)
    controller = proposer.controller
    controller.due = lambda *args: False
    for state, drafter, count in zip(proposer._states, (0, 1), (3, 2), strict=True):
        state.drafter, state.num_drafts = drafter, count
    got = proposer.propose(rows, OUTPUT)
    assert [p.drafts.token_ids for p in got] == [[0, 0, 0], [1, 1]]
    assert [p.num_draft_computed for p in got] == [5, 2]
    assert [count for _, count in first.calls[-1]] == [3, 0]
    assert second.calls[-1] == [(other, 2)]  # it sees only whom it serves


def test_what_is_verified_is_booked_on_who_drafted_it(parts):
    proposer, _ = parts
    one = request()
    proposer.propose([row(one)], OUTPUT)
    proposer.controller.due = lambda *args: False
    (state,) = proposer._states
    state.drafter, state.num_drafts = 1, 4
    proposer.propose([row(one)], OUTPUT)
    proposer.propose([row(one, num_drafts=2, num_accepted=1)], OUTPUT)  # truncated by the budget
    proposer.snapshot()  # who looks at the controller finds all evidence taken in
    assert [rates.evidence for rates in state.lane.rates] == [0.0, 1.0]
    proposer.propose([row(one, sampled=False, max_drafts=0)], OUTPUT)  # preempted: its drafts are gone
    proposer.snapshot()
    assert state.proposed_by == -1
    proposer.propose([row(one)], OUTPUT)
    proposer.snapshot()
    assert [rates.evidence for rates in state.lane.rates] == [0.0, 1.0]


def test_while_nothing_is_drafted_nobody_asks_until_something_is_decided(parts):
    proposer, (first, _) = parts
    one, controller = request(), proposer.controller
    controller.due = lambda *args: False
    controller._mode.drafting = False  # else it is a trial, of which each step counts
    proposer.propose([row(one)], OUTPUT)
    controller._next_decision = controller._step + 7
    proposer.propose([row(one)], OUTPUT)
    assert proposer.rest == 6, "the seventh finds that it is time"
    measured, outputs, watched, steps = [], [], first.watched, controller._step
    proposer.snapshot()
    controller.costs.add_step = lambda rows, tokens, seconds: measured.append((rows, tokens, seconds))
    controller.workload = Noting(lambda prompts, tokens, answers: outputs.append(tokens))
    for left in (5, 4, 3, 2, 1, 0):
        proposer.rested([plan(one)], OUTPUT)
        assert proposer.rest == left
    assert (first.rested_steps, first.watched) == (6, watched)
    assert controller._step == steps + 6
    assert controller.is_time
    proposer.propose([row(one)], OUTPUT)
    proposer.snapshot()
    assert (first.watched, measured, sum(outputs)) == (watched + 1, [(1, 1, OUTPUT.seconds)] * 2, 7)


def test_a_rest_goes_on_while_nothing_is_new_whoever_comes_and_goes(parts):
    """New requests of a known adapter begin in it, and are counted; a look at the controller stands for a decision."""
    proposer, (first, _) = parts
    controller, looks, outputs = proposer.controller, [], []
    controller.due = lambda *args: False
    controller._mode.drafting = False  # else it is a trial, of which each step counts
    one, other = request(), request()
    proposer.propose([row(one)], OUTPUT)
    controller._next_decision = controller._step + 3
    proposer.propose([row(one)], OUTPUT)
    controller.due = lambda *args: controller.is_time
    proposer.snapshot()
    controller.rest_on = lambda rows: looks.append(len(rows)) or 5
    controller.workload = Noting(lambda prompts, tokens, answers: outputs.append((prompts, tokens)))
    asked = first.watched
    proposer.rested([plan(one)], OUTPUT)
    proposer.rested([plan(one), plan(other, num_tokens=9)], OUTPUT)
    assert (looks, proposer.rest, outputs) == ([2], 5, [(9, 3)])
    controller._next_decision = controller._step + 5
    one.status = Status.FINISHED
    proposer.rested([plan(other)], OUTPUT)
    assert (looks, proposer.rest, first.watched) == ([2], 4, asked)
    assert set(proposer._known) == {other}
    controller.lane((b"new", False)).num_drafts = 2
    proposer.rested([plan(other), plan(request(b"new"))], OUTPUT)
    assert proposer.rest == 0, "it is drafted for"


@pytest.fixture
def resting(parts):
    """A proposer that rests for long, its first drafter, and the request that runs."""
    proposer, (first, _) = parts
    controller = proposer.controller
    controller.due = lambda *args: False
    controller._mode.drafting = False
    one = request()
    proposer.propose([row(one)], SHORT)
    controller._next_decision = controller._step + 10 * MOST_WAITING
    proposer.propose([row(one)], SHORT)
    return proposer, first, one


@pytest.mark.parametrize("adapter", [False, True])
def test_short_steps_of_a_rest_wait_whoever_they_are_of(resting, adapter):
    proposer, first, one = resting
    one.adapter = object() if adapter else None
    seen = []
    for _ in range(2 * MOST_WAITING + 1):
        proposer.rested([plan(one)], TargetOutput(seconds=0.1 * LONGEST_WAIT / MOST_WAITING))
        seen.append(first.rested_steps)
    assert seen == [0] * (MOST_WAITING - 1) + [MOST_WAITING] * MOST_WAITING + [2 * MOST_WAITING] * 2
    proposer.rested([plan(one)], OUTPUT)
    assert first.rested_steps == 2 * MOST_WAITING + 2, "a long one ends the waiting"
    proposer.rested([plan(one)], SHORT)
    proposer.forget_adapter(b"x")
    assert first.rested_steps == 2 * MOST_WAITING + 3, "nothing waits that may need it"


def test_what_waits_is_looked_at_before_an_adapter_leaves(resting):
    """Where the drafter computes something of it later; another does not care."""
    proposer, first, one = resting
    proposer.rested([plan(one)], SHORT)
    proposer.adapter_leaves(b"x")
    assert first.rested_steps == 0
    left = []
    first.adapter_leaves = lambda digest: left.append((digest, first.rested_steps))
    proposer.adapter_leaves(b"x")
    assert left == [(b"x", 1)]


@pytest.mark.parametrize(
    ("target", "most"),
    [
        (TargetOutput(seconds=1e-5, place=3), MOST_WAITING),
        (TargetOutput(torch.zeros(1, 4), seconds=1e-5), MOST_KEPT),  # its memory is kept meanwhile
        (TargetOutput(seconds=LONGEST_WAIT / 39.5), 40),  # drafts might help who came first
    ],
)
def test_how_many_steps_of_a_rest_wait(resting, target, most):
    proposer, first, one = resting
    seen = []
    for _ in range(2 * most):
        proposer.rested([plan(one)], target)
        seen.append(first.rested_steps)
    assert seen == [0] * (most - 1) + [most] * most + [2 * most]


def test_who_comes_with_another_adapter_ends_the_waiting(resting):
    """Its drafts may be right where those of the others are not."""
    proposer, first, one = resting
    other, third = request(b"a"), request(b"a")
    other.tokens += [4] * 5
    proposer.rested([plan(one)], SHORT)
    proposer.rested([plan(one), plan(other)], SHORT)
    assert first.rested_steps == 0, "one that has begun before came with a look, or is preempted"
    starting = RowPlan(third, 0, 3, 0, True, 0)
    proposer.rested([plan(one), starting], SHORT)
    assert first.rested_steps == 3
    proposer.rested([plan(one), RowPlan(request(b"a"), 0, 3, 0, True, 0)], SHORT)
    assert first.rested_steps == 3, "nothing is new about it"


def test_while_drafting_goes_on_a_rest_waits_for_a_second_step_without_drafts(parts):
    """After the first, all requests may have ended: who comes next is drafted for from its prompt on."""
    proposer, _ = parts
    controller = proposer.controller
    controller.due = lambda *args: False
    one = request()
    proposer.propose([row(one)], OUTPUT)
    controller._next_decision, controller._trial_ends = controller._step + 100, 0
    assert controller.is_steady
    (state,) = proposer._states
    for _ in range(2):
        state.drafter, state.num_drafts = 0, 2
        assert proposer.propose([row(one)], OUTPUT)[0].drafts.token_ids
        state.num_drafts = 0
        proposer.propose([row(one, max_drafts=0)], OUTPUT)
        assert proposer.rest == 0
        proposer.propose([row(one, max_drafts=0)], OUTPUT)
        assert proposer.rest > 0


def test_a_rest_ends_while_parts_of_prompts_are_computed(parts):
    proposer, _ = parts
    proposer.controller.rest_on = lambda rows: 9
    proposer._rest = 1
    proposer.rested([plan(request()), plan(request(), num_tokens=30, samples=False)], OUTPUT)
    assert proposer.rest == 0


def test_no_rest_while_drafting_or_while_prompts_are_computed(parts):
    proposer, _ = parts
    one = request()
    proposer.controller.due = lambda *args: False
    proposer.controller._mode.drafting = False
    proposer.controller._next_decision = 100
    proposer.propose([row(one)], OUTPUT)
    assert proposer.rest > 0
    proposer.propose([row(one), row(request(), sampled=False, max_drafts=0)], OUTPUT)
    assert proposer.rest == 0
    (state, _) = proposer._states
    state.drafter, state.num_drafts = 0, 2
    assert any(p.drafts.token_ids for p in proposer.propose([row(one), row(request())], OUTPUT))
    assert proposer.rest == 0
    proposer.hold(0, 0)
    proposer.propose([row(one)], OUTPUT)
    assert proposer.rest == HELD_RESTS, "what a step without drafts takes is that of one after which nobody is asked"
    proposer.hold(0, 2)
    assert proposer.rest == 0


def test_prompts_and_answers_are_counted_where_they_are_computed(parts):
    proposer, _ = parts
    seen = []
    proposer.controller.workload = Noting(lambda *counts: seen.append(counts))
    whole, part = request(), request()
    first = DraftRow(whole, [1] * 21, 20, 0, 4, [], True, 0)
    proposer.propose([first, DraftRow(part, [1] * 40, 30, 0, 0, [], False, 5, 20)], OUTPUT)
    verified = row(whole, num_drafts=3, num_accepted=2)._replace(tokens=[1] * 5, start=1, num_valid=4)
    proposer.propose([verified], OUTPUT)
    proposer.propose([verified._replace(tokens=[1] * 4)], OUTPUT)  # the last of the accepted drafts ended it
    proposer.snapshot()
    assert seen == [(20 + 25, 1, 1), (0, 3, 0), (0, 2, 0)]


def test_nothing_is_kept_of_finished_requests(parts):
    proposer, _ = parts
    gone = [request() for _ in range(50)]
    for one in gone:
        proposer.propose([row(one)], OUTPUT)
        one.status = Status.FINISHED
    proposer.propose([row(request())], OUTPUT)
    assert len(proposer._known) == 1


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_invariants_over_generated_histories(seed, num_steps):
    """Rows come, go, wait and are preempted; limits change every step; no time or acceptance breaks a limit."""
    rng = random.Random(seed)
    clock = iter(range(10**9))
    drafters = [Recording(0), Recording(1)]
    proposer = AdaptiveProposer(
        list(zip(TRAITS, drafters, strict=True)), 6, lambda: next(clock) * rng.choice([0.0, 1e-4])
    )
    live, pending = [request(rng.choice([b"", b"a"])) for _ in range(4)], {}
    for _ in range(num_steps):
        if rng.random() < 0.3:
            live[0].status = Status.FINISHED
            live = [*live[1:], request(rng.choice([b"", b"a", b"b"]))]
        rows = []
        for one in rng.sample(live, rng.randint(1, len(live))):
            drafts = rng.randint(0, pending.pop(one, 0))
            sampled = rng.random() < 0.8
            accepted = rng.randint(0, drafts)
            one.tokens.extend([7] * (accepted + 1) if sampled else [])
            limit = rng.randint(0, 6) if sampled else 0
            length = len(one.tokens)
            start = length - accepted - 2
            rows.append(
                DraftRow(
                    one, one.tokens, length - 1, rng.randint(0, length), limit, [], sampled, start, 0, drafts, accepted
                )
            )
        found = proposer.propose(rows, TargetOutput(seconds=rng.choice([0.0, 1e-3, 5.0])))
        for got, given_row in zip(found, rows, strict=True):
            count = len(got.drafts.token_ids)
            assert 0 <= count <= given_row.max_drafts
            assert len(set(got.drafts.token_ids)) <= 1  # one drafter's
            if count and got.drafts.token_ids[0] == 1:
                assert got.num_draft_computed <= len(given_row.tokens)
            pending[given_row.request] = count
        assert len(proposer._known) <= len(live) + 1
        assert len(proposer.snapshot()) <= 3
