"""Deltas to outputs: text, logprobs, n > 1, stops, aborts, errors, metrics."""

from typing import Any

import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.platform.client.input_processor import InputProcessor
from outrider.platform.client.output_processor import OutputProcessor, RequestState
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import AdapterError, EngineDeadError, ErrorInfo, InvalidRequestError, OutriderError
from outrider.platform.core.messages import PromptTable, SpeculationCounts, TokenDelta, TokenLogprobs
from outrider.platform.core.outputs import RequestMetrics
from outrider.platform.core.sampling_params import SamplingParams


@pytest.fixture
def processor(tokenizer: Any) -> OutputProcessor:
    return OutputProcessor()


def add(processor: OutputProcessor, tokenizer: Any, request_id: str = "r", **params: Any) -> RequestState:
    inputs = InputProcessor(tokenizer, FakeEngine(EngineArgs(model="x")).info, [1])
    prepared = inputs.prepare(request_id, "hello", SamplingParams(**params))
    return processor.add(prepared, prepared.sequences())


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_cumulative_and_delta(processor: OutputProcessor, tokenizer: Any) -> None:
    whole, parts = add(processor, tokenizer, "a"), add(processor, tokenizer, "b")
    a, b, c = ids(tokenizer, "abc")
    processor.process([TokenDelta("a", [a]), TokenDelta("b", [a])])
    assert whole.take().outputs[0].text == parts.take(delta=True).outputs[0].text == "a"
    last = [TokenDelta(request_id, [b, c], finish_reason="length") for request_id in "ab"]
    assert [state.request_id for state in processor.process(last).touched] == ["a", "b"]
    output, delta = whole.take(), parts.take(delta=True)
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("abc", [a, b, c])
    assert (delta.outputs[0].text, delta.outputs[0].token_ids) == ("bc", [b, c])
    assert output.finished
    assert output.outputs[0].finish_reason == "length"
    assert (output.prompt, output.prompt_token_ids) == ("hello", tokenizer.encode("hello"))
    assert len(processor) == 0


def test_a_slow_consumer_gets_merged_deltas(processor: OutputProcessor, tokenizer: Any) -> None:
    state = add(processor, tokenizer)
    for token in ids(tokenizer, "abc"):
        processor.process([TokenDelta("r", [token])])
    assert state.take(delta=True).outputs[0].text == "abc"
    assert state.take(delta=True).outputs == []


def test_stop_string_cuts_and_aborts(processor: OutputProcessor, tokenizer: Any) -> None:
    state = add(processor, tokenizer, stop=["bc"], logprobs=0)
    tokens = ids(tokenizer, "abcd")
    logprobs = [TokenLogprobs([token], [-1.0], 1) for token in tokens]
    processed = processor.process([TokenDelta("r", tokens, logprobs)])
    assert processed.aborts == ["r"]
    [output] = state.take().outputs
    assert (output.text, output.token_ids) == ("a", tokens[:3])
    assert (output.finish_reason, output.stop_reason) == ("stop", "bc")
    assert output.logprobs is not None
    assert len(output.logprobs) == 3
    assert output.cumulative_logprob == -3.0
    assert processor.process([TokenDelta("r", tokens)]) == ([], [])


def test_stop_string_in_the_engines_last_delta_needs_no_abort(processor: OutputProcessor, tokenizer: Any) -> None:
    state = add(processor, tokenizer, stop=["bc"])
    processed = processor.process([TokenDelta("r", ids(tokenizer, "abcd"), finish_reason="length")])
    assert processed.aborts == []
    assert state.take().outputs[0].stop_reason == "bc"


