"""Adapters' vectors at a site, in addition to their rank rows: gains (DoRA) and biases.

    y = base + (g - 1) ∘ (base - bias - residual) + d      base = x Wᵀ + bias + residual
    g  gain [out] of each row of the base weight, see `dora`
    d  bias [out] of the adapter: PEFT's lora_B.bias with the scale, and the trained bias less the base's

A step computes this only for tokens whose adapter has such vectors. T tokens of a step; out: features of a projection.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.lora.groups import is_grouped
from .pool import Allocation

if TYPE_CHECKING:
    from .layers import LoraBatch


class _SlotTokens(NamedTuple):
    """Tokens whose adapters have vectors at a site, and the slot of each, or of all."""

    tokens: slice | Tensor
    slots: int | Tensor


def _slot_tokens(runs: Sequence[tuple[int, int, int]], device: torch.device) -> _SlotTokens | None:
    """Return the tokens of runs (slot, start, stop); None when there are none."""
    if not runs:
        return None
    lengths = [stop - start for _, start, stop in runs]
    first, last = runs[0][1], runs[-1][2]
    tokens: slice | Tensor = slice(first, last)
    if sum(lengths) < last - first:  # not adjacent
        tokens = torch.tensor([token for _, start, stop in runs for token in range(start, stop)], device=device)
    if len({slot for slot, _, _ in runs}) == 1:
        return _SlotTokens(tokens, runs[0][0])
    slots = torch.tensor([slot for slot, _, _ in runs], device=device)
    return _SlotTokens(tokens, slots.repeat_interleave(torch.tensor(lengths, device=device)))


class _Table:
    """Vectors of one kind at one site, with a row for each slot. Memory is allocated at the first write."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._sizes = list(sizes)
        self.rows = torch.zeros(0, sum(sizes), dtype=dtype, device=device)  # [slots, out]
        self.written = 0
        """Bit s is set when the adapter in slot s has a vector here."""

    def write(self, slot: int, parts: Sequence[Tensor | None]) -> None:
        """Write an adapter's vectors to a slot; `parts` has one entry for each module, None if there are none."""
        self.written &= ~(1 << slot)
        if all(part is None for part in parts):
            return
        if slot >= len(self.rows):
            grown = self.rows.new_zeros(max(4, 2 * slot), self.rows.shape[1])
            grown[: len(self.rows)] = self.rows
            if grown.is_cuda:
                torch.cuda.current_stream(grown.device).synchronize()
            self.rows = grown  # a step in flight keeps the old tensor, which has its slots
        for mine, part in zip(self.rows[slot].split(self._sizes), parts, strict=True):
            if part is None:
                mine.zero_()
            else:
                mine.copy_(part)
        self.written |= 1 << slot


class SiteVectors:
    """Gains and biases at one site."""

    def __init__(self, sizes: Sequence[int], sites: VectorSites) -> None:
        """Make the vectors of a projection into which modules of these sizes are merged."""
        self._sites = sites
        self._excess = _Table(sizes, sites.dtype, sites.device)  # g - 1
        self._biases = _Table(sizes, sites.dtype, sites.device)
        self.written = 0
        """Bit s is set when the adapter in slot s has vectors here."""

    def write(self, slot: int, gains: Sequence[Tensor | None], biases: Sequence[Tensor | None]) -> None:
        """Write an adapter's vectors to a slot, one entry for each module; None if there are none."""
        self._excess.write(slot, [None if gain is None else gain - 1 for gain in gains])
        self._biases.write(slot, biases)
        self.written = self._excess.written | self._biases.written

    def scale(
        self,
        y: Tensor,
        adapters: LoraBatch,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        biased: bool = True,
    ) -> None:
        """Set y [T, out] = (y - bias - residual) * gains + bias + residual + biases, for tokens of adapters with these.
        The adapters' biases are left out unless `biased`.

        The subtraction recovers the base product, so that one fused product serves all tokens. In a narrow dtype this
        adds rounding errors of `y`'s size times |g - 1|, which is usually far below 1. Each product and each sum is
        rounded by itself, so a token's result does not depend on its position.
        """
        for table, apply in ((self._excess, self._apply_gains), (self._biases, self._add_biases)):
            if table.written and (biased or table is self._excess):
                apply(y, adapters, bias, residual)

    def _apply_gains(self, y: Tensor, adapters: LoraBatch, bias: Tensor | None, residual: Tensor | None) -> None:
        table = self._excess
        if is_grouped(y.dtype, y.device):
            from ...kernels.lora.device_rows import apply_gains  # imports Triton

            slots_of_tokens = self._sites.of_tokens(adapters, table.written, len(y))
            if slots_of_tokens is not None:
                apply_gains(y, table.rows, slots_of_tokens, bias, residual)
            return
        found = self._sites.slot_tokens(adapters, table.written)
        if found is None:
            return
        tokens, slots = found
        whole = y[tokens]  # a view for a slice, else a copy
        base = whole
        if residual is not None:
            base = base - residual[tokens]
        if bias is not None:
            base = base - bias
        whole += table.rows[slots] * base
        if isinstance(tokens, Tensor):
            y[tokens] = whole

    def _add_biases(self, y: Tensor, adapters: LoraBatch, *_: Tensor | None) -> None:
        table = self._biases
        if is_grouped(y.dtype, y.device):
            slots = self._sites.of_tokens(adapters, table.written, len(y))
            if slots is not None:
                # Not a product with 0: a bias that is not finite would affect other adapters' tokens.
                y += table.rows[slots.clamp(min=0)].masked_fill_((slots < 0).unsqueeze(1), 0)
            return
        found = self._sites.slot_tokens(adapters, table.written)
        if found is not None:
            y[found.tokens] += table.rows[found.slots]


