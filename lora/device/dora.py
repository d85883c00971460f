"""DoRA: adapters with trained magnitudes (Liu et al. 2024, arXiv:2402.09353, section 4), beside adapters without.

    y = g ∘ (x Wᵀ + x Aᵀ Bᵀ) + bias        g = m / ||W + B A||, row by row; B with the scale folded in
      = (x Wᵀ + bias) + (g - 1) ∘ x Wᵀ + x Aᵀ (g ∘ B)ᵀ

The gain g is computed once, when the adapter is read, and folded into B. A step adds only the middle term, and only for
tokens whose adapter has gains.

T tokens of a step; out, in: features of a projection; r rank of an adapter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.lora.groups import is_grouped
from .pool import Allocation

if TYPE_CHECKING:
    from ...models.layers.embedding import Embedding
    from ...models.layers.linear import Linear
    from .layers import LoraBatch


class BaseWeight(NamedTuple):
    """Functions of the base weight W [out, in] that gains need. Thread-safe."""

    squares: Callable[[], Tensor]
    """Returns the squared norm of each row, [out] float32."""
    project: Callable[[Tensor], Tensor]
    """Returns x Wᵀ [n, out] for x [n, in]."""


def slice_weight(linear: Linear, start: int, size: int) -> BaseWeight:
    """Return the weight of one module of a merged projection: `size` rows from `start` on."""

    def squares() -> Tensor:
        assert linear.row_squares is not None
        return linear.row_squares[start : start + size]

    return BaseWeight(squares, lambda x: linear.project(x)[:, start : start + size])


def table_weight(embedding: Embedding) -> BaseWeight:
    """Return the token embeddings, which an adapter sees as a weight [hidden, vocab]."""
    return BaseWeight(embedding.table_squares, embedding.project_table)


def head_weight(embedding: Embedding) -> BaseWeight:
    """Return the weight of the LM head."""

    def squares() -> Tensor:
        assert embedding.head_squares is not None
        return embedding.head_squares

    return BaseWeight(squares, embedding.project_head)


@torch.no_grad()
def compute_gains(magnitude: Tensor, a: Tensor, b: Tensor, base: BaseWeight) -> Tensor:
    """Compute g [out] float32 from ||W + B A||² = ||W||² + 2 B · (W Aᵀ) + B (A Aᵀ) Bᵀ, row by row, without a copy of W.

    Args:
        magnitude: m, [out].
        a: [r, in], in the dtype of use.
        b: [r, out] float32, with the scale folded in.
    """
    norms = base.squares()
    cross = base.project(a.to(norms.device)).float().cpu()
    wide = a.float()
    squares = norms.cpu() + (b * (2 * cross + (wide @ wide.t()) @ b)).sum(0)
    return magnitude.float() / squares.clamp_(min=0).sqrt_()


class _GainTokens(NamedTuple):
    """Tokens whose adapters have gains at a site, and the slot of each, or of all."""

    tokens: slice | Tensor
    slots: int | Tensor


def _gain_tokens(runs: Sequence[tuple[int, int, int]], device: torch.device) -> _GainTokens | None:
    """Return the tokens of runs (slot, start, stop); None when there are none."""
    if not runs:
        return None
    lengths = [stop - start for _, start, stop in runs]
    first, last = runs[0][1], runs[-1][2]
    tokens: slice | Tensor = slice(first, last)
    if sum(lengths) < last - first:  # not side by side
        tokens = torch.tensor([token for _, start, stop in runs for token in range(start, stop)], device=device)
    if len({slot for slot, _, _ in runs}) == 1:
        return _GainTokens(tokens, runs[0][0])
    slots = torch.tensor([slot for slot, _, _ in runs], device=device)
    return _GainTokens(tokens, slots.repeat_interleave(torch.tensor(lengths, device=device)))


class Gains:
    """Gains at one site, with a row for each slot."""

    def __init__(self, sizes: Sequence[int], sites: GainSites) -> None:
        """Make gains for a projection into which modules of these sizes are merged."""
        self._sizes = list(sizes)
        self._sites = sites
        self._excess = torch.zeros(0, sum(sizes), dtype=sites.dtype, device=sites.device)  # [slots, out]: g - 1
        self.written = 0
        """Bit s is set when the adapter in slot s has gains here."""

    def write(self, slot: int, parts: Sequence[Tensor | None]) -> None:
        """Write an adapter's gains to a slot; `parts` has one entry for each module, None where there are none."""
        self.clear(slot)
        if all(part is None for part in parts):
            return
        if slot >= len(self._excess):
            grown = self._excess.new_zeros(max(4, 2 * slot), self._excess.shape[1])
            grown[: len(self._excess)] = self._excess
            if grown.is_cuda:
                torch.cuda.current_stream(grown.device).synchronize()
            self._excess = grown  # a step under way keeps the old tensor, which has its slots
        for mine, part in zip(self._excess[slot].split(self._sizes), parts, strict=True):
            if part is None:
                mine.zero_()
            else:
                mine.copy_(part - 1)
        self.written |= 1 << slot

    def clear(self, slot: int) -> None:
        """Remove the gains of a slot."""
        self.written &= ~(1 << slot)

    def scale(self, y: Tensor, adapters: LoraBatch, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        """Set y [T, out] = (y - bias - residual) * gains + bias + residual, for tokens of adapters with gains here.

        The subtraction recovers the base product, so that one fused product serves all tokens. In a narrow dtype this
        adds rounding errors as large as those of `y`, scaled by |g - 1|, which is mostly far below 1. Each product and
        each sum is rounded by itself, so a token's result does not depend on its position.
        """
        if not self.written:
            return
        if is_grouped(y.dtype, y.device):
            from ...kernels.lora.device_rows import apply_gains  # imports Triton

            slots_of_tokens = self._sites.of_tokens(adapters, self.written, len(y))
            if slots_of_tokens is not None:
                apply_gains(y, self._excess, slots_of_tokens, bias, residual)
            return
        found = self._sites.gain_tokens(adapters, self.written)
        if found is None:
            return
        tokens, slots = found
        whole = y[tokens]  # a view for a slice, else a copy
        base = whole
        if residual is not None:
            base = base - residual[tokens]
        if bias is not None:
            base = base - bias
        whole += self._excess[slots] * base
        if isinstance(tokens, Tensor):
            y[tokens] = whole


class GainSites:
    """Gains of all sites of a model. Each adapter on the device with gains has a slot, the same at all sites."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._sites: list[tuple[Gains, list[str]]] = []
        self._slots: dict[int, int] = {}  # by the adapter's first row
        # Tokens of the last step by the slots with gains at a site: most sites have the same slots.
        self._last: tuple[LoraBatch | None, dict[int, Any]] = (None, {})

    def add(self, modules: Sequence[tuple[str, int]]) -> Gains:
        """Add a site; `modules` has (name, rows) of each module merged into the projection."""
        site = Gains([size for _, size in modules], self)
        self._sites.append((site, [name for name, _ in modules]))
        return site

    @torch.inference_mode()
    def write(self, allocation: Allocation, parts: Mapping[str, Tensor]) -> None:
        """Write an adapter's gains by module, and remove the gains of former owners of its rows.

        For one thread at a time, while no step uses these rows.
        """
        for row in allocation.rows:
            slot = self._slots.pop(row, None)
            if slot is not None:
                for site, _ in self._sites:
                    site.clear(slot)
        if parts:
            taken = set(self._slots.values())
            slot = next(slot for slot in itertools.count() if slot not in taken)
            self._slots[allocation.rows[0]] = slot
            for site, names in self._sites:
                site.write(slot, [parts.get(name) for name in names])

    def gain_tokens(self, step: LoraBatch, written: int) -> _GainTokens | None:
        """Return a step's tokens with gains at a site. `written` has bit s set when slot s has gains there."""
        found = self._of_step(step)
        if written not in found:
            found[written] = _gain_tokens(self._runs(step, written), self.device)
        gain_tokens: _GainTokens | None = found[written]
        return gain_tokens

    def of_tokens(self, step: LoraBatch, written: int, num_tokens: int) -> Tensor | None:
        """Return each token's slot, [T] int32 with -1 for tokens without gains; None where no token has gains."""
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
        """Return the cache of a step. A device uses either `gain_tokens` or `of_tokens`, so they share it."""
        if self._last[0] is not step:
            self._last = (step, {})
        return self._last[1]

    def _runs(self, step: LoraBatch, written: int) -> list[tuple[int, int, int]]:
        """Return (slot, start, stop) of the runs whose adapters have gains in these slots."""
        return [
            (slot, start, stop)
            for owner, start, stop in step.runs
            if owner is not None and (slot := self._slots.get(owner.rows[0])) is not None and written >> slot & 1
        ]
