"""Contracts between the scheduler and features: gates, limits of drafts, the chooser of drafts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...core.batch import RowPlan
from ...core.request import Request


class Gate(Protocol):
    """Something a sequence must hold while it runs, beside KV blocks. By default nothing is held."""

    def admit(self, request: Request) -> str | None:
        """Take it and return None, or return the reason to wait. A typed error fails this request alone."""

    def prefetch(self, request: Request) -> None:
        """The request will soon be asked for: begin what takes long, if nothing more urgent suffers."""
        return

    def release(self, request: Request) -> None:
        """Give it back, to ask again later: the request was preempted, or found no room."""
        return

    def forget(self, request: Request) -> None:
        """Give it back for good: the request finished, failed or was aborted. Also for one that was never admitted."""
        return


class DraftLimits(NamedTuple):
    """Limits that the drafter asks of the scheduler, as integers."""

    num_drafts: int = 0
    """Most drafts a step."""
    extra_slots: bool = False
    """Whether proposing k drafts writes KV at the k positions after the step's last."""
    overlaps: bool = False
    """Whether a step may be planned while another one runs."""
    max_positions: int = sys.maxsize
    """Positions of a sequence that the first drafter drafts for without the host."""
    max_drafts_on_device: int = sys.maxsize
    """Most drafts of a row that it makes without the host, which are then as many as were asked for."""

    def room(self, request: Request, least: int, most: int, max_model_len: int) -> int:
        """Most drafts that may follow when the sequence has grown by `least` to `most` tokens."""
        limit = len(request.drafts.token_ids) if request.drafts.forced else self.num_drafts
        if limit == 0:
            return 0
        if request.params.max_drafts is not None:
            limit = min(limit, request.params.max_drafts)
        if request.params.max_tokens is not None:
            limit = min(limit, request.params.max_tokens - request.num_output_tokens - least - 1)
        return max(0, min(limit, max_model_len - len(request.tokens) - most))


class DraftChooser(Protocol):
    """Chooses how many drafts each row gets, and by whom, where that is not as many as may be."""

    @property
    def plans_no_drafts(self) -> bool:
        """Return whether the next step is planned without drafts."""
        ...

    def choose(self, rows: Sequence[RowPlan], *, requests_wait: bool) -> None:
        """Set `drafter` and lower `max_new_drafts` of the rows of a step that is being planned. `requests_wait`:
        whether others wait for a seat."""
        ...
