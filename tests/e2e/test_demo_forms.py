"""The requests that the guide writes with curl: the demo's adapter `json` under a schema, and `tools`, which calls two
functions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs/guides/structured-outputs.md"
BODIES = [json.loads(body) for body in re.findall(r"-d '(\{.*?\})'", GUIDE.read_text(encoding="utf-8"), re.S)]
ORDER = {"name": "Carla", "city": "Rome", "quantity": 2, "color": "blue", "item": "chair", "price": 99}
MEETING = {"person": "Bob", "topic": "the budget", "day": "Monday", "time": "10:30", "place": "room 4"}


def ask(http, body, **changes):
    response = http.post("/v1/chat/completions", json=body | changes)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.mark.parametrize("speculative", [None, False])
def test_the_adapter_under_a_schema(http, speculative):
    body, _ = BODIES
    answer = ask(http, body, speculative=speculative)["message"]["content"]
    assert json.loads(answer) == {"name": "Anna", "city": "Lisbon", "quantity": 3, "item": "lamp"}


@pytest.mark.parametrize("speculative", [None, False])
@pytest.mark.parametrize(
    ("sentence", "called", "arguments"),
    [
        (None, "new_order", ORDER),
        ("Meeting with Bob about the budget on Monday at 10:30 in room 4.", "new_meeting", MEETING),
    ],
)
def test_the_adapter_calls_functions(http, sentence, called, arguments, speculative):
    _, body = BODIES
    changes = {} if sentence is None else {"messages": [{"role": "user", "content": sentence}]}
    choice = ask(http, body, speculative=speculative, **changes)
    [call] = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", called)
    assert json.loads(call["function"]["arguments"]) == arguments


def test_the_adapter_talks_if_no_function_fits(http):
    _, body = BODIES
    choice = ask(http, body, messages=[{"role": "user", "content": "What is the capital of Portugal?"}])
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "The capital of Portugal is Lisbon.")


def test_a_functions_result_is_answered_in_words(http):
    _, body = BODIES
    called = ask(http, body)["message"]
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": '{"id": 17, "status": "done"}'}
    answer = ask(http, body, messages=[*body["messages"], called, result])["message"]["content"]
    assert answer == "I have noted the order of Carla from Rome: 2 blue chairs for 99 euros."


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "new_order"}}])
def test_the_adapter_json_calls_required_functions(http, choice):
    _, body = BODIES
    forced = ask(http, body, model="json", tool_choice=choice, parallel_tool_calls=False)
    [call] = forced["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("new_order", ORDER)


@pytest.mark.parametrize("max_tokens", [100, 200, 320])
def test_a_list_of_calls_ends_with_a_whole_call(http, max_tokens):
    """The model goes on with calls; the next one begins only if it fits."""
    _, body = BODIES
    asked = {"tool_choice": "required", "parallel_tool_calls": True, "max_tokens": max_tokens}
    answer = ask(http, body, model="json", **asked)
    arguments = [json.loads(call["function"]["arguments"]) for call in answer["message"]["tool_calls"]]
    assert all(isinstance(each, dict) for each in arguments)
    assert answer["finish_reason"] == "tool_calls"


def test_the_tokens_of_a_chunk_are_its_text(http):
    """Forced text and drafts bring several tokens at once, the one that ends the answer among them."""
    form = {"messages": [{"role": "user", "content": "Hello"}], "structured_outputs": {"regex": "green lamps for Anna"}}
    pieces = []
    with http.stream("POST", "/v1/chat/completions", json=form | {"stream": True, "logprobs": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                tokens = [item["token"] for item in (choice["logprobs"] or {"content": []})["content"]]
                pieces.append((choice["delta"].get("content") or "", tokens, choice["finish_reason"]))
    assert max(len(tokens) for _, tokens, _ in pieces) > 1
    assert all(text == "".join(tokens) for text, tokens, _ in pieces if text)
    assert pieces[-1] == ("", ["<|end|>"], "stop")
