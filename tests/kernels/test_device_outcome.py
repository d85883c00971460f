"""Token ids that the device still computes: the host works with their places."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.kernels.device_outcome import (
    DeviceIds,
    DeviceOutcome,
    DeviceTokens,
    OnDevice,
    device_places,
    device_tokens,
    host_ids,
)
from outrider.kernels.verification import pack
from outrider.platform.core.batch import RowResult
from outrider.platform.core.request import Drafts, Request
from outrider.platform.engine.sampling.sampler import PendingTokens, Sampled, Sampler, SampleRow
from outrider.spec_decode.drafters.base import DraftRow
from outrider.spec_decode.verify.draft_sampling import Drafting, draw, join_drafts, last_drafts
from outrider.spec_decode.verify.verification import Rule, choose_rule


class Counted(OnDevice):
    """Counts how often the host asked."""

    asked = 0

    def known(self):
        type(self).asked += 1
        return super().known()


@pytest.fixture
def source():
    Counted.asked = 0
    return Counted(torch.tensor([10, 11, 12, 13, 14]))


def test_counts_and_parts_are_known_without_synchronisation(source):
    ids = DeviceIds(source, [3, 1, 0])
    assert (len(ids), len(ids[:2]), bool(ids[:0])) == (3, 2, False)
    assert list(host_ids(ids)) == [0, 0, 0]
    assert host_ids([7, 8]) == [7, 8]
    assert Drafts(ids).truncated(2).token_ids.places == [3, 1]
    assert Counted.asked == 0


def test_reading_device_ids_waits_for_the_device(source):
    ids = DeviceIds(source, [3, 1, 0])
    assert (ids[0], ids[-1], list(ids), list(ids[1:])) == (13, 10, [13, 11, 10], [11, 10])
    assert [*ids, 5] == [13, 11, 10, 5]


def test_device_ids_are_scattered_by_source(source, device):
    other = OnDevice(torch.tensor([20, 21]))
    parts = [(1, DeviceIds(source, [4, 0])), (3, [7]), (4, DeviceIds(other, [1])), (6, DeviceIds(source, [2]))]
    late = device_tokens(parts)
    assert len(late) == 2
    out = torch.full((8,), -1, device=device)
    for tokens in late:
        DeviceTokens(tokens.places, tokens.source.to(device), tokens.origins).fill(out)
    assert out.tolist() == [-1, 14, 10, -1, 21, -1, 12, -1]


def test_verification_is_given_the_same_drafts(source, device):
    there = Counted(source.tensor.to(device))
    lists = [[12], [], [10, 14, 11], [3, 4]]
    late = [DeviceIds(there, [2]), DeviceIds(there, []), DeviceIds(there, [0, 4, 1]), [3, 4]]
    common = {
        "certain": [True, True, False, True], "rules": [0, 1, 2, 0], "seed_keys": [1, 2, 3, 4],
        "first_positions": [5, 6, 7, 8], "target": torch.device(device),
    }  # fmt: skip
    want, got = pack(lists, **common), pack(late, **common)
    for one, other in zip(want, got, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert Counted.asked == 0


def drafting():
    params = SamplingParams(presence_penalty=0.5, logit_bias={1: 1.0})
    request = Request("r", [1, 2], 2, params, seed_key=1)
    return Drafting(DraftRow(request, [1, 2, 9], 2, 2, 3, [], True), Rule.GREEDY, 3)


def test_drafts_of_all_draws_get_one_source(source):
    first, second = drafting(), drafting()
    more = Counted(torch.tensor([30]))
    first.device_ids, second.device_ids = [(source, 1), (more, 0)], [(source, 0)]
    tokens, late = last_drafts([second])
    assert (tokens, late[0].origins) == ([[0]], [0])
    join_drafts([first, second, drafting()])
    assert Counted.asked == 0
    assert (list(first.drafts.token_ids), list(second.drafts.token_ids)) == ([11, 30], [10])
    assert first.drafts.token_ids.source is second.drafts.token_ids.source
    assert drafting().drafts.token_ids == []


def test_new_tokens_are_given_without_waiting(source):
    one = drafting()
    one.device_ids = [(source, 2), (source, 3)]
    parts = one.new_tokens
    assert Counted.asked == 0
    assert [token for part in parts for token in part] == [12, 13]


@pytest.mark.parametrize(
    "kinds",
    [[{"temperature": 0}] * 3, [{"temperature": 0, "logit_bias": {1: 9.0}}] * 3, [{"temperature": 0}, {"seed": 3}, {}]],
    ids=["greedy", "edited", "mixed"],
)
def test_the_next_tokens_are_written_for_the_step_after(device, kinds):
    """As the host gets them later; a row without an allowed token gets any token of the vocabulary."""
    rows = [
        SampleRow(Request(str(i), [1, 2], 2, SamplingParams(**kind), seed_key=i), Drafts([]))
        for i, kind in enumerate(kinds)
    ]
    logits = torch.randn(3, 40)
    logits[2] = torch.nan
    on_host = Sampler().begin(logits.clone(), rows)
    assert isinstance(on_host, Sampled)
    pending = Sampler().launch(logits.to(device), rows)
    assert isinstance(pending, PendingTokens)
    for begun in (on_host, pending):
        out = begun.outcome()
        sampled = begun.collect()
        assert [got.token_ids for got in sampled] == [got.token_ids for got in on_host.collect()]
        assert out.next_tokens.tolist()[:2] == [got.token_ids[0] for got in sampled[:2]]
        assert sampled[2].error is not None
        assert 0 <= out.next_tokens.tolist()[2] < 40
        assert (out.accepted.tolist(), out.rejected) == ([0, 0, 0], None)


def test_device_outcome_equals_the_hosts(device):
    """Also if a row in the middle has no candidates: the draft before it ends the step."""
    logits = torch.randn(9, 40)
    best = logits.argmax(dim=1).tolist()
    drafts = [best[:3], [], [best[5], 39 - best[6]], [best[8]]]
    logits[2] = torch.nan
    rows = [
        SampleRow(Request(str(i), [1, 2], 2, SamplingParams(temperature=0), seed_key=i), Drafts(ids))
        for i, ids in enumerate(drafts[:3])
    ]
    for begun in (Sampler().begin(logits[:8].clone(), rows), Sampler().launch(logits[:8].to(device), rows)):
        out, sampled = begun.outcome(), begun.collect()
        assert out.accepted.tolist() == [got.num_accepted for got in sampled] == [1, 0, 1]
        assert out.rejected.tolist() == [2, 0, 1, 0]
        assert out.next_tokens.tolist() == [got.token_ids[-1] for got in sampled]
        assert (out.unused.tolist(), out.total.tolist()) == ([2, 0, 1], [2, 0, 1])
        tokens = out.tokens.tolist()
        for first, got in zip((0, 4, 5), sampled, strict=True):
            assert tokens[first : first + len(got.token_ids)] == got.token_ids
        assert all(0 <= token < 40 for token in tokens)


def test_an_outcome_of_some_rows():
    numbers = torch.arange(4)
    out = DeviceOutcome(torch.arange(9), 10 + numbers, numbers, torch.tensor([3, 2, 1, 0, 0]), 5 * numbers)
    assert out.of(range(4)) is out
    some = out.of([2, 0])
    assert (some.next_tokens.tolist(), some.accepted.tolist()) == ([12, 10], [2, 0])
    assert (some.rejected.tolist(), some.overshoot.tolist()) == ([1, 3, 0], [10, 0])
    assert (some.unused.tolist(), some.total.tolist()) == ([1, 3], [11, 3])
    plain = DeviceOutcome(torch.arange(2), torch.arange(2), torch.zeros(2, dtype=torch.int64), None)
    assert (plain.of([1]).rejected, plain.unused, plain.total) == (None, None, None)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=5),
    st.sampled_from([1, 4, 16]),
)
def test_slots_of_rows_whose_start_is_late(rows, size):
    """`rows`: true start, tokens and planned overshoot of each."""
    tables = [[100 * b + 7 * i % 50 for i in range(60)] for b in range(len(rows))]
    starts, counts = [start + over for start, _, over in rows], [count for _, count, _ in rows]
    tables = [table[: -(-(start + count) // size)] for table, start, count in zip(tables, starts, counts, strict=True)]
    over = torch.tensor([over for _, _, over in rows])
    want = [
        table[at // size] * size + at % size
        for table, (start, count, _) in zip(tables, rows, strict=True)
        for at in range(start, start + count)
    ]
    slots, positions = device_places(tables, starts, counts, size, over, 4, torch.device("cpu"))
    assert slots.tolist() == want
    true = [start for start, _, _ in rows]
    known, same = device_places(tables, true, counts, size, None, 0, torch.device("cpu"))
    assert known.tolist() == want
    assert positions.tolist() == same.tolist()


def test_a_row_with_a_late_token_is_sampled_at_its_index():
    """The noise and the minimum of tokens go by the sequence's length, which the host knows before the token."""
    params = SamplingParams(seed=3, min_tokens=2, stop_token_ids=list(range(5, 40)))
    known = Request("a", [1, 2, 9, 8], 2, params, seed_key=7)
    late = Request("b", [1, 2, 9], 2, params, seed_key=7)
    early = Request("c", [1, 2, 9], 2, params, seed_key=7)
    logits = torch.randn(1, 40)
    tokens = []
    for item, length in ((known, None), (late, 4), (early, None)):
        (got,) = Sampler()(logits.clone(), [SampleRow(item, Drafts([]), length)])
        tokens.append(got.token_ids)
    assert tokens[0] == tokens[1]
    assert tokens[2][0] < 5


