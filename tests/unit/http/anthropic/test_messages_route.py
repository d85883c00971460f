"""`/v1/messages`, in front of an engine that answers from a script."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from outrider.platform.core.errors import EngineDeadError, OverloadedError

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
MESSAGES = [{"role": "user", "content": "Weather?"}]
TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = {"name": "get_weather", "arguments": {"city": "Lisbon"}}


@pytest.fixture(autouse=True)
def writes_tools(llm):
    """The script's tokenizer, with a template that writes all of a conversation, and longer contexts."""
    kind = type(llm.tokenizer)

    class ToolTokenizer(kind):
        chat_template = "fake <tool_call>"

        def apply_chat_template(self, conversation: Any, *, tools: Any = None, **options: Any) -> str:
            llm.options, llm.conversation = options, conversation
            calls = [m[name] for m in conversation for name in ("tool_calls", "reasoning_content") if name in m]
            text = json.dumps([tools, calls]) if tools or calls else ""
            return text + super().apply_chat_template(conversation, **options)

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return super().decode(ids)

    llm.tokenizer = llm.input_processor.tokenizer = ToolTokenizer()
    llm.info = replace(llm.info, max_model_len=2048)
    llm.input_processor._info = llm.info


def create(http, **fields):
    return http.post(PATH, {"messages": MESSAGES, "max_tokens": 500} | fields)


def message(response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()


def streamed(http, **fields) -> list[dict[str, Any]]:
    """Events of a stream."""
    response = create(http, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.strip().split("\n\n"):
        event, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert events[-1]["type"] == event.removeprefix("event: ")
    return events


def check_error(response, status: int, kind: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == kind
    return response.json()["error"]


def test_an_answer(http, llm):
    answer = message(create(http, system="Be brief", metadata={"user_id": "u"}))
    assert answer.pop("id").startswith("msg-")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "base",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len("s:Be brief|u:Weather?|a:") - 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 5,
        },
    }
    assert message(create(http, max_tokens=2))["stop_reason"] == "max_tokens"


def test_a_stream(http, llm):
    events = streamed(http)
    assert [event["type"] for event in events] == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * 5, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 5


def test_parameters_reach_the_engine(http, llm):
    create(http, temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["x", "y"], seed=4, speculative=False)
    params = llm.calls[-1]["params"]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 3, 500)
    assert (params.stop, params.seed, params.speculative) == (["x", "y"], 4, False)


def test_a_call_and_thinking(http, llm):
    llm.reply = f"<think>Hm</think>I look.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    answer = message(create(http, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024}))
    assert answer["stop_reason"] == "tool_use"
    thinking, text, call = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm", "signature": "unsigned"}
    assert text == {"type": "text", "text": "I look."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", CALL["arguments"])
    assert llm.options["enable_thinking"] is True
    events = streamed(http, tools=[TOOL])
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"] == [
        "thinking", "text", "tool_use",
    ]  # fmt: skip


def test_a_template_variable_that_is_given_counts_more_than_thinking(http, llm):
    for given in (True, False):
        kind = {"type": "disabled"} if given else {"type": "enabled", "budget_tokens": 1024}
        message(create(http, thinking=kind, chat_template_kwargs={"enable_thinking": given, "more": 1}))
        assert (llm.options["enable_thinking"], llm.options["more"]) == (given, 1)


def test_thinking_is_found_without_tools(http, llm):
    llm.reply = "<think>Hm</think>Hello"
    assert [b["type"] for b in message(create(http, thinking={"type": "adaptive"}))["content"]] == ["thinking", "text"]
    assert message(create(http, thinking={"type": "disabled"}))["content"] == [{"type": "text", "text": llm.reply}]
    assert llm.options["enable_thinking"] is False


