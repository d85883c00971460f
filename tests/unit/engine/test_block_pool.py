"""The block pool under generated sequences of calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.platform.engine.memory.block_pool import BlockPool


def test_allocates_all_or_nothing():
    pool = BlockPool(3)
    assert len(pool.allocate(2)) == 2
    assert pool.allocate(2) is None
    assert pool.num_free == 1


def test_free_blocks_are_reused_least_recently_first_and_tails_before_heads():
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.release(second)
    pool.release(first)
    assert pool.allocate(4) == [*reversed(second), *reversed(first)]


def test_blocks_without_content_are_reused_first_last_released_first():
    pool, kept = BlockPool(6), {0, 1}
    pool.keeps = kept.__contains__
    blocks, others = pool.allocate(4), pool.allocate(1)
    pool.release(others)
    pool.release(blocks)
    assert pool.allocate(6) == [2, 3, *others, 5, 1, 0]


def test_a_revived_block_is_not_handed_out():
    pool = BlockPool(2)
    (block, other) = pool.allocate(2)
    pool.release([block])
    pool.acquire([block])
    assert pool.num_free == 0
    pool.check_integrity([[block, other]])


def test_reuse_is_announced_once_for_each_block_handed_out():
    pool, seen = BlockPool(2), []
    pool.on_reuse = seen.append
    pool.release(pool.allocate(2))
    pool.allocate(1)
    assert len(seen) == 3


def test_double_release_is_an_assertion_error():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(blocks)


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 5)), max_size=60))
def test_counts_always_match_the_owners(calls):
    pool, owners = BlockPool(8), []
    for call, number in calls:
        if call == "allocate":
            blocks = pool.allocate(number)
            assert (blocks is None) == (number > 8 - len({b for o in owners for b in o}))
            if blocks is not None:
                owners.append(blocks)
        elif owners and call == "share":
            blocks = list(owners[number % len(owners)])
            pool.acquire(blocks)
            owners.append(blocks)
        elif owners:
            pool.release(owners.pop(number % len(owners)))
        pool.check_integrity(owners)
