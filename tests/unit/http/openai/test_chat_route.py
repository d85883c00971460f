"""`/v1/chat/completions` over an engine that answers from a script."""

import json

import pytest

HELLO = [{"role": "user", "content": "hi"}]


def chat(http, **body):
    response = http.post("/v1/chat/completions", {"model": "base", "messages": HELLO, **body})
    assert response.status_code == 200, response.text
    return response


def events(response) -> list:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def last_prompt(llm) -> str:
    return llm.tokenizer.decode(llm.calls[-1]["prompt"]["prompt_token_ids"])


def test_answer_has_the_openai_shape(http, llm):
    answer = chat(http).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["completion_tokens"] == 5
    assert last_prompt(llm) == "u:hi|a:"


def test_output_goes_up_to_the_contexts_end(http, llm):
    llm.reply = "x" * 100
    answer = chat(http).json()
    assert answer["usage"]["total_tokens"] == llm.info.max_model_len
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_token_limit(http, name):
    assert chat(http, **{name: 2}).json()["choices"][0]["message"]["content"] == "He"
    refused = http.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], name: 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_stream_begins_with_the_role(http):
    chunks = events(chat(http, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello"
    assert all("role" not in delta for delta in deltas[1:])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_every_choice_of_a_stream_begins_with_the_role(http):
    chunks = events(chat(http, stream=True, n=3))
    roles = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1, 2]


def test_stream_usage_and_metrics_share_the_last_chunk(http):
    chunks = events(chat(http, stream=True, return_metrics=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == 7
    assert chunks[-1]["metrics"]["speculative_decoding"]["acceptance_length"] == 2.5


STATUS = ["sampled", "drafted", "sampled", "drafted", "sampled"]
REJECTED = [0, 0, 2, 0, 4]


def test_draft_status(http):
    choice = chat(http, return_draft_status=True).json()["choices"][0]
    assert (choice["draft_status"], choice["rejected_drafts"]) == (STATUS, REJECTED)
    assert not {"draft_status", "rejected_drafts"} & chat(http).json()["choices"][0].keys()


def test_draft_status_in_a_stream(http, llm):
    chunks = events(chat(http, return_draft_status=True, stream=True, n=2))
    for index in (0, 1):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "draft_status" not in choices[0]  # the role's
        assert [status for choice in choices[1:] for status in choice["draft_status"]] == STATUS
        assert [count for choice in choices[1:] for count in choice["rejected_drafts"]] == REJECTED
    plain = [chunk["choices"][0].keys() for chunk in events(chat(http, stream=True))]
    assert not {"draft_status", "rejected_drafts"} & set().union(*plain)


def test_text_that_json_must_quote(http, llm):
    llm.reply = '"\\\n\u00e9\x7f'
    chunks = events(chat(http, stream=True))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == llm.reply


def test_logprobs(http):
    content = chat(http, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in content] == list("Hello")
    assert content[0]["bytes"] == [ord("H")]
    assert [(top["token"], top["logprob"]) for top in content[0]["top_logprobs"]] == [("È", -1.0), ("É", -2.0)]
    assert content[0]["top_logprobs"][0]["bytes"] == list("È".encode())


def test_logprobs_without_top(http):
    content = chat(http, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"] == []


def test_stream_logprobs(http):
    chunks = events(chat(http, stream=True, logprobs=True, top_logprobs=1))
    content = [item for c in chunks if c["choices"][0]["logprobs"] for item in c["choices"][0]["logprobs"]["content"]]
    assert [item["token"] for item in content] == list("Hello")


def test_text_parts_are_joined(http, llm):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat(http, messages=[{"role": "developer", "content": "sys"}, {"role": "user", "content": parts}])
    assert last_prompt(llm) == "s:sys|u:one\ntwo|a:"


def test_an_assistants_message_may_come_back_as_it_was(http, llm):
    answer = chat(http).json()["choices"][0]["message"]
    chat(http, messages=[*HELLO, answer | {"tool_calls": None, "annotations": []}, *HELLO])
    assert last_prompt(llm) == "u:hi|a:Hello|u:hi|a:"
    chat(http, messages=[*HELLO, answer | {"content": None}, *HELLO])
    assert last_prompt(llm) == "u:hi|a:|u:hi|a:"


def test_generation_prompt_can_be_left_out(http, llm):
    chat(http, add_generation_prompt=False)
    assert last_prompt(llm) == "u:hi|"
    chat(http, continue_final_message=True, messages=[*HELLO, {"role": "assistant", "content": "So"}])
    assert last_prompt(llm) == "u:hi|a:So"


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"parallel_tool_calls": True}, {"store": False},
        {"metadata": {}}, {"service_tier": "auto"}, {"response_format": {"type": "text"}}, {"modalities": ["text"]},
        {"user": "me"}, {"logit_bias": {}}, {"n": 1}, {"functions": []}, {"reasoning_effort": None}, {"best_of": 1},
        {"tool_choice": "auto"}, {"function_call": "none"}, {"top_logprobs": 0}, {"suffix": ""}, {"echo": False},
        {"length_penalty": 1.0}, {"length_penalty": "1.0"}, {"use_beam_search": False}, {"early_stopping": False},
        {"truncate_prompt_tokens": None}, {"logits_processors": []},
        {"response_format": {"type": "text", "json_schema": None}}, {"structured_outputs": {"json": None}},
        {"stream_options": None}, {"prompt": ""},
    ],
)  # fmt: skip
def test_harmless_fields_are_accepted(http, harmless):
    assert "x-outrider-ignored" not in chat(http, **harmless).headers


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}],
            "messages[0].tool_calls",
        ),
        ([{"role": "assistant", "tool_calls": {"f": 1}}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}], "messages[0].tool_calls"),
        ([{"role": "tool", "content": "x", "tool_call_id": 3}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "content": "x", "audio": {"id": "a"}}], "messages[0].audio"),
        ([{"role": "assistant", "content": "x", "prefix": True}], "messages[0].prefix"),
        ([{"role": "user", "contents": "x"}], "messages[0].contents"),
        ([{"role": "user", "content": "x", "images": ["aGk="]}], "messages[0].images"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}],
            "messages[0].content[1]",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ],
)
def test_bad_messages_are_named(http, messages, param):
    response = http.post("/v1/chat/completions", {"model": "base", "messages": messages})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_tokens_that_the_model_lacks_are_refused_before_admission(http, llm):
    response = http.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "€"}]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert not llm.calls


