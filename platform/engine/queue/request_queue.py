"""The queue of waiting sequences and the set of running ones, by account, and the next account.

The order is that of virtual token counters, after Sheng et al., "Fairness in Serving Large Language Models" (OSDI
2024), Algorithm 2 with weights. An account's counter grows by the price of its served tokens, over its weight:

    when a sequence first starts    prompt_cost          a prompt token that the prefix cache does not have
    in every step                   output_cost          a token emitted
                                    rejected_draft_cost  a rejected draft

The account with the smallest counter is next; nothing waits while there is room, whatever the counters. An account that
had nothing queued is lifted to the smallest counter among those queued, or, when there are none, to that of the account
that left the queue last, so that an idle tenant gains no credit. It is lifted to S less than the paper has it, S what
the tokens of one full step cost as output: without this credit an account that uses less than its share would queue
behind a flood again after each of its requests.

With U = max(prompt_cost * L, output_cost * M) / weight, L the longest prompt and M the tokens that run together, the
counters of queued accounts differ by at most U + S (Lemma 4.3, where S is 0), so the service of two accounts with
queued requests differs by at most twice that (Theorem 4.4); S is small compared with M. With k drafts a step,
rejected_draft_cost * k is part of the output's cost in U.

If a step finds no room, the least urgent sequence of the account served most is preempted. Unlike in the paper, which
lets running sequences finish, a waiting account may also preempt one that was served more and has more running
(`displaced_by`), since a first token should not wait for another tenant's last.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import total_ordering
from itertools import chain, count, zip_longest
from typing import Any, NamedTuple

from ...core.config import FairConfig
from ...core.request import Request, Status


class Policy(NamedTuple):
    """Order of requests. Inside an account the smallest priority runs first, then the earliest arrival."""

    by_tenant: bool
    """Each tenant has an account; else all requests share one, and nothing is charged."""
    by_priority: bool
    """True when priorities count."""


POLICIES: dict[str, Policy] = {
    "fcfs": Policy(by_tenant=False, by_priority=False),
    "priority": Policy(by_tenant=False, by_priority=True),
    "fair": Policy(by_tenant=True, by_priority=True),
}
"""Accounts alternate by their served tokens; a policy with one account for all is a plain sorted queue."""

# Accounts kept, in addition to twice those in use, before idle ones are dropped.
_KEPT = 64


@total_ordering
class Account:
    """One tenant's sequences. Its order changes with every step, so it is no lasting sort key. It is less than
    infinity, and greater than minus infinity."""

    __slots__ = ("counter", "name", "running", "serial", "waiting", "weight")

    def __init__(self, name: str, serial: int) -> None:
        self.name = name
        self.serial = serial
        self.weight = 1.0
        self.counter = 0.0
        self.waiting: list[Request] = []  # both sorted by `Request.order`
        self.running: list[Request] = []

    @property
    def turn(self) -> tuple[float, int, int]:
        """The smallest is next: served least, then with the fewest running; never equal to another's."""
        return self.counter, len(self.running), self.serial

    def __lt__(self, other: object) -> bool:
        if isinstance(other, Account):
            return self.turn < other.turn
        return self.counter < other if isinstance(other, float) else NotImplemented


def _order(request: Request) -> tuple[Any, ...]:
    return request.order


def _turn(account: Account) -> tuple[float, int, int]:
    return account.turn


def _remove(queue: list[Request], request: Request) -> None:
    """Remove a request from a list sorted by order; orders are unique."""
    index = bisect_left(queue, request.order, key=_order)
    assert queue[index] is request
    del queue[index]


def _in_turn(queues: list[list[Request]]) -> list[Request]:
    """These lists joined; a single one is returned uncopied, since it may be long."""
    return queues[0] if len(queues) == 1 else list(chain.from_iterable(queues))


