"""The results of one run: a file a section, written with every row, so that a run that is cut short leaves all rows."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = "sections"
"""The results' folder: NAME.json of each section."""


class Section(NamedTuple):
    """A part of the check."""

    name: str
    work: Callable[[Context], None]
    ends: float
    """By `Report.clock`: it begins nothing new after that."""


class Context:
    """A section's surroundings: its device, its time, and the place of its results."""

    def __init__(self, report: Report, section: Section) -> None:
        self.report, self.name, self._ends = report, section.name, section.ends
        self.device, self.quick = report.device, report.quick

    @property
    def seconds_left(self) -> float:
        """Until this section should end."""
        return self._ends - self.report.clock()

    def has_time(self, what: str, seconds: float = 0.0) -> bool:
        """Whether to begin `what`, which takes about so long; says so if not."""
        if self.seconds_left > seconds:
            return True
        self.skip(what, "no time left")
        return False

    def skip(self, what: str, reason: str) -> None:
        """Say that something is not measured."""
        self.report.add(self.name, {"name": what, "skipped": reason})

    def row(self, name: str, **values: Any) -> None:
        """A result. `passed`: whether it is as it must be. Values that could not be computed (NaN) are left out."""
        self.report.add(self.name, {"name": name} | {key: value for key, value in values.items() if value == value})


class Ceilings(dict[str, float]):
    """Rates of the device, a second: "copy_bytes" and "matmul_flops"; NaN where they were not measured."""

    def __missing__(self, key: str) -> float:
        return float("nan")


class Report:
    """The sections that one process runs."""

    def __init__(self, folder: Path, *, device: str, quick: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.device, self.quick, self.clock = folder, device, quick, clock
        self.ceilings = Ceilings()
        for entry in read(folder).values():  # of a process before this one
            self.ceilings.update(entry.get("ceilings", {}))
        self._entries: dict[str, dict[str, Any]] = {}

    def add(self, section: str, row: dict[str, Any]) -> None:
        """A row of a section's table, shown and written at once."""
        entry = self._entries.setdefault(section, {"rows": []})
        entry["rows"].append(row)
        write(self.folder, section, entry)
        print(line(section, row), flush=True)

    def run(self, sections: Iterable[Section], is_sound: Callable[[], bool] = lambda: True) -> bool:
        """One after the other; one that breaks off does not stop the others.

        Args:
            is_sound: whether the process can still use the device; asked after a section that broke off.

        Returns:
            False: another process must run the other sections.
        """
        for section in sections:
            started = self.clock()
            entry = self._entries[section.name] = {"rows": []}
            write(self.folder, section.name, entry)
            sound = True
            if started >= section.ends:
                self.add(section.name, {"name": "everything", "skipped": "no time left"})
            else:
                try:
                    section.work(Context(self, section))
                except Exception:  # whatever it is, the other sections' results are wanted
                    entry["traceback"] = traceback.format_exc()
                    print(f"{section.name}: FAILED\n{entry['traceback']}", flush=True)
                    sound = is_sound()
            entry |= {"seconds": round(self.clock() - started, 1), "ceilings": dict(self.ceilings)}
            write(self.folder, section.name, entry)
            if not sound:
                return False
        return True


def write(folder: Path, section: str, entry: dict[str, Any]) -> None:
    """A section's file, whole at every moment."""
    path = folder / FOLDER / f"{section}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".writing")
    draft.write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, path)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The sections' files that there are, by name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (folder / FOLDER).glob("*.json")}


def is_over(entry: dict[str, Any] | None) -> bool:
    """True when a section has come to its end, good or bad."""
    return entry is not None and "seconds" in entry


def has_failed(entry: dict[str, Any]) -> bool:
    """True when a section broke off, or something is not as it must be."""
    return "traceback" in entry or any(row.get("passed") is False for row in entry["rows"])


def table(entries: dict[str, dict[str, Any]]) -> list[str]:
    """The results in short, a line each."""
    lines = []
    for name, entry in entries.items():
        lines += [line(name, row) for row in entry["rows"]]
        if "traceback" in entry:
            lines.append(f"{name}: FAILED: {entry['traceback'].strip().splitlines()[-1]}")
    return lines


def line(section: str, row: dict[str, Any]) -> str:
    """One row as text."""
    if "skipped" in row:
        return f"{section:10} {row['name']}: skipped ({row['skipped']})"
    values = []
    for key, value in row.items():
        if key == "passed":
            values.append("ok" if value else "FAILED")
        elif key != "name":
            values.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
    return f"{section:10} {row['name']}: {', '.join(values)}"
