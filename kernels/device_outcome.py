"""Results of a step that are only on the device: the host plans the next step before it can read them.

S is the number of rows of the step, R the number of their rows of logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from .staging import upload


class OnDevice:
    """Tensor [S] of int64 on the device that is written once and read by the host at most once."""

    __slots__ = ("_known", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._known: list[int] | None = None

    def known(self) -> list[int]:
        """Numbers of the tensor on the host; the call waits for the device."""
        if self._known is None:
            self._known = self.tensor.tolist()
        return self._known


class DeviceIds(Sequence[int]):
    """Sequence of token ids that are only on the device. Its length is known; reading an id waits for the device."""

    __slots__ = ("places", "source")

    def __init__(self, source: OnDevice, places: Sequence[int]) -> None:
        """Choose the ids at indices `places` of `source`."""
        self.source = source
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> DeviceIds: ...

    def __getitem__(self, index: int | slice) -> int | DeviceIds:
        if isinstance(index, slice):
            return DeviceIds(self.source, self.places[index])
        return self.source.known()[self.places[index]]


class DeviceTokens(NamedTuple):
    """Token ids on the device, and their indices in a list whose other ids the host knows."""

    places: Sequence[int]
    """[L] indices in the list."""
    source: Tensor
    """[S] int64 on the device; the device writes it before `fill` reads it."""
    origins: Sequence[int]
    """[L] index in `source` of each token."""

    def fill(self, token_ids: Tensor) -> None:
        """Write the tokens into `token_ids` [at least max(places) + 1] int64 on the device; mutated."""
        count = len(self.places)
        if self.places == self.origins == list(range(count)):
            token_ids[:count].copy_(self.source[:count])
            return
        places, origins = upload(token_ids.device, np.asarray(self.places), np.asarray(self.origins))
        token_ids.index_copy_(0, places, self.source.index_select(0, origins))


class DeviceOutcome(NamedTuple):
    """Outcome of a step, on the device. Row s had k_s drafts and 1 + k_s rows of logits; a_s of its drafts are
    accepted. The next step is planned as if all drafts were accepted."""

    tokens: Tensor
    """[R] int64: for each row its accepted drafts and the next token; later values are undefined."""
    next_tokens: Tensor
    """[S] int64: the token after the accepted drafts."""
    accepted: Tensor
    """[S] int64: a, the number of accepted drafts."""
    rejected: Tensor | None
    """[S + 1] int64: k - a, and a zero for rows that follow none of these; None when there were no drafts."""
    overshoot: Tensor | None = None
    """[S] int64: number of positions by which the step's own rows start before their planned start; None: 0."""
    counts: Sequence[int] = ()
    """[S] 1 + k of each row, in sum R; empty: 1 each."""

    def generated(self) -> list[DeviceIds]:
        """Generated tokens of each of the S rows: 1 + k ids, with -1 after the accepted drafts and the next token."""
        tokens = self.tokens
        counts = np.array(self.counts or [1] * len(tokens))
        assert len(counts) == len(self.accepted), "of some rows `of` keeps the tokens of all"
        starts = np.cumsum(counts) - counts
        if counts.max(initial=1) > 1:
            row = np.repeat(np.arange(len(counts)), counts)
            row_of, place = upload(tokens.device, row, np.arange(len(row)) - starts[row])
            tokens = tokens.masked_fill(place > self.accepted.index_select(0, row_of), -1)
        source, ends = OnDevice(tokens), (starts + counts).tolist()
        return [DeviceIds(source, range(start, end)) for start, end in zip(starts.tolist(), ends, strict=True)]

    def of(self, rows: Sequence[int]) -> DeviceOutcome:
        """Outcome of some rows; `tokens` and `counts` stay those of all rows."""
        if list(rows) == list(range(len(self.accepted))):
            return self
        index = upload(self.accepted.device, np.asarray(rows))[0]
        overshoot = None if self.overshoot is None else self.overshoot[index]
        rejected = None
        if self.rejected is not None:
            rejected = self.rejected[torch.cat((index, index.new_full((1,), len(self.accepted))))]
        return self._replace(
            next_tokens=self.next_tokens[index], accepted=self.accepted[index], rejected=rejected, overshoot=overshoot
        )

    @property
    def unused(self) -> Tensor | None:
        """[S] int64: `rejected` without the zero at its end."""
        return None if self.rejected is None else self.rejected[:-1]

    @property
    def total(self) -> Tensor | None:
        """[S] int64: positions by which the planned ends of the sequences are too large; None: 0."""
        if self.unused is None or self.overshoot is None:
            return self.unused if self.overshoot is None else self.overshoot
        return self.unused + self.overshoot


def device_places(
    block_tables: Sequence[Sequence[int]],
    starts: Sequence[int],
    counts: Sequence[int],
    block_size: int,
    overshoot: Tensor | None,
    most: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Cache slots [T] int64, and positions [T] int64, of B rows of consecutive positions [start - overshoot, start -
    overshoot + count).

    Args:
        overshoot: [B] int64 on the device; None: 0.
        most: An upper bound of it.
    """
    first = np.maximum(np.asarray(starts) - most, 0) // block_size
    ends = -(-(np.asarray(starts) + np.asarray(counts)) // block_size)
    blocks = [
        block for table, a, b in zip(block_tables, first.tolist(), ends.tolist(), strict=True) for block in table[a:b]
    ]
    row = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    shift = (np.cumsum(ends - first) - (ends - first) - first)[row]
    table, positions, at, of = upload(device, np.asarray(blocks), np.asarray(starts)[row] + within, shift, row)
    if overshoot is not None:
        positions -= overshoot.index_select(0, of)
    at += positions // block_size
    return table.index_select(0, at).mul_(block_size).add_(positions % block_size), positions


def host_ids(ids: Sequence[int]) -> Sequence[int]:
    """`ids`, or as many zeros when the ids are only on the device."""
    return [0] * len(ids) if isinstance(ids, DeviceIds) else ids


def device_tokens(parts: Iterable[tuple[int, Sequence[int]]]) -> list[DeviceTokens]:
    """Tokens of `parts` that are only on the device, grouped by source. A part is (index of its first token, ids)."""
    by_source: dict[OnDevice, tuple[list[int], list[int]]] = {}
    for first, ids in parts:
        if isinstance(ids, DeviceIds):
            places, origins = by_source.setdefault(ids.source, ([], []))
            places.extend(range(first, first + len(ids)))
            origins.extend(ids.places)
    return [DeviceTokens(places, source.tensor, origins) for source, (places, origins) in by_source.items()]
