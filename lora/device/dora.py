"""Adapters with trained magnitudes (DoRA; Liu et al. 2024, arXiv:2402.09353, section 4) beside those without.

    y = g ∘ (x Wᵀ + x Aᵀ Bᵀ) + bias        g = m / ||W + B A||, row by row; B with the scale folded in
      = (x Wᵀ + bias) + (g - 1) ∘ x Wᵀ + x Aᵀ (g ∘ B)ᵀ

g is computed once, when the adapter is read, and folded into B: what is left for the step is the middle term, for the
tokens of adapters that have one. The others are not touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ...kernels.lora.groups import is_grouped
from .pool import Allocation

if TYPE_CHECKING:
    from ...models.layers.embedding import Embedding
    from ...models.layers.linear import Linear

# From this length on a run is scaled by itself, without a copy of the gains for each token.
_LONG_RUN = 16


class BaseWeight(NamedTuple):
    """Facts that gains need of the weight W [out, in] that an adapter changes; callable in any thread."""

    squares: Callable[[], Tensor]
    """[out] float32: ||W||² by rows."""
    project: Callable[[Tensor], Tensor]
    """x [n, in] to x Wᵀ [n, out]."""


def of_slice(linear: Linear, start: int, size: int) -> BaseWeight:
    """Gains of the module whose rows of a merged projection begin at `start`."""

    def squares() -> Tensor:
        assert linear.row_squares is not None
        return linear.row_squares[start : start + size]

    return BaseWeight(squares, lambda x: linear.project(x)[:, start : start + size])


def of_table(embedding: Embedding) -> BaseWeight:
    """Gains of token embeddings, which an adapter sees as a weight [hidden, vocab]."""
    return BaseWeight(embedding.table_squares, embedding.project_table)


def of_head(embedding: Embedding) -> BaseWeight:
    """Gains of the LM head."""

    def squares() -> Tensor:
        assert embedding.head_squares is not None
        return embedding.head_squares

    return BaseWeight(squares, embedding.project_head)


@torch.no_grad()
def gains(magnitude: Tensor, a: Tensor, b: Tensor, base: BaseWeight) -> Tensor:
    """g [out] float32, without ever having W: ||W + B A||² = ||W||² + 2 B · (W Aᵀ) + B (A Aᵀ) Bᵀ, row by row.

    Args:
        magnitude: [out].
        a: [r, in], in the dtype served.
        b: [r, out] float32, the scale folded in.
    """
    norms = base.squares()
    cross = base.project(a.to(norms.device)).float().cpu()
    wide = a.float()
    squares = norms.cpu() + (b * (2 * cross + (wide @ wide.t()) @ b)).sum(0)
    return magnitude.float() / squares.clamp_(min=0).sqrt_()


class Runs(Protocol):
    """One step's adapters; see `LoraBatch`."""

    @property
    def runs(self) -> Sequence[tuple[Allocation | None, int, int]]:
        """(owner, start, stop) of neighbouring tokens of one adapter, ascending."""
        ...


class _Piece(NamedTuple):
    """Tokens whose adapters have gains at a site, and the slots with these."""

    tokens: slice | Tensor
    slots: int | Tensor


