"""Free memory is that available in the machine or its container."""

from __future__ import annotations

import pytest

from outrider.platform.engine import hardware


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A machine with 1,000 KiB of which 800 are available, in a container described by two files."""
    meminfo, limit, used = (tmp_path / name for name in ("meminfo", "max", "current"))
    meminfo.write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 800 kB\n")
    monkeypatch.setattr(hardware, "_MEMINFO", meminfo)
    monkeypatch.setattr(hardware, "_CGROUPS", ((limit, used),))
    return limit, used


def test_the_page_cache_counts_as_available(files):
    assert hardware.host_memory() == (800 * 1024, 1000 * 1024)


@pytest.mark.parametrize(("limit", "free"), [("max", 800 * 1024), (str(2**60), 800 * 1024), ("500000", 400000)])
def test_a_containers_limit_counts(files, limit, free):
    files[0].write_text(limit)
    files[1].write_text("100000")
    assert hardware.host_memory()[0] == free
