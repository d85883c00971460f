"""Decides what each step computes, and takes its results into the sequences.

There are no phases. A sequence is a row of tokens of which a prefix has been computed; a step computes some more of
each. A prompt chunk, a decode and the verification of k drafts differ only in their counts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple, Protocol

from ..core.batch import RowPlan, StepPlan, StepResult
from ..core.config import SchedulerConfig
from ..core.errors import OutriderError
from ..core.messages import TokenDelta
from ..core.request import NO_DRAFTS, Request, Status
from .block_pool import BlockPool
from .outcome import accept
from .policies import POLICIES, Key
from .prefix_cache import PrefixCache

# Waiting sequences that gates may prepare for while the batch is full.
PREFETCHED = 16


class Gate(Protocol):
    """Something a sequence must hold while it runs, beside KV blocks."""

    def admit(self, request: Request) -> str | None:
        """Take it and return None, or return the reason to wait. A typed error fails this request alone."""

    def prefetch(self, request: Request) -> None:
        """The request will soon be asked for: begin what takes long, if nothing more urgent suffers."""

    def release(self, request: Request) -> None:
        """Give it back, to ask again later: the request was preempted, or found no room."""

    def forget(self, request: Request) -> None:
        """Give it back for good: the request finished, failed or was aborted. Also for one that was never admitted."""


class DraftLimits(NamedTuple):
    """What the proposer asks of the scheduler, as integers."""

    num_drafts: int = 0
    """Most drafts a step."""
    extra_slots: bool = False
    """Whether proposing k drafts writes KV at the k positions after the step's last."""


def _order(request: Request) -> Key:
    return request.order


def _remove(queue: list[Request], request: Request) -> None:
    """Remove a request from a list in the policy's order; orders are unique."""
    index = bisect_left(queue, request.order, key=_order)
    assert queue[index] is request
    del queue[index]


