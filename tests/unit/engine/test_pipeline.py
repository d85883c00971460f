"""Steps that are planned while others run, on a simulated device that records the content of every KV slot."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.platform.core.batch import RowResult, StepResult
from outrider.platform.core.config import SchedulerConfig
from outrider.platform.core.request import Request
from outrider.platform.engine.memory.block_pool import BlockPool
from outrider.platform.engine.memory.prefix_cache import PrefixCache
from outrider.platform.engine.queue.gates import DraftLimits
from outrider.platform.engine.queue.scheduler import Scheduler
from outrider.platform.engine.runner.pipeline import Pipeline

BLOCK, VOCAB = 4, 50


def next_token(tokens):
    """The simulated model: a fixed function of the whole prefix."""
    return blake2b(bytes(tokens), digest_size=1).digest()[0] % VOCAB


def expected(prompt, count, stop=()):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class Launched:
    """The device's input of a step, copied at its launch, and its results."""

    def __init__(self, plan, before):
        self.plan, self.before, self.sampled = plan, before, None
        self.rows = []
        for row in plan.rows:
            tokens = [*row.request.tokens[: row.end], *([None] if row.awaits_token else [])]
            assert len(tokens) == row.end, "the host does not know tokens that it should"
            assert row.num_tokens > 0
            self.rows.append((row, tokens, list(row.request.blocks)))


class Device:
    """A runner whose device does one step after the other, as late as it can or at once."""

    overlaps = True

    def __init__(self, lazy=True):
        self.kv, self.lazy, self.events, self.failing = {}, lazy, [], set()
        self.queue, self.num_launched = [], 0

    def launch(self, plan, before=None):
        self.num_launched += 1
        launched = self.told(plan, before)
        launched.number = self.num_launched
        self.events.append(("launch", launched.number))
        self.queue.append(launched)
        if not self.lazy:
            self.drain()
        return launched

    def drain(self):
        while self.queue:
            self._compute(self.queue.pop(0))

    def collect(self, launched):
        while launched in self.queue:
            self._compute(self.queue.pop(0))
        self.events.append(("collect", launched.number))
        if launched.number in self.failing:
            raise RuntimeError("the device has failed")
        return StepResult(self.results(launched))

    def draft(self, launched, result):
        """After the commit of the step."""
        return 0.0

    def told(self, plan, before):
        return Launched(plan, before)

    def results(self, launched):
        return [RowResult([launched.sampled[row.request]] if row.samples else []) for row in launched.plan.rows]

    def _compute(self, launched):
        """Writes the KV of its tokens, and checks that it reads that of the tokens before them."""
        launched.sampled = {}
        for row, tokens, blocks in launched.rows:
            if tokens[-1] is None:
                tokens[-1] = launched.before.sampled[row.request]
            slots = [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(row.end)]
            self.kv.update(zip(slots[row.start :], tokens[row.start :], strict=True))
            assert [self.kv[slot] for slot in slots] == tokens, "a KV slot holds another sequence's token"
            if row.samples:
                launched.sampled[row.request] = next_token(tokens)


class Seats:
    """A gate that knows who holds it."""

    def __init__(self):
        self.holders = set()

    def admit(self, request):
        self.holders.add(request)

    def prefetch(self, request):
        pass

    def release(self, request):
        self.holders.discard(request)

    forget = release


def make(num_blocks=30, limits=None, gates=(), chooser=None, **config):
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 48, "policy": "fcfs"} | config
    pool = BlockPool(num_blocks)
    return Scheduler(
        SchedulerConfig(**values), pool, PrefixCache(pool, BLOCK), gates, limits or DraftLimits(overlaps=True), chooser
    )


def pipe(scheduler, device):
    return Pipeline(scheduler, device, lambda seconds: None)


def request(name, tokens, max_tokens=8, params=None, **fields):
    params = SamplingParams(max_tokens=max_tokens, temperature=0, **(params or {}))
    fields.setdefault("namespace", b"")
    return Request(name, list(tokens), len(tokens), params, seed_key=0, **fields)


def step(scheduler, pipeline, outputs):
    for delta in pipeline.step():
        assert delta.error is None
        outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
    scheduler.check_integrity()


def finish(scheduler, pipeline, outputs=None, limit=3000):
    outputs = {} if outputs is None else outputs
    for _ in range(limit):
        if not scheduler.has_work() and pipeline.is_idle:
            break
        step(scheduler, pipeline, outputs)
    assert not scheduler.has_work(), "did not finish"
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    return outputs


