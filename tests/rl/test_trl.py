"""TRL's AsyncGRPO, unchanged, with rollouts from a server: the policy is an adapter, of which each step loads a new
version."""

from __future__ import annotations

import re
import statistics

import pytest

MAX_STALENESS = 2
"""Of `train.py`: TRL unloads older versions."""


def test_the_reward_rises(run) -> None:
    rewards = [step["reward"] for step in run.steps]
    third = len(rewards) // 3
    assert statistics.mean(rewards[-third:]) > 1.3 * statistics.mean(rewards[:third])


def test_every_step_has_a_new_version(run) -> None:
    """Step n is reported after its synchronisation. The server has version n + 1, which it made, and the few before
    that answers may still be in use of."""
    for step in run.steps:
        newest = step["step"] + 1
        assert step["adapters"] == [f"trl-policy-v{n}" for n in range(max(1, newest - MAX_STALENESS), newest + 1)]


def test_the_versions_have_answered(run) -> None:
    """The server counts tokens by adapter: rollouts came from the versions, many of which had answered before the next
    one was there, and from the base model none but the texts of this test."""
    tokens = dict(re.findall(r'^outrider:generation_tokens_total\{adapter="([^"]*)".*\} (\S+)$', run.metrics, re.M))
    versions = {name for name, count in tokens.items() if float(count) > 0 and name.startswith("trl-policy-v")}
    assert "trl-policy-v1" in versions
    assert len(versions) >= len(run.steps) // 3
    assert float(tokens[""]) <= 32


def test_the_server_scores_as_the_trainer(run) -> None:
    """The first step's policy is the one that answered: the ratio of probabilities is 1. Answers of later steps are a
    few versions old at most."""
    assert run.steps[0]["ratio"] == pytest.approx(1, abs=1e-3)
    assert abs(run.steps[0]["kl"]) < 1e-4
    assert all(step["sample/staleness_max"] <= MAX_STALENESS for step in run.steps)
    assert statistics.median(step["ratio"] for step in run.steps) == pytest.approx(1, abs=0.1)


def test_the_base_model_is_untouched(run) -> None:
    before, after = run.texts
    assert before == after != ""
    assert "policy-base" in run.models
