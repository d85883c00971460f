"""Causal depthwise convolution over ragged rows, whose first tokens read inputs of their state.

y[t] = sum over j in [0, K) of w[j] · x[t - (K - 1) + j]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layers.weights import WeightSlot
from .memory import LayerStates, StatePass


class Convolution:
    """Weights of a convolution with one filter for each channel; sums are made in float32."""

    def __init__(
        self, name: str, channels: int, kernel: int, *, bias: bool, dtype: torch.dtype, device: torch.device, **_: Any
    ) -> None:
        """`name`: of the module in the checkpoint."""
        self._name, self._shape = name, (channels, 1, kernel)
        self._has_bias = bias
        self._dtype, self._device = dtype, device
        self._taps: tuple[Tensor, ...] = ()
        self._bias: Tensor | None = None

    def forward(self, x: Tensor, states: StatePass, memory: LayerStates) -> Tensor:
        """Compute y [T, C] from x [T, C], and write the states of `memory`."""
        history = memory.conv.index_select(0, states.sources)
        inputs = torch.cat((history.flatten(0, 1), x))
        slots, index = states.conv_writes
        memory.conv[slots] = inputs[index]
        out: Tensor | None = self._bias
        for weight, places in zip(self._taps, states.taps, strict=True):
            product = inputs.index_select(0, places) * weight  # float32, as the weight
            out = product if out is None else out + product
        assert out is not None, "a kernel has taps"
        return out.to(x.dtype)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names."""
        slots = {f"{self._name}.weight": WeightSlot(self._shape, self._load, self._shape[2] ** -0.5)}
        if self._has_bias:
            slots[f"{self._name}.bias"] = WeightSlot(self._shape[:1], self._load_bias, 0.02)
        return slots

    def _load(self, tensor: Tensor) -> None:
        weight = tensor.to(self._device, self._dtype).float().squeeze(1)
        self._taps = tuple(weight.t().contiguous().unbind(0))

    def _load_bias(self, tensor: Tensor) -> None:
        self._bias = tensor.to(self._device, self._dtype, copy=True).float()