def test_ready_rows_without_tokens_leave_a_zero():
    out = Sampled([RowResult([4, 6], 1), RowResult([])], [3, 1], torch.device("cpu")).outcome()
    assert out.next_tokens.tolist() == [6, 0]
    assert (out.tokens.tolist(), out.rejected.tolist()) == ([4, 6, 0, 0], [1, 0, 0])


def test_rows_that_begin_earlier_than_planned_draw_the_same(device):
    """On either path, with every rule: the noise depends on the true position."""
    values = [{"seed": 3}, {"temperature": 0.8}, {"temperature": 0}, {"seed": 4}]
    kinds = [SamplingParams(**params) for params in values]
    requests = [Request(str(i), [1, 2], 2, params, seed_key=7 + i) for i, params in enumerate(kinds)]
    lengths, over = [5, 9, 4, 7], [2, 3, 0, 1]
    logits = torch.randn(4, 40).repeat_interleave(2, 0)
    drafts = [Drafts([int(row.argmax())]) for row in logits[::2]]
    true = [SampleRow(*parts) for parts in zip(requests, drafts, lengths, strict=True)]
    planned = [row._replace(num_tokens=row.num_tokens + by) for row, by in zip(true, over, strict=True)]
    want = Sampler()(logits.clone(), true)
    begun = Sampler().begin(logits.clone(), planned, torch.tensor(over))
    launched = Sampler().launch(logits.to(device), planned, torch.tensor(over, device=device))
    assert begun.collect() == launched.collect() == want
    assert Sampler().launch(logits.to(device), planned).collect() != want


