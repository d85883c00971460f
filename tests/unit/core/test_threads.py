"""An engine process leaves a core to the API process, unless the user decides."""

from __future__ import annotations

import os

import pytest

from outrider.platform.core.threads import leave_a_core_free


@pytest.mark.parametrize(("cores", "threads"), [({0}, "1"), ({0, 1}, "1"), ({2, 3, 5, 7}, "3")])
def test_one_core_is_left(monkeypatch, cores, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    leave_a_core_free()
    assert os.environ["OMP_NUM_THREADS"] == threads


def test_the_users_choice_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    leave_a_core_free()
    assert os.environ["OMP_NUM_THREADS"] == "7"
