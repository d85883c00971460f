"""Results of one run: a file for each section, written with every row, so that an interrupted run keeps all rows."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = "sections"
"""Folder of the results: NAME.json of each section."""


class Section(NamedTuple):
    """Section of the check."""

    name: str
    work: Callable[[Context], None]
    ends: float
    """Deadline by `Report.clock`: the section begins nothing new after it."""


class Context:
    """Context of a section: its device, its time, and its results."""

    def __init__(self, report: Report, section: Section) -> None:
        self.report, self.name, self._ends = report, section.name, section.ends
        self.device, self.quick = report.device, report.quick

    @property
    def seconds_left(self) -> float:
        """Seconds until this section should end."""
        return self._ends - self.report.clock()

    def has_time(self, what: str, seconds: float = 0.0) -> bool:
        """True when there are `seconds` left for `what`; else a row says that it was skipped."""
        if self.seconds_left > seconds:
            return True
        self.skip(what, "no time left")
        return False

    def skip(self, what: str, reason: str) -> None:
        """Report that something is not measured."""
        self.report.add(self.name, {"name": what, "skipped": reason})

    def row(self, name: str, **values: Any) -> None:
        """Report a result. `passed` is False for a wrong one. Values that could not be computed (NaN) are left out."""
        self.report.add(self.name, {"name": name} | {key: value for key, value in values.items() if value == value})


class Ceilings(dict[str, float]):
    """Rates of the device per second: "copy_bytes" and "matmul_flops"; NaN where they were not measured."""

    def __missing__(self, key: str) -> float:
        return float("nan")


class Report:
    """Report of the sections that one process runs."""

    def __init__(self, folder: Path, *, device: str, quick: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.device, self.quick, self.clock = folder, device, quick, clock
        self.ceilings = Ceilings()
        for entry in read(folder).values():  # written by an earlier process
            self.ceilings.update(entry.get("ceilings", {}))
        self._entries: dict[str, dict[str, Any]] = {}

    def add(self, section: str, row: dict[str, Any]) -> None:
        """Add a row to a section's table; it is shown and written at once."""
        entry = self._entries.setdefault(section, {"rows": []})
        entry["rows"].append(row)
        write(self.folder, section, entry)
        print(line(section, row), flush=True)

    def run(self, section: Section) -> None:
        """Run a section; an error is kept beside its rows."""
        started = self.clock()
        entry = self._entries[section.name] = {"rows": []}
        write(self.folder, section.name, entry)
        try:
            if started < section.ends:
                section.work(Context(self, section))
            else:
                self.add(section.name, {"name": "everything", "skipped": "no time left"})
        except Exception:  # any error: what the section has found so far is kept
            entry["traceback"] = traceback.format_exc()
            print(f"{section.name}: FAILED\n{entry['traceback']}", flush=True)
        entry |= {"seconds": round(self.clock() - started, 1), "ceilings": dict(self.ceilings)}
        write(self.folder, section.name, entry)


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
