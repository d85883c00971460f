"""Limits of tenants and keys, enforced before a request reaches the engine.

Everything is counted in memory; budgets start with what the ledger says. Servers that count together do the same
in turns: one takes the counts of all from the database, continues with them, and writes them back (`shared_counts.py`).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Literal, TypeVar

from ...core.errors import OutriderError, RateLimitError
from ..accounts.principal import Principal
from .buckets import SECOND, Charge, RateBucket
from .budgets import Budget
from .counts import CountTable
from .demand import Demand, fit
from .queue_bound import QueueBound
from .scopes import Clock, ReadUsage, Scope, ScopeTable
from .shared_counts import LEASE_SECONDS, CommonClock, SharedTurns
from .slots import Claim, Slots

T = TypeVar("T")

READ_AGAIN_SECONDS = 60.0
"""Seconds after which a budget's use is read from the ledger again: other servers may write into the same one."""
QUEUE_RETRY_SECONDS = 1.0
"""`Retry-After` of a full queue, in seconds: it is unknown how long the requests before take."""

Reason = Literal["requests_per_minute", "tokens_per_minute", "token_budget", "max_queued_requests"]
"""Reason of a refusal: the limit's name, which is the error's `param`."""


class Ticket:
    """An admitted request's share of the limits."""

    def __init__(self, principal: Principal, demand: Demand, max_tokens: list[int], scopes: Sequence[Scope]) -> None:
        self.principal = principal
        self.max_tokens = max_tokens
        """`max_tokens` of each prompt."""
        self.num_sequences = demand.num_sequences
        self.num_tokens = demand.num_tokens(max_tokens)
        self.scopes = scopes
        self.since = 0
        """Time of the admission, in nanoseconds of the limiter's clock."""
        self.waiting = ExitStack()
        """Its count among the requests that wait for slots; closing it takes it out of the count."""
        self.is_open = True
        self._claims: list[tuple[Slots, Claim]] = []
        self._requests: list[tuple[RateBucket, Charge]] = []
        self._tokens: list[tuple[RateBucket, Charge]] = []
        self._budgets: list[Budget] = []

    def charge(self, now: int, key: str) -> None:
        """Take from every bucket and budget; `key` as in `Charge`."""
        self.since = now
        for scope in self.scopes:
            if scope.requests is not None:
                self._requests.append((scope.requests, scope.requests.charge(self.num_sequences, now, key)))
            if scope.tokens is not None:
                self._tokens.append((scope.tokens, scope.tokens.charge(self.num_tokens, now, key)))
            if scope.budget is not None:
                scope.budget.reserved += self.num_tokens
                self._budgets.append(scope.budget)

    @property
    def has_slots(self) -> bool:
        """True when it waits for none."""
        return len(self._claims) == len(self.scopes) and all(claim.is_held for _, claim in self._claims)

    def claim_slots(self) -> None:
        """Claim the slots that it does not have yet, the key's first and then the tenant's: all claim them in this
        order, one after another, so none waits for another in a circle."""
        for scope in list(reversed(self.scopes))[len(self._claims) :]:
            claim = scope.slots.claim(self.num_sequences, self.since)
            self._claims.append((scope.slots, claim))
            if not claim.is_held:
                break

    async def take_slots(self) -> None:
        """Wait for all slots."""
        with self.waiting:
            while not self.has_slots:
                await self._claims[-1][1].granted
                self.claim_slots()

    def settle(self, used_tokens: int, clock: Clock, *, ended_at: float, ran: bool) -> None:
        """Leave the slots, and give back the unused tokens, and the request too if it never `ran`."""
        self.waiting.close()
        for slots, claim in self._claims:
            slots.leave(claim)
        now = clock.monotonic_ns()
        for bucket, charge in self._tokens:
            bucket.give_back(charge, max(0, self.num_tokens - used_tokens), now)
        if not ran:
            for bucket, charge in self._requests:
                bucket.give_back(charge, self.num_sequences, now)
        for budget in self._budgets:
            budget.roll(clock.time())
            budget.reserved -= self.num_tokens
            budget.count(used_tokens, ended_at)
        for _, charge in (*self._requests, *self._tokens):
            charge.key = ""


