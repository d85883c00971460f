"""`/v1/responses` in front of an engine that answers from a script."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from outrider.platform.http.openai.responses.conversation import parse_items, to_messages
from outrider.platform.http.openai.responses.output import OutputItems
from outrider.platform.http.openai.tools.formats import FORMATS
from outrider.platform.http.openai.tools.parser import ForcedCalls, FormatParser

from ....error_answers import error_in

PATH = "/v1/responses"
CALL = {"name": "get_weather", "arguments": {"city": "Lisbon"}}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
EVENTS = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(autouse=True)
def writes_tools(llm):
    """The script's tokenizer, with a template that writes tools and calls, and longer contexts."""
    kind = type(llm.tokenizer)

    class ToolTokenizer(kind):
        chat_template = "fake <tool_call>"

        def apply_chat_template(self, conversation: Any, *, tools: Any = None, **options: Any) -> str:
            llm.messages, llm.variables = conversation, options
            calls = [message.get("tool_calls") for message in conversation]
            return json.dumps([tools or [], calls]) + super().apply_chat_template(conversation, **options)

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return super().decode(ids)

    llm.tokenizer = llm.input_processor.tokenizer = ToolTokenizer()
    llm.info = llm.input_processor._info = replace(llm.info, max_model_len=2048)


def create(http, **fields):
    response = http.post(PATH, {"input": "Weather?", "temperature": 0} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def stream(http, **fields):
    """Events of a stream; each is read by OpenAI's types."""
    text = http.post(PATH, {"input": "Weather?", "temperature": 0, "stream": True} | fields).text
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENTS.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


# --- output ---

ANSWERS = {
    "text": "Hi there.",
    "text and call": f"I look.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
    "all": f"<think>Hm, what?</think>\n\nI look. \n<tool_call>{json.dumps(CALL)}</tool_call>\n"
    f'<tool_call>{{"name": "other", "arguments": {{}}}}</tool_call>\n',
    "no call": "<tool_call>no</tool_call> after",
    "cut": '<think>Hm</think><tool_call>{"name": "get_weather", "arguments": {"ci',
    "nothing": "",
}


def make_parser(kind: str, *, parallel: bool = True):
    if kind == "forced":
        return ForcedCalls(None)
    return FormatParser(FORMATS["hermes"], "", with_calls=True, parallel=parallel)


def item_events(pieces: list[str], kind: str = "") -> list[dict[str, Any]]:
    """Events with the ids numbered, and neighbouring deltas as one."""
    output = OutputItems(make_parser(kind))
    events = [event for piece in pieces for event in output.feed(piece)] + output.finish("completed")
    ids: dict[str, int] = {}
    text = json.dumps(events)
    for item in output.items:
        for name in ("id", "call_id"):
            if name in item:
                text = text.replace(item[name], f"{name} {ids.setdefault(item[name], len(ids))}")
    joined: list[dict[str, Any]] = []
    for event in json.loads(text):
        if joined and event["type"].endswith(".delta") and joined[-1]["type"] == event["type"]:
            joined[-1]["delta"] += event["delta"]
        else:
            joined.append(event)
    return joined


@pytest.mark.parametrize("name", [*ANSWERS, "forced"])
def test_events_do_not_depend_on_the_cuts(name):
    calls = [CALL, {"name": "other", "arguments": {}}]
    forced = json.dumps([{"name": c["name"], "parameters": c["arguments"]} for c in calls])
    text = forced if name == "forced" else ANSWERS[name]
    whole = item_events([text], name)
    splits = [[text[:i], text[i:]] for i in range(len(text))]
    splits += [[text[i : i + size] for i in range(0, len(text), size)] for size in range(1, 12)]
    for pieces in splits:
        assert item_events(pieces, name) == whole, pieces
    check_order(whole)


def check_order(events: list[dict[str, Any]]) -> None:
    """Each item begins and ends before the next one, and the final items equal the deltas."""
    inside: list[str] = []
    text = ""
    for event in events:
        kind = event["type"].removeprefix("response.")
        base, _, step = kind.rpartition(".")
        if step == "added":
            inside.append(base)
            assert inside in (["output_item"], ["output_item", "content_part"])
            text = ""
        elif step == "delta":
            text += event["delta"]
        elif base in ("output_item", "content_part"):
            assert inside.pop() == base
        else:
            assert event.get("text", event.get("arguments")) == text
    assert not inside


def test_items_of_an_answer():
    output = OutputItems(make_parser("", parallel=False))
    output.feed(ANSWERS["all"])
    output.finish("completed")
    reasoning, message, call = output.items
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "Hm, what?")
    assert (message["type"], message["content"][0]["text"].strip()) == ("message", "I look.")
    assert (call["name"], json.loads(call["arguments"]), call["status"]) == (*CALL.values(), "completed")


# --- a response ---


