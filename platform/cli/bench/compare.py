"""`outrider bench compare`: two results side by side. Imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import InvalidRequestError, NotFoundError
from .bench_options import Result, add_measurement
from .pictures import GREEN, GREY, RED, can_draw, panels, save

_HIGHER = re.compile(r"throughput|goodput|speedup|acceptance_(rate|length)|^ratio|_ratio$")
_LOWER = re.compile(r"_ms\b|latency|^percentiles\.|seconds")
_NOT_FIGURES = re.compile(r"^std_|\.std$|delay_ms|^rounds|^limit\.")
_IDENTITY = ("batch_size", "num_adapters", "ranks")
"""Numeric fields that identify a row of a result. Text fields always do."""
_PICTURE = Path("compare.png")
_MOST_DRAWN = 60
_NOISE = 1.02
"""Factor up to which two figures count as equal."""


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

    @property
    def verdict(self) -> str:
        """ "better", "worse", or "" for no change."""
        return "" if 1 / _NOISE < self.gain < _NOISE else "better" if self.gain > 1 else "worse"


def add_parser(kinds: Any) -> None:
    """Add `compare`."""
    description = f"""\
Ratios of the figures that two results of these measurements have in common, and a picture of them: {_PICTURE}, if
matplotlib is installed, unless --plot names another file.
"""
    parser = add_measurement(kinds, "compare", measure, description, "two results side by side")
    parser.add_argument("a", type=Path, metavar="A.json", help="what is compared with")
    parser.add_argument("b", type=Path, metavar="B.json", help="what is compared")
    parser.set_defaults(plot=_PICTURE if can_draw() else None)


def measure(options: argparse.Namespace) -> Result:
    """Compare the two results."""
    a, b = read_result(options.a), read_result(options.b)
    found = compare(a, b)
    if not found:
        raise InvalidRequestError(f"{options.a} and {options.b} have no figure in common")
    changes = differences(a, b)
    labels = dict.fromkeys([*a.get("labels", ()), *b.get("labels", ())])
    head = [*labels, f"A: {options.a}", f"B: {options.b}"]
    rows = [c._asdict() | {"ratio": round(c.ratio, 5)} for c in found]
    report = {"a": str(options.a), "b": str(options.b), "differences": changes, "ratios": rows}
    drawn = [f"drawn: {options.plot}"] if options.plot is not None else []
    return Result(report, "\n".join([*_table(head, found, changes), *drawn]), lambda file: _draw(head, found, file))


def read_result(file: Path) -> dict[str, Any]:
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
        raise InvalidRequestError(f"{file} is not a result of `outrider bench`: no figures and no rows")
    return result


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[Comparison]:
    """Figures that both results have and whose good direction is known, in the order of `a`."""
    before, after = dict(_figures(a)), dict(_figures(b))
    found = []
    for name, value in before.items():
        figure = name.rpartition("/")[2].strip()
        higher = _HIGHER.search(figure) is not None
        if _NOT_FIGURES.search(figure) or not (higher or _LOWER.search(figure)):
            continue
        if name.startswith("p50_") and name.replace("p50_", "median_", 1) in before:
            continue  # the same again
        if value > 0 and after.get(name, 0) > 0:
            found.append(Comparison(name, value, after[name], higher))
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
    sections = ("machine", "model", "arguments", "settings")
    both = {"benchmark": [a.get("benchmark"), b.get("benchmark")]}
    for section in sections:
        one, two = a.get(section) or {}, b.get(section) or {}
        both |= {f"{section}.{name}": [value, two[name]] for name, value in one.items() if name in two}
    return {name: [one, two] for name, (one, two) in both.items() if one != two}


def _table(head: Sequence[str], found: Sequence[Comparison], changes: dict[str, list[Any]]) -> list[str]:
    """Lines of text with the ratios."""
    lines = [*head, *(f"differs: {name}: {one!s:.60} -> {two!s:.60}" for name, (one, two) in changes.items())]
    width = max(len(c.name) for c in found)
    lines += ["", f"{'figure':<{width}}{'A':>14}{'B':>14}{'B / A':>9}"]
    lines += [f"{c.name:<{width}}{c.before:>14.4g}{c.after:>14.4g}{c.ratio:>9.3f}  {c.verdict}".rstrip() for c in found]
    return lines


def _draw(head: Sequence[str], found: Sequence[Comparison], file: Path) -> None:
    """Draw a bar for each figure: the quotient B / A, on a logarithmic axis around 1."""
    shown = found[:_MOST_DRAWN]
    more = [f"{len(found) - len(shown)} figures more are in the table"] if len(found) > len(shown) else []
    figure, axes = panels([*head, *more], 1, 1, (10, 1.9 + 0.27 * len(shown)))
    axis = axes[0][0]
    colors = {"better": GREEN, "worse": RED, "": GREY}
    bars = axis.barh(
        [f"{c.name} ({'more' if c.higher_is_better else 'less'} is better)" for c in shown],
        [c.ratio - 1 for c in shown],
        left=1,
        color=[colors[c.verdict] for c in shown],
    )
    axis.bar_label(bars, [f"{c.ratio:.3g}" for c in shown], padding=4, fontsize=8)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}")
    axis.margins(x=0.15)
    axis.invert_yaxis()
    axis.axvline(1, color="#404040", linewidth=1)
    axis.set_xlabel("B / A (green: B is better, red: worse)")
    save(figure, file)
