"""Bounds of request bodies are checked before work is done on them; bodies within them are served."""

import asyncio
import gc
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from outrider.platform.client.process.event_loops import in_event_loop
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.outputs import Logprob
from outrider.platform.http.body.bounds import BOUNDS, MAX_DEPTH, MAX_TEXT, MAX_UNKNOWN_FIELDS, check_shape
from outrider.platform.http.body.lenient import adapt
from outrider.platform.http.openai.logprobs import pack, unpack
from outrider.platform.http.openai.protocol import ChatCompletionRequest, CompletionRequest

from ....error_answers import error_in

COMPLETION = {"prompt": "Hi", "max_tokens": 3}


def count_values(value: Any) -> int:
    """Values behind a comma: all but the first of each list and object."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return max(0, len(items) - 1) + sum(map(count_values, items))


@pytest.mark.parametrize("size", [0, 20_000])
@pytest.mark.parametrize(
    "nested", [lambda n: json.loads("[" * n + "]" * n), lambda n: json.loads('{"a":' * n + "1" + "}" * n)]
)
def test_depth_is_bounded_in_bodies_of_all_sizes(http, nested, size):
    """The body itself is a level."""
    fits = {"metadata": nested(MAX_DEPTH - 1)} | COMPLETION | ({"chat": "x" * size} if size else {})
    assert http.post("/v1/completions", fits).status_code == 200
    error = error_in(http.post("/v1/completions", fits | {"metadata": nested(MAX_DEPTH)}))
    assert f"nested more than {MAX_DEPTH} levels deep" in error["message"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_values_are_counted_whatever_the_strings_hold(seed):
    source = random.Random(seed)

    def text() -> str:
        size = source.choice([0, 1, 3, 40, 300_000 if source.random() < 0.01 else 5])
        return "".join(source.choices('\\\\\\"[]{},:aé😀\n', k=size))

    def value(depth: int) -> Any:
        kind = source.randrange(6 if depth else 3)
        if kind < 3:
            return [text(), source.random(), None][kind]
        items = [value(depth - 1) for _ in range(source.randrange(12))]
        return items if kind < 5 else {text(): item for item in items}

    content = {"prompt": "x" * 17_000 + "\\" * source.randrange(600_000), "rest": [value(4) for _ in range(60)]}
    raw = bytearray(json.dumps(content, ensure_ascii=source.random() < 0.5).encode())
    count = count_values(content)
    asyncio.run(check_shape(raw, CompletionRequest, count))
    with pytest.raises(InvalidRequestError, match=f"more than {count - 1} values"):
        asyncio.run(check_shape(raw, CompletionRequest, count - 1))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (["a"] * 70_000, "prompt has more than 65536 strings"),
        ([[]] * 20_000, "prompt has more than 16384 lists and objects"),
        ([{}] * 20_000, "prompt has more than 16384 lists and objects"),
        ([1] * 300_000, "prompt has more than 262144 values"),
        (json.loads("[" * 100 + '"' + "a" * 20_000 + '"' + "]" * 100), f"prompt is nested more than {MAX_DEPTH}"),
    ],
)
def test_the_shape_is_bounded(http, llm, value, words):
    error = error_in(http.post("/v1/completions", COMPLETION | {"prompt": value}))
    assert error["param"] == "prompt"
    assert words in error["message"]
    assert not llm.calls


def test_longer_contexts_have_room_for_more_values(http, llm):
    body = {"tokens": [5] * 300_000}
    assert error_in(http.post("/detokenize", body))["message"].startswith("tokens has more than")
    llm.info = replace(llm.info, max_model_len=100_000)
    assert http.post("/detokenize", body).status_code == 200


@pytest.mark.parametrize("name", [name for name in BOUNDS if name in ChatCompletionRequest.model_fields])
def test_each_row_of_the_table(http, llm, name):
    items, size = BOUNDS[name]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    for value in (
        *([] if items is None else [[5] * (items + 1)]),
        *(
            []
            if size is None
            else ["a" * (size + 1), ["a" * (size + (items or 0))], {"a": "b" * (size + (items or 0))}]
        ),
    ):
        error = error_in(http.post("/v1/chat/completions", chat | {name: value}))
        assert error["param"] == name
        assert str(items) in error["message"] or str(size) in error["message"]
        assert len(error["message"]) < 200
    assert not llm.calls


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/unload_lora_adapter", {"lora_name": "a", "tenant": "t" * (MAX_TEXT + 1)}, "tenant"),
        ("/v1/completions", COMPLETION | {"stream_options": {"x": ["y" * 70_000]}}, "stream_options"),
        ("/v1/completions", COMPLETION | {"wings": ["y" * 70_000]}, "wings"),
        ("/v1/completions", COMPLETION | {f"w{i}": 1 for i in range(MAX_UNKNOWN_FIELDS + 1)}, "w0"),
    ],
)
def test_fields_without_a_row_are_bounded_too(http, llm, path, body, param):
    error = error_in(http.post(path, body))
    assert error["param"] == param
    assert len(error["message"]) < 200
    assert not llm.calls


def test_the_largest_values_are_served(http, llm):
    body = {
        "prompt": ["Hi"] * 4,
        "model": "base",
        "stop": ["s" * 128] * 64,
        "bad_words": ["b" * 16] * 1000,
        "stop_token_ids": [5] * 1024,
        "allowed_token_ids": list(range(256)),
        "logit_bias": dict.fromkeys(map(str, range(256)), 1.0),
        "cache_salt": "s" * 1024,
        "user": "u" * 1024,
        "max_tokens": 3,
    }
    response = http.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    assert len(llm.calls) == 4


@pytest.mark.parametrize("name", ["stop", "bad_words", "stop_token_ids", "allowed_token_ids"])
def test_a_list_of_a_wrong_type_has_one_error(http, name):
    error = error_in(http.post("/v1/completions", COMPLETION | {name: [None] * 60}))
    assert error["message"].count("should be") <= 2
    assert error["param"].startswith(name)


@pytest.mark.parametrize("name", ["stop", "bad_words", "stop_token_ids", "allowed_token_ids", "prompt", "adapters"])
def test_validation_ends_at_the_first_wrong_entry(name):
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(COMPLETION | {name: [None] * 60})
    assert caught.value.error_count() <= 5  # one of each alternative


@pytest.mark.parametrize("name", ["allowed_token_ids", "logit_bias"])
def test_long_lists_for_many_sequences(http, llm, name):
    value = [5] * 1024 if name == "allowed_token_ids" else dict.fromkeys(map(str, range(1024)), 1.0)
    error = error_in(http.post("/v1/completions", COMPLETION | {"prompt": ["Hi"] * 100, "n": 10, name: value}))
    assert error["param"] == name
    assert not llm.calls


@pytest.mark.parametrize(
    ("path", "body"), [("/detokenize", {"tokens": [10**4200]}), ("/v1/completions", {"prompt": [10**4200]})]
)
def test_a_long_number_is_not_repeated(http, path, body):
    assert len(error_in(http.post(path, body))["message"]) < 200


@pytest.mark.parametrize(("size", "in_loop"), [(1, True), (5000, False)])
def test_a_long_body_is_parsed_off_the_event_loop(http, monkeypatch, size, in_loop):
    seen = []

    def adapt_and_see(*args, **options):
        seen.append(in_event_loop())
        return adapt(*args, **options)

    monkeypatch.setattr("outrider.platform.http.body.reader.adapt", adapt_and_see)
    assert http.post("/v1/completions", COMPLETION | {"wings": ["abcd"] * size}).status_code == 200
    assert seen == [in_loop]


# --- log-probabilities ---


def test_kept_log_probabilities_are_nothing_to_collect():
    entries = {5: Logprob(-1.0, 1, "a", b"a"), 6: Logprob(-2.0, 2, "b", b"b")}
    packed = pack(entries)
    gc.collect()
    assert not gc.is_tracked(packed)
    assert unpack(packed) == entries


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 128, "max_tokens": 2000, "logprobs": 5}, "logprobs"),
        ({"prompt": ["a" * 2000] * 100, "max_tokens": 1, "prompt_logprobs": 5}, "prompt_logprobs"),
        ({"prompt": "a" * 2000, "n": 128, "max_tokens": 1, "prompt_logprobs": 5}, "prompt_logprobs"),
    ],
)
def test_log_probabilities_of_a_request_are_bounded(http, llm, more, param):
    llm.info = llm.input_processor._info = replace(llm.info, max_model_len=4096)
    error = error_in(http.post("/v1/completions", COMPLETION | more))
    assert error["param"] == param
    assert "at most 1048576 log-probabilities" in error["message"]
    assert not llm.calls


def test_without_max_tokens_the_answer_ends_at_the_bound(http, llm):
    llm.info = llm.input_processor._info = replace(llm.info, max_model_len=4096)
    body = {"messages": [{"role": "user", "content": "a"}], "n": 128, "logprobs": True, "top_logprobs": 5}
    assert http.post("/v1/chat/completions", body).status_code == 200
    assert llm.calls[0]["params"].max_tokens == (1 << 20) // (128 * 6)


@pytest.mark.slow
def test_large_answers_in_pieces_are_the_same(http, llm):
    """The answer is sent while it is being made; small requests, put together, say the same."""
    llm.info = llm.input_processor._info = replace(llm.info, max_model_len=4096)
    llm.reply = "".join(random.Random(0).choices('abc"\\é', k=4000))
    body = COMPLETION | {"max_tokens": 4000, "logprobs": 5, "return_token_ids": True}
    whole = http.post("/v1/completions", body)
    assert "content-length" not in whole.headers
    [choice] = whole.json()["choices"]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == llm.reply
    assert choice["token_ids"] == list(map(ord, llm.reply))
    lists = {name: choice["logprobs"][name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert {name: len(values) for name, values in lists.items()} == dict.fromkeys(lists, 4000)
    assert lists["text_offset"] == list(range(4000))
    streamed: dict[str, list[Any]] = {name: [] for name in lists}
    for line in http.post("/v1/completions", body | {"stream": True}).text.splitlines():
        if line.startswith("data: {"):
            for part in json.loads(line[6:])["choices"]:
                for name in lists:
                    streamed[name] += (part["logprobs"] or {}).get(name, [])
    assert streamed == lists