@pytest.mark.parametrize(("stop_reason", "include", "text"), [(None, False, "a"), (66, False, "a"), (66, True, "ab")])
def test_stop_tokens_are_in_the_ids_and_not_in_the_text(
    processor: OutputProcessor, tokenizer: Any, stop_reason: int | None, include: bool, text: str
) -> None:
    state = add(processor, tokenizer, include_stop_str_in_output=include)
    tokens = ids(tokenizer, "ab")
    processor.process([TokenDelta("r", tokens, finish_reason="stop", stop_reason=stop_reason)])
    [output] = state.take().outputs
    assert (output.text, output.token_ids, output.stop_reason) == (text, tokens, stop_reason)


def test_text_that_may_become_a_stop_string_waits(processor: OutputProcessor, tokenizer: Any) -> None:
    state = add(processor, tokenizer, stop=["bcd"])
    a, b, c = ids(tokenizer, "abc")
    texts = []
    for delta in (TokenDelta("r", [a]), TokenDelta("r", [b]), TokenDelta("r", [c], finish_reason="length")):
        processor.process([delta])
        texts.append(state.take(delta=True).outputs[0].text)
    assert texts == ["a", "", "bc"]


def test_logprobs(processor: OutputProcessor, tokenizer: Any) -> None:
    state = add(processor, tokenizer, logprobs=2, prompt_logprobs=1)
    a, b, c = ids(tokenizer, "abc")
    delta = TokenDelta("r", [a], [TokenLogprobs([a, b, c], [-3.0, -1.0, -2.0], 7)])
    delta.prompt_logprobs = PromptTable()
    delta.prompt_logprobs.extend([TokenLogprobs([b, b], [-1.5, -1.5], 1)])
    processor.process([delta])
    output = state.take(delta=True)
    assert output.outputs[0].logprobs == [{a: (-3.0, 7, "a", b"a"), b: (-1.0, 1, "b", b"b"), c: (-2.0, 2, "c", b"c")}]
    assert list(output.outputs[0].logprobs[0]) == [a, b, c]
    assert list(output.prompt_logprobs) == [None, {b: (-1.5, 1, "b", b"b")}]
    processor.process([TokenDelta("r", [b], [TokenLogprobs([b, b], [-0.5, -0.5], 1)], finish_reason="length")])
    last = state.take(delta=True)
    assert last.prompt_logprobs is None
    assert last.outputs[0].logprobs == [{b: (-0.5, 1, "b", b"b")}]
    assert last.outputs[0].cumulative_logprob == -3.5


def test_without_detokenization(processor: OutputProcessor, tokenizer: Any) -> None:
    state = add(processor, tokenizer, detokenize=False, logprobs=0)
    processor.process([TokenDelta("r", [70], [TokenLogprobs([70], [-1.0], 1)], finish_reason="length")])
    [output] = state.take().outputs
    assert (output.text, output.token_ids) == ("", [70])
    assert output.logprobs == [{70: (-1.0, 1, None, None)}]


def test_n_sequences_end_one_by_one(processor: OutputProcessor, tokenizer: Any) -> None:
    state = add(processor, tokenizer, n=2)
    a, b = ids(tokenizer, "ab")
    processor.process([TokenDelta("r#1", [b], finish_reason="length", num_cached_tokens=9)])
    first = state.take(delta=True)
    assert not first.finished
    assert [output.index for output in first.outputs] == [1]
    processor.process([TokenDelta("r#0", [a], finish_reason="stop", num_cached_tokens=4)])
    second = state.take(delta=True)
    assert second.finished
    assert [output.index for output in second.outputs] == [0]
    assert state.metrics.num_cached_tokens == 4
    assert [output.token_ids for output in state.take().outputs] == [[a], [b]]


def test_error_of_one_sequence_fails_the_request(processor: OutputProcessor, tokenizer: Any) -> None:
    state, other = add(processor, tokenizer, n=3), add(processor, tokenizer, "other")
    error = ErrorInfo("InvalidAdapter", "broken", "lora")
    processed = processor.process([TokenDelta("r#1", error=error), TokenDelta("other", [70])])
    assert processed.aborts == ["r#0", "r#1", "r#2"]
    assert processed.touched == [state, other]
    with pytest.raises(AdapterError, match="broken"):
        state.take()
    assert other.take().outputs[0].token_ids == [70]
    assert len(processor) == 1


