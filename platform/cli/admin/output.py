"""Output of the commands: a table for people, CSV and JSON for programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...tenancy.ledger.csv_table import to_csv
from ...tenancy.times import format_time

Row = Mapping[str, Any]


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add `--format`."""
    parser.add_argument(
        "--format", choices=("table", "csv", "json"), default="table", help="of the output (default: %(default)s)"
    )


def print_rows(rows: Sequence[Row], columns: Sequence[str], form: str) -> None:
    """Print `columns` of the rows. JSON has all fields, with times in seconds since 1970."""
    if form == "json":
        print(json.dumps(list(rows), indent=2))
        return
    shown = [{column: _plain(column, row[column]) for column in columns} for row in rows]
    print(to_csv(columns, shown) if form == "csv" else table(columns, shown), end="")


def print_row(row: Row, form: str) -> None:
    """Print one object; a table has one line for each field."""
    if form == "table":
        width = max(map(len, row))
        print(
            "".join(f"{name:<{width}}  {_text(_plain(name, value))}".rstrip() + "\n" for name, value in row.items()),
            end="",
        )
    elif form == "csv":
        print_rows([row], list(row), form)
    else:
        print(json.dumps(row, indent=2))


def table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Lines of a table. Columns are as wide as their cells need; numbers are aligned to the right."""
    cells = [[_text(row[column]) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    right = [bool(rows) and all(isinstance(row[column], int | float) for row in rows) for column in columns]
    lines = [
        "  ".join(
            f"{cell:>{w}}" if r else f"{cell:<{w}}" for cell, w, r in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [[column.upper() for column in columns], *cells]
    ]
    return "".join(f"{line}\n" for line in lines)


def _plain(column: str, value: Any) -> Any:
    """A cell for a table or CSV."""
    if column.endswith("_at"):
        return format_time(value)
    if isinstance(value, Mapping):  # limits
        return " ".join(f"{name}={_plain('', item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return value


def _text(value: Any) -> str:
    """A cell of a table."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
