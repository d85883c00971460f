"""Limits of tenants and keys, enforced before a request reaches the engine.

Everything is counted by this server alone, in memory; only budgets begin with what the ledger says.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from typing import Literal, Protocol

from ...core.errors import OutriderError, RateLimitError
from ..accounts.principal import NO_LIMITS, Principal
from .buckets import SECOND, Charge, RateBucket
from .budgets import Budget
from .demand import Demand, fit
from .queue_bound import QueueBound
from .scopes import ReadUsage, Scope

READ_AGAIN_SECONDS = 60.0
"""Seconds after which a budget's use is read from the ledger again: other servers may write into the same one."""
QUEUE_RETRY_SECONDS = 1.0
"""`Retry-After` of a full queue, in seconds: nobody knows how long the requests before take."""

Reason = Literal["requests_per_minute", "tokens_per_minute", "token_budget", "max_queued_requests"]
"""Reason of a refusal: the limit's name, which is the error's `param`."""


class Clock(Protocol):
    """Source of time: intervals from a clock that never goes back, periods from the calendar."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since some moment."""

    def time(self) -> float:
        """Seconds since the epoch."""


class Ticket:
    """An admitted request's share of the limits."""

    def __init__(self, demand: Demand, max_tokens: list[int], scopes: Sequence[Scope]) -> None:
        self.max_tokens = max_tokens
        """`max_tokens` of each prompt."""
        self.num_sequences = demand.num_sequences
        self.num_tokens = demand.num_tokens(max_tokens)
        self.scopes = scopes
        self._requests: list[tuple[RateBucket, Charge]] = []
        self._tokens: list[tuple[RateBucket, Charge]] = []
        self._budgets: list[Budget] = []
        self._open = False

    def charge(self, now: int) -> None:
        """Take from every bucket and budget."""
        for scope in self.scopes:
            if scope.requests is not None:
                self._requests.append((scope.requests, scope.requests.charge(self.num_sequences, now)))
            if scope.tokens is not None:
                self._tokens.append((scope.tokens, scope.tokens.charge(self.num_tokens, now)))
            if scope.budget is not None:
                scope.budget.reserved += self.num_tokens
                self._budgets.append(scope.budget)
        self._open = True

    def settle(self, used_tokens: int, clock: Clock, *, ran: bool) -> bool:
        """Give back the unused tokens, and the request too if it never `ran`. Returns False, and does nothing, the
        second time."""
        if not self._open:
            return False
        self._open = False
        now = clock.monotonic_ns()
        for bucket, charge in self._tokens:
            bucket.give_back(charge, max(0, self.num_tokens - used_tokens), now)
        if not ran:
            for bucket, charge in self._requests:
                bucket.give_back(charge, self.num_sequences, now)
        for budget in self._budgets:
            budget.roll(clock.time())
            budget.reserved -= self.num_tokens
            budget.since += used_tokens
        return True


