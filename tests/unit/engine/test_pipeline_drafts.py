"""Steps that verify drafts, planned while others run: only the simulated device knows the accepted drafts."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.platform.core.batch import RowPlan, RowResult, StepResult
from outrider.platform.core.request import Drafts, Status
from outrider.platform.engine.queue.gates import DraftLimits
from outrider.platform.engine.queue.row_choices import can_overlap_next, row_choices

from .test_pipeline import (
    BLOCK,
    Device,
    Seats,
    check_outputs,
    expected,
    finish,
    make,
    make_plan,
    next_token,
    pipe,
    request,
    step,
)

LATE = DraftLimits(3, extra_slots=True, overlaps=True)


class Row:
    """The device's input of a row, copied at its launch."""

    def __init__(self, row, longest):
        request = row.request
        self.request, self.start, self.num_tokens, self.awaits_token = (
            request,
            row.start,
            row.num_tokens,
            row.awaits_token,
        )
        self.num_drafts, self.new_drafts, self.samples = row.num_drafts, row.max_new_drafts, row.samples
        self.blocks, self.known, self.drafts = list(request.blocks), list(request.tokens), []
        if not row.awaits_token:
            self.drafts = list(request.drafts.token_ids)
            assert len(self.drafts) == row.num_drafts
        limit = min(request.num_prompt_tokens + request.params.max_tokens, longest)
        assert row.end <= limit, "planned past max_tokens or max_model_len"
        self.tokens, self.accepted, self.made = None, 0, []


class Launched:
    """A step."""

    def __init__(self, plan, before, longest):
        self.plan, self.before = plan, before
        self.rows = {row.request: Row(row, longest) for row in plan.rows}


class Drafting(Device):
    """Verifies and drafts; the drafter, whose KV lies in the same blocks, is sometimes right. It drafts in the step
    itself if the plan's `can_overlap_next` is set; else it waits for `draft`, and may lag behind."""

    longest = 48

    def __init__(self, share=2, lazy=True, lags=False):
        super().__init__(lazy)
        self.share, self.lags = share, lags
        self.draft_kv, self.num_device_drafts = {}, 0

    def told(self, plan, before):
        return Launched(plan, before, self.longest)

    def results(self, launched):
        rows = launched.rows
        return [
            RowResult(rows[item].tokens[len(item.tokens) :] if row.samples else [], rows[item].accepted)
            for row in launched.plan.rows
            for item in [row.request]
        ]

    def draft(self, launched, result):
        for planned in launched.plan.rows:
            row = launched.rows[planned.request]
            if row.request.status is Status.RUNNING:
                assert row.tokens == row.request.tokens
                row.request.num_draft_computed = self._num_draft_computed(launched.plan, planned, row)
                row.request.drafts = Drafts(row.made)
        return super().draft(launched, result)

    def _compute(self, launched):
        for row in launched.rows.values():
            start = row.start
            if row.awaits_token:
                earlier = launched.before.rows[row.request]
                start -= earlier.num_drafts - earlier.accepted
                row.known, row.drafts = list(earlier.tokens), earlier.made[: row.num_drafts]
                self.num_device_drafts += row.num_drafts
            assert len(row.drafts) == row.num_drafts, "other drafts than planned"
            tokens = [*row.known, *row.drafts][: start + row.num_tokens]
            assert len(tokens) == start + row.num_tokens
            slots = self.slots(row, 0, len(tokens))
            self.kv.update(zip(slots[start:], tokens[start:], strict=True))
            assert [self.kv[slot] for slot in slots] == tokens, "a KV slot holds another sequence's token"
            row.tokens = row.known
            if row.samples:
                self._verify(row)
                if launched.plan.can_overlap_next:
                    self._draft_on_device(row, start)

    def _verify(self, row):
        row.tokens, row.accepted = list(row.known), 0
        for draft in [*row.drafts, None]:
            row.tokens.append(next_token(row.tokens))
            if row.tokens[-1] != draft:
                break
            row.accepted += 1

    def _draft_on_device(self, row, start):
        """All 1 + k positions are computed, and those after the last token are undefined."""
        if not row.new_drafts:
            return
        first, count = start + 1, row.num_tokens
        computed = [*row.tokens[first:], *[-1] * count][:count]
        self.draft_kv.update(zip(self.slots(row, first, first + count), computed, strict=True))
        self._draft(row)

    def _draft(self, row):
        slots = self.slots(row, 0, len(row.tokens))
        assert [self.draft_kv.get(slot) for slot in slots] == row.tokens, "the drafter lags behind, or its KV is stale"
        tokens = list(row.tokens)
        for _ in range(row.new_drafts):
            hit = blake2b(bytes(tokens), digest_size=1, salt=b"drafter").digest()[0] % 4 < self.share
            tokens.append(next_token(tokens) if hit else 49)
        row.made = tokens[len(row.tokens) :]
        slots = self.slots(row, len(row.tokens), len(tokens) - 1)
        self.draft_kv.update(zip(slots, row.made, strict=False))

    def _num_draft_computed(self, plan, planned, row):
        """Draft, unless the device has; how many positions of the drafter are valid."""
        valid = row.request.num_draft_computed
        if plan.can_overlap_next:
            return len(row.tokens) if row.new_drafts else valid
        end = len(row.tokens) if row.samples else planned.end
        held = [self.draft_kv.get(slot) for slot in self.slots(row, 0, valid)]
        assert held == row.tokens[:valid], "the drafter's KV is reported valid and is not"
        if self.lags and len(row.tokens) % 3 == 0:
            return valid
        slots = self.slots(row, valid, end)
        self.draft_kv.update(zip(slots, row.tokens[valid:end], strict=False))
        if row.samples and row.new_drafts:
            self._draft(row)
        return max(valid, min(end, len(row.blocks) * BLOCK))

    @staticmethod
    def slots(row, start, end):
        return [row.blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(start, min(end, len(row.blocks) * BLOCK))]


