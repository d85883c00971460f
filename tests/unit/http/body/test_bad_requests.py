"""Every error of a request has one shape."""

import pytest

from outrider.platform.core.errors import AdapterError, EngineDeadError, OverloadedError, ShuttingDownError

from ....error_answers import error_in

CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "base", "prompt": "hi"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", "hot"), ("temperature", "nan"), ("temperature", True),
        ("temperature", [1]), ("top_p", 0),
        ("top_p", 1.5), ("top_k", -2), ("top_k", 1.5), ("min_p", 2), ("n", 0), ("n", True), ("n", "two"),
        ("n", "0"), ("seed", 1.5),
        ("seed", 2**70), ("stop", 3), ("stop", [""]), ("stop", [1]), ("stop_token_ids", ["a"]),
        ("stop_token_ids", [999]), ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 1000), ("max_tokens", "9.5"),
        ("max_tokens", 1e300),
        ("min_tokens", -1), ("logit_bias", {"x": 1}), ("logit_bias", {"1": 101}), ("logit_bias", [1]),
        ("allowed_token_ids", []), ("presence_penalty", 3), ("repetition_penalty", 0), ("ignore_eos", "yes"),
        ("stream", 1), ("speculative", -1), ("speculative", 1.5), ("speculative", "no"), ("speculative", 2**64),
        ("return_draft_status", 1), ("return_draft_status", "all"), ("priority", "high"), ("cache_salt", 5),
        ("skip_special_tokens", 0), ("response_format", {"type": "xml"}), ("best_of", 2),
        ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("functions", [{}]), ("audio", {}),
        ("modalities", ["text", "audio"]), ("guided_json", {"if": {}}), ("structured_outputs", {"regex": "("}),
        ("guided_choice", ["a", ""] * 600), ("regex", "("), ("structured_outputs", {"a": 1}),
        ("length_penalty", 1.2), ("truncate_prompt_tokens", 3), ("logits_processors", ["a"]),
        ("suffix", "x"), ("prompt_embeds", "AAAA"), ("documents", [{}]), ("max_new_tokens", 5), ("lora_path", "sql"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_wrong_values_are_named(http, path, body, field, value):
    error = error_in(http.post(path, body | {field: value}), 400)
    assert error["param"].partition("[")[0] == field  # or the place inside it, as in "stop[0]"
    assert error["type"] in ("BadRequestError", "ContextLengthExceeded")
    assert field in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "field", "value"),
    [
        ("/v1/completions", COMPLETION, "prompt", 3),
        ("/v1/completions", COMPLETION, "prompt", []),
        ("/v1/completions", COMPLETION, "prompt", [1, "a"]),
        ("/v1/completions", COMPLETION, "prompt", [[]]),
        ("/v1/completions", COMPLETION, "prompt", [True]),
        ("/v1/completions", COMPLETION, "prompt", [256]),
        ("/v1/completions", COMPLETION, "logprobs", True),
        ("/v1/completions", COMPLETION, "logprobs", 6),
        ("/v1/completions", COMPLETION, "logprobs", -1),
        ("/v1/completions", COMPLETION, "messages", [{"role": "user", "content": "hi"}]),
        ("/v1/completions", COMPLETION, "max_completion_tokens", 5),
        ("/v1/chat/completions", CHAT, "messages", "hi"),
        ("/v1/chat/completions", CHAT, "logprobs", 1),
        ("/v1/chat/completions", CHAT, "top_logprobs", 1),
        ("/v1/chat/completions", CHAT, "echo", True),
        ("/v1/chat/completions", CHAT, "prompt", "x"),
    ],
)
def test_wrong_values_of_one_route(http, path, body, field, value):
    assert error_in(http.post(path, body | {field: value}), 400)["param"] == field


