"""Limits before a request's generation and its row in the ledger after it, on a server with tenants."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request

from ...core.adapter_names import label_text
from ...core.errors import AuthenticationError, OutriderError, OverloadedError
from ...core.logs import current_request_id
from ...tenancy.ledger.usage_row import Status, UsageRow
from ..observe.generations import first_output, sum_speculation
from ..openai.job import Job
from ..serving_state import Serving, principal_of, serving_of

if TYPE_CHECKING:
    from ...tenancy.limits.limiter import Ticket
    from ...tenancy.service import Tenancy

CHECKPOINT_SECONDS = 1.0
"""Seconds between two lines of a running request in the ledger's journal."""


def limit_headers(request: Request) -> dict[str, str]:
    """`x-ratelimit-*` headers of the answer; none for clients without limits."""
    tenancy = serving_of(request).tenancy
    return {} if tenancy is None else tenancy.limiter.headers(principal_of(request))


def check_call(request: Request) -> None:
    """Refuse a request that has no chance, before its prompt is tokenized.

    Raises:
        RateLimitError: there are no more requests this minute.
        OverloadedError: too many wait already.
    """
    serving = serving_of(request)
    if serving.tenancy is not None:
        serving.tenancy.limiter.check_call(principal_of(request))
    serving.queue.check(1)


async def charge_call(request: Request) -> None:
    """Count a call that generates nothing against the limits.

    Raises:
        RateLimitError: there are no more requests this minute.
    """
    tenancy = serving_of(request).tenancy
    if tenancy is not None:
        await tenancy.limiter.charge_call(principal_of(request))


@contextlib.asynccontextmanager
async def admitted(serving: Serving, job: Job) -> AsyncGenerator[Callable[[], None]]:
    """Admit a job for the time that it runs. The result is to be called after each output.

    On a server with tenants the job's row is safe when it has ended, by itself or with an error. A run that is closed
    early, or cancelled, leaves that to the ledger.

    Raises:
        OutriderError: the job is refused.
    """
    if serving.tenancy is None:
        job.on_admitted()
        yield lambda: None
        return
    account = await _admit(serving, serving.tenancy, job)
    try:
        yield account.checkpoint
    except (asyncio.CancelledError, GeneratorExit):
        account.abort()
        raise
    except Exception as error:
        account.fail(error)
        await account.committed()
        raise
    account.finish()
    await account.committed()


async def _admit(serving: Serving, tenancy: Tenancy, job: Job) -> RequestAccount:
    """Admit the job, or raise the reason why not; a job that is refused or cancelled leaves nothing behind."""
    serving.check_ready()  # it may be draining since the job was prepared, and no request may wait for a slot then
    tenancy.ledger.check()
    limiter = tenancy.limiter
    ticket = await limiter.admit(job.principal, job.demand())
    try:
        if not tenancy.directory.is_valid(job.principal):  # any more: there may have been a queue, or a slow body
            raise AuthenticationError("The API key has expired or has been revoked")
        serving.check_ready()
        job.grant(ticket.max_tokens)
        job.on_admitted()
        return RequestAccount(serving, tenancy, job, ticket)
    except BaseException:
        limiter.release(ticket, 0, ran=False)
        raise


class RequestAccount:
    """An admitted job's ticket and row, until it ends: the first of `finish`, `fail` and `abort` counts."""

    def __init__(self, serving: Serving, tenancy: Tenancy, job: Job, ticket: Ticket) -> None:
        """Begin the row.

        Raises:
            OverloadedError: it cannot be recorded.
        """
        self._serving = serving
        self._tenancy = tenancy
        self._job = job
        self._ticket = ticket
        self._checkpoint_at = time.monotonic() + CHECKPOINT_SECONDS
        self.row = UsageRow(
            request_id=job.request_id,
            client_request_id=current_request_id.get(),
            tenant=job.principal.tenant,
            key_id=job.principal.key_id,
            endpoint=job.endpoint,
            model=job.model,
            adapter="" if job.lora is None else label_text(job.lora.label),
            received_at=job.arrival.wall,
            finished_at=job.arrival.wall,
        )
        tenancy.ledger.begin(self.row)

    def checkpoint(self) -> None:
        """Bring the journal up to date, unless that was done a moment ago."""
        moment = time.monotonic()
        if moment >= self._checkpoint_at:
            self._checkpoint_at = moment + CHECKPOINT_SECONDS
            for prepared in self._job.prepared:
                self._serving.llm.count_speculation(prepared.request_id)
            self._update(moment)
            self._tenancy.ledger.checkpoint(self.row)

    def finish(self) -> None:
        """End the row: all sequences are complete."""
        self._end(_worst(self._finish_reasons))

    def abort(self) -> None:
        """Count an abandoned job. The prompts count wholly: they may have been computed. Of a beam search the sequences
        count that it had found by then."""
        if len(self._finish_reasons) == self._job.num_sequences:  # only the last bytes had not been taken
            self.finish()
            return
        self._update(time.monotonic())
        self.row.prompt_tokens = sum(self._job.prompt_lengths)
        self.row.output_tokens += sum(self._job.searching.values())
        self._settle("abort")

    def fail(self, error: Exception) -> None:
        """Count a failed job. Prompts without a token of an answer cost nothing."""
        has_begun = first_output(self._job.generations) is not None
        if isinstance(error, OverloadedError) and not has_begun:  # the engine's queue is full: it was not admitted
            self._tenancy.ledger.drop(self.row)
            self._tenancy.limiter.release(self._ticket, 0, ran=False)
            return
        self.row.error_type = type(error).type if isinstance(error, OutriderError) else OutriderError.type
        self._end("error")

    async def committed(self) -> None:
        """Wait until the row is safe."""
        await self._tenancy.ledger.committed(self.row)

    @property
    def _finish_reasons(self) -> list[str]:
        return [reason for generation in self._job.generations for reason in generation.finish_reasons.values()]

    def _end(self, status: Status) -> None:
        self._update(time.monotonic())
        self._settle(status)

    def _settle(self, status: Status) -> None:
        self.row.status = status
        self._tenancy.ledger.end(self.row)
        self._tenancy.limiter.release(self._ticket, self.row.total_tokens, ended_at=self.row.finished_at)

    def _update(self, moment: float) -> None:
        row, job = self.row, self._job
        counts, drafts, first = job.counts, sum_speculation(job.generations), first_output(job.generations)
        row.prompt_tokens = counts.prompt_tokens
        row.cached_tokens = counts.cached_tokens
        row.output_tokens = counts.output_tokens if job.keeps_output else 0
        row.drafted_tokens, row.accepted_tokens = drafts.num_draft_tokens, drafts.num_accepted_tokens
        row.first_token_at = None if first is None else job.arrival.at(first)
        digests = (g.metrics.adapter_digest for g in job.generations if g.metrics is not None)
        row.adapter_digest = next(filter(None, digests), row.adapter_digest)
        row.finished_at = job.arrival.at(moment)


def _worst(finish_reasons: Sequence[str]) -> Status:
    """The finish reason that says most about the request."""
    if "abort" in finish_reasons:
        return "abort"
    return "length" if "length" in finish_reasons else "stop"
