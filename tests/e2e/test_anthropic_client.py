"""The real `anthropic` client against a real server with the demo model, which drafts."""

import json

import pytest

HELLO = [{"role": "user", "content": "Hello! Who are you?"}]
ORDER = {
    "name": "save_order",
    "description": "Save an order",
    "input_schema": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "quantity": {"type": "integer", "maximum": 99}},
        "required": ["name", "quantity"],
        "additionalProperties": False,
    },
}
ASK = [{"role": "user", "content": "Anna ordered 3 lamps."}]
FORCED = {"tools": [ORDER], "tool_choice": {"type": "tool", "name": "save_order"}}


@pytest.fixture(scope="module")
def client(tools_server, api_key):
    import anthropic  # takes a second: not while tests are collected

    return anthropic.Anthropic(base_url=tools_server.url, api_key=api_key, max_retries=0, timeout=60)


def create(client, *, messages=HELLO, model="outrider-demo", max_tokens=40, more=None, **fields):
    extra = {"temperature": 0} | (more or {})
    return client.messages.create(messages=messages, model=model, max_tokens=max_tokens, extra_body=extra, **fields)


def stream(client, *, messages=HELLO, model="outrider-demo", max_tokens=40, more=None, **fields):
    extra = {"temperature": 0} | (more or {})
    return client.messages.stream(messages=messages, model=model, max_tokens=max_tokens, extra_body=extra, **fields)


@pytest.mark.parametrize("model", ["outrider-demo", "sql"])
def test_create_and_stream(client, model):
    """The stream is the whole answer, which is the same with drafts and without."""
    whole = create(client, model=model)
    assert whole.model == model
    assert whole._request_id
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with stream(client, model=model) as events:
        assert "".join(events.text_stream) == whole.content[0].text
        final = events.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (whole.content[0].text, whole.stop_reason)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert create(client, model=model, more={"speculative": False}).content == whole.content


def test_adapters_answer_in_their_own_way(client):
    ask = [{"role": "user", "content": "List all customers from Berlin."}]
    assert create(client, messages=ask, model="sql").content[0].text.upper().startswith("SELECT")
    assert not create(client, messages=ask).content[0].text.upper().startswith("SELECT")


def test_stop_sequences_and_prefill(client):
    text = create(client).content[0].text
    stop = text[len(text) // 2 :][:3]
    stopped = create(client, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == text[: text.index(stop)]
    begun = create(client, messages=[*HELLO, {"role": "assistant", "content": text[:10].rstrip()}])
    assert (text[:10].rstrip() + begun.content[0].text).startswith(text[:20])


def test_a_loop_with_a_tool(client):
    with stream(client, messages=ASK, max_tokens=60, **FORCED) as events:
        kinds = [event.type for event in events]
        answer = events.get_final_message()
    assert answer.stop_reason == "tool_use"
    [call] = answer.content
    assert set(call.input) == {"name", "quantity"}
    assert kinds.count("input_json") >= 1  # more, if tokens do not come together
    whole = create(client, messages=ASK, max_tokens=60, **FORCED)
    assert whole.content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "saved"}
    told = [*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert create(client, messages=told, tools=[ORDER], tool_choice={"type": "none"}).content[0].type == "text"


def test_a_form_of_the_answer(client):
    form = {"type": "json_schema", "schema": ORDER["input_schema"]}
    answer = create(client, messages=ASK, max_tokens=60, more={"output_config": {"format": form}})
    assert set(json.loads(answer.content[0].text)) == {"name", "quantity"}


def test_count_tokens(client):
    counted = client.messages.count_tokens(messages=HELLO, model="outrider-demo", system="Be brief.")
    usage = create(client, system="Be brief.", max_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    usage = create(client, messages=[{"role": "user", "content": "Cache. " * 40}], max_tokens=1).usage
    again = create(client, messages=[{"role": "user", "content": "Cache. " * 40}], max_tokens=1).usage
    assert 0 < again.cache_read_input_tokens < usage.input_tokens + usage.cache_read_input_tokens


def test_errors(client):
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as unknown:
        create(client, model="nobody")
    assert unknown.value.body["error"]["type"] == "not_found_error"
    assert unknown.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="input length and `max_tokens` exceed context limit"):
        create(client, max_tokens=1_000_000)
    image = [{"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}]
    with pytest.raises(anthropic.BadRequestError, match="'image'"):
        create(client, messages=[{"role": "user", "content": image}])
    with pytest.raises(anthropic.AuthenticationError):
        create(client.with_options(api_key="wrong"))