def test_variables_of_the_template_that_requests_leave_out(make_http, llm, monkeypatch):
    def render(conversation, think, **options):
        return f"think={think} {conversation[0]['content']}"

    monkeypatch.setattr(llm.tokenizer, "apply_chat_template", render)
    http = make_http(chat_template_kwargs={"think": False})
    chat(http, chat_template_kwargs={"other": 1})
    assert last_prompt(llm) == "think=False hi"
    chat(http, chat_template_kwargs={"think": True})
    assert last_prompt(llm) == "think=True hi"


def test_request_templates_need_trust(http, make_http):
    body = {"messages": HELLO, "chat_template": "{{ messages }}"}
    response = http.post("/v1/chat/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")
    assert make_http(trust_request_chat_template=True).post("/v1/chat/completions", body).status_code == 200


def test_long_conversations_are_rendered_off_the_event_loop(http, llm, monkeypatch):
    from outrider.platform.http import serving_state

    chat(http)
    monkeypatch.setattr(serving_state, "_LONG_TEXT", 1)
    chat(http)
    assert llm.calls[0]["prompt"] == llm.calls[1]["prompt"]


def test_special_tokens_on_top_of_the_templates(http, llm):
    chat(http, add_special_tokens=True)
    assert llm.calls[0]["prompt"]["prompt_token_ids"][0] == 1


def test_an_adapters_own_template_is_used(http, llm, make_http, tmp_path):
    def tokens(model: str) -> list[int]:
        return http.post("/tokenize", {"model": model, "messages": HELLO}).json()["tokens"]

    (tmp_path / "adapter_config.json").write_text("{}")
    http.load_adapter("own", str(tmp_path))
    http.load_adapter("other")
    assert tokens("own") == tokens("base")
    for file, content in (
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "default", "template": "listed "}]})),
        ("tokenizer_config.json", json.dumps({"chat_template": "config "})),
        ("chat_template.jinja", "jinja "),
    ):
        (tmp_path / file).write_text(content)
        expected = content if file.endswith("jinja") else json.loads(content)["chat_template"]
        expected = expected if isinstance(expected, str) else "listed "
        chat(http, model="own")
        assert last_prompt(llm) == f"{expected}u:hi|a:"
        assert llm.tokenizer.decode(tokens("own")) == last_prompt(llm)
    for model in ("base", "other", "own:0.5+other:0.5"):
        chat(http, model=model)
        assert last_prompt(llm) == "u:hi|a:"
    forced = make_http(chat_template="server ")
    forced.load_adapter("forced", str(tmp_path))
    chat(forced, model="forced")
    assert last_prompt(llm) == "server u:hi|a:"


@pytest.mark.parametrize("content", [b"\xff", b"["])
def test_an_adapters_template_that_cannot_be_read_is_an_error_of_the_adapter(http, tmp_path, content):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    http.load_adapter("own", str(tmp_path))
    response = http.post("/v1/chat/completions", {"model": "own", "messages": HELLO})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "InvalidAdapter"
    assert "tokenizer_config.json" in response.json()["error"]["message"]
