"""Weighted sums of adapters, through the real `openai` client and a real server."""

import shutil

import openai
import pytest

from outrider.models.demo import demo_adapters

QUESTION = "List all customers from Berlin."
PROMPT = "Answer: " * 30  # several KV blocks


def chat(client, model, **extra):
    messages = [{"role": "user", "content": QUESTION}]
    return client.chat.completions.create(
        model=model, messages=messages, max_tokens=40, temperature=0, extra_body=extra
    )


def text(answer):
    return answer.choices[0].message.content


def test_mixes_answer_under_their_name(client):
    sql = text(chat(client, "sql"))
    mixed = chat(client, "sql:0.6+json:0.5")
    assert mixed.model == "sql:0.6+json:0.5"
    assert text(mixed) == text(chat(client, "json:0.5+sql:0.6")), "the order has no meaning"
    listed = chat(client, "outrider-demo", adapters=[{"name": "json", "weight": 0.5}, {"name": "sql", "weight": 0.6}])
    assert (listed.model, text(listed)) == ("json:0.5+sql:0.6", text(mixed))
    assert text(chat(client, "sql:1.0+json:0.0")) == sql
    assert text(chat(client, "outrider-demo:sql")) == sql
    assert text(chat(client, "+sql:0.0")) == text(chat(client, "outrider-demo")) != sql
    assert text(chat(client, "+sql:-1.0")) != sql


def test_prefixes_belong_to_the_mix(client):
    def cached(model):
        answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=2, temperature=0)
        return answer.usage.prompt_tokens_details.cached_tokens

    models = ("sql", "json", "sql:0.7+json:0.3", "sql:0.3+json:0.7", "+sql:0.5")
    assert [cached(model) for model in models] == [0] * len(models)
    assert all(cached(model) > 0 for model in models)


def test_invalid_mixes_are_refused(client):
    with pytest.raises(openai.NotFoundError, match="'nobody' does not exist"):
        chat(client, "sql:0.5+nobody:0.5")
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        chat(client, "sql", adapters=["json"])
    with pytest.raises(openai.BadRequestError, match="from -100 to 100"):
        chat(client, "+sql:1000.0")


def test_an_unloaded_part(client, http, tmp_path):
    path = tmp_path / "adapter"
    shutil.copytree(demo_adapters()["support"], path)
    assert http.post("/v1/load_lora_adapter", json={"lora_name": "part", "lora_path": str(path)}).status_code == 200
    assert text(chat(client, "part:0.5+sql:0.5"))
    assert {card.id for card in client.models.list()} >= {"part", "sql"}
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "part"}).status_code == 200
    with pytest.raises(openai.NotFoundError, match="'part' does not exist"):
        chat(client, "part:0.5+sql:0.5")


def test_mixes_are_counted_by_their_adapters_alone(client, server):
    def counted():
        return server.metric("request_success_total", adapter="json+support")

    before = counted()
    for weight in (0.1, 0.2, 0.3):
        chat(client, f"support:{weight}+json:1.0")
    assert counted() == before + 3
    assert server.metric("request_success_total", adapter="json:1.0+support:0.1") == 0
    assert server.metric("spec_decode_num_drafts_total", adapter="json+support") > 0
