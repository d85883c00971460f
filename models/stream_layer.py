"""Layers and ends of a model with several residual streams (AltUp, Baykal et al. 2023; Gemma 3n).

A layer predicts all streams from those before it, computes one, and corrects the predictions by the difference.

S streams, T tokens, H hidden size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .batch import ForwardBatch, LayerKV
from .config import DecoderConfig
from .layers.linear import Linear
from .layers.norm import RMSNorm
from .layers.weights import WeightSlot
from .varied_layer import VariedLayer

_LEAST_SQUARE = 1e-5
"""Smallest mean square by which a stream is divided."""


class StreamLayer(VariedLayer):
    """Layer whose hidden states are [S, T, H]."""

    def _make_sides(self) -> None:
        super()._make_sides()
        streams, hidden = self._varied.streams, self._config.hidden_size
        assert streams is not None, "the config has streams"
        self._streams = streams
        self._left = self._linear("laurel_left", {"laurel.linear_left": streams.side_rank}, hidden, bias=False)
        self._right = self._linear("laurel_right", {"laurel.linear_right": hidden}, streams.side_rank, bias=False)
        self._side_norm = self._norm(["laurel.post_laurel_norm"], hidden)
        number = streams.number
        self._predictor, self._corrector = (
            self._linear(f"altup_{kind}", {f"altup.{kind}_coefs": size}, number, bias=False)
            for kind, size in (("prediction", number**2), ("correction", number))
        )
        self._router = self._linear("altup_router", {"altup.modality_router": number}, hidden, bias=False)
        self._router_norm = self._norm(["altup.router_norm"], hidden)
        self._router_norm.factor = 1 / hidden
        self._factors: Tensor | None = None

    def forward(self, hidden: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """Compute the next layer's hidden [S, T, H]; see DecoderLayer."""
        assert self._gate is not None, "the config has inputs of layers"
        assert batch.layer_inputs is not None, "the decoder computes them"
        assert self._before_attention is not None, "the family has all norms"
        assert self._before_mlp is not None, "the family has all norms"
        predicted = self._predicted(hidden, batch)
        active = predicted[self._streams.active]
        normed = self._before_attention(active)
        side = normed + self._side_norm(self._right.forward(self._left.forward(normed, batch), batch))
        attended = self._leaving(self._after_attention, self._mix(normed, batch, kv))
        x = (active + attended + side) / math.sqrt(2)
        x = x + self._leaving(self._after_mlp, self.mlp.forward(self._before_mlp(x), batch))
        corrected = self._corrected(predicted, x, batch)
        first = corrected[self._streams.active]
        first = first if self._factors is None else first * self._factors
        corrected[1:] += self._gate.forward(first, batch.layer_inputs[:, self._index], batch)
        return corrected

    def _routed(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Inputs [T, S] of the coefficients for x [T, H]."""
        return self._router.forward(self._router_norm(x), batch).float().tanh().to(x.dtype)

    def _predicted(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Predicted streams [S, T, H]: each is itself and a mixture of all."""
        routed = self._routed(hidden[self._streams.active], batch)
        number = self._streams.number
        mixture = self._predictor.forward(routed, batch).float().view(-1, number, number).permute(1, 2, 0)
        wide = hidden.float()
        total = torch.zeros_like(wide)
        for index in range(number):  # one after another, so that a token's sums do not depend on others
            total = total + mixture[:, index, :, None] * wide[index]
        return total.to(hidden.dtype) + hidden

    def _corrected(self, predicted: Tensor, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Streams [S, T, H] for the computed state x [T, H]."""
        factors = self._corrector.forward(self._routed(x, batch), batch) + 1.0
        return predicted + (x - predicted[self._streams.active]) * factors.t().unsqueeze(-1)

    def linears(self) -> list[Linear]:
        """See DecoderLayer."""
        own = [self._router, self._predictor, self._corrector, self._left, self._right]
        return [*own, *super().linears()]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See DecoderLayer."""
        slots = super().weight_slots()
        for linear in (self._router, self._predictor, self._corrector, self._left, self._right):
            slots |= linear.weight_slots()
        shape = (self._config.hidden_size,)
        return slots | {f"{self._theirs}.altup.correct_output_scale": WeightSlot(shape, self._load_factors)}

    def _load_factors(self, tensor: Tensor) -> None:
        if self._streams.scaled:
            self._factors = tensor.to(self._common["device"], self._config.dtype, copy=True)


class StreamEnds:
    """Projections of a token's embedding to the streams, and of the streams to one state."""

    def __init__(self, config: DecoderConfig, final_norm: RMSNorm, device: torch.device) -> None:
        assert config.varied is not None, "the config has streams"
        assert config.varied.streams is not None, "the config has streams"
        common: Any = {"dtype": config.dtype, "device": device, "batch_invariant": config.batch_invariant}
        hidden, number = config.hidden_size, config.varied.streams.number
        self._final_norm = final_norm
        self._into, self._out_of = (
            [Linear(f"{name}.{i}", [(f"model.{name}.{i}", hidden)], hidden, **common) for i in range(number - 1)]
            for name in ("altup_projections", "altup_unembed_projections")
        )

    def enter(self, embedded: Tensor, batch: ForwardBatch) -> Tensor:
        """Streams [S, T, H] for the embeddings [T, H], all of one size."""
        others = [linear.forward(embedded, batch) for linear in self._into]
        return torch.stack([embedded, *(_sized(x, embedded) for x in others)])

    def leave(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Normalised state [T, H] that the head reads."""
        first = hidden[0]
        total = first
        for linear, x in zip(self._out_of, hidden[1:], strict=True):
            total = total + _sized(linear.forward(x.contiguous(), batch), first)
        return self._final_norm(total / len(hidden))

    def linears(self) -> list[Linear]:
        """Linear layers in the order of the computation."""
        return [*self._into, *self._out_of]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names."""
        slots = self._final_norm.weight_slots()
        for linear in self.linears():
            slots |= linear.weight_slots()
        return slots


def _sized(x: Tensor, like: Tensor) -> Tensor:
    """States x [T, H] with the root mean square of those of `like`."""
    size = x.square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()
    return x * like.square().mean(-1, keepdim=True).sqrt() / size
