"""`outrider deploy` on a Ray of this machine: two replicas of the demo model, and one database. `make test-ray`."""

from __future__ import annotations

import collections
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import torch

pytest.importorskip("ray")

from outrider.models.config import config_from_hf
from outrider.models.demo import demo_model_path
from outrider.platform.cli.bench.random_adapters import AdapterWriter

ADAPTERS, ROOM, REQUESTS, AT_ONCE = 40, 8, 300, 6
ADMIN = "an admin key of the tests"


class Deployment:
    def __init__(self, folder: Path, tethered: Callable[..., list[str]]) -> None:
        raw = json.loads((demo_model_path() / "config.json").read_text())
        (folder / "adapters").mkdir()
        writer = AdapterWriter(folder / "adapters", config_from_hf(raw, torch.float32), seed=0)
        self.adapters = [writer.write(f"a{index}", 8).path for index in range(ADAPTERS)]
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.database = folder / "tenants.db"
        options = [
            *("--num-replicas", "2", "--replica-cpus", "0.5", "--port", str(self.port), "--dtype", "float32"),
            *("--enable-lora", "--max-loras", str(ROOM), "--max-cpu-loras", str(ROOM), "--max-lora-rank", "16"),
            *("--lora-root", str(folder), "--database", f"sqlite:///{self.database}"),
        ]
        keys = {"OUTRIDER_ADMIN_API_KEY": ADMIN, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
        self.log = folder / "log.txt"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                tethered([sys.executable, "-m", "outrider.platform.cli.main", "deploy", *options], signal.SIGTERM),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | keys | {"RAY_USAGE_STATS_ENABLED": "0"},
            )
        ends = time.monotonic() + 180
        while "Outrider serves at " not in self.log.read_text(errors="replace"):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < ends, self.log.read_text()[-3000:]
            time.sleep(0.2)

    def call(self, method: str, path: str, key: str = ADMIN, **body: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        address = f"http://127.0.0.1:{self.port}{path}"
        return httpx.request(method, address, headers=headers, json=body or None, timeout=60)

    def loads(self) -> dict[str, float]:
        """Adapters read by each replica, by the start of its process."""
        found: dict[str, float] = {}
        ends = time.monotonic() + 30
        while len(found) < 2 and time.monotonic() < ends:
            text = self.call("GET", "/metrics").text
            start, count = (
                re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
                for name in ("process_start_time_seconds", "outrider:lora_load_seconds_count")
            )
            assert start is not None
            assert count is not None
            found[start[1]] = float(count[1])
        assert len(found) == 2
        return found


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, tethered: Callable[..., list[str]]) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("deploy"), tethered)
    yield made
    made.process.terminate()
    made.process.wait(60)


@pytest.fixture(scope="module")
def key(deployment: Deployment) -> str:
    made = deployment.call("POST", "/admin/v1/tenants", name="team")
    assert made.status_code < 300, made.text
    made = deployment.call("POST", "/admin/v1/keys", tenant="team").json()
    for index, path in enumerate(deployment.adapters):
        answer = deployment.call("POST", "/v1/load_lora_adapter", lora_name=f"a{index}", lora_path=path)
        assert answer.status_code == 200, answer.text
    ends, last = time.monotonic() + 60, f'"a{ADAPTERS - 1}"'
    while not all(last in deployment.call("GET", "/v1/models").text for _ in range(8)):  # all follow the database
        assert time.monotonic() < ends
        time.sleep(0.5)
    return str(made["key"])


def ask(deployment: Deployment, key: str, adapter: str, tokens: int = 4) -> httpx.Response:
    return deployment.call(
        "POST", "/v1/completions", key, model=adapter, prompt="Hello", max_tokens=tokens, ignore_eos=True
    )


def in_turns(names: list[str], replicas: int = 2) -> int:
    """Loads of the same requests when each replica gets every second one."""
    held = [collections.OrderedDict[str, None]() for _ in range(replicas)]
    count = 0
    for number, name in enumerate(names):
        own = held[number % replicas]
        count += name not in own
        own[name] = None
        own.move_to_end(name)
        if len(own) > ROOM:
            own.popitem(last=False)
    return count


def test_requests_go_where_their_adapters_are(deployment: Deployment, key: str) -> None:
    source = random.Random(0)
    names = source.choices([f"a{i}" for i in range(ADAPTERS)], [(i + 1) ** -1.5 for i in range(ADAPTERS)], k=REQUESTS)
    before = sum(deployment.loads().values())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda name: ask(deployment, key, name), names))
    assert {answer.status_code for answer in answers} == {200}
    loads = sum(deployment.loads().values()) - before
    print(f"loads: {loads}, in turns: {in_turns(names)}")
    assert loads < 0.8 * in_turns(names)


def test_a_replica_that_is_killed_costs_its_requests_alone(deployment: Deployment, key: str) -> None:
    """Clients see an error or an answer, the other replica goes on, and the ledger has every request that began."""
    victims = [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if "ServeReplica:outrider:Engine" in " ".join(process.info["cmdline"] or [])
    ]
    assert len(victims) == 2
    statuses: list[int] = []

    def one(number: int) -> None:
        try:
            statuses.append(ask(deployment, key, f"a{number % 4}", tokens=60).status_code)
        except httpx.HTTPError:
            statuses.append(0)

    with ThreadPoolExecutor(8) as pool:
        for number in range(80):
            pool.submit(one, number)
        time.sleep(0.5)
        victims[0].kill()
    assert len(statuses) == 80
    assert statuses.count(200) >= 40
    ends = time.monotonic() + 120
    while len(deployment.loads()) < 2:  # Ray has started another one
        assert time.monotonic() < ends
    (usage,) = deployment.call("GET", "/admin/v1/usage?tenant=team").json()["data"]
    print(usage, collections.Counter(statuses))
    assert REQUESTS + statuses.count(200) <= usage["requests"] <= REQUESTS + 80
