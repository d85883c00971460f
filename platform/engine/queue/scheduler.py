"""The scheduler: it plans each step, and applies the results to the sequences.

There are no phases. A sequence is a row of tokens of which a prefix has been computed; a step computes some more of
each. A prompt chunk, a decode and the verification of k drafts differ only in their counts.

A step may be planned while another one runs (`launched`): a token that is being sampled already has a position, and
only the device knows it (`RowPlan.awaits_token`). Drafts that are being verified count as right, with blocks for that
case. Anything that depends on the token, or preempts a sequence in flight, waits for the commit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

from ...core.batch import RowPlan, StepPlan, StepResult
from ...core.config import SchedulerConfig
from ...core.errors import ErrorInfo, OutriderError
from ...core.messages import TokenDelta
from ...core.request import NO_DRAFTS, Request, Status
from ..memory.block_pool import BlockPool
from ..memory.prefix_cache import PrefixCache
from .gates import DraftChooser, DraftLimits, Gate
from .outcome import accept, ends_after
from .prompt_throttle import PromptThrottle
from .request_queue import POLICIES, RequestQueue
from .row_choices import can_overlap_next, decode_row, row_choices
from .siblings import Siblings
from .step_budget import StepBudget, draft_budget

PREFETCHED = 16  # waiting sequences for which gates may prepare while the batch is full


class Scheduler:
    """Owns the queue, the running set and every request's blocks. `schedule` and `commit` alternate."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        prefix_cache: PrefixCache,
        gates: Sequence[Gate] = (),
        drafts: DraftLimits | None = None,
        chooser: DraftChooser | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.num_preemptions = 0
        self._gates = gates
        self._draft_limits = drafts or DraftLimits()
        self._chooser = chooser
        policy = POLICIES[config.policy]
        self._queue = RequestQueue(policy, config.fair, config.max_num_batched_tokens)
        self._is_metered = policy.by_tenant
        self._throttle = PromptThrottle() if config.prompt_pacing else None
        self._requests: dict[str, Request] = {}
        self._siblings = Siblings(config.max_num_seqs, prefix_cache.block_size)
        self._reasons: dict[str, str] = {}
        self._ended: list[TokenDelta] = []
        self._leaving: set[Request] = set()  # finished, with rows in flight that write their blocks
        self._needs_commit = False  # the last plan is short of something that a sequence in flight holds

    # ------------------------------------------------------------------ queue

    @property
    def running(self) -> Sequence[Request]:
        """Admitted sequences, most urgent first. Read only."""
        return self._queue.running

    @property
    def waiting(self) -> Sequence[Request]:
        """Queued sequences, most urgent first. Read only."""
        return self._queue.waiting

    @property
    def num_running(self) -> int:
        """Admitted sequences."""
        return self._queue.num_running

    @property
    def num_waiting(self) -> int:
        """Queued sequences."""
        return self._queue.num_waiting

    def waiting_by_reason(self) -> dict[str, int]:
        """Number of queued sequences by the reason in the last step; "capacity" if only room is missing."""
        reasons: dict[str, int] = {}
        for request in self._queue.waiting:
            reason = self._reasons.get(request.request_id, "capacity")
            reasons[reason] = reasons.get(reason, 0) + 1
        return reasons

    def has_work(self) -> bool:
        """True if any sequence is unfinished, or an error is still to be returned."""
        return bool(self._requests or self._ended or self._leaving)

    @property
    def has_ended(self) -> bool:
        """True if the ends of sequences are still to be returned, by `commit`."""
        return bool(self._ended)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: Request) -> None:
        """Queue a new sequence."""
        self._queue.add(request)
        self._requests[request.request_id] = request
        self._siblings.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort these sequences and free their resources; unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request)

    def end(self, request_ids: Iterable[str], error: ErrorInfo | None = None) -> None:
        """End these sequences: the next step's deltas have this error, or without one the finish reason "abort"."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                reason = "abort" if error is None else None
                self._ended.append(TokenDelta(request_id, finish_reason=reason, error=error))
                self._finish(request)

    # --------------------------------------------------------------- schedule

    def launched(self, plan: StepPlan) -> None:
        """`plan` is in flight: the next step may be planned before it is committed."""
        for row in plan.rows:
            row.request.in_flight.append(row)

    def can_plan_next(self, plan: StepPlan) -> bool:
        """True if the next step can be planned while `plan` is in flight; False if an in-flight sequence must be
        preempted first."""
        return plan.can_overlap_next and not self._needs_commit

    def abandon(self) -> None:
        """Discard in-flight steps; their rows are scheduled again, from the first token if the cache may be wrong."""
        for request in self._queue.running:
            request.in_flight.clear()
        while self._leaving:
            self._let_go(self._leaving.pop())
        if not self.prefix_cache.outlives_failures:
            self.drop_kv()

    def drop_kv(self) -> None:
        """Preempt all running sequences and empty the prefix cache. Nothing may be in flight."""
        for request in list(self._queue.running):
            self._preempt(request)
        self.prefix_cache.reset()

    def forget_kv(self) -> None:
        """Let no sequence find the KV of now. Running ones go on with theirs, and publish none of it until they have
        been preempted. Nothing may be in flight."""
        for request in self._queue.running:
            request.namespace = None
        self.prefix_cache.reset(with_used=True)

    def schedule(self) -> StepPlan:
        """Plan a step under the token budget: first running sequences with one token to compute, and drafts; then
        running and waiting prompts with the rest, each in the policy's order."""
        step = StepBudget(self.config.max_num_batched_tokens, self._draft_budget())
        prompts: deque[Request] = deque()
        self._needs_commit = False
        for request in list(self._queue.running):
            if request.in_flight and ends_after(request, self.config.max_model_len):
                continue
            if request.num_unplanned > 1:
                prompts.append(request)
            elif not step.was_short or request.status is Status.RUNNING:
                self._plan_row(request, step)
        if self._throttle is not None:
            num_seats = self.config.max_num_seqs - self._queue.num_running
            self._throttle.apply(step, len(prompts) + self._queue.num_wanted(num_seats))
        self._admit(step, prompts)
        while prompts:
            self._plan_prompt(prompts.popleft(), step)
        rows = list(step.rows.values())
        if rows and self._chooser is not None:
            self._chooser.choose(rows, requests_wait=self._queue.num_waiting > 0)
        self.prefix_cache.plan(rows)
        return StepPlan(rows, can_overlap_next(rows, self._draft_limits), self.prefix_cache.moves() if rows else ())

    def _draft_budget(self) -> int:
        """Tokens of the next step that drafts may take."""
        is_off = self._chooser is not None and self._chooser.plans_no_drafts
        return 0 if is_off else draft_budget(self._draft_limits, self.config, self._queue)

    def _plan_prompt(self, request: Request, step: StepBudget) -> None:
        """`_plan_row`, for a sequence that may have been preempted meanwhile, and even have started again."""
        if request.status is Status.RUNNING and request not in step.rows:
            self._plan_row(request, step)

    def _plan_row(self, request: Request, step: StepBudget) -> None:
        """Add the row of a running sequence, with blocks for it; preempts less urgent ones if needed, or itself."""
        while (budget := step.left_for(request, self._queue)) > 0:
            share = step.for_drafts
            if share:  # else nothing to divide, as without a drafter
                share //= self._queue.num_running - len(step.rows)
            row = self._fit(request, budget, share)
            if row is not None:
                step.add(row)
                return
            step.was_short = True
            victim = self._queue.least_urgent()
            if self._is_in_flight(victim):
                step.num_left = 0  # less urgent ones must not come first
                return
            self._preempt(victim, step)
            if victim is request:
                return

    def _fit(self, request: Request, budget: int, draft_share: int) -> RowPlan | None:
        """The largest row that budget, `draft_share` and free blocks allow: see `row_choices`."""
        if not draft_share and (decode := decode_row(request, self.prefix_cache.block_size)) is not None:
            return decode
        for row, extra in row_choices(request, budget, draft_share, self._draft_limits, self.config.max_model_len):
            if self.pool.grow(request.blocks, -(-(row.end + extra) // self.prefix_cache.block_size)):
                if not row.awaits_token:
                    request.drafts = request.drafts.truncated(row.num_drafts) if row.num_drafts else NO_DRAFTS
                return row
        return None

    def _is_in_flight(self, victim: Request) -> bool:
        """True when this sequence cannot be preempted now: a step in flight computes it. After that step it can."""
        self._needs_commit |= bool(victim.in_flight)
        return bool(victim.in_flight)

    def _preempt(self, request: Request, step: StepBudget | None = None) -> None:
        """Preempt a running sequence; it is computed again later, unless the prefix cache still has its blocks."""
        if step is not None:
            step.drop(request)
        self._release(request)
        self.num_preemptions += 1
        request.num_preemptions += 1
        request.status = Status.WAITING
        self._siblings.stop(request)
        self._queue.stop(request)

    def _release(self, request: Request) -> None:
        """Free all that a sequence holds; it takes it again later."""
        self._take_back(request)
        for gate in self._gates:
            gate.release(request)

    def _take_back(self, request: Request) -> None:
        """Free the request's blocks: none of its tokens are computed any more."""
        self.prefix_cache.take_back(request)
        request.drafts = NO_DRAFTS
        request.prompt_logprobs = request.pooled = None

    # -------------------------------------------------------------- admission

    def _admit(self, step: StepBudget, prompts: deque[Request]) -> None:
        """Start waiting sequences; those less urgent than a running one of `prompts` come after it. A sequence that
        waits for its own gate lets others pass; one that waits for room does not."""
        self._reasons.clear()
        for request in self._queue.candidates():
            while prompts and prompts[0].order < request.order:
                self._plan_prompt(prompts.popleft(), step)
            if step.was_short:
                return
            is_full = self._queue.num_running >= self.config.max_num_seqs
            victim = self._queue.displaced_by(request) if is_full else None
            held = step.num_left - step.left_for(request, self._queue)
            if step.num_left <= held or (is_full and victim is None):
                self._prefetch()
                return
            if victim is not None and self._is_in_flight(victim):
                return
            try:
                reason = self._blocked(request)
            except OutriderError as error:
                self._ended.append(TokenDelta(request.request_id, error=error.info()))
                self._finish(request)
                continue
            if reason is not None:
                self._reasons[request.request_id] = reason
                continue
            if victim is not None:
                self._preempt(victim, step)
            row = self._start(request, step, held)
            if row is None:
                self._release(request)
                return
            step.add(row)

    def _prefetch(self) -> None:
        """Let the gates prepare for the next few sequences."""
        for request in self._queue.upcoming(PREFETCHED):
            for gate in self._gates:
                gate.prefetch(request)

    def _blocked(self, request: Request) -> str | None:
        """The gate's reason why a request cannot start; None once it holds everything but blocks. A gate's error is
        raised: the request has failed."""
        if self._siblings.block(request):
            return "group"
        for index, gate in enumerate(self._gates):
            reason = gate.admit(request)
            if reason is not None:
                for taken in self._gates[:index]:
                    taken.release(request)
                return reason
        return None

    def _start(self, request: Request, step: StepBudget, held: int) -> RowPlan | None:
        """Start a request, after its cached prefix; returns its first row, or None if there is no room now."""
        self.prefix_cache.start(request)
        uncomputed = len(request.tokens) - request.num_computed_tokens
        if uncomputed > step.num_left - held and not self.config.enable_chunked_prefill:
            return None
        # Admitting a prompt of which only a part fits would only preempt it again a few steps later.
        whole = -(-(len(request.tokens) + 1) // self.prefix_cache.block_size) - len(request.blocks)
        while whole > self.pool.num_free and self._queue.num_running:
            victim = self._queue.displaced_by(request)
            if victim is None or self._is_in_flight(victim):
                return None
            self._preempt(victim, step)
        self.prefix_cache.bring_back(request)
        if is_new := request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
        share = step.for_drafts and self._draft_budget() // (self._queue.num_running + 1)
        row = self._fit(request, step.num_left - held, share)
        if row is not None:
            self.prefix_cache.count(request, row.start)
            self._queue.start(request, request.num_prompt_tokens - request.num_computed_tokens if is_new else 0)
            request.status = Status.RUNNING
            if is_new and request.arrival_time:
                request.queue_seconds = max(0.0, time.monotonic() - request.arrival_time)
            self._siblings.start(request)
        return row

    # ----------------------------------------------------------------- commit

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenDelta]:
        """Apply a step's results to the sequences. The only method that adds tokens; `num_computed_tokens` also changes
        when a sequence starts, and when it is preempted."""
        deltas, self._ended = self._ended, []
        for row, got in zip(plan.rows, result.rows, strict=True):
            request = row.request
            request.retire_row(row)
            if request.status is not Status.RUNNING:  # aborted meanwhile, or ended by the step before
                if request in self._leaving and not request.in_flight:
                    self._let_go(request)
                continue
            delta = accept(row, got, self.config.max_model_len)
            if got.error is None:  # else its rows in flight are dropped, and may still be read
                request.rebase_in_flight()
            self.prefix_cache.commit(row)
            if delta is None:
                continue
            if self._is_metered:
                self._queue.charge(request, len(delta.token_ids), row.num_drafts - got.num_accepted)
            deltas.append(delta)
            if delta.finish_reason is not None or delta.error is not None:
                self._finish(request)
        return deltas

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Observe the time of a step, drafting included."""
        if self._throttle is not None:
            self._throttle.observe(plan, seconds)
        self.prefix_cache.observe(plan, seconds)

    def _finish(self, request: Request) -> None:
        """Remove a sequence and free all that it holds."""
        self._queue.remove(request, running=request.status is Status.RUNNING)
        if request.status is Status.RUNNING:
            self._siblings.stop(request)
        request.status = Status.FINISHED
        del self._requests[request.request_id]
        self._siblings.remove(request)
        if request.in_flight:
            self._leaving.add(request)
        else:
            self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Free what a finished sequence holds: no step writes it any more."""
        self._leaving.discard(request)
        request.in_flight.clear()
        self.prefix_cache.finish(request, has_siblings=request.group in self._siblings)
        for gate in self._gates:
            gate.forget(request)

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, counts, queues and maps agree."""
        running, waiting = self._queue.running, self._queue.waiting
        self.pool.check_integrity(request.blocks for request in (*running, *self._leaving))
        self.prefix_cache.check_integrity()
        assert not any(request.blocks or request.in_flight for request in waiting), "a waiting sequence holds blocks"
        assert all(request.in_flight for request in self._leaving), "a finished sequence holds blocks"
        assert set(self._requests.values()) == {*waiting, *running}
        self._queue.check_integrity()
        self._siblings.check_integrity(running, self._requests.values())