def test_too_many_top_logprobs_are_named(http):
    error = error_in(http.post("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 6}), 400)
    assert error["param"] == "top_logprobs"


def test_missing_fields_are_named(http):
    assert error_in(http.post("/v1/completions", {"model": "base"}), 400)["param"] == "prompt"
    assert error_in(http.post("/v1/chat/completions", {"model": "base"}), 400)["param"] == "messages"


def test_stream_options_are_checked(http):
    body = COMPLETION | {"stream": True, "stream_options": {"include_usage": "maybe"}}
    assert error_in(http.post("/v1/completions", body), 400)["param"] == "stream_options.include_usage"


def test_stream_refuses_prompt_logprobs(http):
    body = COMPLETION | {"stream": True, "prompt_logprobs": 1}
    assert error_in(http.post("/v1/completions", body), 400)["param"] == "prompt_logprobs"


@pytest.mark.parametrize(
    ("content", "extra", "param", "figures"),
    [
        ("x" * 59, {}, "messages", "65 tokens (64 in the messages, 1 in the completion)"),
        ("x" * 99, {}, "messages", "105 tokens (104 in the messages"),
        ("x" * 40, {"max_completion_tokens": 30}, "max_completion_tokens", "75 tokens (45 in the messages, 30 in"),
    ],
)
def test_conversation_too_long_in_openais_words(http, content, extra, param, figures):
    messages = [{"role": "user", "content": content}]
    error = error_in(http.post("/v1/chat/completions", {"messages": messages, **extra}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert error["message"].startswith("This model's maximum context length is 64 tokens. However, ")
    assert figures in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["x" * 64, ["ok", "x" * 64]])
def test_prompt_too_long(http, llm, prompt, stream):
    error = error_in(http.post("/v1/completions", {"prompt": prompt, "stream": stream}), 400)
    assert error["type"] == "ContextLengthExceeded"
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert error["message"].startswith("This model's maximum context length is 64 tokens. However, ")
    assert not llm.running


@pytest.mark.parametrize("bad", ["x" * 64, "x" * 30_000, [5] * 64, [999]])
def test_no_prompt_of_a_batch_starts_when_one_is_refused(http, llm, bad):
    prompts = ["ok", bad] if isinstance(bad, str) else [[5], bad]
    error = error_in(http.post("/v1/completions", {"prompt": prompts, "stream": True, "max_tokens": 3}), 400)
    assert error["param"] == "prompt"
    assert not llm.calls


def test_max_tokens_must_fit_every_prompt_of_a_batch(http, llm):
    body = {"prompt": [[5], [5] * 60], "max_tokens": 10, "stream": True}
    error = error_in(http.post("/v1/completions", body), 400)
    assert (error["type"], error["param"]) == ("ContextLengthExceeded", "max_tokens")
    assert not llm.calls


@pytest.mark.parametrize(
    ("prompt", "n", "param"), [(["a"] * 1025, 1, "prompt"), (["a"] * 9, 114, "n"), ([[5]] * 513, 2, "n")]
)
def test_too_many_sequences(http, llm, prompt, n, param):
    error = error_in(http.post("/v1/completions", {"prompt": prompt, "n": n}), 400)
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert "at most 1024" in error["message"]
    assert not llm.calls


def test_too_many_bad_words_for_a_batch(http, llm):
    body = {"prompt": ["a"] * 1024, "bad_words": [f"w{i}" for i in range(5)]}
    assert error_in(http.post("/v1/completions", body), 400)["param"] == "bad_words"
    assert not llm.calls


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", COMPLETION | {"model": "y" * 4000}, 404),
        ("/v1/chat/completions", {"messages": [{"role": "y" * 5000, "content": ""}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "y" * 5000}]}]}, 400),
        ("/v1/pin_lora_adapter", {"lora_name": "a", "y" * 5000: 1}, 400),
        ("/v1/unload_lora_adapter", {"lora_name": "y" * 4000}, 404),
        ("/" + "y" * 5000, {}, 404),
    ],
)
def test_long_input_is_not_repeated(http, path, body, status):
    response = http.post(path, body)
    assert response.status_code == status
    error = response.json()["error"]
    assert 100 < error["message"].count("y") <= 210
    assert len(error["param"] or "") <= 200


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"3", b'"text"', b"null", b'{"model": NaN}', b'{"temperature": Infinity, "prompt": "x"}',
        b'{"temperature": 1e999, "prompt": "x"}', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 10000,
        b'{"prompt": "x"} x', b"{'prompt': 'x'}",
    ],
)  # fmt: skip
def test_bodies_that_are_no_json_object(http, content):
    response = http.request("POST", "/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert error_in(response, 400)["type"] == "BadRequestError"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_content_types_are_refused(http, kind):
    response = http.request("POST", "/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": kind})
    assert "Content-Type" in error_in(response, 400)["message"]


def test_body_too_large(make_http):
    http = make_http(max_body_bytes=100)
    assert error_in(http.post("/v1/completions", {"prompt": "x" * 100}), 413)["type"] == "RequestTooLarge"

    async def chunks():
        for _ in range(10):
            yield b" " * 20

    headers = {"Content-Type": "application/json"}  # and no length
    error_in(http.request("POST", "/v1/completions", content=chunks(), headers=headers), 413)


@pytest.mark.parametrize("model", ["nobody", "base:nobody", "nobody:base", ""])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_unknown_model(http, path, body, model):
    error = error_in(http.post(path, body | {"model": model}), 404)
    assert error["type"] == "NotFoundError"
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"


@pytest.mark.parametrize(
    "path", ["/v1/responses/compact", "/v1/conversations/x", "/v1/complete", "/v1/audio/speech", "/pooling"]
)
def test_routes_that_are_to_come(http, path):
    error = error_in(http.post(path, {}), 501)
    assert error["type"] == "NotImplementedError"
    assert path in error["message"]


