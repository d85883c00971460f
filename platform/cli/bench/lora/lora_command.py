"""`outrider bench lora`: the cost of adapters by their number and popularity. Imports nothing heavy."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from ....core.errors import InvalidRequestError
from ...options.option_types import list_of, natural, positive, positive_number
from ..bench_options import (
    Result,
    add_engine_options,
    add_measurement,
    add_model_options,
    given_adapters,
)
from ..popularity import POPULARITIES

_DESCRIPTION = """\
Two parts. Throughput and latency by the number of adapters, by which of them requests ask for, and by how many run at
once; in the same process, alongside an engine without adapters. Then what running requests notice while adapters
that are not loaded yet stream in. The adapters are random ones, made for the model, unless --lora gives some.
"""


def add_parser(kinds: Any) -> None:
    """Add the measurement `lora`."""
    parser = add_measurement(kinds, "lora", measure, _DESCRIPTION, "what adapters cost")
    add_model_options(parser)
    add, numbers, sizes = parser.add_argument, list_of(natural), list_of(positive)
    add("--num-adapters", type=numbers, default=[0, 1, 8, 64], metavar="N,N", help="(default: 0,1,8,64)")
    add(
        "--popularity",
        type=list_of(str),
        default=list(POPULARITIES),
        metavar="P,P",
        help=f"of {','.join(POPULARITIES)} (default: all); skewed is Zipf, distinct one after the other",
    )
    add("--ranks", type=sizes, default=[8, 16], metavar="R,R", help="of the adapters, in turn (default: 8,16)")
    add("--batch-sizes", type=sizes, default=[1, 8, 32], metavar="N,N", help="requests at once (default: 1,8,32)")
    add("--adapters-in-use", type=positive, metavar="N", help="ask for so many of the adapters only (default: all)")
    add("--input-len", type=positive, default=128, metavar="N", help="prompt tokens a request (default: 128)")
    add("--output-len", type=positive, default=64, metavar="N", help="output tokens a request (default: 64)")
    add("--rounds", type=positive, default=5, metavar="N", help="after one to warm up (default: 5)")
    add("--max-loras", type=positive, metavar="N", help="(default: as many as can run at once, and 8 at least)")
    add("--max-cpu-loras", type=positive, metavar="N", help="(default: 4 times max-loras, and 32 at least)")
    add("--lora-memory", metavar="SIZE", help="device memory for adapters, such as 512MiB")
    cold = "that stream in; 0: no second part (default: 64)"
    add("--cold-adapters", type=natural, default=64, metavar="N", help=cold)
    add("--cold-rate", type=positive_number, default=20.0, metavar="R", help="of them a second (default: 20)")
    add("--warm-requests", type=positive, default=8, metavar="N", help="that run meanwhile (default: 8)")
    add("--seed", type=natural, default=0, metavar="N", help="of prompts, choices and adapters (default: 0)")
    add_engine_options(parser)


def measure(options: argparse.Namespace) -> Result:
    """Measure with the options of the command."""
    unknown = next((name for name in options.popularity if name not in POPULARITIES), None)
    if unknown is not None:
        known = ", ".join(POPULARITIES)
        raise InvalidRequestError(f"unknown popularity {unknown!r}; known are {known}", param="popularity")
    given = given_adapters(options)

    from .lora_report import draw, format_table
    from .lora_session import Session

    with tempfile.TemporaryDirectory() as scratch:
        report = Session(options, given, Path(scratch)).measure()
    return Result(report, format_table(report), lambda file: draw(report, file))
