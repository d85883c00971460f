"""Fields that frameworks write: ignored and named, refused, or accepted in another type."""

import logging
import re

import pytest

from outrider.platform.core.logs import REQUEST_LOGGER

HELLO = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}


def chat(http, **fields):
    return http.post(CHAT, {"messages": HELLO, **fields})


def ignored(response) -> list[str]:
    assert response.status_code == 200, response.text
    return [name for name in response.headers.get("x-outrider-ignored", "").split(",") if name]


def refused(response) -> dict:
    assert response.status_code == 400, response.text
    return response.json()["error"]


# --- ignored and said -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_harmless_and_unknown_fields_are_named(http, stream):
    fields = {"metadata": {"a": "b"}, "some_label": 1, "store": True, "service_tier": "flex", "not_given": None}
    assert ignored(chat(http, stream=stream, **fields)) == ["metadata", "some_label", "store", "service_tier"]
    assert ignored(http.post(COMPLETIONS, {"prompt": "a", "stream": stream, "early_stopping": True})) == [
        "early_stopping"
    ]
    assert ignored(http.post("/tokenize", {"prompt": "a", "temperature": 0.5})) == ["temperature"]


def test_a_refusal_names_them_too(http):
    response = chat(http, verbosity="low", temperature=-1)
    assert (refused(response)["param"], response.headers["x-outrider-ignored"]) == ("temperature", "verbosity")


def test_fields_inside_of_others_are_named_once(http, llm):
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [part, part], "id": f"m{i}", "type": "message"} for i in range(3)]
    messages.append({"role": "assistant", "content": None, "refusal": "No.", "thinking_blocks": [1]})
    response = chat(http, messages=messages, stream=True, stream_options={"include_usage": True, "more": 1})
    assert ignored(response) == [
        "messages[0].content[0].cache_control", "messages[0].id", "messages[0].type", "messages[3].thinking_blocks",
        "stream_options.more",
    ]  # fmt: skip
    assert "a:No.|" in llm.tokenizer.decode(llm.calls[-1]["prompt"]["prompt_token_ids"])


def test_text_parts_of_both_apis_are_taken(http, llm):
    parts = [
        {"type": "text", "text": "one", "image_url": None}, {"type": "input_text", "text": "two"},
        {"type": "output_text", "text": "three", "annotations": []}, {"text": "four"},
        {"type": "refusal", "refusal": "five"},
    ]  # fmt: skip
    assert ignored(chat(http, messages=[{"role": "user", "content": parts}])) == []
    assert "one\ntwo\nthree\nfour\nfive" in llm.tokenizer.decode(llm.calls[-1]["prompt"]["prompt_token_ids"])
    image = {"type": "input_image", "image_url": "http://x"}
    error = refused(chat(http, messages=[{"role": "user", "content": [image]}]))
    assert error["param"] == "messages[0].content[0]"
    assert "without their vision" in error["message"]


def test_adapters_are_loaded_and_unloaded_as_with_vllm(http):
    assert http.load_adapter("a", lora_int_id=3, base_model_name="base").status_code == 200
    assert http.post("/v1/unload_lora_adapter", {"lora_name": "a", "lora_int_id": 3}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"stream_options": {"include_usage": True}}, ["stream_options"]),
        ({"stream_options": {"include_usage": True}, "stream": "false"}, ["stream_options"]),
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, ["tools"]),
        ({"functions": [{"name": "f"}], "function_call": "none"}, ["functions"]),
    ],
)
def test_fields_made_idle_by_other_fields(http, fields, names):
    assert ignored(chat(http, **fields)) == names


def test_other_servers_defaults(http):
    """A client may write every field that it knows."""
    empty = ["tools", "response_format", "stream_options", "documents", "structured_outputs", "guided_json", "regex"]
    empty += ["lora_path", "logit_bias", "min_p", "truncate_prompt_tokens", "input_ids", "session_params", "seed"]
    defaults = {
        "logprobs": False, "top_logprobs": 0, "tool_choice": "none", "parallel_tool_calls": True, "echo": False,
        "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "add_generation_prompt": True,
        "continue_final_message": False, "add_special_tokens": False, "stop": [], "bad_words": [], "best_of": 1,
        "stop_token_ids": [], "min_tokens": 0, "priority": 0, "top_k": -1, "repetition_penalty": 1.0,
        "return_tokens_as_token_ids": False, "return_hidden_states": False, "no_stop_trim": False, "store": False,
        "stop_regex": [], "reasoning_effort": "none", "service_tier": "auto", "modalities": ["text"],
    }  # fmt: skip
    assert ignored(chat(http, **defaults, **dict.fromkeys(empty))) == []


