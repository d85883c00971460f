"""Values between tags and their types, and calls that are cut off in a response."""

from __future__ import annotations

import json

import pytest

from outrider.platform.http.openai.responses.output import OutputItems
from outrider.platform.http.openai.tools.formats import FORMATS
from outrider.platform.http.openai.tools.parser import FormatParser


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "array"}, "['a', True, None]", ["a", True, None]),
        ({"type": "object"}, "{'a': (1, 2)}", {"a": [1, 2]}),
        ({"anyOf": [{"type": "object"}, {"type": "null"}]}, '{"a": 1}', {"a": 1}),
        ({"type": "array"}, "open('x')", "open('x')"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "True", True),
        ({"const": 3}, "3", 3),
        ({"type": "number"}, "1_0", "1_0"),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "array"}, "[NaN]", "[NaN]"),
        ({"type": "string"}, "[1]", "[1]"),
        ({}, "1", "1"),
    ],
)
def test_values_of_tags_have_the_types_of_the_schema(schema, text, value):
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    parser = FormatParser(FORMATS["qwen3_coder"], "", with_calls=True, tools=tools)
    answer = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    begun, *more = [delta["tool_calls"][0]["function"] for delta in parser.feed(answer) + parser.finish()]
    assert begun["name"] == "f"
    assert json.loads("".join(each["arguments"] for each in (begun, *more))) == {"a": value}


CUT = '<think>Hm</think><tool_call>{"name": "get_weather", "arguments": {"ci'
WHOLE = 'I look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'


@pytest.mark.parametrize(
    ("text", "status", "statuses"),
    [
        (CUT, "incomplete", ["completed", "incomplete"]),
        (CUT, "completed", ["completed", "incomplete"]),  # by a stop string
        (WHOLE, "incomplete", ["completed", "completed"]),
        ('<tool_call>{"name": "f", "arguments": {"a": </tool_call>Hm', "completed", ["incomplete", "completed"]),
    ],
)
def test_a_call_is_complete_when_its_arguments_are(text, status, statuses):
    output = OutputItems(FormatParser(FORMATS["hermes"], "", with_calls=True))
    output.feed(text)
    output.finish(status)
    assert [item["status"] for item in output.items] == statuses
