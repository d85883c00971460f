"""The choice of a replica, without Ray."""

import json
import random
import weakref

from outrider.platform.replicas.routing import AffinityRouter, ReplicaView, RoutingKey, routing_key


def views(count: int, slots: int = 8) -> dict[int, ReplicaView]:
    return {index: ReplicaView(slots) for index in range(count)}


def test_a_request_goes_to_the_replica_with_its_adapter() -> None:
    replicas = views(4)
    replicas[2].adapters.use("sql")
    replicas[2].ongoing = 3
    assert AffinityRouter[int](seed=0).rank(replicas, RoutingKey("sql"))[0] == 2


def test_affinity_is_bounded_to_eight_requests_above_the_least_loaded() -> None:
    for more, is_kept in ((8, True), (9, False)):
        replicas = views(4)
        replicas[2].adapters.use("sql")
        for index in range(4):
            replicas[index].ongoing = 3 + more * (index == 2)
        assert (AffinityRouter[int](seed=0).rank(replicas, RoutingKey("sql"))[0] == 2) is is_kept


def test_affinity_avoids_a_replica_with_far_more_requests() -> None:
    replicas = views(4)
    replicas[2].adapters.use("sql")
    replicas[2].ongoing = 9
    assert AffinityRouter[int](slack=4, seed=0).rank(replicas, RoutingKey("sql"))[0] != 2


def test_the_replica_with_the_adapter_and_the_text_is_first() -> None:
    replicas = views(4)
    for index in (1, 3):
        replicas[index].adapters.use("sql")
    replicas[3].give(RoutingKey("sql", ("beginning", "longer")))
    assert AffinityRouter[int](seed=0).rank(replicas, RoutingKey("sql", ("beginning", "other")))[0] == 3


def test_requests_for_no_model_are_for_all() -> None:
    replicas, router = views(2), AffinityRouter[int](seed=0)
    replicas[1].give(RoutingKey())
    assert {router.rank(replicas, RoutingKey())[0] for _ in range(30)} == {0, 1}


def test_all_replicas_are_ranked_once() -> None:
    replicas = views(5)
    ranked = AffinityRouter[int](seed=1).rank(replicas, RoutingKey())
    assert sorted(ranked) == [0, 1, 2, 3, 4]
    assert AffinityRouter[int]().rank({}, RoutingKey()) == []


def test_a_replicas_report_overrides_the_routers_estimate() -> None:
    """But not at once: its report may be older than the request."""
    view = ReplicaView(4)
    view.give(RoutingKey("given"))
    view.observe(["kept"], slots=2)
    assert set(view.adapters) == {"given", "kept"}
    view.observe(["kept"], slots=2)
    assert list(view.adapters) == ["kept"]
    for name in ("a", "b"):
        view.give(RoutingKey(name))
    assert list(view.adapters) == ["a", "b"]
    view.observe(["a", "kept"], slots=2)
    assert list(view.adapters) == ["a", "b"]


def test_names_without_number_are_not_kept() -> None:
    """A replica that loads nothing says nothing new, however many models clients ask for."""

    class Name(str):
        """Text that can be watched."""

    view, name = ReplicaView(2), Name("unknown")
    kept = weakref.ref(name)
    view.give(RoutingKey(name))
    del name
    for other in ("a", "b"):
        view.give(RoutingKey(other))
    assert kept() is None


def test_affinity_loads_fewer_adapters_than_chance() -> None:
    """40 adapters, two replicas with room for 8: loads by affinity and by turns."""

    def loads(affine: bool) -> int:
        source, router, replicas, count = random.Random(3), AffinityRouter[int](seed=3), views(2), 0
        for number in range(2000):
            key = RoutingKey(str(source.choices(range(40), [1 / (i + 1) for i in range(40)])[0]))
            chosen = router.rank(replicas, key)[0] if affine else number % 2
            count += key.adapter not in replicas[chosen].adapters
            replicas[chosen].give(key)
        return count

    assert loads(affine=True) < 0.75 * loads(affine=False)


def test_a_replica_that_refuses_all_is_the_last_choice() -> None:
    replicas = views(3)
    replicas[0].adapters.use("sql")
    replicas[0].ready = False
    replicas[1].ongoing = replicas[2].ongoing = 5
    assert AffinityRouter[int](seed=0).rank(replicas, RoutingKey("sql"))[-1] == 0


def test_keys_of_bodies() -> None:
    text = "x" * 2000
    chat = {"model": "sql", "messages": [{"role": "user", "content": text}]}
    key = routing_key(json.dumps(chat).encode())
    assert key.adapter == "sql"
    assert len(key.prefixes) == 2
    assert routing_key(json.dumps(chat | {"model": "json"}).encode()).prefixes[0] != key.prefixes[0]
    longer = {"model": "sql", "messages": [{"role": "user", "content": text + "y" * 5000}]}
    assert routing_key(json.dumps(longer).encode()).prefixes[:2] == key.prefixes
    for body in (b"", b"no json", b"[1]", b'{"model": 3}', b"[" * 100_000):
        assert routing_key(body) == RoutingKey()
    assert routing_key(b'{"prompt": "hello"}') == RoutingKey("", ())
    assert len(routing_key(json.dumps({"prompt": "\ud800" * 300}).encode()).prefixes) == 1