class Scheduler:
    """Owns the queue, the running set and every request's blocks. `schedule` and `commit` alternate."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        prefix_cache: PrefixCache,
        gates: Sequence[Gate] = (),
        drafts: DraftLimits | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.num_preemptions = 0
        self._gates = gates
        self._draft_limits = drafts or DraftLimits()
        self._policy = POLICIES[config.policy]
        self._arrivals = count()
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._siblings: dict[str, list[Request]] = {}  # unfinished ones of each group; the first leads
        self._reasons: dict[str, str] = {}
        self._failed: list[TokenDelta] = []

    # ------------------------------------------------------------------ queue

    @property
    def running(self) -> Sequence[Request]:
        """Admitted sequences, most urgent first. Not to be changed."""
        return self._running

    @property
    def waiting(self) -> Sequence[Request]:
        """Queued sequences, most urgent first. Not to be changed."""
        return self._waiting

    def waiting_by_reason(self) -> dict[str, int]:
        """Queued sequences by what held them in the last step; "capacity" where nothing but room is missing."""
        reasons: dict[str, int] = {}
        for request in self._waiting:
            reason = self._reasons.get(request.request_id, "capacity")
            reasons[reason] = reasons.get(reason, 0) + 1
        return reasons

    def has_work(self) -> bool:
        """Whether any sequence is unfinished, or an error is still to be told."""
        return bool(self._waiting or self._running or self._failed)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: Request) -> None:
        """Queue a new sequence."""
        request.order = self._policy(request, next(self._arrivals))
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=_order)
        if request.group is not None:
            self._siblings.setdefault(request.group, []).append(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these sequences and free what they hold; unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request)

    def end(self, request_ids: Iterable[str]) -> None:
        """The same, but tell the client: the next step's deltas end them with finish reason "abort"."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._failed.append(TokenDelta(request_id, finish_reason="abort"))
                self._finish(request)

    # --------------------------------------------------------------- schedule

    def schedule(self) -> StepPlan:
        """Plan a step under the token budget: running sequences first, then new ones, each in the policy's order."""
        rows: list[RowPlan] = []
        budget = self.config.max_num_batched_tokens
        for_drafts = self._tokens_for_drafts()
        preempted = self.num_preemptions
        index = 0
        while index < len(self._running) and budget > 0:
            share = for_drafts // (len(self._running) - index)
            row = self._plan_row(self._running[index], budget, share)
            if row is None:  # it was the least urgent itself, and gave way
                break
            rows.append(row)
            budget -= row.num_tokens
            for_drafts -= row.num_drafts
            index += 1
        if self.num_preemptions == preempted:
            self._admit(rows, budget)
        return StepPlan(rows)

    def _tokens_for_drafts(self) -> int:
        """How much of a step's budget drafts may take, all together: what the sequences' own tokens leave. Of long
        prompts, and of those that wait, a quarter of the budget counts, so that neither they nor drafts stand still."""
        budget = self.config.max_num_batched_tokens
        if not self._draft_limits.num_drafts:
            return 0
        quarter = max(1, budget // 4)
        own = sum(min(len(request.tokens) - request.num_computed, quarter) for request in self._running)
        if self._waiting and len(self._running) < self.config.max_num_seqs:
            own += quarter
        return max(0, budget - own)

    def _plan_row(self, request: Request, budget: int, draft_share: int) -> RowPlan | None:
        """The row of a running sequence, with blocks for it; preempts less urgent ones if it must."""
        while True:
            row = self._fit(request, budget, draft_share)
            if row is not None:
                return row
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return None

    def _fit(self, request: Request, budget: int, draft_share: int) -> RowPlan | None:
        """The largest row that budget and free blocks allow: with room for new drafts, without, without drafts at
        all. `draft_share`: most drafts to verify now, and to propose for the next step."""
        known = len(request.tokens) - request.num_computed
        drafts = request.drafts.truncated(max(0, min(budget - known, draft_share, self._draft_room(request, 0))))
        plain = NO_DRAFTS
        for use, lookahead in ((drafts, True), (drafts, False), (plain, False)):
            num_tokens = min(known + len(use.token_ids), budget)
            end = request.num_computed + num_tokens
            samples = num_tokens >= known
            new_drafts = min(draft_share, self._draft_room(request, len(use.token_ids) + 1)) if samples else 0
            extra = new_drafts if self._draft_limits.extra_slots else 0
            if lookahead is False and extra:
                new_drafts = extra = 0
            if self._reserve(request, end + extra):
                request.drafts = use
                return RowPlan(request, request.num_computed, num_tokens, len(use.token_ids), samples, new_drafts)
        return None

    def _draft_room(self, request: Request, ahead: int) -> int:
        """Most drafts that may follow when the sequence has grown by at most `ahead` tokens, at least one if any."""
        limit = self._draft_limits.num_drafts
        if limit == 0:
            return 0
        if request.params.max_drafts is not None:
            limit = min(limit, request.params.max_drafts)
        least = min(ahead, 1)
        outputs = request.num_output_tokens + least
        if request.params.max_tokens is not None:
            limit = min(limit, request.params.max_tokens - outputs - 1)
        return max(0, min(limit, self.config.max_model_len - len(request.tokens) - ahead))

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        """Give the request blocks for its first `num_tokens` positions, or change nothing."""
        missing = -(-num_tokens // self.prefix_cache.block_size) - len(request.blocks)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        request.blocks.extend(blocks)
        return True

    def _preempt(self, request: Request) -> None:
        """Take a running sequence's blocks; it is computed again later, unless the prefix cache still has them."""
        _remove(self._running, request)
        self._take_back(request)
        for gate in self._gates:
            gate.release(request)
        self.num_preemptions += 1
        request.status = Status.WAITING
        request.num_preemptions += 1
        insort(self._waiting, request, key=_order)

    def _take_back(self, request: Request) -> None:
        """Free the request's blocks: it has nothing computed any more."""
        self.pool.release(request.blocks)
        request.blocks = []
        request.num_computed = request.num_draft_computed = 0
        request.num_published = request.num_draft_published = 0
        request.drafts = NO_DRAFTS
        request.prompt_logprobs = None

    # -------------------------------------------------------------- admission

    def _admit(self, rows: list[RowPlan], budget: int) -> None:
        """Start waiting sequences. One that waits for something of its own lets others pass; one that waits for room
        does not."""
        self._reasons.clear()
        for request in list(self._waiting):
            if budget <= 0 or len(self._running) >= self.config.max_num_seqs:
                self._prefetch()
                break
            try:
                reason = self._blocked(request)
            except OutriderError as error:
                self._failed.append(TokenDelta(request.request_id, error=error.info()))
                self._finish(request)
                continue
            if reason is not None:
                self._reasons[request.request_id] = reason
                continue
            row = self._start(request, budget, alone=not self._running)
            if row is None:
                self._take_back(request)
                for gate in self._gates:
                    gate.release(request)
                break
            self.prefix_cache.count(request, row.start)
            _remove(self._waiting, request)
            insort(self._running, request, key=_order)
            request.status = Status.RUNNING
            rows.append(row)
            budget -= row.num_tokens

    def _prefetch(self) -> None:
        """Let the gates prepare for the next few sequences."""
        for request in self._waiting[:PREFETCHED]:
            for gate in self._gates:
                gate.prefetch(request)

    def _blocked(self, request: Request) -> str | None:
        """Why the request cannot start for a reason of its own; None once it holds everything but blocks. Raises what a
        gate raises: the request has failed."""
        if self._awaits_leader(request):
            return "group"
        for index, gate in enumerate(self._gates):
            reason = gate.admit(request)
            if reason is not None:
                for taken in self._gates[:index]:
                    taken.release(request)
                return reason
        return None

    def _awaits_leader(self, request: Request) -> bool:
        """Whether a sibling is about to compute the prompt blocks that this sequence can then share."""
        if request.group is None or request.num_prompt_tokens - 1 < self.prefix_cache.block_size:
            return False
        leader = self._siblings[request.group][0]
        return leader is not request and leader.num_computed < leader.num_prompt_tokens

    def _start(self, request: Request, budget: int, *, alone: bool) -> RowPlan | None:
        """The first row of a request, after what the prefix cache has; None when there is no room for it now."""
        match = self.prefix_cache.match(request)
        request.blocks = match.blocks
        request.num_computed = match.num_tokens
        request.num_draft_computed = match.num_draft_tokens
        request.num_published = len(match.blocks)
        request.num_draft_published = match.num_draft_tokens // self.prefix_cache.block_size
        if request.num_preemptions == 0:
            request.num_cached_tokens = match.num_tokens
        uncomputed = len(request.tokens) - request.num_computed
        if uncomputed > budget and not self.config.enable_chunked_prefill:
            return None
        # Admitting a prompt of which only a part fits would only preempt it again a few steps later.
        whole = -(-(len(request.tokens) + 1) // self.prefix_cache.block_size) - len(request.blocks)
        if whole > self.pool.num_free and not alone:
            return None
        return self._fit(request, budget, self._tokens_for_drafts() // (len(self._running) + 1))

    # ----------------------------------------------------------------- commit

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenDelta]:
        """Take a step's results into the sequences. The only place that moves `tokens` and `num_computed`."""
        deltas, self._failed = self._failed, []
        for row, got in zip(plan.rows, result.rows, strict=True):
            request = row.request
            if request.status is not Status.RUNNING:  # aborted meanwhile
                continue
            delta = accept(row, got, self.config.max_model_len)
            self.prefix_cache.publish(request)
            if delta is None:
                continue
            deltas.append(delta)
            if delta.finish_reason is not None or delta.error is not None:
                self._finish(request)
        return deltas

    def _finish(self, request: Request) -> None:
        """Remove a sequence for good, with all that it holds."""
        _remove(self._running if request.status is Status.RUNNING else self._waiting, request)
        request.status = Status.FINISHED
        self._take_back(request)
        for gate in self._gates:
            gate.forget(request)
        del self._requests[request.request_id]
        if request.group is not None:
            siblings = self._siblings[request.group]
            siblings.remove(request)
            if not siblings:
                del self._siblings[request.group]

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, counts, queues and maps agree."""
        self.pool.check_integrity(request.blocks for request in self._running)
        self.prefix_cache.check_integrity()
        assert all(not request.blocks for request in self._waiting), "a waiting sequence holds blocks"
        assert set(self._requests.values()) == {*self._waiting, *self._running}
        for queue in (self._waiting, self._running):
            assert queue == sorted(queue, key=_order)
        grouped = {request for siblings in self._siblings.values() for request in siblings}
        assert grouped == {request for request in self._requests.values() if request.group is not None}
