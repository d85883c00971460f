"""Everything worth checking where there is a GPU, in one run of at most nine minutes: parity with the CPU,
losslessness, every kernel and whole engines beside what the device can do.

    python benchmarks/gpu_check.py OUT_DIR [--device cuda] [--quick] [--seconds 520] [--sections kernels,8b]

Needs torch, triton, transformers, safetensors and, for the kernels' tests, pytest; no network. Weights of real shapes
are random: right for speed, meaningless for text and acceptance. The demo's are trained, also where they are grown.

Each section has a time box, and one that fails does not stop the others: its traceback is in OUT_DIR/gpu_check.json,
which is written after each, and the exit code is 1. A short table comes last. `--device cpu --quick` runs what a CPU
can run. `--sections tune`, which is not part of a run unless it is named, searches kernel configs for as long as
there is time and leaves them in OUT_DIR; the same command goes on.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from gpu.checks import check_demo, check_parity, run_tests
from gpu.end_to_end import measure_adapters, measure_graphs, measure_model
from gpu.kernels import measure_kernels
from gpu.models import LLAMA_8B, QWEN_06B, TINY, TINY_QWEN, ModelShape
from gpu.report import Context, Report, Section
from gpu.speculation import measure_speculation
from gpu.timing import measure_ceilings
from gpu.tuning import measure_tuning
from machine import describe_machine

WEIGHTS = "random, but for the demo model's"
OPTIONAL = {"tune"}
"""Sections that run only where they are named."""


def sections(root: Path, quick: bool) -> list[Section]:
    """In the order of what is wanted most; the boxes together are longer than the run, for not all are used up."""

    def of(work: Callable[[Context, Path, ModelShape], None], shape: ModelShape) -> Callable[[Context], None]:
        return partial(_with_shape, work, root, shape)

    large, small = (TINY, TINY_QWEN) if quick else (LLAMA_8B, QWEN_06B)
    return [
        Section("ceilings", measure_ceilings, 20),
        Section("parity", lambda context: check_parity(context, root), 40),
        Section("kernels", measure_kernels, 90),
        Section("8b", of(measure_model, large), 100),
        Section("8b-lora", of(measure_adapters, large), 110),
        Section("0.6b", of(measure_model, small), 60),
        Section("0.6b-lora", of(measure_adapters, small), 60),
        Section("graphs", of(measure_graphs, small), 70),
        Section("speculate", lambda context: measure_speculation(context, root), 80),
        Section("demo", lambda context: check_demo(context, root), 50),
        Section("tests", lambda context: run_tests(context, root), 400),
        Section("tune", partial(_with_shape, measure_tuning, root, large), 480),
    ]


def _with_shape(
    work: Callable[[Context, Path, ModelShape], None], root: Path, shape: ModelShape, context: Context
) -> None:
    work(context, root, shape)


def main() -> None:
    """Check, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, without the tests of the kernels")
    parser.add_argument("--seconds", type=float, default=520.0, help="begin nothing new after so long (%(default)s)")
    parser.add_argument("--sections", help="only these, separated by commas")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu runs what a CPU can run")
    print(f"weights: {WEIGHTS}", flush=True)
    facts = {"weights": WEIGHTS, "machine": describe_machine()}
    report = Report(args.output_dir, facts, device=args.device, quick=args.quick)
    with tempfile.TemporaryDirectory() as folder:
        every = sections(Path(folder), args.quick)
        chosen = [section for section in every if section.name not in OPTIONAL]
        if args.sections is not None:
            names = args.sections.split(",")
            unknown = set(names) - {section.name for section in every}
            if unknown:
                known = ", ".join(section.name for section in every)
                parser.error(f"unknown sections {', '.join(sorted(unknown))}; there are {known}")
            chosen = [section for section in every if section.name in names or section.name == "ceilings"]
        report.run(chosen, args.seconds)
    print("\n".join(["", f"weights: {WEIGHTS}", *report.table()]))
    if report.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
