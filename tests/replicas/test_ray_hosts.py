"""Ranks on two hosts: network namespaces joined by a veth pair, each with a node of one Ray. `make test-ray`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from deployed import ON_RAY

from outrider import LLM

from .. import rank_texts

ADDRESSES = ["10.213.7.1", "10.213.7.2"]
PORT = 6379


def ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


def make_hosts(names: list[str]) -> None:
    """Namespaces of these names, which reach each other at ADDRESSES and nothing else."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the program ip")
    for name in names:
        made = ip("netns", "add", name, check=False)
        if made.returncode:
            pytest.skip(f"the kernel forbids network namespaces: {made.stderr.strip()}")
    ends = [f"veth{os.getpid()}{letter}" for letter in "ab"]
    made = ip(
        "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", ends[1], "netns", names[1], check=False
    )
    if made.returncode:
        pytest.skip(f"the kernel forbids veth pairs: {made.stderr.strip()}")
    for name, end, address in zip(names, ends, ADDRESSES, strict=True):
        ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
        for link in ("lo", end):
            ip("-n", name, "link", "set", link, "up")


@pytest.fixture
def hosts(tethered: Callable[..., list[str]]) -> Iterator[list[str]]:
    """Names of two namespaces with a Ray cluster of one core each."""
    names = [f"outrider{os.getpid()}{letter}" for letter in "ab"]
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a socket's path must be short
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        make_hosts(names)
        head = ["--head", f"--port={PORT}", f"--temp-dir={folder}", "--include-dashboard=false"]
        for name, address, role in zip(names, ADDRESSES, (head, [f"--address={ADDRESSES[0]}:{PORT}"]), strict=True):
            command = [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                "-P",
                "-m",
                "ray.scripts.scripts",
                "start",
                "--block",
            ]
            command += ["--num-cpus=1", "--disable-usage-stats", f"--node-ip-address={address}", *role]
            log = folder / f"{name}.txt"
            with log.open("wb") as output:
                environment = os.environ | ON_RAY
                tied = tethered(command, signal.SIGTERM)
                nodes.append(subprocess.Popen(tied, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd="/"))
            ends = time.monotonic() + 120
            while "Ray runtime started" not in (said := log.read_text(errors="replace")):
                assert nodes[-1].poll() is None, said[-3000:]
                assert time.monotonic() < ends, said[-3000:]
                time.sleep(0.2)
        yield names
    finally:
        for node in reversed(nodes):
            node.terminate()
        for node in nodes:
            node.wait(30)
        for name in names:
            for process in ip("netns", "pids", name, check=False).stdout.split():
                os.kill(int(process), signal.SIGKILL)
            ip("netns", "del", name, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def test_ranks_of_two_hosts_write_the_text_of_one_process(hosts: list[str]) -> None:
    with LLM(**rank_texts.OPTIONS) as llm:
        expected = rank_texts.texts(llm)
    done = subprocess.run(
        ["ip", "netns", "exec", hosts[0], sys.executable, "-P", rank_texts.__file__],
        env=os.environ | ON_RAY | {"RAY_ADDRESS": f"{ADDRESSES[0]}:{PORT}"},
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"texts"'))
    assert found == {"texts": expected, "addresses": ADDRESSES}
