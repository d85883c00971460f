"""Token ids in and out of a real server that drafts: what is rendered, generated and derendered is the chat."""

from __future__ import annotations

import json
import re

import pytest

GENERATE = "/inference/v1/generate"
QUESTION = [{"role": "user", "content": "Anna Schmidt from Berlin ordered 3 red chairs for 120 euros."}]


def ask(http, path, **body):
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(http, **body):
    text = http.post(GENERATE, json={**body, "stream": True}).text
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]


@pytest.mark.parametrize("model", ["outrider-demo", "json", "sql"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 4, "n": 3, "stop": ["e"]}])
def test_three_steps_are_one_chat(http, model, sampling):
    body = {"model": model, "messages": QUESTION, "max_tokens": 40, "logprobs": True, "top_logprobs": 2, **sampling}
    want = ask(http, "/v1/chat/completions", **body, return_token_ids=True)
    rendered = ask(http, "/v1/chat/completions/render", **body)
    assert rendered["token_ids"] == want["prompt_token_ids"]
    generated = ask(http, GENERATE, **rendered)
    assert [choice["token_ids"] for choice in generated["choices"]] == [c["token_ids"] for c in want["choices"]]
    got = ask(http, "/v1/chat/completions/derender", model=model, generate_response=generated, chat_request=body)
    for choice, wanted in zip(got["choices"], want["choices"], strict=True):
        for name in ("message", "finish_reason", "stop_reason", "index"):
            assert choice[name] == wanted[name], name
        for entry, other in zip(choice["logprobs"]["content"], wanted["logprobs"]["content"], strict=True):
            assert (entry["token"], entry["bytes"]) == (other["token"], other["bytes"])
            assert entry["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
            assert [top["token"] for top in entry["top_logprobs"]] == [top["token"] for top in other["top_logprobs"]]
    assert got["usage"]["completion_tokens"] == want["usage"]["completion_tokens"]


def test_completions_round_trip(http):
    body = {"prompt": ["SELECT name FROM", "The capital"], "max_tokens": 8, "temperature": 0, "n": 2}
    want = ask(http, "/v1/completions", **body, return_token_ids=True)["choices"]
    generated = [ask(http, GENERATE, **each) for each in ask(http, "/v1/completions/render", **body)]
    got = ask(http, "/v1/completions/derender", generate_responses=generated, completion_request=body)["choices"]
    assert [choice["text"] for choice in got] == [choice["text"] for choice in want]
    assert [c["token_ids"] for each in generated for c in each["choices"]] == [c["token_ids"] for c in want]


def test_a_stream_has_the_ids_of_the_whole(http):
    rendered = ask(http, "/v1/chat/completions/render", model="json", messages=QUESTION, temperature=0, max_tokens=30)
    del rendered["stream"], rendered["stream_options"]
    want = ask(http, GENERATE, **rendered)["choices"][0]
    chunks = events(http, **rendered, stream_options={"include_usage": True})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [token for choice in choices for token in choice["token_ids"]] == want["token_ids"]
    assert choices[-1]["finish_reason"] == want["finish_reason"]
    assert chunks[-1]["usage"]["completion_tokens"] == len(want["token_ids"])
    assert any(len(choice["token_ids"]) > 1 for choice in choices)  # it drafts


def test_bounds_hold_over_http(http):
    body = {"model": "json", "messages": QUESTION, "temperature": 0, "max_tokens": 40, "return_token_ids": True}
    free = ask(http, "/v1/chat/completions", **body)["choices"][0]["token_ids"]
    end = next(token for token in range(100, 200) if token not in free)
    bounded = ask(http, "/v1/chat/completions", **body, thinking_token_budget=6, thinking_end_token_ids=[end])
    assert bounded["choices"][0]["token_ids"][:7] == [*free[:6], end]
    given = {"logprobs": True, "logprob_token_ids": [end, free[0]]}
    entries = ask(http, "/v1/chat/completions", **body, **given)["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(free)
    assert entries[0]["top_logprobs"][1]["logprob"] == entries[0]["logprob"]
    pattern = {"max_pattern_size": 3, "min_count": 2}
    bias = {str(token): 100 for token in free[:1]}
    choice = ask(http, "/v1/chat/completions", **body, repetition_detection=pattern, logit_bias=bias)["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"]) == (free[:1] * 2, "repetition")


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_comes_back_from_its_ids(tools_server, api_key, stream):
    tool = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Lisbon"]}},
            "required": ["city"], "additionalProperties": False}}  # fmt: skip
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 60, "tool_choice": "required",
            "tools": [{"type": "function", "function": tool}]}  # fmt: skip
    with tools_server.http(headers={"authorization": f"Bearer {api_key}"}) as http:
        assert http.post(GENERATE, json={"token_ids": [5]}, headers={"authorization": ""}).status_code == 401
        want = ask(http, "/v1/chat/completions", **body)["choices"][0]
        rendered = ask(http, "/v1/chat/completions/render", **body)
        if stream:
            del rendered["stream"]
            ids = [t for chunk in events(http, **rendered) for choice in chunk["choices"] for t in choice["token_ids"]]
            generated = {"choices": [{"index": 0, "token_ids": ids, "finish_reason": "stop"}]}
        else:
            generated = ask(http, GENERATE, **rendered)
        got = ask(http, "/v1/chat/completions/derender", generate_response=generated, chat_request=body)["choices"][0]
    for choice in (got, want):
        [call] = choice["message"]["tool_calls"]
        assert call.pop("id")
    assert got["message"] == want["message"]
    assert got["finish_reason"] == want["finish_reason"] == "tool_calls"


def test_reasoning_ends_inside_a_grammar(http):
    """The mark is forced because the grammar allows it after any letter; then the grammar's own part follows."""
    [end] = ask(http, "/tokenize", prompt=";", add_special_tokens=False)["tokens"]
    form = "[a-z ]{0,60};[A-Z]{3}"
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 80, "return_token_ids": True,
            "structured_outputs": {"regex": form}, "thinking_token_budget": 5,
            "thinking_end_token_ids": [end]}  # fmt: skip
    drafted, plain = (
        ask(http, "/v1/chat/completions", **body, speculative=speculative)["choices"][0]
        for speculative in (None, False)
    )
    assert drafted == plain
    assert drafted["token_ids"].index(end) <= 5
    assert re.fullmatch(form, drafted["message"]["content"])
