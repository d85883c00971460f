"""`/v1/responses` of a real server, with the `openai` client."""

from __future__ import annotations

from typing import Annotated

import openai
import pydantic
import pytest

QUESTION = "List all customers from Berlin."
TOOL = {
    "type": "function",
    "name": "get_order",
    "parameters": {
        "type": "object",
        "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["number"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Order(pydantic.BaseModel):
    """Form of an answer."""

    customer: Annotated[str, pydantic.Field(max_length=20)]
    quantity: Annotated[int, pydantic.Field(ge=0, le=99)]


@pytest.mark.parametrize("model", ["outrider-demo", "sql", "outrider-demo:support"])
def test_a_response_is_the_chats_answer(client, model):
    """Also in a stream, whose steps verify drafts."""
    options = {"model": model, "input": QUESTION, "max_output_tokens": 40, "temperature": 0}
    whole = client.responses.create(**options)
    messages = [{"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=40, temperature=0)
    assert (whole.output_text, whole.model) == (chat.choices[0].message.content, model)
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    for extra in ({}, {"extra_body": {"speculative": False}}):
        events = list(client.responses.create(**options, stream=True, **extra))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
        assert events[-1].response.output_text == whole.output_text
        assert events[-1].type == f"response.{whole.status}"


def test_a_conversation_that_is_stored(client):
    first = client.responses.create(model="sql", input=QUESTION, max_output_tokens=60, temperature=0)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(
        model="sql", input="And from Lisbon?", previous_response_id=first.id, max_output_tokens=30, temperature=0
    )
    past = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": first.output_text}]
    stateless = client.responses.create(
        model="sql", input=[*past, {"role": "user", "content": "And from Lisbon?"}], max_output_tokens=30, temperature=0
    )
    assert (second.output_text, second.usage.input_tokens) == (stateless.output_text, stateless.usage.input_tokens)
    items = list(client.responses.input_items.list(second.id, order="asc", limit=1))  # page by page
    assert [item.role for item in items] == ["user", "assistant", "user"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="sql", input="x", previous_response_id=first.id)


@pytest.mark.parametrize("model", ["outrider-demo", "json"])
def test_parsed_answers(client, model):
    options = {"model": model, "input": "Anna ordered 3 lamps.", "max_output_tokens": 80, "temperature": 0}
    parsed = client.responses.parse(**options, text_format=Order).output_parsed
    assert isinstance(parsed, Order)
    with client.responses.stream(**options, text_format=Order) as stream:
        texts = [event.text for event in stream if event.type == "response.output_text.done"]
        assert stream.get_final_response().output_parsed == parsed
    assert Order.model_validate_json(texts[0]) == parsed


def test_a_cancelled_stream(client):
    options = {"model": "outrider-demo", "input": "Hello", "temperature": 0, "max_output_tokens": 1500}
    stream = client.responses.create(**options, stream=True, extra_body={"ignore_eos": True})
    events = [next(stream)]
    running = client.responses.retrieve(events[0].response.id)
    assert running.status == "in_progress"
    assert client.responses.cancel(running.id).status == "cancelled"
    events += stream
    assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "cancelled")
    assert client.responses.retrieve(running.id).status == "cancelled"
    assert events[-1].response.usage.output_tokens < 1500


def test_a_client_that_goes_away(client, server):
    stream = client.responses.create(
        model="outrider-demo", input="Hello", stream=True, max_output_tokens=1500, extra_body={"ignore_eos": True}
    )
    name = next(stream).response.id
    stream.close()
    server.wait_for(lambda: client.responses.retrieve(name).status == "cancelled")


@pytest.mark.parametrize("model", ["outrider-demo", "sql"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_order"}])
def test_a_loop_of_tools(tools_server, api_key, model, choice):
    client = tools_server.client(api_key)
    options = {"model": model, "tools": [TOOL], "temperature": 0, "max_output_tokens": 60, "parallel_tool_calls": False}
    with client.responses.stream(**options, input="Where is order 5?", tool_choice=choice) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        first = stream.get_final_response()
    call = first.output[0]
    assert (call.type, call.name, "".join(deltas)) == ("function_call", "get_order", call.arguments)
    assert 0 <= call.parsed_arguments["number"] <= 99
    whole = client.responses.create(**options, input="Where is order 5?", tool_choice=choice)
    assert whole.output[0].arguments == call.arguments
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "in Lisbon"}
    options |= {"tool_choice": "none"}
    last = client.responses.create(**options, input=[output], previous_response_id=first.id)
    assert last.output[0].type == "message"
