"""How many prompt tokens a step takes beside decodes, on simulated machines."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.platform.core.batch import RowPlan
from outrider.platform.core.request import Request
from outrider.platform.engine.queue.prompt_throttle import FEWEST, START, UNMEASURED, PromptThrottle
from outrider.platform.engine.queue.step_budget import StepBudget

Machine = Callable[[int], float]
"""Tokens of a step -> seconds."""

MACHINES: dict[str, Machine] = {
    "bound by arithmetic": lambda tokens: 0.004 + 0.00025 * tokens,
    "weights hide small steps": lambda tokens: max(0.027, 0.002 + 0.004 * tokens),
    "a GPU": lambda tokens: max(0.010, 0.00004 * tokens),
}


def run(pace: PromptThrottle, machine: Machine, streams: int, steps: int, noise: Random | None = None) -> list[float]:
    """Decode, then compute prompts beside it; the times of the mixed steps over that of a decode."""
    alone = machine(streams)
    for _ in range(20):
        pace.learn(streams, 0, alone)
    ratios = []
    for _ in range(steps):
        tokens = pace.limit(streams, max(streams, 8), 1)
        assert tokens is not None
        seconds = machine(streams + tokens)
        ratios.append(seconds / alone)
        held_up = 8.0 if noise is not None and noise.random() < 0.02 else 1.0
        pace.learn(streams, tokens, seconds * held_up * (1.0 if noise is None else noise.uniform(0.9, 1.1)))
    return ratios


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("streams", [1, 8, 32])
@pytest.mark.parametrize("noisy", [False, True])
def test_a_step_takes_about_twice_a_decode(name: str, streams: int, noisy: bool) -> None:
    ratios = run(PromptThrottle(), MACHINES[name], streams, 120, Random(1) if noisy else None)
    late = ratios[40:]
    least = MACHINES[name](streams + FEWEST) / MACHINES[name](streams)
    assert max(late) < max(2.5, 1.05 * least)
    assert sum(late) / len(late) > 1.5  # and no less: prompts must get on


def test_nothing_is_held_back_where_nobody_decodes() -> None:
    assert PromptThrottle().limit(0, 0, 5) is None


def test_many_that_wait_for_few_are_not_held_back() -> None:
    pace = PromptThrottle()
    assert pace.limit(8, 8, 1) == START
    assert pace.limit(8, 8, 2) == 2 * START
    assert pace.limit(8, 8, 32) == 32 * START
    assert pace.limit(32, 32, 4) == START


def test_a_number_of_decodes_that_was_never_measured_takes_the_nearest() -> None:
    pace = PromptThrottle()
    pace.learn(8, 0, 0.01)
    pace.learn(1, 64, 0.1)
    limit = pace.limit(1, 8, 1)
    assert limit is not None
    assert limit < START


def test_where_prompts_never_end_decodes_are_measured_all_the_same() -> None:
    pace, machine = PromptThrottle(), MACHINES["a GPU"]
    ratios, num_without = [], 0
    for _ in range(UNMEASURED + 80):
        step = StepBudget(10_000, 0)
        for _ in range(20):
            request = Request("r", [1], 1, SamplingParams(), 0)
            step.add(RowPlan(request, 0, 1, 0, samples=True, max_new_drafts=0))
        pace.apply(step, 1)
        ratios.append(machine(20 + step.for_prompts) / machine(20))
        pace.learn(20, step.for_prompts, machine(20 + step.for_prompts))
        num_without += step.for_prompts == 0
    assert num_without == 1
    assert 1.5 < ratios[-1] < 2.5


def test_the_bound_is_never_more_than_the_step_has_left() -> None:
    step = StepBudget(10, 0)
    step.add(RowPlan(Request("r", [1], 1, SamplingParams(), 0), 0, 1, 0, samples=True, max_new_drafts=0))
    PromptThrottle().apply(step, 1)
    assert step.for_prompts == step.num_left == 9


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 5000), st.floats(0.0, 100.0, allow_nan=False)), max_size=50)
)
def test_whatever_times_come_prompts_get_on(steps: list[tuple[int, int, float]]) -> None:
    pace = PromptThrottle()
    for step in steps:
        pace.learn(*step)
    limit = pace.limit(4, 4, 1)
    assert limit is not None
    assert limit >= FEWEST
