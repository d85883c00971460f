"""Deployments on a Ray of this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray")
sys.path.insert(0, str(Path(__file__).parent))

from deployed import ON_RAY, Deployed, free_port


@pytest.fixture
def start(tmp_path: Path, tethered: Callable[..., list[str]], postgresql: Any) -> Iterator[Callable[..., Deployed]]:
    """Starts deployments that share an empty database and end with the test."""
    made: list[Deployed] = []
    database = postgresql.new_database()
    wrapped = functools.partial(tethered, number=signal.SIGTERM)

    def start(*options: str, **settings: Any) -> Deployed:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Deployed(folder, settings.pop("database", database), options, wrapped=wrapped, **settings))
        return made[-1]

    yield start
    for deployed in made:
        if deployed.process.poll() is None:
            deployed.stop()


@pytest.fixture
def ray_cluster(tethered: Callable[..., list[str]]) -> Iterator[str]:
    """Address of a cluster of one machine, which no command has started."""
    port = free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += ["--port", str(port), "--num-cpus", "4", "--include-dashboard", "false"]
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets are short
    environment = os.environ | ON_RAY | {"RAY_TMPDIR": folder}
    cluster = subprocess.Popen(tethered(command, signal.SIGTERM), env=environment, stdout=subprocess.DEVNULL)
    ends = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
        assert time.monotonic() < ends
        time.sleep(0.2)
    yield f"127.0.0.1:{port}"
    for process in [*psutil.Process(cluster.pid).children(recursive=True), psutil.Process(cluster.pid)]:
        process.kill()  # a signal to end would drain it for half a minute
    cluster.wait(60)
    shutil.rmtree(folder, ignore_errors=True)
