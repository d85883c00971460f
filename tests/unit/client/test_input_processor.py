"""Prompts to engine requests, and everything that is refused on the way."""

import itertools
from typing import Any

import pytest
from fake_engine import MAX_MODEL_LEN, VOCAB_SIZE, FakeEngine

from outrider.platform.client.input_processor import FIRST_PIECE_CHARS, InputProcessor
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import InvalidRequestError, PromptTooLongError
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.messages import MAX_TENANT_WEIGHT
from outrider.platform.core.model_limits import check_params
from outrider.platform.core.sampling_params import MAX_SEED, SamplingParams


@pytest.fixture
def processor(tokenizer: Any) -> InputProcessor:
    return InputProcessor(tokenizer, FakeEngine(EngineArgs(model="x")).info, [1])


def test_text_becomes_token_ids(processor: InputProcessor, tokenizer: Any) -> None:
    lora = LoRARequest("sql", path="/sql")
    [request] = processor.prepare("r", "hello", lora=lora, priority=3, tenant="t", cache_salt="s").sequences()
    assert request.prompt_token_ids == tokenizer.encode("hello")
    assert (request.request_id, request.lora, request.priority) == ("r", lora, 3)
    assert (request.tenant, request.cache_salt, request.eos_token_ids, request.group) == ("t", "s", [1], None)
    assert request.arrival_time > 0
    assert request.params == SamplingParams()


@pytest.mark.parametrize("prompt", [[5, 6], (5, 6), {"prompt_token_ids": [5, 6]}, {"prompt_token_ids": range(5, 7)}])
def test_token_ids_are_taken_as_they_are(processor: InputProcessor, prompt: Any) -> None:
    assert processor.prepare("r", prompt).sequences()[0].prompt_token_ids == [5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["hello", "hello world " * 3, "word " * 5000])
@pytest.mark.parametrize("most", [1, 3, 7, 10_000])
@pytest.mark.parametrize("special", [True, False])
def test_a_cut_text_is_the_first_tokens(
    processor: InputProcessor, tokenizer: Any, text: str, most: int, special: bool
) -> None:
    whole = tokenizer.encode(text, add_special_tokens=special)
    bare = tokenizer.encode(text, add_special_tokens=False)
    cut = processor.encode_cut(text, most, add_special_tokens=special)
    assert len(cut) == min(most, len(whole))
    around = len(whole) - len(bare)
    if most >= len(whole):
        assert list(cut) == whole
    elif most > around:
        kept = [token for token in cut if token in set(bare)]
        assert kept[-(most - around) :] == bare[: most - around]


def test_numpy_ids_become_plain_integers(processor: InputProcessor) -> None:
    numpy = pytest.importorskip("numpy")
    ids = processor.prepare("r", numpy.array([5, 6])).sequences()[0].prompt_token_ids
    assert [type(token_id) for token_id in ids] == [int, int]


def test_ids_win_over_text_and_salt_may_come_with_the_prompt(processor: InputProcessor) -> None:
    parsed = processor.parse_prompt({"prompt": "hello", "prompt_token_ids": [7], "cache_salt": "s"})
    assert (parsed.token_ids, parsed.cache_salt) == ([7], "s")


def test_n_sequences_have_their_own_seeds_and_one_group(processor: InputProcessor) -> None:
    params = SamplingParams(n=3, seed=MAX_SEED - 1)
    requests = processor.prepare("r", "hello", params).sequences()
    assert [r.request_id for r in requests] == ["r#0", "r#1", "r#2"]
    assert [r.params.seed for r in requests] == [MAX_SEED - 1, MAX_SEED, -MAX_SEED - 1]
    assert {(r.group, r.params.n) for r in requests} == {("r", 1)}
    assert requests[0].prompt_token_ids is requests[1].prompt_token_ids
    assert params.n == 3
    assert {r.params.seed for r in processor.prepare("r", "hello", SamplingParams(n=2)).sequences()} == {None}
    assert {r.params.seed for r in processor.prepare("r", "hello", SamplingParams(n=2, seed=-1)).sequences()} == {None}
    assert [r.params.seed for r in processor.prepare("r", "hello", SamplingParams(n=3, seed=-3)).sequences()] == [
        -3,
        -2,
        0,
    ]


def test_the_tenants_weight_goes_with_every_sequence(processor: InputProcessor) -> None:
    assert [r.weight for r in processor.prepare("r", "a", SamplingParams(n=2), weight=0.25).sequences()] == [0.25, 0.25]
    assert processor.prepare("r", "a").sequences()[0].weight == 1.0


