"""Hidden states that wait: every position comes out with its own state, and only where somebody may read it."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.platform.core.request import Request, Status
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.drafters.base import DraftRow
from outrider.spec_decode.drafters.eagle import pending_states
from outrider.spec_decode.drafters.eagle.pending_states import PendingStates, placement, slots_of

BLOCK = 4


def request(blocks=()):
    return Request("r", [1], 1, SamplingParams(), seed_key=1, blocks=list(blocks))


def slot(one, position):
    return one.blocks[position // BLOCK] * BLOCK + position % BLOCK


def step(pending, *parts, rejected=0):
    """Add a step of (request, first position, number of tokens) each, the last `rejected` of which hold rejected
    drafts; returns {slot: state} of the others."""
    rows, first = [], 0
    total = sum(count for *_, count in parts)
    states, expected = torch.randn(total, 6), {}
    for one, start, count in parts:
        valid = start + count - rejected
        rows.append(DraftRow(one, [1] * (valid + 1), valid, 0, 0, one.blocks, True, start, first))
        expected |= {slot(one, start + at): states[first + at] for at in range(count - rejected)}
        first += count
    pending.add(rows, (states, 2 * states))
    return expected


def written(pending):
    """{slot: state} of everything that waits."""
    steps = []
    while len(pending):
        steps.append(pending.pop())
    places, slots, handles = placement(steps, BLOCK)
    assert sum(count for _, count in handles) == len(places) == len(slots)
    if not steps:
        return {}
    states, doubled = (torch.cat(part) for part in zip(*(each.states for each in steps), strict=True))
    assert torch.equal(doubled, 2 * states)
    return {at: states[place] for place, at in zip(places, slots, strict=True)}


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[at], expected[at]) for at in found)


def test_every_position_of_every_step_comes_out_once():
    pending, one, other = PendingStates(), request(range(6)), request(range(10, 16))
    expected = step(pending, (one, 0, 5), (other, 0, 19)) | step(pending, (one, 5, 1), (other, 19, 1))
    assert (len(pending), pending.num_tokens) == (2, 26)
    assert same(written(pending), expected)
    assert (len(pending), pending.num_tokens) == (0, 0)


def test_rejected_drafts_are_not_written():
    pending, one, other = PendingStates(), request(range(6)), request(range(10, 16))
    expected = step(pending, (one, 2, 4), (other, 3, 3), rejected=2)
    assert len(expected) == 3
    assert same(written(pending), expected)


def test_the_last_state_of_a_slot_is_the_last_one_to_come_out():
    pending, one = PendingStates(), request(range(6))
    step(pending, (one, 4, 3))
    again = step(pending, (one, 5, 3))
    assert same({at: state for at, state in written(pending).items() if at in again}, again)


def test_preempted_requests_are_left_out():
    pending, gone, live = PendingStates(), request([0, 1]), request([4, 5])
    expected = step(pending, (live, 3, 1), (gone, 0, 1)) | step(pending, (gone, 1, 1), (live, 4, 1))
    gone.num_preemptions, gone.blocks = 1, [7, 8]  # it began again elsewhere
    assert same(written(pending), {at: expected[at] for at in (slot(live, 3), slot(live, 4))})


def test_finished_requests_are_dropped_unless_others_may_have_their_blocks():
    pending, gone, shared, live = PendingStates(), request([0, 1]), request([2, 3]), request([4, 5])
    shared.namespace = b"tenant"
    step(pending, (gone, 0, 1))
    gone.status = Status.FINISHED
    expected = step(pending, (shared, 0, 1))
    assert len(pending) == 1
    shared.status = Status.FINISHED
    expected |= step(pending, (live, 0, 1))
    assert same(written(pending), expected)


def test_the_most_that_waits_follows_from_the_memory_of_a_token(monkeypatch):
    monkeypatch.setattr(pending_states, "MAX_PENDING_BYTES", 10 * 2 * 6 * 4)
    pending = PendingStates()
    step(pending, (request([0]), 0, 1))
    assert pending.most_tokens == 10


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_random_steps_come_out_as_they_went_in(seed):
    """Chunks, verifications and decodes; requests come and go; some of it is taken out meanwhile."""
    rng = random.Random(seed)
    pending, live, expected = PendingStates(), {}, {}
    for number in range(40):
        if len(live) < 3:
            live[request(range(200 * number, 200 * number + 200))] = 0
        some = rng.sample(list(live), rng.randint(1, len(live)))
        parts = [(one, live[one], rng.choice([2, 3, 40])) for one in some]
        rejected = rng.randint(0, 1)
        now = step(pending, *parts, rejected=rejected)
        for one, _, count in parts:
            of_one = expected.setdefault(one, {})
            of_one |= {slot(one, at): now[slot(one, at)] for at in range(live[one], live[one] + count - rejected)}
            live[one] += count - rejected
        for one in [one for one in live if rng.random() < 0.2 or live[one] > 700]:
            del live[one]
            expected.pop(one, None)
            one.status = Status.FINISHED
        if rng.random() < 0.2:
            wanted = {}
            for of_one in expected.values():
                wanted |= of_one
                of_one.clear()
            assert same(written(pending), wanted)


@given(st.integers(0, 60), st.integers(0, 60))
def test_slots_are_the_blocks_of_the_table(start, count):
    table = random.Random(start).sample(range(100), 30)
    expected = [table[at // BLOCK] * BLOCK + at % BLOCK for at in range(start, start + count)]
    assert slots_of(table, start, start + count, BLOCK) == expected
