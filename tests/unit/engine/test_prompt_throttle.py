"""Number of prompt tokens in a step with decodes, on simulated machines."""

from collections.abc import Callable
from itertools import pairwise
from random import Random
from statistics import median

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.platform.core.batch import RowPlan, RowResult, StepResult
from outrider.platform.core.config import SchedulerConfig
from outrider.platform.core.request import Request
from outrider.platform.engine.memory.block_pool import BlockPool
from outrider.platform.engine.memory.prefix_cache import PrefixCache
from outrider.platform.engine.queue.prompt_throttle import FEWEST, START, UNMEASURED, PromptThrottle
from outrider.platform.engine.queue.scheduler import Scheduler
from outrider.platform.engine.queue.step_budget import StepBudget

Machine = Callable[[int], float]
"""Tokens of a step -> seconds."""

MACHINES: dict[str, Machine] = {
    "bound by arithmetic": lambda tokens: 0.004 + 0.00025 * tokens,
    "weights hide small steps": lambda tokens: max(0.027, 0.002 + 0.004 * tokens),
    "a GPU": lambda tokens: max(0.010, 0.00004 * tokens),
}


def run(pace: PromptThrottle, machine: Machine, streams: int, steps: int, noise: Random | None = None) -> list[float]:
    """Decode, then decode with prompts; the times of the mixed steps over that of a decode."""
    alone = machine(streams)
    for _ in range(20):
        pace.record(streams, 0, alone)
    ratios = []
    for _ in range(steps):
        tokens = pace.limit(streams, max(streams, 8), 1)
        assert tokens is not None
        seconds = machine(streams + tokens)
        ratios.append(seconds / alone)
        held_up = 8.0 if noise is not None and noise.random() < 0.02 else 1.0
        pace.record(streams, tokens, seconds * held_up * (1.0 if noise is None else noise.uniform(0.9, 1.1)))
    return ratios


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("streams", [1, 8, 32])
@pytest.mark.parametrize("noisy", [False, True])
def test_a_step_takes_about_twice_a_decode(name: str, streams: int, noisy: bool) -> None:
    ratios = run(PromptThrottle(), MACHINES[name], streams, 120, Random(1) if noisy else None)
    late = ratios[40:]
    least = MACHINES[name](streams + FEWEST) / MACHINES[name](streams)
    assert max(late) < max(2.5, 1.05 * least)
    assert sum(late) / len(late) > 1.5  # and no less: prompts must progress


def launched_by_kernel(num_decodes: int, num_prompt_tokens: int) -> float:
    """Seconds of a step on a GPU whose decodes are one graph: the host takes 20 ms to launch one with prompts."""
    decodes = 0.0062 + 0.000018 * num_decodes
    return max(0.020, decodes + 0.000023 * num_prompt_tokens) if num_prompt_tokens else decodes