def test_max_tokens_none_is_the_rest_of_the_context(processor: InputProcessor) -> None:
    [request] = processor.prepare("r", [5] * 20, SamplingParams(max_tokens=None)).sequences()
    assert request.params.max_tokens == MAX_MODEL_LEN - 20


def test_bad_words_are_found_after_a_space_too(processor: InputProcessor, tokenizer: Any) -> None:
    [request] = processor.prepare("r", "x", SamplingParams(bad_words=["fox"])).sequences()
    assert request.params.bad_words_token_ids == [
        tokenizer.encode("fox", add_special_tokens=False),
        tokenizer.encode(" fox", add_special_tokens=False),
    ]


def test_a_bad_word_without_tokens_is_refused(processor: InputProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(processor.tokenizer), "encode", lambda *_, **__: [])
    with pytest.raises(InvalidRequestError, match="bad_words"):
        processor.prepare("r", [5], SamplingParams(bad_words=["fox"])).sequences()


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"bad_words_token_ids": [[1] * 9000, [2] * 9000]}, "bad_words"),
        ({"bad_words_token_ids": [[1] * 9000], "n": 64}, "bad_words"),
        ({"allowed_token_ids": [1, 2] * 16_000, "n": 128}, "allowed_token_ids"),
    ],
)
def test_an_engines_work_for_one_request_is_bounded(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field} has .* tokens.*; at most") as caught:
        check_params(SamplingParams(**params), 32_000, 20)
    assert caught.value.param == field


def test_repeated_bad_words_count_once(processor: InputProcessor) -> None:
    [request] = processor.prepare("r", "x", SamplingParams(bad_words=["fox", "dog", "fox", " fox"])).sequences()
    assert len(request.params.bad_words_token_ids) == 4


def test_end_tokens_that_the_vocabulary_lacks_are_dropped(tokenizer: Any) -> None:
    info = FakeEngine(EngineArgs(model="x")).info
    assert InputProcessor(tokenizer, info, [-1, 1, VOCAB_SIZE]).eos_token_ids == [1]


@pytest.mark.parametrize(("max_tokens", "wanted"), [(4, [2, None, None]), (1, [2, 2, 2])])
def test_the_first_sibling_reports_the_prompt(
    processor: InputProcessor, max_tokens: int, wanted: list[int | None]
) -> None:
    """The others need not compute it; a prompt without an answer may fill the context, and is taken for that alone."""
    params = SamplingParams(n=3, prompt_logprobs=2, max_tokens=max_tokens)
    assert [r.params.prompt_logprobs for r in processor.prepare("r", "hello", params).sequences()] == wanted


def test_siblings_share_unchanged_fields(processor: InputProcessor) -> None:
    requests = processor.prepare("r", "hello", SamplingParams(n=3, stop_token_ids=[3], bad_words=["fox"])).sequences()
    assert len({id(r.params.stop_token_ids) for r in requests}) == 1
    assert len({id(r.params.bad_words_token_ids) for r in requests}) == 1


@pytest.mark.parametrize(
    ("prompt", "params", "param", "words"),
    [
        ("", {}, "prompt", ["empty"]),
        ([], {}, "prompt", ["empty"]),
        ({}, {}, "prompt", ["neither"]),
        ({"prompt": "a", "multi_modal_data": 1}, {}, "prompt", ["multi_modal_data"]),
        ({"prompt": 3}, {}, "prompt", ["string"]),
        ({"prompt_token_ids": "abc"}, {}, "prompt", ["token ids"]),
        ({"prompt_token_ids": [1.5]}, {}, "prompt", ["integers"]),
        (5, {}, "prompt", ["token ids"]),
        ("\ud800", {}, "prompt", ["Unicode"]),
        ({"prompt": "a", "cache_salt": "\ud800"}, {}, "cache_salt", ["Unicode"]),
        ({"prompt": "a", "cache_salt": 5}, {}, "cache_salt", ["string"]),
        ({"prompt": "a", "cache_salt": "s" * 1025}, {}, "cache_salt", ["1025", "1024"]),
        ([5, VOCAB_SIZE], {}, "prompt", [str(VOCAB_SIZE), f"{VOCAB_SIZE} tokens"]),
        ([-1], {}, "prompt", ["-1"]),
        ("a", {"logprobs": 6}, "logprobs", ["6", "5"]),
        ("a", {"prompt_logprobs": 6}, "prompt_logprobs", ["6", "5"]),
        ("a", {"stop_token_ids": [400]}, "stop_token_ids", ["400"]),
        ("a", {"allowed_token_ids": [1, 999]}, "allowed_token_ids", ["999"]),
        ("a", {"logit_bias": {401: 1.0}}, "logit_bias", ["401"]),
        ("a", {"stop": "x", "detokenize": False}, "stop", ["detokenize"]),
        ([5] * 100, {"max_tokens": None, "min_tokens": 50}, "min_tokens", ["50", "28"]),
    ],
)
def test_refused(processor: InputProcessor, prompt: Any, params: dict[str, Any], param: str, words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        processor.prepare("r", prompt, SamplingParams(**params)).sequences()
    assert caught.value.param == param
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("length", "max_tokens", "param", "figures"),
    [(MAX_MODEL_LEN, 1, "prompt", ["128"]), (100, 29, "max_tokens", ["29", "100", "129", "128"])],
)
def test_too_long(processor: InputProcessor, length: int, max_tokens: int, param: str, figures: list[str]) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        processor.prepare("r", [5] * length, SamplingParams(max_tokens=max_tokens)).sequences()
    assert caught.value.param == param
    assert all(figure in caught.value.message for figure in figures)


