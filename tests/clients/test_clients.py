"""Untouched clients against a real server: each feature that a client has, of the base model or an adapter by its
name, with drafts. The demo model is small, so the form of what it writes is tested, and that the text is the Python
API's."""

from __future__ import annotations

import json
import math
import urllib.request
from pathlib import Path

import drivers
import programs
import pytest
from conftest import FEATURES, HERE

BASE, ADAPTER = "outrider-demo", "sql"
CLIENTS = (
    drivers.OpenAI,
    drivers.Anthropic,
    drivers.Cohere,
    drivers.Guidance,
    programs.JavaScript,
    drivers.LangChain,
    drivers.LiteLLM,
    drivers.Instructor,
    drivers.InstructorResponses,
    drivers.PydanticAI,
    drivers.Outlines,
    drivers.Llm,
    programs.LmEval,
    programs.VllmBench,
)


@pytest.fixture(scope="session")
def expected(server) -> dict[str, dict[str, str]]:
    """Texts of the Python API, greedy and without drafts: {"chat" or "completion": {model: text}}."""
    job = {
        "question": drivers.QUESTION,
        "prompt": drivers.PROMPT,
        "models": [BASE, ADAPTER],
        "max_tokens": drivers.LENGTH["max_tokens"],
    }
    return json.loads(server.run(str(HERE / "reference.py"), json.dumps(job)))


def post(server, path: str, **body) -> dict:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def check_text(client, feature, expected, server) -> None:
    kind = "completion" if feature == "completion" else "chat"
    for model in (ADAPTER,) if feature == "adapter" else (BASE, ADAPTER) if feature == "completion" else (BASE,):
        assert expected[kind][model].strip()
        assert getattr(client, kind)(model) == expected[kind][model]


def check_stream(client, feature, expected, server) -> None:
    for model in (BASE, ADAPTER):
        pieces = client.stream(model)
        assert "".join(pieces) == expected["chat"][model]
        assert len(pieces) > 1


def check_tools(client, feature, expected, server) -> None:
    for model in (BASE, ADAPTER):
        name, arguments = client.tools(model)
        if name == "get_weather":
            assert arguments in ({"city": "Lisbon"}, {"city": "Oslo"})
        else:
            assert drivers.Order.model_validate(arguments)


def check_schema(client, feature, expected, server) -> None:
    for model in (BASE, ADAPTER):
        assert isinstance(client.schema(model), drivers.Order)


def check_logprobs(client, feature, expected, server) -> None:
    """Sum over the prompt's tokens from one of them on, of the base model and of the adapter, which differ."""
    found = []
    for model in (BASE, ADAPTER):
        total, prompt, first = client.logprobs(model)
        body = {"model": model, "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1}
        values = post(server, "/v1/completions", **body)["choices"][0]["logprobs"]["token_logprobs"]
        assert total == pytest.approx(sum(values[first:-1]), abs=1e-3)
        found.append(total)
    assert found[0] != found[1]


def check_embeddings(client, feature, expected, server) -> None:
    for model in (BASE, ADAPTER):
        vector = client.embeddings(model)
        body = {"model": model, "input": drivers.QUESTION, "encoding_format": "float"}
        assert vector == pytest.approx(post(server, "/v1/embeddings", **body)["data"][0]["embedding"], abs=1e-5)
        assert math.isclose(math.hypot(*vector), 1, abs_tol=1e-4)


def check_models(client, feature, expected, server) -> None:
    assert {BASE, ADAPTER} < set(client.models())


def check_rerank(client, feature, expected, server) -> None:
    """Whole documents, and documents of which the first tokens count."""
    documents = ["The weather in Oslo is fine.", f"{drivers.QUESTION} And so on, and so on.", "Lamps."]
    for max_tokens in (None, 6):
        body = {"model": BASE, "query": drivers.QUESTION, "documents": documents, "max_tokens_per_doc": max_tokens}
        results = post(server, "/v1/rerank", **body)["results"]
        wanted = [(result["index"], pytest.approx(result["relevance_score"], abs=1e-5)) for result in results]
        assert client.rerank(BASE, documents, max_tokens) == wanted


CHECKS = {
    "chat": check_text,
    "adapter": check_text,
    "completion": check_text,
    "stream": check_stream,
    "tools": check_tools,
    "schema": check_schema,
    "logprobs": check_logprobs,
    "embeddings": check_embeddings,
    "models": check_models,
    "rerank": check_rerank,
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_feature(client, feature, expected, server, tmp_path: Path) -> None:
    method = "chat" if feature == "adapter" else feature
    if client is programs.VllmBench and not client.python:
        pytest.skip("OUTRIDER_VLLM_PYTHON is not set")
    if not hasattr(client, method):
        pytest.skip(f"{client.title} has no {method}")
    CHECKS[feature](client(f"{server.url}/v1", tmp_path), feature, expected, server)
