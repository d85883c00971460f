"""The scripts in examples/ run, and print the documented output."""

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXPECTED = {
    "one_adapter": [r"^base: ", r"^sql:  SELECT COUNT\(\*\) FROM customers WHERE city = 'Lisbon';$"],
    "two_adapters": [r'^json: \{"name": "Anna"', r"^None: I have noted", r"^support: Dear Anna", r"^json: rank 16"],
    "speculation": [r"^off .*no drafts$", r"^EAGLE-3 .* [2-5]\.\d\d tokens a verification$"],
    "openai_client": [r"^support: Dear Anna", r"^sql: SELECT", r"^outrider-demo: Speculative decoding"],
    "tenants": [r"^acme 3: SELECT", r"^trial 3: refused, requests_per_minute$", r"^acme +sql +3 "],
    "train_draft_weights": [r"^SELECT COUNT", r"^[1-5]\.\d\d tokens a verification$"],
}
HELPERS = {"demo_server"}
SERVERS = ("openai_client", "tenants")
"""Scripts that start a server: each runs in a process of its own."""
SECONDS = 240
"""Generous, because the machine may be busy: each takes 3 to 7 s on two cores."""


def test_every_example_is_run_and_named(repo_root: Path) -> None:
    scripts = {path.stem for path in (repo_root / "examples").glob("*.py")} - HELPERS
    assert scripts == set(EXPECTED)
    page = (repo_root / "examples" / "README.md").read_text(encoding="utf-8")
    for name in scripts:
        assert f"`{name}.py`" in page
        assert len((repo_root / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in SERVERS])
def test_example(
    repo_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    runpy.run_path(str(repo_root / "examples" / f"{name}.py"), run_name="__main__")
    check(name, capsys.readouterr().out)


@pytest.mark.parametrize("name", SERVERS)
def test_example_with_a_server(repo_root: Path, tethered, name: str) -> None:
    keys = ("OUTRIDER_API_KEY", "OUTRIDER_ADMIN_API_KEY", "OUTRIDER_DATABASE")
    environment = {k: v for k, v in os.environ.items() if k not in keys}
    command = tethered([sys.executable, str(repo_root / "examples" / f"{name}.py")])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=SECONDS)
        finally:  # its server is in its process group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output + errors
    check(name, output)


def check(name: str, output: str) -> None:
    for pattern in EXPECTED[name]:
        assert re.search(pattern, output, re.MULTILINE), f"{pattern}\n{output}"