class RequestQueue:
    """The scheduler's queue and running set. A request is in one of them from `add` to `remove`."""

    def __init__(self, policy: Policy, prices: FairConfig, max_num_batched_tokens: int) -> None:
        self.num_waiting = self.num_running = 0
        self._policy = policy
        self._prices = prices
        self._credit = prices.output_cost * max_num_batched_tokens
        self._arrivals, self._serials = count(), count()
        self._accounts: dict[str, Account] = {}
        self._sweep_at = _KEPT
        self._queued: dict[Account, None] = {}  # with waiting sequences
        self._served: dict[Account, None] = {}  # with running ones
        self._level = 0.0  # largest value seen of the queue's smallest counter
        self._last_left: Account | None = None  # the account that left the queue most recently

    # ------------------------------------------------------------------ lists

    @property
    def waiting(self) -> Sequence[Request]:
        """Waiting sequences, account by account, those of the next first. Read only."""
        return _in_turn([account.waiting for account in sorted(self._queued, key=_turn)])

    @property
    def running(self) -> Sequence[Request]:
        """Running sequences, those of the account served least first. Read only."""
        return _in_turn([account.running for account in sorted(self._served, key=_turn)])

    def least_urgent(self) -> Request:
        """The running sequence to preempt first."""
        return max(self._served, key=_turn).running[-1]

    def candidates(self) -> Iterator[Request]:
        """Waiting sequences in order; the order of accounts is updated after each. The sequence just yielded may be
        started or removed before the next."""
        heap = [(account.turn, account, 0) for account in self._queued]
        heapq.heapify(heap)
        while heap:
            turn, account, index = heapq.heappop(heap)
            waiting = account.waiting
            while index < len(waiting) and account.turn == turn:
                request = waiting[index]
                yield request
                if index < len(waiting) and waiting[index] is request:
                    index += 1
            if index < len(waiting):
                heapq.heappush(heap, (account.turn, account, index))

    def upcoming(self, number: int) -> list[Request]:
        """The approximate next `number` to start: one of each account in turn."""
        if len(self._queued) == 1:
            return next(iter(self._queued)).waiting[:number]
        heads = [account.waiting[:number] for account in sorted(self._queued, key=_turn)[:number]]
        rounds = chain.from_iterable(zip_longest(*heads))
        return [request for request in rounds if request is not None][:number]

    # ----------------------------------------------------------- moves, charges

    def add(self, request: Request) -> None:
        """Add a waiting sequence. Its account's weight becomes the request's."""
        name = request.tenant if self._policy.by_tenant else ""
        account = self._accounts.get(name)
        if account is None:
            self._forget_idle()
            account = self._accounts[name] = Account(name, next(self._serials))
        account.weight = request.weight
        rank = request.priority if self._policy.by_priority else 0
        request.order = (account, rank, next(self._arrivals))
        self._enqueue(account, request)

    def start(self, request: Request, num_prompt_tokens: int) -> None:
        """Move a waiting sequence to the running ones, and charge its account for prompt tokens."""
        account: Account = request.order[0]
        self._dequeue(account, request)
        insort(account.running, request, key=_order)
        self._served[account] = None
        self.num_running += 1
        # The head is computed for every token whose log-probability is wanted.
        is_scored = request.params.prompt_logprobs is not None
        price = self._prices.output_cost if is_scored else self._prices.prompt_cost
        account.counter += price * num_prompt_tokens / account.weight

    def stop(self, request: Request) -> None:
        """Move a running sequence back to the queue, without a refund."""
        account: Account = request.order[0]
        self._retire(account, request)
        self._enqueue(account, request)

    def remove(self, request: Request, *, running: bool) -> None:
        """Remove a waiting or running sequence."""
        (self._retire if running else self._dequeue)(request.order[0], request)

    def charge(self, request: Request, num_emitted: int, num_rejected: int) -> None:
        """Charge a sequence's account for tokens emitted, weighted by the cost of choosing them, and for rejected
        drafts."""
        prices, account = self._prices, request.order[0]
        cost = (
            prices.output_cost * request.sampling.token_cost * num_emitted + prices.rejected_draft_cost * num_rejected
        )
        account.counter += cost / account.weight

    def num_wanted(self, num_seats: int) -> int:
        """Number of waiting sequences that the prompt throttle counts: those for which there is a seat. If every
        account has a queue all of them count, for throughput; otherwise accounts without a queue would pay for
        another's flood."""
        if self.num_waiting <= num_seats or all(
            len(account.waiting) > 1 for account in {**self._served, **self._queued}
        ):
            return self.num_waiting
        return num_seats

    def is_behind(self, request: Request) -> bool:
        """True if the account of this sequence, running or not, has less running for its weight than one with a queue
        that was served more: an account that floods need not be spared."""
        account: Account = request.order[0]
        num_then = len(account.running) + (request.status is not Status.RUNNING)
        return any(other.waiting for other in self._ahead_of(account, num_then))

    def displaced_by(self, request: Request) -> Request | None:
        """The running sequence to preempt for a waiting one that finds no room; None: it must wait.

        It belongs to an account that was served more, and that keeps at least as many running, for its weight, as the
        waiting one's then has, so no two accounts preempt each other in turn. An account with nothing running need not
        wait; one with some waits until it is behind by more than the cost of recomputing the victim.
        """
        account: Account = request.order[0]
        others = self._ahead_of(account, len(account.running) + 1)
        if not others:
            return None
        most = max(others, key=_turn)
        victim = most.running[-1]
        behind = (most.counter - account.counter) * most.weight
        if account.running and behind <= self._prices.prompt_cost * victim.num_computed_tokens:
            return None
        return victim

    # -------------------------------------------------------------------- inner

    def _ahead_of(self, account: Account, num_running: int) -> list[Account]:
        """The accounts that were served more, and that with one less keep at least as many running for their weight as
        this one with `num_running`."""
        share = num_running / account.weight
        return [
            other
            for other in self._served
            if other is not account and (len(other.running) - 1) / other.weight >= share and account < other
        ]

    def _enqueue(self, account: Account, request: Request) -> None:
        if not account.waiting:
            self._raise_level()
            account.counter = max(account.counter, self._lowest(account))
            self._queued[account] = None
        insort(account.waiting, request, key=_order)
        self.num_waiting += 1

    def _dequeue(self, account: Account, request: Request) -> None:
        _remove(account.waiting, request)
        self.num_waiting -= 1
        if not account.waiting:
            del self._queued[account]
            self._last_left = account

    def _retire(self, account: Account, request: Request) -> None:
        _remove(account.running, request)
        self.num_running -= 1
        if not account.running:
            del self._served[account]

    def _lowest(self, account: Account) -> float:
        """Minimum counter of an account that joins the queue at the present level."""
        return self._level - self._credit / account.weight

    def _raise_level(self) -> None:
        level = self._last_left.counter if self._last_left is not None else 0.0
        if self._queued:
            level = min(other.counter for other in self._queued)
        # Never lower than before, or credit would add up: each that joins would lower it for the next.
        self._level = max(self._level, level)

    def _forget_idle(self) -> None:
        """Drop idle accounts that would be lifted anyway, from time to time: clients choose the names."""
        if len(self._accounts) < self._sweep_at:
            return
        self._raise_level()
        for account in list(self._accounts.values()):
            if not account.waiting and not account.running and account.counter <= self._lowest(account):
                del self._accounts[account.name]
        self._sweep_at = 2 * len(self._accounts) + _KEPT

    def check_integrity(self) -> None:
        """Raise AssertionError unless accounts, lists and counts agree."""
        accounts = self._accounts.values()
        assert self._queued.keys() == {account for account in accounts if account.waiting}
        assert self._served.keys() == {account for account in accounts if account.running}
        assert self.num_waiting == sum(len(account.waiting) for account in accounts)
        assert self.num_running == sum(len(account.running) for account in accounts)
        for account in accounts:
            for queue in (account.waiting, account.running):
                assert all(request.order[0] is account for request in queue)
                assert queue == sorted(queue, key=_order)
