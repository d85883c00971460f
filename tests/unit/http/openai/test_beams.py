"""`use_beam_search`: fields that it refuses, and the answer."""

import pytest

from outrider.platform.core.beam_search import BeamSearchParams

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def post(http, fields, path="completions"):
    body = ({"prompt": "Hi"} if path == "completions" else CHAT) | {"use_beam_search": True} | fields
    return http.post(f"/v1/{path}", json={name: value for name, value in body.items() if value is not None})


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True}, {"speculative": 3}, {"stop": "a"}, {"stop_token_ids": [3]}, {"bad_words": ["a"]},
        {"min_tokens": 1}, {"logit_bias": {"3": 1.0}}, {"allowed_token_ids": [3]}, {"logprobs": 1},
        {"logprobs": 0}, {"prompt_logprobs": 0}, {"n": 11}, {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5}, {"repetition_penalty": 1.5},
        {"guided_regex": "a"}, {"structured_outputs": {"regex": "a"}}, {"response_format": {"type": "json_object"}},
        {"length_penalty": 1e6}, {"length_penalty": 2.0, "use_beam_search": None}, {"best_of": 2},
        {"return_draft_status": True},
    ],
)  # fmt: skip
def test_fields_that_do_not_go_with_it(http, fields):
    response = post(http, fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize(
    "fields", [{"logprobs": True, "top_logprobs": 2}, {"tools": [{"type": "function", "function": {"name": "f"}}],
                                                       "tool_choice": "required"}]
)  # fmt: skip
def test_fields_of_chats(http, fields):
    assert post(http, fields, "chat/completions").status_code == 400


@pytest.fixture
def searches(llm):
    """Calls of the engine's client; it finds `n` texts."""
    return llm.searches


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_answer_has_n_choices(http, searches, path):
    fields = {"n": 2, "max_tokens": 7, "length_penalty": 0.5, "temperature": 0.7, "seed": 5, "stream": False}
    answer = post(http, fields, path).json()
    texts = [choice["text"] if path == "completions" else choice["message"]["content"] for choice in answer["choices"]]
    assert texts == ["ab"] * 2
    assert [(choice["index"], choice["finish_reason"]) for choice in answer["choices"]] == [
        (i, "stop") for i in range(2)
    ]
    assert answer["usage"]["completion_tokens"] == 6
    [(_, params, _)] = searches
    assert params == BeamSearchParams(2, 7, temperature=0.7, length_penalty=0.5)


def test_a_chat_may_fill_the_context(http, searches):
    assert post(http, {}, "chat/completions").status_code == 200
    [(prompt, params, _)] = searches
    assert params == BeamSearchParams(1, 64 - len(prompt), temperature=1.0)
