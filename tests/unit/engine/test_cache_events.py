"""Events of the prefix cache: a consumer that has only them knows what the cache has."""

from __future__ import annotations

import random

import msgspec
import pytest

from outrider import LoRARequest, SamplingParams
from outrider.platform.core.adapter_names import engine_name
from outrider.platform.core.batch import RowResult, StepResult
from outrider.platform.core.config import SchedulerConfig
from outrider.platform.core.request import Request
from outrider.platform.engine.features import PrefixNamespaces
from outrider.platform.engine.memory.block_pool import BlockPool
from outrider.platform.engine.memory.cache_events import CacheEvents
from outrider.platform.engine.memory.host_tier import HostTier, SwapCost
from outrider.platform.engine.memory.prefix_cache import PrefixCache
from outrider.platform.engine.queue.gates import Gate
from outrider.platform.engine.queue.scheduler import Scheduler

from ...kv_consumer import AllBlocksCleared, BlockRemoved, BlockStored, CacheView, decode

BLOCK = 4
ADAPTERS = {"": None, "sql": None, "own": None, "activated": 6}
"""Adapters, and the tokens before an activated one applies; "own" is the tenant's."""


class Activation(Gate):
    """The part of the adapters' gate that decides where an adapter starts to apply."""

    def admit(self, request):
        if request.lora is not None:
            request.num_base_tokens = ADAPTERS[request.lora.name.rpartition("\x1f")[2]] or 0