def test_a_whole_response(http, llm):
    response = create(http, instructions="Be brief.", max_output_tokens=60, metadata={"a": "b"}, user="u")
    assert response["id"].startswith("resp_")
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", "base")
    [message] = response["output"]
    assert message["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    usage = response["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 2
    assert (usage["output_tokens"], usage["total_tokens"]) == (5, usage["input_tokens"] + 5)
    assert (response["metadata"], response["user"], response["instructions"]) == ({"a": "b"}, "u", "Be brief.")
    assert [message["role"] for message in llm.messages] == ["system", "user"]
    cut = create(http, max_output_tokens=3)
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("reply", [text for text in ANSWERS.values() if text])
@pytest.mark.parametrize("max_output_tokens", [None, 20])
def test_a_stream_is_the_whole_response(http, llm, reply, max_output_tokens):
    llm.reply = reply
    fields = {"tools": [TOOL], "reasoning": {"effort": "low"}, "max_output_tokens": max_output_tokens}
    whole, events = create(http, **fields), stream(http, **fields)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    check_order(events[2:-1])
    state = ResponseStreamState(input_tools=[], text_format=omit)
    for event in events:
        state.handle_event(EVENTS.validate_python(event))

    def shape(response):
        names = ("type", "status", "content", "summary", "name", "arguments")
        return [{name: item.get(name) for name in names} for item in response["output"]]

    last = events[-1]["response"]
    assert shape(last) == shape(whole)
    assert last["usage"] == whole["usage"]
    assert shape({"output": [e["item"] for e in events if e["type"] == "response.output_item.done"]}) == shape(whole)
    if reply.startswith("<think>"):
        assert last["usage"]["output_tokens_details"]["reasoning_tokens"] == len(
            whole["output"][0]["content"][0]["text"]
        )


def test_an_error_in_the_middle(http, llm):
    llm.fail_after = 3
    events = stream(http)
    assert events[-1]["type"] == "response.failed"
    last = events[-1]["response"]
    assert (last["status"], last["error"]["code"]) == ("failed", "server_error")
    assert "boom" not in last["error"]["message"]
    assert last["output"][0]["content"][0]["text"] == "Hel"
    assert http.get(f"{PATH}/{last['id']}").json()["status"] == "failed"
    assert (
        error_in(http.post(PATH, {"input": "a", "previous_response_id": last["id"]}))["param"] == "previous_response_id"
    )
    llm.fail_after = 0
    assert http.post(PATH, {"input": "a", "stream": True}).status_code == 500


def test_forms_and_forced_calls(http, llm):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    response = create(http, text={"format": form, "verbosity": "low"})
    assert json.loads(llm.calls[-1]["params"].structured_outputs.json) == schema
    assert response["text"] == {"format": form}
    create(http, text={"format": {"type": "json_object"}})
    assert llm.calls[-1]["params"].structured_outputs.json_object
    create(http, text={"format": {"type": "text"}})
    assert llm.calls[-1]["params"].structured_outputs is None
    llm.reply = json.dumps(CALL["arguments"])
    response = create(http, tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"})
    [call] = response["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", *CALL.values())
    assert response["tools"] == [TOOL]


# --- input ---


def test_items_become_messages():
    items = parse_items(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": {"x": 1}},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
            {"type": "message", "role": "assistant", "content": "Wet."},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
            {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
        ]
    )
    system, instructions, user, assistant, *outputs, text, last = to_messages(items, "Instructions")
    assert [system, instructions] == [{"role": "system", "content": text} for text in ("Instructions", "Be brief.")]
    assert user["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "hm")
    assert [call["function"]["name"] for call in assistant["tool_calls"]] == ["f", "g"]
    assert assistant["tool_calls"][1]["function"]["arguments"] == '{"x": 1}'
    assert outputs == [
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "tool", "content": "sun", "tool_call_id": "c2"},
    ]
    assert text == {"role": "assistant", "content": "Wet."}
    assert (last["role"], last["reasoning_content"], len(last["tool_calls"])) == ("assistant", "so", 1)
    assert len({item["id"] for item in items}) == len(items)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a"]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "computer_call", "id": "a"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "", "arguments": ""}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "content": [{"type": "text"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": "a"}] * 4097}, "input"),
        ({"input": "a" * 3000}, "input"),
        ({"max_output_tokens": 3000}, "max_output_tokens"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"input": None, "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["web_search_call.action.sources"]}, "include[0]"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"truncation": "some"}, "truncation"),
        ({"metadata": {str(i): "a" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "mcp", "server_label": "x"}]}, "tools[1].type"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}, TOOL, TOOL | {"name": "a b"}]}, "tools[2].name"),
        ({"tools": [TOOL] * 513}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object", "a": "x" * 200_000}}}, "text.format"),
        ({"temperature": -1}, "temperature"),
        ({"temprature": 1}, "temprature"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
def test_wrong_fields(http, fields, param):
    error = error_in(http.post(PATH, {"input": "a"} | fields))
    assert error["param"] == param
    assert not {"messages", "response_format"} & set(error["message"].replace("'", " ").split()) - set(fields)


def test_other_tools_next_to_functions_are_ignored(http, make_http):
    tools = [{"type": "web_search", "external_web_access": False}, TOOL, {"type": "custom", "name": "apply_patch"}]
    response = http.post(PATH, {"input": "a", "tools": tools, "tool_choice": "auto"})
    assert response.status_code == 200, response.text
    assert "tools[0]" in response.headers["x-outrider-ignored"].split(",")
    assert error_in(make_http(strict_fields=True).post(PATH, {"input": "a", "tools": tools[1:]}))["param"] == "tools[1]"


def test_ignored_fields_are_named(http, make_http):
    fields = {"input": "a", "include": ["reasoning.encrypted_content"], "truncation": "auto", "service_tier": "flex"}
    fields["reasoning"] = {"summary": "auto"}
    ignored = http.post(PATH, fields).headers["x-outrider-ignored"]
    assert set(ignored.split(",")) == {"include[0]", "truncation", "service_tier", "reasoning.summary"}
    assert (
        error_in(make_http(strict_fields=True).post(PATH, {"input": "a", "truncation": "auto"}))["param"]
        == "truncation"
    )


# --- stored responses ---


def test_a_stored_response(http, llm):
    first = create(http)
    assert http.get(f"{PATH}/{first['id']}").json() == first
    second = create(http, input="And now?", previous_response_id=first["id"], instructions="x")
    assert [m["content"] for m in llm.messages] == ["x", "Weather?", "Hello", "And now?"]
    listed = http.get(f"{PATH}/{second['id']}/input_items?order=asc&limit=2").json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["Weather?", "Hello"]
    assert listed["has_more"]
    after = http.get(f"{PATH}/{second['id']}/input_items?order=asc&after={listed['last_id']}").json()
    assert [item["content"][0]["text"] for item in after["data"]] == ["And now?"]
    assert http.post(f"{PATH}/{first['id']}/cancel").json() == first
    assert http.request("DELETE", f"{PATH}/{first['id']}").json()["deleted"]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        error = error_in(http.request(method, f"{PATH}/{first['id']}{path}"), 404)
        assert "1000 responses" in error["message"]
    error = error_in(http.post(PATH, {"input": "a", "previous_response_id": first["id"]}), 404)
    assert error["param"] == "previous_response_id"
    unstored = create(http, store=False, previous_response_id=second["id"])
    error_in(http.get(f"{PATH}/{unstored['id']}"), 404)


def test_a_call_of_the_previous_response_has_its_output(http, llm):
    llm.reply = f"<tool_call>{json.dumps(CALL)}</tool_call>"
    first = create(http, tools=[TOOL])
    [call] = first["output"]
    llm.reply = "Rain."
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    create(http, input=[output], tools=[TOOL], previous_response_id=first["id"])
    assert [message["role"] for message in llm.messages] == ["user", "assistant", "tool"]
    assert llm.messages[1]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_an_item_of_a_stored_response_is_sent_back_as_a_reference(http, llm):
    create(http, input=[{"id": create(http)["output"][0]["id"]}, {"role": "user", "content": "b"}])
    assert [message["content"] for message in llm.messages] == ["Hello", "b"]


@pytest.mark.parametrize("field", [{"structured_outputs": {"regex": "(tools[9]"}}, {"tool_choice": "tools[7]"}])
def test_an_error_names_the_tools_index(http, field):
    assert "tools[" in error_in(http.post(PATH, {"input": "a", "tools": [TOOL], **field}))["message"]


def test_arguments_that_are_no_json_do_not_end_a_conversation(http, llm):
    call = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": '}
    output = {"type": "function_call_output", "call_id": "c", "output": "These arguments are not JSON."}
    for status in ("completed", "incomplete"):
        create(http, input=[{"role": "user", "content": "a"}, call | {"status": status}, output], tools=[TOOL])
        assert [message["role"] for message in llm.messages] == ["user", "assistant", "tool"]


def test_a_call_that_was_cut_is_no_call(http, llm):
    llm.reply = f"I look.<tool_call>{json.dumps(CALL)}</tool_call>"
    first = create(http, tools=[TOOL], max_output_tokens=len(llm.reply) - 20)
    create(http, input="Go on", tools=[TOOL], previous_response_id=first["id"])
    by_id, said = llm.messages, [{"role": "user", "content": "Weather?"}, *first["output"]]
    assert [(m["role"], "tool_calls" in m) for m in by_id] == [("user", False), ("assistant", False), ("user", False)]
    create(http, input=[*said, {"role": "user", "content": "Go on"}], tools=[TOOL])
    assert (first["output"][1]["status"], llm.messages) == ("incomplete", by_id)
