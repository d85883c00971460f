"""Hidden states that wait: what comes out is what went in, wherever it lay meanwhile."""

import random
from collections import deque

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.platform.core.batch import RowPlan
from outrider.platform.core.request import Request, Status
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.pending_states import PendingStates, Ring, Spell

BLOCK = 4


def request(blocks=()):
    return Request("r", [1], 1, SamplingParams(), seed_key=1, blocks=list(blocks))


def step(pending, requests, start, seed, num_tokens=1):
    """Each computes `num_tokens` tokens from `start` on; returns the states."""
    rows = [RowPlan(one, start, num_tokens, 0, True, 0) for one in requests]
    states = (torch.randn(len(rows) * num_tokens, 6, generator=torch.Generator().manual_seed(seed)),)
    kept = states[0].clone()
    tables = [one.blocks for one in requests]
    if not pending.go_on(rows, tables, [states]):
        pending.add(rows, tables, states)
    states[0].zero_()  # a step's memory is used again
    return kept


def written(pending):
    """Slot -> state of all that waits."""
    found = {}
    while len(pending):
        oldest = pending.pop()
        for piece in oldest.pieces(BLOCK):
            for place, slot in zip(piece.places, piece.slots, strict=True):
                found[int(slot)] = oldest.states[0][int(place)].clone()
        pending.popped()
    return found


def test_steps_in_which_the_same_sequences_decode_are_one_spell():
    pending, requests = PendingStates(), [request([0, 1, 2, 3, 4, 5]), request([9, 8, 7, 6, 11, 12])]
    step(pending, requests, 0, 0, num_tokens=3)
    states = [step(pending, requests, 3 + at, at) for at in range(20)]
    assert len(pending) == 2
    assert pending.num_tokens == 6 + 40
    found = written(pending)
    assert len(found) == 46
    for at, both in enumerate(states):
        for one, state in zip(requests, both, strict=True):
            position = 3 + at
            assert torch.equal(found[one.blocks[position // BLOCK] * BLOCK + position % BLOCK], state)


def test_steps_that_come_together_are_as_if_they_came_one_by_one():
    requests = [request([0, 1, 2, 3, 4, 5]), request([9, 8, 7, 6, 11, 12])]
    single, together = PendingStates(), PendingStates()
    states = []
    for pending in (single, together):
        states = [step(pending, requests, 0, 0)]
    states += [step(single, requests, 1 + at, 1 + at) for at in range(9)]
    plans = [RowPlan(one, 1, 1, 0, True, 0) for one in requests]
    tables = [one.blocks for one in requests]
    assert together.go_on(plans, tables, [(each,) for each in states[1:]])
    assert together.num_tokens == single.num_tokens == 20
    assert len(together) == 1
    one_by_one, at_once = written(single), written(together)
    assert one_by_one.keys() == at_once.keys()
    assert all(torch.equal(one_by_one[slot], at_once[slot]) for slot in at_once)


def test_a_spell_ends_with_who_runs_and_where():
    pending, one, other = PendingStates(), request([0, 1]), request([2, 3])
    for number, (requests, start) in enumerate([([one], 0), ([one, other], 1), ([other, one], 2), ([other, one], 5)]):
        step(pending, requests, start, number)
        assert len(pending) == number + 1
    one.blocks = list(one.blocks)  # preempted: its blocks may be others, even when they look the same
    step(pending, [other, one], 6, 9)
    assert len(pending) == 5


def test_what_has_gone_is_dropped_and_its_memory_used_again():
    pending, gone, shared, live = PendingStates(), request([0, 1]), request([2, 3]), request([4, 5])
    shared.namespace = b"tenant"
    step(pending, [gone], 0, 1)
    place = pending._queue[0].place
    gone.status = Status.FINISHED
    kept = step(pending, [shared], 0, 2)
    assert [entry.place for entry in pending._queue] == [place]
    shared.status = Status.FINISHED
    step(pending, [live], 0, 3)
    found = written(pending)
    assert torch.equal(found[2 * BLOCK], kept[0]), "others may have its blocks"
    assert set(found) == {2 * BLOCK, 4 * BLOCK}


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(4, 40))
def test_a_ring_never_gives_a_place_twice(seed, size):
    rng = random.Random(seed)
    ring, taken = Ring((torch.zeros(1, 3),), size), deque()
    for number in range(200):
        if taken and rng.random() < 0.5:
            taken.popleft()
            ring.give_back(taken[0][0] if taken else -1)
        count = rng.randint(1, 6)
        after = sum(taken[-1][:2]) if taken and rng.random() < 0.5 else -1
        place = ring.take(count, after)
        assert after < 0 or place in (-1, after)
        if place < 0:
            assert taken or count > size, "what is empty has room"
            continue
        state = torch.full((count, 3), float(number))
        cut = rng.randint(0, count - 1)
        ring.put(place, count, [(part,) for part in (state[:cut], state[cut:]) if len(part)])
        taken.append((place, count, state))
        for first, length, expected in taken:
            assert torch.equal(ring.views(first, length)[0], expected)


def test_what_does_not_fit_waits_in_its_own_tensors(monkeypatch):
    monkeypatch.setattr("outrider.spec_decode.pending_states.MAX_PENDING", 8)
    pending, one = PendingStates(), request(range(40))
    rows = [RowPlan(one, 0, 11, 0, True, 0)]
    states = (torch.randn(11, 6),)
    pending.add(rows, [one.blocks], states)
    step(pending, [one], 11, 1)
    first, second = pending._queue
    assert first.states is states
    assert isinstance(second, Spell)
