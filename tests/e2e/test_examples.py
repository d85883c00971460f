"""The scripts in examples/ run, and print what their readers are told."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXPECTED = {
    "adapter": [r"^base: ", r"^sql:  SELECT COUNT\(\*\) FROM customers WHERE city = 'Lisbon';$"],
    "two_adapters": [r'^json: \{"name": "Anna"', r"^None: I have noted", r"^support: Dear Anna", r"^json: rank 16"],
    "speculation": [r"^off .*no drafts$", r"^EAGLE-3 .* [2-5]\.\d\d tokens a verification$"],
    "openai_client": [r"^support: Dear Anna", r"^sql: SELECT", r"^outrider-demo: Speculative decoding"],
    "tenants": [r"^acme 3: SELECT", r"^trial 3: refused, requests_per_minute$", r"^acme +sql +3 "],
    "train_draft": [r"^SELECT COUNT", r"^[1-5]\.\d\d tokens a verification$"],
}
HELPERS = {"demo_server"}


def test_every_example_is_run_and_named(repo_root: Path) -> None:
    scripts = {path.stem for path in (repo_root / "examples").glob("*.py")} - HELPERS
    assert scripts == set(EXPECTED)
    page = (repo_root / "examples" / "README.md").read_text(encoding="utf-8")
    for name in scripts:
        assert f"`{name}.py`" in page
        assert len((repo_root / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("name", EXPECTED)
def test_example(repo_root: Path, tethered, name: str) -> None:
    keys = ("OUTRIDER_API_KEY", "OUTRIDER_ADMIN_API_KEY", "OUTRIDER_DATABASE")
    environment = {k: v for k, v in os.environ.items() if k not in keys}
    command = tethered([sys.executable, str(repo_root / "examples" / f"{name}.py")])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for pattern in EXPECTED[name]:
        assert re.search(pattern, done.stdout, re.MULTILINE), f"{pattern}\n{done.stdout}"
