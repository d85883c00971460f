"""Layers of decoders of the GPT shape: LayerNorm with bias, and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .attention import AttentionBackend
from .batch import ForwardBatch, LayerKV
from .config import DecoderConfig
from .families.block import Block
from .layers.activation import activation
from .layers.linear import Linear
from .layers.norm import LayerNorm
from .layers.positions import PositionTable
from .layers.weights import WeightSlot


class GPTLayer:
    """Attention and MLP, each behind a norm and added to the residual stream, or each followed by a norm."""

    def __init__(
        self, config: DecoderConfig, block: Block, index: int, attention: AttentionBackend, device: torch.device
    ) -> None:
        self._block = block
        self._attention = attention
        self._window = config.windows[index]
        self._activation = activation(config.hidden_act, batch_invariant=config.batch_invariant)
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        common: Any = {"dtype": config.dtype, "device": device}
        ours, theirs = f"layers.{index}", f"{block.layers}.{index}"

        def linear(name: str, modules: Sequence[str], sizes: Sequence[int], in_features: int, bias: bool) -> Linear:
            slices = [(f"{theirs}.{module}", size) for module, size in zip(modules, sizes, strict=True)]
            invariant = config.batch_invariant
            return Linear(f"{ours}.{name}", slices, in_features, bias=bias, batch_invariant=invariant, **common)

        sizes = [heads, kv_heads, kv_heads]
        self.qkv = linear("qkv", block.qkv, sizes if len(block.qkv) > 1 else [sum(sizes)], hidden, config.qkv_bias)
        self.o = linear("o", [block.out], [hidden], heads, config.o_bias)
        self.up = linear("up", [block.up], [inner], hidden, config.mlp_bias)
        self.down = linear("down", [block.down], [hidden], inner, config.mlp_bias)
        self.attention_norm, self.mlp_norm = (
            LayerNorm(f"{theirs}.{name}", hidden, config.rms_norm_eps, **common) for name in block.norms
        )

    def forward(self, hidden: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """Compute the next layer's hidden [T, H] from hidden [T, H]."""
        if self._block.norm_first:
            hidden = self._attend(self.attention_norm(hidden), batch, kv, hidden)
            return self._mlp(self.mlp_norm(hidden), batch, hidden)
        hidden = self.attention_norm(self._attend(hidden, batch, kv, hidden))
        return self.mlp_norm(self._mlp(hidden, batch, hidden))

    def _attend(self, x: Tensor, batch: ForwardBatch, kv: LayerKV, residual: Tensor) -> Tensor:
        qkv = self.qkv.forward(x, batch)
        attended = self._attention.forward_qkv(qkv, batch.rotations[0], None, kv, batch.attention, self._window)
        return self.o.forward(attended, batch, residual=residual)

    def _mlp(self, x: Tensor, batch: ForwardBatch, residual: Tensor) -> Tensor:
        return self.down.forward(self._activation(self.up.forward(x, batch)), batch, residual=residual)

    def linears(self) -> list[Linear]:
        """Linear layers in the order of the computation."""
        return [self.qkv, self.o, self.up, self.down]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names."""
        slots: dict[str, WeightSlot] = {}
        for linear in self.linears():
            for name, slot in linear.weight_slots().items():
                slots[name] = slot.transposed() if self._block.transposed and len(slot.shape) == 2 else slot
        return slots | self.attention_norm.weight_slots() | self.mlp_norm.weight_slots()


class GPTEnds:
    """Steps before the first layer and after the last: position embeddings, a norm, and projections from embeddings of
    another size than the layers' and back."""

    def __init__(self, config: DecoderConfig, block: Block, device: torch.device) -> None:
        hidden, embedded = config.hidden_size, config.embedding_size
        common: Any = {"dtype": config.dtype, "device": device}

        def project(name: str, in_features: int, out_features: int) -> Linear:
            slices = [(f"{block.projections}{name}", out_features)]
            return Linear(name, slices, in_features, batch_invariant=config.batch_invariant, **common)

        shape = config.max_position_embeddings, hidden
        self._positions = block.positions and PositionTable(block.positions, shape, block.position_offset, **common)
        self._norm = block.final_norm and LayerNorm(block.final_norm, hidden, config.rms_norm_eps, **common)
        self._projections: list[Linear] = []
        if embedded != hidden:
            self._projections = [project("project_in", embedded, hidden), project("project_out", hidden, embedded)]

    def enter(self, embedded: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, H] that enter the first layer, from embeddings [T, E], which may be mutated."""
        hidden = self._projections[0].forward(embedded, batch) if self._projections else embedded
        return self._positions.add(hidden, batch.positions) if self._positions else hidden

    def leave(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """States [T, E] for the head, from the last layer's [T, H]."""
        normed = self._norm(hidden) if self._norm else hidden
        return self._projections[1].forward(normed, batch) if self._projections else normed

    def linears(self) -> list[Linear]:
        """Linear layers in the order of the computation."""
        return self._projections

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names."""
        parts = [part for part in (self._positions, self._norm, *self._projections) if part]
        return {name: slot for part in parts for name, slot in part.weight_slots().items()}
