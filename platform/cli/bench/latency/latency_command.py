"""`outrider bench latency`: its options. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ....core.errors import InvalidRequestError
from ...options.engine_options import add_engine_options
from ...options.option_types import list_of, natural, not_negative, number, positive
from ..bench_options import METRICS, Result, add_measurement, add_model_options

_DESCRIPTION = """\
A batch of random prompts from its start to its end, with adapters in turn. Takes the engine's options of serve.
"""
_PERCENTILES = [10.0, 25.0, 50.0, 75.0, 90.0, 99.0]


def add_parser(kinds: Any) -> None:
    """Add `latency`."""
    parser = add_measurement(kinds, "latency", measure, _DESCRIPTION, "one batch, repeated; where a step's time goes")
    add = parser.add_argument
    text = "prompt tokens of a request (default: %(default)s)"
    add("--input-len", "--random-input-len", type=positive, default=32, metavar="N", help=text)
    text = "output tokens of a request (default: %(default)s)"
    add("--output-len", "--random-output-len", type=positive, default=128, metavar="N", help=text)
    add("--batch-size", type=positive, default=8, metavar="N", help="requests (default: 8)")
    add("--num-iters", type=positive, default=30, metavar="N", help="(default: 30)")
    add("--num-iters-warmup", type=natural, default=10, metavar="N", help="before those that count (default: 10)")
    add(
        "--profile",
        type=Path,
        metavar="DIR",
        help="then run a few batches as a server does, in two processes, and write to DIR where a step's time goes: a "
        "timeline and torch's profile, both for chrome://tracing or Perfetto",
    )
    add_model_options(parser)
    add_engine_options(parser)
    add("--temperature", type=not_negative, default=0.0, metavar="T", help="(default: 0, greedy)")
    shown = f"of whole batches (default: {','.join(f'{q:g}' for q in _PERCENTILES)})"
    percentile = list_of(number("between 0 and 100", lambda value: 0 <= value <= 100))
    add("--metric-percentiles", type=percentile, default=_PERCENTILES, metavar="Q,Q", help=shown)
    shown = f"of {','.join(METRICS)} (default: all)"
    add("--percentile-metrics", type=list_of(_metric), default=list(METRICS), metavar="M,M", help=shown)
    add("--save-detailed", action="store_true", help="also write every request's figures (needs --output-json)")
    add("--disable-tqdm", action="store_true", help="show no progress bar")


def measure(options: argparse.Namespace) -> Result:
    """Measure with the options of the command."""
    if options.save_detailed and options.output_json is None:
        raise InvalidRequestError("has no file to write to without --output-json", param="save_detailed")
    from .latency_session import measure_latency

    return measure_latency(options)


def _metric(text: str) -> str:
    if text not in METRICS:
        raise argparse.ArgumentTypeError(f"unknown metric {text!r}; known are {', '.join(METRICS)}")
    return text


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Options of a measurement for its report."""
    hidden = {"run", "parser", "output_json", "plot", "disable_tqdm"}
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in sorted(vars(options).items())
        if name not in hidden
    }
