"""A server on a model's real shape under streams from this process, against the engine alone on the same requests. The
loading of adapters is measured apart from the steps that use them."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from outrider import LoRARequest
from outrider.models.demo import demo_model_path
from outrider.platform.cli.bench.engine_runs import Run
from outrider.platform.cli.bench.request_figures import RequestRecord, Round, spread, values

from . import load
from .models import ModelShape, running, write_adapters
from .report import Context

NEEDED = ("fastapi", "uvicorn", "httptools", "zmq", "msgspec", "prometheus_client", "psutil", "rich")
"""Packages of a server and of its client that a machine with torch may lack."""
READY_SECONDS = 90.0
"""Longest time until the server is ready, in seconds."""
_READY = re.compile(r"is ready on http://\S+?:(\d+)")


class Cell(NamedTuple):
    """Load of one measurement."""

    num_adapters: int
    num_streams: int
    num_requests: int

    @property
    def name(self) -> str:
        """Name of its row."""
        return f"{self.num_adapters or 'no'} adapters x {self.num_streams} streams"


CELLS = (Cell(0, 64, 192), Cell(64, 64, 192), Cell(0, 8, 24), Cell(0, 256, 512), Cell(8, 8, 24))
QUICK_CELLS = (Cell(0, 2, 4), Cell(2, 2, 4))


class Load(NamedTuple):
    """Model, adapters, and lengths of the requests."""

    shape: ModelShape
    model: str
    adapters: list[LoRARequest]
    prompt: int
    output: int

    def prompts(self, seed: int, count: int) -> list[list[int]]:
        """Random prompts; others for each seed."""
        return [load.random_prompt(self.prompt, self.shape.vocab, 10_000 * seed + i) for i in range(count)]


def measure_serving(context: Context, root: Path, shape: ModelShape) -> None:
    """Measure output tokens a second over HTTP, times of their arrival, the processors that the server takes, and the
    same of the engine without a server."""
    missing = missing_package()
    if missing is not None:
        context.skip("server", f"{missing} is not installed")
        return
    cells = QUICK_CELLS if context.quick else CELLS
    model = shape.write(root)
    write_tokenizer(Path(model), shape.vocab)
    adapters = write_adapters(root, shape, [16] * max(cell.num_adapters for cell in cells))
    lengths = (8, 64) if context.quick else (128, 128)
    work = Load(shape, model, adapters, *lengths)
    served: dict[Cell, float] = {}
    with _server(context, root, work, max(cell.num_streams for cell in cells)) as (url, pid):
        if url:
            served = _over_http(context, url, pid, work, cells)
    if context.has_time("engine alone", 20):
        _engine_alone(context, work, cells, served)


def missing_package() -> str | None:
    """The first package of `NEEDED` that cannot be imported; None when all can."""
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:
            return name
    return None


def write_tokenizer(model: Path, vocab: int) -> None:
    """Write the demo's tokenizer with a word for each further id: chunks of ids without text are not sent."""
    demo = demo_model_path()
    shutil.copy(demo / "tokenizer_config.json", model)
    data = json.loads((demo / "tokenizer.json").read_text("utf-8"))
    words = data["model"]["vocab"]
    used = {*words.values(), *(token["id"] for token in data["added_tokens"])}
    words |= {f"\u0120w{index}": index for index in range(vocab) if index not in used}
    (model / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")


def _options(work: Load, num_streams: int) -> dict[str, Any]:
    """Options of the engine, with a server and without."""
    length = -(-(work.prompt + work.output) // 16) * 16 + 16
    most = max(num_streams, 2)
    return {
        "max_model_len": length,
        "max_num_seqs": most,
        "num_gpu_blocks_override": most * length // 16,
        "enable_lora": True,
        "max_loras": len(work.adapters),
        "max_lora_rank": 16,
    }


@contextmanager
def _server(context: Context, root: Path, work: Load, num_streams: int) -> Iterator[tuple[str, int]]:
    """Run a server that loads all adapters at its start. Yields its address and process id; "" when it is not ready in
    time."""
    options = {"dtype": "bfloat16", "load_format": "dummy", "device": context.device, "port": 0}
    options |= {"served_model_name": "base"} | _options(work, num_streams)
    command = [sys.executable, "-P", "-m", "outrider.platform.cli.main", "serve", work.model]
    command += ["--no-enable-prefix-caching", "--log-level", "error", "--no-speculation"]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        command += [flag] if value is True else [flag, str(value)]
    command += ["--lora-modules", *(f"{adapter.name}={adapter.path}" for adapter in work.adapters)]
    log, started = root / "server.txt", time.perf_counter()
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        ends = started + min(READY_SECONDS, context.seconds_left)
        while (ready := _READY.search(log.read_text("utf-8", "replace"))) is None:
            if server.poll() is not None:
                raise RuntimeError(f"the server did not start: {log.read_text('utf-8', 'replace')[-1000:]}")
            if time.perf_counter() > ends:
                context.skip("server", "it was not ready in time")
                break
            time.sleep(0.05)
        else:
            seconds = time.perf_counter() - started
            context.row("server ready", seconds=seconds, adapters=len(work.adapters))
        yield (f"http://127.0.0.1:{ready[1]}" if ready else "", server.pid)
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _over_http(context: Context, url: str, pid: int, work: Load, cells: Sequence[Cell]) -> dict[Cell, float]:
    """Measure each cell; returns its output tokens a second."""
    most, found = max(cell.num_streams for cell in cells), {}
    _stream(url, work, work.prompts(90, most), [], most, 4)  # compiles what was not compiled yet
    count = len(work.adapters)
    first = _stream(url, work, work.prompts(91, count), work.adapters, count, 4)
    again = _stream(url, work, work.prompts(92, count), work.adapters, count, 4)
    context.row(f"first requests of {count} adapters", seconds=first.seconds, second_requests_seconds=again.seconds)
    for seed, cell in enumerate(cells):
        if not context.has_time(f"HTTP, {cell.name}", 12):
            continue
        before, started = processor_seconds(pid), time.perf_counter()
        adapters = work.adapters[: cell.num_adapters]
        done = _stream(url, work, work.prompts(seed, cell.num_requests), adapters, cell.num_streams, work.output)
        wall, after = time.perf_counter() - started, processor_seconds(pid)
        found[cell] = done.speed
        used = {f"{name}_cores": (after[name] - before[name]) / wall for name in after if name in before}
        context.row(f"HTTP, {cell.name}", tokens_per_second=done.speed, **_latencies(done), **used)
    return found


def _stream(
    url: str, work: Load, prompts: Sequence[list[int]], adapters: Sequence[LoRARequest], num_streams: int, output: int
) -> Round:
    """Stream completions, at most `num_streams` at once, with adapters in turn.

    Raises:
        RuntimeError: a request failed.
    """
    from outrider.platform.cli.bench.serving.completions import COMPLETIONS, Server

    names = [adapter.name for adapter in adapters] or ["base"]
    fields = {"max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True}
    fields |= {"stream_options": {"include_usage": True}}
    bodies = [{"model": names[i % len(names)], "prompt": ids, **fields} for i, ids in enumerate(prompts)]
    records = [RequestRecord(index) for index in range(len(bodies))]

    async def run() -> float:
        server = Server(url)
        waiting = deque(zip(bodies, records, strict=True))

        async def one() -> None:
            while waiting:
                await server.stream(COMPLETIONS, *waiting.popleft())

        started = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(num_streams)))
        return time.perf_counter() - started

    seconds = asyncio.run(run())
    if failed := next((record.error for record in records if record.error), None):
        raise RuntimeError(f"a request failed: {failed}")
    return Round(seconds, records)


def _latencies(done: Round) -> dict[str, float]:
    """Milliseconds to the first token and between tokens."""
    found = {}
    for metric in ("ttft", "itl"):
        ms = spread(values(done.requests, metric))
        found |= {} if ms is None else {f"{metric}_p50_ms": ms["median"], f"{metric}_p99_ms": ms["p99"]}
    return found


def _engine_alone(context: Context, work: Load, cells: Sequence[Cell], served: dict[Cell, float]) -> None:
    most = max(cell.num_streams for cell in cells)
    greedy = load.greedy(work.output)
    with running(work.model, context.device, **_options(work, most)) as engine:
        load.generate(engine, work.prompts(90, most), load.greedy(4))
        started = time.perf_counter()
        load.generate(engine, work.prompts(91, len(work.adapters)), load.greedy(4), work.adapters)
        seconds = time.perf_counter() - started
        context.row(f"engine, first requests of {len(work.adapters)} adapters", seconds=seconds)
        for seed, cell in enumerate(cells):
            if not context.has_time(f"engine, {cell.name}", 8):
                continue
            prompts = work.prompts(seed, cell.num_requests)
            requests = load.make_requests(prompts, greedy, work.adapters[: cell.num_adapters])
            done = Run(engine, "serving").complete(requests, cell.num_streams)
            ratio = served.get(cell, float("nan")) / done.speed
            context.row(
                f"engine, {cell.name}", tokens_per_second=done.speed, **_latencies(done), http_over_engine=ratio
            )


def processor_seconds(pid: int) -> dict[str, float]:
    """Processor seconds so far of the server's API process `pid` and of its engine's process."""
    found: dict[str, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text("utf-8", "replace").rpartition(") ")[2].split()
            seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            if path.parent.name == str(pid):
                found["api"] = seconds
            elif int(fields[1]) == pid and b"engine_process" in (path.parent / "cmdline").read_bytes():
                found["engine"] = seconds
    return found
