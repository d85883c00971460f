"""Token ids that the device still computes: the host works with their places."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider import SamplingParams
from outrider.kernels.late import LateIds, LateTokens, OnDevice, late_tokens, now_known
from outrider.kernels.verification import pack
from outrider.platform.core.request import Drafts, Request
from outrider.platform.engine.sampler import Pending, Ready, Sampled, Sampler, SampleRow
from outrider.spec_decode.drawing import Drafting, join_drafts, last_drafts
from outrider.spec_decode.proposer import DraftRow
from outrider.spec_decode.verification import Rule


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


def test_their_number_and_parts_are_known_without_waiting(source):
    ids = LateIds(source, [3, 1, 0])
    assert (len(ids), len(ids[:2]), bool(ids[:0])) == (3, 2, False)
    assert list(now_known(ids)) == [0, 0, 0]
    assert now_known([7, 8]) == [7, 8]
    assert Drafts(ids).truncated(2).token_ids.places == [3, 1]
    assert Counted.asked == 0


def test_who_reads_one_gets_the_devices(source):
    ids = LateIds(source, [3, 1, 0])
    assert (ids[0], ids[-1], list(ids), list(ids[1:])) == (13, 10, [13, 11, 10], [11, 10])
    assert [*ids, 5] == [13, 11, 10, 5]


def test_they_are_put_into_their_places_by_source(source, device):
    other = OnDevice(torch.tensor([20, 21]))
    parts = [(1, LateIds(source, [4, 0])), (3, [7]), (4, LateIds(other, [1])), (6, LateIds(source, [2]))]
    late = late_tokens(parts)
    assert len(late) == 2
    out = torch.full((8,), -1, device=device)
    for tokens in late:
        LateTokens(tokens.places, tokens.source.to(device), tokens.origins).fill(out)
    assert out.tolist() == [-1, 14, 10, -1, 21, -1, 12, -1]


def test_verification_is_given_the_same_drafts(source, device):
    there = Counted(source.tensor.to(device))
    lists = [[12], [], [10, 14, 11], [3, 4]]
    late = [LateIds(there, [2]), LateIds(there, []), LateIds(there, [0, 4, 1]), [3, 4]]
    common = {
        "certain": [True, True, False, True], "rules": [0, 1, 2, 0], "seed_keys": [1, 2, 3, 4],
        "first_positions": [5, 6, 7, 8], "target": torch.device(device),
    }  # fmt: skip
    want, got = pack(lists, **common), pack(late, **common)
    for one, other in zip(want, got, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert Counted.asked == 0


def drafting(reads_tokens=False):
    params = SamplingParams(presence_penalty=0.5 if reads_tokens else 0.0, logit_bias={1: 1.0})
    request = Request("r", [1, 2], 2, params, seed_key=1)
    return Drafting(DraftRow(request, [1, 2, 9], 2, 2, 3, [], True), Rule.GREEDY, 3)


def test_drafts_of_all_draws_get_one_source(source):
    first, second = drafting(), drafting()
    more = Counted(torch.tensor([30]))
    first.late_ids, second.late_ids = [(source, 1), (more, 0)], [(source, 0)]
    tokens, late = last_drafts([second])
    assert (tokens, late[0].origins) == ([[0]], [0])
    join_drafts([first, second, drafting()])
    assert Counted.asked == 0
    assert (list(first.drafts.token_ids), list(second.drafts.token_ids)) == ([11, 30], [10])
    assert first.drafts.token_ids.source is second.drafts.token_ids.source
    assert drafting().drafts.token_ids == []


@pytest.mark.parametrize("reads", [False, True])
def test_only_edits_that_read_drafts_wait_for_them(source, reads):
    one = drafting(reads)
    one.late_ids = [(source, 2), (source, 3)]
    assert one.new_tokens == ([9, 12, 13] if reads else [9, 0, 0])
    assert Counted.asked == (2 if reads else 0)


def test_the_next_tokens_are_written_for_the_step_after(device, request):
    """As the host is told them later; a row without a choice gets some token of the vocabulary."""
    rows = [
        SampleRow(Request(str(i), [1, 2], 2, params, seed_key=i), Drafts([]))
        for i, params in enumerate([SamplingParams(temperature=0), SamplingParams(seed=3), SamplingParams(seed=4)])
    ]
    logits = torch.randn(3, 40)
    logits[2] = torch.nan
    on_host = Sampler().begin(logits.clone(), rows)
    assert isinstance(on_host, Ready)
    pending = Sampler().launch(logits.to(device), rows)
    assert isinstance(pending, Pending)
    for begun in (on_host, pending):
        out = torch.full((3,), -1, device=device)
        begun.write_next(out, 40)
        sampled = begun.collect()
        assert out.tolist()[:2] == [got.token_ids[0] for got in sampled[:2]]
        assert sampled[2].error is not None
        assert 0 <= out.tolist()[2] < 40


def test_a_row_whose_last_token_is_late_is_sampled_at_its_place():
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
    out = torch.full((2,), -1)
    Ready([Sampled([4, 6], 1), Sampled([], 0)]).write_next(out, 10)
    assert np.array_equal(out.numpy(), [6, 0])
