"""The results of one run: written after every section, so that a run that is cut short leaves what it has."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Section(NamedTuple):
    """A part of the check."""

    name: str
    work: Callable[[Context], None]
    seconds: float
    """It begins nothing new after so long."""


class Context:
    """What a section is given: where it runs, how long it may, and where its results go."""

    def __init__(self, report: Report, name: str, ends: float) -> None:
        self.report, self.name, self._ends = report, name, ends
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
        """A result. `passed`: whether it is as it must be."""
        self.report.add(self.name, {"name": name} | values)


class Report:
    """Everything that was found."""

    def __init__(
        self,
        folder: Path,
        facts: dict[str, Any],
        *,
        device: str,
        quick: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.device, self.quick, self.clock = folder, device, quick, clock
        self.ceilings: dict[str, float] = {}
        """Measured in this run: "copy_bytes" and "matmul_flops" a second."""
        self._data: dict[str, Any] = facts | {"device": device, "quick": quick, "sections": {}}
        self.failed = False
        """Whether a section broke off, or something is not as it must be."""

    def add(self, section: str, row: dict[str, Any]) -> None:
        """A row of a section's table, shown at once."""
        self._data["sections"].setdefault(section, {"rows": []})["rows"].append(row)
        self.failed |= row.get("passed") is False
        print(line(section, row), flush=True)

    def write(self) -> None:
        """All of it, as JSON."""
        self.folder.mkdir(parents=True, exist_ok=True)
        data = self._data | {"ceilings": self.ceilings, "failed": self.failed}
        (self.folder / "gpu_check.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    def run(self, sections: list[Section], seconds: float) -> None:
        """One after the other, for at most about `seconds` in all; one that breaks off does not stop the others."""
        ends = self.clock() + seconds
        for section in sections:
            started = self.clock()
            entry = self._data["sections"].setdefault(section.name, {"rows": []})
            if started >= ends:
                self.add(section.name, {"name": "everything", "skipped": "no time left"})
            else:
                try:
                    section.work(Context(self, section.name, min(ends, started + section.seconds)))
                except Exception:  # whatever it is, the other sections' results are wanted
                    entry["traceback"] = traceback.format_exc()
                    self.failed = True
                    print(f"{section.name}: FAILED\n{entry['traceback']}", flush=True)
            entry["seconds"] = round(self.clock() - started, 1)
            self.write()

    def table(self) -> list[str]:
        """The results in short, a line each."""
        lines = []
        for name, entry in self._data["sections"].items():
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
