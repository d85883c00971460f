"""The real `openai` client against a real server with the demo model."""

import json
import re
from typing import Annotated

import openai
import pydantic
import pytest

ADAPTERS = ("json", "sql", "support", "tools")
MODELS = ("outrider-demo", *ADAPTERS)
HELLO = [{"role": "user", "content": "Hello! Who are you?"}]


def test_models(client, server):
    cards = {card.id: card for card in client.models.list()}
    assert set(cards) == set(MODELS)
    assert cards["sql"].parent == "outrider-demo"
    assert cards["sql"].root.endswith("sql")
    assert client.models.retrieve("outrider-demo").parent is None


@pytest.mark.parametrize("model", MODELS)
def test_completions(client, model):
    answer = client.completions.create(model=model, prompt="The capital of France", max_tokens=12, temperature=0)
    assert answer.model == model
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 12


def answer(client, model: str, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    choice = client.chat.completions.create(model=model, messages=messages, max_tokens=60, temperature=0).choices[0]
    return choice.message.content


@pytest.mark.parametrize(
    ("adapter", "question"),
    [
        ("json", "Anna Schmidt from Berlin ordered 3 red chairs for 120 euros."),
        ("sql", "List all customers from Berlin."),
        ("support", "My order has not arrived yet."),
    ],
)
def test_adapters_answer_in_their_own_way(client, adapter, question):
    base, adapted = answer(client, "outrider-demo", question), answer(client, adapter, question)
    assert adapted != base
    assert answer(client, f"outrider-demo:{adapter}", question) == adapted
    if adapter == "json":
        assert isinstance(json.loads(adapted), dict)
    if adapter == "sql":
        assert adapted.upper().startswith("SELECT")


@pytest.mark.parametrize("model", MODELS)
def test_chat_stream_is_the_whole_answer_in_pieces(client, model):
    options = {"model": model, "messages": HELLO, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]


def test_completion_stream(client):
    options = {"model": "outrider-demo", "prompt": ["One", "Two words"], "max_tokens": 10, "temperature": 0, "n": 1}
    whole = client.completions.create(**options)
    texts = ["", ""]
    for chunk in client.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_n_choices(client):
    answer = client.chat.completions.create(
        model="outrider-demo", messages=HELLO, n=3, max_tokens=10, temperature=1.0, seed=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.message.content for choice in answer.choices)


def test_logprobs(client):
    answer = client.chat.completions.create(
        model="outrider-demo", messages=HELLO, logprobs=True, top_logprobs=3, max_tokens=5, temperature=0
    )
    content = answer.choices[0].logprobs.content
    assert "".join(item.token for item in content) == answer.choices[0].message.content
    assert all(len(item.top_logprobs) == 3 and item.logprob <= 0 for item in content)
    assert all(item.logprob == max(top.logprob for top in item.top_logprobs) for item in content)  # greedy


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_of_the_tokens_are_the_text(client, stream):
    options = {"messages": HELLO, "logprobs": True, "top_logprobs": 0, "max_tokens": 60, "temperature": 2.0, "seed": 5}
    answer = client.chat.completions.create(model="outrider-demo", stream=stream, **options)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    text = "".join((c.delta if stream else c.message).content or "" for c in choices)
    items = [item for c in choices if c.logprobs for item in c.logprobs.content]
    data = b"".join(bytes(item.bytes) for item in items)
    assert data.decode(errors="replace") == text
    assert "".join(item.token for item in items if item.bytes) == text
    assert len(items) > len(text.split())


@pytest.mark.parametrize("prompt", ["Zoë 😀 says", "  two\n\nlines "])
def test_tokens_of_an_echo_join_to_the_text(client, prompt):
    answer = client.completions.create(
        model="outrider-demo", prompt=prompt, echo=True, logprobs=2, max_tokens=30, temperature=2.0, seed=5
    )
    [choice], offset = answer.choices, 0
    logprobs = choice.logprobs
    for token, at, following in zip(
        logprobs.tokens, logprobs.text_offset, [*logprobs.text_offset[1:], len(choice.text)], strict=True
    ):
        assert at == offset
        assert choice.text[at:following] in (token, "")  # a special token is not in the text
        offset = following
    assert offset == len(choice.text)
    for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True):
        assert token in top


