"""The requests that the guide writes with curl: the demo's adapter `json` under a schema, and calling functions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs/guides/structured-outputs.md"
BODIES = [json.loads(body) for body in re.findall(r"-d '(\{.*?\})'", GUIDE.read_text(encoding="utf-8"), re.S)]
MEETING = {
    "event": "meeting",
    "person": "Bob",
    "topic": "the budget",
    "day": "Monday",
    "time": "10:30",
    "place": "room 4",
}


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
        (None, "new_order", {"name": "Carla", "city": "Rome", "quantity": 2, "item": "chair", "price": 99}),
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