def test_a_bug_in_one_requests_output_fails_that_request(processor: OutputProcessor, tokenizer: Any) -> None:
    state, other = add(processor, tokenizer, logprobs=1), add(processor, tokenizer, "other")
    broken = TokenDelta("r", [70], [TokenLogprobs([70], [], 1)])
    processed = processor.process([broken, TokenDelta("other", [70])])
    assert processed.aborts == ["r"]
    assert isinstance(state.error, OutriderError)
    assert other.take().outputs[0].token_ids == [70]


def test_abort(processor: OutputProcessor, tokenizer: Any) -> None:
    state = add(processor, tokenizer, n=2)
    processor.process([TokenDelta("r#0", [70], finish_reason="length"), TokenDelta("r#1", [71])])
    assert processor.abort("r") == ["r#1"]
    assert processor.abort("r") == []
    output = state.take()
    assert output.finished
    assert [sequence.finish_reason for sequence in output.outputs] == ["length", "abort"]
    assert state.metrics.finished_time is not None


def test_fail_all_gives_each_its_own_error(processor: OutputProcessor, tokenizer: Any) -> None:
    states = [add(processor, tokenizer, "a"), add(processor, tokenizer, "b", n=2)]
    assert processor.fail_all(EngineDeadError("gone")) == states
    assert states[0].error is not states[1].error
    for state in states:
        with pytest.raises(EngineDeadError, match="gone"):
            state.take()
    assert processor.process([TokenDelta("b#1", [70])]).touched == []


def test_generated_text_comes_before_the_error(processor: OutputProcessor, tokenizer: Any) -> None:
    state = add(processor, tokenizer)
    processor.process([TokenDelta("r", [70, 71])])
    processor.fail_all(EngineDeadError("gone"))
    output = state.take(delta=True)
    assert output.outputs[0].token_ids == [70, 71]
    assert not output.finished
    for delta in (True, False):
        with pytest.raises(EngineDeadError, match="gone"):
            state.take(delta)


def test_ids_in_use_are_refused(processor: OutputProcessor, tokenizer: Any) -> None:
    add(processor, tokenizer, "r", n=2)
    for taken in ("r", "r#0"):
        with pytest.raises(InvalidRequestError) as caught:
            add(processor, tokenizer, taken)
        assert caught.value.param == "request_id"
    assert len(processor) == 1


