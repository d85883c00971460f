"""Steps that are put off: which may be, and that none is lost or looked at as another's."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.platform.core.batch import RowPlan
from outrider.platform.core.request import Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.proposer import RestedSteps, TargetOutput
from outrider.spec_decode.rests import MOST_WAITING, WORTH_WAITING, Rests, Waiting


def request(adapter=None):
    made = Request("r", [1, 2, 3], 3, SamplingParams(), seed_key=1, blocks=[4])
    made.adapter = adapter
    return made


def plan(request, start=2, num_tokens=1, samples=True):
    return RowPlan(request, start, num_tokens, 0, samples, 0)


SHORT = TargetOutput(seconds=WORTH_WAITING / 2)


def test_steps_of_the_same_decodes_wait_together_up_to_a_bound():
    waiting, one = Waiting(), request()
    assert not waiting.go_on([plan(one)], SHORT), "none waits yet"
    assert waiting.begin([plan(one)], SHORT)
    kept = 1
    while waiting.go_on([plan(one, 2 + kept)], SHORT):
        kept += 1
    (steps,) = waiting.take()
    assert kept == len(steps.targets) == MOST_WAITING
    assert steps.tables[0] is one.blocks
    assert waiting.take() == []
    assert not waiting.go_on([plan(one, 9)], SHORT)


def test_a_part_of_a_prompt_does_not_wait():
    """Whoever follows does not compute one token."""
    waiting, one, other = Waiting(), request(), request()
    assert not waiting.begin([plan(one), plan(other, samples=False)], SHORT)
    assert waiting.take() == []


def test_other_sequences_wait_up_to_the_same_bound():
    waiting = Waiting()
    for _ in range(MOST_WAITING):
        assert not waiting.is_full
        one = request()
        assert not waiting.go_on([plan(one, 0, 5)], SHORT)
        assert waiting.begin([plan(one, 0, 5)], SHORT)
    assert waiting.is_full
    assert not waiting.go_on([plan(one, 5)], SHORT)
    assert len(waiting.take()) == MOST_WAITING
    assert not waiting.is_full


def test_adapters_and_long_steps_do_not_wait():
    waiting, one, tenant = Waiting(), request(), request(adapter=object())
    assert not waiting.begin([plan(one), plan(tenant)], SHORT), "its adapter may be gone later"
    assert not waiting.begin([plan(one)], TargetOutput(seconds=WORTH_WAITING))


def test_a_step_that_is_computed_again_does_not_wait_with_its_failed_self():
    """An error after the step was looked at, and before it was committed: as a whole, or its last row."""
    waiting, one, other = Waiting(), request(), request()
    assert waiting.begin([plan(one), plan(other)], SHORT)
    assert waiting.go_on([plan(one, 3), plan(other, 3)], SHORT)
    assert not waiting.go_on([plan(one, 3), plan(other, 3)], SHORT)
    assert not waiting.go_on([plan(one, 4), plan(other, 3)], SHORT)
    assert waiting.go_on([plan(one, 4), plan(other, 4)], SHORT)


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 10**6))
def test_every_step_is_looked_at_once_in_order(seed):
    """As the proposer asks: whoever comes, goes and begins again, what is looked at is what was computed."""
    rng = random.Random(seed)
    waiting, live, computed, looked_at = Waiting(), [request()], [], []
    positions = {}

    def look(steps):
        for at, target in enumerate(steps.targets):
            starts = [(row.request, row.end + at - 1 if at else row.start) for row in steps.rows]
            looked_at.append((target.hidden.item(), starts))

    def look_at_all():
        for steps in waiting.take():
            look(steps)

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
        if not waiting.go_on(plans, target):
            if waiting.is_full:
                look_at_all()
            if not waiting.begin(plans, target):
                look_at_all()
                look(RestedSteps(plans, [one.blocks for one in live], [target]))
    look_at_all()
    assert looked_at == computed


def test_rests_are_summed():
    rests, one, other = Rests(), request(), request()
    rests.add(RestedSteps([plan(one), plan(other)], [[], []], [SHORT] * 3))
    rests.add(RestedSteps([plan(one), plan(other, 0, 9), plan(request(), 0, 5, False)], [[]] * 3, [SHORT]))
    assert (rests.num_steps, rests.num_prompts, rests.num_outputs) == (4, 14, 6 + 2)
    assert rests.seconds == pytest.approx(4 * SHORT.seconds)
