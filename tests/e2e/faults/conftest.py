"""Servers with accounts that tests may break, and a record of the outcome."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fault_helpers import Accounts, Load, file_limit, served


@pytest.fixture(scope="module")
def accounts(tmp_path_factory) -> Iterator[Accounts]:
    accounts = Accounts(f"sqlite:///{tmp_path_factory.mktemp('accounts') / 'outrider.db'}")
    yield accounts
    accounts.close()


@pytest.fixture(scope="module")
def start(start_server, accounts, tmp_path_factory) -> Iterator:
    """Starts servers of that tenant, which end with the module: float32 without drafts, so that texts are exact and
    last as long as they are."""
    started = []

    def begin(*arguments: str, **variables: str):
        common = ["--database", accounts.url, "--open-metrics", "--dtype", "float32", "--log-level", "error"]
        if "--journal" not in arguments:
            common += ["--journal", str(tmp_path_factory.mktemp("journal"))]
        started.append(start_server(*common, "--no-speculation", *arguments, **variables))
        return started[-1]

    yield begin
    for server in started:
        server.stop()


@pytest.fixture
def load(accounts):
    """Starts streams; all have ended when the test does."""
    started: list[Load] = []

    def begin(server, prefix: str, count: int, **body: Any) -> Load:
        started.append(Load(server, accounts.key, prefix, count, **body))
        return started[-1]

    yield begin
    for load in started:
        load.join()


@pytest.fixture
def outcome(request, record_property):
    """Call it with the outcome of a fault: printed, and kept in the report of the run."""

    def record(text: str) -> None:
        record_property("outcome", text)
        print(f"{request.node.name}: {text}")

    return record


@pytest.fixture
def full_disk():
    """`with full_disk(process, bytes)`: a full disk that needs no disk, and no rights."""
    return file_limit


@pytest.fixture
def check_served(accounts):
    """Check that a server answers a request."""

    def check(server, **body: Any) -> None:
        answer = served(server, accounts.key, **body)
        assert answer.status_code == 200, answer.text

    return check