class VectorSites:
    """Vectors of all sites of a model. Each adapter on the device with vectors has a slot, the same at all sites."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._sites: list[tuple[SiteVectors, list[str]]] = []
        self._slots: dict[int, int] = {}  # by the adapter's first row
        self._lock = threading.Lock()
        # Tokens of the last step by the slots with vectors at a site: most sites have the same slots.
        self._last: tuple[LoraBatch | None, dict[int, Any]] = (None, {})

    def add(self, modules: Sequence[tuple[str, int]]) -> SiteVectors:
        """Add a site; `modules` has (name, rows) of each module merged into the projection."""
        site = SiteVectors([size for _, size in modules], self)
        self._sites.append((site, [name for name, _ in modules]))
        return site

    @torch.inference_mode()
    def write(self, allocation: Allocation, gains: Mapping[str, Tensor], biases: Mapping[str, Tensor]) -> None:
        """Write an adapter's vectors by module, and remove the vectors of former owners of its rows.

        While no step uses these rows. The engine's thread writes small adapters, a loader thread large ones.
        """
        with self._lock:
            for row in allocation.rows:
                slot = self._slots.pop(row, None)
                if slot is not None:
                    self._write(slot, {}, {})
            if gains or biases:
                taken = set(self._slots.values())
                slot = next(slot for slot in itertools.count() if slot not in taken)
                self._slots[allocation.rows[0]] = slot
                self._write(slot, gains, biases)

    def _write(self, slot: int, gains: Mapping[str, Tensor], biases: Mapping[str, Tensor]) -> None:
        for site, names in self._sites:
            site.write(slot, [gains.get(name) for name in names], [biases.get(name) for name in names])

    def slot_tokens(self, step: LoraBatch, written: int) -> _SlotTokens | None:
        """Return a step's tokens with vectors at a site. `written` has bit s set when slot s has some there."""
        found = self._of_step(step)
        if written not in found:
            found[written] = _slot_tokens(self._runs(step, written), self.device)
        slot_tokens: _SlotTokens | None = found[written]
        return slot_tokens

    def of_tokens(self, step: LoraBatch, written: int, num_tokens: int) -> Tensor | None:
        """Return each token's slot, [T] int32 with -1 for tokens without vectors; None if no token has any."""
        found = self._of_step(step)
        if written not in found:
            runs = self._runs(step, written)
            slots = torch.full((num_tokens,), -1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
            for slot, start, stop in runs:
                slots[start:stop] = slot
            found[written] = slots.to(self.device, non_blocking=True) if runs else None
        slots_of_tokens: Tensor | None = found[written]
        return slots_of_tokens

    def _of_step(self, step: LoraBatch) -> dict[int, Any]:
        """Return the cache of a step. A device uses either `slot_tokens` or `of_tokens`, so they share it."""
        if self._last[0] is not step:
            self._last = (step, {})
        return self._last[1]

    def _runs(self, step: LoraBatch, written: int) -> list[tuple[int, int, int]]:
        """Return (slot, start, stop) of the runs whose adapters have vectors in these slots."""
        return [
            (slot, start, stop)
            for owner, start, stop in step.runs
            if owner is not None and (slot := self._slots.get(owner.rows[0])) is not None and written >> slot & 1
        ]
