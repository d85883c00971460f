"""Layers of decoders of the GPT shape: LayerNorm, and mostly an MLP without a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention import AttentionBackend
from .batch import ForwardBatch, LayerKV
from .config import DecoderConfig
from .families.block import Block
from .layers.linear import Linear
from .layers.mlp import GatedMlp, Mlp, PlainMlp
from .layers.norm import LayerNorm
from .layers.positions import PositionTable
from .layers.weights import WeightSlot


class GPTLayer:
    """Attention and MLP, each after a norm and added to the residual stream; see `Block` for other orders."""

    def __init__(
        self, config: DecoderConfig, block: Block, index: int, attention: AttentionBackend, device: torch.device
    ) -> None:
        self._block = block
        self._attention = attention
        self._window = config.windows[index]
        self._rope = config.ropes.index(config.layer_ropes[index]) if config.layer_ropes else 0
        sizes = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
        hidden, inner = config.hidden_size, config.intermediate_size
        common: Any = {"dtype": config.dtype, "device": device, "batch_invariant": config.batch_invariant}
        ours, theirs = f"layers.{index}", f"{block.layers}.{index}"
        names = [f"{theirs}.{name}" for name in block.qkv]
        slices = [(names[0], sum(sizes))] if len(names) == 1 else list(zip(names, sizes, strict=True))
        self.qkv = Linear(f"{ours}.qkv", slices, hidden, bias=config.qkv_bias, **common)
        self.o = Linear(f"{ours}.o", [(f"{theirs}.{block.out}", hidden)], sizes[0], bias=config.o_bias, **common)
        options = {"bias": config.mlp_bias, **common}
        self.mlp: Mlp
        if block.mlp is None:
            self.mlp = GatedMlp(ours, f"{theirs}.mlp", (hidden, inner), activation=config.hidden_act, **options)
        else:
            up, down = (f"{theirs}.{name}" for name in block.mlp)
            self.mlp = PlainMlp(ours, (up, down), (hidden, inner), activation=config.hidden_act, **options)
        norm_options: Any = {"dtype": config.dtype, "device": device}
        self._norms = [
            LayerNorm(f"{theirs}.{name}", hidden, config.rms_norm_eps, bias=block.norm_bias, **norm_options)
            for name in block.norms
        ]
        self._head_order: Tensor | None = None
        if block.by_head and config.num_kv_heads > 1:
            places = torch.arange(sum(sizes) // config.head_dim, device=device).view(config.num_kv_heads, -1)
            self._head_order = torch.cat((places[:, :-2].flatten(), places[:, -2], places[:, -1]))

    def forward(self, hidden: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """Compute the next layer's hidden [T, H] from hidden [T, H]."""
        first, second = self._norms[0], self._norms[-1]
        if not self._block.norm_first:
            hidden = first(self._attend(hidden, batch, kv, hidden))
            return second(self.mlp.forward(hidden, batch, hidden))
        normed = first(hidden)
        attended = self._attend(normed, batch, kv, hidden)
        if not self._block.parallel:
            return self.mlp.forward(second(attended), batch, attended)
        return self.mlp.forward(normed if second is first else second(hidden), batch, attended)

    def _attend(self, x: Tensor, batch: ForwardBatch, kv: LayerKV, residual: Tensor) -> Tensor:
        qkv = self.qkv.forward(x, batch)
        if self._head_order is not None:
            heads = qkv.view(len(qkv), len(self._head_order), -1)
            qkv = heads.index_select(1, self._head_order).view(qkv.shape)
        rotation = batch.rotations[self._rope]
        attended = self._attention.forward_qkv(qkv, rotation, None, kv, batch.attention, self._window)
        return self.o.forward(attended, batch, residual=residual)

    def linears(self) -> list[Linear]:
        """Linear layers in the order of the computation."""
        return [self.qkv, self.o, *self.mlp.linears()]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names."""
        slots = self.qkv.weight_slots() | self.o.weight_slots() | self.mlp.weight_slots()
        if self._block.transposed:
            slots = {name: slot.transposed() if len(slot.shape) == 2 else slot for name, slot in slots.items()}
        for norm in self._norms:
            slots |= norm.weight_slots()
        return slots


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
        self._norm: LayerNorm | None = None
        if block.final_norm is not None:
            self._norm = LayerNorm(block.final_norm, hidden, config.rms_norm_eps, bias=block.norm_bias, **common)
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
