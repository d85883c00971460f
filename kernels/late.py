"""Numbers that a device is still computing when the host already works with their places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, overload

import numpy as np
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


class LateIds(Sequence[int]):
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
    def __getitem__(self, index: slice) -> LateIds: ...

    def __getitem__(self, index: int | slice) -> int | LateIds:
        if isinstance(index, slice):
            return LateIds(self.source, self.places[index])
        return self.source.known()[self.places[index]]


class LateTokens(NamedTuple):
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


def now_known(ids: Sequence[int]) -> Sequence[int]:
    """`ids`, or zeros that hold the places of those that are late."""
    return [0] * len(ids) if isinstance(ids, LateIds) else ids


def late_tokens(parts: Iterable[tuple[int, Sequence[int]]]) -> list[LateTokens]:
    """What is late of these: (place of the first, ids), one for each source."""
    by_source: dict[OnDevice, tuple[list[int], list[int]]] = {}
    for first, ids in parts:
        if isinstance(ids, LateIds):
            places, origins = by_source.setdefault(ids.source, ([], []))
            places.extend(range(first, first + len(ids)))
            origins.extend(ids.places)
    return [LateTokens(places, source.tensor, origins) for source, (places, origins) in by_source.items()]
