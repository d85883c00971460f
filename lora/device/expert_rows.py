"""Adapters' weights of experts on a GPU. They have separate memory while their adapter is loaded: rank rows of all
experts would be as wide as the model.

E experts of a layer, P pairs of a token and one of its experts, k experts of a token, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .layout import PackedRows
from .pool import Allocation

if TYPE_CHECKING:
    from ...kernels.experts.triton_lora import ExpertRows
    from ...models.layers.linear import Linear
    from .layers import LoraBatch


class ExpertSite:
    """One projection of all experts of a layer."""

    def __init__(self, linears: Sequence[Linear], device: torch.device) -> None:
        """Make the site of projections of equal shape, by expert."""
        self._linears = linears
        self._device = device
        self._rows: WeakKeyDictionary[Allocation, list[ExpertRows]] = WeakKeyDictionary()

    def write(self, allocation: Allocation, weights: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Write an adapter's A [r, in] and B [r, out] of each module."""
        from ...kernels.experts.triton_lora import ExpertRows, stack  # imports Triton

        parts: list[ExpertRows] = []
        held: dict[tuple[int, ...], Tensor] = {}  # parts of the same experts share one
        first = self._linears[0]
        start = 0
        for index, (_, size) in enumerate(first.slices):
            names = [linear.slices[index][0] for linear in self._linears]
            found = {expert: weights[name] for expert, name in enumerate(names) if name in weights}
            if found:
                rank = max(len(a) for a, _ in found.values())
                a, b = (
                    stack(part, len(names), shape, self._device)
                    for part, shape in (
                        ({expert: pair[0] for expert, pair in found.items()}, (rank, first.in_features)),
                        ({expert: pair[1].t() for expert, pair in found.items()}, (size, rank)),
                    )
                )
                key = tuple(found)
                if key not in held:
                    held[key] = torch.tensor([e in found for e in range(len(names) + 1)], device=self._device)
                parts.append(ExpertRows(a, b, slice(start, start + size), held[key]))
            start += size
        if parts:
            self._rows[allocation] = parts

    def num_bytes(self, allocation: Allocation) -> int:
        """Bytes of an adapter's weights, which grow with the experts that it has."""
        return sum(part.a.num_bytes + part.b.num_bytes for part in self._rows.get(allocation, []))

    def add(self, y: Tensor, x: Tensor, experts: Tensor, adapters: LoraBatch) -> None:
        """Add the adapters' deltas for x, [T, in] or [P, in], and experts [T, k] to y [P, out] in place."""
        from ...kernels.experts.triton_lora import add_rows  # imports Triton

        owners = {run.owner for run in adapters.runs if run.owner is not None and run.owner in self._rows}
        for owner in sorted(owners, key=lambda owner: owner.rows):
            mine = torch.zeros(len(experts), dtype=torch.bool)
            for run in adapters.runs:
                if run.owner is owner:
                    mine[run.start : run.stop] = True
            add_rows(y, x, experts, mine.to(y.device), self._rows[owner])


class ExpertSites:
    """The sites of a model's experts."""

    def __init__(self, linears: Sequence[Linear], device: torch.device) -> None:
        """Make a site of each layer and projection."""
        groups: dict[tuple[str, str], list[Linear]] = {}
        for linear in linears:
            layer, _, rest = linear.name.partition(".experts.")
            groups.setdefault((layer, rest.partition(".")[2]), []).append(linear)
        self._sites = [ExpertSite(group, device) for group in groups.values()]
        for site, group in zip(self._sites, groups.values(), strict=True):
            for linear in group:
                linear.expert_lora = site

    @torch.inference_mode()
    def write(self, allocation: Allocation, packed: PackedRows) -> None:
        """Write an adapter's weights. They are freed with the allocation."""
        weights = packed.weights()
        for site in self._sites:
            site.write(allocation, weights)
