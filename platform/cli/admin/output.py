"""Output of the commands: a table for people, CSV and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...tenancy.ledger.csv_table import to_csv
from ...tenancy.times import format_time
from ..text_tables import aligned

FORMATS = ("table", "csv", "json")
Row = Mapping[str, Any]


def print_rows(rows: Sequence[Row], columns: Sequence[str], form: str) -> None:
    """Print `columns` of the rows. JSON has all fields, with times in seconds since 1970."""
    if form == "json":
        print(json.dumps(list(rows), indent=2))
        return
    shown = [{column: _plain(column, row[column]) for column in columns} for row in rows]
    print(to_csv(columns, shown) if form == "csv" else table(columns, shown), end="")


def print_row(row: Row, form: str) -> None:
    """Print one object; a table has one line for each field."""
    if form == "csv":
        print_rows([row], list(row), form)
    elif form == "json":
        print(json.dumps(row, indent=2))
    else:
        width = max(map(len, row))
        for name, value in row.items():
            print(f"{name:<{width}}  {_text(_plain(name, value))}".rstrip())


def table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """A table of the columns. Numbers are aligned to the right."""
    is_right = {c: bool(rows) and all(isinstance(row[c], int | float) for row in rows) for c in columns}
    cells = [{column.upper(): _text(row[column]) for column in columns} for row in rows]
    left = [column.upper() for column in columns if not is_right[column]]
    return "".join(f"{line}\n" for line in aligned(cells, left, [column.upper() for column in columns]))


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