READING = {"bad_words_token_ids": [[900, 901]]}
jobs = st.lists(
    st.tuples(
        st.integers(1, 30),  # tokens of the prompt
        st.integers(1, 17),  # tokens at most
        st.sampled_from(["", "a", "b"]),
        st.integers(0, 3),
        st.sampled_from(
            [{}, {}, {"bad_words_token_ids": [[900, 901]]}, {"min_tokens": 4}, {"speculative": 0}, {"speculative": 1}]
        ),
        st.sampled_from([(), (3, 7, 11, 20, 33, 41)]),  # stop tokens
        st.sampled_from([None, None, "g"]),
    ),
    min_size=1,
    max_size=8,
)


CASES = (
    jobs,
    st.tuples(st.integers(14, 34), st.integers(4, 24), st.sampled_from(["fcfs", "priority", "fair"]), st.booleans()),
    st.tuples(st.integers(0, 4), st.booleans(), st.booleans()),
    st.tuples(st.integers(1, 4), st.booleans(), st.sampled_from([20, 48]), st.sampled_from([33, 38, 48])),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 7)), max_size=4),
)
"""Arguments of `check_texts`."""


@pytest.mark.slow
@settings(max_examples=100)
@given(*CASES)
def test_every_sequence_gets_its_own_text(jobs, engine, drafter, limits, aborts):
    check_texts(jobs, engine, drafter, limits, aborts)


def check_texts(jobs, engine, drafter, limits, aborts, chooser=None):
    """Run an engine of simulated parts; returns its device."""
    blocks, budget, policy, cached = engine
    k, extra, reach, longest = limits
    seats = Seats()
    draft_limits = DraftLimits(k, extra_slots=extra, overlaps=True, max_positions=reach)
    config = {"max_num_batched_tokens": budget, "policy": policy, "max_model_len": longest}
    scheduler = make(blocks, draft_limits, [seats], chooser, **config)
    device = Drafting(*drafter) if extra else WithoutLayers(*drafter)
    device.longest = longest
    want = {}
    for index, (length, count, tenant, priority, params, stop, group) in enumerate(jobs):
        prompt = [i % (priority + 2) for i in range(length)]  # few different prompts, so that prefixes are shared
        namespace = tenant.encode() if cached else None
        fields = {"tenant": tenant, "priority": priority, "namespace": namespace, "group": group}
        params = {"stop_token_ids": list(stop)} | params
        params["min_tokens"] = min(params.get("min_tokens", 0), count)
        scheduler.add(request(str(index), prompt, count, params, **fields))
        want[str(index)] = expected_with(prompt, min(count, longest - length), stop, params["min_tokens"])
    check_outputs(scheduler, pipe(scheduler, device), seats, want, aborts)
    return device


