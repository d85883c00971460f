"""Check that a file has at most 400 lines. A longer one often lacks an object: look for it first.

Usage: python tools/check_sizes.py [ROOT]
"""

import sys
from pathlib import Path

MAX_LINES = 400
SKIPPED_FOLDERS = {"build", "dist", "docs"}
"""Folders of the root that hold no code of ours. Those whose names begin with a dot are skipped everywhere."""


def check(root: Path) -> list[str]:
    """One line for each Python file that is too long."""
    complaints = []
    for path in sorted(path.relative_to(root) for path in root.rglob("*.py")):
        if path.parts[0] not in SKIPPED_FOLDERS and not any(part.startswith(".") for part in path.parts):
            count = len((root / path).read_text(encoding="utf-8").splitlines())
            if count > MAX_LINES:
                complaints.append(f"{path.as_posix()}: {count} lines, at most {MAX_LINES}")
    return complaints


if __name__ == "__main__":
    found = check(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parents[1])
    print("\n".join(found) or "Sizes: all within limits")
    sys.exit(bool(found))
