"""Causal depthwise convolution of a layer; `kernels.short_convolution` has its equation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...kernels.short_convolution import Filters, short_convolution
from ..layers.weights import RenamedSlot, WeightSlot
from ..ranges import Range, Rows, rows_of_tensors
from .memory import LayerStates, StatePass


class Convolution:
    """Weights of a convolution with one filter for each channel; sums are made in float32."""

    def __init__(
        self, parts: Mapping[str, int], kernel: int, *, bias: bool, dtype: torch.dtype, device: torch.device, **_: Any
    ) -> None:
        """`parts`: modules in the checkpoint, and the channels of each; one module if there is a `bias`."""
        self._parts, self._kernel = parts, kernel
        self._has_bias = bias
        self._dtype, self._device = dtype, device
        self._share: Sequence[Rows] | None = None
        self._taps: Tensor | None = None
        self._bias: Tensor | None = None

    def divide(self, channels: Sequence[Range]) -> None:
        """Have these ranges of the channels in the checkpoint alone."""
        self._share = list(rows_of_tensors(channels, list(self._parts.values())))

    def forward(self, x: Tensor, states: StatePass, memory: LayerStates, *, silu: bool = False) -> Tensor:
        """Compute y [T, C], and SiLU of it with `silu`, from x [T, C], and write the states of `memory`."""
        assert self._taps is not None, "the loader left no slot empty"
        return short_convolution(x, Filters(self._taps, self._bias), states, memory.conv, silu=silu)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names."""
        slots, first = {}, 0
        share = self._share or [Rows.whole(channels) for channels in self._parts.values()]
        for (name, channels), rows in zip(self._parts.items(), share, strict=True):
            shape = (rows.total, 1, self._kernel)
            slots[f"{name}.weight"] = WeightSlot(shape, partial(self._load, first, rows), self._kernel**-0.5)
            if self._has_bias:
                slots[f"{name}.bias"] = WeightSlot((rows.total,), partial(self._load_bias, rows), 0.02)
            first += channels
        return slots

    def merged_slots(self, name: str) -> dict[str, RenamedSlot]:
        """Slot of one module `name` with the channels of all parts."""
        share = self._share or [Rows.whole(channels) for channels in self._parts.values()]
        slices, total = [], 0
        for rows in share:
            slices += [slice(part.start + total, part.stop + total) for part in rows.slices]
            total += rows.total
        slot = WeightSlot((total, 1, self._kernel), partial(self._load, 0, Rows(total, slices)), self._kernel**-0.5)
        return {f"{name}.weight": RenamedSlot(slot, tuple(f"{part}.weight" for part in self._parts))}

    def _load(self, first: int, rows: Rows, tensor: Tensor) -> None:
        if self._taps is None:
            self._taps = torch.empty(self._kernel, sum(self._parts.values()), device=self._device)
        weight = rows.of(tensor).to(self._device, self._dtype).squeeze(1)
        self._taps[:, first : first + len(weight)] = weight.t()

    def _load_bias(self, rows: Rows, tensor: Tensor) -> None:
        self._bias = rows.of(tensor).to(self._device, self._dtype, copy=True).float()
