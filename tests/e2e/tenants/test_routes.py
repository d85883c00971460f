"""All routes that run the model, found in the application: each honours `model`, tenants and the ledger.

A route without an entry here fails.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters, demo_model_path

PROMPT = "List all customers from Berlin."
START = "The capital of France"
MESSAGES = [{"role": "user", "content": PROMPT}]
IDS = [1, 4, 201, 35, 589, 300]
OTHER = "SELECT name FROM customers"
NUM_TOKENS = 12

GENERATED = {"choices": [{"index": 0, "token_ids": [5]}]}

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": START, "max_tokens": NUM_TOKENS, "temperature": 0},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": NUM_TOKENS, "temperature": 0},
    "/inference/v1/generate": {"token_ids": IDS, "sampling_params": {"max_tokens": NUM_TOKENS, "temperature": 0}},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": NUM_TOKENS, "temperature": 0},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": NUM_TOKENS, "temperature": 0},
    "/v1/embeddings": {"input": PROMPT},
    "/v1/score": {"text_1": PROMPT, "text_2": OTHER},
    "/v1/rerank": {"query": PROMPT, "documents": [OTHER]},
}
"""Routes whose answer depends on the adapter, with a request. They have a row in the ledger."""
COUNTING = {
    "/tokenize": {"prompt": PROMPT},
    "/detokenize": {"tokens": [5]},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/chat/completions/render": {"messages": MESSAGES},
    "/v1/completions/render": {"prompt": PROMPT},
    "/v1/chat/completions/derender": {"generate_response": GENERATED},
    "/v1/completions/derender": {"generate_responses": [GENERATED]},
    "/classify": {"input": PROMPT},  # the demo has no labels: see test_classify.py
}
"""Routes that take a model and run none."""
IN_PATH = {"/v1/responses/{response_id}/cancel"}
"""Routes of an answer that was given before; test_responses.py has them."""
ADAPTER_ROUTES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/pin_lora_adapter", "/v1/unpin_lora_adapter")
FILE_ROUTES = ("/v1/files", "/v1/batches")
"""Routes of files and batches, whose lines go to the routes above; test_batches.py has them."""
CONTROL = (
    *("/pause", "/resume", "/update_weights", "/start_weight_update", "/start_draft_weight_update"),
    *("/finish_weight_update", "/admin/", "/sleep", "/wake_up", "/reset_prefix_cache", "/ping", "/load", "/health"),
    *(*ADAPTER_ROUTES, *FILE_ROUTES),
)
"""Prefixes of routes that change the server, and know no model."""


def answer_content(path: str, answer: dict[str, Any]) -> Any:
    """Text, or numbers, of an answer."""
    if path in ("/v1/completions", "/v1/chat/completions"):
        [choice] = answer["choices"]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    if path == "/inference/v1/generate":
        return answer["choices"][0]["token_ids"]
    if path == "/v1/responses":
        return answer["output"][0]["content"][0]["text"]
    if path == "/v1/messages":
        return answer["content"][0]["text"]
    if path == "/v1/embeddings":
        return pytest.approx(answer["data"][0]["embedding"], abs=1e-4)
    if path == "/v1/score":
        return pytest.approx(answer["data"][0]["score"], abs=1e-4)
    return pytest.approx(answer["results"][0]["relevance_score"], abs=1e-4)


@pytest.fixture(scope="module")
def shop(site, clients):
    """`owner` has the adapter "mine", and `neighbour` has none."""
    names = {"owner": "routes", "neighbour": "neighbour", "operator": "operator"}
    return SimpleNamespace(server=site.server, **{who: clients(name) for who, name in names.items()})


@pytest.fixture(scope="module")
def paths(shop) -> list[str]:
    """Paths that take a body and know a model."""
    document = shop.operator.get("/openapi.json").json()
    found = [path for path, operations in document["paths"].items() if "post" in operations]
    return [path for path in found if not path.startswith(CONTROL)]


@pytest.fixture(scope="module")
def direct() -> dict[str, Any]:
    """Answers of the Python API with the adapter."""
    llm = LLM(str(demo_model_path()), dtype="float32", enable_lora=True, max_lora_rank=32)
    lora = LoRARequest("mine", 1, str(demo_adapters()["sql"]))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    try:
        chat = llm.chat(MESSAGES, params, lora_request=lora)[0].outputs[0].text
        [embedding] = llm.embed([PROMPT], lora_request=lora)
        [score] = llm.score(PROMPT, OTHER, lora_request=lora)
        text = llm.generate([START], params, lora_request=lora)[0].outputs[0].text
        ids = llm.generate({"prompt_token_ids": IDS}, params, lora_request=lora)[0].outputs[0].token_ids
    finally:
        llm.shutdown()
    answers = dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages"), chat)
    answers |= dict.fromkeys(("/v1/score", "/v1/rerank"), score.outputs.score)
    return answers | {
        "/v1/completions": text,
        "/inference/v1/generate": ids,
        "/v1/embeddings": embedding.outputs.embedding,
    }


def rows(shop) -> list[dict[str, Any]]:
    answer = shop.operator.get("/admin/v1/usage/requests", params={"limit": 1000})
    assert answer.status_code == 200, answer.text
    return [row for row in answer.json()["data"] if row["tenant"] == "routes"]


def test_each_route_is_known(paths):
    assert set(paths) <= {*ROUTES, *COUNTING, *IN_PATH}, "give the new route an entry"
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"} <= set(paths)


def test_an_adapters_name_gives_the_adapters_answer(shop, paths, direct):
    before = len(rows(shop))
    asked = [path for path in paths if path in ROUTES]
    for path in asked:
        contents = {}
        for model in ("outrider-demo", "mine"):
            response = shop.owner.post(path, json={"model": model} | ROUTES[path])
            assert response.status_code == 200, (path, response.text)
            assert response.json()["usage"], path
            contents[model] = answer_content(path, response.json())
        assert contents["mine"] == direct[path], path
        assert contents["outrider-demo"] != direct[path], path
    shop.server.wait_for(lambda: len(rows(shop)) >= before + 2 * len(asked))
    new = rows(shop)
    assert {row["endpoint"] for row in new} >= set(asked)
    assert len(new) == before + 2 * len(asked)


def test_unknown_names_and_names_of_other_tenants(shop, paths):
    before = len(rows(shop))
    for path in paths:
        if path in IN_PATH:
            continue
        body = {**ROUTES, **COUNTING}[path]
        said = []
        for client, model in ((shop.neighbour, "mine"), (shop.neighbour, "none"), (shop.owner, "none")):
            response = client.post(path, json=body | {"model": model})
            assert response.status_code == 404, (path, model, response.text)
            content = json.loads(response.text.replace(model, "NAME"))
            assert content["error"]["type"] == ("not_found_error" if "messages" in path else "NotFoundError"), path
            said.append(content["error"])
        assert said[0] == said[1] == said[2], path
    assert len(rows(shop)) == before


def test_another_tenants_response_does_not_exist(shop):
    mine = shop.owner.post("/v1/responses", json={"model": "mine"} | ROUTES["/v1/responses"]).json()["id"]
    for client in (shop.neighbour, shop.operator):
        for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            assert client.request(method, f"/v1/responses/{mine}{path}").status_code == 404
        answer = client.post("/v1/responses", json={"input": "a", "previous_response_id": mine})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "previous_response_id")
    assert shop.owner.get(f"/v1/responses/{mine}").status_code == 200