@pytest.mark.parametrize("params", [{"seed": 5}, {"temperature": 0.9}])
def test_drafts_are_drawn_with_the_noise_of_their_true_position(params):
    logits = torch.randn(3, 40)
    drawn = []
    for lengths, over in (([4, 6, 9], None), ([6, 6, 12], torch.tensor([2, 0, 3]))):
        rows = []
        for i, length in enumerate(lengths):
            item = Request(str(i), [1] * 3, 3, SamplingParams(**params), seed_key=i)
            row = DraftRow(item, [1] * length, length - 1, 0, 1, [0], True)
            rows.append(Drafting(row, choose_rule(item, False), 1))
        draw(rows, logits.clone(), overshoot=over)
        drawn.append([row.drafts for row in rows])
    assert [d.token_ids for d in drawn[0]] == [d.token_ids for d in drawn[1]]


def test_generated_tokens_by_row(device):
    """Rows without drafts in a batch with others."""
    tokens = torch.tensor([10, 11, 12, 20, 30, 31], device=device)
    accepted = torch.tensor([1, 0, 1], device=device)
    outcome = DeviceOutcome(tokens, tokens[[1, 3, 5]], accepted, None, counts=[3, 1, 2])
    assert [list(ids) for ids in outcome.generated()] == [[10, 11, -1], [20], [30, 31]]
    with pytest.raises(AssertionError, match="of all"):
        outcome.of([1, 2]).generated()
    one_each = DeviceOutcome(tokens, tokens, torch.zeros(6, dtype=torch.int64, device=device), None)
    assert [list(ids) for ids in one_each.generated()] == [[token] for token in tokens.tolist()]