def test_other_servers_defaults_of_completions(http):
    fields = {"suffix": "", "best_of": 1, "use_beam_search": False, "length_penalty": 1, "truncate_prompt_tokens": None}
    assert ignored(http.post(COMPLETIONS, {"prompt": "a", "logprobs": None, "echo": False, **fields})) == []


def test_the_header_is_short_and_safe(http):
    names = [f"näme\r\nX-Evil: {i}," + "y" * 500 for i in range(60)]
    response = chat(http, **dict.fromkeys(names, 1))
    assert ignored(response)[-1] == "..."
    value = response.headers["x-outrider-ignored"]
    assert len(value) < 3000
    assert re.fullmatch(r"[A-Za-z0-9_.?,\[\]-]+", value)
    assert "x-evil" not in response.headers


def test_ignored_fields_are_counted_by_known_names(http, caplog):
    with caplog.at_level(logging.DEBUG, logger=REQUEST_LOGGER):
        chat(http, metadata={"a": "b"}, mine=1, yours=2)
        chat(http, metadata={"a": "b"}, messages=[HELLO[0] | {"id": "m"}])
    assert "ignored fields: metadata,mine,yours" in caplog.text
    counts = dict(re.findall(r'ignored_request_fields_total\{field="(\w+)"\} (\S+)', http.get("/metrics").text))
    assert counts == {"metadata": "2.0", "other": "2.0", "id": "1.0"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"some_label": 1}, "some_label"),
        ({"some_label": None}, "some_label"),
        ({"metadata": {"a": "b"}}, "metadata"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
        ({"messages": [HELLO[0] | {"id": "m"}]}, "messages[0].id"),
        ({"y" * 5000: 1}, "y" * 199 + "…"),
    ],
)
def test_strict_fields(make_http, fields, param):
    error = refused(chat(make_http(strict_fields=True), **fields))
    assert error["param"] == param
    assert param in error["message"]


def test_strict_fields_takes_no_ops(make_http):
    fields = {"tools": [], "metadata": {}, "store": False, "service_tier": "auto", "suffix": None, "temperature": "0.7"}
    assert ignored(chat(make_http(strict_fields=True), **fields)) == []


# --- misspelt, and other servers' names -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"), ("temprature", "temperature"), ("temperatur", "temperature"), ("topP", "top_p"),
        ("maxTokens", "max_tokens"), ("frequencyPenalty", "frequency_penalty"), ("stops", "stop"), ("tool", "tools"),
        ("response_formats", "response_format"), ("logits_bias", "logit_bias"), ("stopp", "stop"),
    ],
)  # fmt: skip
def test_a_misspelt_field_gets_a_suggestion(http, name, meant):
    error = refused(chat(http, **{name: 1}))
    assert error["param"] == name
    assert f"did you mean {meant!r}?" in error["message"]


def test_a_misspelt_field_next_to_the_right_one_is_ignored(http, llm):
    assert ignored(chat(http, max_token=3, max_tokens=2)) == ["max_token"]
    assert llm.calls[-1]["params"].max_tokens == 2


@pytest.mark.parametrize(
    "name", ["models", "user_id", "model_name", "stream_id", "prompt_id", "max_input_tokens", "tasks"]
)
def test_names_that_only_look_alike_are_ignored(http, name):
    assert ignored(chat(http, **{name: "x"})) == [name]


def test_other_servers_names(http, llm):
    body = {"prompt": "a", "max_new_tokens": 3}
    assert "'max_tokens'" in refused(http.post(COMPLETIONS, body))["message"]
    assert ignored(http.post(COMPLETIONS, body | {"max_tokens": 2})) == ["max_new_tokens"]
    assert "'model'" in refused(chat(http, model="base", lora_path="sql"))["message"]
    assert refused(chat(http, json_schema="{}", **{"": 1}))["param"] == "json_schema"


# --- values of another type -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sent", "taken"),
    [
        ("temperature", "0.7", 0.7), ("temperature", "1", 1.0), ("temperature", "1e-1", 0.1), ("top_k", "5", 5),
        ("top_k", 5.0, 5), ("top_k", "-1", 0), ("max_tokens", "3", 3), ("max_tokens", 3.0, 3), ("max_tokens", "3.0", 3),
        ("seed", "9223372036854775807", 2**63 - 1), ("ignore_eos", "true", True), ("ignore_eos", "False", False),
        ("stop_token_ids", ["5", 6.0, 7], [5, 6, 7]), ("logit_bias", {"5": "-1.5"}, {5: -1.5}), ("stop", "5", ["5"]),
        ("speculative", "2", 2), ("speculative", "false", False), ("logprobs", False, None),
    ],
)  # fmt: skip
def test_numbers_and_flags_as_other_types(http, llm, name, sent, taken):
    response = http.post(COMPLETIONS, {"prompt": "a", name: sent})
    assert ignored(response) == []
    value = getattr(llm.calls[-1]["params"], name)
    assert (value, type(value)) == (taken, type(taken))