class WithoutLayers(Drafting):
    """A drafter without state, which never lags."""

    def _draft(self, row):
        tokens = list(row.tokens)
        for _ in range(row.new_drafts):
            hit = blake2b(bytes(tokens), digest_size=1, salt=b"drafter").digest()[0] % 4 < self.share
            tokens.append(next_token(tokens) if hit else 49)
        row.made = tokens[len(row.tokens) :]

    def _draft_on_device(self, row, start):
        self._draft(row)

    def _num_draft_computed(self, plan, planned, row):
        if row.samples and not plan.can_overlap_next:
            self._draft(row)
        return len(row.tokens)


def expected_with(prompt, count, stop, min_tokens):
    """The simulated model does not mask stop tokens: before `min_tokens` they end nothing."""
    tokens = list(prompt)
    for made in range(1, count + 1):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop and made >= min_tokens:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("share", [0, 2, 4])
def test_the_next_step_is_planned_while_one_runs(share):
    """All but a sequence's first steps, and the last ones, are launched before the one before is collected."""
    scheduler, device = make(limits=LATE, num_blocks=80, max_num_batched_tokens=32), Drafting(share)
    for name in "ab":
        scheduler.add(request(name, [1, 2, ord(name)], 40))
    outputs = finish(scheduler, pipe(scheduler, device))
    assert outputs == {name: expected([1, 2, ord(name)], 40) for name in "ab"}
    beside = sum(
        kinds == ("launch", "launch")
        for kinds in zip(*([kind for kind, _ in device.events][at:] for at in (0, 1)), strict=False)
    )
    assert beside == 1, "the second step joins the first once; then one is always in flight"
    assert device.num_device_drafts > (20 if share == 4 else 50)
    order = [number for kind, number in device.events if kind == "collect"]
    assert order == sorted(order)


def running(num_tokens=10, params=None, **fields):
    """A request that has decoded, and whose drafter is not behind."""
    item = request("a", range(num_tokens - 4), 60, params)
    item.tokens += [1] * 4
    item.num_computed_tokens, item.num_draft_computed = num_tokens - 1, num_tokens
    for name, value in fields.items():
        setattr(item, name, value)
    return item


def followed(row, limits=LATE):
    return can_overlap_next([row], limits)


def follow(item, num_drafts, new_drafts):
    """A row of it is in flight."""
    item.in_flight = [
        RowPlan(item, item.num_computed_tokens, 1 + num_drafts, num_drafts, samples=True, max_new_drafts=new_drafts)
    ]


def largest(item, limits=LATE, share=3, longest=100):
    row, extra = next(row_choices(item, 16, share, limits, longest))
    assert extra == (row.max_new_drafts if limits.extra_slots else 0)
    return row


def test_a_row_planned_during_a_step_counts_all_drafts_as_right():
    item = running()
    follow(item, 3, 2)
    row = largest(item)
    assert (row.start, row.num_tokens, row.num_drafts, row.max_new_drafts, row.awaits_token) == (13, 3, 2, 3, True)
    assert followed(row)
    item.num_computed_tokens = 11
    item.retire_row(item.in_flight[0])
    item.in_flight.append(row)
    item.rebase_in_flight()
    assert (row.start, row.end) == (11, 14)


