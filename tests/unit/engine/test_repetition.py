"""Repetitions at the end of a text, against their definition."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import RepetitionDetectionParams, SamplingParams
from outrider.platform.core.batch import RowPlan, RowResult
from outrider.platform.core.request import Drafts, Request
from outrider.platform.engine.queue.outcome import accept
from outrider.platform.engine.queue.repetition import Repetition


def repeats(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """The definition."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        end = tokens[-size * params.min_count :]
        if len(end) == size * params.min_count and end == end[:size] * params.min_count:
            return True
    return False


@st.composite
def params_strategy(draw):
    most = draw(st.integers(1, 6))
    return RepetitionDetectionParams(most, draw(st.integers(0, most)), draw(st.integers(2, 4)))


@settings(max_examples=100)
@given(params_strategy(), st.lists(st.integers(0, 2), max_size=60))
def test_equals_the_definition_at_every_token(params, tokens):
    state = Repetition(params)
    found = [state.add(token) for token in tokens]
    assert found == [repeats(tokens[: count + 1], params) for count in range(len(tokens))]


def test_the_largest_pattern():
    state = Repetition(RepetitionDetectionParams(1024, 1024, 3))
    found = [state.add(token) for token in [*range(1024)] * 3]
    assert (found.index(True), sum(found)) == (3 * 1024 - 1, 1)


def steps(results, **fields):
    """(tokens, finish reason, stop reason) of a sequence whose steps had these drafts and results."""
    params = SamplingParams(repetition_detection={"max_pattern_size": 3, "min_count": 3}, max_tokens=None, **fields)
    request = Request("r", [7, 7, 7, 7], 4, params, seed_key=0)
    tokens = []
    for drafts, got, accepted in results:
        request.drafts = Drafts(drafts)
        row = RowPlan(request, len(request.tokens) - 1, 1 + len(drafts), len(drafts), samples=True, max_new_drafts=3)
        delta = accept(row, RowResult(got, accepted), max_model_len=100)
        tokens += delta.token_ids
        if delta.finish_reason is not None:
            break
    return tokens, delta.finish_reason, delta.stop_reason


def test_a_text_ends_at_the_same_token_with_drafts_and_without():
    text = [7, 8, 7, 8, 7, 8, 9, 9]
    want = ([7, 8, 7, 8, 7, 8], "repetition", "repetition_detected")
    assert steps([([], [token], 0) for token in text]) == want  # the prompt's tokens do not count
    assert steps([([], [7], 0), (text[1:7], text[1:], 6)]) == want  # inside the accepted drafts
    assert steps([([], [7], 0), ([8, 7], [8, 7, 8], 2), ([7, 9], [7, 8], 1)]) == want


def test_min_tokens_come_first():
    text = [8] * 8
    assert steps([([], [token], 0) for token in text], min_tokens=5)[0] == [8] * 5


def test_a_stop_token_comes_before_a_repetition():
    assert steps([([], [8, 8, 8], 0)], stop_token_ids=[8])[1:] == ("stop", 8)