def test_numbers_inside_of_other_fields(http, llm):
    for name in ("a", "b"):
        http.load_adapter(name)
    assert ignored(http.post(COMPLETIONS, {"prompt": [5.0, 6.0], "stream": "true", "priority": "3"})) == []
    assert (llm.calls[-1]["prompt"], llm.calls[-1]["priority"]) == ({"prompt_token_ids": [5, 6]}, 3)
    parts = [{"name": "a", "weight": "0.5"}, {"name": "b", "weight": 0.5}]
    assert ignored(http.post(COMPLETIONS, {"prompt": "5", "adapters": parts})) == []
    assert http.post("/detokenize", {"tokens": [104.0, "105"]}).json() == {"prompt": "hi"}


# --- tools in the past of a conversation ------------------------------------------------------------------------------


def test_tool_calls_and_results_go_to_the_template(http, llm, monkeypatch):
    seen = []

    def render(conversation, **options):
        seen.append(conversation)
        calls = [call["function"]["name"] for message in conversation for call in message.get("tool_calls", ())]
        return " ".join([*calls, *(message["content"] for message in conversation if message["role"] == "tool")])

    monkeypatch.setattr(llm.tokenizer, "apply_chat_template", render)
    old = {"name": "weather", "arguments": {"city": "Bern"}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 1}], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "22"}]},
        {"role": "assistant", "content": None, "function_call": old, "tool_calls": None, "reasoning": "so"},
        {"role": "function", "name": "weather", "content": "ok"},
    ]
    response = http.post("/tokenize", {"messages": messages})
    assert ignored(response) == ["messages[0].tool_calls[0].index"]
    # The prompt's, and not that of the check, with marks in place of the calls.
    whole = [conversation for conversation in seen if len(conversation) == 4 and "Bern" in str(conversation)]
    first, result, second, old_result = whole[-1]
    function = {"name": "weather", "arguments": {"city": "Bern"}}
    assert (first["tool_calls"], first["reasoning_content"]) == ([{**CALL, "function": function}], "hm")
    assert (result["role"], result["tool_call_id"]) == ("tool", "c1")
    assert (second["tool_calls"], second["reasoning_content"]) == ([{"type": "function", "function": function}], "so")
    assert (old_result["role"], old_result["name"]) == ("tool", "weather")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": "", "tool_calls": [CALL]}, "messages[1].tool_calls"),
        ({"role": "tool", "tool_call_id": "c1", "content": "22 degrees"}, "messages[1]"),
    ],
)
def test_a_template_that_leaves_them_out_is_an_error(http, llm, monkeypatch, message, param):
    def render(conversation, **options):
        return "".join(m["content"] for m in conversation if m["role"] != "tool")

    monkeypatch.setattr(llm.tokenizer, "apply_chat_template", render)
    error = refused(chat(http, messages=[*HELLO, message]))
    assert error["param"] == param
    assert "template" in error["message"]
    assert not llm.calls


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/base", "/version", "/metrics", "/ping", "/load"])
def test_head_is_as_get(http, path):
    get, head = http.get(path), http.request("HEAD", path)
    assert (head.status_code, head.headers["content-type"]) == (200, get.headers["content-type"])


def test_head_without_get_is_405(http):
    assert http.request("HEAD", CHAT).status_code == 405
    assert http.request("HEAD", "/nowhere").status_code == 404


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "http://test//v1/chat/completions", "/v1//chat/completions//"]
)
def test_slashes_too_many_are_served(http, path):
    assert http.post(path, {"messages": HELLO}).status_code == 200
    assert http.get("/v1/models/base/").json()["id"] == "base"


def test_slashes_too_many_are_guarded(make_http):
    http = make_http(api_keys=("key",))
    for path in ("http://test//v1/models", "/v1/models/", "http://test//admin/v1/stats", "/v1/responses/"):
        assert http.get(path).status_code == 401


def test_ping_and_load(http, llm):
    assert [http.request(method, "/ping").status_code for method in ("GET", "POST")] == [200, 200]
    assert http.get("/load").json() == {"server_load": 0}
    llm.state = "restarting"
    assert http.post("/ping").status_code == 503
