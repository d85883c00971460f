"""Effects of a row's result on its sequence."""

from __future__ import annotations

import pytest

from outrider import SamplingParams
from outrider.platform.core.batch import RowPlan, RowResult
from outrider.platform.core.labels import MAX_MIXES, OTHER, AdapterLabels, LabelValues
from outrider.platform.core.messages import SpeculationCounts, TokenDelta
from outrider.platform.core.request import NO_DRAFTS, Drafts, Request, Status
from outrider.platform.engine.queue.outcome import accept
from outrider.platform.engine.runner.model_runner import _draft_row
from outrider.platform.engine.speculation_totals import SpeculationTotals


def test_drafts_after_the_end_of_the_text_count_as_rejected_everywhere():
    totals = SpeculationCounts(1, 3, 1, [1, 0, 0], [0, 0, 0, 1])
    request = Request("r", [1, 2], 2, SamplingParams(stop_token_ids=[7]), seed_key=0, speculation_totals=totals)
    request.drafts = Drafts([6, 7, 8])
    row = RowPlan(request, start=1, num_tokens=4, num_drafts=3, samples=True, max_new_drafts=3)
    delta = accept(row, RowResult([6, 7, 8, 9], num_accepted=3), max_model_len=100)
    assert (delta.token_ids, delta.finish_reason, delta.stop_reason) == ([6, 7], "stop", 7)
    assert delta.speculation == request.speculation == SpeculationCounts(1, 3, 2, [1, 1, 0], [0, 0, 0, 1], [1], [2])
    assert totals == SpeculationCounts(2, 6, 3, [2, 1, 0], [0, 0, 0, 2], [1], [2])


def test_steps_are_counted_by_the_drafter_of_their_drafts():
    totals = SpeculationCounts()
    request = Request("r", [1, 2], 2, SamplingParams(), seed_key=0, speculation_totals=totals)
    steps = [([], [3], 0, 0), ([4, 5], [4, 9], 1, 0), ([4, 5], [4, 5, 9], 2, 1), ([6], [7], 0, 1)]
    for drafts, got, accepted, drafter in steps:
        request.drafts = Drafts(drafts, drafter=drafter)
        row = RowPlan(request, len(request.tokens) - 1, 1 + len(drafts), len(drafts), samples=True, max_new_drafts=3)
        accept(row, RowResult(got, accepted), max_model_len=100)
    assert (totals.steps_by_k, totals.drafts_by_drafter, totals.tokens_by_drafter) == ([1, 1, 2], [1, 2], [2, 4])
    assert sum(totals.drafts_by_drafter) == totals.num_verifications
    assert totals.by_drafter(["eagle3", "ngram"]) == {"off": (1, 1), "eagle3": (1, 2), "ngram": (2, 4)}
    more = SpeculationCounts()
    for _ in range(2):
        more.add(totals)
    assert (more.drafts_by_drafter, more.tokens_by_drafter) == ([2, 4], [4, 8])


def test_a_text_that_ends_on_a_draft_gets_no_bonus_token():
    totals = SpeculationCounts()
    request = Request("r", [1, 2], 2, SamplingParams(max_tokens=4), seed_key=0, speculation_totals=totals)
    for drafts, got, accepted in ([], [3], 0), ([4, 5, 6], [4, 5, 6, 7], 3):
        delta = step(request, drafts, got, accepted)
    assert (delta.token_ids, delta.finish_reason) == ([4, 5, 6], "length")
    assert totals.by_drafter(["ngram"]) == {"off": (1, 1), "ngram": (1, 3)}
    assert sum(tokens for _, tokens in totals.by_drafter(["ngram"]).values()) == request.num_output_tokens


def test_recent_drafts_follow_the_last_steps():
    counts = SpeculationCounts()
    for drafted in (*[4] * 400, *[0] * 64):
        counts.count(drafted, 0)
    assert counts.recent_drafts == pytest.approx(4 / 2.718, rel=0.02)


def step(request: Request, drafts: list[int], got: list[int], num_accepted: int) -> TokenDelta:
    request.drafts = Drafts(drafts)
    row = RowPlan(request, len(request.tokens) - 1, 1 + len(drafts), len(drafts), samples=True, max_new_drafts=3)
    delta = accept(row, RowResult(got, num_accepted), max_model_len=100)
    assert delta is not None
    return delta


