"""Masks, biases and penalties against their definitions, one row at a time in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.platform.core.request import Request
from outrider.platform.engine.sampling.logits_edits import EDITS, LogitsRow, apply_edits, edit_state

VOCAB, EOS = 12, 11


def request(params, prompt=(1, 2), outputs=()):
    tokens = [*prompt, *outputs]
    return Request("r", tokens, len(prompt), params, seed_key=0, eos_token_ids=frozenset([EOS]))


def edited(logits, *rows):
    result = logits.clone()
    apply_edits(result, [LogitsRow(i, r, (drafts[:1], drafts[1:])) for i, (r, drafts) in enumerate(rows)])
    return result


def reference(values, item, drafts):
    """The definitions, in Python."""
    p, out = item.params, item.tokens[item.num_prompt_tokens :] + list(drafts)
    row = [float(v) for v in values]
    if p.allowed_token_ids is not None:
        row = [v if i in p.allowed_token_ids else -math.inf for i, v in enumerate(row)]
    for word in p.bad_words_token_ids:
        head = word[:-1]
        if not head or out[-len(head) :] == head:
            row[word[-1]] = -math.inf
    if len(out) < p.min_tokens:
        for token in [EOS, *p.stop_token_ids]:
            row[token] = -math.inf
    for token, bias in (p.logit_bias or {}).items():
        row[token] += bias
    for token in set(item.tokens) | set(drafts):
        row[token] = row[token] / p.repetition_penalty if row[token] > 0 else row[token] * p.repetition_penalty
    for token in set(out):
        row[token] -= p.presence_penalty + p.frequency_penalty * out.count(token)
    return row


params_strategy = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2),
    logit_bias=st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    bad_words_token_ids=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), max_size=2),
)
tokens_strategy = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@pytest.mark.slow
@settings(max_examples=100)
@given(
    st.lists(st.tuples(params_strategy, tokens_strategy, tokens_strategy), min_size=1, max_size=4), st.integers(0, 99)
)
def test_every_combination_equals_the_definitions(cases, seed):
    logits = torch.randn(len(cases), VOCAB, generator=torch.Generator().manual_seed(seed))
    rows = [(request(params, outputs=outputs), drafts) for params, outputs, drafts in cases]
    want = torch.tensor([reference(row, *case) for row, case in zip(logits.tolist(), rows, strict=True)])
    torch.testing.assert_close(edited(logits, *rows), want, rtol=1e-5, atol=1e-5)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=12),
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=3), st.lists(st.integers(0, 2), max_size=3)), max_size=8),
)
def test_bad_words_of_a_sequence_that_grows(words, steps):
    """With any rejected drafts before, and tokens in pieces of any size."""
    item, logits = request(SamplingParams(bad_words_token_ids=words)), torch.zeros(1, VOCAB)
    sibling = request(item.params, outputs=[2])
    assert edit_state(sibling, edit_state(item).tables).tables is edit_state(item).tables
    for tokens, drafts in steps:
        for row in (item, sibling):
            row.tokens += tokens
            want = torch.tensor([reference(logits[0].tolist(), row, drafts)])
            assert torch.equal(edited(logits, (row, drafts)), want)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"logit_bias": {3: 9.0}}, {"logit_bias": {4: 9.0}}),
        ({"logit_bias": {3: 9.0}}, {"logit_bias": {3: -9.0}}),
        ({"allowed_token_ids": [3, 4]}, {"allowed_token_ids": [4, 5]}),
        ({"bad_words_token_ids": [[3]]}, {"bad_words_token_ids": [[4]]}),
        ({"min_tokens": 2, "stop_token_ids": [3]}, {"min_tokens": 2, "stop_token_ids": [4]}),
    ],
)
def test_a_request_that_differs_in_one_list_shares_no_table(one, other):
    first, second = request(SamplingParams(**one)), request(SamplingParams(**other))
    edit_state(second, edit_state(first).tables)
    logits = torch.zeros(2, VOCAB)
    want = torch.tensor([reference(row, item, []) for row, item in zip(logits.tolist(), (first, second), strict=True)])
    assert torch.equal(edited(logits, (first, []), (second, [])), want)
    assert not torch.equal(want[0], want[1])


def test_a_request_with_another_end_shares_no_table():
    params = SamplingParams(min_tokens=1)
    first = request(params)
    second = Request("s", [1], 1, params, seed_key=0, eos_token_ids=frozenset([EOS - 1]))
    edit_state(second, edit_state(first).tables)
    result = edited(torch.zeros(2, VOCAB), (first, []), (second, []))
    assert torch.equal((result == -math.inf).nonzero(), torch.tensor([[0, EOS], [1, EOS - 1]]))


def test_rows_without_edits_are_untouched():
    logits = torch.randn(2, VOCAB)
    result = edited(logits, (request(SamplingParams()), []), (request(SamplingParams(logit_bias={3: 1.0})), []))
    assert torch.equal(result[0], logits[0])
    assert result[1, 3] == logits[1, 3] + 1.0


def test_drafts_before_a_row_count_like_generated_tokens():
    logits = torch.zeros(2, VOCAB)
    item = request(SamplingParams(frequency_penalty=1.0), outputs=[4])
    result = edited(logits, (item, []), (item, [4, 5]))
    assert result[0, 4] == -1.0
    assert result[1, 4] == -2.0
    assert result[1, 5] == -1.0


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=0.3, top_p=0.5, top_k=4, min_p=0.1), False),
        (SamplingParams(min_tokens=1), True),
        (SamplingParams(logit_bias={1: 1.0}), True),
    ],
)
def test_plain_sampling_wants_no_edits(params, wanted):
    assert params.edits_logits is wanted
    assert any(edit.wanted(params) for edit in EDITS) is wanted


class Unread(list):
    """Drafts that are still on a device: the host must not wait for them."""

    def __iter__(self):
        raise AssertionError("the drafts were read")

    def __getitem__(self, index):
        raise AssertionError("the drafts were read")


def test_edits_without_tokens_do_not_wait_for_drafts():
    item = request(
        SamplingParams(
            bad_words_token_ids=[[3], [5]], allowed_token_ids=[3, 4, 5, 6, EOS], min_tokens=9, logit_bias={4: 2.0}
        ),
        outputs=(3,),
    )
    logits = torch.zeros(1, VOCAB)
    apply_edits(logits, [LogitsRow(0, item, (Unread([1, 2]),))])
    assert torch.equal(logits.isfinite().nonzero()[:, 1], torch.tensor([4, 6]))
    assert logits[0, 4] == 2.0
