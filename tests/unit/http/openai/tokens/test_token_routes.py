"""`/inference/v1/generate`, render and derender, in front of an engine that answers from a script."""

from __future__ import annotations

import json

import pytest

from .asking import CALL, CHAT, COMPLETIONS, HELLO, TOOL, ask, ids, refused

GENERATE = "/inference/v1/generate"
OTHER = {"type": "function", "function": {"name": "stop_all"}}


def generate(http, **body):
    return ask(http, GENERATE, **{"token_ids": [5, 6], **body})


# --- generate ---------------------------------------------------------------------------------------------------------


def test_an_answer_has_vllms_form(http, llm):
    answer = generate(http, model="base", request_id="mine")
    assert answer == {
        "request_id": "mine",
        "choices": [
            {"index": 0, "logprobs": None, "finish_reason": "stop", "stop_reason": None, "token_ids": ids("Hello")}
        ],
        "usage": {
            "prompt_tokens": 2,
            "total_tokens": 7,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    }
    assert llm.calls[0]["prompt"]["prompt_token_ids"] == [5, 6]
    assert llm.calls[0]["request_id"] != "mine"  # which need not be unique
    assert generate(http)["request_id"].startswith("gen-")


def test_parameters_are_those_of_the_object(http, llm):
    generate(
        http,
        sampling_params={"n": 2, "temperature": 0.5, "seed": 7, "stop_token_ids": [9], "skip_special_tokens": False},
        priority=-4,
        cache_salt="mine",
    )
    call = llm.calls[0]
    params = call["params"]
    assert (params.n, params.temperature, params.seed, params.stop_token_ids) == (2, 0.5, 7, [9])
    assert (params.max_tokens, params.detokenize) == (1022, False)  # as many as fit; nothing is made text
    assert (call["priority"], call["cache_salt"]) == (-4, "mine")


def test_an_adapter_is_the_model(http, llm):
    http.load_adapter("sql")
    generate(http, model="sql")
    assert llm.calls[0]["lora_request"].name == "sql"
    assert http.post(GENERATE, {"token_ids": [5], "model": "other"}).status_code == 404


def test_logprobs_name_tokens_by_their_ids(http):
    choices = generate(http, sampling_params={"logprobs": 2, "n": 2, "max_tokens": 3})["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice in choices:
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{ord(char)}" for char in "Hel"]
        tops = [(top["token"], top["logprob"], top["bytes"]) for top in content[0]["top_logprobs"]]
        assert tops == [("token_id:200", -1.0, None), ("token_id:201", -2.0, None)]
    none = generate(http, sampling_params={"logprobs": 0, "max_tokens": 1})["choices"][0]["logprobs"]["content"]
    assert none == [{"token": "token_id:72", "logprob": -2.5, "bytes": None, "top_logprobs": []}]


def test_prompt_logprobs_come_whole(http):
    found = generate(http, sampling_params={"prompt_logprobs": 0, "max_tokens": 1})["prompt_logprobs"]
    assert found[0] is None
    assert found[1]["6"]["rank"] == 3


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_has_the_ids_of_the_whole_answer(http, n):
    body = {"token_ids": [5], "stream": True, "stream_options": {"include_usage": True}, "request_id": "r"}
    response = http.post(GENERATE, {**body, "sampling_params": {"n": n, "logprobs": 1}})
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    *chunks, last = map(json.loads, lines[:-1])
    assert {chunk["request_id"] for chunk in (*chunks, last)} == {"r"}
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5 * n)
    for index in range(n):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [token for choice in own for token in choice["token_ids"]] == ids("Hello")
        assert [choice["finish_reason"] for choice in own] == [None] * 4 + ["stop"]
        assert all(len(choice["logprobs"]["content"]) == len(choice["token_ids"]) for choice in own)
    assert all(
        set(choice) >= {"index", "logprobs", "finish_reason", "token_ids"} for c in chunks for choice in c["choices"]
    )


def test_a_stop_string_is_looked_for_in_the_text(http, llm):
    generate(http, sampling_params={"stop": ["lo"]})
    params = llm.calls[0]["params"]
    assert (params.stop, params.detokenize) == (["lo"], True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids[0]"),
        ({"token_ids": [256]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [5] * 1025}, "token_ids"),
        ({"token_ids": [5], "temperature": 0}, "temperature"),
        ({"token_ids": [5], "prompt": "text"}, "prompt"),
        ({"token_ids": [5], "features": {"mm_hashes": {"image": ["a"]}}}, "features"),
        ({"token_ids": [5], "request_id": "a b"}, "request_id"),
        ({"token_ids": [5], "request_id": "a" * 257}, "request_id"),
        ({"token_ids": [5], "sampling_params": {"temperatur": 0}}, "sampling_params.temperatur"),
        ({"token_ids": [5], "sampling_params": {"top_p": 2}}, "top_p"),
        ({"token_ids": [5], "sampling_params": {"n": 129}}, "n"),
        ({"token_ids": [5], "sampling_params": {"n": 128, "allowed_token_ids": [1] * 4097}}, "allowed_token_ids"),
        ({"token_ids": [5], "sampling_params": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
        ({"token_ids": [5], "sampling_params": {"logprobs": 6}}, "logprobs"),
        ({"token_ids": [5], "sampling_params": {"logprob_token_ids": [1] * 129}}, "logprob_token_ids"),
        ({"token_ids": [5] * 900, "sampling_params": {"max_tokens": 125}}, "max_tokens"),
        ({"token_ids": [5], "sampling_params": {"structured_outputs": {"regex": "a", "frame": 3}}},
         "structured_outputs"),
        ({"token_ids": [5], "sampling_params": {"thinking_token_budget": 3}}, "thinking_token_budget"),
        ({"token_ids": [5], "sampling_params": {"repetition_detection": {"max_pattern_size": 2000}}},
         "repetition_detection.max_pattern_size"),
    ],
)  # fmt: skip
def test_wrong_bodies_name_the_field(http, llm, body, param):
    assert refused(http, GENERATE, **body)["param"] == param
    assert not llm.calls


def test_the_largest_values_of_all_sequences(http, llm):
    llm.reply = "x"
    given = list(range(128))
    choices = generate(
        http,
        sampling_params={
            "n": 128,
            "logprob_token_ids": given,
            "max_tokens": 63,
            "thinking_token_budget": 2**63 - 1,
            "thinking_start_token_ids": [1] * 64,
            "thinking_end_token_ids": [2] * 64,
            "repetition_detection": {"max_pattern_size": 1024, "min_pattern_size": 1024, "min_count": 2**31 - 1},
        },
    )["choices"]
    assert len(choices) == 128
    params = llm.calls[0]["params"]
    assert (params.logprob_token_ids, params.thinking_end_token_ids) == (given, [2] * 64)
    error = refused(
        http, GENERATE, token_ids=[5], sampling_params={"n": 128, "logprob_token_ids": given, "max_tokens": 64}
    )
    assert error["param"] == "logprob_token_ids"


# --- render -----------------------------------------------------------------------------------------------------------


def test_a_rendered_chat_is_the_chat(http, llm):
    body = {"model": "base", "messages": HELLO, "temperature": 0.25, "seed": 5, "top_logprobs": 2, "logprobs": True,
            "n": 2, "stop": ["x"], "logit_bias": {"7": 1.5}, "priority": 3, "cache_salt": "s",
            "repetition_detection": {"max_pattern_size": 4, "min_count": 3}}  # fmt: skip
    rendered = ask(http, f"{CHAT}/render", **body)
    assert not llm.calls
    assert rendered["token_ids"] == ids("[]u:hi|a:")
    assert (rendered["model"], rendered["priority"], rendered["cache_salt"], rendered["stream"]) == (
        "base",
        3,
        "s",
        False,
    )
    assert rendered["sampling_params"]["max_tokens"] == 1024 - len(rendered["token_ids"])
    generate(http, **rendered)
    ask(http, CHAT, **body)
    [generated, chatted] = llm.calls
    assert generated["prompt"] == chatted["prompt"]
    assert generated["params"] == chatted["params"]


def test_a_rendered_forced_call_keeps_its_grammar(http, llm):
    body = {"messages": HELLO, "tools": [TOOL, OTHER], "tool_choice": "required", "parallel_tool_calls": True,
            "max_tokens": 9}  # fmt: skip
    rendered = ask(http, f"{CHAT}/render", **body)
    assert rendered["sampling_params"]["structured_outputs"]["ends_list"] is True
    generate(http, **rendered)
    ask(http, CHAT, **body)
    generated, chatted = (call["params"].structured_outputs for call in llm.calls)
    assert (generated.key, generated.ends_list) == (chatted.key, chatted.ends_list)


def test_rendered_completions_are_one_request_each(http, llm):
    body = {"prompt": ["ab", "c"], "max_tokens": 3, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    first, second = ask(http, f"{COMPLETIONS}/render", **body)
    assert (first["token_ids"], second["token_ids"]) == ([1, *ids("ab")], [1, *ids("c")])
    assert first["request_id"] != second["request_id"]
    assert first["sampling_params"] == second["sampling_params"]
    assert (first["sampling_params"]["n"], first["stream"], first["stream_options"]) == (
        2,
        True,
        {"include_usage": True},
    )
    assert not llm.calls


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HELLO, "use_beam_search": True}, "use_beam_search"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": HELLO, "top_p": 2}, "top_p"),
        (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "echo"),
        (COMPLETIONS, {"prompt": "a" * 2000}, "prompt"),
    ],
)
def test_what_cannot_be_rendered(http, path, body, param):
    assert refused(http, f"{path}/render", **body)["param"] == param


