"""Measure what loads of an adapter from memory cost the streams that run meanwhile.

    python benchmarks/lora_models.py MODELS --models medium
    python benchmarks/adapter_loads.py --model MODELS/medium [--rank 160] [--rounds 8] [--output-json FILE]

A server streams to four clients on the base model. Phases without and with loads alternate (A B B A). With loads, a
trainer on the same machine hands over a new version of one adapter through /dev/shm, in place, and the next one as soon
as the call returns. The loads that start the reader process come before the phases. Latencies are the gaps between two
tokens of a stream. An adapter of rank 160 for the 494M model has 176 MB, and one of rank 32 for an 8B model 168 MB.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from rl_servers import free_port, wait_until_healthy
from script import make_parser, settings_of, write_result

from outrider.models.config import config_from_hf
from outrider.platform.cli.bench.random_adapters import AdapterWriter

CLAIM = "Inter-token latency of running streams while adapters are loaded from memory"
NAME = "policy"
"""Name of the adapter that is loaded in place."""
WARM_LOADS = 12
"""Loads before the phases: the reader process starts after 256 MiB, and is ready some seconds later."""
MAX_TOKENS = 512
"""Tokens of one answer."""
JSON = {"content-type": "application/json"}


def post(port: int, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    """Send a request; RuntimeError if it is refused. The connection is closed with the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", path, json.dumps(body), JSON | {"connection": "close"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{path} failed: {answer.read()!r}")
    return answer


