"""Hidden states that wait: what comes out is what went in, wherever it lay meanwhile."""

import random
from collections import deque
from ctypes import memmove

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.platform.core.batch import RowPlan
from outrider.platform.core.request import Request, Status
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.drafters.base import DraftRow, RestedSteps, TargetOutput
from outrider.spec_decode.drafters.eagle.pending_states import PendingStates
from outrider.spec_decode.drafters.eagle.state_ring import Ring

BLOCK = 4


def request(blocks=()):
    return Request("r", [1], 1, SamplingParams(), seed_key=1, blocks=list(blocks))


def step(pending, requests, start, seed, num_tokens=1):
    """Each computes `num_tokens` tokens from `start` on; returns the states."""
    return bundle(pending, (requests, start, num_tokens, 1), seed=seed)[0]


def bundle(pending, *spells, seed=0, ring=None):
    """Of each spell its requests, where they start, their tokens of the first step, and the number of steps; returns
    the states of each step. `ring`: the target copies states there, if there is a place."""
    generator, rested, states = torch.Generator().manual_seed(seed), [], []
    for requests, start, num_tokens, num_steps in spells:
        rows = [RowPlan(one, start, num_tokens, 0, True, 0) for one in requests]
        for at in range(num_steps):
            count = len(rows) * (1 if at else num_tokens)
            states.append((torch.randn(count, 6, generator=generator),))
        rested.append(RestedSteps(rows, [one.blocks for one in requests], [TargetOutput()] * num_steps))
    kept = [each[0].clone() for each in states]
    pending.add_rested(rested, [placed(each, ring) for each in states])
    for each in states if ring is None else ():
        each[0].zero_()  # a step's memory is used again; what finds no room is kept, though
    return kept


def placed(states, ring):
    """A step's states, as they come to who keeps them."""
    place = -1 if ring is None else ring.take(len(states[0]))
    if place < 0:
        return -1, states
    for address, state in zip(ring.copies(place).values(), states, strict=True):
        memmove(address, state.data_ptr(), state.nbytes)
    return place, ()


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


def test_a_bundle_has_every_step_of_every_spell_in_its_place():
    pending, one, other, new = PendingStates(), request(range(6)), request(range(10, 16)), request(range(20, 26))
    states = bundle(pending, ([one, other], 0, 3, 8), ([other, new], 10, 1, 5), ([new], 15, 1, 1))
    assert len(pending) == 1
    assert pending.num_tokens == 6 + 14 + 10 + 1
    found = written(pending)
    assert len(found) == 31
    expected = {}
    starts = [(at, [one, other]) for at in (0, *range(3, 10))] + [(10 + at, [other, new]) for at in range(5)]
    for (start, requests), each in zip([*starts, (15, [new])], states, strict=True):
        for number, state in enumerate(each):
            count = len(each) // len(requests)
            position = start + number % count
            blocks = requests[number // count].blocks
            expected[blocks[position // BLOCK] * BLOCK + position % BLOCK] = state
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[slot], expected[slot]) for slot in found)


def test_of_a_bundle_those_are_left_out_that_have_gone():
    pending, gone, live = PendingStates(), request([0, 1]), request([4, 5])
    bundle(pending, ([gone, live], 0, 1, 4), ([gone], 4, 1, 2))
    gone.num_preemptions, gone.blocks = 1, [7, 8]  # it began again elsewhere
    assert set(written(pending)) == {4 * BLOCK + at for at in range(4)}


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


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(4, 40))
def test_a_ring_never_gives_a_place_twice(seed, size):
    rng = random.Random(seed)
    ring, taken = Ring([0], 3, torch.float32, size), deque()
    for number in range(200):
        if taken and rng.random() < 0.5:
            taken.popleft()
            ring.give_back(taken[0][0] if taken else -1)
        count = rng.randint(1, 6)
        place = ring.take(count)
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
    monkeypatch.setattr("outrider.spec_decode.drafters.eagle.state_ring.MAX_PENDING", 8)
    pending, one = PendingStates(), request(range(40))
    row = DraftRow(one, [1] * 12, 11, 0, 0, one.blocks, True)
    states = (torch.randn(11, 6),)
    pending.add([row], states)
    inside = step(pending, [one], 11, 1)
    (outside,) = bundle(pending, ([one], 12, 9, 1))
    assert [entry.place for entry in pending._queue] == [-1, 0, -1]
    assert pending._queue[0].states is states
    assert pending._queue[2].states[0].shape == (9, 6)
    found = written(pending)
    assert torch.equal(found[11], inside[0])
    assert len(found) == 21
    assert outside.shape == (9, 6)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(6, 60))
def test_what_the_target_copied_is_there_until_it_is_popped(seed, size):
    """Some steps find a place in the ring and some do not, in one bundle too; requests come and go meanwhile."""
    rng = random.Random(seed)
    ring = Ring([0], 6, torch.float32, size)
    pending, live, expected = PendingStates(ring), {}, {}
    for number in range(40):
        if len(live) < 3:
            live[request(range(200 * number, 200 * number + 200))] = 0
        spells = []
        for _ in range(rng.randint(1, 3)):
            start, some = max(live.values()), [one for one in live if rng.random() < 0.8] or list(live)[:1]
            spells.append((some, start, rng.randint(1, 3), rng.randint(1, 4)))
            for one in some:
                live[one] = start + spells[-1][2] + spells[-1][3] - 1
        states = iter(bundle(pending, *spells, seed=seed + number, ring=ring))
        for some, start, count, num_steps in spells:
            for at in range(num_steps):
                (first, width), state = (start, count) if at == 0 else (start + count + at - 1, 1), next(states)
                for index, one in enumerate(some):
                    for offset in range(width):
                        slot = one.blocks[(first + offset) // BLOCK] * BLOCK + (first + offset) % BLOCK
                        expected.setdefault(one, {})[slot] = state[index * width + offset]
        for one in [one for one in live if rng.random() < 0.2]:
            del live[one]
            expected.pop(one, None)
            one.status = Status.FINISHED
        if rng.random() < 0.2:
            found, wanted = written(pending), {}
            for of_one in expected.values():
                wanted |= of_one
                of_one.clear()
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[slot], wanted[slot]) for slot in found)
