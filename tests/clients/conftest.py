"""A real server of the demo model, started with the server's own Python, for clients in another environment.

The tests run with the clients' Python, which has neither `outrider` nor torch: `make test-clients`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))

from running_server import PYTHON, ROOT, running_server

HERE = Path(__file__).resolve().parent
DRAFTS = json.dumps({"method": "eagle3", "model": str(ROOT / "models/demo/eagle3"), "num_speculative_tokens": 4})
PAGE = ROOT / "docs/guides/http.md"
FEATURES = ("chat", "adapter", "stream", "tools", "schema", "completion", "logprobs", "embeddings", "models", "rerank")


@dataclass(frozen=True)
class Server:
    """Address of a running server, and the Python that serves."""

    url: str
    python: str

    def run(self, *arguments: str) -> str:
        """Output of the server's Python, without the drafts."""
        return subprocess.run([self.python, *arguments], check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    options = ["--speculative-config", DRAFTS, "--chat-template", str(HERE / "tools.jinja")]
    options += ["--tool-call-parser", "hermes"]
    with running_server(*options, folder=HERE, environment={"OMP_NUM_THREADS": "1"}) as url:
        yield Server(url, PYTHON)
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as metrics:
            text = metrics.read().decode()
        accepted = re.findall(r"^outrider:spec_decode_num_accepted_tokens_total.* (\S+)$", text, re.M)
        assert sum(map(float, accepted)) > 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help=f"write the table of clients into {PAGE.name}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hold the page's table to a run of all clients, or write it."""
    rows: dict[str, dict[str, str]] = {}
    for item in session.items:
        client, feature = item.callspec.params["client"], item.callspec.params["feature"]
        rows.setdefault(client.title, {})[feature] = MARKS[item.stash.get(OUTCOME, "skipped")]
    if session.config.option.keyword or session.config.option.collectonly or not rows:
        return
    text = PAGE.read_text(encoding="utf-8")
    table = [f"| client | {' | '.join(FEATURES)} |", "|---" * (len(FEATURES) + 1) + "|"]
    for name, marks in rows.items():
        before = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
        ran = any(mark != MARKS["skipped"] for mark in marks.values())  # vLLM's is not there everywhere
        table += [f"| {name} | {' | '.join(marks[feature] for feature in FEATURES)} |"] if ran or not before else before
    begin, end = "<!-- clients -->\n", "<!-- /clients -->"
    before, rest = text.split(begin)
    found = f"{before}{begin}\n" + "\n".join(table) + f"\n\n{end}" + rest.split(end)[1]
    if session.config.option.write_table:
        PAGE.write_text(found, encoding="utf-8")
    elif found != text:
        print(f"\nERROR: the table in {PAGE} is not that of this run: ARGS=--write-table writes it")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


OUTCOME = pytest.StashKey[str]()
MARKS = {"passed": "✓", "failed": "✗", "skipped": "–"}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if report.when == "call" or not report.passed:  # a failing fixture too
        item.stash[OUTCOME] = report.outcome
    return report
