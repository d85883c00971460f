"""Two replicas of the demo model by `outrider deploy`, on a Ray of this machine, and a tenant's load on them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import httpx
import psutil
import torch

from outrider.models.config import config_from_hf
from outrider.models.demo import demo_model_path
from outrider.platform.cli.bench.random_adapters import AdapterWriter
from outrider.platform.replicas.routing import LruSet

ADAPTERS, ROOM, REPLICAS = 40, 8, 2
"""Adapters, how many of them fit a replica, and replicas."""
ADMIN = "an admin key of the benchmarks"
ON_RAY = {
    **{"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
    **{"RAY_gcs_server_port_wait_time_s": "180", "RAY_gcs_server_request_timeout_seconds": "180"},
}
"""Environment of a Ray that starts on a busy machine, on which 20 seconds until it answers are too few."""


def free_port() -> int:
    """A port that stays free until a Ray has started: neither of those that the system gives to connections (from
    32768 on, on Linux) nor of those of Ray's workers (10002 to 19999)."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as tried:
            tried.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


class Deployed:
    """The command, its replicas, and HTTP requests to them."""

    def __init__(
        self,
        folder: Path,
        database: str,
        options: Sequence[str] = (),
        *,
        wrapped: Callable[[list[str]], list[str]] = list,
    ) -> None:
        """Write adapters into an empty `folder` and start the command; `wrapped` is its last change."""
        raw = json.loads((demo_model_path() / "config.json").read_text())
        (folder / "adapters").mkdir()
        writer = AdapterWriter(folder / "adapters", config_from_hf(raw, torch.float32), seed=0)
        self.adapters = [writer.write(f"a{index}", 8) for index in range(ADAPTERS)]
        self.log = folder / "log.txt"
        self.port = free_port()
        command = [
            sys.executable,
            "-m",
            "outrider.platform.cli.main",
            "deploy",
            "--port",
            str(self.port),
            "--database",
            database,
        ]
        command += ["--num-replicas", str(REPLICAS), "--replica-cpus", "0.5", "--dtype", "float32"]
        command += ["--enable-lora", "--max-loras", str(ROOM), "--max-cpu-loras", str(ROOM), "--max-lora-rank", "16"]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                wrapped([*command, "--lora-root", str(folder), *options]),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | ON_RAY | {"OUTRIDER_ADMIN_API_KEY": ADMIN},
            )

    def wait(self, seconds: float = 180) -> None:
        """Wait until it serves."""
        ends = time.monotonic() + seconds
        while "Outrider serves at " not in self.log.read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(self.log.read_text(errors="replace")[-3000:])
            time.sleep(0.2)

    def call(self, method: str, path: str, key: str = ADMIN, **body: object) -> httpx.Response:
        """Send a request and read its answer."""
        headers = {"authorization": f"Bearer {key}"}
        address = f"http://127.0.0.1:{self.port}{path}"
        return httpx.request(method, address, headers=headers, json=body or None, timeout=60)

    def add_tenant(self, name: str) -> str:
        """Make a tenant; returns its key, once every replica knows it, which takes a second."""
        self.call("POST", "/admin/v1/tenants", name=name).raise_for_status()
        key = str(self.call("POST", "/admin/v1/keys", tenant=name).raise_for_status().json()["key"])
        time.sleep(1.5)
        return key

    def load_adapters(self) -> None:
        """Load all adapters, and wait until every replica follows."""
        for adapter in self.adapters:
            self.call(
                "POST", "/v1/load_lora_adapter", lora_name=adapter.name, lora_path=adapter.path
            ).raise_for_status()
        self.wait_for(self.adapters[-1].name)

    def wait_for(self, name: str, seconds: float = 60) -> None:
        """Wait until every replica has a model of this name."""
        ends = time.monotonic() + seconds
        while not all(f'"{name}"' in self.call("GET", "/v1/models").text for _ in range(8)):
            if time.monotonic() > ends:
                raise RuntimeError(f"a replica does not get {name}")
            time.sleep(0.5)

    def loads(self) -> dict[str, float]:
        """Adapters read by each replica, by its name."""
        found: dict[str, float] = {}
        ends = time.monotonic() + 120
        while len(found) < REPLICAS:
            if time.monotonic() > ends:
                raise RuntimeError(f"{len(found)} replicas answer")
            answer = self.call("GET", "/metrics")
            count = re.search(r"^outrider:lora_load_seconds_count (\S+)$", answer.text, re.MULTILINE)
            if count is not None:  # else a replica has just died
                found[answer.headers["x-replica"]] = float(count[1])
        return found

    def num_rows(self, tenant: str) -> int:
        """Requests of a tenant in the ledger."""
        return sum(row["requests"] for row in self.call("GET", f"/admin/v1/usage?tenant={tenant}").json()["data"])

    def replicas(self) -> list[psutil.Process]:
        """Processes of the replicas."""
        return [process for process, title in self._processes() if "ServeReplica:outrider:Engine" in title]

    def _processes(self) -> list[tuple[psutil.Process, str]]:
        own = psutil.Process(self.process.pid).children(recursive=True)
        return [(process, " ".join(process.cmdline())) for process in own if process.status() != psutil.STATUS_ZOMBIE]

    def stop(self) -> None:
        """End the command, and wait for that."""
        self.process.terminate()
        self.process.wait(90)


def conversations(count: int, users: int, turns: int, exponent: float, seed: int = 0) -> list[str]:
    """Adapters of requests: each of `users` asks the same adapter some times, `turns` on average, then draws another.

    Adapter i is drawn with a share proportional to (i + 1) ** -exponent. With `turns` 1 all are drawn independently.
    """
    source = random.Random(seed)
    shares = list(accumulate((index + 1) ** -exponent for index in range(ADAPTERS)))
    live: list[str] = []
    names = []
    for _ in range(count):
        while len(live) < users:
            live += [f"a{index}" for index in source.choices(range(ADAPTERS), cum_weights=shares)]
        user = source.randrange(users)
        names.append(live[user])
        if source.random() * turns < 1:
            del live[user]
    return names


def loads_in_turn(names: Sequence[str]) -> int:
    """Loads of these requests when the replicas get them in turn, and evict the least recently used adapter."""
    held = [LruSet(ROOM) for _ in range(REPLICAS)]
    count = 0
    for number, name in enumerate(names):
        count += name not in held[number % REPLICAS]
        held[number % REPLICAS].use(name)
    return count
