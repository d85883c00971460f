"""Slots of recurrent states: rings, snapshots, pins. A slot is never used twice, and none leaks."""

from __future__ import annotations

import random

import pytest

from outrider.platform.core.batch import RowPlan, RowStates
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.request import Drafts, Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.core.state_size import StateConfig, most_sequences, ring_size, state_config
from outrider.platform.engine.memory.block_pool import BlockPool
from outrider.platform.engine.memory.prefix_cache import PrefixCache
from outrider.platform.engine.memory.snapshot_pool import SnapshotPool
from outrider.platform.engine.memory.state_slots import StateSlots
from outrider.platform.engine.queue.gates import DraftLimits

BLOCK = 4


def sequence(name: str, length: int, namespace: bytes | None = b"n") -> Request:
    return Request(name, list(range(length)), length, SamplingParams(), seed_key=0, namespace=namespace)


class Cache:
    """A prefix cache over slots, with a sequence's rows planned and committed as the scheduler does."""

    def __init__(self, num_rings: int = 3, num_snapshots: int = 4, num_drafts: int = 2, every: int = 3) -> None:
        config = StateConfig(ring_size=ring_size(num_drafts), num_rings=num_rings, num_snapshots=num_snapshots)
        self.slots = StateSlots(config, BLOCK, every)
        self.pool = BlockPool(64)
        self.cache = PrefixCache(self.pool, BLOCK, states=self.slots)

    def start(self, request: Request) -> None:
        assert self.slots.admit(request) is None
        self.cache.start(request)

    def plan(self, request: Request, count: int, num_drafts: int = 0) -> RowPlan:
        row = RowPlan(request, request.num_computed_tokens, count, num_drafts, samples=True, max_new_drafts=0)
        assert self.pool.grow(request.blocks, -(-row.end // BLOCK))
        self.cache.plan([row])
        self.check(request)
        return row

    def commit(self, row: RowPlan, num_accepted: int = 0, deferred: int = 0) -> None:
        request = row.request
        request.num_computed_tokens = row.end - row.num_drafts + num_accepted - deferred
        while len(request.tokens) <= request.num_computed_tokens:
            request.tokens.append(7)
        self.cache.commit(row)
        self.check(request)

    def run(self, request: Request, count: int, num_drafts: int = 0, num_accepted: int = 0) -> RowStates:
        row = self.plan(request, count, num_drafts)
        self.commit(row, num_accepted)
        assert row.states is not None
        return row.states

    def end(self, request: Request) -> None:
        self.cache.finish(request)
        self.slots.forget(request)

    def check(self, *running: Request) -> None:
        self.slots.check_integrity()


def test_a_row_reads_the_state_written_by_the_row_before():
    cache, request = Cache(), sequence("a", 9, None)
    cache.start(request)
    written: dict[int, int] = {}
    lengths = {0: 0}
    rng = random.Random(0)
    for _ in range(200):
        k = rng.randint(0, 2)
        start = request.num_computed_tokens
        row = cache.plan(request, 9 if start == 0 else 1 + k, 0 if start == 0 else k)
        assert row.states.source(start) == (0 if start == 0 else written[start])
        found = dict(row.states.writes(row.start, row.end))
        assert len({0, *found.values()}) == 1 + len(found)
        kept = written[start] if start else 0
        assert kept not in found.values() or start == 0 or row.num_tokens > 3, "the state it starts with stays"
        written |= found
        lengths |= {slot: length for length, slot in found.items()}
        deferred = rng.random() < 0.2
        accepted = 0 if deferred else rng.randint(0, row.num_drafts)
        cache.commit(row, accepted, deferred)
        end = request.num_computed_tokens
        if end:
            assert lengths[written[end]] == end, "a state that the next row may need was overwritten"


def test_rings_are_for_as_many_as_run():
    cache = Cache(num_rings=2)
    first, second, third = (sequence(name, 5) for name in "abc")
    cache.start(first)
    cache.start(second)
    assert cache.slots.admit(third) == "capacity"
    assert cache.slots.admit(first) is None  # it has one
    cache.end(first)
    cache.start(third)
    rings = [cache.plan(request, 5).states.ring for request in (second, third)]
    assert not set(rings[0]) & set(rings[1])
    cache.slots.forget(sequence("never admitted", 3))
    cache.check()


def test_a_prefix_is_found_up_to_its_last_state():
    cache, first = Cache(num_snapshots=8), sequence("a", 30)
    cache.start(first)
    states = cache.run(first, 30)
    assert [length for length, _ in states.snapshots] == [12, 24, 28]
    cache.end(first)
    for length, expected in ((30, 28), (29, 28), (28, 24), (27, 24), (24, 12), (13, 12), (12, 0), (3, 0)):
        again = sequence(f"again {length}", length)
        cache.start(again)
        assert (again.num_computed_tokens, len(again.blocks)) == (expected, expected // BLOCK)
        row = cache.plan(again, length - expected)
        assert row.states.source(expected) == ({0: 0} | dict(states.snapshots))[expected]
        cache.commit(row)
        cache.end(again)
    other = sequence("other", 30, b"other tenant")
    cache.start(other)
    assert other.num_computed_tokens == 0
    cache.end(other)


def test_rejected_drafts_leave_no_state():
    cache, request = Cache(), sequence("a", 7)
    cache.start(request)
    cache.run(request, 7)
    assert len(cache.slots.snapshots) == 1
    states = cache.run(request, 3, num_drafts=2, num_accepted=0)  # the state of 8 counts, that of 9 does not
    assert [length for length, _ in states.snapshots] == [8]
    assert request.num_computed_tokens == 8
    assert len(cache.slots.snapshots) == 2
    while request.num_computed_tokens < 11:
        cache.run(request, 1)
    before = len(cache.slots.snapshots)
    cache.run(request, 3, num_drafts=2, num_accepted=2)
    assert len(cache.slots.snapshots) == before  # the state of 12 replaces that of 8
    row = cache.plan(request, 3, 2)
    assert [length for length, _ in row.states.snapshots] == [16]
    cache.commit(row, 0)
    again = sequence("again", 0)
    again.tokens, again.num_prompt_tokens = [*request.tokens, 1, 1], len(request.tokens) + 2
    cache.start(again)
    assert again.num_computed_tokens == 12
    cache.end(again)
    cache.end(request)


def test_a_state_stays_until_its_step_is_committed():
    cache, first = Cache(num_snapshots=1, every=100), sequence("a", 9)
    cache.start(first)
    cache.run(first, 9)
    cache.end(first)
    second, third = sequence("b", 9), sequence("c", 30, b"other")
    cache.start(second)
    assert second.num_computed_tokens == 8
    cache.start(third)
    assert cache.plan(third, 30).states.snapshots == []  # the only slot is pinned
    row = cache.plan(second, 1)
    cache.commit(row, deferred=1)
    assert cache.plan(second, 1).states.source(8) == row.states.source(8) != 0
    cache.cache.reset()
    cache.check()
    assert cache.plan(third, 30).states.snapshots == []
    cache.commit(row)
    assert len(cache.plan(third, 30).states.snapshots) == 1
    cache.end(second)
    cache.end(third)
    cache.check()


def test_a_preempted_sequence_gives_all_back():
    cache, request = Cache(), sequence("a", 30)
    cache.start(request)
    cache.plan(request, 30)
    cache.cache.take_back(request)
    cache.slots.release(request)
    cache.check()
    assert len(cache.slots.snapshots) == 0
    cache.start(request)
    cache.run(request, 30)
    cache.end(request)


def test_the_pool_evicts_the_least_recently_used():
    pool = SnapshotPool([5, 6])
    for digest in (b"a", b"b"):
        assert pool.publish(digest, pool.allocate())
    pinned = pool.pin(b"a")
    slot = pool.allocate()
    assert (b"b" in pool, b"a" in pool, slot == pinned) == (False, True, False)
    pool.check_integrity([slot], [pinned])
    assert pool.allocate() is None
    assert not pool.publish(b"a", slot)  # it is there
    pool.forget(b"a")
    pool.check_integrity([], [pinned])
    pool.unpin(pinned)
    pool.check_integrity([], [])
    with pytest.raises(AssertionError):
        pool.check_integrity([pool.allocate()], [5])


def test_random_use_keeps_integrity():
    rng, cache = random.Random(1), Cache(num_rings=5, num_snapshots=5)
    running: list[Request] = []
    for index in range(1500):
        if len(running) < 5 and rng.random() < 0.3:
            running.append(sequence(str(index), rng.randint(1, 40), rng.choice([b"x", b"y", None])))
            cache.start(running[-1])
        if running:
            request = rng.choice(running)
            left = len(request.tokens) - request.num_computed_tokens
            k = rng.randint(0, 2) if left == 1 else 0
            row = cache.plan(request, rng.randint(1, left) + k, k)
            if rng.random() < 0.1 or len(request.tokens) > 60:
                running.remove(request)
                cache.end(request)
            else:
                cache.commit(row, rng.randint(0, k))
        if rng.random() < 0.02:
            cache.cache.reset()
        cache.slots.check_integrity()
        cache.cache.check_integrity()
    for request in running:
        cache.end(request)
    cache.pool.check_integrity()


def test_grammars_draft_no_more_than_a_ring_holds():
    request = sequence("a", 5)
    request.drafts = Drafts([1] * 9, forced=True)
    assert DraftLimits(max_verified=2).room(request, 0, 0, 100) == 2
    assert DraftLimits(max_verified=0).room(request, 0, 0, 100) == 0
    assert DraftLimits().room(request, 0, 0, 100) == 9


def test_sizes_are_bounded_by_memory():
    from .test_graphs import FACTS

    facts = type(FACTS)(**{name: getattr(FACTS, name) for name in FACTS.__slots__} | {"state_bytes": 100})
    assert state_config(FACTS, 4, 3, 10) is None
    found = state_config(facts, 4, 3, 10_000)
    assert (found.ring_size, found.num_rings, found.num_snapshots) == (5, 5, 12)
    assert found.num_slots == 37
    with pytest.raises(InvalidRequestError, match="max_num_seqs 4") as caught:
        state_config(facts, 4, 3, 2500)
    assert caught.value.param == "max_num_seqs"
    assert most_sequences(64, FACTS, 3, 10) == 64
    assert most_sequences(64, facts, 3, 10_000) == 9
    assert most_sequences(64, facts, 3, 1) == 1
