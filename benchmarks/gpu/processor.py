"""The processor of a GPU machine, on two of its cores: engines with adapters over the base model alone and, if it has
AMX tiles, our products over oneDNN's. Machines with a GPU often have the AMX that machines for development lack."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.kernels.native import tiles

from .models import ModelShape
from .report import Context

CORES = Path("/sys/devices/system/cpu")
ONE_DNN = {tiles.SWITCH: "0"}
"""Environment of an engine whose products are oneDNN's."""
TURNS = 3
"""Times that each engine is started and measured; engines with other products run in between."""
NUM_ADAPTERS = 8
BENCH = """
import argparse, sys
from outrider.platform.cli.bench import bench_command

parser = argparse.ArgumentParser()
bench_command.add_parser(parser.add_subparsers())
options = parser.parse_args()
sys.exit(options.run(options))
"""
"""The command `outrider bench` without the other commands, which import libraries that a GPU machine may lack."""

Rounds = dict[tuple[int, int | None], list[dict[str, Any]]]
"""Rounds of `outrider bench lora` by (batch size, number of adapters; None: the engine without adapters)."""


def measure_processor(context: Context, root: Path, shape: ModelShape) -> None:
    """Measure decoding of the base model and of eight adapters, on two cores with nothing on their other threads."""
    os.sched_setaffinity(0, separate_cores(sorted(os.sched_getaffinity(0)), 2))
    sizes, turns, rounds = ((1, 2), 1, 1) if context.quick else ((1, 8, 32), TURNS, 3)
    model = shape.write(root)
    ours: Rounds = {}
    others: Rounds = {}
    seconds = 0.0
    for turn in range(turns):
        started = time.monotonic()
        if turn and not context.has_time(f"{shape.name}, turn {turn + 1}", seconds):
            break
        _bench(model, root / "result.json", sizes, rounds, {}, ours)
        if tiles.are_granted():
            _bench(model, root / "result.json", sizes, rounds, ONE_DNN, others)
        seconds = time.monotonic() - started
    for size in sizes:
        base = _median(ours[size, None], "output_throughput")
        context.row(
            f"{shape.name} x {size}, two cores",
            tokens_per_second=base,
            adapters_over_base=_median(ours[size, NUM_ADAPTERS], "ratio"),
            **({"over_onednn": base / _median(others[size, None], "output_throughput")} if others else {}),
        )


def _median(rounds: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.median(entry[name] for entry in rounds)


def separate_cores(cpus: Sequence[int], count: int) -> list[int]:
    """The first `count` of `cpus` that are threads of different cores, as far as the system distinguishes them."""
    chosen: dict[str, int] = {}
    for cpu in cpus:
        file = CORES / f"cpu{cpu}/topology/thread_siblings_list"
        chosen.setdefault(file.read_text().strip() if file.exists() else str(cpu), cpu)
    return list(chosen.values())[:count]


def _bench(
    model: str, file: Path, sizes: Sequence[int], num_rounds: int, environment: dict[str, str], rounds: Rounds
) -> None:
    """Run `outrider bench lora`, and add its rounds to `rounds`."""
    options = {
        "model": model,
        "load-format": "dummy",
        "device": "cpu",
        "num-adapters": NUM_ADAPTERS,
        "popularity": "distinct",
        "batch-sizes": ",".join(map(str, sizes)),
        "rounds": num_rounds,
        "cold-adapters": 0,
        "output-json": file,
    }
    command = [sys.executable, "-P", "-c", BENCH, "bench", "lora", *(f"--{name}={options[name]}" for name in options)]
    subprocess.run(command, check=True, env=os.environ | environment)
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        rounds.setdefault((row["batch_size"], row["num_adapters"]), []).extend(row["rounds"])
