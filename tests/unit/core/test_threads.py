"""An engine process leaves a core to the API process, unless the user decides or the model is large."""

from __future__ import annotations

import os

import pytest

from outrider.platform.core import threads
from outrider.platform.core.threads import LARGE_WEIGHTS, leave_a_core_free, threads_for


@pytest.fixture(autouse=True)
def _as_at_the_start(monkeypatch):
    monkeypatch.setattr(threads, "_left_free", False)


@pytest.mark.parametrize(("cores", "expected"), [({0}, "1"), ({0, 1}, "1"), ({2, 3, 5, 7}, "3")])
def test_one_core_is_left(monkeypatch, cores, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    leave_a_core_free()
    assert os.environ["OMP_NUM_THREADS"] == expected


def test_the_users_choice_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    leave_a_core_free()
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert threads_for(LARGE_WEIGHTS, 7) == 7


def test_a_large_model_takes_the_core_that_was_left(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert threads_for(LARGE_WEIGHTS, 1) == 1  # nothing was left
    assert threads_for(LARGE_WEIGHTS, 64) == 2  # torch's default, if it knows of no limit
    leave_a_core_free()
    assert threads_for(LARGE_WEIGHTS, 1) == 2
    assert threads_for(LARGE_WEIGHTS - 1, 1) == 1


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/", {}, 8),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "200000 100000"}, 2),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "1000 100000"}, 1),
        ("0::/", {"cpu.max": "3200000 100000"}, 8),
        ("0::/", {"cpu.max": "nonsense"}, 8),
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/outside", {"cpu.max": "300000 100000"}, 3),
        ("4:cpu,cpuacct:/a", {"cpu,cpuacct/a/cpu.cfs_quota_us": "400000"}, 4),
        ("4:cpu:/a", {"cpu/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_quota_us": "-1"}, 8),
        ("4:cpu:/docker/x", {"cpu/cpu.cfs_quota_us": "100000"}, 1),
        ("9:memory:/a\n4:cpuset:/a", {"cpu/cpu.cfs_quota_us": "100000"}, 8),
    ],
)
def test_a_quota_limits_the_cores(monkeypatch, tmp_path, group, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    written = {f"sys/fs/cgroup/{name}": text for name, text in files.items()} | {"proc/self/cgroup": group}
    for name, text in written.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
        if path.name == "cpu.cfs_quota_us":
            (path.parent / "cpu.cfs_period_us").write_text("100000\n")
    assert threads.usable_cores(tmp_path) == expected