@pytest.mark.parametrize("streams", [1, 8, 64])
@pytest.mark.parametrize("noisy", [False, True])
def test_fixed_time_of_prompts_does_not_throttle_them(streams: int, noisy: bool) -> None:
    """Else each step would get fewer tokens than the one before, down to the fewest, and still take as long."""
    pace, random = PromptThrottle(), Random(streams)
    late = []
    for step in range(400):
        tokens = pace.limit(streams, streams, max(1, streams // 8)) if step % 4 else 0
        assert tokens is not None
        seconds = launched_by_kernel(streams, tokens)
        pace.record(streams, tokens, seconds * (random.uniform(0.9, 1.1) if noisy else 1.0))
        if tokens and step > 200:
            late.append((tokens, seconds))
    assert median(tokens for tokens, _ in late) > 300
    assert max(seconds for _, seconds in late) < 2.2 * 0.020 * (8.0 / streams if streams < 8 else 1.0)


Trouble = Callable[[int], float]
"""Number of a step -> factor of its time."""
TROUBLES: dict[str, Trouble] = {
    "slow first steps": lambda step: 30.0 if step < 8 else 1.0,
    "a burst of other load": lambda step: 4.0 if 100 <= step < 160 else 1.0,
    "one step of a second": lambda step: 100.0 if step == 150 else 1.0,
}


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("name", MACHINES)
def test_a_temporary_slowdown_is_forgotten(name: str, trouble: str) -> None:
    """Within 100 steps the bound is that of a machine without it."""
    limits = []
    for factor in (TROUBLES[trouble], lambda step: 1.0):
        pace = PromptThrottle()
        pace.record(8, 0, MACHINES[name](8))
        for step in range(260):
            tokens = pace.limit(8, 8, 1) if step % 4 else 0
            assert tokens is not None
            pace.record(8, tokens, MACHINES[name](8 + tokens) * factor(step))
        limits.append(median(pace.limit(8, 8, 1) or 0 for _ in range(3)))
    assert limits[0] == pytest.approx(limits[1], rel=0.5)


def test_one_small_step_is_forced_at_a_time() -> None:
    """Prompts of 20 tokens make no pair with each other, however small a step is forced."""
    pace = PromptThrottle()
    pace.record(8, 0, 0.010)
    limits = []
    for _ in range(40):
        limits.append(pace.limit(8, 8, 1) or 0)
        pace.record(8, 20, 0.0115)
    small = [limit < START / 2 for limit in limits]
    assert any(small)
    assert not any(before and after for before, after in pairwise(small))


def test_the_last_tokens_of_prompts_are_not_measured() -> None:
    pace = PromptThrottle()
    pace.record(8, 0, 0.010)
    for _ in range(60):
        pace.record(8, 1, 0.0115)
    limits = [pace.limit(8, 8, 1) or 0 for _ in range(2)]
    assert max(limits) >= START // 2


def served(paced: bool, streams: int = 64, rounds: int = 6, prompt: int = 128, output: int = 128) -> float:
    """Output tokens a second of a closed loop on that GPU, whose requests begin at different times, without its first
    quarter. A request ends, and the next comes a little later: each takes the API process a millisecond."""
    config = SchedulerConfig(
        max_num_seqs=streams, max_num_batched_tokens=8192, max_model_len=512, policy="fcfs", prompt_pacing=paced
    )
    pool = BlockPool(streams * 20)
    scheduler = Scheduler(config, pool, PrefixCache(pool, 16, None, keeps_finished=False))
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    arrivals = [0.02 * index for index in range(streams)]
    now, free, num_left, began = 0.0, 0.0, rounds * streams, 0.0
    num_measured, num_steps = rounds * streams * 3 // 4, 0
    while num_left:
        num_steps += 1
        assert num_steps < 4 * rounds * output, "prompts hardly get on"
        while arrivals and arrivals[0] <= now:
            arrivals.pop(0)
            scheduler.add(Request(f"{num_left}-{len(arrivals)}-{now}", [7] * prompt, prompt, params, seed_key=0))
        plan = scheduler.schedule()
        if not plan.rows:
            now = max(now, arrivals[0])
            continue
        num_decodes = sum(row.num_tokens == 1 for row in plan.rows)
        seconds = launched_by_kernel(num_decodes, plan.num_tokens - num_decodes)
        now += seconds
        result = StepResult([RowResult([9] if row.samples else []) for row in plan.rows])
        for delta in scheduler.commit(plan, result):
            if delta.finish_reason is not None:
                free = max(free, now) + 0.001
                arrivals.append(free)
                num_left -= 1
                began = began or now * (num_left == num_measured)
        scheduler.observe(plan, seconds)
    return num_measured * output / (now - began)


def test_a_closed_loop_loses_next_to_nothing_by_pacing() -> None:
    assert served(True) > 0.95 * served(False)


def test_prompts_are_not_throttled_without_decodes() -> None:
    assert PromptThrottle().limit(0, 0, 5) is None


def test_many_waiting_prompts_with_few_decodes_are_not_throttled() -> None:
    pace = PromptThrottle()
    assert pace.limit(8, 8, 1) == START
    assert pace.limit(8, 8, 2) == 2 * START
    assert pace.limit(8, 8, 32) == 32 * START
    assert pace.limit(32, 32, 4) == START


def test_a_number_of_decodes_that_was_never_measured_takes_the_nearest() -> None:
    pace = PromptThrottle()
    pace.record(8, 0, 0.01)
    pace.record(1, 64, 0.1)
    limit = pace.limit(1, 8, 1)
    assert limit is not None
    assert limit < START


def test_decodes_are_measured_even_if_prompts_never_end() -> None:
    pace, machine = PromptThrottle(), MACHINES["a GPU"]
    ratios, num_without = [], 0
    for _ in range(UNMEASURED + 80):
        step = StepBudget(10_000, 0)
        for _ in range(20):
            request = Request("r", [1], 1, SamplingParams(), 0)
            step.add(RowPlan(request, 0, 1, 0, samples=True, max_new_drafts=0))
        pace.apply(step, 1)
        ratios.append(machine(20 + step.for_prompts) / machine(20))
        pace.record(20, step.for_prompts, machine(20 + step.for_prompts))
        num_without += step.for_prompts == 0
    assert num_without == 1
    assert 1.5 < ratios[-1] < 2.5


def test_the_bound_is_never_more_than_the_step_has_left() -> None:
    step = StepBudget(10, 0)
    step.add(RowPlan(Request("r", [1], 1, SamplingParams(), 0), 0, 1, 0, samples=True, max_new_drafts=0))
    PromptThrottle().apply(step, 1)
    assert step.for_prompts == step.num_left == 9


@settings(max_examples=100)
@example([(1, 0, 5e-324), (1, 1, 5e-324)])
@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 5000), st.floats(0.0, 100.0, allow_nan=False)), max_size=50)
)
def test_prompts_progress_with_any_step_times(steps: list[tuple[int, int, float]]) -> None:
    pace = PromptThrottle()
    for step in steps:
        pace.record(*step)
    limit = pace.limit(4, 4, 1)
    assert limit is not None
    assert limit >= FEWEST // 4
