"""Results of one run: a file for each section, written with every row, so that an interrupted run keeps all rows."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "sections"
"""Folder of the results: NAME.json of each section."""


class Ceilings(dict[str, float]):
    """Rates of the device per second: "copy_bytes" and "matmul_flops"; NaN if they were not measured."""

    def __missing__(self, key: str) -> float:
        return float("nan")


@dataclass
class Context:
    """Context of a section: its device, its time, and its results."""

    folder: Path
    """Folder of all results."""
    name: str
    ends: float
    """Time by `time.monotonic` after which the section begins nothing new."""
    device: str
    quick: bool

    def __post_init__(self) -> None:
        self.ceilings = Ceilings()
        for entry in read(self.folder).values():  # measured by an earlier section
            self.ceilings.update(entry.get("ceilings", {}))
        self._entry: dict[str, Any] = {"rows": []}

    @property
    def seconds_left(self) -> float:
        """Seconds until this section should end."""
        return self.ends - time.monotonic()

    def has_time(self, what: str, seconds: float = 0.0) -> bool:
        """True when there are `seconds` left for `what`; else a row says that it was skipped."""
        if self.seconds_left > seconds:
            return True
        self.skip(what, "no time left")
        return False

    def skip(self, what: str, reason: str) -> None:
        """Report that something is not measured."""
        self._add({"name": what, "skipped": reason})

    def row(self, name: str, **values: Any) -> None:
        """Report a result. `passed` is False for a wrong one. Values that could not be computed (NaN) are left out."""
        self._add({"name": name} | {key: value for key, value in values.items() if value == value})

    def _add(self, row: dict[str, Any]) -> None:
        """Add a row to the section's table; it is shown and written at once."""
        self._entry["rows"].append(row)
        write(self.folder, self.name, self._entry)
        print(line(self.name, row), flush=True)

    def run(self, work: Callable[[Context], None]) -> None:
        """Run the section; an error is kept with its rows."""
        started, entry = time.monotonic(), self._entry
        write(self.folder, self.name, entry)
        try:
            if self.has_time("everything"):
                work(self)
        except Exception:  # any error: what the section has found so far is kept
            entry["traceback"] = traceback.format_exc()
            print(f"{self.name}: FAILED\n{entry['traceback']}", flush=True)
        entry |= {"seconds": round(time.monotonic() - started, 1), "ceilings": dict(self.ceilings)}
        write(self.folder, self.name, entry)


def write(folder: Path, section: str, entry: dict[str, Any]) -> None:
    """Write a section's file, which is whole at every moment."""
    path = folder / FOLDER / f"{section}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".writing")
    draft.write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, path)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the files of sections, by name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (folder / FOLDER).glob("*.json")}


def has_failed(entry: dict[str, Any]) -> bool:
    """True when a section failed or has a wrong result."""
    return "traceback" in entry or any(row.get("passed") is False for row in entry["rows"])


def table(entries: dict[str, dict[str, Any]]) -> list[str]:
    """Short lines of the results."""
    lines = []
    for name, entry in entries.items():
        lines += [line(name, row) for row in entry["rows"]]
        if "traceback" in entry:
            lines.append(f"{name}: FAILED: {entry['traceback'].strip().splitlines()[-1]}")
    return lines


def line(section: str, row: dict[str, Any]) -> str:
    """Text of one row."""
    if "skipped" in row:
        return f"{section:10} {row['name']}: skipped ({row['skipped']})"
    values = []
    for key, value in row.items():
        if key == "passed":
            values.append("ok" if value else "FAILED")
        elif key != "name":
            values.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
    return f"{section:10} {row['name']}: {', '.join(values)}"
