"""`outrider bench compare`: two results side by side. Imports nothing heavy."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import InvalidRequestError, NotFoundError
from .bench_options import check_outputs, write_json
from .serving.load_options import naming_options

_HIGHER = re.compile(r"throughput|goodput|speedup|acceptance_(rate|length)|^ratio|_ratio$")
_LOWER = re.compile(r"_ms\b|latency|^percentiles\.|seconds")
_NOT_FIGURES = re.compile(r"^std_|delay_ms|^rounds|^limit\.")
_IDENTITY = ("batch_size", "num_adapters", "ranks")
"""Numeric fields that identify a row of a result. Text fields always do."""
_PICTURE = Path("compare.png")
_SECTIONS = ("machine", "model", "arguments", "settings")


class Comparison(NamedTuple):
    """One figure in both results."""

    name: str
    before: float
    after: float
    higher_is_better: bool

    @property
    def ratio(self) -> float:
        """Quotient B / A."""
        return self.after / self.before

    @property
    def gain(self) -> float:
        """Factor by which B is better, whichever direction is the good one."""
        return self.ratio if self.higher_is_better else 1 / self.ratio


def add_parser(kinds: Any) -> None:
    """Add `compare`."""
    parser = kinds.add_parser(
        "compare",
        help="two results side by side",
        description="Ratios of the figures that two results of these measurements have in common, and a picture.",
        allow_abbrev=False,
    )
    parser.add_argument("a", type=Path, metavar="A.json", help="what is compared with")
    parser.add_argument("b", type=Path, metavar="B.json", help="what is compared")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the ratios as JSON")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help=f"draw the ratios (default: {_PICTURE}, if matplotlib is installed)",
    )
    parser.set_defaults(run=naming_options(run))


def run(namespace: argparse.Namespace) -> int:
    """Compare, print the table and write the picture."""
    if namespace.plot is None and importlib.util.find_spec("matplotlib") is not None:
        namespace.plot = _PICTURE
    check_outputs(namespace)
    a, b = read_result(namespace.a, "a"), read_result(namespace.b, "b")
    found = compare(a, b)
    if not found:
        raise InvalidRequestError(f"{namespace.a} and {namespace.b} have no figure in common")
    changes = differences(a, b)
    names = str(namespace.a), str(namespace.b)
    labels = list(dict.fromkeys([*a.get("labels", ()), *b.get("labels", ())]))
    print(format_comparison(found, changes, names, labels))
    from .compare_plot import draw_comparison

    try:
        if namespace.output_json is not None:
            rows = [c._asdict() | {"ratio": round(c.ratio, 5)} for c in found]
            write_json({"a": names[0], "b": names[1], "differences": changes, "ratios": rows}, namespace.output_json)
        if namespace.plot is not None:
            draw_comparison(found, names, changes, labels, namespace.plot)
            print(f"drawn: {namespace.plot}")
    except OSError as error:
        raise InvalidRequestError(f"the result cannot be written: {error}") from error
    return 0


def read_result(file: Path, param: str) -> dict[str, Any]:
    """Read a result file.

    Raises:
        NotFoundError, InvalidRequestError: there is none, or it holds something else.
    """
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFoundError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{file} is not JSON: {error}") from None
    if not isinstance(result, dict) or not ("figures" in result or "rows" in result):
        raise InvalidRequestError(f"{file} is not a result of `outrider bench` ({param}: no figures and no rows)")
    return result


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[Comparison]:
    """Figures that both results have and whose good direction is known, in the order of `a`."""
    before, after = dict(_figures(a)), dict(_figures(b))
    found = []
    for name, value in before.items():
        other = after.get(name)
        figure = name.rpartition("/")[2].strip()
        higher = _HIGHER.search(figure) is not None
        if name.startswith("p50_") and name.replace("p50_", "median_", 1) in before:
            continue  # the same again
        if other is None or _NOT_FIGURES.search(figure) or not (higher or _LOWER.search(figure)):
            continue
        if value > 0 and other > 0:
            found.append(Comparison(name, value, other, higher))
    return found


def _figures(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    yield from _numbers(result.get("figures", {}))
    for row in result.get("rows", ()):
        if isinstance(row, dict):
            yield from ((f"{_identity(row)} / {name}", value) for name, value in _numbers(row))


def _identity(row: dict[str, Any]) -> str:
    """Name of a row, such as "ngram batch_size=4". The number 0 differs from a missing number."""
    parts = [value for value in row.values() if isinstance(value, str) and value]
    for name in _IDENTITY:
        value = row.get(name)
        if value is not None and value != []:
            shown = ",".join(map(str, value)) if isinstance(value, list) else value
            parts.append(f"{name}={shown}")
    return " ".join(dict.fromkeys(parts))


def _numbers(values: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield prefix + name, float(value)


def differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, list[Any]]:
    """Other differences: fields of machine, model and arguments that both have, as name -> [a's, b's]."""
    found: dict[str, list[Any]] = {}
    for section in _SECTIONS:
        one, two = a.get(section) or {}, b.get(section) or {}
        for name, value in one.items():
            if name in two and two[name] != value:
                found[f"{section}.{name}"] = [value, two[name]]
    if a.get("benchmark") != b.get("benchmark"):
        found = {"benchmark": [a.get("benchmark"), b.get("benchmark")], **found}
    return found


def format_comparison(
    found: list[Comparison], changes: dict[str, list[Any]], names: tuple[str, str], labels: list[str]
) -> str:
    """The ratios as plain text."""
    lines = [*labels, f"A: {names[0]}", f"B: {names[1]}"]
    lines += [f"differs: {name}: {one!s:.60} -> {two!s:.60}" for name, (one, two) in changes.items()]
    width = max(len(c.name) for c in found)
    lines += ["", f"{'figure':<{width}}{'A':>14}{'B':>14}{'B / A':>9}"]
    for c in found:
        better = "" if 0.98 < c.gain < 1.02 else "  better" if c.gain > 1 else "  worse"
        lines.append(f"{c.name:<{width}}{c.before:>14.4g}{c.after:>14.4g}{c.ratio:>9.3f}{better}")
    return "\n".join(lines)