class GainSlots:
    """Which adapters on the device have gains, and a slot for each of them, the same at all sites of a model.

    Slots are taken and given back in the thread that writes rows, of adapters that no step uses meanwhile.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._slots: dict[int, int] = {}  # by the adapter's first row
        # The last step's tokens by the slots with gains at a site: most sites have the same.
        self._last: tuple[Runs | None, dict[int, list[_Piece]]] = (None, {})
        self._last_slots: tuple[Runs | None, dict[int, Tensor | None]] = (None, {})  # the same for `of_tokens`

    def give_back(self, allocation: Allocation) -> list[int]:
        """The slots of adapters whose rows these were."""
        found = [self._slots.pop(int(row), None) for row in allocation.rows]
        return [slot for slot in found if slot is not None]

    def take(self, allocation: Allocation) -> int:
        """A slot for the adapter with these rows."""
        taken = set(self._slots.values())
        slot = next(slot for slot in itertools.count() if slot not in taken)
        self._slots[int(allocation.rows[0])] = slot
        return slot

    def pieces(self, step: Runs, written: int) -> list[_Piece]:
        """A step's tokens of adapters with gains at a site; `written`: bit s for slot s, those that have."""
        batch, pieces = self._last
        if batch is not step:
            pieces = {}
            self._last = (step, pieces)
        if written not in pieces:
            pieces[written] = _pieces(self._runs(step, written), self.device)
        return pieces[written]

    def of_tokens(self, step: Runs, written: int, num_tokens: int) -> Tensor | None:
        """[T] int32: the slots of a step's tokens, -1 for those without; None where no token has one."""
        batch, found = self._last_slots
        if batch is not step:
            found = {}
            self._last_slots = (step, found)
        if written not in found:
            runs = self._runs(step, written)
            slots = torch.full((num_tokens,), -1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
            for slot, start, stop in runs:
                slots[start:stop] = slot
            found[written] = slots.to(self.device, non_blocking=True) if runs else None
        return found[written]

    def _runs(self, step: Runs, written: int) -> list[tuple[int, int, int]]:
        return [
            (slot, start, stop)
            for owner, start, stop in step.runs
            if owner is not None and (slot := self._slots.get(int(owner.rows[0]))) is not None and written >> slot & 1
        ]


def _pieces(runs: Sequence[tuple[int, int, int]], device: torch.device) -> list[_Piece]:
    long = [_Piece(slice(start, stop), slot) for slot, start, stop in runs if stop - start >= _LONG_RUN]
    short = [run for run in runs if run[2] - run[1] < _LONG_RUN]
    if not short:
        return long
    start, stop = short[0][1], short[-1][2]
    tokens: slice | Tensor = slice(start, stop)
    if sum(stop - start for _, start, stop in short) < stop - start:  # not side by side
        tokens = torch.tensor([token for _, start, stop in short for token in range(start, stop)], device=device)
    slots = torch.tensor([slot for slot, start, stop in short for _ in range(start, stop)], device=device)
    return [*long, _Piece(tokens, slots)]


class Gains:
    """The gains at one site, a row for each adapter on the device that has any."""

    def __init__(self, sizes: Sequence[int], slots: GainSlots) -> None:
        """`sizes` of the modules merged into the projection."""
        self._sizes = list(sizes)
        self._slots = slots
        self._excess = torch.zeros(0, sum(sizes), dtype=slots.dtype, device=slots.device)  # [slots, out]: g - 1
        self.written = 0
        """Bit s: the adapter in slot s has gains here."""

    def write(self, slot: int, parts: Sequence[Tensor | None]) -> None:
        """Fill an adapter's slot; `parts` has one entry for each of the sizes, None where it has no gains."""
        self.clear(slot)
        if all(part is None for part in parts):
            return
        if slot >= len(self._excess):
            grown = self._excess.new_zeros(max(4, 2 * slot), self._excess.shape[1])
            grown[: len(self._excess)] = self._excess
            if grown.is_cuda:
                torch.cuda.current_stream(grown.device).synchronize()
            self._excess = grown  # steps under way have the old ones; their slots are in both
        for mine, part in zip(self._excess[slot].split(self._sizes), parts, strict=True):
            if part is None:
                mine.zero_()
            else:
                mine.copy_(part - 1)
        self.written |= 1 << slot

    def clear(self, slot: int) -> None:
        """The adapter in a slot has no gains here any more."""
        self.written &= ~(1 << slot)

    def scale(self, y: Tensor, adapters: Runs, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        """y [T, out] = (y - bias - residual) * gains + bias + residual, for tokens of adapters with gains here.

        The base product is got back from `y`, so that all tokens go through the one fused product. In a narrow dtype it
        comes back with rounding errors such as `y` has anyway, and |g - 1|, mostly far below 1, scales them. Products
        and sums are rounded one by one, so that a token's result does not depend on its place.
        """
        if not self.written:
            return
        if is_grouped(y.dtype, y.device):
            from ...kernels.lora.device_rows import apply_gains  # imports Triton

            slots_of_tokens = self._slots.of_tokens(adapters, self.written, len(y))
            if slots_of_tokens is not None:
                apply_gains(y, self._excess, slots_of_tokens, bias, residual)
            return
        for tokens, slots in self._slots.pieces(adapters, self.written):
            whole = y[tokens]  # a view of neighbours, else a copy
            base = whole
            if residual is not None:
                base = base - residual[tokens]
            if bias is not None:
                base = base - bias
            whole += self._excess[slots] * base
            if isinstance(tokens, Tensor):
                y[tokens] = whole


class GainSites:
    """The gains of all sites of a model."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._slots = GainSlots(dtype, device)
        self._sites: list[tuple[Gains, list[str]]] = []

    def add(self, modules: Sequence[tuple[str, int]]) -> Gains:
        """A new site for (module name, rows) of each merged projection."""
        site = Gains([size for _, size in modules], self._slots)
        self._sites.append((site, [name for name, _ in modules]))
        return site

    @torch.inference_mode()
    def write(self, allocation: Allocation, parts: Mapping[str, Tensor]) -> None:
        """An adapter takes these rows, with gains by module or none; those of the rows' former owners go.

        For any one thread at a time, as long as no step uses these rows.
        """
        for slot in self._slots.give_back(allocation):
            for site, _ in self._sites:
                site.clear(slot)
        if parts:
            slot = self._slots.take(allocation)
            for site, names in self._sites:
                site.write(slot, [parts.get(name) for name in names])