# --- derender ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reply", ["Hello", "Say é and \u00ff", CALL, "<think>hm</think>So."])
@pytest.mark.parametrize("options", [{}, {"reasoning_parser": "qwen3"}])
def test_a_derendered_chat_is_the_chats_answer(make_http, llm, reply, options):
    http, llm.reply = make_http(**options), reply
    body = {"model": "base", "messages": HELLO, "tools": [TOOL], "n": 2, "return_token_ids": True}
    want = ask(http, CHAT, **body)
    generated = generate(http, **ask(http, f"{CHAT}/render", **body))
    got = ask(http, f"{CHAT}/derender", model="base", generate_response=generated, chat_request=body)
    assert got["id"] == generated["request_id"]
    assert got["object"] == "chat.completion"
    for choice, wanted in zip(got["choices"], want["choices"], strict=True):
        call_ids = [call.pop("id") for each in (choice, wanted) for call in each["message"].get("tool_calls", ())]
        assert all(call_ids)
        assert {**choice, "token_ids": wanted["token_ids"]} == wanted
    assert got["usage"] == {name: want["usage"][name] for name in got["usage"]}


def test_without_the_request_all_is_content(http, llm):
    llm.reply = CALL
    answer = ask(http, f"{CHAT}/derender", generate_response=generate(http), prompt_tokens=12)
    assert answer["choices"][0]["message"]["content"] == CALL
    assert answer["usage"] == {"prompt_tokens": 12, "total_tokens": 12 + len(CALL), "completion_tokens": len(CALL)}


