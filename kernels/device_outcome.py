"""Numbers that a device is still computing when the host already works with their places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from .staging import upload


class OnDevice:
    """A tensor [S] of int64 that does not change any more once it is computed."""

    __slots__ = ("_known", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._known: list[int] | None = None

    def known(self) -> list[int]:
        """Its numbers; the host waits for them."""
        if self._known is None:
            self._known = self.tensor.tolist()
        return self._known


class DeviceIds(Sequence[int]):
    """Token ids that the device is computing. How many there are is known; to read one is to wait for all."""

    __slots__ = ("places", "source")

    def __init__(self, source: OnDevice, places: Sequence[int]) -> None:
        """`places`: which of the source's numbers they are."""
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
    """Tokens among others that the host knows, which the device puts in their places."""

    places: Sequence[int]
    """[L], among all tokens."""
    source: Tensor
    """[S] int64 on the device; written before it is read here."""
    origins: Sequence[int]
    """[L], which of the source each is."""

    def fill(self, token_ids: Tensor) -> None:
        """Put them into `token_ids` [T or more] int64, on the device."""
        places, origins = upload(token_ids.device, np.asarray(self.places), np.asarray(self.origins))
        token_ids.index_copy_(0, places, self.source.index_select(0, origins))


class DeviceOutcome(NamedTuple):
    """What a step of S rows with R logits rows leaves on the device for the one that follows, planned as if all of its
    drafts were right. Row s has 1 + k_s logits rows and accepts a_s drafts."""

    tokens: Tensor
    """[R] int64: a row's accepted drafts and its next token; some tokens after these."""
    next_tokens: Tensor
    """[S] int64"""
    accepted: Tensor
    """[S] int64: a"""
    rejected: Tensor | None
    """[S + 1] int64: k - a, and a zero for rows that do not follow any of these; None: there were no drafts."""
    overshoot: Tensor | None = None
    """[S] int64: by how many positions the step's own rows begin before where they were planned; None: nowhere."""
    most_overshoot: int = 0
    most_rejected: int = 0
    """No number is larger."""
    counts: Sequence[int] = ()
    """[S], each row's 1 + k, which is R together; empty: 1 each."""

    def generated(self) -> list[DeviceIds]:
        """Of each of the S rows its 1 + k places in `tokens`: what was accepted and sampled, then -1."""
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
        """The same with numbers of these rows alone, but for `tokens` and `counts`."""
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
        """[S] int64: `rejected`, of these rows alone."""
        return None if self.rejected is None else self.rejected[:-1]

    @property
    def total(self) -> Tensor | None:
        """[S] int64: by how many positions the sequences' ends were planned too far; None: nowhere."""
        if self.unused is None or self.overshoot is None:
            return self.unused if self.overshoot is None else self.overshoot
        return self.unused + self.overshoot


def device_slots(
    block_tables: Sequence[Sequence[int]],
    starts: Sequence[int],
    counts: Sequence[int],
    block_size: int,
    overshoot: tuple[Tensor | None, int],
    device: torch.device,
) -> Tensor:
    """Where B rows lie in the cache: slots [T] int64 of positions [start - overshoot, start - overshoot + count).

    Args:
        overshoot: [B] int64 on the device, and the most that it can be; None: 0.
    """
    early, most = overshoot
    first = np.maximum(np.asarray(starts) - most, 0) // block_size
    ends = -(-(np.asarray(starts) + np.asarray(counts)) // block_size)
    blocks = [
        block for table, a, b in zip(block_tables, first.tolist(), ends.tolist(), strict=True) for block in table[a:b]
    ]
    row = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    shift = (np.cumsum(ends - first) - (ends - first) - first)[row]
    table, positions, at, of = upload(device, np.asarray(blocks), np.asarray(starts)[row] + within, shift, row)
    if early is not None:
        positions -= early.index_select(0, of)
    at += positions // block_size
    return table.index_select(0, at).mul_(block_size).add_(positions % block_size)


def host_ids(ids: Sequence[int]) -> Sequence[int]:
    """`ids`, or zeros that hold the places of those that are late."""
    return [0] * len(ids) if isinstance(ids, DeviceIds) else ids


def device_tokens(parts: Iterable[tuple[int, Sequence[int]]]) -> list[DeviceTokens]:
    """What is late of these: (place of the first, ids), one for each source."""
    by_source: dict[OnDevice, tuple[list[int], list[int]]] = {}
    for first, ids in parts:
        if isinstance(ids, DeviceIds):
            places, origins = by_source.setdefault(ids.source, ([], []))
            places.extend(range(first, first + len(ids)))
            origins.extend(ids.places)
    return [DeviceTokens(places, source.tensor, origins) for source, (places, origins) in by_source.items()]
