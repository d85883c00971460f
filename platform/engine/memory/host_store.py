"""Memory of the host tier, and the copies between it and the device's KV blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from ....kernels.memory import lazy_zeros, release_pages
from ....kernels.staging import to_device
from ....models.batch import LayerKV
from ...core.batch import Move
from ...core.errors import InvalidRequestError

_STAGING_BYTES = 32 << 20
"""Largest buffer on the device in which blocks are gathered for a copy."""
_MEASURED_BLOCKS = 16


class HostStore:
    """One row of `block_bytes` for each slot, with a block's content in all layers, the drafter's too, in any dtype.

    On a GPU blocks are gathered to rows on the device, which are then copied whole. The host's rows are pinned memory
    and a side stream copies them: a step waits for the blocks that it reads, never for those copied to the host. On a
    CPU the rows are a second pool.
    """

    def __init__(
        self,
        kv: Sequence[LayerKV],
        num_slots: int,
        on_run: Callable[[Sequence[Move]], None] | None = None,
    ) -> None:
        """Allocate `num_slots` rows for the blocks of `kv`. `on_run` is called before copies, so that other ranks make
        theirs; None: there are none.

        Raises:
            InvalidRequestError: the system does not give a GPU's host so much pinned memory.
        """
        self._on_run = on_run
        tensors = [part for layer in kv for part in (layer[:1] if layer.v is layer.k else layer) if part.numel()]
        self._device = tensors[0].device
        sizes = [part[0, 0].nbytes for part in tensors]
        unit = torch.int64 if all(size % 8 == 0 for size in sizes) else torch.uint8  # bytes are copied far slower
        self._parts = [part.flatten(2).view(unit) for part in tensors]  # [KV heads, blocks, units]
        width = sum(part.shape[0] * part.shape[2] for part in self._parts)
        self.block_bytes = width * unit.itemsize
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        if self._side is None:
            self._rows = lazy_zeros((num_slots, width), unit)
            return
        try:
            self._rows = torch.zeros((num_slots, width), dtype=unit, pin_memory=True)
        except RuntimeError as error:
            raise InvalidRequestError(f"no memory for swap_space: {error}", param="swap_space") from error

    @torch.inference_mode()
    def run(self, moves: Sequence[Move]) -> None:
        """Make copies in their order. A later one to the same block or slot replaces an earlier one."""
        if self._on_run is not None:
            self._on_run(moves)
        most = max(1, _STAGING_BYTES // self.block_bytes)
        for to_host, group in groupby(moves, key=lambda move: move.to_host):
            last = {move.slot if to_host else move.block: move for move in group}
            chosen = list(last.values())
            for start in range(0, len(chosen), most):
                part = chosen[start : start + most]
                blocks = to_device(np.array([move.block for move in part]), self._device)
                slots = [move.slot for move in part]
                if self._side is None:
                    self._copy_here(blocks, torch.tensor(slots), to_host=to_host)
                else:
                    copy = self._to_host if to_host else self._to_device
                    copy(blocks, slots, self._side)

    def _copy_here(self, blocks: Tensor, slots: Tensor, *, to_host: bool) -> None:
        """Copy within the memory of a CPU."""
        for part, view in self._views(self._rows):
            if to_host:
                view.index_copy_(0, slots, part.index_select(1, blocks).transpose(0, 1))
            else:
                part.index_copy_(1, blocks, view.index_select(0, slots).transpose(0, 1))

    def _to_host(self, blocks: Tensor, slots: Sequence[int], side: torch.cuda.Stream) -> None:
        staging = self._staging(len(slots))
        for part, view in self._views(staging):
            view.copy_(part.index_select(1, blocks).transpose(0, 1))
        side.wait_stream(torch.cuda.current_stream(self._device))
        staging.record_stream(side)
        with torch.cuda.stream(side):
            for row, slot in zip(staging, slots, strict=True):
                self._rows[slot].copy_(row, non_blocking=True)

    def _to_device(self, blocks: Tensor, slots: Sequence[int], side: torch.cuda.Stream) -> None:
        with torch.cuda.stream(side):  # not after the step that may run now
            staging = self._staging(len(slots))
            for row, slot in zip(staging, slots, strict=True):
                row.copy_(self._rows[slot], non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(side)
        staging.record_stream(current)
        for part, view in self._views(staging):
            part.index_copy_(1, blocks, view.transpose(0, 1))

    def _staging(self, count: int) -> Tensor:
        return torch.empty((count, self._rows.shape[1]), dtype=self._rows.dtype, device=self._device)

    def _views(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each part of the cache with its columns of `rows`, as [rows, KV heads, units]."""
        columns = rows.split([part.shape[0] * part.shape[2] for part in self._parts], dim=1)
        return [
            (part, column.unflatten(1, (part.shape[0], part.shape[2])))
            for part, column in zip(self._parts, columns, strict=True)
        ]

    def bytes_per_second(self) -> float:
        """Rate of copies, measured by copying the first blocks to the host and back."""
        count = min(_MEASURED_BLOCKS, self._rows.shape[0], self._parts[0].shape[1])
        moves = [Move(index, index, to_host) for to_host in (True, False) for index in range(count)]
        self.run(moves)  # the memory is allocated from now on
        self._wait()
        started = time.perf_counter()
        self.run(moves)
        self._wait()
        return 2 * count * self.block_bytes / (time.perf_counter() - started)

    def _wait(self) -> None:
        if self._side is not None:
            torch.cuda.synchronize(self._device)

    def release_memory(self) -> None:
        """Return the memory to the system, on a CPU; it is allocated again at its next use."""
        self._wait()
        if self._side is None:
            release_pages(self._rows)
