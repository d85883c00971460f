"""Options that the measurements share, and writing their results. Imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...core.config import DTYPES
from ...core.errors import InvalidRequestError


def list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A parser of values with commas between them, at least one."""

    def split(text: str) -> list[Any]:
        try:
            values = [parse(part.strip()) for part in text.split(",") if part.strip()]
        except ValueError:
            raise argparse.ArgumentTypeError(f"not a list of values: {text!r}") from None
        if not values:
            raise argparse.ArgumentTypeError(f"there is no value in {text!r}")
        return values

    return split


def positive(text: str, least: int = 1) -> int:
    """An integer of at least 1."""
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
    return value


def natural(text: str) -> int:
    """An integer of at least 0."""
    return positive(text, 0)


def positive_number(text: str) -> float:
    """A number greater than 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number greater than 0, got {text}")
    return value


def adapter(text: str) -> tuple[str, str]:
    """NAME=PATH."""
    name, sign, path = text.partition("=")
    if not (name and sign and path):
        raise argparse.ArgumentTypeError(f"must be NAME=PATH, got {text!r}")
    return name, path


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engine."""
    add = parser.add_argument
    add("--dtype", choices=DTYPES, default="auto", help="(default: the checkpoint's)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--load-format", choices=("auto", "dummy"), default="auto", help='"dummy": random weights, labelled as such')


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add --output-json and --plot."""
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the result (needs matplotlib)")


def check_outputs(namespace: argparse.Namespace) -> None:
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
            raise InvalidRequestError(f"--{option.replace('_', '-')}: {file} cannot be written as a file", param=option)
    if namespace.plot is not None:
        from .speculation.speculation_plot import check_can_plot

        check_can_plot()


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


def publish(
    report: dict[str, Any],
    namespace: argparse.Namespace,
    format_table: Callable[[dict[str, Any]], str],
    draw: Callable[[dict[str, Any], Path], None],
) -> None:
    """Print the table and write the files that were asked for.

    Raises:
        InvalidRequestError: a file cannot be written.
    """
    print(format_table(report))
    try:
        if namespace.output_json is not None:
            write_json(report, namespace.output_json)
        if namespace.plot is not None:
            draw(report, namespace.plot)
    except OSError as error:
        raise InvalidRequestError(f"the result cannot be written: {error}") from error
