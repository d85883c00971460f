"""Prompt lookup on a GPU: the requests' tokens are kept there, and a step's drafts are found before the host has its
results, so that the next step is launched meanwhile.

The host must plan how many drafts a row gets before it knows what is found. So a row without a match gets drafts too,
its last token again and again: a few more tokens that are verified take next to no time on a GPU, and the policy
measures what they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from ...kernels.device_outcome import DeviceIds, DeviceOutcome, OnDevice
from ...kernels.dispatch import has_triton
from ...kernels.ngram import Rows, TokenBuffers, extend_and_match
from ...kernels.staging import upload
from ...platform.core.request import NO_DRAFTS, Drafts, Request, Status
from .base import DrafterNeeds, DraftRow, Proposal, TargetOutput
from .ngram import NgramDrafter


def runs_on(device: torch.device) -> bool:
    """True when prompt lookup runs on this device."""
    return device.type == "cuda" and has_triton()


class _Text:
    """A request's slot in the buffers."""

    __slots__ = ("num_written", "request", "slot")

    def __init__(self, request: Request, slot: int) -> None:
        self.request, self.slot = request, slot
        self.num_written = 0
        """Leading tokens of the request that the host has written."""


class DeviceNgramDrafter(NgramDrafter):
    """Prompt lookup on the device while the host does not have a step's results, and on the host after other steps."""

    def __init__(
        self, min_n: int, max_n: int, *, by_match: bool, max_rows: int, max_tokens: int, device: torch.device
    ) -> None:
        """`max_rows`: most requests of a step; `max_tokens`: most of a request. The buffers take four bytes for each
        token of these. For `by_match` see `NgramDrafter`; the device makes as many drafts as are planned."""
        super().__init__(min_n, max_n, by_match=by_match)
        self._device = device
        self._buffers = TokenBuffers(
            torch.zeros(max_rows, max_tokens, dtype=torch.int32, device=device),
            torch.zeros(max_rows, dtype=torch.int64, device=device),
        )
        self._texts: dict[str, _Text] = {}  # by request id; a request that does not run may have lost its slot
        self._free = list(range(max_rows))

    @property
    def needs(self) -> DrafterNeeds:
        """No layers."""
        return DrafterNeeds(drafts_on_device=True)

    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """See `Drafter`."""
        if target.on_device is None:
            return super().propose(rows, target)
        assert target.on_device.outcome is not None, "rows with drafts reach their end"
        most = max(row.max_drafts for row in rows)
        source = OnDevice(self._extend(rows, target.on_device.outcome, most).flatten())
        places = [range(at * most, at * most + row.max_drafts) for at, row in enumerate(rows)]
        found = [Drafts(DeviceIds(source, of_row)) if of_row else NO_DRAFTS for of_row in places]
        return [Proposal(drafts, len(row.tokens)) for drafts, row in zip(found, rows, strict=True)]

    def watch(self, rows: Sequence[DraftRow], target: TargetOutput) -> None:
        """Append the tokens of a step whose results the host does not have: later it knows neither them nor their
        number in time."""
        if target.on_device is None:
            super().watch(rows, target)
        elif target.on_device.outcome is not None:
            self._extend([row for row in rows if row.sampled], target.on_device.outcome, 0)

    def _extend(self, rows: Sequence[DraftRow], outcome: DeviceOutcome, num_drafts: int) -> torch.Tensor:
        """Append the outcome of `rows`, which are all of its rows, and look up drafts [R, num_drafts]."""
        self._forget_finished()
        places, missing = [], []
        for row, first in zip(rows, accumulate(outcome.counts or [1] * len(rows), initial=0), strict=False):
            text = self._text_of(row.request, rows)
            tokens, known = row.request.tokens, row.num_valid - row.num_drafts
            if len(tokens) < known:  # the row awaits tokens, which the last call has appended
                known = -1 if text.num_written else 0
            elif text.num_written < known:
                missing.append((text.slot, text.num_written, tokens[text.num_written : known]))
                text.num_written = known
            places.append((text.slot, known, first))
        self._write(missing)
        (table,) = upload(self._device, np.array(places, dtype=np.int64).reshape(-1))
        step = Rows(table.view(-1, 3), outcome.tokens, outcome.accepted)
        return extend_and_match(self._buffers, step, self._min_n, self._max_n, num_drafts)

    def _write(self, parts: Sequence[tuple[int, int, list[int]]]) -> None:
        """Write (slot, first position, tokens) to the buffers, in one copy and one launch."""
        if not parts:
            return
        width = self._buffers.tokens.shape[1]
        starts = [np.arange(len(tokens)) + slot * width + first for slot, first, tokens in parts]
        values = [token for _, _, tokens in parts for token in tokens]
        index, tokens = upload(self._device, np.concatenate(starts), np.array(values, dtype=np.int64))
        self._buffers.tokens.view(-1).index_copy_(0, index, tokens.to(torch.int32))

    def _text_of(self, request: Request, rows: Sequence[DraftRow]) -> _Text:
        text = self._texts.get(request.request_id)
        if text is not None and text.request is not request:
            self._free.append(self._texts.pop(request.request_id).slot)
            text = None
        if text is None:
            if not self._free:
                self._evict({row.request.request_id for row in rows})
            text = self._texts[request.request_id] = _Text(request, self._free.pop())
        return text

    def _evict(self, kept: set[str]) -> None:
        """Free the slot of a request that is not in this step: a preempted one, whose tokens the host knows."""
        name = next(name for name in self._texts if name not in kept)
        self._free.append(self._texts.pop(name).slot)

    def _forget_finished(self) -> None:
        super()._forget_finished()
        for name in [name for name, text in self._texts.items() if text.request.status is Status.FINISHED]:
            self._free.append(self._texts.pop(name).slot)
