"""Two replicas of the demo model on a Ray of this machine: routing by adapter against in turn, and an endurance run.

    python benchmarks/replicas.py routing --database postgresql://... [--output-json FILE]
    python benchmarks/replicas.py endurance --database postgresql://... [--streams 300] [--minutes 10]

`routing` sends the same requests of six users at once to replicas that Ray's round robin chooses and to those that
`outrider deploy` does, and counts loads of adapters and times to first token. `endurance` keeps streams going, looks at
the memory of every process each ten seconds, and at the end compares the ledger with the answers. The database is empty
before; `routing` takes two, `{}` in the address being their number.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from deployed import ADAPTERS, REPLICAS, ROOM, Deployed, conversations, loads_in_turn
from script import make_parser, settings_of, write_result

from outrider.platform.cli.bench.request_figures import RequestRecord
from outrider.platform.cli.bench.serving.datasets import Sample
from outrider.platform.cli.bench.serving.http_client import HttpClient
from outrider.platform.cli.bench.serving.request_load import offer
from outrider.platform.cli.bench.serving.streaming import Asker

CLAIM = "Two replicas on Ray Serve: loads of adapters by router, and memory and ledger over minutes of streams"
LOADS = {"drawn alone, Zipf 1.5": (1, 1.5), "drawn alone, Zipf 1": (1, 1.0), "conversations of 4, Zipf 1": (4, 1.0)}
"""Kinds of loads: mean requests of a conversation, and the exponent of the adapters' popularity."""
USERS = 6
SAMPLE_SECONDS = 10.0
_FIELDS = {"temperature": 0.0, "ignore_eos": True}


def asker_of(deployed: Deployed, key: str) -> Asker:
    """A sender of completions."""
    client = HttpClient(f"http://127.0.0.1:{deployed.port}", key)
    return Asker(client, "/v1/completions", "", _FIELDS, None)


def routing(options: argparse.Namespace) -> dict[str, Any]:
    """Send each load to replicas that get requests in turn, and to replicas that get them by adapter."""
    rows: list[dict[str, Any]] = []
    for number, in_turn in enumerate((True, False)):
        with tempfile.TemporaryDirectory() as folder:
            deployed = Deployed(Path(folder), options.database.format(number), in_turn=in_turn)
            try:
                deployed.wait()
                key = deployed.add_tenant("team")
                deployed.load_adapters()
                for name, (turns, exponent) in LOADS.items():
                    names = conversations(options.requests, USERS, turns, exponent)
                    row = {"load": name, "router": "in turn" if in_turn else "by adapter", **send(deployed, key, names)}
                    print(row, flush=True)
                    rows.append(row)
            finally:
                deployed.stop()
    return {"settings": settings_of(options) | {"database": "postgresql"}, "rows": rows}


def send(deployed: Deployed, key: str, names: Sequence[str]) -> dict[str, Any]:
    """Send requests for these adapters, six at once; returns figures."""
    before = sum(deployed.loads().values())
    samples = [Sample("Hello", None, 8, name) for name in names]

    async def work() -> list[RequestRecord]:
        return (await offer(samples, [0.0] * len(samples), asker_of(deployed, key).ask, USERS)).records

    records = asyncio.run(work())
    ttft = [record.ttft for record in records if record.ttft is not None]
    p50, p99 = np.quantile(ttft, (0.5, 0.99))
    return {
        "answered": sum(record.error is None for record in records),
        "adapter_loads": int(sum(deployed.loads().values()) - before),
        "loads_in_turn_on_paper": loads_in_turn(names),
        "ttft_p50": round(float(p50), 4),
        "ttft_p99": round(float(p99), 4),
    }


def endurance(options: argparse.Namespace) -> dict[str, Any]:
    """Keep streams going for minutes."""
    with tempfile.TemporaryDirectory() as folder:
        rows = str(options.streams // REPLICAS + 10)
        deployed = Deployed(Path(folder), options.database, ["--max-num-seqs", rows, "--dtype", options.dtype])
        try:
            deployed.wait()
            key = deployed.add_tenant("team")
            deployed.load_adapters()
            found = asyncio.run(keep_going(deployed, key, options.streams, 60 * options.minutes))
            ends, rows_written = time.monotonic() + 60, -1
            while rows_written < found["answered"] and time.monotonic() < ends:
                time.sleep(1)
                rows_written = deployed.num_rows("team")
        finally:
            deployed.stop()
    return {"settings": settings_of(options) | {"database": "postgresql"}, **found, "ledger_rows": rows_written}


async def keep_going(deployed: Deployed, key: str, streams: int, seconds: float) -> dict[str, Any]:
    """Send a request whenever one of `streams` ends, until the time is over; returns figures."""
    asker, began = asker_of(deployed, key), time.monotonic()
    names = iter(conversations(1_000_000, streams, 4, 1.0))
    errors: Counter[str] = Counter()
    ttft: list[float] = []
    tokens = 0
    samples: list[dict[str, Any]] = []

    async def user() -> None:
        nonlocal tokens
        while time.monotonic() - began < seconds:
            record = RequestRecord(0)
            await asker.ask(Sample("Hello", None, 64, next(names)), record)
            if record.error is not None:
                errors[record.error[:100]] += 1
            elif record.ttft is not None:
                ttft.append(record.ttft)
            tokens += record.num_output_tokens

    async def watch() -> None:
        while True:
            memory = await asyncio.to_thread(deployed.memory)
            samples.append({"at": round(time.monotonic() - began), "answered": len(ttft), "rss": memory})
            print(samples[-1]["at"], len(ttft), {name: value >> 20 for name, value in memory.items()}, flush=True)
            await asyncio.sleep(SAMPLE_SECONDS)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(user() for _ in range(streams)))
    watching.cancel()
    took = time.monotonic() - began
    return {
        "answered": len(ttft),
        "errors": dict(errors),
        "output_tokens_per_second": round(tokens / took, 1),
        "ttft_p50": round(statistics.median(ttft), 3),
        "memory_mib": growth(samples),
        "seconds": round(took, 1),
    }


def growth(samples: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Resident MiB of each process, as the mean of the fifth tenth of the time and of the last one, and their
    difference: in ten minutes the growth of the last five."""
    half, end = ([s["rss"] for s in samples[len(samples) * at // 10 : len(samples) * (at + 1) // 10]] for at in (4, 9))
    found = {}
    for process in samples[-1]["rss"]:
        first, last = (statistics.mean(rss.get(process, 0) for rss in part) / (1 << 20) for part in (half, end))
        found[process] = {"half": round(first, 1), "end": round(last, 1), "growth": round(last - first, 1) + 0.0}
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("work", choices=("routing", "endurance"))
    parser.add_argument("--database", required=True, help="address of an empty database; {}: number of the deployment")
    parser.add_argument("--requests", type=int, default=600, help="of each load of `routing` (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--dtype", default="auto", help="of the endurance run (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.minutes < 1:
        parser.error("--minutes must be 1 or more: memory is compared between tenths of the time")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = parse(arguments)
    found = {"routing": routing, "endurance": endurance}[options.work](options)
    print({name: value for name, value in found.items() if name != "rows"})
    described = {"replicas": REPLICAS, "adapters": ADAPTERS, "room": ROOM}
    write_result(options.output_json, CLAIM, options.work, described | found)


if __name__ == "__main__":
    main()