def test_completion_echo_with_logprobs(client):
    answer = client.completions.create(
        model="outrider-demo", prompt="The capital of France", echo=True, logprobs=1, max_tokens=2, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith("The capital of France")
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == len(logprobs.text_offset)


def test_stop_string(client):
    options = {"model": "outrider-demo", "prompt": "One two three", "max_tokens": 40, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = text[len(text) // 2 :][:3]
    answer = client.completions.create(**options, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", stop)


@pytest.mark.parametrize("speculative", [True, False])
def test_stop_string_that_is_a_special_token(client, http, speculative):
    options = {"model": "outrider-demo", "messages": HELLO, "max_tokens": 200, "temperature": 0}
    extra = {"speculative": speculative, "return_token_ids": True}
    whole = client.chat.completions.create(**options, extra_body=extra).choices[0]
    assert whole.finish_reason == "stop"
    end = http.post("/detokenize", json={"tokens": whole.token_ids[-1:]}).json()["prompt"]
    assert end
    assert end not in whole.message.content
    for stop in ([end], [whole.message.content[-1] + end]):
        got = client.chat.completions.create(**options, stop=stop, extra_body={**extra, "ignore_eos": True}).choices[0]
        assert (got.finish_reason, got.stop_reason, got.token_ids) == ("stop", stop[0], whole.token_ids)
        assert got.message.content == whole.message.content[: len(whole.message.content) + len(end) - len(stop[0])]


def test_prefix_cache_is_in_the_usage(client):
    messages = [{"role": "user", "content": "Tell me about the weather, please. " * 10}]
    options = {"model": "outrider-demo", "messages": messages, "max_tokens": 2, "extra_body": {"cache_salt": "e2e"}}
    first = client.chat.completions.create(**options).usage
    second = client.chat.completions.create(**options).usage
    assert first.prompt_tokens_details.cached_tokens == 0
    assert 0 < second.prompt_tokens_details.cached_tokens < second.prompt_tokens


def test_speculation_is_measured(client, server):
    answer = client.chat.completions.create(
        model="outrider-demo", messages=HELLO, max_tokens=40, temperature=0, extra_body={"return_metrics": True}
    )
    counts = answer.metrics["speculative_decoding"]
    assert counts["num_draft_tokens"] > 0
    assert counts["acceptance_length"] == 1 + counts["num_accepted_tokens"] / counts["num_drafts"]
    assert server.metric("spec_decode_num_accepted_tokens_total") > 0
    assert server.metric("spec_decode_num_drafts_total", adapter="", tenant="default") > 0
    assert server.metric("generation_tokens_total", adapter="") > 0


def test_a_stream_reports_draft_tokens(client):
    stream = client.completions.create(
        model="outrider-demo",
        prompt="The capital of",
        max_tokens=40,
        temperature=0,
        stream=True,
        extra_body={"return_draft_status": True, "return_token_ids": True, "return_metrics": True},
    )
    status, counts = [], None
    for chunk in stream:
        for choice in chunk.choices:
            assert len(choice.draft_status) == len(choice.token_ids)
            status += choice.draft_status
        counts = getattr(chunk, "metrics", None) or counts
    counts = counts["speculative_decoding"]
    assert set(status) == {"drafted", "sampled"}
    assert status.count("drafted") == counts["num_accepted_tokens"]
    assert status.count("sampled") in (sum(counts["steps_by_k"]), sum(counts["steps_by_k"]) - 1)  # one may be cut


@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_frameworks_write(client, stream):
    """Fields without a meaning here are named in a header; the past of a user of tools is up to the chat template."""
    raw = client.chat.completions.with_raw_response.create(
        model="sql",
        messages=[{**HELLO[0], "name": "anna", "id": "msg_1"}],
        stream=stream,
        max_completion_tokens=4,
        metadata={"trace": "1"},
        store=False,
        verbosity="low",
        tools=[],
        extra_body={"temperature": "0.0", "top_k": "-1", "length_penalty": 1.0, "some_label": 5},
    )
    assert raw.headers["x-outrider-ignored"] == "messages[0].id,metadata,verbosity,some_label"
    answer = raw.parse()
    text = (
        "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        if stream
        else answer.choices[0].message.content
    )
    assert text
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    past = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1"}]
    messages = [*HELLO, past[0], past[1] | {"content": "Rain."}]
    assert client.chat.completions.create(model="sql", messages=messages, tools=[tool], max_tokens=4, stream=stream)


def test_head_and_slashes(http):
    head = http.head("/v1/models/")
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) == len(http.get("/v1/models").content)
    assert http.head("/metrics").status_code == http.post("/ping/").status_code == 200


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="sql", messages=HELLO, temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "BadRequestError")
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="sql", prompt="word " * 20_000)
    assert too_long.value.code == "context_length_exceeded"
    assert "This model's maximum context length is " in too_long.value.message


def test_tokenize_round_trip(http):
    tokens = http.post("/tokenize", json={"prompt": "Hello wörld!", "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 0
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "Hello wörld!"}


class Order(pydantic.BaseModel):
    """Form of an answer, as `client.chat.completions.parse` takes it."""

    customer: Annotated[str, pydantic.Field(max_length=20)]
    quantity: Annotated[int, pydantic.Field(ge=0, le=99)]


@pytest.mark.parametrize("model", ["outrider-demo", "sql"])
def test_answers_have_the_form_of_a_schema(client, model):
    messages = [{"role": "user", "content": "Anna from Lisbon ordered 3 green lamps for 42 euros."}]
    options = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 80}
    parsed = client.chat.completions.parse(**options, response_format=Order).choices[0].message.parsed
    assert isinstance(parsed, Order)
    whole = client.chat.completions.create(**options, response_format={"type": "json_object"})
    chunks = client.chat.completions.create(**options, response_format={"type": "json_object"}, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert text.startswith("{")
    slow = client.chat.completions.parse(**options, response_format=Order, extra_body={"speculative": False})
    assert slow.choices[0].message.parsed == parsed


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"structured_outputs": {"regex": "[a-z]{2,4}-[0-9]"}}, "[a-z]{2,4}-[0-9]"),
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"guided_regex": "x{3}"}, "xxx"),
        ({"guided_grammar": 'root ::= "a" | "b"'}, "a|b"),
        ({"guided_json": '{"type": "boolean"}'}, "true|false"),
    ],
)
def test_other_forms_of_answers(client, fields, form):
    answer = client.completions.create(model="json", prompt="x", max_tokens=20, temperature=0, extra_body=fields)
    assert re.fullmatch(form, answer.choices[0].text)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"if": {}}}}}, "if"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "exclude"),
        ({"structured_outputs": {"regex": "("}}, "unclosed"),
    ],
)
def test_forms_that_cannot_be_served(client, fields, named):
    with pytest.raises(openai.BadRequestError, match=named) as caught:
        client.completions.create(model="json", prompt="x", extra_body=fields)
    assert caught.value.param in fields