def test_a_delta_marks_accepted_draft_tokens():
    request = Request("r", [1, 2], 2, SamplingParams(stop_token_ids=[7]), seed_key=0)
    for drafts, got, accepted in (([], [3], 0), ([4, 5], [4, 9], 1), ([4, 5], [4, 5, 9], 2)):
        delta = step(request, drafts, got, accepted)
        assert (delta.num_draft_tokens, delta.num_accepted) == (len(drafts), accepted)
    cut = step(request, [4, 7, 5], [4, 7, 5, 9], 3)
    assert (cut.token_ids, cut.num_draft_tokens, cut.num_accepted, cut.finish_reason) == ([4, 7], 3, 2, "stop")


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"stop_token_ids": [7]}, 2),
        ({"stop_token_ids": [5], "min_tokens": 3}, 3),
        ({"stop_token_ids": [5], "min_tokens": 2}, 1),
        ({}, 3),
        ({"ignore_eos": True}, 4),
    ],
)
def test_drafters_see_no_text_after_its_end_and_make_no_drafts_there(params, kept):
    """The second output token and those after it; 8 is the model's end of sequence."""
    request = Request("r", [1, 2, 3], 2, SamplingParams(**params), seed_key=0, eos_token_ids=frozenset([8]))
    got, ends = [5, 7, 8, 9], kept < 4
    request.num_draft_computed = 6
    row = RowPlan(request, start=2, num_tokens=4, num_drafts=3, samples=True, max_new_drafts=3)
    result = RowResult(got, 3)
    assert (accept(row, result, max_model_len=100).finish_reason is not None) == ends
    request.status = Status.FINISHED if ends else Status.RUNNING
    seen = _draft_row(row, result, [5, 6], 0, False)
    assert list(seen.tokens) == [1, 2, 3, *got[:kept]]
    assert (seen.max_drafts, seen.block_table) == (0 if ends else 3, [5, 6])
    assert seen.num_valid == 3 + min(kept, 3), "as the sequence has it: an end that was drafted is computed"
    assert seen.num_draft_valid == 6
    assert request.drafts == NO_DRAFTS


def test_the_drafter_keeps_its_kv_of_accepted_drafts():
    request = Request("r", [1, 2, 3], 2, SamplingParams(), seed_key=0)
    for computed, accepted, left in ((6, 1, 4), (6, 3, 6), (2, 3, 2)):
        request.tokens, request.num_draft_computed = [1, 2, 3], computed
        row = RowPlan(request, start=2, num_tokens=4, num_drafts=3, samples=True, max_new_drafts=3)
        accept(row, RowResult([9] * (1 + accepted), accepted), max_model_len=100)
        assert request.num_draft_computed == left


def test_steps_are_counted_by_their_drafts():
    request = Request("r", [1, 2], 2, SamplingParams(), seed_key=0, speculation_totals=SpeculationCounts())
    for drafts, got, num_accepted in (([], [3], 0), ([4, 5], [4, 9], 1), ([6], [8], 0), ([6], [6, 7], 1), ([], [3], 0)):
        delta = step(request, drafts, got, num_accepted)
        assert delta.speculation is request.speculation  # after every step: the client may end it at any
    expected = SpeculationCounts(3, 4, 2, [2, 0], [2, 2, 1], [3], [5])
    assert request.speculation == request.speculation_totals == expected


def test_tokens_without_a_choice_are_no_drafters_drafts():
    request = Request("r", [1, 2], 2, SamplingParams(), seed_key=0, speculation_totals=SpeculationCounts())
    request.drafts = Drafts([4, 5], forced=True)
    row = RowPlan(request, 1, 3, 2, samples=True, max_new_drafts=3, is_forced=True)
    accept(row, RowResult([4, 5, 9], 2), max_model_len=100)
    assert request.speculation == request.speculation_totals == SpeculationCounts()


def test_without_drafts_no_counts_are_returned():
    request = Request("r", [1, 2], 2, SamplingParams(), seed_key=0)
    assert step(request, [], [3], 0).speculation is None


def test_counts_add_up():
    total = SpeculationCounts(1, 2, 1, [1, 0], [0, 0, 1])
    total.add(SpeculationCounts(2, 4, 3, [2, 1, 0], [5, 1, 0, 1]))
    total.add(SpeculationCounts())
    assert total == SpeculationCounts(3, 6, 4, [3, 1, 0], [5, 1, 1, 1])


def test_totals_are_bounded_and_never_fall():
    totals = SpeculationTotals(max_tenants=2, max_pairs=4)
    for tenant in ("", "t", "u", "v", "t"):
        totals.of("a", tenant).count(3, 2)
    totals.of("b", "").count(1, 1)
    totals.of("c", "t").count(1, 1)  # the fifth pair
    totals.of("a", "").count(1, 0)
    totals.of("b", "t")  # never verified a draft
    found = {(e.adapter, e.tenant): e.counts.num_draft_tokens for e in totals.entries()}
    assert found == {("a", ""): 4, ("a", "t"): 6, ("a", OTHER): 6, ("b", ""): 1, (OTHER, OTHER): 1}
    before = totals.entries()
    totals.of("a", "").count(5, 5)
    assert before[0].counts.num_draft_tokens == 4  # a snapshot


def test_label_values_are_bounded():
    names = LabelValues(2)
    assert [names(name) for name in ("x", "y", "z", "x", "z", "y")] == ["x", "y", OTHER, "x", OTHER, "y"]


def test_mixes_do_not_use_up_the_adapters_labels():
    labels = AdapterLabels(max_adapters=2, max_mixes=1)
    names = ("a+b", "b+c", "a", "b+c+d", "b", "a+b", "c")
    assert [labels(name) for name in names] == ["a+b", OTHER, "a", OTHER, "b", "a+b", OTHER]


def test_totals_of_mixes_are_bounded():
    totals = SpeculationTotals()
    for index in range(3 * MAX_MIXES):
        totals.of(f"a+{index}", "").count(1, 1)
    totals.of("a", "").count(1, 1)
    found = {entry.adapter: entry.counts.num_verifications for entry in totals.entries()}
    assert len(found) == MAX_MIXES + 2
    assert (found[OTHER], found["a"]) == (2 * MAX_MIXES, 1)
