"""The prefix cache: sharing of blocks, and their eviction."""

from __future__ import annotations

from outrider import SamplingParams
from outrider.platform.core.request import Request
from outrider.platform.engine.memory.block_pool import BlockPool
from outrider.platform.engine.memory.prefix_cache import PrefixCache

BLOCK = 4


def request(tokens, namespace=b"n", **params):
    return Request("r", list(tokens), len(tokens), SamplingParams(**params), seed_key=0, namespace=namespace)


def computed(cache, tokens, namespace=b"n", drafted=0):
    """A request whose tokens have all been computed and published; it still holds its blocks."""
    item = request(tokens, namespace)
    item.blocks = cache.pool.allocate(-(-len(tokens) // BLOCK))
    item.num_computed_tokens, item.num_draft_computed = len(tokens), drafted
    cache.publish(item)
    return item


def make(num_blocks=8):
    pool = BlockPool(num_blocks)
    return pool, PrefixCache(pool, BLOCK)


def test_full_blocks_of_an_equal_prefix_are_found_and_referenced():
    pool, cache = make()
    owner = computed(cache, range(10))
    match = cache.match(request([*range(8), 99, 98]))
    assert match.blocks == owner.blocks[:2]
    assert match.num_tokens == 8
    pool.check_integrity([owner.blocks, match.blocks])


def test_one_token_is_always_left_to_compute():
    _, cache = make()
    computed(cache, range(8))
    assert cache.match(request(range(8))).num_tokens == 4


def test_namespaces_do_not_share():
    _, cache = make()
    computed(cache, range(10), b"tenant a")
    assert cache.match(request(range(10), b"tenant b")).blocks == []


def test_no_namespace_neither_finds_nor_publishes():
    _, cache = make()
    computed(cache, range(10), None)
    computed(cache, range(10))
    assert cache.match(request(range(10), None)).blocks == []


def test_same_tokens_after_another_prefix_are_another_block():
    _, cache = make()
    computed(cache, [0, 0, 0, 0, 5, 6, 7, 8, 9])
    assert cache.match(request([1, 1, 1, 1, 5, 6, 7, 8, 9])).blocks == []


def test_prompt_logprobs_need_every_position_computed():
    _, cache = make()
    computed(cache, range(10))
    assert cache.match(request(range(10), prompt_logprobs=1)).blocks == []


def test_a_freed_block_is_found_until_it_is_reused():
    pool, cache = make(3)
    owner = computed(cache, range(10))
    pool.release(owner.blocks)
    match = cache.match(request(range(10)))
    assert match.num_tokens == 8
    pool.release(match.blocks)
    pool.allocate(3)
    assert cache.match(request(range(10))).blocks == []
    cache.check_integrity()


def test_a_reset_drops_unused_blocks():
    pool, cache = make()
    used, free = computed(cache, range(8)), computed(cache, range(20, 28), drafted=8)
    pool.release(free.blocks)
    assert not cache.reset()
    assert cache.match(request(range(20, 29))).blocks == []
    assert cache.match(request(range(9))).blocks == used.blocks
    pool.release(used.blocks * 2)
    assert cache.reset()
    assert cache.match(request(range(9))).blocks == []
    cache.check_integrity()
    pool.check_integrity()


def test_draft_layers_of_a_prefix_count_only_if_computed():
    _, cache = make()
    computed(cache, range(13), drafted=5)
    match = cache.match(request(range(13)))
    assert (match.num_tokens, match.num_draft_tokens) == (12, 4)


def test_a_drafter_that_catches_up_on_shared_blocks_makes_them_ready():
    _, cache = make()
    owner = computed(cache, range(13), drafted=0)
    assert cache.match(request(range(13))).num_draft_tokens == 0
    owner.num_draft_computed = 13
    cache.publish(owner)
    assert cache.match(request(range(13))).num_draft_tokens == 12


def test_rejected_drafts_never_enter():
    _, cache = make()
    item = request(range(7))
    item.blocks = cache.pool.allocate(3)
    item.num_computed_tokens = 7  # positions 7.. hold KV of rejected drafts
    cache.publish(item)
    assert item.num_published == 1
