"""Fields as particular clients send them: names of other servers, the same constraint twice, formats of calls."""

import json
from dataclasses import replace

import pytest

from outrider.platform.core.errors import AdapterError, NotFoundError
from outrider.platform.http.openai.responses.conversation import parse_items, to_messages

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
TIGHT = {"json": SCHEMA, "disable_any_whitespace": True}
MESSAGES = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@pytest.fixture
def writes_tools(llm):
    """The script's tokenizer, with a template that writes tools and calls."""

    class ToolTokenizer(type(llm.tokenizer)):
        chat_template = "fake <tool_call>"

        def apply_chat_template(self, conversation, *, tools=None, **options):
            calls = [message.get("tool_calls") for message in conversation]
            return json.dumps([tools or [], calls]) + super().apply_chat_template(conversation, **options)

        def decode(self, ids, skip_special_tokens=True):
            return super().decode(ids)

    llm.tokenizer = llm.input_processor.tokenizer = ToolTokenizer()
    llm.info = llm.input_processor._info = replace(llm.info, max_model_len=2048)


def constraint(llm):
    return llm.calls[-1]["params"].structured_outputs


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"guided_grammar": "start: /a/", "structured_outputs": {"grammar": "start: /a/"}}, "grammar", "start: /a/"),
        ({"guided_regex": "a+", "regex": "a+", "structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_choice": ["a", "b"], "structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"guided_json": SCHEMA, "structured_outputs": {"json": json.dumps(SCHEMA, indent=2)}}, "json", None),
        ({"guided_json": json.dumps(SCHEMA), "response_format": FORMAT}, "json", None),
        ({"regex": "[0-9]{2}"}, "regex", "[0-9]{2}"),
        ({"ebnf": 'root ::= "a" | "b"'}, "grammar", 'root ::= "a" | "b"'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_equal_constraints_are_one(http, llm, path, fields, kind, value):
    body = {"prompt": "x"} if path == "completions" else {"messages": MESSAGES}
    response = http.post(f"/v1/{path}", body | fields)
    assert response.status_code == 200, response.text
    assert "x-outrider-ignored" not in response.headers
    found = getattr(constraint(llm), kind)
    assert found == value if value is not None else json.loads(found) == SCHEMA


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
        ({"regex": "a", "ebnf": "root ::= \"a\""}, "ebnf"),
        ({"guided_json": SCHEMA, "structured_outputs": TIGHT}, "guided_json"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ", "response_format": FORMAT}, "guided_json"),
        ({"regex": "("}, "regex"),
        ({"ebnf": "a" * 70_000}, "ebnf"),
    ],
)  # fmt: skip
def test_different_constraints_exclude_each_other(http, fields, param):
    response = http.post("/v1/completions", {"prompt": "x"} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.usefixtures("writes_tools")
def test_a_format_with_a_forced_call_is_ignored_and_named(http, make_http, llm):
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}}
    body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"} | form
    response = http.post("/v1/chat/completions", body)
    assert (response.status_code, response.headers["x-outrider-ignored"]) == (200, "response_format")
    assert json.loads(constraint(llm).json) == TOOL["function"]["parameters"]
    plain = http.post("/v1/chat/completions", body | {"response_format": {"type": "text"}})
    assert (plain.status_code, "x-outrider-ignored" in plain.headers) == (200, False)
    strict = make_http(strict_fields=True).post("/v1/chat/completions", body)
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, "response_format")
    other = http.post("/v1/chat/completions", body | {"response_format": None, "regex": "a"})
    assert (other.status_code, other.json()["error"]["param"]) == (400, "regex")


@pytest.mark.usefixtures("writes_tools")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_a_format_with_a_forced_call_on_the_other_apis(http, llm, choice):
    flat = {"type": "function", "name": "f", "parameters": SCHEMA}
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "array"}}}
    response = http.post("/v1/responses", {"input": "x", "tools": [flat], "tool_choice": choice, "text": form})
    assert (response.status_code, response.headers["x-outrider-ignored"]) == (200, "text.format")
    assert "array" not in constraint(llm).json or "parameters" in constraint(llm).json
    body = {"messages": MESSAGES, "max_tokens": 5, "output_config": {"format": {"type": "json_schema", "schema": {}}}}
    tools = {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}
    response = http.post("/v1/messages", body | tools)
    assert (response.status_code, response.headers["x-outrider-ignored"]) == (200, "output_config.format")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/messages", "/v1/messages"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/api/openai/v1/chat/completions/", "/v1/chat/completions"),
    ],
)
def test_a_wrong_base_url_gets_the_right_path(http, path, meant):
    response = http.post(path, {})
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert f"under /v1, this one is {meant}:" in message
    assert "base URL" in message


@pytest.mark.parametrize("path", ["/nowhere", "/v1/nowhere", "/v1/v1/nowhere", "/" + "x" * 10_000])
def test_other_unknown_paths_get_no_suggestion(http, path):
    response = http.post(path, {})
    assert response.status_code == 404
    assert "base URL" not in response.json()["error"]["message"]


@pytest.mark.parametrize("model", ["SQL", "sqll", "Sql", "slq"])
def test_a_near_model_is_suggested(http, model):
    http.load_adapter("sql")
    for response in (http.post("/v1/completions", {"model": model, "prompt": "x"}), http.get(f"/v1/models/{model}")):
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert ("did you mean 'sql'?" in error["message"]) == (model != "slq")


def test_an_adapters_error_names_the_field_that_named_it(http, llm):
    http.load_adapter("sql")
    llm.fail_after = 0
    for llm.error in (AdapterError("broken", param="lora_path"), NotFoundError("gone", param="lora_name")):
        for field, body in (("model", {"model": "sql"}), ("adapters", {"adapters": ["sql"]})):
            error = http.post("/v1/completions", {"prompt": "x"} | body).json()["error"]
            assert error["param"] == field
    assert http.load_adapter("sql").json()["error"]["param"] == "lora_name"


RESPONSES = "/v1/responses"
CUSTOM = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": '*** Begin "Patch"\n'}
CUSTOM_OUTPUT = {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"}


@pytest.mark.usefixtures("writes_tools")
def test_custom_calls_of_the_past_are_calls(http):
    """As Codex sends them back."""
    output = CUSTOM_OUTPUT | {"output": [{"type": "input_text", "text": "Done"}]}
    for last in (CUSTOM_OUTPUT, output):
        items = parse_items([{"role": "user", "content": "a"}, CUSTOM, last])
        _, call, result = to_messages(items, None)
        function = call["tool_calls"][0]["function"]
        assert (function["name"], json.loads(function["arguments"])) == ("apply_patch", {"input": CUSTOM["input"]})
        assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "Done", "c1")
    first = http.post(RESPONSES, {"input": [{"role": "user", "content": "a"}, CUSTOM, CUSTOM_OUTPUT]}).json()
    listed = http.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"]
    assert {item["type"] for item in listed} == {"message", "custom_tool_call", "custom_tool_call_output"}
    assert next(item for item in listed if "input" in item)["input"] == CUSTOM["input"]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([CUSTOM_OUTPUT], "input[0].call_id"),
        ([CUSTOM, CUSTOM_OUTPUT | {"type": "function_call_output"}], "input[1].call_id"),
        ([CUSTOM | {"input": {}}], "input[0].input"),
        ([CUSTOM | {"name": ""}], "input[0].name"),
    ],
)
def test_wrong_custom_calls_are_named(http, items, param):
    response = http.post(RESPONSES, {"input": items})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