def test_a_late_row_gets_drafts_only_if_the_drafter_has_kept_up():
    """It was not called in the step in flight: the host drafts, once it knows the drafter's lag."""
    item = running()
    follow(item, 3, 0)
    for limits, late in ((LATE, False), (LATE._replace(extra_slots=False), True)):
        row = largest(item, limits)
        assert (row.num_drafts, row.max_new_drafts, followed(row, limits)) == (0, 3, late)


@pytest.mark.parametrize("coming", [0, 1, 2, 3])
def test_nothing_is_planned_past_max_tokens(coming):
    item = running(params={})
    item.params.max_tokens = 4 + 1 + coming + 1  # with this many drafts in flight one token is left
    follow(item, coming, 3)
    row = largest(item)
    assert (row.num_drafts, row.end) == (0, item.num_prompt_tokens + item.params.max_tokens - 1)


WAITING = {
    "edits that read tokens": running(params={"bad_words_token_ids": [[1, 2]]}),
    "a minimum of tokens": running(params={"min_tokens": 5}),
    "the end of a prompt": running(num_prompt_tokens=10),
    "a drafter behind": running(num_draft_computed=9),
}


@pytest.mark.parametrize("why", WAITING)
def test_drafts_wait_for_the_host(why):
    item = WAITING[why]
    assert not followed(largest(item))
    assert followed(largest(running()))


def test_drafts_wait_if_fewer_than_planned_are_possible():
    item = running()
    for limits, late in (
        (LATE, True),
        (LATE._replace(max_positions=12), False),
        (LATE._replace(max_positions=13), True),
    ):
        assert followed(largest(item), limits) is late
    rows = [row for row, _ in row_choices(item, 16, 3, LATE, 100)]
    assert [row.max_new_drafts for row in rows] == [3, 0, 0]
    assert all(followed(row) for row in rows), "blocks were short: the next step waits for no drafts"
    never = running(params={"speculative": False}, num_draft_computed=0)
    assert followed(largest(never)), "it requests no drafts"
    assert followed(RowPlan(item, 0, 4, 0, samples=False, max_new_drafts=0)), "a part of a prompt"


@pytest.mark.parametrize("limits", [DraftLimits(3), LATE])
def test_only_drafts_that_the_device_makes_let_the_next_step_be_planned(limits):
    scheduler = make(limits=limits)
    plan = make_plan(scheduler, request("a", [1], 9))
    assert not scheduler.can_plan_next(plan), "a prompt"
    scheduler.commit(plan, StepResult([RowResult([7])]))
    plan.rows[0].request.drafts, plan.rows[0].request.num_draft_computed = Drafts([1, 2, 3]), 2
    plan = make_plan(scheduler)
    assert plan.rows[0].num_drafts == 3
    assert scheduler.can_plan_next(plan) is limits.overlaps


@pytest.mark.parametrize("failing", [2, 4, 5, 9])
def test_after_an_error_sequences_are_as_they_were_and_go_on(failing):
    scheduler, device = make(limits=LATE, max_num_batched_tokens=32), Drafting(2)
    device.failing = {failing}
    pipeline, outputs = pipe(scheduler, device), {}
    for name in "abc":
        scheduler.add(request(name, [ord(name) % 50] * 7, 15))
    with pytest.raises(RuntimeError, match="the device has failed"):
        finish(scheduler, pipeline, outputs)
    assert pipeline.is_idle
    scheduler.check_integrity()
    finish(scheduler, pipeline, outputs)
    assert outputs == {name: expected([ord(name) % 50] * 7, 15) for name in "abc"}


def test_a_sequence_in_flight_is_not_preempted_before_its_commit():
    scheduler, device = make(14, limits=LATE, max_model_len=40, max_num_batched_tokens=32), Drafting(3)
    device.longest = 40
    pipeline, outputs = pipe(scheduler, device), {}
    for name, start in (("a", 0), ("b", 4)):
        scheduler.add(request(name, range(start, start + 4), 30))
    while not scheduler.num_preemptions:
        step(scheduler, pipeline, outputs)
    finish(scheduler, pipeline, outputs)
    assert outputs == {"a": expected(range(4), 30), "b": expected(range(4, 8), 30)}
    assert device.num_device_drafts > 0
