"""`outrider bench latency`: the time of one batch, measured repeatedly. Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ....core.errors import InvalidRequestError
from ..bench_options import add_output_options, check_outputs, natural, positive, publish
from .load_options import (
    ROUND_ROBIN,
    add_assignment,
    add_detail,
    add_lengths,
    add_model_options,
    add_percentiles,
    check_common,
    naming_options,
    not_negative,
)


def add_parser(kinds: Any) -> None:
    """Add the measurement `latency`."""
    parser = kinds.add_parser(
        "latency",
        help="one batch, again and again; shows where a step's time goes",
        description="A batch of random prompts from its start to its end. Takes the engine's options of serve.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_lengths(parser, input_len=32, output_len=128)
    add("--batch-size", type=positive, default=8, metavar="N", help="requests (default: 8)")
    add("--num-iters", type=positive, default=30, metavar="N", help="(default: 30)")
    add("--num-iters-warmup", type=natural, default=10, metavar="N", help="before those that count (default: 10)")
    add("--temperature", type=not_negative, default=0.0, metavar="T", help="(default: 0, greedy)")
    add(
        "--profile",
        type=Path,
        metavar="DIR",
        help="then run a few batches as a server does, in two processes, and write to DIR where a step's time goes: a "
        "timeline and torch's profile, both for chrome://tracing or Perfetto",
    )
    add_model_options(parser)
    add_assignment(parser)
    add_percentiles(parser, (10, 25, 50, 75, 90, 99))
    add_detail(parser)
    add_output_options(parser)
    parser.set_defaults(run=naming_options(run), lora_assignment=ROUND_ROBIN)


def run(namespace: argparse.Namespace) -> int:
    """Measure, print the table and write the files."""
    check_common(namespace)
    check_outputs(namespace)
    if namespace.profile is not None:
        _make_folder(namespace.profile)

    from .latency_plot import draw_latencies
    from .latency_session import measure_latency
    from .vllm_tables import latency_table

    report, records = measure_latency(namespace)

    def draw(report: dict[str, Any], file: Path) -> None:
        draw_latencies(report, records, file)

    publish(report, namespace, latency_table, draw)
    return 0


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(f"{folder} cannot be made a folder: {error.strerror}", param="profile") from None
    if not os.access(folder, os.W_OK):
        raise InvalidRequestError(f"{folder} cannot be written to", param="profile")
