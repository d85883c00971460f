"""Inputs that each layer has in addition to the hidden states (Gemma 3n and 4 call them per-layer embeddings).

    input = (norm(W e / sqrt(H)) + sqrt(P) · table[token]) / sqrt(2)

T tokens, L layers, P elements of an input, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.act_and_mul import act_and_mul, act_and_mul_invariant
from ..batch import ForwardBatch
from ..config import DecoderConfig
from .linear import Linear
from .norm import RMSNorm
from .weights import WeightSlot


class LayerInputs:
    """Table of all layers, and the projection of a token's embedding that is added to it."""

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        """Create them without weights."""
        assert config.varied is not None, "the config has such inputs"
        self._num_layers, self._size = config.num_layers, config.varied.input_size
        self._shape = config.varied.input_vocab_size, self._num_layers * self._size
        common: Any = {"dtype": config.dtype, "device": device, "batch_invariant": config.batch_invariant}
        self._dtype, self._device = config.dtype, device
        rows = [("model.per_layer_model_projection", self._shape[1])]
        self._projection = Linear("layer_inputs", rows, config.hidden_size, **common)
        name = "model.per_layer_projection_norm.weight"
        self._norm = RMSNorm([name], self._size, config.rms_norm_eps, **common)
        self._scales = (config.hidden_size**-0.5, *(self._rounded(x) for x in (self._size**0.5, 2.0**-0.5)))
        self._table: Tensor | None = None

    def _rounded(self, number: float) -> float:
        """A factor as a model in this dtype holds it."""
        return float(torch.tensor(number, dtype=self._dtype))

    def forward(self, embedded: Tensor, batch: ForwardBatch) -> Tensor:
        """Inputs [T, L, P] for the embeddings [T, H] of a batch."""
        assert self._table is not None, "the loader left no slot empty"
        first, of_table, of_both = self._scales
        projected = self._projection.forward(embedded, batch).mul_(first).view(-1, self._num_layers, self._size)
        # An adapter may have more tokens than the table.
        tokens = batch.input_ids.masked_fill(batch.input_ids >= self._shape[0], 0)
        own = F.embedding(tokens, self._table).mul_(of_table).view(projected.shape)
        return self._norm(projected).add_(own).mul_(of_both)

    def linears(self) -> list[Linear]:
        """Linear layers in the order of the computation."""
        return [self._projection]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names."""
        table = WeightSlot(self._shape, self._load_table, self._size**-0.5)
        slots = self._projection.weight_slots() | self._norm.weight_slots()
        return slots | {"model.embed_tokens_per_layer.weight": table}

    def _load_table(self, tensor: Tensor) -> None:
        self._table = tensor.to(self._device, self._dtype, copy=True)


class InputGate:
    """norm(W2 (act(W1 x) · input)): what a layer adds to the residual stream for its own input."""

    def __init__(self, gate: Linear, projection: Linear, norm: RMSNorm, config: DecoderConfig) -> None:
        self._parts = gate, projection
        self._norm = norm
        self._act_and_mul = act_and_mul_invariant if config.batch_invariant else act_and_mul
        self._activation = config.hidden_act

    def forward(self, x: Tensor, own: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute a new tensor [T, H] from x [T, H] and the layer's inputs `own` [T, P]."""
        gate, projection = self._parts
        inner = self._act_and_mul(torch.cat((gate.forward(x, batch), own), 1), self._activation)
        return self._norm(projection.forward(inner, batch))

    def linears(self) -> list[Linear]:
        """Linear layers in the order of the computation."""
        return list(self._parts)
