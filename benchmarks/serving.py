"""Throughput of serving over HTTP relative to offline throughput: equal requests, streamed by a server and to `LLM`.

    python benchmarks/serving.py --model PATH [--output-json F] [--concurrency 32] [--num-prompts 96] [--rounds 3]

Both run on this machine, in turn, round after round, and so does the client, whose own share of a core is told. Offline
all cores compute; a server's engine, its API process and the client share them. Speculation is off, prompts are random.
Every part is a process of its own, started from the command line as a user would.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from script import make_parser, settings_of, write_result

OUTRIDER = [sys.executable, "-P", "-m", "outrider.platform.cli.main"]


def figures(command: list[str], result: Path) -> dict[str, Any]:
    """Run a benchmark of the command line; returns its report."""
    ran = subprocess.run([*OUTRIDER, *command, "--disable-tqdm", "--output-json", str(result)], capture_output=True)
    if ran.returncode:
        raise SystemExit(ran.stderr.decode())
    measured: dict[str, Any] = json.loads(result.read_text())
    return measured


def port_of(server: subprocess.Popen[str]) -> int:
    """The port of a server, once it says that it is ready; raises SystemExit when it ends before."""
    assert server.stdout is not None
    for line in server.stdout:
        ready = re.search(r"is ready on http://\S+:(\d+)", line)
        if ready is not None:
            return int(ready[1])
    raise SystemExit("the server did not start")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one round: offline, then over HTTP."""
    result = folder / "result.json"
    engine = ["--dtype", options.dtype, "--no-speculation", "--max-model-len", "2048"]
    engine += ["--max-num-seqs", str(options.concurrency)]
    load = ["--num-prompts", str(options.num_prompts), "--input-len", str(options.input_len), "--ignore-eos"]
    load += ["--output-len", str(options.output_len)]
    offline = figures(["bench", "throughput", "--model", options.model, *engine, *load], result)
    command = [*OUTRIDER, "serve", options.model, *engine, "--port", "0", "--log-level", "error"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        port = port_of(server)
        load += ["--max-concurrency", str(options.concurrency), "--num-warmups", str(options.concurrency)]
        online = figures(["bench", "serve", "--port", str(port), "--tokenizer", options.model, *load], result)
    finally:
        server.terminate()
        server.wait()
    return {
        "offline_output_throughput": offline["figures"]["output_throughput"],
        "served_output_throughput": online["figures"]["output_throughput"],
        "ratio": online["figures"]["output_throughput"] / offline["figures"]["output_throughput"],
        "client": online["client"],
    }


def main() -> None:
    """Measure, print and write the result."""
    parser = make_parser(__doc__, rounds=3, model=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--num-prompts", type=int, default=96)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            rounds.append(measure(options, Path(folder)))
            print("offline {offline_output_throughput:.0f}, served {served_output_throughput:.0f} output tokens/s: "
                  "{ratio:.2f}".format(**rounds[-1]), flush=True)  # fmt: skip
    ratio = statistics.median(measured["ratio"] for measured in rounds)
    print(f"median ratio {ratio:.2f}")
    arguments = settings_of(options)
    found = {"arguments": arguments, "rounds": rounds, "median_ratio": ratio}
    write_result(options.output_json, "Output tokens/s over HTTP over those of LLM", arguments["model"], found)


if __name__ == "__main__":
    main()
