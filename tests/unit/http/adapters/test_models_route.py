"""Model names, cards, adapters, tokenizing."""

import asyncio
from dataclasses import replace

import pytest

from outrider.platform.core.errors import AdapterError, EngineDeadError
from outrider.platform.http.adapters import model_registry as registry_module


def used_adapter(http, llm, model):
    response = http.post("/v1/completions", {"model": model, "prompt": "x"})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == (model or "base")
    lora = llm.calls[-1]["lora_request"]
    return None if lora is None else (lora.name, lora.path)


@pytest.mark.parametrize("model", ["base", "alias", None])
def test_base_names(http, llm, model):
    assert used_adapter(http, llm, model) is None


def test_aliases_select_the_base_model_and_are_not_listed(make_http, llm):
    http = make_http(model_aliases=("/models/base", "acme/base"))
    assert used_adapter(http, llm, "/models/base") is None
    assert used_adapter(http, llm, "acme/base") is None
    http.load_adapter("sql", "/adapters/sql")
    assert used_adapter(http, llm, "acme/base:sql") == ("sql", "/adapters/sql")
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["base", "sql"]
    assert http.get("/v1/models//models/base").json()["id"] == "base"
    assert http.load_adapter("acme/base").status_code == 400  # the name is taken


@pytest.mark.parametrize("model", ["sql", "base:sql", "alias:sql"])
def test_adapter_names(http, llm, model):
    http.load_adapter("sql", "/adapters/sql")
    assert used_adapter(http, llm, model) == ("sql", "/adapters/sql")


def test_adapter_whose_name_has_a_colon(http, llm):
    http.load_adapter("base:odd", "/a")
    http.load_adapter("odd", "/b")
    assert used_adapter(http, llm, "base:odd") == ("base:odd", "/a")  # a whole name wins


def test_cards(http):
    http.load_adapter("sql", "/adapters/sql")
    answer = http.get("/v1/models").json()
    assert answer["object"] == "list"
    cards = {card["id"]: card for card in answer["data"]}
    assert list(cards) == ["base", "alias", "sql"]
    base, adapter = cards["base"], cards["sql"]
    assert (base["root"], base["parent"], base["max_model_len"]) == ("/models/base", None, 64)
    assert (adapter["root"], adapter["parent"]) == ("/adapters/sql", "base")
    assert all(card["object"] == "model" and card["owned_by"] == "outrider" for card in cards.values())
    assert all(isinstance(card["created"], int) for card in cards.values())


def test_draft_weights(http, llm):
    """The folder goes to the engine, and the card says whether draft weights are in use."""
    http.load_adapter("plain")
    assert http.load_adapter("drafted", draft_path="/drafts").status_code == 200
    assert llm.adapters.requests["drafted"].draft_path == "/drafts"
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert (cards["plain"]["draft"], cards["drafted"]["draft"]) == ("", "loaded")
    assert "draft" not in cards["base"]
    http.load_adapter("drafted", load_inplace=True)
    assert http.get("/v1/models/drafted").json()["draft"] == ""
    for bad in ("", 5):
        response = http.load_adapter("x", draft_path=bad)
        assert response.status_code == 400
        assert "draft_path" in response.text


def test_draft_weights_are_those_reported_by_the_engine(http, llm, monkeypatch):
    """It may have read the files again, after a restart or because they were out of memory."""
    monkeypatch.setattr(registry_module, "MAX_AGE", 0.0)
    http.load_adapter("x", draft_path="/drafts")

    def drafts():
        return http.get("/v1/models").json()["data"][-1]["draft"], http.get("/v1/models/x").json()["draft"]

    assert drafts() == ("loaded", "loaded")
    llm.in_engine["x"] = replace(llm.in_engine["x"], draft="not a valid safetensors file")
    assert drafts() == ("not a valid safetensors file",) * 2
    llm.in_engine["x"] = replace(llm.in_engine["x"], draft="", digest="")
    assert drafts() == ("not a valid safetensors file",) * 2, "it has not been read yet"
    llm.in_engine["x"] = replace(llm.in_engine["x"], draft="loaded", digest="digest")
    llm.state = "restarting"
    assert drafts() == ("not a valid safetensors file",) * 2, "the engine's last word"
    llm.state = "ready"
    assert drafts() == ("loaded", "loaded")


def test_cards_do_not_wait_for_a_busy_engine(http, llm, monkeypatch):
    monkeypatch.setattr(registry_module, "REFRESH_TIMEOUT", 0.01)
    http.load_adapter("x", draft_path="/drafts")

    async def busy():
        await asyncio.Event().wait()

    async def dead():
        raise EngineDeadError("dead")

    for llm.adapters.list in (busy, dead):
        assert http.get("/v1/models/x").json()["draft"] == "loaded"


def test_one_card(http):
    http.load_adapter("org/sql", "/adapters/sql")
    assert http.get("/v1/models/alias").json()["id"] == "alias"
    assert http.get("/v1/models/org/sql").json()["id"] == "org/sql"
    assert http.get("/v1/models/base:org/sql").json()["id"] == "org/sql"
    response = http.get("/v1/models/nobody")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_load_and_unload(http, llm):
    response = http.load_adapter("x", "/adapters/x", pinned=True)
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'x' added successfully.")
    assert llm.in_engine["x"].pinned
    response = http.post("/v1/unload_lora_adapter", {"lora_name": "x"})
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'x' removed successfully.")
    assert not llm.in_engine
    assert http.post("/v1/completions", {"model": "x", "prompt": "a"}).status_code == 404