def test_the_prompt_may_have_begun_the_reasoning(make_http):
    http = make_http(reasoning_parser="qwen3")
    response = {
        "request_id": "r",
        "choices": [{"index": 0, "token_ids": ids("hm</think>So."), "finish_reason": "stop"}],
    }
    body = {"generate_response": response, "chat_request": {"messages": HELLO}}
    message = ask(http, f"{CHAT}/derender", **body, prompt_token_ids=ids("a:<think>\n"))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "So.")
    assert ask(http, f"{CHAT}/derender", **body)["choices"][0]["message"]["content"] == "hm</think>So."


def test_a_stop_string_is_cut_and_a_stop_token_is_not_shown(http):
    def content(text, finish, **request):
        response = {"choices": [{"index": 0, "token_ids": ids(text), "finish_reason": finish}]}
        answer = ask(http, f"{CHAT}/derender", generate_response=response, chat_request={"messages": HELLO, **request})
        return answer["choices"][0]["message"]["content"], answer["choices"][0]["stop_reason"]

    assert content("Hello", "stop", stop="lo") == ("Hel", "lo")
    assert content("Hello", "stop", stop="lo", include_stop_str_in_output=True) == ("Hello", "lo")
    assert content("Hello", "stop", stop_token_ids=[ord("o")]) == ("Hell", None)
    assert content("Hello", "length", stop_token_ids=[ord("o")]) == ("Hello", None)
    assert content("Hello\x02", "stop") == ("Hello", None)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_logprobs_get_their_texts(http, path):
    generated = generate(http, sampling_params={"logprobs": 2, "max_tokens": 3})
    if path == CHAT:
        [choice] = ask(http, f"{path}/derender", generate_response=generated)["choices"]
        want = ask(http, path, messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=3)["choices"][0]["logprobs"]
    else:
        [choice] = ask(http, f"{path}/derender", generate_responses=[generated])["choices"]
        want = ask(http, path, prompt="a", logprobs=2, max_tokens=3)["choices"][0]["logprobs"]
    assert choice["logprobs"] == want