class Stream(threading.Thread):
    """A client that streams one answer after another, and keeps the time and length of every gap between tokens."""

    def __init__(self, port: int, number: int) -> None:
        """`number` makes its prompt another one."""
        super().__init__(daemon=True)
        self._port, self._number = port, number
        self.gaps: list[tuple[float, float]] = []
        """Time of a token, and seconds since the one before."""
        self.is_ended = False

    def run(self) -> None:
        """Stream until `is_ended`."""
        body = {"model": "base", "prompt": [5 + self._number] * 32, "max_tokens": MAX_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        while not self.is_ended:
            last = None
            with post(self._port, "/v1/completions", body) as answer:
                while not self.is_ended and (line := answer.readline()):
                    if line.startswith(b"data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            self.gaps.append((now, now - last))
                        last = now


class Trainer:
    """Writer of two versions of an adapter in shared memory, which it loads in turn."""

    def __init__(self, port: int, model: Path, rank: int, folder: Path) -> None:
        """Make the adapters in `folder`, without writing to shared memory yet."""
        self._port = port
        raw = json.loads((model / "config.json").read_text())
        writer = AdapterWriter(folder, config_from_hf(raw, torch.bfloat16), seed=0)
        self._folders = [Path(writer.write(version, rank).path) for version in ("a", "b")]
        self._configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in self._folders]
        self._num_loads = 0
        self.num_bytes = 0

    @contextlib.contextmanager
    def files(self) -> Iterator[None]:
        """The versions are in shared memory as long as the context lasts."""
        try:
            for version in range(2):
                content = (self._folders[version] / "adapter_model.safetensors").read_bytes()
                self.num_bytes = len(content)
                Path("/dev/shm", self._file(version)).write_bytes(content)
            yield
        finally:
            for version in range(2):
                Path("/dev/shm", self._file(version)).unlink(missing_ok=True)

    def _file(self, version: int) -> str:
        return f"outrider-loads-{os.getpid()}-{version}"

    def load(self) -> float:
        """Load the next version; returns the seconds it took."""
        self._num_loads += 1
        version = self._num_loads % 2
        began = time.perf_counter()
        body = {"lora_name": NAME, "load_inplace": True, "lora_shm": self._file(version)}
        post(self._port, "/v1/load_lora_adapter", body | {"config": self._configs[version]}).close()
        return time.perf_counter() - began


def processor_seconds(server: psutil.Process) -> list[float]:
    """Processor time of the API process, of the engine's and of the reader."""
    found = {"engine": 0.0, "reader": 0.0}
    for child in server.children(recursive=True):
        used = child.cpu_times()
        found["reader" if any("reader_process" in part for part in child.cmdline()) else "engine"] += sum(used[:2])
    return [sum(server.cpu_times()[:2]), *found.values()]


def quantile_ms(values: list[float], share: float) -> float:
    """A quantile of seconds, in milliseconds."""
    return round(1e3 * sorted(values)[int(share * (len(values) - 1))], 2)


def measure(port: int, server: psutil.Process, trainer: Trainer, options: Any) -> dict[str, Any]:
    """Measure phases with and without loads in turn. Returns the figures of the result."""
    streams = [Stream(port, number) for number in range(options.streams)]
    for stream in streams:
        stream.start()
    for _ in range(WARM_LOADS):
        trainer.load()
    gaps: dict[str, list[list[float]]] = {"quiet": [], "loading": []}
    used: dict[str, list[list[float]]] = {"quiet": [], "loading": []}
    loads: list[float] = []
    for number in range(2 * options.rounds):
        kind = ("quiet", "loading")[(number + number // 2) % 2]
        before, began = processor_seconds(server), time.perf_counter()
        while (now := time.perf_counter()) < began + options.phase:
            if kind == "loading":
                loads.append(trainer.load())
            else:
                time.sleep(began + options.phase - now)
        after, ended = processor_seconds(server), time.perf_counter()
        if not all(stream.is_alive() for stream in streams):
            raise RuntimeError("a stream failed")
        used[kind].append([(y - x) / (ended - began) for x, y in zip(before, after, strict=True)])
        # list(...): the streams go on
        gaps[kind].append([gap for s in streams for at, gap in list(s.gaps) if began + gap < at < ended])
        median, p99 = (quantile_ms(gaps[kind][-1], share) for share in (0.5, 0.99))
        print(f"{kind}: median {median} ms, p99 {p99} ms", flush=True)
    for stream in streams:
        stream.is_ended = True
    rows = []
    for name, share in (("median", 0.5), ("p99", 0.99)):
        quiet, loading = ([quantile_ms(gap, share) for gap in gaps[kind]] for kind in ("quiet", "loading"))
        whole = [quantile_ms([gap for found in gaps[kind] for gap in found], share) for kind in ("quiet", "loading")]
        row = {"figure": name, "quiet_ms": whole[0], "loading_ms": whole[1], "ratio": round(whole[1] / whole[0], 3)}
        ratios = [round(y / x, 3) for x, y in zip(quiet, loading, strict=True)]
        rows.append(row | {"ratios": ratios, "median_ratio": round(statistics.median(ratios), 3)})
    rates = {kind: [statistics.mean(shares) for shares in zip(*used[kind], strict=True)] for kind in used}
    seconds = statistics.mean(loads)
    return {
        "adapter_bytes": trainer.num_bytes,
        "num_loads": len(loads),
        "seconds_a_load": round(seconds, 2),
        "api_processor_seconds_a_load": round((rates["loading"][0] - rates["quiet"][0]) * seconds, 3),
        "reader_processor_seconds_a_load": round((rates["loading"][2] - rates["quiet"][2]) * seconds, 3),
        "rows": rows,
    }


@contextlib.contextmanager
def serving(command: list[str], port: int, folder: Path) -> Iterator[psutil.Process]:
    """A server, until the context ends."""
    log = folder / "server.log"
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}", process, log)
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    """Start a server, measure and write the result."""
    parser = make_parser(__doc__, rounds=8, model=True)
    parser.add_argument("--rank", type=int, default=160, help="(default: %(default)s)")
    parser.add_argument("--phase", type=float, default=12, metavar="SECONDS", help="(default: %(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights (default: %(default)s)")
    options = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "outrider.platform.cli.main", "serve", options.model, "--port", str(port)]
    command += ["--served-model-name", "base", "--enable-lora", "--max-loras", "4", "--lora-root", "/dev/shm"]
    command += ["--max-lora-rank", str(options.rank), "--load-format", options.load_format]
    with tempfile.TemporaryDirectory() as work:
        trainer = Trainer(port, Path(options.model), options.rank, Path(work))
        with trainer.files(), serving(command, port, Path(work)) as server:
            found = measure(port, server, trainer, options)
    print(json.dumps(found, indent=1))
    write_result(options.output_json, CLAIM, "loads from memory", {"settings": settings_of(options), **found})


if __name__ == "__main__":
    main()
