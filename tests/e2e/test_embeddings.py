"""`/v1/embeddings`, `/v1/score` and `/v1/rerank` of a real server, with the `openai` client."""

from __future__ import annotations

import math

import openai
import pytest

TEXTS = ["Anna from Lisbon ordered 3 lamps.", "SELECT name FROM customers", "Anna from Lisbon ordered 4 lamps."]


def vectors(client, **fields):
    return [
        item.embedding for item in client.embeddings.create(**{"model": "outrider-demo", "input": TEXTS} | fields).data
    ]


def test_embeddings(client):
    found = vectors(client)  # the client asks for base64
    assert [len(vector) for vector in found] == [len(found[0])] * 3
    assert all(math.isclose(math.hypot(*vector), 1.0, abs_tol=1e-5) for vector in found)
    for vector, same in zip(found, vectors(client, encoding_format="float"), strict=True):
        assert vector == pytest.approx(same, abs=1e-6)
    answer = client.embeddings.create(model="outrider-demo", input=TEXTS[0])
    assert answer.data[0].embedding == pytest.approx(found[0], abs=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 5
    assert vectors(client, input=[1, 2, 3]) != vectors(client, input=[[1, 2, 4]])


def test_adapters_and_dimensions(client):
    base, adapted = vectors(client), vectors(client, model="sql")
    assert base[0] != pytest.approx(adapted[0], abs=1e-3)
    short = vectors(client, dimensions=8)
    assert short[0] == pytest.approx([value / math.hypot(*base[0][:8]) for value in base[0][:8]], abs=1e-5)
    assert vectors(client, extra_body={"pooling": "mean"})[0] != pytest.approx(base[0], abs=1e-3)


def test_scores_and_ranks(http):
    body = {"model": "outrider-demo", "text_1": TEXTS[0], "text_2": TEXTS}
    scores = [item["score"] for item in http.post("/v1/score", json=body).json()["data"]]
    assert scores[0] == pytest.approx(1.0, abs=1e-5)
    assert scores[2] > scores[1]
    for names in (("queries", "documents"), ("data_1", "data_2")):
        same = dict(zip(names, (TEXTS[0], TEXTS), strict=True))
        assert [item["score"] for item in http.post("/v1/score", json=same).json()["data"]] == pytest.approx(scores)
    body = {"model": "outrider-demo", "query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[2]}]}
    ranked = http.post("/v1/rerank", json=body).json()
    assert [result["index"] for result in ranked["results"]] == [1, 0]
    assert ranked["results"][0]["document"] == {"text": TEXTS[2]}
    assert ranked["results"][0]["relevance_score"] == pytest.approx(scores[2], abs=1e-5)
    long = body | {"documents": [TEXTS[2] + " and so on" * 20_000, TEXTS[2]]}
    assert http.post("/v1/rerank", json=long).status_code == 400
    cut = http.post("/v1/rerank", json=long | {"max_tokens_per_doc": 4}).json()["results"]
    assert cut[0]["relevance_score"] == pytest.approx(cut[1]["relevance_score"], abs=1e-5)
    assert len(http.post("/v1/rerank", json=body | {"top_n": 1, "return_documents": False}).json()["results"]) == 1


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": ["a"] * 2000}, "input"),
        ("embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("embeddings", {"input": "a", "dimensions": 10**6}, "dimensions"),
        ("embeddings", {"input": "a", "pooling": "max"}, "pooling"),
        ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("embeddings", {"input": "word " * 20_000}, "input"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        ("score", {"text_1": "a", "text_2": []}, "text_2"),
        ("score", {"queries": ["a", "b"], "documents": ["a"]}, "queries"),
        ("score", {"queries": "a", "documents": []}, "documents"),
        ("score", {"queries": "a"}, "text_2"),
        ("score", {"text_1": "a", "queries": "b", "text_2": "c"}, "queries"),
        ("rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ("rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0]"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ],
)
def test_wrong_fields(http, path, fields, param):
    response = http.post(f"/v1/{path}", json=fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_unknown_models(client):
    with pytest.raises(openai.NotFoundError):
        vectors(client, model="nobody")