@pytest.mark.parametrize(("length", "default", "granted"), [(8, 16, 16), (MAX_MODEL_LEN - 3, 16, 3), (8, None, None)])
def test_a_default_of_max_tokens_is_lowered_to_the_room(
    processor: InputProcessor, length: int, default: int | None, granted: int | None
) -> None:
    params = SamplingParams(max_tokens=None)
    prepared = processor.prepare("r", [5] * length, params, default_max_tokens=default)
    assert prepared.params.max_tokens == (granted or MAX_MODEL_LEN - length)
    named = processor.prepare("r", [5] * length, SamplingParams(max_tokens=2), default_max_tokens=default)
    assert named.params.max_tokens == 2


def test_prompt_and_max_tokens_may_fill_the_context(processor: InputProcessor) -> None:
    assert processor.prepare("r", [5] * 100, SamplingParams(max_tokens=28)).sequences()
    assert processor.prepare("r", [5] * (MAX_MODEL_LEN - 1), SamplingParams(max_tokens=1)).sequences()


@pytest.mark.parametrize(
    ("arguments", "options", "param"),
    [
        (("r", "a", {"temperature": 1}), {}, "sampling_params"),
        (("r", "a"), {"priority": "high"}, "priority"),
        (("r", "a"), {"priority": 2**64}, "priority"),
        (("r", "a"), {"cache_salt": "\ud800"}, "cache_salt"),
        (("r", "a"), {"tenant": "\ud800"}, "tenant"),
        (("r", "a"), {"weight": "1"}, "weight"),
        (("r", "a"), {"weight": True}, "weight"),
        (("r", "a"), {"weight": 0.0}, "weight"),
        (("r", "a"), {"weight": -1.0}, "weight"),
        (("r", "a"), {"weight": float("nan")}, "weight"),
        (("r", "a"), {"weight": float("inf")}, "weight"),
        (("r", "a"), {"weight": 2 * MAX_TENANT_WEIGHT}, "weight"),
        (("r", "a"), {"lora": "sql"}, "lora_request"),
    ],
)
def test_wrong_types(processor: InputProcessor, arguments: Any, options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        processor.prepare(*arguments, **options).sequences()
    assert caught.value.param == param


# --- chat -----------------------------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "hello"}]


def render(processor: InputProcessor, messages: Any, **options: Any) -> str:
    return processor.tokenizer.decode(processor.chat_prompt(messages, options)["prompt_token_ids"])  # type: ignore[arg-type]


def test_template_writes_the_special_tokens(processor: InputProcessor) -> None:
    assert render(processor, HELLO) == "<|user|>hello</s><|assistant|>"
    assert render(processor, HELLO, add_generation_prompt=False) == "<|user|>hello</s>"
    assert render(processor, HELLO, chat_template_kwargs={"suffix": "!"}).endswith("<|assistant|>!")
    assert render(processor, HELLO, chat_template="{{ messages[0].content }}?") == "hello?"


def test_final_message_is_continued(processor: InputProcessor) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "well"}]
    text = render(processor, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|user|>hello</s><|assistant|>well"


def test_text_parts_are_joined(processor: InputProcessor) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "a\nb" in render(processor, [{"role": "user", "content": parts}])


def test_tool_calls_reach_the_template_as_objects(processor: InputProcessor) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    template = "{{ messages[0].tool_calls[0].function.arguments.x }}{{ messages[0].content }}|"
    assert render(processor, messages, chat_template=template) == "1|"


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        ([], {}, "messages"),
        ("hello", {}, "messages"),
        (["hello"], {}, "messages"),
        ([{"content": "a"}], {}, "messages"),
        ([{"role": "user"}], {}, "messages"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "messages"),
        ([{"role": "user", "content": 5}], {}, "messages"),
        ([{"role": "user", "content": "\ud800"}], {}, "messages"),
        ([{"role": "a", "tool_calls": ["f"]}], {}, "messages"),
        ([{"role": "bad", "content": "a"}], {}, "messages"),
        (HELLO, {"chat_template": "{{ 1 / 0 }}"}, "messages"),
        (HELLO, {"chat_template": "{% for %}"}, "messages"),
        (HELLO, {"continue_final_message": True}, "continue_final_message"),
        (HELLO, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
)
def test_refused_chat(processor: InputProcessor, messages: Any, options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        processor.chat_prompt(messages, options)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_no_template(processor: InputProcessor, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(InvalidRequestError, match=r"no chat template.*--chat-template"):
        processor.chat_prompt(HELLO, {})


def test_unknown_chat_option(processor: InputProcessor) -> None:
    with pytest.raises(TypeError, match="chat_tmplate"):
        processor.chat_prompt(HELLO, {"chat_tmplate": "x"})  # type: ignore[typeddict-unknown-key]


def test_only_a_prefix_of_a_far_too_long_text_is_tokenized(
    processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    encode = type(processor.tokenizer).encode

    def measured(self: Any, text: str, **options: Any) -> list[int]:
        lengths.append(len(text))
        return list(encode(self, text, **options))

    monkeypatch.setattr(type(processor.tokenizer), "encode", measured)
    text = "a b" * 1_000_000
    for param, call in {
        "prompt": lambda: processor.parse_prompt(text),
        "messages": lambda: processor.chat_prompt([{"role": "user", "content": text}], {}),
    }.items():
        with pytest.raises(PromptTooLongError, match=f"at most {MAX_MODEL_LEN} are taken") as caught:
            call()
        assert caught.value.param == param
    assert max(lengths) < 100 * MAX_MODEL_LEN


def test_long_tokens_may_fill_the_context(processor: InputProcessor) -> None:
    longest = max(processor.tokenizer.get_vocab(), key=len)
    assert len(longest) > FIRST_PIECE_CHARS
    assert len(processor.parse_prompt(longest * (MAX_MODEL_LEN - 2)).token_ids) < MAX_MODEL_LEN


def test_endless_token_ids_are_too_long(processor: InputProcessor) -> None:
    with pytest.raises(PromptTooLongError):
        processor.prepare("r", itertools.repeat(5))  # type: ignore[arg-type]


def test_a_full_context_is_too_long_with_default_parameters(processor: InputProcessor) -> None:
    for prompt in ([5] * MAX_MODEL_LEN, [5] * (MAX_MODEL_LEN + 9)):
        with pytest.raises(
            PromptTooLongError, match=rf"\({len(prompt)} in the prompt, 1 in the completion\)"
        ) as caught:
            processor.prepare("r", prompt)
        assert caught.value.param == "prompt"


def test_a_prompt_that_is_only_scored_may_fill_the_context(processor: InputProcessor) -> None:
    whole = [5] * MAX_MODEL_LEN
    [request] = processor.prepare("r", whole, SamplingParams(prompt_logprobs=0, max_tokens=1)).sequences()
    assert (len(request.prompt_token_ids), request.params.max_tokens) == (MAX_MODEL_LEN, 1)
    for prompt, params in (
        ([*whole, 5], SamplingParams(prompt_logprobs=0, max_tokens=1)),
        (whole, SamplingParams(prompt_logprobs=0, max_tokens=2)),
        (whole, SamplingParams(prompt_logprobs=0, max_tokens=None)),
        (whole, SamplingParams(max_tokens=1)),
    ):
        with pytest.raises(PromptTooLongError) as caught:
            processor.prepare("r", prompt, params).sequences()
        num_tokens, max_tokens = len(prompt), params.max_tokens or 1
        requested = f"{num_tokens + max_tokens} tokens ({num_tokens} in the prompt, {max_tokens} in the completion)"
        assert f"you requested {requested}" in caught.value.message