def check_outputs(scheduler, pipeline, seats, want, aborts):
    """Run to the end; texts are those that are wanted, or begin like them if their request was aborted."""
    victims, outputs = {}, {}
    for at, victim in aborts:
        victims.setdefault(at, []).append(str(victim))
    for at in range(13):
        step(scheduler, pipeline, outputs)
        scheduler.abort(victims.get(at, []))
        scheduler.check_integrity()
    finish(scheduler, pipeline, outputs)
    gone = {victim for names in victims.values() for victim in names}
    whole, wanted = ({name: text for name, text in texts.items() if name not in gone} for texts in (outputs, want))
    assert whole == wanted
    assert all(outputs.get(name, []) == text[: len(outputs.get(name, []))] for name, text in want.items())
    assert not seats.holders


jobs = st.lists(
    st.tuples(
        st.integers(1, 30),  # tokens of the prompt
        st.integers(1, 17),  # tokens at most
        st.sampled_from(["", "a", "b"]),
        st.integers(0, 3),
        st.booleans(),  # whether it reads its own tokens
        st.sampled_from([(), (3, 7, 11, 20, 33, 41)]),  # stop tokens
        st.sampled_from([None, None, "g"]),
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.slow
@settings(max_examples=80)
@given(
    jobs,
    st.integers(12, 30),
    st.integers(1, 20),
    st.sampled_from(["fcfs", "priority", "fair"]),
    st.booleans(),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), max_size=4),
)
def test_every_sequence_gets_its_own_text(jobs, blocks, budget, policy, cached, lazy, aborts):
    seats = Seats()
    scheduler = make(blocks, gates=[seats], max_num_batched_tokens=budget, policy=policy)
    want = {}
    for index, (length, count, tenant, priority, reads, stop, group) in enumerate(jobs):
        prompt = [i % (priority + 2) for i in range(length)]  # few different prompts, so that prefixes are shared
        params = {"stop_token_ids": list(stop)} | (READERS[0] if reads else {})
        namespace = tenant.encode() if cached else None
        fields = {"tenant": tenant, "priority": priority, "namespace": namespace, "group": group}
        scheduler.add(request(str(index), prompt, count, params, **fields))
        want[str(index)] = expected(prompt, count, stop)
    check_outputs(scheduler, pipe(scheduler, Device(lazy)), seats, want, aborts)


def test_the_next_step_is_planned_while_one_runs():
    """Each launch comes before the previous one was collected, except at the end of the last request."""
    scheduler, device = make(), Device()
    for name in "ab":
        scheduler.add(request(name, [1, 2, 3], 6))
    finish(scheduler, pipe(scheduler, device))
    assert device.events[:6] == [
        ("launch", 1), ("launch", 2), ("collect", 1), ("launch", 3), ("collect", 2), ("launch", 4),
    ]  # fmt: skip
    assert device.num_launched == 6, "a step was planned past max_tokens"


def test_without_overlap_one_step_is_in_flight():
    scheduler, device = make(limits=DraftLimits()), Device(lazy=False)
    device.overlaps = False
    scheduler.add(request("a", [1, 2, 3], 3))
    assert finish(scheduler, pipe(scheduler, device))["a"] == expected([1, 2, 3], 3)
    assert device.events == [(kind, number) for number in (1, 2, 3) for kind in ("launch", "collect")]


READERS = [{"bad_words_token_ids": [[4], [5, 6]]}, {"bad_words_token_ids": [[5, 6, 7]], "presence_penalty": 0.5}]
OTHERS = [
    {"min_tokens": 3},
    {"allowed_token_ids": [1, 2]},
    {"logit_bias": {3: 1.0}},
    {"logprobs": 2},
    {"seed": 3},
    {"bad_words_token_ids": [[4]]},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
]


def make_plan(scheduler, *requests):
    for item in requests:
        scheduler.add(item)
    plan = scheduler.schedule()
    scheduler.launched(plan)
    return plan


@pytest.mark.parametrize("params", READERS)
def test_edits_that_read_the_sampled_token_wait_for_it(params):
    scheduler = make()
    plan = make_plan(scheduler, request("a", [1], 5), request("b", [2], 5, params))
    assert not scheduler.can_plan_next(plan)


@pytest.mark.parametrize("params", OTHERS)
def test_other_edits_do_not_wait_for_the_sampled_token(params):
    scheduler = make()
    assert scheduler.can_plan_next(make_plan(scheduler, request("a", [1], 5, params)))


def test_a_prompt_chunk_samples_nothing_to_wait_for():
    scheduler = make()
    assert scheduler.can_plan_next(make_plan(scheduler, request("a", range(30), 5, READERS[0])))


