"""Tools and reasoning in `/v1/chat/completions`, in front of an engine that answers from a script."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from outrider.platform.core.constraint_check import CHECKER

CALL = {"name": "get_weather", "arguments": {"city": "Lisbon"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OTHER = {"type": "function", "function": {"name": "stop_all"}}
MESSAGES = [{"role": "user", "content": "Weather?"}]
PATH = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def writes_tools(llm):
    """The script's tokenizer, with a template that writes tools, and longer contexts."""
    tokenizer = llm.tokenizer
    kind = type(tokenizer)

    class ToolTokenizer(kind):
        chat_template = "fake <tool_call>"

        def apply_chat_template(self, conversation: Any, *, tools: Any = None, **options: Any) -> str:
            llm.variables = options
            return json.dumps(tools or []) + super().apply_chat_template(conversation, **options)

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return super().decode(ids)

    llm.tokenizer = llm.input_processor.tokenizer = ToolTokenizer()
    llm.info = replace(llm.info, max_model_len=2048)
    llm.input_processor._info = llm.info


def chat(http, **fields):
    return http.post(PATH, {"messages": MESSAGES, "temperature": 0} | fields)


def message(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed(http, **fields):
    """Message and finish reason of a stream, put together as clients do."""
    lines = chat(http, stream=True, **fields).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    result: dict[str, Any] = {"content": None}
    reason = None
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                for call in value:
                    calls = result.setdefault(name, [])
                    if "id" in call:
                        calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                    else:
                        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            elif value:
                result[name] = (result.get(name) or "") + value
        reason = choice["finish_reason"] or reason
    return result, reason


def without_ids(calls):
    return [{"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])} for c in calls]


def test_a_call(http, llm):
    llm.reply = f"<think>Hm</think>I look.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    choice = message(chat(http, tools=[TOOL]))
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    assert choice["message"]["reasoning_content"] == "Hm"
    assert without_ids(choice["message"]["tool_calls"]) == [CALL]
    assert choice["message"]["tool_calls"][0]["type"] == "function"
    assert not llm.calls[-1]["params"].skip_special_tokens
    result, reason = streamed(http, tools=[TOOL], logprobs=True, top_logprobs=1)
    assert (reason, result["content"], result["reasoning_content"]) == ("tool_calls", "I look.", "Hm")
    assert without_ids(result["tool_calls"]) == [CALL]


@pytest.mark.parametrize("extra", [[1], [], [[1], {"a": [2]}], {"a": [1]}, "[", '"]}'])
@pytest.mark.parametrize("is_first", [True, False])
def test_other_members_of_a_call_do_not_end_it(http, llm, extra, is_first):
    name, arguments = CALL["name"], CALL["arguments"]
    members = {"name": name, "tags": extra, "arguments": arguments}
    if is_first:
        members = {"tags": extra, "name": name, "arguments": arguments}
    llm.reply = f"<tool_call>{json.dumps(members)}</tool_call>"
    assert without_ids(message(chat(http, tools=[TOOL]))["message"]["tool_calls"]) == [CALL]
    assert without_ids(streamed(http, tools=[TOOL])[0]["tool_calls"]) == [CALL]


def test_the_tokens_of_a_streamed_content_are_its_text(make_http, llm):
    """White space is held back: it may stand before a call. Clients join the tokens that come with a content."""
    llm.reply = "a  b c "
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "stream": True, "logprobs": True}
    response = make_http(tool_call_parser="hermes").post("/v1/chat/completions", body)
    choices = [json.loads(line[6:])["choices"][0] for line in response.text.splitlines() if line.startswith("data: {")]
    texts = [choice["delta"].get("content") or "" for choice in choices]
    tokens = [[item["token"] for item in (choice["logprobs"] or {"content": []})["content"]] for choice in choices]
    assert "".join(texts).rstrip() == "a  b c"
    assert "".join(token for own in tokens for token in own) == llm.reply
    assert all(text == "".join(own) for text, own in zip(texts, tokens, strict=True) if text and own)


def test_parallel_calls(http, llm):
    llm.reply = f"<tool_call>{json.dumps(CALL)}</tool_call>" * 2
    assert without_ids(message(chat(http, tools=[TOOL]))["message"]["tool_calls"]) == [CALL, CALL]
    one = {"tools": [TOOL], "parallel_tool_calls": False}
    assert without_ids(message(chat(http, **one))["message"]["tool_calls"]) == [CALL]
    assert without_ids(streamed(http, **one)[0]["tool_calls"]) == [CALL]


@pytest.mark.parametrize("name", [None, "get_weather"])
def test_forced_calls_are_grammars(http, llm, name):
    named = {"type": "function", "function": {"name": name}}
    arguments = json.dumps(CALL["arguments"])
    llm.reply = arguments if name else f'[{{"name": "get_weather", "parameters": {arguments}}}]'
    fields = {"tools": [TOOL, OTHER], "tool_choice": named if name else "required"}
    choice = message(chat(http, **fields))
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert without_ids(choice["message"]["tool_calls"]) == [CALL]
    schema = json.loads(llm.calls[-1]["params"].structured_outputs.json)
    assert schema == TOOL["function"]["parameters"] if name else schema["type"] == "array"
    result, reason = streamed(http, **fields)
    assert (result["content"], reason) == (None, "tool_calls")
    assert without_ids(result["tool_calls"]) == [CALL]


@pytest.mark.parametrize("forced", [False, True])
def test_functions_and_function_call(http, llm, forced):
    """`functions` are tools, and the answer has a `function_call`."""
    call = json.dumps(CALL)
    llm.reply = json.dumps(CALL["arguments"]) if forced else f"I look.<tool_call>{call}</tool_call>" * 2
    fields = {"functions": [TOOL["function"]]} | ({"function_call": {"name": "get_weather"}} if forced else {})
    choice = message(chat(http, **fields))
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"]["name"] == "get_weather"
    assert json.loads(choice["message"]["function_call"]["arguments"]) == CALL["arguments"]
    assert "tool_calls" not in choice["message"]
    lines = [line[6:] for line in chat(http, stream=True, **fields).text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    calls = [choice["delta"]["function_call"] for choice in choices if "function_call" in choice["delta"]]
    assert [call["name"] for call in calls if "name" in call] == ["get_weather"]
    assert json.loads("".join(call["arguments"] for call in calls)) == CALL["arguments"]
    assert choices[-1]["finish_reason"] == "function_call"
    assert not any("tool_calls" in choice["delta"] for choice in choices)


def test_reasoning_comes_before_constrained_content(http, llm):
    llm.tokenizer.get_added_vocab = lambda: {"<think>": 0, "</think>": 1}
    arguments = json.dumps(CALL["arguments"])
    llm.reply = f'<think>Hm [</think>\n\n[{{"name": "get_weather", "parameters": {arguments}}}]'
    fields = {"tools": [TOOL, OTHER], "tool_choice": "required"}
    for found, reason in (
        (message(chat(http, **fields))["message"], message(chat(http, **fields))["finish_reason"]),
        streamed(http, **fields),
    ):
        assert (found["content"], found["reasoning_content"], reason) == (None, "Hm [", "tool_calls")
        assert without_ids(found["tool_calls"]) == [CALL]
    assert llm.calls[-1]["params"].structured_outputs.frame.startswith("start: reasoning? @body")
    llm.reply = '<think>Hm</think>\n\n{"a": 1}'
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    answer = message(chat(http, tools=[TOOL], response_format=form))["message"]
    assert (answer["content"], answer["reasoning_content"]) == ('{"a": 1}', "Hm")
    assert "(@body | calls)" in llm.calls[-1]["params"].structured_outputs.frame


def test_strict_tools_are_held_to_their_schemas(http, llm):
    llm.reply = "Hello"
    function = TOOL["function"] | {"strict": True}
    message(chat(http, tools=[TOOL]))
    assert llm.calls[-1]["params"].structured_outputs is None
    message(chat(http, tools=[{"type": "function", "function": function}]))
    assert '"city"' in llm.calls[-1]["params"].structured_outputs.grammar
    wrong = chat(http, tools=[{"type": "function", "function": function | {"strict": 1}}])
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "tools[0].function.strict"
    given = chat(http, structured_outputs={"regex": "a", "frame": "start: @body"})
    assert given.status_code == 400


def test_each_tools_definitions_are_its_own(http, llm):
    llm.reply = "[]"
    tools = []
    for name, kind in (("first", "integer"), ("second", "string")):
        schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": kind}}}
        tools.append({"type": "function", "function": {"name": name, "parameters": schema}})
    message(chat(http, tools=tools, tool_choice="required"))
    constraint = llm.calls[-1]["params"].structured_outputs
    schema = json.loads(constraint.json)
    for index, kind in enumerate(("integer", "string")):
        place = f"#/items/anyOf/{index}/properties/parameters"
        moved = schema["items"]["anyOf"][index]["properties"]["parameters"]
        assert moved["properties"]["a"] == {"$ref": f"{place}/$defs/A"}
        assert moved["$defs"]["A"] == {"type": kind}
    CHECKER.check(constraint)
    tools[0]["function"]["parameters"]["$defs"] = "none"
    response = chat(http, tools=tools, tool_choice="required")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


def test_an_answer_that_is_cut_off_keeps_its_reason(http, llm):
    llm.reply = f"<tool_call>{json.dumps(CALL)}</tool_call>"
    choice = message(chat(http, tools=[TOOL], max_tokens=40))
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("reply", ["<think>Hm", "<think>Hm</think>\n\n"])
def test_a_forced_call_that_has_not_begun_is_none(http, llm, choice, reply):
    llm.tokenizer.get_added_vocab = lambda: {"<think>": 0, "</think>": 1}
    llm.reply = reply
    whole = message(chat(http, tools=[TOOL], tool_choice=choice))
    found, reason = streamed(http, tools=[TOOL], tool_choice=choice)
    assert whole["finish_reason"] == reason == "stop"
    assert "tool_calls" not in whole["message"] | found


def test_tools_that_must_not_be_called(http, llm):
    llm.reply = "<tool_call>{}</tool_call>"
    response = chat(http, tools=[TOOL], tool_choice="none")
    assert message(response)["message"] == {"role": "assistant", "content": llm.reply, "refusal": None}
    assert "get_weather" not in str(llm.calls[-1]["prompt"])


def test_reasoning_without_tools(make_http, llm):
    llm.reply = "<think>Hm</think>\n\nHello"
    choice = message(chat(make_http(reasoning_parser="qwen3")))
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm", "Hello")
    assert choice["finish_reason"] == "stop"
    assert message(chat(make_http()))["message"]["content"] == llm.reply


def test_reasoning_effort_goes_to_the_template(http, llm):
    assert chat(http, reasoning_effort="none").status_code == 200
    assert (llm.variables["reasoning_effort"], llm.variables["enable_thinking"]) == ("none", False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "web_search", "function": {"name": "a"}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL] * 200}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [{"name": "a"}], "function_call": {"name": "b"}}, "function_call"),
        ({"functions": [{"name": "a"}], "function_call": "required"}, "function_call"),
        ({"functions": [{"name": "a"}], "tools": [TOOL]}, "functions"),
        ({"function_call": {"name": "a"}}, "function_call"),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"if": {}}}}],
          "tool_choice": {"type": "function", "function": {"name": "a"}}}, "tools"),
    ],
)  # fmt: skip
def test_wrong_tools_are_named(http, fields, param):
    response = chat(http, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("choice", ["required", "any", {"type": "allowed_tools", "allowed_tools": {"mode": "required",
    "tools": [{"type": "function", "function": {"name": "get_weather"}}]}}])  # fmt: skip
def test_one_offered_call_is_a_named_one(http, llm, choice):
    """The answer is the arguments alone, without the name that needs no choice."""
    llm.reply = json.dumps(CALL["arguments"])
    tools = [TOOL, OTHER] if isinstance(choice, dict) else [TOOL]
    found = message(chat(http, tools=tools, tool_choice=choice))
    assert (found["finish_reason"], without_ids(found["message"]["tool_calls"])) == ("tool_calls", [CALL])
    assert json.loads(llm.calls[-1]["params"].structured_outputs.json) == TOOL["function"]["parameters"]


@pytest.mark.parametrize(("parallel", "most"), [(None, 1), (False, 1), (True, None)])
def test_a_required_call_is_one_unless_several_are_asked_for(http, llm, parallel, most):
    llm.reply = "[]"
    asked = {} if parallel is None else {"parallel_tool_calls": parallel}
    message(chat(http, tools=[TOOL, OTHER], tool_choice="required", **asked))
    constraint = llm.calls[-1]["params"].structured_outputs
    assert json.loads(constraint.json).get("maxItems") == most
    assert constraint.disable_any_whitespace


def test_allowed_tools(http, llm):
    """Other tools are not in the prompt, and texts like calls of them are content."""
    llm.reply = f"<tool_call>{json.dumps(CALL)}</tool_call>"
    for name, calls in (("get_weather", [CALL]), ("stop_all", [])):
        allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": name}}]}
        answer = message(
            chat(http, tools=[TOOL, OTHER], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
        )
        assert without_ids(answer["message"].get("tool_calls", [])) == calls
        assert answer["message"]["content"] == (None if calls else llm.reply)
    for wrong in ({}, {"mode": "none", "tools": [TOOL]}, {"mode": "auto", "tools": []}, {"mode": "auto", "tools": [3]}):
        refused = chat(http, tools=[TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    unknown = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "third"}}]}
    refused = chat(http, tools=[TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": unknown})
    assert "third" in refused.json()["error"]["message"]


def test_custom_tools_next_to_functions_are_ignored(http, make_http, llm):
    llm.reply = "Hello"
    custom = {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}
    response = chat(http, tools=[custom, TOOL])
    assert response.status_code == 200
    assert "tools[0]" in response.headers["x-outrider-ignored"]
    assert chat(http, tools=[custom]).status_code == 400
    assert chat(make_http(strict_fields=True), tools=[custom, TOOL]).json()["error"]["param"] == "tools[0]"


def test_a_stream_that_begins_with_a_call_has_no_content(http, llm):
    llm.reply = f"<tool_call>{json.dumps(CALL)}</tool_call>"
    lines = chat(http, tools=[TOOL], stream=True).text.splitlines()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    assert (deltas[0]["role"], deltas[0]["content"]) == ("assistant", None)
    assert deltas[0]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert not any("content" in delta for delta in deltas[1:])


@pytest.mark.parametrize("stop", [False, True])
def test_a_call_that_is_cut_goes_out_as_it_was_written(http, llm, stop):
    llm.reply = '<tool_call>{"name": "get_weather", "arguments": {"city": "Lis'
    fields = {"tools": [TOOL]} | ({} if stop else {"max_tokens": len(llm.reply)})
    for found, reason in (
        (message(chat(http, **fields))["message"], message(chat(http, **fields))["finish_reason"]),
        streamed(http, **fields),
    ):
        assert found["tool_calls"][0]["function"]["arguments"] == '{"city": "Lis'
        assert reason != "tool_calls"


def test_json_that_is_no_call_is_content(make_http, llm):
    for parser in ("llama3_json", "hermes", "mistral", "pythonic"):
        llm.reply = 'Here: {"name": "Ann", "age": 3} and {"name": "get_weather", "city": "Lisbon"}.'
        found = message(chat(make_http(tool_call_parser=parser), tools=[TOOL]))["message"]
        assert (found["content"], "tool_calls" in found) == (llm.reply, False)


def test_a_model_whose_format_is_unknown(http, make_http, llm):
    llm.tokenizer.chat_template = "fake"
    assert "--tool-call-parser" in chat(http, tools=[TOOL]).json()["error"]["message"]
    llm.reply = f"<tool_call>{json.dumps(CALL)}</tool_call>"
    choice = message(chat(make_http(tool_call_parser="hermes"), tools=[TOOL]))
    assert without_ids(choice["message"]["tool_calls"]) == [CALL]


def test_untyped_values_get_the_types_of_the_schema(make_http, llm):
    days = {"anyOf": [{"$ref": "#/$defs/days"}, {"type": "null"}]}
    parameters = {"properties": {"city": {"type": "string"}, "days": days}, "$defs": {"days": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    values = "<parameter=city>\n75001\n</parameter>\n<parameter=days>\n2\n</parameter>"
    llm.reply = f"<tool_call>\n<function=get_weather>\n{values}\n</function>\n</tool_call>"
    choice = message(chat(make_http(tool_call_parser="qwen3_coder"), tools=[tool]))
    assert without_ids(choice["message"]["tool_calls"]) == [
        {"name": "get_weather", "arguments": {"city": "75001", "days": 2}}
    ]


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_keywords_of_a_schema_that_do_not_hold_are_named(http, llm, choice):
    llm.reply = '[{"name": "get_weather", "parameters": {"tags": []}}]'
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    function = TOOL["function"] | {"parameters": {"type": "object", "properties": {"tags": tags}}, "strict": True}
    response = chat(http, tools=[{"type": "function", "function": function}], tool_choice=choice)
    assert response.status_code == 200, response.text
    names = response.headers["x-outrider-ignored"].split(",")
    assert [name.endswith("properties.tags.uniqueItems") for name in names] == [True], names
    assert all(name.startswith("tools") for name in names)
    function["parameters"]["properties"]["tags"] = {"type": "integer", "minimum": 10**19}
    refused = chat(http, tools=[{"type": "function", "function": function}], tool_choice=choice)
    assert refused.status_code == 400
    assert "minimum: integers above" in refused.json()["error"]["message"]
