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
    assert threads_for(LARGE_WEIGHTS) is None


def test_a_large_model_takes_the_core_that_was_left(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert threads_for(LARGE_WEIGHTS) is None  # nothing was left
    leave_a_core_free()
    assert threads_for(LARGE_WEIGHTS) == 2
    assert threads_for(LARGE_WEIGHTS - 1) is None
