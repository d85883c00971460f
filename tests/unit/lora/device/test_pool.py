"""The row allocator: no row is lost, shared or taken from a running request, in any order of calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.lora.device.pool import RowPool

KEYS = [bytes([i]) for i in range(6)]


def own_rows(allocation):
    return set(allocation.rows) | set(allocation.draft.rows if allocation.draft else ())


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of allocate, retain, release, pin and evict, against a plain dictionary."""

    def __init__(self):
        super().__init__()
        self.pool = RowPool(16, 3, row_bytes=100)
        self.users: dict[bytes, int] = {}
        self.pinned: set[bytes] = set()
        self.writing: list = []  # allocations, of which the owner may be gone

    @rule(
        key=st.sampled_from(KEYS),
        rows=st.integers(1, 16),
        num_bytes=st.sampled_from([0, 0, 1, 100, 750]),
        drafts=st.sampled_from([0, 0, 1, 5]),
    )
    def allocate(self, key, rows, num_bytes, drafts):
        if key in self.users:
            with pytest.raises(ValueError, match="already"):
                self.pool.allocate(key, rows)
            return
        before = {other: self.pool.allocation(other) for other in self.users}
        drafts = min(drafts, rows - 1)
        allocation = self.pool.allocate(key, rows, num_bytes=num_bytes, num_draft_rows=drafts)
        size = rows + {0: 0, 1: 1, 100: 1, 750: 8}[num_bytes]
        kept = {o for o in before if self.users[o] or o in self.pinned or before[o] in self.writing}
        taken = {before[other] for other in kept} | set(self.writing)
        room = 16 - sum(allocation.size for allocation in taken)
        assert (allocation is not None) == (size <= room)
        for other in list(before):
            if other in self.pool:
                assert self.pool.allocation(other) is before[other]
            else:
                assert allocation is not None, "evicted for nothing"
                assert other not in kept
                self.users.pop(other)
        if allocation is not None:
            assert (len(allocation.rows), allocation.size) == (rows - drafts, size)
            assert len(own_rows(allocation)) == rows
            assert not any(own_rows(allocation) & own_rows(other) for other in self.writing)
            self.users[key] = 0
            self.pool.begin_write(allocation)
            self.writing.append(allocation)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def end_write(self, data):
        allocation = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        self.pool.end_write(allocation)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def retain(self, data):
        key = data.draw(st.sampled_from(sorted(self.users)))
        running = sum(count > 0 for count in self.users.values())
        if self.pool.allocation(key) in self.writing:
            with pytest.raises(ValueError, match="not written"):
                self.pool.retain(key)
        elif running == 3 and not self.users[key]:
            with pytest.raises(ValueError, match="3 adapters run"):
                self.pool.retain(key)
        else:
            self.pool.retain(key)
            self.users[key] += 1

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data())
    def release(self, data):
        key = data.draw(st.sampled_from(sorted(k for k, n in self.users.items() if n)))
        self.pool.release(key)
        self.users[key] -= 1

    @precondition(lambda self: self.users)
    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data, pinned):
        key = data.draw(st.sampled_from(sorted(self.users)))
        self.pool.set_pinned(key, pinned)
        (self.pinned.add if pinned else self.pinned.discard)(key)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def evict(self, data):
        key = data.draw(st.sampled_from(sorted(self.users)))
        if self.users[key]:
            with pytest.raises(ValueError, match="running"):
                self.pool.evict(key)
            return
        self.pool.evict(key)
        del self.users[key]
        self.pinned.discard(key)

    @invariant()
    def agrees(self):
        self.pool.check_integrity()
        self.pinned &= set(self.users)
        assert set(self.pool.digests()) == set(self.users)
        for key, count in self.users.items():
            assert self.pool.num_users(key) == count
            ready = self.pool.allocation(key) not in self.writing
            assert self.pool.is_ready(key) == ready
            assert self.pool.is_evictable(key) == (not count and key not in self.pinned and ready)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, database=None)
TestPoolMachine = PoolMachine.TestCase


def test_the_least_recently_used_is_evicted():
    pool = RowPool(8, 8)
    for key in (b"a", b"b"):
        pool.allocate(key, 4)
    pool.retain(b"a")
    pool.release(b"a")
    pool.allocate(b"c", 4)
    assert pool.digests() == [b"a", b"c"]


def test_running_adapters_are_limited_and_resident_ones_are_not():
    pool = RowPool(100, 2)
    for key in (b"a", b"b", b"c"):
        pool.allocate(key, 1)
    pool.retain(b"a")
    pool.retain(b"b")
    pool.retain(b"b")
    assert pool.digests() == [b"c", b"a", b"b"]
    assert [pool.can_run(key) for key in (b"a", b"b", b"c")] == [True, True, False]
    pool.release(b"a")
    assert pool.can_run(b"c")


def test_victims_go_in_the_order_given():
    pool = RowPool(8, 8)
    for key in (b"a", b"b", b"c", b"d"):
        pool.allocate(key, 2)
    assert pool.allocate(b"e", 3, [b"c"]) is None
    assert pool.allocate(b"e", 3, [b"c", b"b", b"a"]) is not None
    assert pool.digests() == [b"a", b"d", b"e"]


def test_thousands_of_rows_are_no_burden():
    """Every allocation here looks at all rows; with a list of them it would take minutes."""
    pool = RowPool(100_000, 8)
    for index in range(2000):
        allocation = pool.allocate(index.to_bytes(2, "big"), 50)
        assert allocation.rows == tuple(range(50 * index, 50 * index + 50))
        assert allocation.index.tolist() == list(allocation.rows)
    pool.check_integrity()


def test_rows_are_adjacent_if_a_gap_allows_it():
    pool = RowPool(12, 8)
    for key in (b"a", b"b", b"c"):
        pool.allocate(key, 3)
    pool.evict(b"b")
    assert pool.allocate(b"d", 2).rows == (3, 4), "the smallest gap that is large enough"
    assert pool.allocate(b"e", 4).rows == (5, 9, 10, 11), "scattered rather than refused"


def test_a_lost_row_is_noticed():
    pool = RowPool(4, 2)
    pool.allocate(b"a", 2)
    pool._is_free[3] = False
    with pytest.raises(AssertionError, match="lost"):
        pool.check_integrity()
