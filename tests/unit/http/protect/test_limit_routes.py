"""Refusals of requests that have come as far as the limits."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest

from outrider.platform.http.app import create_app
from outrider.platform.http.server_config import ServerConfig
from outrider.platform.tenancy.accounts.principal import Limits, Principal
from outrider.platform.tenancy.limits.limiter import Limiter

ACME = Principal(tenant="acme", key_id="key-1", tenant_limits=Limits(requests_per_minute=1))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}]}),
        ("/tokenize", {"prompt": "ab"}),
    ],
)
def test_over_the_limit_the_prompt_is_not_tokenized(http, llm, monkeypatch, path, body):
    limiter = Limiter(lambda *which: None)
    people = SimpleNamespace(authenticate=lambda key: ACME)
    http.app = create_app(llm, ServerConfig(), authenticator=people, tenancy=SimpleNamespace(limiter=limiter))
    encoded, encode = [], llm.tokenizer.encode
    monkeypatch.setattr(llm.tokenizer, "encode", lambda *args, **options: encoded.append(args) or encode(*args))
    asyncio.run(limiter.charge_call(ACME))
    for _ in range(2):
        answer = http.post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (429, "requests_per_minute")
    assert not encoded


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"}),
        ("/v1/unload_lora_adapter", {"lora_name": "x"}),
        ("/v1/pin_lora_adapter", {"lora_name": "x"}),
        ("/v1/unpin_lora_adapter", {"lora_name": "x"}),
    ],
)
def test_calls_about_adapters_count_against_the_limits(http, llm, path, body):
    limiter, owner = (
        Limiter(lambda *which: None),
        dataclasses.replace(ACME, scopes=frozenset({"admin"}), max_adapters=1),
    )
    people = SimpleNamespace(authenticate=lambda key: owner)
    http.app = create_app(llm, ServerConfig(), authenticator=people, tenancy=SimpleNamespace(limiter=limiter))
    expected = 400 if "lora_path" in body else 404
    assert http.post(path, body).status_code == expected, "it is counted before it is looked at"
    llm.calls.clear()
    answer = http.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (429, "requests_per_minute")
    assert not llm.calls


def test_a_key_that_was_revoked_while_its_request_waited(http, llm):
    limiter = Limiter(lambda *which: None)
    tenancy = SimpleNamespace(
        limiter=limiter,
        ledger=SimpleNamespace(check=lambda: None),
        directory=SimpleNamespace(authenticate=lambda key: ACME, is_valid=lambda principal: False),
    )
    http.app = create_app(llm, ServerConfig(), tenancy=tenancy)
    answer = http.post("/v1/completions", {"prompt": "ab"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "AuthenticationError")
    assert not llm.calls
    assert limiter.headers(ACME)["x-ratelimit-remaining-requests"] == "1", "nothing was used"