def test_drafts_wait_for_verification():
    scheduler = make(limits=DraftLimits(2))
    assert not scheduler.can_plan_next(make_plan(scheduler, request("a", [1], 5)))


def test_a_sequence_in_flight_is_not_preempted_before_its_commit():
    """Blocks are short: the step in flight is committed first, then the less urgent sequence is preempted."""
    scheduler, device = make(12, max_model_len=40), Device()
    pipeline, outputs = pipe(scheduler, device), {}
    for name, start in (("a", 0), ("b", 4)):
        scheduler.add(request(name, range(start, start + 4), 30))
    while not scheduler.num_preemptions:
        step(scheduler, pipeline, outputs)
    assert [item.request_id for item in scheduler.waiting] == ["b"]
    finish(scheduler, pipeline, outputs)
    assert outputs == {"a": expected(range(4), 30), "b": expected(range(4, 8), 30)}


def test_blocks_and_gates_of_an_aborted_sequence_are_held_until_no_step_writes_them():
    seats = Seats()
    scheduler, device = make(gates=[seats]), Device()
    pipeline, outputs = pipe(scheduler, device), {}
    scheduler.add(request("a", [1, 2, 3], 20))
    step(scheduler, pipeline, outputs)
    (holder,) = seats.holders
    scheduler.abort(["a"])
    assert not scheduler.running
    assert holder.blocks
    assert seats.holders == {holder}
    scheduler.check_integrity()
    scheduler.add(request("a", [4, 5], 3))  # the id is free at once
    step(scheduler, pipeline, outputs)
    assert holder not in seats.holders
    assert finish(scheduler, pipeline, outputs)["a"] == [*expected([1, 2, 3], 1), *expected([4, 5], 3)]


def test_tokens_after_a_stop_token_are_dropped():
    scheduler, device = make(), Device()
    text = expected([1], 40)
    stop = text[6]
    scheduler.add(request("a", [1], 40, {"stop_token_ids": [stop]}))
    assert finish(scheduler, pipe(scheduler, device))["a"] == expected([1], 40, [stop])


@pytest.mark.parametrize("failing", [1, 2, 5])
def test_after_an_error_sequences_are_as_they_were_and_go_on(failing):
    scheduler, device = make(), Device()
    device.failing = {failing}
    pipeline, outputs = pipe(scheduler, device), {}
    for name in "abc":
        scheduler.add(request(name, [ord(name)] * 7, 9))
    with pytest.raises(RuntimeError, match="the device has failed"):
        finish(scheduler, pipeline, outputs)
    assert pipeline.is_idle
    scheduler.check_integrity()
    finish(scheduler, pipeline, outputs)
    assert outputs == {name: expected([ord(name)] * 7, 9) for name in "abc"}


@pytest.mark.parametrize("verb", ["draft", "launch"])
def test_tokens_of_a_committed_step_are_returned_after_an_error_in_the_next(verb):
    """Rows that read tokens are planned after the commit, so the next launch comes after it."""
    scheduler, device = make(), Device()
    pipeline, outputs = pipe(scheduler, device), {}
    scheduler.add(request("a", [1, 2], 9, READERS[0]))
    step(scheduler, pipeline, outputs)
    working = getattr(device, verb)

    def broken(*args):
        raise RuntimeError("no memory")

    setattr(device, verb, broken)
    with pytest.raises(RuntimeError, match="no memory"):
        step(scheduler, pipeline, outputs)
    assert not pipeline.is_idle
    setattr(device, verb, working)
    assert finish(scheduler, pipeline, outputs)["a"] == expected([1, 2], 9)


def test_an_error_while_a_step_is_launched_ends_the_one_in_flight():
    scheduler, device = make(), Device()
    pipeline, outputs = pipe(scheduler, device), {}
    scheduler.add(request("a", [1, 2], 9))
    step(scheduler, pipeline, outputs)
    launch = device.launch

    def broken(plan, before=None):
        raise RuntimeError("no memory")

    device.launch = broken
    with pytest.raises(RuntimeError, match="no memory"):
        step(scheduler, pipeline, outputs)
    device.launch = launch
    assert finish(scheduler, pipeline, outputs)["a"] == expected([1, 2], 9)


def test_steps_are_committed_in_the_order_of_their_launch():
    scheduler = make()
    make_plan(scheduler, request("a", [1], 5))
    second = scheduler.schedule()
    scheduler.launched(second)
    assert second.rows[0].awaits_token
    with pytest.raises(AssertionError, match="order of their launch"):
        scheduler.commit(second, StepResult([RowResult([1])]))
