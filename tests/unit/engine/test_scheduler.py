"""The scheduler with a simulated device that records the content of every KV slot."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.platform.core.config import SchedulerConfig
from outrider.platform.core.errors import AdapterError
from outrider.platform.core.request import Request
from outrider.platform.engine.memory.block_pool import BlockPool
from outrider.platform.engine.memory.host_tier import HostTier, SwapCost
from outrider.platform.engine.memory.prefix_cache import PrefixCache
from outrider.platform.engine.queue.scheduler import DraftLimits, Scheduler

from .simulated_device import BLOCK, NO_SPECULATION, Device, compute, next_token


class TwoSeats:
    """A gate with two seats by name, like adapters with room for two."""

    def __init__(self):
        self.seated = {}

    def admit(self, request):
        name = request.tenant
        if name == "broken":
            raise AdapterError("cannot be served", param="lora_path")
        if name and name not in self.seated and len(self.seated) == 2:
            return "seats"
        if name:
            self.seated.setdefault(name, set()).add(request.request_id)
        return None

    def prefetch(self, request):
        pass

    def release(self, request):
        holders = self.seated.get(request.tenant)
        if holders is not None:
            holders.discard(request.request_id)
            if not holders:
                del self.seated[request.tenant]

    forget = release


def make(num_blocks=16, limits=NO_SPECULATION, gates=(), num_host_blocks=0, keeps_finished=True, **config):
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 48, "policy": "fcfs"} | config
    pool = BlockPool(num_blocks)
    host = HostTier(num_host_blocks, SwapCost(1, BLOCK, None)) if num_host_blocks else None
    cache = PrefixCache(pool, BLOCK, host, keeps_finished=keeps_finished)
    return Scheduler(SchedulerConfig(**values), pool, cache, gates, limits)


def request(name, tokens, max_tokens=8, **fields):
    params = SamplingParams(max_tokens=max_tokens, temperature=0, **fields.pop("params", {}))
    fields.setdefault("namespace", b"")
    return Request(name, list(tokens), len(tokens), params, seed_key=0, **fields)


def finish(scheduler, device, limit=2000):
    """Step until idle; returns outputs and errors by request."""
    outputs, errors = {}, {}
    for _ in range(limit):
        if not scheduler.has_work():
            break
        plan = scheduler.schedule()
        assert plan.num_tokens <= scheduler.config.max_num_batched_tokens
        for delta in compute(scheduler, device, plan):
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.error:
                errors[delta.request_id] = delta.error
        scheduler.check_integrity()
    assert not scheduler.has_work(), "did not finish"
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    return outputs, errors


def expected(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


workloads = st.lists(
    st.tuples(
        st.integers(1, 30), st.integers(1, 17), st.sampled_from(["", "a", "b", "c", "broken"]), st.integers(0, 3)
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.slow
@settings(max_examples=75)
@given(
    workloads,
    st.integers(12, 30),
    st.integers(1, 20),
    st.sampled_from([DraftLimits(), DraftLimits(3), DraftLimits(4, extra_slots=True)]),
    st.sampled_from(["fcfs", "priority", "fair"]),
    st.booleans(),
    st.integers(0, 99),
    st.sampled_from([0, 1, 9, 40]),
)
def test_every_sequence_gets_its_own_text_whatever_happens(jobs, blocks, budget, limits, policy, cached, seed, host):
    scheduler = make(blocks, limits, [TwoSeats()], host, max_num_batched_tokens=budget, policy=policy)
    device = Device(blocks, limits, seed=seed)
    want = {}
    for index, (length, count, tenant, priority) in enumerate(jobs):
        prompt = [i % (priority + 2) for i in range(length)]  # few different prompts, so that prefixes are shared
        namespace = tenant.encode() if cached else None
        scheduler.add(request(str(index), prompt, count, tenant=tenant, priority=priority, namespace=namespace))
        want[str(index)] = None if tenant == "broken" else expected(prompt, count)
    outputs, errors = finish(scheduler, device)
    assert set(errors) == {name for name, text in want.items() if text is None}
    assert {name: text for name, text in outputs.items() if name not in errors} == {
        name: text for name, text in want.items() if text is not None
    }


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 99))
def test_aborts_at_any_step_free_everything_and_affect_no_other_request(aborts, seed):
    limits = DraftLimits(3, extra_slots=True)
    scheduler, device = make(14, limits), Device(14, limits, seed=seed)
    for index in range(10):
        scheduler.add(request(str(index), [index % 3] * (5 + index), 9, group="g" if index in (4, 5, 6) else None))
    outputs = {}
    for victim in aborts:
        plan = scheduler.schedule()
        for delta in compute(scheduler, device, plan):
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
        scheduler.abort([str(victim), "unknown"])
        scheduler.check_integrity()
    rest, _ = finish(scheduler, device)
    for name, tokens in rest.items():
        outputs.setdefault(name, []).extend(tokens)
    for index in set(range(10)) - set(aborts):
        assert outputs[str(index)] == expected([index % 3] * (5 + index), 9)


def test_budget_is_shared_by_decodes_and_chunks():
    scheduler, device = make(), Device(16)
    scheduler.add(request("short", [1], 20))
    plan = scheduler.schedule()
    compute(scheduler, device, plan)
    scheduler.add(request("long", range(30), 2))
    plan = scheduler.schedule()
    assert [(row.request.request_id, row.num_tokens, row.samples) for row in plan.rows] == [
        ("short", 1, True),
        ("long", 15, False),
    ]


def test_whole_prompts_only_when_chunking_is_off():
    scheduler = make(max_num_batched_tokens=48, enable_chunked_prefill=False)
    for name in "ab":
        scheduler.add(request(name, range(30)))
    plan = scheduler.schedule()
    assert [(row.request.request_id, row.num_tokens) for row in plan.rows] == [("a", 30)]


def test_siblings_wait_for_the_leader_and_share_its_blocks():
    scheduler, device = make(), Device(16)
    for index in range(3):
        scheduler.add(request(f"s{index}", range(10), 3, group="s"))
    plan = scheduler.schedule()
    assert [row.request.request_id for row in plan.rows] == ["s0"]
    assert scheduler.waiting_by_reason() == {"group": 2}
    compute(scheduler, device, plan)
    plan = scheduler.schedule()
    assert [row.num_tokens for row in plan.rows] == [1, 2, 2]
    blocks = [row.request.blocks for row in plan.rows]
    assert blocks[0][:2] == blocks[1][:2] == blocks[2][:2]
    assert len({b[2] for b in blocks}) == 3


def test_siblings_that_run_one_after_another_share_the_prompt_without_a_prefix_cache():
    scheduler, device = make(keeps_finished=False, max_num_seqs=1), Device(16)
    for index in range(3):
        scheduler.add(request(f"s{index}", range(10), 1, group="s"))
    finish(scheduler, device)
    assert scheduler.prefix_cache.num_hits == 2 * 8
    scheduler.add(request("later", range(10), 1))
    finish(scheduler, device)
    assert scheduler.prefix_cache.num_hits == 2 * 8


@pytest.mark.parametrize("num_steps", range(4))
def test_siblings_that_are_aborted_leave_nothing_without_a_prefix_cache(num_steps):
    scheduler, device = make(keeps_finished=False, max_num_seqs=2), Device(16)
    names = [f"s{index}" for index in range(4)]
    for name in names:
        scheduler.add(request(name, range(10), 2, group="s"))
    for _ in range(num_steps):
        compute(scheduler, device, scheduler.schedule())
    scheduler.abort(names)
    hits = scheduler.prefix_cache.num_hits
    scheduler.add(request("later", range(10), 1))
    finish(scheduler, device)
    assert scheduler.prefix_cache.num_hits == hits


def test_siblings_leave_an_eighth_of_the_seats_to_other_requests():
    scheduler, device = make(200, max_num_seqs=8), Device(200)
    for index in range(20):
        scheduler.add(request(f"s{index}", [1, 2], 30, group="s"))
    compute(scheduler, device, scheduler.schedule())
    assert (scheduler.num_running, scheduler.num_waiting) == (7, 13)
    scheduler.add(request("other", [3], 2))
    plan = scheduler.schedule()
    assert [row.request.request_id for row in plan.rows][-1] == "other"
    compute(scheduler, device, plan)
    scheduler.check_integrity()
    outputs, _ = finish(scheduler, device)
    assert {f"s{index}" for index in range(20)} <= set(outputs)
    scheduler.check_integrity()


def test_priority_admits_the_urgent_first_and_preempts_the_other():
    scheduler, device = make(12, policy="priority"), Device(12)
    scheduler.add(request("later", range(4), 30, priority=5))
    scheduler.add(request("urgent", range(4, 8), 30, priority=-1))
    plan = scheduler.schedule()
    assert [row.request.request_id for row in plan.rows] == ["urgent", "later"]
    compute(scheduler, device, plan)
    while scheduler.num_preemptions == 0:
        plan = scheduler.schedule()
        compute(scheduler, device, plan)
    assert [item.request_id for item in scheduler.waiting] == ["later"]
    outputs, _ = finish(scheduler, device)
    assert outputs["later"][-1] == expected(range(4), 30)[-1]


def test_a_request_waiting_for_a_seat_does_not_block_others():
    scheduler = make(gates=[TwoSeats()])
    for name, tenant in (("1", "a"), ("2", "b"), ("3", "c"), ("4", "a")):
        scheduler.add(request(name, [1, 2], tenant=tenant))
    plan = scheduler.schedule()
    assert [row.request.request_id for row in plan.rows] == ["1", "2", "4"]
    assert scheduler.waiting_by_reason() == {"seats": 1}


def test_a_request_waiting_for_room_is_not_overtaken():
    scheduler, device = make(6), Device(6)
    scheduler.add(request("a", range(12), 8))
    plan = scheduler.schedule()
    compute(scheduler, device, plan)
    scheduler.add(request("large", range(20, 34), 2))
    scheduler.add(request("small", [1], 2))
    plan = scheduler.schedule()
    assert [row.request.request_id for row in plan.rows] == ["a"]
    assert scheduler.waiting_by_reason() == {"capacity": 2}


@pytest.mark.parametrize(("speculative", "most"), [(None, 4), (2, 2), (False, 0), (0, 0), (9, 4)])
def test_a_request_may_cap_its_drafts(speculative, most):
    limits = DraftLimits(4)
    scheduler, device = make(limits=limits), Device(16, limits, skill=1.0)
    scheduler.add(request("a", [1], 40, params={"speculative": speculative}))
    seen = set()
    while scheduler.has_work():
        plan = scheduler.schedule()
        seen.add(plan.rows[0].num_drafts)
        compute(scheduler, device, plan)
    assert max(seen) == most


def test_drafts_never_reach_past_max_tokens_or_the_context():
    limits = DraftLimits(4, extra_slots=True)
    for max_tokens, prompt in ((3, 2), (40, 44)):
        scheduler, device = make(limits=limits), Device(16, limits, skill=1.0, lag=0.0)
        scheduler.add(request("a", [1] * prompt, max_tokens))
        while scheduler.has_work():
            plan = scheduler.schedule()
            (row,) = plan.rows
            assert row.request.num_output_tokens + row.num_drafts < max_tokens
            assert len(row.request.blocks) * BLOCK <= 48
            compute(scheduler, device, plan)


@pytest.mark.parametrize("num_drafts", [3, 7])
def test_drafts_get_the_budget_left_by_sequences_own_tokens(num_drafts):
    """Wrong drafts, and a budget below rows * (1 + k): no sequence is slower than without drafts, and a new one
    starts."""
    limits = DraftLimits(num_drafts, extra_slots=True)
    scheduler = make(400, limits, max_num_seqs=33, max_num_batched_tokens=64, max_model_len=256)
    device = Device(400, limits, skill=0.0)
    for index in range(32):
        scheduler.add(request(f"{index}", [index + 1] * 4, max_tokens=20))
    for _ in range(8):
        plan = scheduler.schedule()
        compute(scheduler, device, plan)
    scheduler.add(request("new", [50] * 12, max_tokens=20))
    for _ in range(3):
        plan = scheduler.schedule()
        assert len(plan.rows) == len(scheduler.running), "a sequence stood still"
        compute(scheduler, device, plan)
    assert next(r for r in scheduler.running if r.request_id == "new").num_output_tokens > 0
    finish(scheduler, device)


def test_drafts_share_the_rest_evenly():
    limits = DraftLimits(7)
    scheduler = make(400, limits, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=256)
    device = Device(400, limits)
    for index in range(4):
        scheduler.add(request(f"{index}", [index + 1] * 2, max_tokens=40))
    for _ in range(3):
        plan = scheduler.schedule()
        compute(scheduler, device, plan)
    assert {row.max_new_drafts for row in plan.rows} == {3}
    assert all(row.num_drafts <= 3 for row in plan.rows)


def test_a_stop_token_inside_accepted_drafts_ends_the_text_there():
    limits = DraftLimits(4)
    scheduler, device = make(limits=limits), Device(16, limits, skill=1.0)
    text = expected([1], 40)
    stop = text[6]
    first = text.index(stop)
    scheduler.add(request("a", [1], 40, params={"stop_token_ids": [stop]}))
    outputs, _ = finish(scheduler, device)
    assert outputs["a"] == text[: first + 1]


def test_gates_know_whether_a_request_was_preempted_or_ended():
    calls = []

    class Recorder:
        def admit(self, request):
            return None

        def prefetch(self, request):
            calls.append(("prefetch", request.request_id))

        def release(self, request):
            calls.append(("release", request.request_id))

        def forget(self, request):
            calls.append(("forget", request.request_id))

    scheduler, device = make(12, gates=[Recorder()]), Device(12)
    scheduler.add(request("first", range(4), 30))
    scheduler.add(request("second", range(4, 8), 30))
    scheduler.add(request("aborted", range(40), 30))
    scheduler.abort(["aborted"])
    finish(scheduler, device)
    assert calls[0] == ("forget", "aborted")
    assert ("release", "second") in calls
    assert ("release", "first") not in calls
    assert [name for call, name in calls if call == "forget"] == ["aborted", "first", "second"]


@pytest.mark.parametrize("is_early", [False, True], ids=["after the step", "before"])
def test_blocks_are_published_after_the_step_that_writes_them(is_early, monkeypatch):
    """Equal prompts in one step each write blocks of their own; the next ones find those of the step before."""
    match, admitted = PrefixCache.match, []

    def publish_first(cache, request):
        for other in admitted if is_early else ():
            before, other.num_computed_tokens = other.num_computed_tokens, len(other.tokens)
            cache.publish(other)
            other.num_computed_tokens = before
        admitted.append(request)
        return match(cache, request)

    monkeypatch.setattr(PrefixCache, "match", publish_first)
    scheduler, device = make(32), Device(32)
    for name in "ab":
        scheduler.add(request(name, range(7), 2))
    plan = scheduler.schedule()
    assert [row.request.request_id for row in plan.rows] == ["a", "b"]
    if is_early:
        with pytest.raises(AssertionError, match="reads a block that another row writes"):
            compute(scheduler, device, plan)
        return
    compute(scheduler, device, plan)
    scheduler.add(request("c", range(7), 2))
    rows = scheduler.schedule().rows
    assert [(row.request.request_id, row.start) for row in rows] == [("a", 7), ("b", 7), ("c", 4)]
    assert rows[2].request.blocks[0] in (rows[0].request.blocks[0], rows[1].request.blocks[0])
