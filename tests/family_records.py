"""Records of what a test run has shown of each family, for the table in the documentation."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "OUTRIDER_FAMILY_RECORDS"
"""Names the file that records are added to; without it nothing is recorded. `benchmarks/families.py` sets it."""


def is_recording() -> bool:
    """True if this run is recorded."""
    return VARIABLE in os.environ


def record(architecture: str, code: str, shown: Sequence[str], errors: Sequence[float] = ()) -> None:
    """Add a record: these things are `shown` of an architecture, by "native" code or by that of "transformers".

    Args:
        errors: Largest difference of a log probability, of the base model and of an adapter; may be empty.
    """
    if file := os.environ.get(VARIABLE):
        row = {"architecture": architecture, "code": code, "shown": list(shown), "errors": list(errors)}
        with Path(file).open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(row) + "\n")
