"""Check Outrider on a GPU in one run of at most nine minutes: the kernels' tests, parity with the CPU, losslessness,
and every kernel and whole engines compared with the device's limits.

    python benchmarks/gpu_check.py OUT_DIR [--device cuda] [--quick] [--seconds 520] [--sections kernels,8b]

Runs in a bare checkout. Needs torch, triton, transformers, safetensors and, for the kernels' tests, pytest; no network.
Weights of real shapes are random: right for speed, meaningless for text and acceptance. The demo's are trained, also
where they are grown.

Each section has a time box. One that fails, hangs or dies does not stop the others: its rows so far and its traceback
are in OUT_DIR/sections/NAME.json, all sections in OUT_DIR/gpu_check.json, and the exit code is 1. A short table comes
last. `--device cpu --quick` runs what a CPU can run. `--sections tune`, which is not part of a run unless it is named,
searches kernel configs for as long as there is time and leaves them in OUT_DIR; the same command continues.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from checkout import use_checkout
from gpu.plan import QUICK_SHAPES, SECONDS, Entry
from gpu.report import FOLDER, Context, has_failed, read, table, write

WEIGHTS = "random, but for the demo model's"
USAGE = 2
MACHINE = "machine.json"
"""File in OUT_DIR with the machine's description, until the results contain it."""


def choose(entries: Sequence[Entry], names: str | None, seconds: float) -> list[tuple[str, float]]:
    """(section, box) of the named sections, or of all that are not optional. Boxes of named ones fill the run.

    Raises:
        ValueError: unknown names.
    """
    if names is None:
        return [(entry.name, entry.seconds) for entry in entries if not entry.is_optional]
    wanted = set(names.split(","))
    if unknown := wanted - {entry.name for entry in entries}:
        known = ", ".join(entry.name for entry in entries)
        raise ValueError(f"unknown sections {', '.join(sorted(unknown))}; there are {known}")
    chosen = [(entry.name, entry.seconds) for entry in entries if entry.name in wanted | {"ceilings"}]
    stretch = max(1.0, seconds / sum(box for _, box in chosen))
    return [(name, box * stretch) for name, box in chosen]


def run_section(args: argparse.Namespace, plan: ModuleType) -> int:
    """Run the section that `args.child` names in this process."""
    use_checkout()
    if args.device == "cuda" and not _device_works():
        print("there is no CUDA device that works; --device cpu runs what a CPU can run", file=sys.stderr)
        return USAGE
    machine = args.output_dir / MACHINE
    if not machine.exists():
        machine.write_text(json.dumps(getattr(plan, "describe", dict)()) + "\n", encoding="utf-8")
    name, _, ends = args.child.partition("=")
    (entry,) = (entry for entry in plan.SECTIONS if entry.name == name)
    with tempfile.TemporaryDirectory() as folder:

        def work(context: Context) -> None:  # imports the section: what that raises is a result too
            entry.work(Path(folder), QUICK_SHAPES if args.quick else {})(context)

        Context(args.output_dir, name, float(ends), args.device, args.quick).run(work)
    return 0


def _device_works() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
    except (RuntimeError, AssertionError):  # of a build without CUDA
        return False
    return True


def drive(command: Sequence[str], name: str, ends: float, grace: float, folder: Path) -> int:
    """Run a section in a process, which is killed `grace` seconds after the section's end; returns its exit code. What
    cannot be interrupted (a kernel that never returns) and what cannot be gone on from (an illegal memory access) costs
    no other section its results."""
    process = subprocess.Popen([*command, f"{name}={ends}"], start_new_session=True)
    try:
        reason = f"its process ended with {process.wait(max(0.0, ends - time.monotonic()) + grace)}"
    except subprocess.TimeoutExpired:
        reason = f"killed: it did not end in {grace:g} s after its time"
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    entry = read(folder).get(name, {"rows": []})
    if "seconds" not in entry:  # it has not ended by itself
        write(folder, name, entry | {"traceback": reason, "seconds": None})
    return process.returncode


def write_results(folder: Path, facts: dict[str, Any], order: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Write gpu_check.json with the results of the sections so far, in the run's order; returns these."""
    found, machine = read(folder), folder / MACHINE
    entries = {name: found[name] for name in order if name in found}
    facts = facts | ({"machine": json.loads(machine.read_text("utf-8"))} if machine.exists() else {})
    data = facts | {"sections": entries, "failed": any(map(has_failed, entries.values()))}
    data["ceilings"] = next((e["ceilings"] for e in reversed(entries.values()) if e.get("ceilings")), {})
    (folder / "gpu_check.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return entries


def run_all(args: argparse.Namespace, plan: ModuleType, boxes: Sequence[tuple[str, float]]) -> int:
    """Run sections in processes of their own; returns the exit code. What a section leaves of its box is there for the
    next ones; what it takes beyond it costs them nothing, unless the run would end too late."""
    shutil.rmtree(args.output_dir / FOLDER, ignore_errors=True)
    (args.output_dir / MACHINE).unlink(missing_ok=True)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    facts = {"weights": WEIGHTS, "device": args.device, "quick": args.quick}
    names = [name for name, _ in boxes]
    options = ["--device", args.device, "--plan", args.plan, *(["--quick"] if args.quick else [])]
    command = [sys.executable, str(Path(__file__).resolve()), str(args.output_dir), *options, "--child"]
    print(f"weights: {WEIGHTS}", flush=True)
    signal.signal(signal.SIGTERM, _interrupt)
    interrupted = False
    last = args.seconds + (ends := time.monotonic())
    try:
        for name, box in boxes:
            ends = max(ends, time.monotonic()) + box
            code = drive(command, name, min(ends, last), plan.GRACE, args.output_dir)
            if code == USAGE and name == names[0]:  # later ones may have lost the device: theirs is a result
                return USAGE
            write_results(args.output_dir, facts, names)
    except KeyboardInterrupt:
        interrupted = True
    entries = write_results(args.output_dir, facts, names)
    print("\n".join(["", f"weights: {WEIGHTS}", *table(entries)]), flush=True)
    return 1 if interrupted or any(map(has_failed, entries.values())) else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Check, measure, write and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, and a test of the kernels")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin nothing new after so long (%(default)s)")
    parser.add_argument("--sections", help="only these, separated by commas")
    parser.add_argument("--plan", default="gpu.plan", help=argparse.SUPPRESS)  # the module with the sections
    parser.add_argument("--child", metavar="NAME=END", help=argparse.SUPPRESS)
    args = parser.parse_args()
    plan = importlib.import_module(args.plan)
    if args.child is not None:
        return run_section(args, plan)
    try:
        boxes = choose(plan.SECTIONS, args.sections, args.seconds)
    except ValueError as error:
        parser.error(str(error))
    return run_all(args, plan, boxes)


if __name__ == "__main__":
    sys.exit(main())