def test_derendered_completions_have_the_choices_of_all_prompts(http):
    body = {"prompt": ["ab", "c"], "max_tokens": 3, "n": 2}
    answers = [generate(http, **each) for each in ask(http, f"{COMPLETIONS}/render", **body)]
    got = ask(
        http, f"{COMPLETIONS}/derender", generate_responses=answers, prompt_tokens=[3, 2], completion_request=body
    )
    want = ask(http, COMPLETIONS, **body)
    assert (got["choices"], got["object"]) == (want["choices"], want["object"])
    assert got["usage"] == {"prompt_tokens": 5, "total_tokens": 17, "completion_tokens": 12}


def response_of(**choice):
    return {"choices": [{"index": 0, "token_ids": [72], "finish_reason": "stop", **choice}]}


def with_top(token_id):
    top = [{"token": f"token_id:{token_id}", "logprob": -1.0}]
    return response_of(logprobs={"content": [{"token": "token_id:72", "logprob": 0.0, "top_logprobs": top}]})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"generate_response": {"choices": []}}, "generate_response"),
        (CHAT, {"generate_response": response_of(token_ids=[300])}, "generate_response"),
        (CHAT, {"generate_response": response_of(token_ids=[72] * 1025)}, "generate_response"),
        (CHAT, {"generate_response": {"choices": response_of()["choices"] * 1025}}, "generate_response"),
        (CHAT, {"generate_response": response_of(), "stream": True}, "stream"),
        (CHAT, {"generate_response": response_of(), "chat_request": {"messages": [0]}}, "chat_request.messages[0]"),
        (CHAT, {"generate_response": response_of(), "chat_request": {"messages": HELLO, "n": 0}}, "chat_request.n"),
        (CHAT, {"generate_response": response_of(), "prompt_token_ids": [-1]}, "prompt_token_ids"),
        (CHAT, {"generate_response": response_of(logprobs={"content": []})}, "generate_response.choices[0].logprobs"),
        (CHAT, {"generate_response": response_of(logprobs={"content": [{"token": "H", "logprob": 0.0}]})},
         "generate_response.choices[0].logprobs"),
        (CHAT, {"generate_response": response_of(logprobs={"content": [{"token": "token_id:7", "logprob": 0.0}]})},
         "generate_response.choices[0].logprobs"),
        (CHAT, {"generate_response": with_top(256)}, "generate_response.choices[0].logprobs"),
        (CHAT, {"generate_response": response_of(token_ids=[256]), "model": "sql"}, "generate_response"),
        (CHAT, {"generate_response": response_of(), "model": "sql", "prompt_token_ids": [256]}, "prompt_token_ids"),
        (COMPLETIONS, {"generate_responses": []}, "generate_responses"),
        (COMPLETIONS, {"generate_responses": [response_of()], "prompt_tokens": [1, 2]}, "prompt_tokens"),
        (COMPLETIONS, {"generate_responses": [response_of()], "completion_request": {"prompt": "a", "echo": True}},
         "completion_request.echo"),
        (COMPLETIONS, {"generate_responses": [response_of()], "completion_request": {}}, "completion_request.prompt"),
    ],
)  # fmt: skip
def test_wrong_answers_name_the_field(http, path, body, param):
    http.load_adapter("sql")
    assert refused(http, f"{path}/derender", **body)["param"] == param


def test_a_model_that_is_not_there(http):
    for path, name in ((CHAT, "generate_response"), (COMPLETIONS, "generate_responses")):
        value = response_of() if path == CHAT else [response_of()]
        assert http.post(f"{path}/derender", {"model": "other", name: value}).status_code == 404
