"""Tables as plain text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def aligned(
    rows: Sequence[Mapping[str, str]], left: Collection[str] = (), headings: Sequence[str] | None = None
) -> list[str]:
    """Lines of a table: the headings, then a line for each row. Columns are as wide as their cells need.

    Args:
        rows: cells by heading, the same headings in each row.
        left: headings of the columns that are aligned to the left.
        headings: needed if there may be no row.
    """
    names = rows[0] if headings is None else headings
    widths = {name: max(len(name), *(len(row[name]) for row in rows), 0) for name in names}
    lines = []
    for row in ({name: name for name in widths}, *rows):
        cells = (row[name].ljust(width) if name in left else row[name].rjust(width) for name, width in widths.items())
        lines.append("  ".join(cells).rstrip())
    return lines
