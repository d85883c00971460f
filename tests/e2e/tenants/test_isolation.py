"""Two tenants on a real server: neither sees the other's adapters, or cached blocks of its prompts."""

from types import SimpleNamespace

import pytest

from .conftest import BLOCK

SYSTEM = "You are the assistant of a shop. " * 12
"""Many blocks."""
PRIVATE = "The number of the account is 4071 8825 1190, and nobody may know. " * 6


@pytest.fixture(scope="module")
def shop(site, clients):
    """The tenants acme and globex, each with the folder of an adapter; acme has another in the database since before
    the server's start."""
    return SimpleNamespace(server=site.server, **{who: clients(who) for who in ("acme", "globex", "operator")})


def cached_tokens(client, prompt, **extra):
    """Number of a prompt's tokens that were found in the cache."""
    body = {"model": "outrider-demo", "prompt": prompt, "max_tokens": 1, "temperature": 0, **extra}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def metric(shop, name):
    text = shop.operator.get("/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"outrider:{name} "))


def test_another_tenants_prompt_is_not_found(shop):
    """Neither by the counts that come with the answer nor by those of the server: what is not looked up successfully
    cannot be faster either."""
    assert cached_tokens(shop.acme, PRIVATE) == 0
    assert cached_tokens(shop.acme, PRIVATE) >= 5 * BLOCK
    before = metric(shop, "prefix_cache_hits_total")
    assert cached_tokens(shop.globex, PRIVATE) == 0
    assert cached_tokens(shop.operator, PRIVATE[: len(PRIVATE) // 2]) == 0
    assert metric(shop, "prefix_cache_hits_total") == before


def test_a_declared_prefix_is_shared_and_nothing_behind_it(shop):
    prompt = SYSTEM + PRIVATE
    size = shop.operator.post("/tokenize", json={"prompt": SYSTEM}).json()["count"]
    assert cached_tokens(shop.acme, prompt) == 0
    for client in (shop.acme, shop.globex):
        refused = client.post("/admin/v1/prefixes", json={"name": "mine", "text": prompt})
        assert refused.status_code == 403
    declared = shop.operator.post("/admin/v1/prefixes", json={"name": "shop", "text": SYSTEM})
    assert declared.status_code in (200, 201), declared.text
    shared = size // BLOCK * BLOCK
    assert shared > 3 * BLOCK
    assert cached_tokens(shop.globex, prompt) == 0, "what acme computed before the declaration stays its own"
    assert cached_tokens(shop.acme, prompt) == shared, "globex brought it; its own text behind it is another's"
    assert cached_tokens(shop.acme, prompt) > shared + 3 * BLOCK
    assert cached_tokens(shop.globex, SYSTEM + "Something else, and long enough. " * 4) == shared
    assert cached_tokens(shop.globex, SYSTEM[: len(SYSTEM) // 2] + "Other. " * 30) in range(BLOCK, shared)
    assert cached_tokens(shop.globex, prompt, cache_salt="mine") == 0
    assert cached_tokens(shop.globex, prompt, model="sql") == 0, "an adapter's keys and values are others"
    assert cached_tokens(shop.acme, prompt, model="sql") == shared
    assert shop.operator.delete("/admin/v1/prefixes/shop").status_code in (200, 204)
    assert cached_tokens(shop.globex, SYSTEM + "Yet another text, for the last time. " * 4) == 0


def names(client):
    return {card["id"] for card in client.get("/v1/models").json()["data"]}


def test_adapters_of_the_same_name(shop):
    public = names(shop.globex)
    assert "old" not in public
    assert names(shop.acme) == public | {"old"}
    assert names(shop.operator) == public | {"acme/old", "routes/mine"}
    for client in (shop.acme, shop.globex):
        loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "mine", "lora_path": "mine"})
        assert loaded.status_code == 200, loaded.text
        assert client.get("/v1/models/mine").json()["root"] == "mine"
    body = {"model": "mine", "prompt": "Anna from Lisbon", "max_tokens": 4, "temperature": 0}
    answers = [client.post("/v1/completions", json=body).json() for client in (shop.acme, shop.globex)]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    assert answers[0]["model"] == "mine"
    text = shop.operator.get("/metrics").text
    for tenant in ("acme", "globex"):
        assert f'outrider:prompt_tokens_total{{adapter="{tenant}/mine",tenant="{tenant}"}}' in text
    assert "x1f" not in text
    assert "\x1f" not in text
    removed = shop.acme.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
    assert removed.text == "Success: LoRA adapter 'mine' removed successfully."
    assert shop.acme.post("/v1/completions", json=body).status_code == 404
    assert shop.globex.post("/v1/completions", json=body).status_code == 200


def test_an_adapter_stored_before_the_start(shop):
    body = {"model": "old", "prompt": "Anna from Lisbon", "max_tokens": 4}
    assert shop.acme.post("/v1/completions", json=body).status_code == 200
    foreign, unknown = (shop.globex.post("/v1/completions", json=body | {"model": m}) for m in ("old", "nobody"))
    assert (foreign.status_code, foreign.text) == (404, unknown.text.replace("nobody", "old"))


def test_errors_of_a_real_engine_have_plain_names(shop, tmp_path):
    """An adapter whose files cannot be served, as reported by the engine process."""
    for path in ("nothing", "../globex/mine", str(tmp_path)):
        response = shop.acme.post("/v1/load_lora_adapter", json={"lora_name": "broken", "lora_path": path})
        assert response.status_code == 400
        assert "x1f" not in response.text
    taken = shop.globex.post("/v1/load_lora_adapter", json={"lora_name": "mine", "lora_path": "mine"})
    assert "The LoRA adapter 'mine' has already been loaded" in taken.json()["error"]["message"]


def test_tenants_do_not_see_the_metrics(shop):
    for client, status in ((shop.acme, 403), (shop.operator, 200)):
        assert client.get("/metrics").status_code == status
    assert shop.server.http().get("/metrics").status_code == 401
    assert shop.server.http().get("/health").status_code == 200
