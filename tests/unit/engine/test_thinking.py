"""Bounded reasoning: when its tokens are used up, the tokens of its end are the only ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.platform.core.request import Drafts, Request
from outrider.platform.engine.sampling.logits_edits import LogitsRow, apply_edits, edit_state
from outrider.platform.engine.sampling.thinking import Mark

VOCAB = 12
START, END = [8, 9], [6, 6, 7]


def request(budget, prompt=(1, *START), outputs=(), start=START, end=END, **fields):
    params = SamplingParams(
        thinking_token_budget=budget, thinking_start_token_ids=start, thinking_end_token_ids=end, **fields
    )
    return Request("r", [*prompt, *outputs], len(prompt), params, seed_key=0)


def allowed(item, *drafts):
    """Tokens that may come after the request's tokens and these drafts."""
    logits = torch.zeros(1, VOCAB)
    apply_edits(logits, [LogitsRow(0, item, drafts)])
    return [token for token, value in enumerate(logits[0].tolist()) if value > -math.inf]


def written(item, wishes):
    """The answer of a model that wants these tokens."""
    for wish in wishes:
        choices = allowed(item)
        item.tokens.append(wish if wish in choices else choices[0])
    return item.tokens[item.num_prompt_tokens :]


@pytest.mark.parametrize(
    ("budget", "wishes", "answer"),
    [
        (0, [1] * 5, [*END, 1, 1]),
        (2, [1] * 7, [1, 1, *END, 1, 1]),
        (4, [1, *END, 2, 2, 2, 2, 2], [1, *END, 2, 2, 2, 2, 2]),  # it ends by itself
        (2, [1, 6, 1, 1, 2], [1, 6, 6, 7, 2]),  # its end has begun
        (3, [1, 6, 6, 1, 2], [1, 6, 6, 7, 2]),
        (4, [6, 6, 6, 7, 2, 2], [6, 6, 6, 7, 2, 2]),  # the mark begins at the second 6
        (6, [*END, 2, *START, 1, 1, 1, 1, 1, 1], [*END, 2, *START, 1, 1, 1, *END]),  # a second part
        (2, [*END, 2, *START, 1, 1, 1, 1], [6, 6, 7, 2, *START, *END, 1]),  # and no tokens for it
    ],
)
def test_the_end_is_forced_when_the_tokens_are_used_up(budget, wishes, answer):
    assert written(request(budget), wishes) == answer


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [([1, *START], True), ([*END, *START, 1], True), ([*START, *END], False), ([1, 2], False), ([*START, 6, 6], True)],
)
def test_the_prompt_may_have_begun_the_reasoning(prompt, is_open):
    assert (allowed(request(0, prompt)) == [6]) == is_open
    assert allowed(request(0, [1, 2], start=None)) == [6]  # without a mark for its start the answer begins with it


def test_drafts_count_and_leave_no_trace():
    item = request(2, outputs=[1])
    everything = list(range(VOCAB))
    for drafts, want in [((1,), [6]), ((2, 6), [6]), ((1, 6, 6), [7]), ((1, *END), everything), ((), everything)]:
        assert allowed(item, list(drafts)) == want, drafts
        assert allowed(item, list(drafts[:1]), list(drafts[1:])) == want, drafts


def test_what_other_parameters_exclude_is_not_forced():
    assert allowed(request(0, bad_words_token_ids=[[6]])) == [token for token in range(VOCAB) if token != 6]
    assert allowed(request(0, logit_bias={6: -100.0}, min_tokens=3)) == [6]


def test_rows_of_requests_with_other_bounds():
    rows = [request(0), request(1), request(0, outputs=[6]), request(0, outputs=END)]
    logits = torch.zeros(4, VOCAB)
    apply_edits(logits, [LogitsRow(place, item, ()) for place, item in enumerate(rows)])
    found = [(row > -math.inf).nonzero().flatten().tolist() for row in logits]
    assert found == [[6], list(range(VOCAB)), [6], list(range(VOCAB))]


@pytest.mark.parametrize(
    ("outputs", "drafts", "kept", "forced"),
    [
        ([1], [1, 1, 1], [1], False),
        ([1], [1, *END, 3, 4], [1, *END, 3, 4], False),
        ([1], [1, 6, 6, 3], [1, 6, 6], False),
        ([1, 1], [3, 4], END, True),
        ([1, 1, 6], [], [6, 7], True),
        ([1, 1], END, END, False),
        ([1, *END], [1, 2, 3], [1, 2, 3], False),
    ],
)
def test_drafts_end_with_the_reasoning(outputs, drafts, kept, forced):
    item = request(2, outputs=outputs)
    found = edit_state(item).thinking.within_budget(item, Drafts(drafts))
    assert (list(found.token_ids), found.forced) == (kept, forced)


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@given(tokens, st.lists(st.integers(0, 2), max_size=30))
def test_a_mark_is_found_at_its_first_end_and_its_last(mark, text):
    found, matched = Mark.of_tokens(mark), 0
    ends = [end for end in range(len(mark), len(text) + 1) if text[end - len(mark) : end] == mark]
    assert found.last_end(text) == max(ends, default=-1)
    for end, token in enumerate(text, 1):
        matched = found.follow(matched, token)
        before = [size for size in range(len(mark) + 1) if size <= end and text[end - size : end] == mark[:size]]
        assert matched == max(before)
        if matched == len(mark):
            assert end == ends[0]
            break
