"""The store of responses: by tenant, and bounded."""

import pytest

from outrider.platform.core.errors import InvalidRequestError, NotFoundError
from outrider.platform.http.openai.responses.conversation import parse_items
from outrider.platform.http.openai.responses.store import ResponseStore, Stored


def stored(name: str, size: int = 0) -> Stored:
    return Stored({"id": name, "status": "completed", "output": []}, [{"text": "x" * size}])


def is_there(store: ResponseStore, tenant: str, name: str) -> bool:
    try:
        store.get(tenant, name)
    except LookupError:
        return False
    return True


def test_the_store_is_bounded():
    store = ResponseStore(max_responses=3, max_bytes=20_000, max_total_bytes=45_000)
    for name in "abc":
        store.put("one", stored(name))
    store.get("one", "a")
    store.put("one", stored("d"))
    assert [is_there(store, "one", name) for name in "abcd"] == [True, False, True, True]
    store.put("one", stored("big", 15_000))
    store.put("one", stored("bigger", 16_000))  # the others are evicted
    assert not is_there(store, "one", "big")
    assert not is_there(store, "two", "bigger")
    for tenant in ("two", "three"):
        store.put(tenant, stored("a", 12_000))
    store.put("four", stored("a", 12_000))  # the largest is evicted
    assert not is_there(store, "one", "bigger")
    assert all(is_there(store, tenant, "a") for tenant in ("two", "three", "four"))
    store.delete("two", "a")
    store.update("two", stored("a").response)
    assert not is_there(store, "two", "a")
    with pytest.raises(ValueError, match="20000"):
        store.check(stored("a", 20_000).items)


def test_references_to_stored_items():
    store = ResponseStore()
    call = {
        "id": "fc_1",
        "type": "function_call",
        "status": "completed",
        "call_id": "c",
        "name": "f",
        "arguments": "{}",
    }
    question = {"id": "msg_1", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}
    store.put("one", Stored({"id": "r", "status": "completed", "output": [call]}, [question]))
    references = [{"type": "item_reference", "id": item_id} for item_id in ("msg_1", "fc_1")]
    output = {"type": "function_call_output", "call_id": "c", "output": "b"}
    assert parse_items([*references, output], (), lambda: store.items("one"))[:2] == [question, call]
    assert parse_items([{"id": "msg_1"}], (), lambda: store.items("one")) == [question]  # its type may be left out
    for tenant, before, given, param in (
        ("two", [], references, "input[0].id"),
        ("one", [], [references[1], references[1]], "input[1].id"),  # many of one would be a long conversation
        ("one", [question], references, "input[0].id"),  # the previous response's conversation has it
        ("one", [], [{"type": "item_reference", "id": 5}], "input[0].id"),
    ):
        with pytest.raises(NotFoundError if tenant == "two" else InvalidRequestError) as caught:
            parse_items(given, before, lambda tenant=tenant: store.items(tenant))
        assert caught.value.param == param
