"""Steps that are put off: which may be, and that none is lost or looked at as another's."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.platform.core.batch import RowPlan
from outrider.platform.core.request import Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.adaptive import AdaptiveProposer
from outrider.spec_decode.controller import DrafterTraits
from outrider.spec_decode.drafters.base import DraftRow, NoProposer, TargetOutput
from outrider.spec_decode.outcome import StepOutcome
from outrider.spec_decode.rests import LONGEST_WAIT, MOST_KEPT, MOST_TOKENS, MOST_WAITING, WORTH_WAITING, Rests, Spells

from .simulated import Clock


def request(adapter=None):
    made = Request("r", [1, 2, 3], 3, SamplingParams(), seed_key=1, blocks=[4])
    made.adapter = adapter
    return made


def plan(request, start=2, num_tokens=1, samples=True):
    return RowPlan(request, start, num_tokens, 0, samples, 0)


SHORT = TargetOutput(seconds=WORTH_WAITING / 2)


def spells_of(*steps, target=SHORT):
    spells = Spells()
    for rows in steps:
        spells.add(rows, target)
    assert spells.num_steps == len(steps)
    return spells.take()


def test_steps_of_the_same_decodes_are_one_spell():
    one, other = request(), request()
    first = [plan(one, 0, 5), plan(other, 7)]
    (spell,) = spells_of(first, [plan(one, 5), plan(other, 8)], [plan(one, 6), plan(other, 9)])
    assert (spell.rows, spell.targets) == (first, [SHORT] * 3)
    assert spell.tables[0] is one.blocks
    assert spell.tables[1] is other.blocks
    assert spells_of() == []


def test_other_sequences_and_prompts_begin_a_spell():
    one, other = request(), request()
    steps = [[plan(one)], [plan(one, 3), plan(other, 0, 9)], [plan(other, 9)], [plan(one, 4), plan(other, 10)]]
    assert [len(spell.rows) for spell in spells_of(*steps)] == [1, 2, 1, 2]
    parts = [[plan(one, 0, 4, False)], [plan(one, 4, 4, False)], [plan(one, 8, 1)], [plan(one, 9, 1)]]
    assert [len(spell.targets) for spell in spells_of(*parts)] == [1, 3], "a part, and the rest of it with what follows"


def test_a_sequence_that_gave_way_begins_a_spell():
    one, spells = request(), Spells()
    spells.add([plan(one)], SHORT)
    before, one.blocks = one.blocks, list(one.blocks)
    assert not spells.go_on([plan(one, 3)], SHORT)
    spells.add([plan(one, 3)], SHORT)
    first, second = spells.take()
    assert first.tables[0] is before
    assert second.tables[0] is one.blocks
    assert not spells.go_on([plan(one, 4)], SHORT), "what was taken is gone"


def test_a_step_that_is_computed_again_is_no_part_of_its_failed_self():
    """An error after the step was looked at, and before it was committed: as a whole, or its last row."""
    one, other = request(), request()
    steps = [
        [plan(one), plan(other)], [plan(one, 3), plan(other, 3)], [plan(one, 3), plan(other, 3)],
        [plan(one, 4), plan(other, 3)], [plan(one, 5), plan(other, 4)],
    ]  # fmt: skip
    assert [len(spell.targets) for spell in spells_of(*steps)] == [2, 1, 2]


@settings(max_examples=80)
@given(st.integers(0, 10**6))
def test_every_step_is_looked_at_once_in_order(seed):
    """Whoever comes, goes and begins again, what is looked at is what was computed."""
    rng = random.Random(seed)
    kept, live, computed, looked_at = Spells(), [request()], [], []
    positions = {}

    def look(steps):
        for at, target in enumerate(steps.targets):
            starts = [(row.request, row.end + at - 1 if at else row.start) for row in steps.rows]
            looked_at.append((target.hidden.item(), starts))

    for number in range(60):
        if rng.random() < 0.2:
            live.append(request(adapter=object() if rng.random() < 0.2 else None))
        if rng.random() < 0.1:
            again = rng.choice(live)  # it gives way, and begins again in the same step
            again.blocks = list(again.blocks)
            positions.pop(again, None)
        if len(live) > 1 and rng.random() < 0.2:
            live.pop(rng.randrange(len(live)))
        plans = []
        for one in live:
            tokens = 1 if one in positions else rng.randint(1, 3)
            plans.append(plan(one, positions.get(one, 0), tokens))
            positions[one] = positions.get(one, 0) + tokens
        target = TargetOutput(torch.tensor([float(number)]), (), 1e-3)
        computed.append((float(number), [(row.request, row.start) for row in plans]))
        if rng.random() < 0.5 or not kept.go_on(plans, target):
            kept.add(plans, target)
        if rng.random() < 0.1:
            for steps in kept.take():
                look(steps)
    for steps in kept.take():
        look(steps)
    assert looked_at == computed


@pytest.mark.parametrize("are_watched", [True, False])
def test_rests_are_summed(are_watched):
    rests, one, other = Rests(are_watched=are_watched), request(), request()
    prompts = [plan(one), plan(other, 0, 9), plan(request(), 0, 5, False)]
    for rows in ([plan(one, 2), plan(other, 5)], [plan(one, 3), plan(other, 6)], prompts):
        rests.add(rows, SHORT)
    spells = rests.look()
    assert [len(steps.targets) for steps in spells] == ([2, 1] if are_watched else [])
    assert (rests.num_steps, rests.num_prompts, rests.num_outputs, rests.num_answers) == (3, 14, 4 + 2, 1)
    assert rests.seconds == pytest.approx(3 * SHORT.seconds)
    rests.taken_in()
    assert (rests.num_steps, rests.num_prompts, rests.num_outputs, rests.num_answers) == (0, 0, 0, 0)
    assert rests.seconds == 0.0
    assert rests.look() == []


def test_steps_that_nobody_reads_are_not_kept():
    rests, one = Rests(are_watched=False), request(adapter=object())
    steps = int(LONGEST_WAIT / SHORT.seconds)
    for number in range(steps - 1):
        assert rests.add([plan(one, number)], SHORT), "nor does it matter whose they are"
    rests.add([plan(one, steps - 1)], SHORT)
    assert not rests.add([plan(one, steps)], SHORT), "somebody may have come"
    assert rests._spells.num_steps == 0
    rests.look()
    assert rests.add([plan(one)], SHORT)
    assert not rests.add([plan(one)], TargetOutput(seconds=WORTH_WAITING))


@settings(max_examples=80)
@given(st.booleans(), st.integers(0, 10**6))
def test_what_is_only_counted_sums_up_like_what_is_added(are_watched, seed):
    """Whatever is asked for in between, and whichever steps are looked at."""
    rng = random.Random(seed)
    quick, slow = Rests(are_watched=are_watched), Rests(are_watched=are_watched)
    live, position = [request()], 3
    for _ in range(80):
        if rng.random() < 0.2:
            live = [request() for _ in range(rng.randint(1, 5))]
        num_rows = len(live)
        rows, position = [plan(one, position) for one in live], position + 1
        if rng.random() < 0.15:
            start, count = rng.choice([(0, 1), (0, 4), (2, 1), (4, 3), (4, 1)])
            rows[-1] = plan(request(), start, count, rng.random() < 0.5)
        target = TargetOutput(seconds=rng.choice([1e-3, 2e-3, WORTH_WAITING, LONGEST_WAIT / 3]))
        may_wait = slow.add(rows, target)
        if quick.goes_on(rows, target):
            assert may_wait, "what may not wait is to be looked at"
            if rng.random() < 0.2:
                assert quick.timed() == pytest.approx(slow.timed())
        else:
            assert quick.add(rows, target) == may_wait
        assert quick.is_other_class(num_rows) == slow.is_other_class(num_rows)
        action = rng.random()
        if action < 0.1:
            quick.time_anew()
            slow.time_anew()
        elif action < 0.3:
            spells = quick.look()
            assert spells == slow.look()
            assert are_watched or spells == []
            assert quick.outcome == slow.outcome
            assert (quick.num_steps, quick.timed_steps) == (slow.num_steps, slow.timed_steps)
            assert (quick.seconds, quick.timed_seconds) == pytest.approx((slow.seconds, slow.timed_seconds))
            if action < 0.2:
                quick.taken_in()
                slow.taken_in()


def test_of_what_is_watched_only_a_step_of_the_same_sequences_goes_on():
    rests, one, other = Rests(are_watched=True), request(adapter=object()), request()
    assert rests.add([plan(one, 3)], SHORT)
    rests.is_other_class(1)
    assert not rests.goes_on([plan(other, 4)], SHORT)
    assert rests.goes_on([plan(one, 4)], SHORT), "whosever it is"
    assert not rests.goes_on([plan(one, 6)], SHORT), "nobody computed what is between"
    assert not rests.goes_on([plan(one, 5), plan(other, 4)], SHORT)
    (spell,) = rests.look()
    assert len(spell.targets) == 2
    assert not rests.goes_on([plan(one, 5)], SHORT), "a look is where it begins"
    assert (rests.num_steps, rests.num_outputs) == (2, 2)


@pytest.mark.parametrize(("hidden", "most"), [(None, MOST_WAITING), (torch.zeros(1), MOST_KEPT)])
def test_so_many_watched_steps_wait(hidden, most):
    """Fewer where tensors would live on; and of those none with many tokens."""
    rests, one = Rests(are_watched=True), request()
    target = TargetOutput(hidden, seconds=1e-6)
    for number in range(most - 1):
        assert rests.add([plan(one, 3 + number)], target)
        rests.is_other_class(1)
    assert not rests.add([plan(one, 2 + most)], target)
    assert not rests.goes_on([plan(one, 3 + most)], target)
    assert len(rests.look()[0].targets) == most
    assert rests.add([plan(one, 0, MOST_TOKENS + 1)], target) is (hidden is None)


@pytest.mark.parametrize("is_on_trial", [False, True])
def test_steps_that_nobody_watches_are_only_counted_but_on_trial(is_on_trial):
    """And the last one of a rest is looked at."""
    added, measured, one, clock = [], [], request(), Clock()
    clock.now = 1.0

    class Counting(Rests):
        def add(self, rows, target):
            added.append(rows)
            return super().add(rows, target)

    proposer = AdaptiveProposer([(DrafterTraits("draft_model", True), NoProposer())], 2, clock)
    proposer._rests, controller = Counting(are_watched=False), proposer.controller
    controller.due = lambda *args: False
    controller.rest_on = lambda rows: 5
    controller._mode.drafting = False
    proposer.rested([plan(one, 3)], SHORT)
    proposer.snapshot()
    added.clear()
    controller.costs.add_step = lambda rows, tokens, seconds: measured.append(seconds)
    proposer._on_trial, proposer._rest = is_on_trial, 6
    for number in range(6):
        proposer.rested([plan(one, 4 + number)], SHORT)
    proposer.snapshot()
    assert len(added) == len(measured) == (6 if is_on_trial else 1)
    assert proposer.rest == 5


def test_drafts_behind_the_end_of_a_text_are_not_wrong():
    state = object()
    whole = DraftRow(request(), [1] * 5, 4, 4, 4, [], True, 1, 0, 3, 2)
    assert StepOutcome.of([whole], [state]).verified == [(state, 3, 2)]
    assert StepOutcome.of([whole._replace(tokens=[1] * 4)], [state]).verified == [(state, 2, 2)]
