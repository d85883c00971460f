"""KV blocks in host memory: sequences continue from them, no tenant finds another's, and nothing leaks."""

from __future__ import annotations

import random

import pytest
import torch

from outrider import SamplingParams
from outrider.platform.core.batch import Move, RowPlan, StepPlan
from outrider.platform.core.config import EngineArgs, Hardware, resolve
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.request import Request
from outrider.platform.engine.memory.block_pool import BlockPool
from outrider.platform.engine.memory.host_store import HostStore
from outrider.platform.engine.memory.host_tier import HostTier, SwapCost, swap_is_cheaper
from outrider.platform.engine.memory.prefix_cache import PrefixCache
from outrider.platform.engine.queue.scheduler import DraftLimits

from ..core.test_config import CPU, FACTS
from .simulated_device import BLOCK, Device, compute
from .test_scheduler import expected, finish, make, request


def prefix(tokens, namespace=b"n"):
    return Request("r", list(tokens), len(tokens), SamplingParams(), seed_key=0, namespace=namespace)


class Cache:
    """A prefix cache of four blocks over a host with some slots."""

    def __init__(self, num_slots=8, **options):
        self.pool, self.host = BlockPool(4), HostTier(num_slots, SwapCost(100, BLOCK, None))
        self.cache = PrefixCache(self.pool, BLOCK, self.host, **options)

    def compute(self, tokens, namespace=b"n", drafted=0):
        """Compute a prefix, and free it."""
        item = prefix(tokens, namespace)
        self.cache.start(item)
        self.pool.grow(item.blocks, -(-len(tokens) // BLOCK))
        item.num_computed_tokens, item.num_draft_computed = len(tokens), drafted
        self.cache.publish(item)
        self.cache.take_back(item)

    def found(self, tokens, namespace=b"n"):
        """(tokens, draft tokens) that a new sequence need not compute."""
        item = prefix(tokens, namespace)
        self.cache.start(item)
        self.cache.bring_back(item)
        self.pool.check_integrity([item.blocks])
        self.cache.check_integrity()
        found = item.num_computed_tokens, item.num_draft_computed
        self.cache.take_back(item)
        return found


def test_an_evicted_prefix_is_swapped_in_with_its_draft_layers():
    cache = Cache()
    cache.compute(range(16), drafted=9)
    cache.compute(range(100, 116))
    assert cache.cache.match(prefix(range(17))).blocks == []
    assert cache.found(range(17)) == (16, 8)
    assert cache.host.num_hits == 4


def test_a_prefix_partly_on_the_device_comes_back():
    cache = Cache()
    cache.compute(range(16))
    for block in (1, 0, 2):  # of both kinds, in any order
        item = prefix(range(16))
        cache.cache.start(item)
        cache.cache.bring_back(item)
        gone = item.blocks[block]
        cache.cache.take_back(item)
        others = [b for b in range(4) if b != gone]
        cache.pool.acquire(others)
        cache.pool.release(cache.pool.allocate(1))
        cache.pool.release(others)
        assert cache.found(range(17)) == (16, 0)


@pytest.mark.parametrize("namespace", [b"tenant b", b"tenant a, adapter 2", None])
def test_no_request_finds_blocks_of_another_tenant_or_adapter(namespace):
    cache = Cache()
    cache.compute(range(16), b"tenant a")
    cache.compute(range(100, 116), b"tenant a")
    assert cache.found(range(17), namespace) == (0, 0)
    assert cache.found(range(17), b"tenant a") == (16, 0)


def test_the_host_tier_is_lru_within_its_bound():
    cache = Cache(num_slots=4)
    for start in (0, 100, 200, 300):
        cache.compute(range(start, start + 8))
    assert cache.host.num_bytes == 400
    cache.found(range(9))  # used again
    cache.compute(range(400, 416))
    assert cache.host.num_bytes == 400
    assert cache.found(range(9)) == (8, 0)
    assert cache.found(range(100, 109)) == (0, 0)


def test_without_a_prefix_cache_a_finished_request_leaves_nothing_behind():
    cache = Cache(keeps_finished=False)
    first, sibling = prefix(range(12)), prefix(range(12))
    for item in (first, sibling):
        cache.cache.start(item)
        cache.pool.grow(item.blocks, 3)
        item.num_computed_tokens = 12
        cache.cache.publish(item)
    cache.cache.finish(first, has_siblings=True)
    match = cache.cache.match(prefix(range(12)))
    assert match.num_tokens == 8  # a sibling still runs with them
    cache.pool.release(match.blocks)
    cache.cache.take_back(sibling)  # preempted: its blocks leave the device
    cache.compute(range(100, 116))
    assert cache.host.num_bytes == 300
    cache.cache.finish(sibling)
    assert cache.host.num_bytes == 0
    assert cache.found(range(12)) == (0, 0)


def test_blocks_of_a_finished_request_are_used_again_before_those_of_a_preempted_one():
    cache = Cache(keeps_finished=False)
    cache.compute(range(8))  # preempted
    item = prefix(range(100, 108))
    cache.cache.start(item)
    cache.pool.grow(item.blocks, 2)
    item.num_computed_tokens = 8
    cache.cache.publish(item)
    cache.cache.finish(item)
    assert cache.pool.allocate(2) is not None
    assert cache.host.num_bytes == 0


def test_a_reset_forgets_the_hosts_blocks_too():
    cache = Cache()
    cache.compute(range(16))
    cache.compute(range(100, 116))
    assert cache.cache.reset()
    assert (cache.found(range(17)), cache.host.num_bytes, cache.cache.moves()) == ((0, 0), 0, ())


@pytest.mark.slow
def test_nothing_leaks_and_no_text_changes_in_a_thousand_random_preemptions():
    draw, preemptions, hits, stopped = random.Random(5), 0, 0, 0
    while preemptions < 1000:
        limits = draw.choice([DraftLimits(), DraftLimits(3, extra_slots=True)])
        blocks = draw.randrange(12, 16)
        scheduler = make(blocks, limits, num_host_blocks=draw.choice([2, 10, 60]), max_num_batched_tokens=32)
        device, want = Device(blocks, limits, seed=draw.randrange(99)), {}
        for name in map(str, range(8)):
            prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 20))]
            want[name] = expected(prompt, 24)
            scheduler.add(request(name, prompt, 24, namespace=draw.choice([b"a", b"b"])))
        outputs = {name: [] for name in want}
        for _ in range(draw.randrange(60)):
            plan = scheduler.schedule()
            if draw.random() < 0.02:  # the step fails: neither its copies nor its rows are there
                scheduler.abandon()
                stopped += 1
            else:
                for delta in compute(scheduler, device, plan):
                    outputs[delta.request_id] += delta.token_ids
            scheduler.check_integrity()
        victim = draw.choice(list(want))
        scheduler.abort([victim])
        rest, errors = finish(scheduler, device)
        for name, tokens in rest.items():
            outputs[name] += tokens
        assert not errors
        assert all(outputs[name] == want[name] for name in want if name != victim)
        preemptions += scheduler.num_preemptions
        hits += scheduler.prefix_cache.host.num_hits
    assert hits > 1000
    assert stopped > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("width", [8, 3])
