"""Simulated time for the controller: a target with a cost curve, drafters with costs, requests that accept by chance.

Everything between the clock and the proposer is what the engine runs; only the seconds and the acceptance are made up.
Goodput is tokens a simulated second, compared with the best of all fixed numbers of drafts in the same world.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.models.batch import KVLayerSpec
from outrider.platform.core.batch import RowPlan
from outrider.platform.core.request import NO_DRAFTS, Drafts, Request, Status
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.adaptive import AdaptiveProposer
from outrider.spec_decode.controller import DrafterTraits
from outrider.spec_decode.drafters.base import DraftRow, NoProposer, Proposal, ProposerNeeds, TargetOutput

MAX_DRAFTS = 8
LENGTH = 200  # output tokens of a request; another with the same adapter follows it
HOST = 0.3
SETTLING = 5.0  # milliseconds after which what drafting left in caches is gone by 1/e
_NO_DRAFTS = (0, 0)
_ZEROS = [[0] * (accepted + 1) for accepted in range(MAX_DRAFTS + 1)]  # tokens of a step
PARAMS = SamplingParams()


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


def short(rows: int, tokens: int) -> float:
    """A tiny model: steps of 1.5 to 5 milliseconds, most of it for rows; a pass of its drafter takes half of one."""
    return 1.3 + 0.07 * rows + 0.03 * tokens


def steep(rows: int, tokens: int) -> float:
    """A tiny model to which each further token is no trifle: with several rows drafting gains little or nothing."""
    return 0.3 + 0.2 * tokens


def long(rows: int, tokens: int) -> float:
    """Half a billion parameters on a CPU: a second token is a quarter of a step."""
    return 40.0 + (0.0 if tokens == 1 else 10.0) + 2.0 * tokens


@functools.cache
def expected_tokens(p: float, count: int) -> float:
    """Of a step with `count` drafts, each accepted with probability `p` given those before."""
    return sum(p**j for j in range(count + 1))


CURVES = {curve.__name__: curve for curve in (flat, sloped, bound, stairs)}


class Clock:
    """Seconds, which pass when a test says so."""

    now = 0.0

    def __call__(self):
        return self.now


@dataclass
class World:
    """What the engine does to a proposer. Milliseconds."""

    curve: Callable[[int, int], float]
    accept: dict[tuple[bytes, int], float]
    """(adapter, drafter) -> probability that a draft is accepted, given those before it."""
    adapters: Sequence[bytes]
    """One for each row of the batch."""
    noise: float = 0.0
    outliers: float = 0.0
    seed: int = 0
    now: float = 0.0
    tokens: float = 0.0
    """Expected rather than drawn, so that few steps are enough to compare."""
    exact: float = 0.0
    """Time without its noise, for the same reason."""
    prompt: int = 0
    """Tokens of a new request's prompt, computed in its first step; 0: nobody computes any prompt."""
    unsettled: float = 0.0
    """Share that a step without drafts takes longer at first, right after drafting by the first drafter."""
    slowness: float = 1.0
    """Of the machine: everything takes so many times as long."""
    length: int = LENGTH
    """Output tokens of a request; another with the same adapter follows it."""
    counts: list[list[int]] = field(default_factory=list)
    """Drafts made in each step."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.drafted: dict[Request, int] = {}  # what the drafter has computed
        self.owner: dict[Request, tuple[int, int]] = {}  # drafter and number of drafts that the next step verifies
        self.disturbed = -1e9  # when something was drafted last
        self.rest = 0  # steps after which nobody is asked
        self.requests = [
            self.fresh(adapter, i * self.length // len(self.adapters)) for i, adapter in enumerate(self.adapters)
        ]

    def fresh(self, adapter: bytes, length: int = 0) -> Request:
        size = self.prompt or 8
        request = Request("r", [0] * (size + length), size, PARAMS, seed_key=1)
        request.text_namespace = (b"", adapter)
        return request

    def clock(self) -> float:
        return self.now / 1000

    def spend(self, milliseconds: float) -> float:
        milliseconds *= self.slowness
        factor = 1.0 + self.noise * self.random.uniform(-1, 1)
        if self.outliers and self.random.random() < self.outliers:
            factor *= 10
        self.now += milliseconds * factor
        self.exact += milliseconds
        return milliseconds * factor

    def run(self, proposer, num_steps: int) -> float:
        """Steps; returns their goodput, tokens a millisecond."""
        began, before = self.exact, self.tokens
        for _ in range(num_steps):
            self.step(proposer)
        return (self.tokens - before) / (self.exact - began)

    def step(self, proposer) -> None:
        requests, drafts = self.requests, [self.owner.get(request, _NO_DRAFTS) for request in self.requests]
        news = [0] * len(requests)
        if self.prompt:
            news = [0 if request.num_output_tokens else self.prompt - 1 for request in requests]
        size = len(requests) + sum(count for _, count in drafts) + sum(news)
        milliseconds = self.curve(len(requests), size)
        if not self.owner:
            milliseconds *= 1.0 + self.unsettled * math.exp((self.disturbed - self.now) / SETTLING)
        seconds = self.spend(milliseconds)
        rows, ended, start = [], [], 0
        for index, (request, (drafter, count), new) in enumerate(zip(requests, drafts, news, strict=True)):
            accepted, p = 0, self.accept[request.text_namespace[1], drafter]
            while accepted < count and self.random.random() < p:
                accepted += 1
            tokens = request.tokens
            length = len(tokens)
            tokens += _ZEROS[accepted]
            self.tokens += expected_tokens(p, count)
            left = self.length_of(request) + request.num_prompt_tokens - len(tokens)
            rows.append(
                DraftRow(
                    request, tokens, length + accepted, min(self.drafted.get(request, 0), length + accepted),
                    max(0, min(MAX_DRAFTS, left - 1)), [], True, length - 1 - new, start, count, accepted,
                )
            )  # fmt: skip
            start += 1 + count + new
            if left <= 0:
                ended.append(index)
        self.owner = {}
        output = TargetOutput(seconds=seconds / 1000)
        if self.rest:
            plans = [RowPlan(row.request, row.start, 1 + new, 0, True, 0) for row, new in zip(rows, news, strict=True)]
            plans.sort(key=lambda plan: plan.start < plan.request.num_prompt_tokens)  # prompts come last
            proposer.rested(plans, output)
            self.rest = proposer.rest
            self.counts.append([0] * len(rows))
        else:
            self.propose(proposer, rows, output)
        for index in ended:
            self.drafted.pop(requests[index], None)
            requests[index].status = Status.FINISHED
        self.replace(ended)
        self.spend(HOST)

    def length_of(self, request: Request) -> int:
        """Output tokens that it will have."""
        return self.length

    def replace(self, ended: Sequence[int]) -> None:
        """Others come for the requests that have ended."""
        for index in ended:
            self.requests[index] = self.fresh(self.requests[index].text_namespace[1])

    def propose(self, proposer, rows: list[DraftRow], output: TargetOutput) -> None:
        found = proposer.propose(rows, output)
        for row, proposal in zip(rows, found, strict=True):
            assert len(proposal.drafts.token_ids) <= row.max_drafts
            self.drafted[row.request] = proposal.num_draft_computed
            if proposal.drafts.token_ids:
                if proposal.drafts.token_ids[0] == 0:
                    self.disturbed = self.now
                self.owner[row.request] = (proposal.drafts.token_ids[0], len(proposal.drafts.token_ids))
        self.counts.append([len(proposal.drafts.token_ids) for proposal in found])
        self.rest = getattr(proposer, "rest", 0)


class Draining(World):
    """Requests of several `lengths` that begin together; the next ones come when the last one has ended."""

    lengths: Sequence[int] = (10, 14, 25, 60)

    def begin(self) -> Draining:
        """All at once."""
        self.requests = [self.fresh(adapter) for adapter in self.adapters]
        self._lengths = dict(zip(self.requests, self.lengths, strict=True))
        return self

    def length_of(self, request: Request) -> int:
        return self._lengths[request]

    def replace(self, ended: Sequence[int]) -> None:
        self.requests = [request for index, request in enumerate(self.requests) if index not in ended]
        if not self.requests:
            self.begin()


class Simulated(NoProposer):
    """A drafter that takes `base`, `each` for a pass and `row` for a draft, in milliseconds; drafts are its number."""

    def __init__(self, world: World, number: int, base: float, each: float, row: float = 0.01, match: float = 1.0):
        self.world, self.number, self.base, self.each, self.row, self.match = world, number, base, each, row, match

    def propose(self, rows, target):
        asked = [row.max_drafts for row in rows]
        counts = [count if self.world.random.random() < self.match else 0 for count in asked]
        if any(asked):
            self.world.spend(self.base + self.each * max(asked) + self.row * sum(asked))
        return [
            Proposal(Drafts([self.number] * count) if count else NO_DRAFTS, len(row.tokens))
            for row, count in zip(rows, counts, strict=True)
        ]


class WithLayers(Simulated):
    """The same, with layers: before it drafts it computes all that it lags behind, at `token` milliseconds each."""

    def __init__(self, world: World, base: float, each: float, row: float, token: float):
        super().__init__(world, 0, base, each, row)
        self.token = token

    @property
    def needs(self):
        return ProposerNeeds(kv_layers=(KVLayerSpec(1, 2),))

    def propose(self, rows, target):
        asking = [row for row in rows if row.max_drafts]
        self.world.spend(self.token * sum(len(row.tokens) - row.num_draft_valid for row in asking))
        found = super().propose(rows, target)
        return [
            proposal if row.max_drafts else Proposal(NO_DRAFTS, row.num_draft_valid)
            for row, proposal in zip(rows, found, strict=True)
        ]


class Fixed(NoProposer):
    """A fixed number of drafts."""

    rest = 0

    def __init__(self, drafter, count: int):
        self.drafter, self.count = drafter, count

    def propose(self, rows, target):
        return self.drafter.propose([row._replace(max_drafts=min(self.count, row.max_drafts)) for row in rows], target)


def neural(world: World, share: float = 0.05) -> Simulated:
    return Simulated(world, 0, base=0.05, each=10 * share)


def lookup(world: World, match: float = 0.5) -> Simulated:
    return Simulated(world, 1, base=0.02, each=0.0, match=match)


def adaptive(world: World, *drafters: Simulated, measured: bool = True) -> AdaptiveProposer:
    """As an engine starts: it has measured its steps at the number of rows of `world`."""
    traits = [DrafterTraits("draft_model", True), DrafterTraits("ngram", False)]
    proposer = AdaptiveProposer(list(zip(traits, drafters, strict=False)), MAX_DRAFTS, world.clock)
    if measured:
        for choice in proposer.choices * 2:
            proposer.hold(*choice)
            while proposer.is_settling and not choice[1]:
                world.step(proposer)
            for _ in range(4):
                world.step(proposer)
        proposer.release()
    return proposer


def best_fixed(make_world, make_drafters, num_steps: int = 1500) -> tuple[float, float, int]:
    """(goodput without drafts, the best with a fixed number of drafts by one drafter, that number)."""
    found = []
    for k in range(MAX_DRAFTS + 1):
        for number in range(len(make_drafters)) if k else [0]:
            world = make_world()
            found.append((world.run(Fixed(make_drafters[number](world), k), num_steps), k))
    goodput, k = max(found)
    return found[0][0], goodput, k
