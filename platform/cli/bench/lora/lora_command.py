"""`outrider bench lora`: the cost of adapters by their number and popularity. Imports nothing heavy."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from .....models.demo import DEMO_MODEL_NAME, demo_model_path
from ....core.errors import InvalidRequestError
from ..bench_options import (
    adapter,
    add_engine_options,
    add_output_options,
    check_outputs,
    list_of,
    natural,
    positive,
    positive_number,
    publish,
    write_json,
)
from .cases import POPULARITIES

_DESCRIPTION = """\
Two parts. Throughput and latency by the number of adapters, by which of them requests ask for, and by how many run at
once; in the same process, beside an engine that takes no adapters. Then what running requests notice while adapters
that nobody has read yet stream in. The adapters are random ones, made for the model, unless --lora gives some.
An interrupt (Ctrl-C) ends the measurement early; what was measured until then is the result.
"""
_INTERRUPTED = 130


def add_parser(kinds: Any) -> None:
    """Add the measurement `lora`."""
    parser = kinds.add_parser("lora", help="what adapters cost", description=_DESCRIPTION, allow_abbrev=False)
    _add_options(parser)
    parser.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="PATH", help="HF directory or hub id (default: the embedded demo)")
    add("--lora", metavar="NAME=PATH", type=adapter, action="append", help="an adapter; may be repeated")
    numbers, sizes = list_of(natural), list_of(positive)
    add("--num-adapters", type=numbers, default=[0, 1, 8, 64], metavar="N,N", help="(default: 0,1,8,64)")
    add(
        "--popularity",
        type=list_of(str),
        default=list(POPULARITIES),
        metavar="P,P",
        help=f"of {','.join(POPULARITIES)} (default: all); skewed is Zipf, distinct one after the other",
    )
    add(
        "--ranks",
        type=sizes,
        action="append",
        metavar="R,R",
        help="of the adapters, in turn; may be repeated, for several mixes (default: 8,16)",
    )
    add("--batch-sizes", type=sizes, default=[1, 8, 32], metavar="N,N", help="requests at once (default: 1,8,32)")
    add("--adapters-in-use", type=positive, metavar="N", help="ask for so many of the adapters only (default: all)")
    add("--input-len", type=positive, default=128, metavar="N", help="prompt tokens a request (default: 128)")
    add("--output-len", type=positive, default=64, metavar="N", help="output tokens a request (default: 64)")
    add("--waves", type=positive, default=1, metavar="N", help="requests a run, over those at once (default: 1)")
    add("--rounds", type=positive, default=5, metavar="N", help="after one to warm up (default: 5)")
    add("--max-loras", type=positive, metavar="N", help="(default: as many as can run at once, and 8 at least)")
    add("--max-cpu-loras", type=positive, metavar="N", help="(default: 4 times max-loras, and 32 at least)")
    add("--lora-memory", metavar="SIZE", help="device memory for adapters, such as 512MiB")
    add(
        "--cold-adapters", type=natural, default=64, metavar="N", help="that stream in; 0: no second part (default: 64)"
    )
    add("--cold-rate", type=positive_number, default=20.0, metavar="R", help="of them a second (default: 20)")
    add("--warm-requests", type=positive, default=8, metavar="N", help="that run meanwhile (default: 8)")
    add("--seed", type=natural, default=0, metavar="N", help="of prompts, choices and adapters (default: 0)")
    add("--max-seconds", type=positive_number, metavar="S", help="end after about this time with what there is")
    add_engine_options(parser)
    add_output_options(parser)


def run(namespace: argparse.Namespace) -> int:
    """Measure, print the table and write the files."""
    for name in namespace.popularity:
        if name not in POPULARITIES:
            raise InvalidRequestError(
                f"unknown popularity {name!r}; known are {', '.join(POPULARITIES)}", param="popularity"
            )
    given = dict(namespace.lora or [])
    if len(given) < len(namespace.lora or []):
        raise InvalidRequestError("--lora: two adapters have the same name", param="lora")
    namespace.ranks = namespace.ranks or [[8, 16]]
    check_outputs(namespace)

    from .plot import draw
    from .report import format_table
    from .session import measure_lora

    is_demo = namespace.model in (None, DEMO_MODEL_NAME)
    model = str(demo_model_path()) if is_demo else namespace.model
    name = DEMO_MODEL_NAME if is_demo else "/".join(Path(namespace.model).parts[-2:])

    def named(report: dict[str, Any]) -> dict[str, Any]:
        return report | {"model": {"name": name, **report["model"]}}

    def save(report: dict[str, Any]) -> None:
        if namespace.output_json is not None:
            try:
                write_json(named(report), namespace.output_json)
            except OSError as error:
                raise InvalidRequestError(f"the result cannot be written: {error}", param="output_json") from error

    with tempfile.TemporaryDirectory() as scratch:
        report = named(measure_lora(namespace, model, given, Path(scratch), save))
    publish(report, namespace, format_table, draw)
    return _INTERRUPTED if report["stopped_by"] == "interrupt" else 0