def test_copies_bring_every_layer_of_a_block_back_in_any_layout(dtype, width):
    from outrider.models.batch import LayerKV

    def layer(heads):
        return torch.randn(heads, 6, BLOCK, width).to(dtype)

    latent = layer(1)
    kv = [LayerKV(layer(2), layer(2)), LayerKV(latent, latent)]
    store = HostStore(kv, 3)
    assert store.block_bytes == 5 * BLOCK * width * dtype.itemsize
    before = [part.float().clone() for part in (kv[0].k, kv[0].v, latent)]
    store.run([Move(5, 0, True), Move(1, 2, True), Move(4, 2, True), Move(0, 2, False), Move(3, 2, False)])
    assert store.bytes_per_second() > 0
    for old, new in zip(before, (kv[0].k, kv[0].v, latent), strict=True):
        assert [torch.equal(new[:, a].float(), old[:, b]) for a, b in ((0, 4), (3, 4), (1, 1), (5, 5))] == [True] * 4
    store.release_memory()


def test_blocks_are_swapped_if_faster_than_recompute():
    assert swap_is_cheaper(1000, 1e6, 16, 7000)
    assert not swap_is_cheaper(1000, 1e6, 16, 9000)
    cost = SwapCost(1000, 16, 1e6)
    assert cost.is_cheaper_than_recompute(), "nothing was measured"
    rows = [RowPlan(prefix(range(90)), 0, 80, 0, False, 0), RowPlan(prefix(range(9)), 8, 1, 0, True, 0)]
    cost.observe(StepPlan(rows[1:]), 9.0)  # decodes are not measured
    cost.observe(StepPlan(rows), 81 / 9000)
    assert not cost.is_cheaper_than_recompute()
    for _ in range(20):
        cost.observe(StepPlan(rows), 81 / 7000)
    assert cost.is_cheaper_than_recompute()
    tier = HostTier(4, SwapCost(1000, 16, 1.0))
    tier.cost.observe(StepPlan(rows), 0.001)
    tier.keep(b"x", 0, draft_ready=False)
    assert (b"x" in tier, tier.moves()) == (False, ())


@pytest.mark.parametrize("options", [{"swap_space": -1.0}, {"swap_space": 1e-5}, {"swap_space": 0.8}])
def test_an_impossible_swap_space_is_refused(options):
    machine = Hardware(device="cpu", free_memory_bytes=1 << 30, total_memory_bytes=1 << 30, host_memory_bytes=1 << 30)
    with pytest.raises(InvalidRequestError) as refused:
        resolve(EngineArgs(**options), FACTS, machine)
    assert refused.value.param == "swap_space"


def test_the_hosts_blocks_are_those_that_swap_space_holds():
    assert resolve(EngineArgs(swap_space=0.5), FACTS, CPU).cache.num_host_blocks == (1 << 29) // (16 * 1024)
    assert resolve(EngineArgs(swap_space=0.5, preemption_mode="recompute"), FACTS, CPU).cache.num_host_blocks == 0
    assert resolve(EngineArgs(), FACTS, CPU).cache.num_host_blocks == 0
