"""`use_beam_search` of a real server, with the `openai` client."""

from __future__ import annotations

import openai
import pytest

SENTENCE = "Anna from Lisbon ordered 3 green lamps for 42 euros."
BEAMS = {"use_beam_search": True, "length_penalty": 0.0}


def chat(client, **fields):
    fields = {"model": "json", "messages": [{"role": "user", "content": SENTENCE}], "max_tokens": 96} | fields
    return client.chat.completions.create(**fields)


def test_beams_of_an_adapter(client):
    answer = chat(client, n=3, extra_body=BEAMS)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    assert texts[0].startswith('{"name": "Anna", "city": "Lisbon"')  # and it is the best: greedy text is likely here
    assert chat(client, n=3, extra_body=BEAMS).choices == answer.choices
    assert answer.usage.completion_tokens > 3 * 10
    alone = client.completions.create(model="sql", prompt="SELECT name", n=2, max_tokens=8, extra_body=BEAMS)
    both = client.completions.create(
        model="sql", prompt=["SELECT name", "SELECT city"], n=2, max_tokens=8, extra_body=BEAMS
    )
    assert [choice.text for choice in both.choices[:2]] == [choice.text for choice in alone.choices]


def test_one_beam_is_greedy_text(client):
    greedy = chat(client, temperature=0).choices[0].message.content
    assert chat(client, extra_body=BEAMS).choices[0].message.content == greedy


@pytest.mark.parametrize(("fields", "status"), [({"n": 11}, 400), ({"stream": True}, 400), ({"model": "nobody"}, 404)])
def test_errors(client, fields, status):
    with pytest.raises(openai.APIStatusError) as caught:
        chat(client, extra_body=BEAMS, **fields)
    assert (caught.value.status_code, caught.value.param) == (status, *fields)
