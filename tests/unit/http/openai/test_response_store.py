"""The store of responses: by tenant, and bounded."""

import pytest

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
    store.put("one", stored("bigger", 16_000))  # the others make place
    assert not is_there(store, "one", "big")
    assert not is_there(store, "two", "bigger")
    for tenant in ("two", "three"):
        store.put(tenant, stored("a", 12_000))
    store.put("four", stored("a", 12_000))  # who has most makes place
    assert not is_there(store, "one", "bigger")
    assert all(is_there(store, tenant, "a") for tenant in ("two", "three", "four"))
    store.delete("two", "a")
    store.update("two", stored("a").response)
    assert not is_there(store, "two", "a")
    with pytest.raises(ValueError, match="20000"):
        store.check(stored("a", 20_000).items)
