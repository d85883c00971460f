"""Token ids and bounds on tokens in chats and completions, in front of an engine that answers from a script."""

from __future__ import annotations

import json

import pytest

from .asking import CALL, CHAT, COMPLETIONS, HELLO, TOOL, ask, ids, refused


def test_a_chats_token_ids(http):
    body = {"messages": HELLO, "return_token_ids": True, "n": 2}
    answer = ask(http, CHAT, **body)
    assert answer["prompt_token_ids"] == ids("[]u:hi|a:")
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids("Hello")] * 2
    lines = http.post(CHAT, {**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    with_prompt = [chunk for chunk in chunks if "prompt_token_ids" in chunk]
    assert [chunk["choices"][0]["index"] for chunk in with_prompt] == [0, 1]  # the first chunk of each choice
    assert all(chunk["prompt_token_ids"] == ids("[]u:hi|a:") for chunk in with_prompt)
    for index in range(2):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [token for choice in choices for token in choice.get("token_ids", ())] == ids("Hello")


def test_token_ids_of_a_stream_with_calls(http, llm):
    llm.reply = CALL
    body = {"messages": HELLO, "tools": [TOOL], "return_token_ids": True, "stream": True}
    lines = http.post(CHAT, body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", ())]
    assert tokens == ids(CALL)
    assert [index for index, chunk in enumerate(chunks) if "prompt_token_ids" in chunk] == [0]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"logprob_token_ids": [5]}, "logprob_token_ids"),
        (CHAT, {"logprobs": True, "top_logprobs": 2, "logprob_token_ids": [5]}, "top_logprobs"),
        (COMPLETIONS, {"logprob_token_ids": [5]}, "logprob_token_ids"),
        (COMPLETIONS, {"logprobs": 2, "logprob_token_ids": [5]}, "logprobs"),
        (COMPLETIONS, {"logprobs": 1, "logprob_token_ids": [256]}, "logprob_token_ids"),
        (COMPLETIONS, {"use_beam_search": True, "repetition_detection": {"max_pattern_size": 2, "min_count": 2}},
         "repetition_detection"),
        (CHAT, {"thinking_token_budget": 5}, "thinking_token_budget"),
    ],
)  # fmt: skip
def test_wrong_bounds_name_the_field(http, path, body, param):
    given = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    assert refused(http, path, **given, **body)["param"] == param


def test_marks_of_reasoning_are_tokens_of_the_parsers_format(make_http, llm, monkeypatch):
    monkeypatch.setattr(
        type(llm.tokenizer),
        "encode",
        lambda self, text, add_special_tokens=True: {"[THINK]": [3], "[/THINK]": [4]}.get(text, [ord(c) for c in text]),
    )
    http = make_http(reasoning_parser="mistral")
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"})):
        ask(http, path, **body, thinking_token_budget=7)
        params = llm.calls[-1]["params"]
        assert (params.thinking_start_token_ids, params.thinking_end_token_ids) == ([3], [4])
    ask(http, "/inference/v1/generate", token_ids=[5], sampling_params={"thinking_token_budget": 7})
    assert llm.calls[-1]["params"].thinking_end_token_ids == [4]
    error = refused(make_http(reasoning_parser="qwen3"), CHAT, messages=HELLO, thinking_token_budget=7)
    assert "'<think>'" in error["message"]
