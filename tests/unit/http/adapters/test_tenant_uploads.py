"""Adapters that tenants send with the call that loads them."""

from outrider.platform.core.adapter_names import engine_name

from ....error_answers import error_in
from .conftest import used


def send(people, who, name, **fields):
    return people.http.request(
        "POST",
        "/v1/load_lora_adapter",
        data={"lora_name": name, "config": "{}", **fields},
        files={"file": b"weights"},
        headers={"Authorization": f"Bearer {who}"},
    )


def test_a_tenant_sends_its_own(people):
    assert send(people, "acme", "support").status_code == 200
    lora, _ = used(people, "acme", "support")
    assert lora.name == engine_name("acme", "support")
    assert lora.files
    assert used(people, "globex", "support")[0].name == "support", "the others have the shared one"
    assert send(people, "operator", "support", tenant="globex").status_code == 200
    assert used(people, "globex", "support")[0].name == engine_name("globex", "support")


def test_a_tenant_sends_no_more_than_it_may(people):
    for name in ("a", "b"):
        assert send(people, "acme", name).status_code == 200
    assert "at most 2" in error_in(send(people, "acme", "c"))["message"]
    assert error_in(send(people, "acme", "a", pinned="true"), 403)["param"] == "pinned"
    assert error_in(send(people, "acme", "a", tenant="globex"), 403)["param"] == "tenant"
    assert error_in(send(people, "picky", "a"), 403)["param"] == "lora_name"
    error_in(send(people, "poor", "a"), 403)
    assert error_in(people.acme.load("s", None, lora_shm="x", config={}), 403)["param"] == "lora_shm"
    assert people.llm.sources.memory.num_bytes == 0, "the script holds none"