class Limiter:
    """The limits of one server. Belongs to its event loop."""

    def __init__(
        self,
        read_usage: ReadUsage,
        clock: Clock = time,
        table: CountTable | None = None,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """With a `table` the limits hold for all servers that have the same one; `lease_seconds`: see `SharedTurns`."""
        self._read_usage = read_usage
        common = None if table is None else CommonClock(clock)
        self._own_clock, self._clock = clock, common or clock
        self.queue = QueueBound()
        """Queue of the server; the owner of the engine sets its `bounds`."""
        self._scopes = ScopeTable(self._clock)
        self._refuses_waiting: OutriderError | None = None
        self._turns = None
        if table is not None and common is not None:
            self._turns = SharedTurns(table, self._scopes, common, lease_seconds)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one of their tenant's or key's slots."""
        return self.queue.num_for_slots

    async def admit(self, principal: Principal, demand: Demand) -> Ticket:
        """Admit a request: at once, or when its tenant and key have slots for it. A request that is cancelled
        meanwhile has used nothing. The ticket must be given to `release`.

        Raises:
            InvalidRequestError: the request is larger than a limit will ever allow.
            RateLimitError: it is over a limit now; `retry_after` says for how long.
            OverloadedError: it would have to wait, for a slot or in the engine, and too many do.
            OutriderError: a budget's use is not known and cannot be read; or the server refuses those who wait.
        """
        while True:
            granted = await self._counted(principal, lambda: self._grant(principal, demand))
            if isinstance(granted, Ticket):
                break
            await granted.read(
                self._read_usage, self._clock, self._own_clock.time(), functools.partial(self._counted, principal)
            )
        try:
            if self._refuses_waiting is not None and not granted.has_slots:
                raise self._refuses_waiting
            await granted.take_slots()
        except BaseException:
            self.release(granted, 0, ran=False)
            raise
        return granted

    def _grant(self, principal: Principal, demand: Demand) -> Ticket | Scope:
        """A ticket with all that the request needs, but for slots that it must wait for; or a scope whose used budget
        is not known yet. Errors: see `admit`."""
        scopes = self._scopes.of(principal)
        for scope in scopes:
            if self._is_unread(principal, scope):
                return scope
        budgets = [scope.budget.remaining for scope in scopes if scope.budget is not None]
        max_tokens = fit(demand, [scope.limits for scope in scopes], min(budgets, default=None))
        ticket = Ticket(principal, demand, max_tokens, scopes)
        waits = self._check(principal, ticket)
        ticket.charge(self._clock.monotonic_ns(), "" if self._turns is None else self._turns.new_key())
        ticket.claim_slots()  # now, and not when the request's task resumes: others may come before that
        if waits:
            ticket.waiting.enter_context(self.queue.wait_for_slots(ticket.num_sequences))
            for scope in scopes:
                ticket.waiting.enter_context(scope.wait(ticket.num_sequences))
        return ticket

    def release(self, ticket: Ticket, used_tokens: int, *, ended_at: float | None = None, ran: bool = True) -> None:
        """Release a ticket: the request has ended, or (not `ran`) never reached the engine. A second call does
        nothing.

        Args:
            ended_at: `finished_at` of its row in the ledger; None: now.
        """
        if not ticket.is_open:
            return
        ticket.is_open = False
        if ended_at is None:
            ended_at = self._own_clock.time()
        settle = functools.partial(ticket.settle, used_tokens, self._clock, ended_at=ended_at, ran=ran)
        if self._turns is None or not ticket.scopes:
            settle()
        else:
            self._turns.do(ticket.principal, settle)

    def has_slot(self, principal: Principal) -> bool:
        """False if one more sequence of the principal would have to wait for a slot, as far as this server knows."""
        slots = [scope.slots for scope in self._scopes.of(principal)]
        return not any(p.num_waiting or (p.is_known and not p.has_room(1)) for p in slots)

    def check_call(self, principal: Principal) -> None:
        """Refuse, before anything costly is done for it, a request that `admit` would refuse.

        Raises:
            RateLimitError: there are no more requests this minute.
        """
        self._scopes.forget_idle()
        self._check_requests(principal)

    def _check_requests(self, principal: Principal) -> list[Scope]:
        scopes = self._scopes.of(principal)
        for scope in scopes:
            self._check_rate(principal, scope, "requests_per_minute", 1)
        return scopes

    async def charge_call(self, principal: Principal) -> None:
        """Count a call that generates nothing, such as tokenizing, as a request. Errors: see `check_call`."""

        def charge() -> None:
            now = self._clock.monotonic_ns()
            for scope in self._check_requests(principal):
                if scope.requests is not None:
                    scope.requests.charge(1, now)

        await self._counted(principal, charge)

    def change_limits(self, principals: Iterable[Principal]) -> None:
        """Hold new limits, of all keys that there are, for requests that wait: there may be slots for them now."""
        waiting = {scope.tenant for scope in self._scopes.all() if scope.num_waiting}
        for principal in principals:
            if principal.tenant in waiting:
                self._scopes.of(principal)

    def refuse_waiting(self, error: OutriderError) -> None:
        """Fail all that wait for slots: the server is shutting down."""
        self._refuses_waiting = error
        for scope in self._scopes.all():
            scope.slots.refuse_waiting(error)

    async def close(self) -> None:
        """Bring the last counts to the database. Nothing is admitted or released afterwards."""
        if self._turns is not None:
            await self._turns.close()

    def headers(self, principal: Principal) -> dict[str, str]:
        """OpenAI's `x-ratelimit-*`: of the tenant's and the key's limits the one with less left; none without."""
        now = self._clock.monotonic_ns()
        result = {}
        scopes = self._scopes.of(principal)
        for name in ("requests", "tokens"):
            buckets = [bucket for scope in scopes if (bucket := getattr(scope, name)) is not None]
            if buckets:
                tightest: RateBucket = min(buckets, key=lambda bucket: bucket.remaining(now))
                result[f"x-ratelimit-limit-{name}"] = str(tightest.limit)
                result[f"x-ratelimit-remaining-{name}"] = str(tightest.remaining(now))
                result[f"x-ratelimit-reset-{name}"] = shown_duration(tightest.reset(now))
        return result

    # --- counts ---

    async def _counted(self, principal: Principal, work: Callable[[], T]) -> T:
        """Do `work`, which waits for nothing, with the counts of all servers; at once if this one counts alone or
        there are no limits. A ticket that it made for a request cancelled meanwhile is released."""
        self._scopes.forget_idle()
        if self._turns is None or not self._scopes.of(principal):
            return work()
        done = self._turns.do(principal, work)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            done.add_done_callback(self._take_back)
            raise

    def _take_back(self, done: asyncio.Future[T]) -> None:
        if not done.cancelled() and done.exception() is None and isinstance(ticket := done.result(), Ticket):
            self.release(ticket, 0, ran=False)

    def _is_unread(self, principal: Principal, scope: Scope) -> bool:
        budget = scope.budget
        if budget is None:
            return False
        budget.roll(self._clock.time())
        if budget.read_at is not None and self._clock.monotonic_ns() / SECOND - budget.read_at > READ_AGAIN_SECONDS:
            scope.read_in_background(
                self._read_usage, self._clock, self._own_clock.time(), functools.partial(self._counted, principal)
            )
        return budget.read_at is None

    # --- checks ---

    def _check(self, principal: Principal, ticket: Ticket) -> bool:
        """Check all but the size of the request; returns True when it has to wait for slots."""
        for scope in ticket.scopes:
            self._check_budget(principal, scope, ticket.num_tokens)
            self._check_rate(principal, scope, "requests_per_minute", ticket.num_sequences)
            self._check_rate(principal, scope, "tokens_per_minute", ticket.num_tokens)
        if all(scope.slots.has_room(ticket.num_sequences) for scope in ticket.scopes):
            self.queue.check(ticket.num_sequences)
            return False
        for scope in ticket.scopes:
            most = scope.limits.max_queued_requests
            num_waiting = scope.num_waiting + scope.num_waiting_elsewhere
            if most is not None and num_waiting + ticket.num_sequences > most:
                raise self._refusal(
                    principal,
                    "max_queued_requests",
                    f"{scope.description} runs as many requests as it may, and {num_waiting} wait; "
                    f"max_queued_requests is {most}",
                    QUEUE_RETRY_SECONDS,
                )
        self.queue.check(ticket.num_sequences, for_slots=True)
        return True

    def _check_budget(self, principal: Principal, scope: Scope, tokens: int) -> None:
        budget = scope.budget
        if budget is None or tokens <= budget.remaining:
            return
        fits_later = budget.used + tokens <= budget.limit  # when running requests give back what they do not use
        raise self._refusal(
            principal,
            "token_budget",
            f"{scope.description} has used {budget.used} tokens of this {budget.period}, running requests reserve "
            f"{budget.reserved + budget.reserved_elsewhere}, and this one may need {tokens}; "
            f"token_budget is {budget.limit}",
            QUEUE_RETRY_SECONDS if fits_later else budget.end - self._clock.time(),
        )

    def _check_rate(self, principal: Principal, scope: Scope, reason: Reason, amount: int) -> None:
        bucket = scope.requests if reason == "requests_per_minute" else scope.tokens
        if bucket is None:
            return
        now = self._clock.monotonic_ns()
        wait = bucket.wait_for(amount, now)
        if wait:
            raise self._refusal(
                principal,
                reason,
                f"{scope.description} is over its limit: {reason} is {bucket.limit}, {bucket.remaining(now)} are left "
                f"and {amount} needed; try again in {shown_duration(wait)}",
                wait / SECOND,
            )

    def _refusal(self, principal: Principal, reason: Reason, message: str, retry_after: float) -> RateLimitError:
        code = "insufficient_quota" if reason == "token_budget" else "rate_limit_exceeded"
        headers = self.headers(principal)
        return RateLimitError(message, param=reason, retry_after=retry_after, code=code, headers=headers)


def shown_duration(nanoseconds: int) -> str:
    """Duration as OpenAI's headers write it: "12ms", "1.5s", "6m0s"; never shorter than it is."""
    milliseconds = -(-nanoseconds // 10**6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
