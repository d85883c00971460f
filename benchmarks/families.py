"""Checks of every model family by a test run, as the file that the table in docs/guides/models.md is rendered from.

    python benchmarks/families.py benchmarks/results/families.json [-k NAMES]

With -k, as pytest takes it, only these families are checked, and their run is added to the file.

Tiny random models of each family, with their adapters, are compared with transformers and PEFT in float32. The largest
difference is that of a log probability of a generated token.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from outrider.platform.cli.bench.machine import describe_machine

TESTS = tuple(f"tests/integration/test_{name}.py" for name in ("families", "multimodal", "transformers_model"))
ROOT = Path(__file__).resolve().parent.parent


def run_tests(selection: list[str]) -> list[dict[str, Any]]:
    """Records of a test run: see `tests/family_records.py`.

    Raises:
        CalledProcessError: a test has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records"
        environment = {**os.environ, "OUTRIDER_FAMILY_RECORDS": str(file)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, *selection]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def merged(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each architecture and code, sorted: all that is shown, and the largest errors."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for found in records:
        key = found["architecture"], found["code"]
        row = rows.setdefault(key, {"architecture": key[0], "code": key[1], "shown": [], "errors": []})
        row["shown"] += [name for name in found["shown"] if name not in row["shown"]]
        if found["errors"]:
            before = row["errors"] or [0.0, 0.0]
            row["errors"] = [max(pair) for pair in zip(before, found["errors"], strict=True)]
    return [rows[key] for key in sorted(rows)]


def main() -> None:
    """Run the tests and write the file."""
    output, selection = Path(sys.argv[1]), sys.argv[2:]
    command = shlex.join(["python", "benchmarks/families.py", "F", *selection])
    name = shlex.join(["tests", *selection])
    machine = describe_machine() | {"command": command}
    run = {"run": name, "machine": machine, "families": merged(run_tests(selection))}
    kept = json.loads(output.read_text(encoding="utf-8"))["runs"] if selection else []
    claim = "Parity of every model family with transformers and PEFT, by tests on tiny random models"
    runs = [*(other for other in kept if other["run"] != name), run]
    output.write_text(json.dumps({"claim": claim, "runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
