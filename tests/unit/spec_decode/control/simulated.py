"""Simulated time for the policy: a target with a cost curve, drafters with costs, requests that accept by chance.

The policy is the engine's; the seconds and the acceptance are made up. Goodput is expected tokens a simulated
millisecond, compared with that of fixed numbers of drafts in the same world.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.platform.core.batch import RowPlan, RowResult, StepPlan, StepResult
from outrider.platform.core.request import NO_DRAFTS, Drafts, Request, Status
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.control.adapters import DrafterTraits
from outrider.spec_decode.control.policy import SpeculationPolicy

MAX_DRAFTS = 8
HOST = 0.3  # milliseconds of the host between two steps


def flat(rows: int, tokens: int) -> float:
    """Bound by memory: verifying is nearly free."""
    return 10.0 + 0.02 * tokens + 0.02 * rows


def sloped(rows: int, tokens: int) -> float:
    """Weights first, then work: the usual roofline."""
    return max(10.0, 0.6 * tokens) + 0.05 * rows


def bound(rows: int, tokens: int) -> float:
    """Bound by compute: every token costs."""
    return 2.0 + 1.5 * tokens


def stairs(rows: int, tokens: int) -> float:
    """Products padded to tiles of 16 rows, and a cheaper one for a single row."""
    return (8.0 if tokens == 1 else 9.5) + 3.0 * ((tokens - 1) // 16)


def long(rows: int, tokens: int) -> float:
    """Half a billion parameters on a CPU: a second token is a quarter of a step."""
    return 40.0 + (0.0 if tokens == 1 else 10.0) + 2.0 * tokens


def short(rows: int, tokens: int) -> float:
    """A tiny model: steps of 1 to 3 milliseconds."""
    return 1.0 + 0.03 * rows + 0.02 * tokens


CURVES = {curve.__name__: curve for curve in (flat, sloped, bound, stairs, long, short)}


@dataclass(frozen=True)
class Costs:
    """A drafter: milliseconds of a round and of each draft of a row, and the share of rounds in which it has drafts."""

    base: float = 0.05
    each: float = 0.5
    match: float = 1.0
    catch_up: float = 0.0
    """Milliseconds for each token that the drafter has not seen when it drafts for a row."""


LOOKUP = Costs(0.02, 0.0)


@dataclass
class World:
    """The engine's order of calls around a policy."""

    curve: Callable[[int, int], float]
    accept: dict[tuple[bytes, int], float]
    """(adapter, drafter) -> probability that a draft is right, given those before it."""
    adapters: Sequence[bytes]
    """One for each row of the batch."""
    drafters: Sequence[Costs] = (Costs(),)
    noise: float = 0.0
    seed: int = 0
    length: int = 200
    """Output tokens of a request; another with the same adapter follows it."""
    prompt: int = 8
    """Tokens of a prompt."""
    overlaps: bool = False
    """True when the next step is planned before a step is observed."""
    waiting: bool = False
    slowness: Callable[[float], float] = lambda now: 1.0
    """Factor of all times, by milliseconds from the start: other programs on the machine."""
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    now: float = 0.0
    ended: float | None = None
    """When the target's work of the last step ended."""
    tokens: float = 0.0
    counts: list[list[int]] = field(default_factory=list)
    """Drafts chosen for each row after each step."""
    drafters_used: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        traits = [DrafterTraits(f"drafter {i}", MAX_DRAFTS, 0.6) for i in range(len(self.drafters))]
        self.policy = SpeculationPolicy(traits, lambda: self.now / 1000)
        self.requests = [self.fresh(a, i * self.length // len(self.adapters)) for i, a in enumerate(self.adapters)]
        self.drafted: dict[Request, tuple[int, int]] = {}
        self.planned: StepPlan | None = None

    def fresh(self, adapter: bytes, length: int = 0) -> Request:
        """Make a running request that has `length` output tokens."""
        request = Request("r", [0] * (self.prompt + length), self.prompt, self.params, seed_key=1)
        request.text_namespace, request.status = (b"", adapter), Status.RUNNING
        return request

    def warm_up(self) -> World:
        """Measure step times, as an engine does at its start."""
        for choice in [*self.policy.choices] * 2:
            self.policy.hold(*choice)
            self.run(5)
        self.policy.release()
        self.counts.clear()
        self.drafters_used.clear()
        return self

    def spend(self, milliseconds: float) -> float:
        """Let time pass."""
        taken = milliseconds * self.slowness(self.now) * (1.0 + self.noise * self.random.uniform(-1, 1))
        self.now += taken
        return taken

    def run(self, num_steps: int) -> float:
        """Compute steps; returns tokens a millisecond."""
        began, before = self.now, self.tokens
        for _ in range(num_steps):
            self.step()
        return (self.tokens - before) / (self.now - began)

    def plan(self) -> StepPlan:
        """Plan a step. If steps overlap it verifies the drafts of the step in flight."""
        rows = []
        in_flight = {row.request: row for row in self.planned.rows} if self.planned else {}
        for request in self.requests:
            _, count = self.drafted.get(request, (0, 0))
            if request in in_flight:
                count = in_flight[request].max_new_drafts
            rows.append(RowPlan(request, len(request.tokens) - 1, 1 + count, count, True, MAX_DRAFTS))
        self.policy.choose(rows, requests_wait=self.waiting)
        assert all(0 <= row.max_new_drafts <= MAX_DRAFTS and row.drafter < len(self.drafters) for row in rows)
        self.counts.append([row.max_new_drafts for row in rows])
        self.drafters_used.append([row.drafter for row in rows])
        return StepPlan(rows, self.overlaps)

    def step(self) -> None:
        """Compute one step, and plan the next one meanwhile if steps overlap."""
        plan = self.planned or self.plan()
        self.planned = plan
        following = self.plan() if self.overlaps else None
        size = sum(row.num_tokens for row in plan.rows)
        gap = None if self.ended is None else (self.now - self.ended) / 1000
        seconds = self.spend(self.curve(len(plan.rows), size)) / 1000
        self.ended = self.now
        results = [self.verify(row) for row in plan.rows]
        for drafter, costs in enumerate(self.drafters):
            most = max((row.max_new_drafts for row in plan.rows if row.drafter == drafter), default=0)
            if most:
                asking = [row.request for row in plan.rows if row.max_new_drafts and row.drafter == drafter]
                lag = sum(len(request.tokens) - request.num_draft_computed for request in asking)
                self.spend(costs.base + costs.each * most + costs.catch_up * lag)
                for request in asking:
                    request.num_draft_computed = len(request.tokens)
        self.spend(HOST)
        self.policy.observe(plan, StepResult(results, seconds, gap))
        self.planned = following
        for index, request in enumerate(self.requests):
            if request.num_output_tokens >= self.length:
                request.status = Status.FINISHED
                self.requests[index] = self.fresh(request.text_namespace[1])
                if following:
                    following.rows[index].request = self.requests[index]
                    following.rows[index].num_drafts, following.rows[index].num_tokens = 0, 1

    def verify(self, row: RowPlan) -> RowResult:
        """Accept drafts by chance, and draft for the next step."""
        request = row.request
        drafter, _ = self.drafted.pop(request, (0, 0))
        p = self.accept[request.text_namespace[1], drafter]
        accepted = 0
        while accepted < row.num_drafts and self.random.random() < p:
            accepted += 1
        self.tokens += sum(p**j for j in range(row.num_drafts + 1))
        request.tokens += [0] * (accepted + 1)
        drafts = NO_DRAFTS
        if row.max_new_drafts and (self.overlaps or self.random.random() < self.drafters[row.drafter].match):
            drafts = Drafts([0] * row.max_new_drafts)
            self.drafted[request] = row.drafter, row.max_new_drafts
        request.drafts = drafts
        return RowResult([0] * (accepted + 1), accepted)

    def fixed(self, drafter: int, count: int, num_steps: int = 300) -> float:
        """Goodput with a fixed number of drafts, in a world of its own."""
        world = World(self.curve, self.accept, self.adapters, self.drafters, seed=self.seed, overlaps=self.overlaps)
        world.policy.hold(drafter, count)
        return world.run(num_steps)

    def best_fixed(self) -> float:
        """The best goodput of all fixed numbers of drafts by one drafter."""
        return max(self.fixed(d, k) for d in range(len(self.drafters)) for k in range(MAX_DRAFTS + 1))