class Limiter:
    """The limits of one server. Belongs to its event loop."""

    def __init__(self, read_usage: ReadUsage, clock: Clock = time) -> None:
        self._read_usage = read_usage
        self._clock = clock
        self.queue = QueueBound()
        """Queue of the server; the owner of the engine sets its `bounds`."""
        self._scopes: dict[tuple[str, str], Scope] = {}
        self._num_kept = 1000  # scopes after which idle ones are looked for

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one of their tenant's or key's places."""
        return self.queue.num_for_places

    async def admit(self, principal: Principal, demand: Demand, max_model_len: int) -> Ticket:
        """Admit a request: at once, or when its tenant and key have places for it. A request that is cancelled
        meanwhile has used nothing. The ticket must be given to `release`.

        Raises:
            InvalidRequestError: the request is larger than a limit will ever allow.
            RateLimitError: it is over a limit now; `retry_after` says for how long.
            OverloadedError: it would have to wait, for a place or in the engine, and too many do.
            OutriderError: a budget's use is not known and cannot be read; or the server refuses those who wait.
        """
        scopes = await self._prepared(principal)
        # Nothing waits from here to the charge: either all of it is granted, or nothing.
        budgets = [scope.budget.remaining for scope in scopes if scope.budget is not None]
        max_tokens = fit(demand, [scope.limits for scope in scopes], max_model_len, min(budgets, default=None))
        ticket = Ticket(demand, max_tokens, scopes)
        self._check(principal, ticket)
        ticket.charge(self._clock.monotonic_ns())
        try:
            await self._take_places(ticket)
        except BaseException:
            ticket.settle(0, self._clock, ran=False)
            raise
        return ticket

    def release(self, ticket: Ticket, used_tokens: int, *, ran: bool = True) -> None:
        """Release a ticket: the request has ended, or (not `ran`) never reached the engine. A second call does
        nothing."""
        if ticket.settle(used_tokens, self._clock, ran=ran):
            for scope in ticket.scopes:
                scope.places.leave(ticket.num_sequences)

    def check_call(self, principal: Principal) -> list[Scope]:
        """Refuse, before anything costly is done for it, a request that `admit` would refuse. Returns the scopes.

        Raises:
            RateLimitError: there are no more requests this minute.
        """
        scopes = self._scopes_of(principal)
        for scope in scopes:
            self._check_rate(principal, scope, "requests_per_minute", 1)
        return scopes

    def charge_call(self, principal: Principal) -> None:
        """Count a call that generates nothing, such as tokenizing, as a request. Errors: see `check_call`."""
        now = self._clock.monotonic_ns()
        for scope in self.check_call(principal):
            if scope.requests is not None:
                scope.requests.charge(1, now)

    def refuse_waiting(self, error: OutriderError) -> None:
        """Fail all that wait for places: the server is shutting down."""
        for scope in self._scopes.values():
            scope.places.refuse_waiting(error)

    def headers(self, principal: Principal) -> dict[str, str]:
        """OpenAI's `x-ratelimit-*`: of the tenant's and the key's limits the one with less left; none without."""
        now = self._clock.monotonic_ns()
        result = {}
        scopes = self._scopes_of(principal)
        for name in ("requests", "tokens"):
            buckets = [bucket for scope in scopes if (bucket := getattr(scope, name)) is not None]
            if buckets:
                tightest: RateBucket = min(buckets, key=lambda bucket: bucket.remaining(now))
                result[f"x-ratelimit-limit-{name}"] = str(tightest.limit)
                result[f"x-ratelimit-remaining-{name}"] = str(tightest.remaining(now))
                result[f"x-ratelimit-reset-{name}"] = shown_duration(tightest.reset(now))
        return result

    # --- scopes ---

    def _scopes_of(self, principal: Principal) -> list[Scope]:
        """The tenant's and the key's, as far as they have limits, with the limits of now: a principal of before the
        latest change, such as that of a request which runs long, does not bring the old ones back."""
        self._forget_idle()  # before any is looked up
        scopes = []
        for key_id, limits in (("", principal.tenant_limits), (principal.key_id, principal.key_limits)):
            name = (principal.tenant, key_id)
            scope = self._scopes.get(name)
            if scope is None:
                if limits == NO_LIMITS:
                    continue
                scope = self._scopes[name] = Scope(principal.tenant, key_id)
            if principal.reading >= scope.reading:
                scope.reading = principal.reading
                if scope.limits is not limits:
                    scope.set_limits(limits, self._clock.monotonic_ns(), self._clock.time())
            scopes.append(scope)
        return scopes

    def _forget_idle(self) -> None:
        if len(self._scopes) >= self._num_kept:
            now = self._clock.monotonic_ns()
            self._scopes = {name: scope for name, scope in self._scopes.items() if not scope.is_idle(now)}
            self._num_kept = max(1000, 2 * len(self._scopes))

    async def _prepared(self, principal: Principal) -> list[Scope]:
        """The scopes once it is known what has been used of their budgets. Looked up again after each wait, in which
        limits may change, a period may end, and scopes that nobody uses may be forgotten."""
        while True:
            scopes = self._scopes_of(principal)
            unread = [scope for scope in scopes if self._is_unread(scope)]
            if not unread:
                return scopes
            await unread[0].read(self._read_usage, self._seconds)

    def _is_unread(self, scope: Scope) -> bool:
        budget = scope.budget
        if budget is None:
            return False
        budget.roll(self._clock.time())
        if budget.read_at is not None and self._seconds() - budget.read_at > READ_AGAIN_SECONDS:
            scope.read_in_background(self._read_usage, self._seconds)
        return budget.read_at is None

    def _seconds(self) -> float:
        return self._clock.monotonic_ns() / SECOND

    # --- checks ---

    def _check(self, principal: Principal, ticket: Ticket) -> None:
        for scope in ticket.scopes:
            self._check_budget(principal, scope, ticket.num_tokens)
            self._check_rate(principal, scope, "requests_per_minute", ticket.num_sequences)
            self._check_rate(principal, scope, "tokens_per_minute", ticket.num_tokens)
        if all(scope.places.has_room(ticket.num_sequences) for scope in ticket.scopes):
            self.queue.check(ticket.num_sequences)
            return
        for scope in ticket.scopes:
            most = scope.limits.max_queued_requests
            if most is not None and scope.num_waiting + ticket.num_sequences > most:
                raise self._refusal(
                    principal,
                    "max_queued_requests",
                    f"{scope.shown} runs as many requests as it may, and {scope.num_waiting} wait; "
                    f"max_queued_requests is {most}",
                    QUEUE_RETRY_SECONDS,
                )
        self.queue.check(ticket.num_sequences, for_places=True)

    def _check_budget(self, principal: Principal, scope: Scope, tokens: int) -> None:
        budget = scope.budget
        if budget is None or tokens <= budget.remaining:
            return
        fits_later = budget.used + tokens <= budget.limit  # when running requests give back what they do not use
        raise self._refusal(
            principal,
            "token_budget",
            f"{scope.shown} has used {budget.used} tokens of this {budget.period}, running requests reserve "
            f"{budget.reserved}, and this one may need {tokens}; token_budget is {budget.limit}",
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
                f"{scope.shown} is over its limit: {reason} is {bucket.limit}, {bucket.remaining(now)} are left and "
                f"{amount} needed; try again in {shown_duration(wait)}",
                wait / SECOND,
            )

    def _refusal(self, principal: Principal, reason: Reason, message: str, retry_after: float) -> RateLimitError:
        code = "insufficient_quota" if reason == "token_budget" else "rate_limit_exceeded"
        headers = self.headers(principal)
        return RateLimitError(message, param=reason, retry_after=retry_after, code=code, headers=headers)

    # --- places ---

    async def _take_places(self, ticket: Ticket) -> None:
        """The key's first, then the tenant's: all take them in this order, so none waits for another in a circle."""
        count = ticket.num_sequences
        waits = not all(scope.places.has_room(count) for scope in ticket.scopes)
        waiting: AbstractContextManager[None] = self.queue.wait_for_places(count) if waits else nullcontext()
        async with AsyncExitStack() as taken:
            with waiting:
                for scope in ticket.scopes if waits else ():
                    scope.num_waiting += count
                try:
                    for scope in reversed(ticket.scopes):
                        await scope.places.take(count)
                        taken.callback(scope.places.leave, count)
                finally:
                    for scope in ticket.scopes if waits else ():
                        scope.num_waiting -= count
            taken.pop_all()


def shown_duration(nanoseconds: int) -> str:
    """Duration as OpenAI's headers write it: "12ms", "1.5s", "6m0s"; never shorter than it is."""
    milliseconds = -(-nanoseconds // 10**6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
