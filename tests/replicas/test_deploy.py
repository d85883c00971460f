"""`outrider deploy` on a Ray of this machine: replicas of the demo model, and one PostgreSQL. `make test-ray`."""

from __future__ import annotations

import collections
import functools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from deployed import Deployed, conversations, loads_in_turn

REQUESTS, AT_ONCE = 600, 6


@pytest.fixture(scope="module")
def deployment(
    tmp_path_factory: pytest.TempPathFactory, tethered: Callable[..., list[str]], postgresql: Any
) -> Iterator[Deployed]:
    wrapped = functools.partial(tethered, number=signal.SIGTERM)
    made = Deployed(tmp_path_factory.mktemp("deploy"), postgresql.new_database(), wrapped=wrapped)
    made.wait()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def key(deployment: Deployed) -> str:
    made = deployment.add_tenant("team")
    deployment.load_adapters()
    return made


def ask(deployment: Deployed, key: str, adapter: str, tokens: int = 4) -> httpx.Response:
    return deployment.call(
        "POST", "/v1/completions", key, model=adapter, prompt="Hello", max_tokens=tokens, ignore_eos=True
    )


@pytest.mark.parametrize(("turns", "share"), [(4, 0.5), (1, 0.75)])
def test_requests_go_where_their_adapters_are(deployment: Deployed, key: str, turns: int, share: float) -> None:
    """Loads of adapters over those of the same requests in turn: in conversations, and drawn one by one. On paper, with
    one cache of all slots, empty at first, they are 0.38 and 0.58."""
    names = conversations(REQUESTS, AT_ONCE, turns, 1.0)
    before = sum(deployment.loads().values())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda name: ask(deployment, key, name), names))
    assert {answer.status_code for answer in answers} == {200}
    assert sum(deployment.loads().values()) - before <= share * loads_in_turn(names)


def test_a_replica_that_is_killed_costs_its_requests_alone(deployment: Deployed, key: str) -> None:
    """Clients see an error or an answer, the other replica goes on, and the ledger has every request that began. The
    replica that takes the dead one's place has all adapters but the one whose files have gone."""
    lost = Path(deployment.adapters[0].path)
    ends, before = time.monotonic() + 60, deployment.num_rows("team")
    while deployment.num_rows("team") > before:
        before = deployment.num_rows("team")
    shutil.rmtree(lost)
    statuses: list[int] = []

    def one(number: int) -> None:
        try:
            statuses.append(ask(deployment, key, f"a{1 + number % 4}", tokens=60).status_code)
        except httpx.HTTPError:
            statuses.append(0)

    victims = deployment.replicas()
    assert len(victims) == 2
    with ThreadPoolExecutor(8) as pool:
        for number in range(80):
            pool.submit(one, number)
        time.sleep(0.5)
        victims[0].kill()
    assert len(statuses) == 80
    assert statuses.count(200) >= 40
    assert set(statuses) <= {200, 500, 503, 0}
    while len(deployment.loads()) < 2:  # Ray has started another one
        assert time.monotonic() < ends + 60
    rows = deployment.num_rows("team")
    assert statuses.count(200) <= rows - before <= 80
    deployment.wait_for(deployment.adapters[-1].name)
    assert {ask(deployment, key, f"a{number}").status_code for number in range(1, 40)} == {200}


def test_a_replica_more_for_a_full_cache(start: Callable[..., Deployed]) -> None:
    """Twenty requests are fewer than the target, and need more than the KV cache."""
    deployed = start(
        *("--num-replicas", "1", "--max-replicas", "2", "--target-requests", "50"),
        *("--max-model-len", "600", "--num-gpu-blocks-override", "60"),
    )
    deployed.wait()
    assert len(deployed.replicas()) == 1
    key, done = deployed.add_tenant("team"), threading.Event()

    def long(number: int) -> None:
        body = {"model": "outrider-demo", "prompt": str(number), "max_tokens": 400, "ignore_eos": True}
        while not done.is_set():
            deployed.call("POST", "/v1/completions", key, **body)

    with ThreadPoolExecutor(20) as pool:
        for number in range(20):
            pool.submit(long, number)
        ends = time.monotonic() + 150
        try:
            while len(deployed.replicas()) < 2:
                assert time.monotonic() < ends
                time.sleep(1)
        finally:
            done.set()


def test_an_upgrade_loses_no_request(ray_cluster: str, start: Callable[..., Deployed]) -> None:
    """A second command replaces the application of the first, whose end then changes nothing."""
    first = start("--ray-address", ray_cluster)
    first.wait()
    key, done = first.add_tenant("team"), threading.Event()
    statuses: collections.Counter[int] = collections.Counter()

    def steady() -> None:
        while not done.is_set():
            statuses[ask(first, key, "outrider-demo", tokens=30).status_code] += 1

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(steady)
        try:
            second = start("--ray-address", ray_cluster, "--served-model-name", "outrider-demo", "next")
            second.wait()
            first.stop()
            first.wait_for("next")
        finally:
            done.set()
    assert set(statuses) == {200}
    assert ask(first, key, "next").status_code == 200
    second.stop()
    with pytest.raises(httpx.HTTPError):
        ask(first, key, "next").raise_for_status()


def test_shutdown_does_not_wait_for_a_pending_replica(start: Callable[..., Deployed]) -> None:
    """One of two replicas has no place: the end does not wait until it has."""
    deployed = start("--replica-cpus", str(0.75 * (os.cpu_count() or 1)))
    ends = time.monotonic() + 120
    while not deployed.replicas():
        assert time.monotonic() < ends
        time.sleep(0.5)
    time.sleep(3)
    replicas = deployed.replicas()
    deployed.stop()
    assert deployed.process.returncode == 0
    _, left = psutil.wait_procs(replicas, timeout=20)
    assert not left