def test_tools_of_a_coding_agent(http, llm):
    """They have more than 100,000 characters: too long for this context, not for a body."""
    tools = [TOOL | {"name": f"tool_{index}", "description": "a" * 6000} for index in range(20)]
    assert "prompt is too long" in check_error(create(http, tools=tools), 400, "invalid_request_error")["message"]


def test_forced_calls(http, llm):
    llm.reply = json.dumps(CALL["arguments"])
    answer = message(create(http, tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"}))
    assert (answer["stop_reason"], answer["content"][0]["input"]) == ("tool_use", CALL["arguments"])
    assert json.loads(llm.calls[-1]["params"].structured_outputs.json) == TOOL["input_schema"]
    choice = {"type": "any", "disable_parallel_tool_use": True}  # of one tool
    answer = message(create(http, tools=[TOOL], tool_choice=choice))
    assert answer["content"][0]["input"] == CALL["arguments"]
    assert json.loads(llm.calls[-1]["params"].structured_outputs.json) == TOOL["input_schema"]
    llm.reply = json.dumps([{"name": "get_weather", "parameters": CALL["arguments"]}])
    two = [TOOL, TOOL | {"name": "other"}]
    for choice, most in (({"type": "any"}, 1), ({"type": "any", "disable_parallel_tool_use": False}, None)):
        answer = message(create(http, tools=two, tool_choice=choice))
        assert answer["content"][0]["input"] == CALL["arguments"]
        assert json.loads(llm.calls[-1]["params"].structured_outputs.json).get("maxItems") == most
    assert create(http, tools=[TOOL], tool_choice={"type": "none"}).status_code == 200
    assert llm.calls[-1]["params"].structured_outputs is None


def test_a_form_of_the_answer(http, llm):
    llm.reply = "{}"
    create(http, output_config={"format": {"type": "json_schema", "schema": TOOL["input_schema"]}, "effort": "low"})
    assert json.loads(llm.calls[-1]["params"].structured_outputs.json) == TOOL["input_schema"]
    assert llm.options["reasoning_effort"] == "low"


def test_a_conversation_with_tools(http, llm):
    """Results become messages of tools, neighbours of one role one message."""
    use = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Zoë"}}
    messages = [
        {"role": "user", "content": "A"},
        {"role": "user", "content": [{"type": "text", "text": "B", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "C", "signature": "x"}, use]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "D"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "E", "is_error": True},
                {"type": "text", "text": "F"},
            ],
        },
    ]
    assert create(http, messages=messages, tools=[TOOL]).status_code == 200
    user, assistant, result, failed, last = llm.conversation
    assert (user["role"], user["content"]) == ("user", "A\nB")
    assert assistant["reasoning_content"] == "C"
    assert assistant["tool_calls"][0]["id"] == "t1"
    arguments = assistant["tool_calls"][0]["function"]["arguments"]
    assert (json.loads(arguments) if isinstance(arguments, str) else arguments) == {"city": "Zoë"}
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "D", "t1")
    assert failed["content"] == "Error: E"
    assert (last["role"], last["content"]) == ("user", "F")


def test_the_answer_goes_on_with_the_assistants_text(http, llm):
    create(http, messages=[*MESSAGES, {"role": "assistant", "content": "It is"}])
    ids = llm.calls[-1]["prompt"]["prompt_token_ids"]
    assert "".join(map(chr, ids)) == "u:Weather?|a:It is"


def test_tokens_are_counted(http, llm):
    body = {"messages": MESSAGES, "tools": [TOOL], "system": [{"type": "text", "text": "Be brief"}]}
    counted = http.post(COUNT, body).json()["input_tokens"]
    usage = message(http.post(PATH, body | {"max_tokens": 5}))["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 3000}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "content": [
                {"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            "messages[1].content",
        ),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"if": {}}}}}, "output_config.format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"n": 2}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(http, fields, param):
    error = check_error(create(http, **fields), 400, "invalid_request_error")
    assert error["param"] == param
    assert param in error["message"] or param == "messages"