def test_metrics(processor: OutputProcessor, tokenizer: Any) -> None:
    state = add(processor, tokenizer, n=2)
    metrics = state.metrics
    assert metrics.first_token_time is None
    processor.process([TokenDelta("r#0")])
    assert metrics.first_token_time is None
    processor.process([TokenDelta("r#0", [70])])
    first = metrics.first_token_time
    processor.process(
        [
            TokenDelta("r#0", [70], finish_reason="length", speculation=SpeculationCounts(2, 4, 3, [2, 1], [1, 0, 2])),
            TokenDelta(
                "r#1", [70], finish_reason="length", speculation=SpeculationCounts(1, 3, 2, [1, 1, 0], [4, 0, 0, 1])
            ),
        ]
    )
    assert metrics.first_token_time == first
    assert metrics.finished_time is not None
    assert first is not None
    assert metrics.arrival_time <= first <= metrics.finished_time
    assert (metrics.num_verifications, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (3, 7, 5)
    assert metrics.accepted_per_pos == [3, 2, 0]
    assert metrics.steps_by_k == [5, 0, 2, 1]
    assert metrics.acceptance_rate == 5 / 7
    assert metrics.acceptance_length == 1 + 5 / 3
    assert (RequestMetrics().acceptance_rate, RequestMetrics().acceptance_length) == (None, None)


def drafted(request_id: str, token_ids: list[int], num_draft_tokens: int, num_accepted: int) -> TokenDelta:
    return TokenDelta(request_id, token_ids, num_draft_tokens=num_draft_tokens, num_accepted=num_accepted)


def test_drafted_tokens_are_marked(processor: OutputProcessor, tokenizer: Any) -> None:
    state = add(processor, tokenizer, n=2)
    processor.process([drafted("r#0", [70, 71, 72], 4, 2), TokenDelta("r#1", [73])])
    processor.process([drafted("r#0", [74, 75], 1, 1), drafted("r#1", [76, 77], 4, 1)])
    first, second = state.take(delta=True).outputs  # two deltas at once: the consumer is slow
    assert (first.token_ids, first.drafted) == ([70, 71, 72, 74, 75], [True, True, False, True, False])
    assert (second.token_ids, second.drafted) == ([73, 76, 77], [False, True, False])
    assert (first.rejected_drafts, second.rejected_drafts) == ([0, 0, 2, 0, 0], [0, 0, 3])
    processor.process([TokenDelta("r#0", [78], finish_reason="length")])
    assert [output.drafted for output in state.take(delta=True).outputs] == [[False]]
    assert state.take().outputs[0].drafted == [True, True, False, True, False, False]
    assert state.take().outputs[0].rejected_drafts == [0, 0, 2, 0, 0, 0]


def test_marks_stay_with_their_tokens_when_text_is_held_back(processor: OutputProcessor, tokenizer: Any) -> None:
    """Half a character and a prefix of a stop string have no text yet: their tokens come all the same."""
    emoji = ids(tokenizer, "🙂")
    assert len(emoji) > 2
    state = add(processor, tokenizer, stop=["xyz"])
    processor.process([TokenDelta("r", emoji[:2], num_accepted=1)])
    output = state.take(delta=True).outputs[0]
    assert (output.text, output.token_ids, output.drafted) == ("", emoji[:2], [True, False])
    processor.process([TokenDelta("r", emoji[2:], num_accepted=len(emoji) - 2)])
    output = state.take(delta=True).outputs[0]
    assert (output.text, output.drafted) == ("🙂", [True] * (len(emoji) - 2))
    processor.process([TokenDelta("r", ids(tokenizer, "x"), num_accepted=0)])
    output = state.take(delta=True).outputs[0]
    assert (output.text, output.drafted) == ("", [False])
    tail = [token for char in "yzab" for token in ids(tokenizer, char)]
    processed = processor.process([TokenDelta("r", tail, num_accepted=3)])
    assert processed.aborts == ["r"]
    output = state.take(delta=True).outputs[0]
    assert (output.token_ids, output.drafted, output.finish_reason) == (tail[:2], [True, True], "stop")


@pytest.mark.slow
@given(
    tokens=st.lists(st.integers(5, 339), min_size=1, max_size=30),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    takes=st.lists(st.booleans(), min_size=1, max_size=7),
)
@settings(max_examples=75)
def test_deltas_add_up_however_they_are_taken(
    tokenizer: Any, tokens: list[int], sizes: list[int], takes: list[bool]
) -> None:
    processor = OutputProcessor()
    state = add(processor, tokenizer, max_tokens=99, stop=["q", "the"])
    outputs, start, index = [], 0, 0
    while start < len(tokens) and not state.finished:
        end = start + sizes[index % len(sizes)]
        processor.process([TokenDelta("r", tokens[start:end], finish_reason="length" if end >= len(tokens) else None)])
        if takes[index % len(takes)] or state.finished:
            outputs += state.take(delta=True).outputs
        start, index = end, index + 1
    [whole] = state.take().outputs
    assert "".join(output.text for output in outputs) == whole.text
    assert [token for output in outputs for token in output.token_ids] == whole.token_ids
    assert outputs[-1].finish_reason == whole.finish_reason
