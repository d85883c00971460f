"""Contracts between the scheduler and features: gates, limits of drafts, the chooser of drafts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...core.batch import RowPlan
from ...core.request import Request


class Gate(Protocol):
    """Gate: a resource, in addition to KV blocks, that a sequence must hold while it runs. By default nothing is
    held."""

    def admit(self, request: Request) -> str | None:
        """Take the resource and return None, or return the reason to wait. A typed error fails this request alone."""

    def prefetch(self, request: Request) -> None:
        """Start slow work for a request that will soon be admitted, if it delays nothing more urgent."""
        return

    def release(self, request: Request) -> None:
        """Release the resource, to take it again later: the request was preempted, or found no room."""
        return

    def forget(self, request: Request) -> None:
        """Release the resource: the request finished, failed or was aborted, maybe before its admission."""
        return


class DraftLimits(NamedTuple):
    """Limits that the drafter sets for the scheduler, as integers."""

    num_drafts: int = 0
    """Most drafts of a row in a step."""
    extra_slots: bool = False
    """True when proposing k drafts writes KV at the k positions after the step's last."""
    more_slots: int = 0
    """Further positions that are then written."""
    overlaps: bool = False
    """True when a step may be planned while another one runs."""
    max_positions: int = sys.maxsize
    """Positions of a sequence that the first drafter drafts for without the host."""
    max_verified: int = sys.maxsize
    """Most drafts of a row that a step verifies, those of grammars included."""
    max_drafts_on_device: int = sys.maxsize
    """Most drafts of a row that the first drafter makes without the host; it then makes exactly the requested
    number."""

    def room(self, request: Request, least: int, most: int, max_model_len: int) -> int:
        """Most drafts that may follow after the sequence has grown by `least` to `most` tokens."""
        limit = len(request.drafts.token_ids) if request.drafts.forced else self.num_drafts
        limit = min(limit, self.max_verified)
        if limit == 0:
            return 0
        if request.params.max_drafts is not None:
            limit = min(limit, request.params.max_drafts)
        if request.params.max_tokens is not None:
            limit = min(limit, request.params.max_tokens - request.num_output_tokens - least - 1)
        return max(0, min(limit, max_model_len - len(request.tokens) - most))


class DraftChooser(Protocol):
    """Chooser of each row's drafter and number of drafts. Without one a row gets its maximum number of drafts."""

    @property
    def plans_no_drafts(self) -> bool:
        """Return whether the next step is planned without drafts."""
        ...

    def choose(self, rows: Sequence[RowPlan], *, requests_wait: bool) -> None:
        """Set `drafter` and lower `max_new_drafts` of the rows of a step that is being planned. `requests_wait`:
        whether requests are queued."""
        ...
