"""Measure what loads of an adapter from memory cost the streams that run meanwhile.

    python benchmarks/lora_models.py MODELS --models medium
    python benchmarks/adapter_loads.py --model MODELS/medium [--rank 160] [--rounds 8] [--output-json FILE]

A server streams to four clients on the base model. In every other phase a trainer on the same machine hands over a new
version of one adapter through /dev/shm, in place, again as soon as the call returns. The first loads, which start the
reader process, are made before the phases. Figures are of the gaps between tokens of a stream (inter-token latency).
Rank 160 of the 494M model has 176 MB, as rank 32 of one of 8B.
"""

from __future__ import annotations

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
WARM_LOADS = 12
MAX_TOKENS = 512


class Stream(threading.Thread):
    """A client that streams one answer after another, and keeps the time and length of every gap between tokens."""

    def __init__(self, port: int, number: int) -> None:
        super().__init__(daemon=True)
        self._port, self._number = port, number
        self.gaps: list[tuple[float, float]] = []
        """Time of a token, and seconds since the one before."""
        self.is_ended = False

    def run(self) -> None:
        """Stream until `is_ended`."""
        while not self.is_ended:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
            body = {"model": "base", "prompt": [5 + self._number] * 32, "max_tokens": MAX_TOKENS, "temperature": 0}
            body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer, last = connection.getresponse(), None
            if answer.status != 200:
                raise RuntimeError(f"a stream failed: {answer.read()!r}")
            while not self.is_ended and (line := answer.readline()):
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        self.gaps.append((now, now - last))
                    last = now
            connection.close()


class Trainer:
    """Hands over the versions of an adapter."""

    def __init__(self, port: int, model: Path, rank: int, folder: Path) -> None:
        """Write two versions to shared memory."""
        self._port = port
        self.names: list[str] = []
        raw = json.loads((model / "config.json").read_text())
        writer = AdapterWriter(folder, config_from_hf(raw, torch.bfloat16), seed=0)
        for version in ("a", "b"):
            adapter = Path(writer.write(version, rank).path)
            self.config = json.loads((adapter / "adapter_config.json").read_text())
            name = f"outrider-loads-{os.getpid()}-{version}"
            self.names.append(name)
            content = (adapter / "adapter_model.safetensors").read_bytes()
            Path("/dev/shm", name).write_bytes(content)
            self.num_bytes = len(content)
        self._num_loads = 0

    def load(self) -> float:
        """Load the next version; returns the seconds it took."""
        self._num_loads += 1
        shm = self.names[self._num_loads % 2]
        body = {"lora_name": NAME, "load_inplace": True, "lora_shm": shm, "config": self.config}
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection.request("POST", "/v1/load_lora_adapter", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"a load failed: {text!r}")
        return time.perf_counter() - began

    def close(self) -> None:
        """Remove the versions."""
        for name in self.names:
            Path("/dev/shm", name).unlink(missing_ok=True)


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
    """Phases with and without loads in turn."""
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
        used[kind].append([(y - x) / (ended - began) for x, y in zip(before, after, strict=True)])
        # list(...): the streams go on
        gaps[kind].append([gap for s in streams for at, gap in list(s.gaps) if began + gap < at < ended])
        print(
            f"{kind}: median {quantile_ms(gaps[kind][-1], 0.5)} ms, p99 {quantile_ms(gaps[kind][-1], 0.99)} ms",
            flush=True,
        )
    for stream in streams:
        stream.is_ended = True
    rows = []
    for name, share in (("median", 0.5), ("p99", 0.99)):
        quiet, loading = ([quantile_ms(gap, share) for gap in gaps[kind]] for kind in ("quiet", "loading"))
        whole = [quantile_ms([gap for found in gaps[kind] for gap in found], share) for kind in ("quiet", "loading")]
        row = {"figure": name, "quiet_ms": whole[0], "loading_ms": whole[1], "ratio": round(whole[1] / whole[0], 3)}
        row["ratios"] = [round(y / x, 3) for x, y in zip(quiet, loading, strict=True)]
        rows.append(row)
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


def main() -> None:
    """Measure."""
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
        log = Path(work, "server.log")
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}", process, log)
            found = measure(port, psutil.Process(process.pid), trainer, options)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
            trainer.close()
    print(json.dumps(found, indent=1))
    write_result(
        options.output_json,
        CLAIM,
        f"{Path(options.model).name}, rank {options.rank}, loads from memory",
        {"settings": settings_of(options), **found},
    )


if __name__ == "__main__":
    main()
