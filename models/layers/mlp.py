"""Second half of a layer: the interface of all kinds, the gated MLP (Shazeer 2020), and the one without a gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, Protocol

import torch
from torch import Tensor

from ...kernels.act_and_mul import ACTIVATIONS, act_and_mul, act_and_mul_invariant
from .activation import plain_activation
from .linear import AdapterRows, Linear
from .norm import RMSNorm
from .weights import RenamedSlot, WeightSlot


class Mlp(Protocol):
    """Computation after a layer's second norm."""

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
        projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        scales: tuple[float, float] = (1.0, 1.0),
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
            projections: Names in the checkpoint of gate and up, or of both merged, and of down; adapters target them.
            scales: Factors of the gate before the activation, and of the result.
            sparsity: Part of the gate that is cut off; 0: nothing is.
            common: Options of every `Linear`.
        """
        hidden, inner = sizes
        self._act_and_mul = act_and_mul_invariant if common["batch_invariant"] else act_and_mul
        self._activation = activation
        *merged, down = projections
        slices = [(f"{module}.{projection}", 2 * inner // len(merged)) for projection in merged]
        self._inner, self._scales = inner, scales
        self._deviations: float | None = None
        self.gather: Callable[[Tensor], Tensor] | None = None
        """Function that puts the tensors of all ranks together, each of which has some of the inner elements; None:
        this process has all."""
        if sparsity:
            quantile = torch.tensor(NormalDist().inv_cdf(sparsity), dtype=common["dtype"])
            self._deviations = float(quantile)
        self._gate_up = Linear(f"{name}.gate_up", slices, hidden, bias=bias, **common)
        self._down = Linear(f"{name}.down", [(f"{module}.{down}", hidden)], inner, bias=bias, **common)

    def forward(self, x: Tensor, batch: AdapterRows, residual: Tensor | None = None) -> Tensor:
        """See `Mlp`."""
        gate_up, (gate_scale, scale) = self._gate_up.forward(x, batch), self._scales
        if self._deviations is not None:
            self._cut(gate_up[:, : self._inner], self._deviations)
        if gate_scale != 1.0:
            gate_up[:, : self._inner] *= gate_scale
        inner = self._act_and_mul(gate_up, self._activation)
        if scale == 1.0:
            return self._down.forward(inner, batch, residual)
        y = self._down.forward(inner, batch).mul_(scale)
        return y if residual is None else y.add_(residual)

    def fuses(self, num_tokens: int, adapters: Any) -> bool:
        """True if `forward_fused` serves `num_tokens` tokens with these adapters."""
        is_plain = self._scales == (1.0, 1.0) and self._deviations is None and self._activation in ACTIVATIONS
        return is_plain and all(linear.fuses(num_tokens, adapters) for linear in self.linears())

    def forward_fused(self, hidden: Tensor, norm: RMSNorm, batch: AdapterRows) -> Tensor:
        """Compute hidden + `forward` of its norm, [T, H], in two launches and, with adapters, two more."""
        inner = self._gate_up.forward_fused(hidden, batch, norm=norm.weight, activation=self._activation)
        return self._down.forward_fused(inner, batch, residual=hidden)

    def _cut(self, gate: Tensor, deviations: float) -> None:
        """Lower the gate [T, I] in place by its mean and `deviations` standard deviations, to at least 0 (Gemma 3n)."""
        own = gate.contiguous()
        mean, deviation = own.mean(-1, keepdim=True), own.std(-1, keepdim=True, unbiased=False)
        if self.gather is not None:  # the variance of all is that within ranks, and that between them
            means, within = self.gather(torch.cat((mean, deviation), 1)).split(1, 2)
            mean = means.mean(0)
            deviation = (within.square().mean(0) + (means - mean).square().mean(0)).sqrt()
        gate.copy_(torch.relu_(own - (mean + deviation * deviations)))

    def linears(self) -> list[Linear]:
        """See `Mlp`."""
        return [self._gate_up, self._down]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See `Mlp`."""
        return self._gate_up.weight_slots() | self._down.weight_slots()

    def renamed_slots(self) -> dict[str, RenamedSlot]:
        """See `Mlp`."""
        return {}


class PlainMlp:
    """W_down act(W_up x). Implements Mlp."""

    def __init__(
        self, name: str, modules: tuple[str, str], sizes: tuple[int, int], *, bias: bool, activation: str, **common: Any
    ) -> None:
        """`modules` and `sizes`: names in the checkpoint of up and down; hidden and inner size."""
        hidden, inner = sizes
        self._activation = plain_activation(activation, batch_invariant=common["batch_invariant"])
        self._up = Linear(f"{name}.up", [(modules[0], inner)], hidden, bias=bias, **common)
        self._down = Linear(f"{name}.down", [(modules[1], hidden)], inner, bias=bias, **common)

    def forward(self, x: Tensor, batch: AdapterRows, residual: Tensor | None = None) -> Tensor:
        """See `Mlp`."""
        return self._down.forward(self._activation(self._up.forward(x, batch)), batch, residual)

    def linears(self) -> list[Linear]:
        """See `Mlp`."""
        return [self._up, self._down]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See `Mlp`."""
        return self._up.weight_slots() | self._down.weight_slots()

    def renamed_slots(self) -> dict[str, RenamedSlot]:
        """See `Mlp`."""
        return {}
