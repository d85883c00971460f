"""Second half of a layer: the interface of all kinds, and the gated MLP (Shazeer 2020)."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any, Protocol

import torch
from torch import Tensor

from ...kernels.act_and_mul import act_and_mul, act_and_mul_invariant
from .linear import AdapterRows, Linear
from .weights import RenamedSlot, WeightSlot


class Mlp(Protocol):
    """Computation behind a layer's second norm."""

    def forward(self, x: Tensor, batch: AdapterRows, residual: Tensor | None = None) -> Tensor:
        """Compute a new tensor [T, H] from x [T, H]; `residual` [T, H] is added."""

    def linears(self) -> list[Linear]:
        """Linear layers that adapters may target, in the order of the computation."""

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names."""

    def renamed_slots(self) -> dict[str, RenamedSlot]:
        """Slots by the names that other versions of transformers write."""


class GatedMlp:
    """W_down (act(W_gate x) · W_up x), gate and up merged into one product."""

    def __init__(
        self,
        name: str,
        module: str,
        sizes: tuple[int, int],
        *,
        bias: bool = False,
        activation: str = "silu",
        merged: bool = False,
        projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        sparsity: float = 0.0,
        **common: Any,
    ) -> None:
        """Make an MLP without weights.

        Args:
            name: Name of the layer, such as "layers.3".
            module: Name in the checkpoint, such as "model.layers.3.mlp".
            sizes: Hidden and inner size.
            bias: True when all products have biases.
            activation: Name of one of kernels/act_and_mul.
            projections: Names in the checkpoint.
            sparsity: Part of the gate that is cut off; 0: nothing is.
            merged: True when the checkpoint has one tensor gate_up_proj, which adapters target.
            common: Options of every `Linear`.
        """
        hidden, inner = sizes
        self._act_and_mul = act_and_mul_invariant if common["batch_invariant"] else act_and_mul
        self._activation = activation
        self._inner = inner
        self._deviations: float | None = None
        if sparsity:
            quantile = torch.tensor(NormalDist().inv_cdf(sparsity), dtype=common["dtype"])
            self._deviations = float(quantile)
        gate, up, down = projections
        slices = [(f"{module}.{gate}", inner), (f"{module}.{up}", inner)]
        if merged:
            slices = [(f"{module}.gate_up_proj", 2 * inner)]
        self._gate_up = Linear(f"{name}.gate_up", slices, hidden, bias=bias, **common)
        self._down = Linear(f"{name}.down", [(f"{module}.{down}", hidden)], inner, bias=bias, **common)

    def forward(self, x: Tensor, batch: AdapterRows, residual: Tensor | None = None) -> Tensor:
        """See `Mlp`."""
        gate_up = self._gate_up.forward(x, batch)
        if self._deviations is not None:
            self._cut(gate_up[:, : self._inner], self._deviations)
        return self._down.forward(self._act_and_mul(gate_up, self._activation), batch, residual)

    @staticmethod
    def _cut(gate: Tensor, deviations: float) -> None:
        """Lower the gate [T, I] by its mean and so many standard deviations, to 0 at least, in place (Gemma 3n)."""
        own = gate.contiguous()
        cutoff = own.mean(-1, keepdim=True) + own.std(-1, keepdim=True, unbiased=False) * deviations
        gate.copy_(torch.relu_(own - cutoff))

    def linears(self) -> list[Linear]:
        """See `Mlp`."""
        return [self._gate_up, self._down]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See `Mlp`."""
        return self._gate_up.weight_slots() | self._down.weight_slots()

    def renamed_slots(self) -> dict[str, RenamedSlot]:
        """See `Mlp`."""
        return {}