def test_models_without_labels_do_not_classify(http):
    assert "no score matrix" in error_in(http.post("/classify", {"input": ["a", "b"]}), 400)["message"]
    for field, value in (("input", []), ("activation", False), ("truncate_prompt_tokens", 3)):
        assert error_in(http.post("/classify", {"input": "a", field: value}), 400)["param"] == field


def test_unknown_route_and_method(http):
    for path in ("/v1/nothing", "/v1/responses2"):
        assert error_in(http.get(path), 404)["type"] == "NotFoundError"
    response = http.get("/v1/completions")
    assert error_in(response, 405)["type"] == "MethodNotAllowed"
    assert "POST" in response.headers["allow"]


def test_keys(make_http):
    http = make_http(api_keys=("first", "second"))
    for headers in (
        {},
        {"Authorization": "Bearer third"},
        {"Authorization": "first"},
        {"Authorization": "Basic first"},
    ):
        posts = [("POST", f"/{name}") for name in "tokenize detokenize score rerank v2/rerank classify".split()]
        for method, path in (("GET", "/v1/models"), ("GET", "/v1/x"), *posts):
            response = http.request(method, path, headers=headers)
            error = error_in(response, 401)
            assert error["type"] == "AuthenticationError"
            assert error["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    for key in ("first", "second"):
        assert http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    for path in ("/health", "/version", "/metrics"):
        assert http.get(path).status_code == 200


@pytest.mark.parametrize("error", [OverloadedError("full"), EngineDeadError("died"), ShuttingDownError("bye")])
@pytest.mark.parametrize("stream", [False, True])
def test_busy_engine_is_a_503_with_retry_after(http, llm, error, stream):
    llm.fail_after, llm.error = 0, error
    response = http.post("/v1/completions", COMPLETION | {"stream": stream})
    assert error_in(response, 503)["type"] == type(error).type
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("state", ["starting", "restarting", "draining", "stopped"])
def test_no_engine_is_a_503(http, llm, state):
    llm.state = state
    response = http.post("/v1/completions", COMPLETION)
    kind = "ServiceUnavailableError" if state.endswith("starting") else "ShuttingDownError"
    assert error_in(response, 503)["type"] == kind
    assert "retry-after" in response.headers


@pytest.mark.parametrize("failure", [RuntimeError("secret"), None])
@pytest.mark.parametrize("stream", [False, True])
def test_unexpected_errors_reveal_nothing(http, llm, failure, stream):
    llm.fail_after = 0
    if failure is not None:
        llm.error = failure
    response = http.post("/v1/completions", COMPLETION | {"stream": stream})
    error = error_in(response, 500)
    assert error["type"] == "InternalServerError"
    assert "secret" not in response.text
    assert "boom" not in response.text
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("failure", "kind"), [(EngineDeadError("died"), "EngineDeadError"), (RuntimeError("secret"), "InternalServerError")]
)
def test_errors_in_the_middle_of_a_stream_are_an_event(http, llm, failure, kind):
    llm.fail_after, llm.error = 2, failure
    response = http.post("/v1/chat/completions", CHAT | {"stream": True})
    assert response.status_code == 200
    *_, error, done, end = response.text.split("\n\n")
    assert error.startswith('data: {"error": {')
    assert kind in error
    assert "secret" not in error
    assert (done, end) == ("data: [DONE]", "")


def test_an_adapters_error_fails_its_request_alone(http, llm):
    http.load_adapter("sql")
    llm.fail_after, llm.error = 0, AdapterError("rank 64 is above the limit", param="lora_request")
    assert error_in(http.post("/v1/completions", COMPLETION | {"model": "sql"}), 400)["type"] == "InvalidAdapter"
    llm.fail_after = None
    assert http.post("/v1/completions", COMPLETION).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param", "max_tokens"),
    [
        ("/v1/completions", {"prompt": [5] * 70, "max_tokens": 3}, "prompt", 3),
        ("/v1/completions", {"prompt": [5] * 70, "max_tokens": 0, "echo": True}, "prompt", 1),
        ("/v1/completions", {"prompt": [5] * 70, "use_beam_search": True, "n": 2}, "prompt", 1),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 65}]}, "messages", 1),
        ("/v1/responses", {"input": "x" * 65}, "input", 1),
        ("/v1/embeddings", {"input": [5] * 70}, "input", 1),
        ("/v1/rerank", {"query": "a", "documents": ["b", "x" * 69]}, "documents", 1),
    ],
)
def test_all_routes_have_the_same_error_for_a_long_prompt(http, llm, path, body, param, max_tokens):
    error = error_in(http.post(path, body), 400)
    assert (error["type"], error["param"]) == ("ContextLengthExceeded", param)
    assert "context length is 64 tokens. However, " in error["message"]
    assert f"you requested {70 + max_tokens} tokens (70 in the {param}, " in error["message"]
    assert not llm.calls