def test_thinking_of_neighbours_is_joined(http, llm):
    thoughts = [{"type": "thinking", "thinking": text, "signature": ""} for text in ("a", "b")]
    answers = [{"role": "assistant", "content": thoughts}, {"role": "assistant", "content": thoughts[:1]}]
    assert message(create(http, messages=[*MESSAGES, *answers, *MESSAGES]))
    assert llm.conversation[1]["reasoning_content"] == "aba"


def test_errors_have_anthropics_form(http, make_http, llm):
    check_error(create(http, model="nobody"), 404, "not_found_error")
    check_error(http.get(PATH), 405, "invalid_request_error")
    keyed = make_http(api_keys=("k",))
    check_error(create(keyed), 401, "authentication_error")
    for headers in ({"x-api-key": "k", "anthropic-version": "2023-06-01"}, {"Authorization": "Bearer k"}):
        answer = keyed.post(PATH, {"messages": MESSAGES, "max_tokens": 5}, headers=headers)
        assert message(answer)
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
    llm.fail_after, llm.error = 0, OverloadedError("full")
    check_error(create(http), 529, "overloaded_error")
    llm.error = RuntimeError("secret")
    assert "secret" not in str(check_error(create(http), 500, "api_error"))
    llm.fail_after, llm.error = 2, EngineDeadError("died")
    events = streamed(http)
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "overloaded_error")
    assert [event["type"] for event in events].count("content_block_delta") == 2


def test_ignored_fields_are_named(http):
    answer = create(http, thinking={"type": "enabled", "budget_tokens": 9}, service_tier="auto", speed="fast")
    assert answer.headers["x-outrider-ignored"] == "thinking.budget_tokens,speed"


def test_models_in_anthropics_form(http, make_http):
    version = {"anthropic-version": "2023-06-01"}
    names = ["base", "alias", "m1", "m2", "m3"]
    for name in names[2:]:
        http.load_adapter(name)

    def page(**query):
        answer = http.get("/v1/models", headers=version, params=query)
        assert answer.status_code == 200, answer.text
        assert answer.headers["request-id"]
        body = answer.json()
        return [model["id"] for model in body["data"]], body["has_more"], body["first_id"], body["last_id"]

    assert page() == (names, False, "base", "m3")
    assert page(limit=2) == (names[:2], True, "base", "alias")
    assert page(limit=2, after_id="alias") == (["m1", "m2"], True, "m1", "m2")
    assert page(limit=2, after_id="m2") == (["m3"], False, "m3", "m3")
    assert page(after_id="m3") == ([], False, None, None)
    assert page(limit=2, before_id="m3") == (["m1", "m2"], True, "m1", "m2")
    assert page(limit=2, before_id="m1") == (["base", "alias"], False, "base", "alias")
    model = http.get("/v1/models/m1", headers=version).json()
    assert (model["type"], model["id"], model["display_name"], model["max_input_tokens"]) == ("model", "m1", "m1", 2048)
    assert model["created_at"].endswith("Z")
    assert http.get("/v1/models/m1").json()["object"] == "model", "without the header it is OpenAI's"
    assert http.get("/v1/models", params={"limit": 0}).json()["object"] == "list"
    check_error(http.get("/v1/models/nobody", headers=version), 404, "not_found_error")
    check_error(make_http(api_keys=("k",)).get("/v1/models", headers=version), 401, "authentication_error")
    for query in ({"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"after_id": "nobody"}, {"before_id": "nobody"}):
        error = check_error(http.get("/v1/models", headers=version, params=query), 400, "invalid_request_error")
        assert error["param"] == next(iter(query))


def test_a_far_too_long_text_has_the_same_error(http):
    messages = [{"role": "user", "content": "word " * 20_000}]
    error = check_error(create(http, messages=messages), 400, "invalid_request_error")
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
    assert found, error["message"]
    assert int(found[1]) > int(found[2])