class Engine:
    """A scheduler without a model: each row's next token is drawn from a few."""

    def __init__(self, num_blocks=24, num_host_blocks=0, seed=0):
        self.random, self.pool = random.Random(seed), BlockPool(num_blocks)
        self.host = HostTier(num_host_blocks, SwapCost(1, BLOCK, None)) if num_host_blocks else None
        self.cache = PrefixCache(self.pool, BLOCK, self.host)
        self.events, self.view, self.batches = CacheEvents(BLOCK), CacheView(), []
        self.cache.record(self.events)
        self.gates = Activation(), PrefixNamespaces(lambda r: r.lora.name.encode() if r.lora is not None else b"")
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=64, policy="fcfs")
        self.scheduler = Scheduler(config, self.pool, self.cache, self.gates)

    def request(self, tokens, adapter="", tenant="", salt="", num_shared=0, max_tokens=8, name="probe"):
        lora = None
        if adapter:
            lora = LoRARequest(engine_name(tenant, adapter) if adapter == "own" else adapter, path="/adapter")
        return Request(
            name,
            list(tokens),
            len(tokens),
            SamplingParams(max_tokens=max_tokens, temperature=0),
            seed_key=0,
            lora=lora,
            tenant=tenant,
            cache_salt=salt,
            sharing=f"{tenant}\0{salt}".encode(),
            num_shared_tokens=0 if salt else num_shared,
        )

    def step(self):
        plan = self.scheduler.schedule()
        draw = self.random.randrange
        results = [RowResult([draw(3)] if row.samples else []) for row in plan.rows]
        self.scheduler.commit(plan, StepResult(results))
        self.flush()

    def flush(self):
        """Send what was recorded to the consumer."""
        if events := self.events.take():
            self.batches.append(decode(msgspec.msgpack.encode((0.0, events, 0))))
            self.view.apply(self.batches[-1])

    def check(self, tokens, **fields):
        """The consumer must expect of a prompt what the cache finds, and know as many blocks as there are."""
        probe = self.request(tokens, **fields)
        for gate in self.gates:
            gate.admit(probe)
        match = self.cache.match(probe)
        self.pool.release(match.blocks)
        keys = self.keys(probe)[: (len(tokens) - 1) // BLOCK]
        assert self.view.num_found(keys) == len(match.blocks), tokens

    def keys(self, request):
        """Keys of the blocks of a prompt, from what its HTTP request says."""
        found, adapter = [], request.lora and request.lora.name.rpartition("\x1f")[2]
        for index in range(len(request.tokens) // BLOCK):
            applies = adapter if (index + 1) * BLOCK > request.num_base_tokens else None
            extra = tuple(key for key in (applies, request.cache_salt if index == 0 else "") if key)
            is_shared = (index + 1) * BLOCK <= request.num_shared_tokens and applies != "own"
            tenant = "" if is_shared else request.tenant
            tokens = tuple(request.tokens[index * BLOCK : (index + 1) * BLOCK])
            found.append((tokens, applies, extra or None, tenant))
        return found

    def check_sizes(self):
        assert len(self.view.held["GPU"]) == sum(map(self.pool.keeps, range(self.pool.num_blocks)))
        if self.host is not None:
            assert len(self.view.held["CPU"]) == self.host.num_bytes


@pytest.mark.slow
@pytest.mark.parametrize("num_host_blocks", [0, 10])
def test_a_consumer_knows_the_cache_after_each_of_10000_steps(num_host_blocks):
    engine = Engine(num_host_blocks=num_host_blocks)
    draw, seen, running = engine.random, [], []
    for count in range(10_000 if not num_host_blocks else 3_000):
        if len(running) < 6 and draw.random() < 0.3:
            tokens = list(draw.choice(seen)[0]) if seen and draw.random() < 0.7 else []
            tokens = tokens[: draw.randrange(30)] + [draw.randrange(3) for _ in range(draw.randrange(1, 14))]
            salt = draw.choice(("", "", "pepper"))
            fields = {"adapter": draw.choice([*ADAPTERS]), "tenant": draw.choice(("acme", "bolt")), "salt": salt}
            fields["num_shared"] = 0 if salt or fields["adapter"] == "own" else draw.choice((0, 0, 6, 8))
            seen = [*seen[-30:], (tokens, fields)]
            name = f"r{count}"
            running.append(name)
            engine.scheduler.add(engine.request(tokens, name=name, max_tokens=draw.randrange(1, 20), **fields))
        chance = draw.random()
        if chance < 0.01 and running:
            engine.scheduler.abort([draw.choice(running)])
        elif chance < 0.015:
            engine.scheduler.abort(running if chance < 0.012 else [])
            engine.cache.reset()
        elif chance < 0.02:  # new weights, and a pause that keeps requests
            engine.scheduler.forget_kv() if chance < 0.0175 else engine.scheduler.drop_kv()
            engine.flush()
            assert not any(engine.view.held.values())
        engine.step()
        running = [name for name in running if name in engine.scheduler]
        engine.check_sizes()
        for tokens, fields in draw.sample(seen, min(len(seen), 3)):
            engine.check(tokens, **fields)
    kinds = {type(event): 0 for batch in engine.batches for event in batch.events}
    assert set(kinds) == {BlockStored, BlockRemoved, AllBlocksCleared}
    assert engine.scheduler.num_preemptions > 20
    assert engine.cache.num_hits > 300
    if num_host_blocks:
        assert engine.host.num_hits > 20


def run(engine, tokens, **fields):
    engine.scheduler.add(engine.request(tokens, name="r", max_tokens=1, **fields))
    engine.step()


def test_a_block_has_its_parent_tokens_adapter_and_salt():
    engine = Engine()
    run(engine, range(9), adapter="sql", tenant="acme", salt="pepper")
    run(engine, [*range(8), 7, 7, 7, 7], adapter="sql", tenant="acme", salt="pepper")
    (first,), (second,) = (batch.events for batch in engine.batches)
    assert (first.parent_block_hash, second.parent_block_hash) == (None, first.block_hashes[1])
    assert (first.token_ids, second.token_ids) == ([*range(8)], [7] * 4)
    assert (first.lora_name, first.tenant, first.medium, first.block_size) == ("sql", "acme", "GPU", BLOCK)
    assert (first.extra_keys, second.extra_keys) == ([("sql", "pepper"), ("sql",)], [("sql",)])


def test_blocks_before_an_activation_are_the_base_models():
    engine = Engine()
    run(engine, range(13), adapter="activated")
    found = [(event.lora_name, len(event.block_hashes)) for event in engine.batches[0].events]
    assert found == [(None, 1), ("activated", 2)]


def test_shared_blocks_have_no_tenant_unless_the_adapter_is_the_tenants_own():
    engine = Engine()
    run(engine, range(13), tenant="acme", num_shared=8)
    assert [(event.tenant, len(event.block_hashes)) for event in engine.batches[0].events] == [("", 2), ("acme", 1)]
    run(engine, range(13), tenant="acme", num_shared=8, adapter="own")
    found = [(event.tenant, event.lora_name, len(event.block_hashes)) for event in engine.batches[1].events]
    assert found == [("acme", "own", 2), ("acme", "own", 1)]


def test_a_block_that_moves_to_the_host_and_back():
    engine = Engine(num_blocks=4, num_host_blocks=8)
    run(engine, range(13))
    names = engine.batches[0].events[0].block_hashes
    run(engine, range(20, 35))
    assert engine.view.held["CPU"].keys() == set(names)
    run(engine, range(13))
    assert engine.view.held["GPU"].keys() >= set(names)
    assert engine.view.held["CPU"].keys() >= set(names)


def test_a_reset_that_leaves_blocks_in_use_names_the_others():
    engine = Engine()
    engine.scheduler.add(engine.request(range(9), name="runs"))
    engine.step()
    run(engine, range(20, 29))
    assert not engine.cache.reset()
    engine.flush()
    (removed,) = engine.batches[-1].events
    assert isinstance(removed, BlockRemoved)
    assert len(removed.block_hashes) == 2
    engine.scheduler.abort(["runs"])
    assert engine.cache.reset()
    engine.flush()
    assert engine.batches[-1].events == [AllBlocksCleared()]


def test_token_ids_of_numpy_are_integers():
    import numpy as np

    engine = Engine()
    run(engine, np.arange(9))
    assert engine.batches[0].events[0].token_ids == [*range(8)]
