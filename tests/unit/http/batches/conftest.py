"""A server with a folder for batches, in front of an engine that answers from a script."""

import sys
from pathlib import Path

import pytest

from outrider.platform.http.batches import run, service

sys.path.insert(0, str(Path(__file__).parent))

from batch_helpers import Site


@pytest.fixture
def site(llm, tmp_path, monkeypatch) -> Site:
    monkeypatch.setattr(run, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(service, "SCAN_SECONDS", 0.05)
    return Site(llm, tmp_path / "batches")
