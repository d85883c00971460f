"""Time of requests on a quiet machine and beside busy neighbours, with several ways to wait for other threads.

    python benchmarks/neighbours.py --model PATH --output-json F [--baseline CHECKOUT] [--cases chat,serving,...]
        [--rounds 3] [--neighbours 4]

Cases: `chat` is 8 chat requests of 64 tokens to `LLM`, `serving` the same to an engine process, `prompt` one prompt of
2048 tokens, `ngram` and `draft` are `chat` with 4 drafts (the draft model is the model itself).

Each way is a process that lives through all rounds and is stopped while another one is measured: this checkout, and
with `--baseline` another checkout with libgomp's defaults, with GOMP_SPINCOUNT=10000, with OMP_WAIT_POLICY=passive and
with OMP_NUM_THREADS=1. In each round all are measured in turn, first alone, then beside busy loops.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checkout import ROOT, use_checkout
from peers.environments import clean_environment
from peers.process import Worker

CASES = ("chat", "serving", "prompt", "ngram", "draft")
WAYS = {
    "default": {},
    "spin 10000": {"GOMP_SPINCOUNT": "10000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
REQUESTS = 8
TOKENS = 64
PROMPT_TOKENS = 2048
SECONDS_BEFORE = 0.3
"""Seconds that busy loops run before a measurement begins."""


def chats() -> list[list[dict[str, str]]]:
    """Chat requests of about 40 tokens, all different."""
    topics = ("rivers", "bridges", "violins", "beetles", "bread", "glaciers", "letters", "kites")
    assert len(topics) == REQUESTS
    return [[{"role": "user", "content": f"Tell me in a few sentences what {topic} are good for."}] for topic in topics]


def load(model: str, case: str) -> Callable[[], None]:
    """Load an engine; returns a function that does the case's work once."""
    from outrider import LLM, SamplingParams

    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 4096, "enable_prefix_caching": False}
    params = SamplingParams(temperature=0, max_tokens=1 if case == "prompt" else TOKENS, ignore_eos=True)
    if case == "ngram":
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 4}
    if case == "draft":
        options["speculative_config"] = {"method": "draft_model", "model": model, "num_speculative_tokens": 4}
    if case == "serving":
        return _serving(model, options, params)
    llm = LLM(model, **options)
    if case == "prompt":
        prompt = {"prompt_token_ids": [10 + 7 * i % 4000 for i in range(PROMPT_TOKENS)]}
        return lambda: llm.generate([prompt], params, use_tqdm=False) and None
    return lambda: llm.chat(chats(), params, use_tqdm=False) and None


def _serving(model: str, options: dict[str, Any], params: Any) -> Callable[[], None]:
    """`load` for an engine process."""
    from outrider import AsyncLLM

    loop = asyncio.new_event_loop()

    async def start() -> Any:
        return await AsyncLLM(model, **options).__aenter__()

    llm = loop.run_until_complete(start())
    prompts = [" ".join(message["content"] for message in chat) for chat in chats()]

    async def stream(prompt: str) -> None:
        async for _ in llm.generate(prompt, params):
            pass

    async def work() -> None:
        await asyncio.gather(*map(stream, prompts))

    return lambda: loop.run_until_complete(work())


def serve(model: str, case: str) -> None:
    """Worker process: load, then answer each line with the seconds of the work, beside neighbours."""
    work = load(model, case)
    work()
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        with busy_loops(message["neighbours"]):
            started = time.perf_counter()
            for _ in range(message["repeats"]):
                work()
            seconds = (time.perf_counter() - started) / message["repeats"]
        print(json.dumps({"seconds": seconds}), flush=True)


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that compute all the time, each with the share of the processors that a thread of the engine has.

    They are children of the worker: the kernel may give all processes of a session one share.
    """
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        if count:
            time.sleep(SECONDS_BEFORE)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def ways(options: argparse.Namespace) -> dict[str, tuple[Path, dict[str, str]]]:
    """Checkout and environment variables of each way."""
    found: dict[str, tuple[Path, dict[str, str]]] = {"this": (ROOT, {})}
    if options.baseline is not None:
        found |= {f"baseline, {name}": (options.baseline.resolve(), WAYS[name]) for name in options.ways}
    return found


def start(case: str, checkout: Path, variables: dict[str, str], model: str, folder: Path) -> Worker:
    """Start the worker of one way."""
    packages = Path(tempfile.mkdtemp(dir=folder))
    (packages / "outrider").symlink_to(checkout, target_is_directory=True)
    environment = clean_environment() | {"PYTHONPATH": str(packages)} | variables
    command = [sys.executable, str(Path(__file__).resolve()), "--model", model, "--worker", case]
    return Worker(command, environment, packages / "log", timeout=300)


def measure(options: argparse.Namespace, case: str, folder: Path) -> list[dict[str, Any]]:
    """Seconds of each way in each round of a case, alone and beside neighbours."""
    workers: dict[str, Worker] = {}
    rows: list[dict[str, Any]] = []
    try:
        for name, (checkout, variables) in ways(options).items():
            workers[name] = start(case, checkout, variables, options.model, folder)
        for number in range(options.rounds):
            names = [*workers][number % len(workers) :] + [*workers][: number % len(workers)]
            for neighbours in (0, options.neighbours):
                for name in names:
                    answer = workers[name].ask({"neighbours": neighbours, "repeats": 1 if neighbours else 2})
                    seconds = answer["seconds"]
                    rows.append({"case": case, "way": name, "neighbours": neighbours, "seconds": seconds})
                    print(f"{case:8} {name:20} {neighbours} neighbours: {seconds:.2f} s", file=sys.stderr, flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    return rows


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median seconds of each case, way and number of neighbours."""
    seconds: dict[tuple[str, str, int], list[float]] = {}
    for row in rows:
        seconds.setdefault((row["case"], row["way"], row["neighbours"]), []).append(row["seconds"])
    table: dict[str, Any] = {}
    for (case, way, neighbours), values in seconds.items():
        cell = table.setdefault(case, {}).setdefault(way, {})
        cell["beside neighbours" if neighbours else "alone"] = round(statistics.median(values), 3)
    return table


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--baseline", type=Path, help="another checkout, measured in turn with this one")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help="of the baseline")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--neighbours", type=int, default=4, help="number of busy loops (default: %(default)s)")
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args()
    if options.worker:
        return serve(options.model, options.worker)
    use_checkout()
    from outrider.platform.cli.bench.machine import describe_machine

    with tempfile.TemporaryDirectory() as folder:
        rows = [row for case in options.cases for row in measure(options, case, Path(folder))]
    table = summarize(rows)
    for case, cells in table.items():
        for way, cell in cells.items():
            print(f"{case:8} {way:20} " + "  ".join(f"{name} {value:.2f} s" for name, value in cell.items()))
    if options.output_json is not None:
        settings = {"rounds": options.rounds, "neighbours": options.neighbours, "model": Path(options.model).name}
        result = {"machine": describe_machine(), "settings": settings, "median_seconds": table, "rows": rows}
        options.output_json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
