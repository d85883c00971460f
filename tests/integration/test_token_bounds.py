"""Log-probabilities of given tokens, bounded reasoning and repetitions are the same with every drafter."""

from __future__ import annotations

import math

import pytest

from outrider import SamplingParams

VOCAB = 160
DRAFTERS = [("ngram", 4), ("draft_model", 3), ("eagle3", 3)]
MANNERS = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1.0, "seed": 3}}
START, END = 5, [6, 7]
PROMPTS = [[9, 8, START], [9, START, 3, 4, 3, 4], [START, *END, 8] * 3, [5, 9, 5, 9, 5, 9]]


def outcome(got):
    entries = [
        (entry.token_ids, entry.rank, entry.ranks, [round(value, 4) for value in entry.logprobs])
        for entry in got.logprobs
    ]
    return got.token_ids, got.finish_reason, got.stop_reason, got.error, entries


def params(**fields):
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **fields})


def all_jobs():
    thinking = {"thinking_start_token_ids": [START], "thinking_end_token_ids": END}
    fields = [
        {"thinking_token_budget": 0, **thinking},
        {"thinking_token_budget": 5, **thinking, "logprobs": 1},
        {"thinking_token_budget": 3, "thinking_end_token_ids": END},
        {"repetition_detection": {"max_pattern_size": 4, "min_count": 2}},
        {"logprob_token_ids": [3, 150, 3, 0]},
        {"logprob_token_ids": [9], "thinking_token_budget": 2, **thinking, "presence_penalty": 0.7},
    ]
    return [(prompt, params(**MANNERS[manner], **each)) for manner in MANNERS for each in fields for prompt in PROMPTS]


@pytest.fixture(scope="module")
def wanted(plain_engine, run):
    return [outcome(got) for got in run(plain_engine, all_jobs())]


@pytest.mark.parametrize(("method", "k"), DRAFTERS)
def test_drafts_change_nothing(models, make_engine, run, wanted, method, k):
    engine = make_engine(speculative_config={**models.speculative(method, k), "adaptive": False})
    found = run(engine, all_jobs())
    assert [outcome(got) for got in found] == wanted
    assert any(got.speculation.num_accepted_tokens for got in found if got.speculation)


def test_the_texts_do_what_was_asked(wanted):
    jobs = all_jobs()
    reasons = set()
    for (prompt, asked), (tokens, reason, stop, error, entries) in zip(jobs, wanted, strict=True):
        assert error is None
        budget = asked.thinking_token_budget
        if budget is not None and (prompt[-1] == START or asked.thinking_start_token_ids is None):
            ends = [at for at in range(len(tokens)) if tokens[at : at + 2] == END]
            assert ends[0] <= budget
        if asked.repetition_detection is not None:
            reasons.add(reason)
            assert (reason == "repetition") == (stop == "repetition_detected")
        ids = asked.logprob_token_ids
        if ids is not None:
            for token, (given, rank, ranks, values) in zip(tokens, entries, strict=True):
                assert given == [token, *ids]
                assert len(values) == 1 + len(ranks) == 1 + len(ids)
                same = [at for at, other in enumerate(ids) if other == token]
                assert all((ranks[at], values[1 + at]) == (rank, values[0]) for at in same)
    assert reasons == {"repetition", "length"}


def test_given_log_probabilities_are_those_of_the_whole_vocabulary(make_engine, run):
    """The largest number of ids in a batch with requests that want others."""
    engine = make_engine(max_logprobs=VOCAB)
    ids = [(7 * index) % VOCAB for index in range(128)]
    fields = [{"logprobs": VOCAB}, {"logprob_token_ids": ids}, {"logprob_token_ids": ids[:3]}, {"logprobs": 2}, {}]
    jobs = [(PROMPTS[0], params(temperature=0, **each)) for each in fields]
    whole, given, few, top, none = run(engine, jobs)
    assert given.token_ids == few.token_ids == top.token_ids == none.token_ids == whole.token_ids
    assert none.logprobs == []
    for everything, many, three, two in zip(whole.logprobs, given.logprobs, few.logprobs, top.logprobs, strict=True):
        value = dict(zip(everything.token_ids[1:], everything.logprobs[1:], strict=True))
        rank = {token: 1 + sum(other > value[token] for other in value.values()) for token in value}
        assert many.token_ids == [everything.token_ids[0], *ids]
        assert many.logprobs[1:] == pytest.approx([value[token] for token in ids])
        assert many.ranks == [rank[token] for token in ids]
        assert (three.logprobs, three.ranks) == (many.logprobs[:4], many.ranks[:3])
        assert two.ranks is None
        assert math.isclose(many.logprobs[0], everything.logprobs[0])


def test_a_forced_end_is_drafted_without_a_drafter(plain_engine, run):
    """All tokens of the mark in one step, unless the request wants no drafts."""
    fields = {"thinking_token_budget": 4, "thinking_end_token_ids": [11, 12, 13, 14], "temperature": 0}
    jobs = [(PROMPTS[0], params(**fields)), (PROMPTS[0], params(**fields, speculative=False))]
    drafted, plain = run(plain_engine, jobs)
    assert drafted.token_ids == plain.token_ids
    assert [11, 12, 13, 14] in [delta[:4] for delta in drafted.deltas]
    assert all(len(delta) == 1 for delta in plain.deltas)