@pytest.mark.parametrize("name", ["x", "base", "alias"])
def test_duplicate_names(http, name):
    http.load_adapter("x")
    response = http.load_adapter(name, "/adapters/other")
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "InvalidUserInput", "lora_name")


def test_load_inplace_replaces(http, llm):
    http.load_adapter("x", "/one")
    assert http.load_adapter("x", "/two", load_inplace=True).status_code == 200
    assert used_adapter(http, llm, "x") == ("x", "/two")


def test_an_adapter_that_the_engine_has_lost_can_be_unloaded(http, llm):
    http.load_adapter("x")
    llm.in_engine.clear()
    response = http.post("/v1/unload_lora_adapter", {"lora_name": "x"})
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'x' removed successfully.")
    assert http.get("/v1/models/x").status_code == 404
    assert http.load_adapter("x").status_code == 200


def test_an_adapter_that_a_restart_has_lost_is_not_listed_and_can_be_loaded(http, llm):
    http.load_adapter("x")
    llm.in_engine.clear()
    llm.adapters.requests.clear()  # as AsyncLLM does when it cannot load it again
    assert http.get("/v1/models/x").status_code == 404
    assert http.post("/v1/completions", {"model": "x", "prompt": "a"}).status_code == 404
    assert http.post("/v1/unload_lora_adapter", {"lora_name": "x"}).status_code == 404
    assert http.load_adapter("x", "/two").status_code == 200
    assert used_adapter(http, llm, "x") == ("x", "/two")


def test_a_name_that_only_the_engine_knows_can_be_loaded_and_unloaded(http, llm):
    for again in (lambda: http.load_adapter("x"), lambda: http.post("/v1/unload_lora_adapter", {"lora_name": "x"})):
        http.load_adapter("x")
        llm.adapters.requests.clear()
        assert again().status_code == 200
    assert not llm.in_engine


def test_unload_unknown(http):
    response = http.post("/v1/unload_lora_adapter", {"lora_name": "nobody"})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (404, "NotFoundError", "lora_name")
    assert error["code"] is None  # the code is for models in requests


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_path": "/x"}, "lora_name"),
        ({"lora_name": "", "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "x", "lora_path": ""}, "lora_path"),
        ({"lora_name": 3, "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "/x", "pinned": "yes"}, "pinned"),
        ({"lora_name": "x", "lora_path": "/x", "more": 1}, "more"),
        ({"lora_name": "x" * 257, "lora_path": "/x"}, "lora_name"),
    ],
)
def test_bad_load_requests(http, body, param):
    response = http.post("/v1/load_lora_adapter", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_broken_adapter_is_not_registered(http, llm):
    llm.error = AdapterError("missing adapter_config.json", param="lora_path")
    response = http.load_adapter("bad", "/broken")
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "InvalidAdapter", "lora_path")
    assert http.get("/v1/models/bad").status_code == 404


def test_tokenize_a_prompt(http):
    answer = http.post("/tokenize", {"model": "base", "prompt": "ab"}).json()
    assert answer == {"count": 3, "max_model_len": 64, "tokens": [1, 97, 98]}
    answer = http.post("/tokenize", {"prompt": "ab", "add_special_tokens": False, "return_token_strs": True}).json()
    assert (answer["tokens"], answer["token_strs"]) == ([97, 98], ["a", "b"])


def test_tokenize_messages(http, llm):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    tokens = http.post("/tokenize", body).json()["tokens"]
    assert llm.tokenizer.decode(tokens) == "u:hi|a:"
    tokens = http.post("/tokenize", body | {"add_generation_prompt": False}).json()["tokens"]
    assert llm.tokenizer.decode(tokens) == "u:hi|"


def test_detokenize(http):
    assert http.post("/detokenize", {"model": "alias", "tokens": [97, 98]}).json() == {"prompt": "ab"}
    assert http.post("/detokenize", {"tokens": [97] * 256}).status_code == 200  # 4 x max_model_len
    assert "at most 256" in http.post("/detokenize", {"tokens": [97] * 257}).json()["error"]["message"]


def test_tokenizer_info(http, llm):
    llm.tokenizer.eos_token, llm.tokenizer.chat_template = "</s>", {"default": "one", "tool_use": "other"}
    answer = http.get("/tokenizer_info").json()
    expected = {"model_max_length": 64, "bos_token": None, "eos_token": "</s>", "chat_template": "one"}
    assert answer.items() >= expected.items()
    assert http.get("/tokenizer_info?model=base").json() == answer
    response = http.get("/tokenizer_info?model=nobody")
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "model": "nobody"}, 404, "model"),
        ("/detokenize", {"tokens": [256]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [5, -1]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": "ab"}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [97] * 257}, 400, "tokens"),
    ],
)
def test_bad_tokenizing(http, path, body, status, param):
    response = http.post(path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
