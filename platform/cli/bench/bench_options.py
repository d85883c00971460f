"""Options that the measurements share, and the course of each: check, measure, print, write. Imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ....models.demo import DEMO_MODEL_NAME, demo_adapters
from ...core.config import ENGINE_OPTIONS
from ...core.errors import InvalidRequestError, OutriderError
from ...core.quantization import QUANTIZATIONS

METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to first token; time per output token, the first one excluded; inter-token latency; end-to-end latency."""


class Result(NamedTuple):
    """Outcome of a measurement."""

    report: dict[str, Any]
    table: str
    draw: Callable[[Path], None]
    """Writes the picture as a PNG."""
    status: int = 0
    """Exit status of the command."""


def add_measurement(
    kinds: Any, name: str, measure: Callable[[argparse.Namespace], Result], description: str, short: str
) -> argparse.ArgumentParser:
    """Add a command that runs `measure`, prints its table and writes the files that are requested; returns its
    parser, which has --output-json and --plot."""
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=short, description=description, allow_abbrev=False)
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the result (needs matplotlib)")
    parser.set_defaults(run=partial(_run, measure))
    return parser


def _run(measure: Callable[[argparse.Namespace], Result], namespace: argparse.Namespace) -> int:
    try:
        _check_outputs(namespace)
        result = measure(namespace)
    except OutriderError as error:
        param = (error.param or "").partition(".")[0]
        if not param or not hasattr(namespace, param) or error.message.startswith("--"):
            raise
        raise type(error)(f"--{param.replace('_', '-')}: {error.message}", param=error.param) from error
    print(result.table)
    try:
        if namespace.output_json is not None:
            write_json(result.report, namespace.output_json)
        if namespace.plot is not None:
            result.draw(namespace.plot)
    except OSError as error:
        raise InvalidRequestError(f"the result cannot be written: {error}") from error
    return result.status


def _check_outputs(namespace: argparse.Namespace) -> None:
    """Check --output-json and --plot before the measurement rather than an hour later.

    Raises:
        InvalidRequestError: a file that cannot be written, or nothing to draw with.
    """
    for option in ("output_json", "plot"):
        file = getattr(namespace, option)
        if file is None:
            continue
        folder = file.absolute().parent
        if not os.path.isdir(folder):
            raise InvalidRequestError(f"there is no folder {folder}", param=option)
        if os.path.isdir(file) or not os.access(file if os.path.exists(file) else folder, os.W_OK):
            raise InvalidRequestError(f"{file} cannot be written as a file", param=option)
    if namespace.plot is not None:
        from .pictures import check_can_draw

        check_can_draw()


def write_json(report: dict[str, Any], file: Path) -> None:
    """Write a result. A reader finds the whole old file or the whole new one, also after a crash.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(report, indent=1) + "\n"
    is_special = file.is_symlink() or (file.exists() and not file.is_file())  # a pipe or a device
    whole = is_special or not os.access(file.absolute().parent, os.W_OK)
    written = file if whole else file.with_name(f".{file.name}.partial")
    written.write_text(text, encoding="utf-8")
    if written != file:
        os.replace(written, file)


def adapter(text: str) -> tuple[str, str | None]:
    """NAME=PATH, or NAME."""
    name, sign, path = text.partition("=")
    if not name or (sign and not path):
        raise argparse.ArgumentTypeError(f"must be NAME=PATH, got {text!r}")
    return name, path or None


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the model and its adapters."""
    parser.add_argument("--model", metavar="PATH", help="HF directory or hub id (default: the embedded demo)")
    parser.add_argument(
        "--lora",
        type=adapter,
        action="append",
        metavar="NAME=PATH",
        help="an adapter that requests ask for, of the demo its name alone; may be repeated",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the few options of the engine that a comparison of several engines takes."""
    add = parser.add_argument
    add("--dtype", choices=ENGINE_OPTIONS["dtype"].choices, default="auto", help="(default: the checkpoint's)")
    add("--device", choices=ENGINE_OPTIONS["device"].choices, default="auto")
    add("--quantization", choices=QUANTIZATIONS, help="quantise the weights while they are loaded (default: as stored)")
    add(
        "--load-format",
        choices=ENGINE_OPTIONS["load_format"].choices,
        default="auto",
        help='"dummy": random weights, labelled as such',
    )


def is_demo(model: str | None) -> bool:
    """True when `model` stands for the embedded demo."""
    return model in (None, DEMO_MODEL_NAME)


def given_adapters(options: argparse.Namespace) -> dict[str, str]:
    """Adapters of --lora: name -> folder.

    Raises:
        InvalidRequestError: a name is there twice, or has no path and is not one of the demo's.
    """
    known = demo_adapters() if is_demo(options.model) else {}
    found: dict[str, str] = {}
    for name, path in options.lora or ():
        if name in found:
            raise InvalidRequestError(f"there are two adapters called {name!r}", param="lora")
        if path is None and name not in known:
            raise InvalidRequestError(f"the adapter {name!r} needs a path: NAME=PATH", param="lora")
        found[name] = path or str(known[name])
    return found
