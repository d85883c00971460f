"""Blocks that all tenants share, without a tenant's own text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.platform.core.request import Request
from outrider.platform.engine.memory.block_pool import BlockPool
from outrider.platform.engine.memory.prefix_cache import PrefixCache

BLOCK = 4
DECLARED = list(range(10))
"""Two whole blocks, and a half that is not shared."""


def request(tokens, tenant=b"a", num_shared=8, adapter=b""):
    return Request(
        "r", list(tokens), len(tokens), SamplingParams(), seed_key=0, namespace=tenant + adapter,
        shared_namespace=adapter, num_shared_tokens=num_shared,
    )  # fmt: skip


class Cache:
    def __init__(self, num_blocks=64):
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, BLOCK)

    def compute(self, *arguments, **options):
        item = request(*arguments, **options)
        item.blocks = self.pool.allocate(-(-len(item.tokens) // BLOCK))
        item.num_computed_tokens = len(item.tokens)
        self.cache.publish(item)
        self.cache.check_integrity()

    def found(self, *arguments, **options):
        return self.cache.match(request(*arguments, **options)).num_tokens


def test_another_tenant_finds_the_shared_blocks_and_no_more():
    cache = Cache()
    cache.compute([*DECLARED, *range(100, 120)])
    prompt = [*DECLARED, *range(100, 120)]
    assert cache.found(prompt) == 28, "its own text"
    assert cache.found(prompt, b"b") == 8
    assert cache.found(prompt, b"b", num_shared=4) == 4
    assert cache.found(prompt, b"b", num_shared=0) == 0


def test_without_the_declaration_the_shared_blocks_are_not_there():
    """Conversely: blocks computed before a declaration do not become shared by it."""
    cache = Cache()
    cache.compute(DECLARED, num_shared=0)
    assert cache.found(DECLARED, num_shared=8) == 0
    assert cache.found(DECLARED, b"b", num_shared=8) == 0
    cache.compute(DECLARED, num_shared=8)
    assert cache.found(DECLARED, b"b", num_shared=8) == 8


def test_the_block_that_ends_outside_is_the_tenants_own():
    cache = Cache()
    cache.compute([*range(12), 50], num_shared=11)
    assert cache.found([*range(12), 50], b"b", num_shared=11) == 8


def test_adapters_do_not_share():
    cache = Cache()
    cache.compute(DECLARED, adapter=b"digest 1")
    assert cache.found(DECLARED, b"b", adapter=b"digest 1") == 8
    assert cache.found(DECLARED, b"b", adapter=b"digest 2") == 0
    assert cache.found(DECLARED, b"b") == 0


def test_own_text_after_a_shared_prefix_depends_on_that_prefix():
    cache = Cache()
    cache.compute([*range(8), *range(50, 60)])
    assert cache.found([*range(20, 28), *range(50, 60)]) == 0
    other = [*range(4), *range(30, 34), *range(50, 60)]
    cache.compute(other)
    assert cache.found([*range(8), *range(50, 60)], b"b") == 8


NAMESPACES = st.binary(max_size=3) | st.sampled_from([b"own root", b"shared root", b"block"])
REQUESTS = st.tuples(
    NAMESPACES, NAMESPACES, st.integers(0, 3), st.lists(st.integers(0, 1), min_size=BLOCK, max_size=4 * BLOCK)
)


@pytest.mark.slow
@given(st.lists(REQUESTS, min_size=2, max_size=12))
def test_equal_hashes_mean_equal_prefixes_of_equal_namespaces(requests):
    """For any tenants, digests and tokens: a block's hash covers all that its content and its readers depend on."""
    meaning: dict[bytes, tuple] = {}
    for tenant, adapter, num_shared, tokens in requests:
        cache = PrefixCache(BlockPool(1), BLOCK)
        item = request(tokens, num_shared=num_shared * BLOCK)
        item.namespace, item.shared_namespace = b"%d:" % len(tenant) + tenant + adapter, adapter
        cache._extend_hashes(item, len(tokens) // BLOCK)
        for index, digest in enumerate(item.block_hashes):
            shared = min(index + 1, num_shared)
            readers = (adapter,) if index < num_shared else (adapter, tenant)
            what = (readers, shared, tuple(tokens[: (index + 1) * BLOCK]))
            assert meaning.setdefault(digest, what) == what
