"""Layers of a decoder: attention and MLP, each between norms and added to the residual stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.paged_attention import CACHE_FLOAT8
from .attention import AttentionBackend
from .batch import ForwardBatch, LayerKV
from .config import DecoderConfig
from .layers.cache_scales import CacheScales
from .layers.experts import make_mlp
from .layers.linear import Linear
from .layers.mlp import GatedMlp, Mlp
from .layers.norm import RMSNorm
from .layers.weights import RenamedSlot, WeightSlot


class DecoderLayer:
    """Layer of Llama: attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, index: int, attention: AttentionBackend, device: torch.device) -> None:
        self._attention = attention
        self._index = index
        self._window = config.windows[index]
        self._rope = config.ropes.index(config.layer_ropes[index]) if config.layer_ropes else 0
        self._common: Any = {"dtype": config.dtype, "device": device, "batch_invariant": config.batch_invariant}
        self._config = config
        self._ours, self._theirs = f"layers.{index}", f"model.layers.{index}"
        self._norms: list[RMSNorm] = []
        self._sinks: Tensor | None = None
        self.cache_scales = CacheScales(config.num_heads, config.num_kv_heads, config.head_dim, device)
        self._make_projections()
        self._index = index
        self.mlp = self._make_mlp(device)
        self._make_norms()

    def _make_mlp(self, device: torch.device) -> Mlp:
        return make_mlp(self._config, self._index, device)

    def _make_projections(self) -> None:
        config = self._config
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden = config.hidden_size
        self.qkv = self._make_qkv(heads, kv_heads)
        self.o = self._linear("o", {"self_attn.o_proj": hidden}, heads, bias=config.o_bias)
        self.qk_norm: RMSNorm | None = None
        if config.qk_norm:
            repeats = [config.num_heads, config.num_kv_heads]
            self.qk_norm = self._norm(["self_attn.q_norm", "self_attn.k_norm"], config.head_dim, repeats)

    def _make_qkv(self, heads: int, kv_heads: int) -> Linear:
        """Projection of queries with `heads` elements, and of keys and values with `kv_heads` each."""
        qkv = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads, "self_attn.v_proj": kv_heads}
        if self._config.merged_qkv:
            qkv = {"self_attn.qkv_proj": heads + 2 * kv_heads}
        return self._linear("qkv", qkv, self._config.hidden_size, bias=self._config.qkv_bias)

    def _linear(self, name: str, modules: dict[str, int], in_features: int, *, bias: bool) -> Linear:
        names = self._config.names
        slices = [(f"{self._theirs}.{names.get(module, module)}", rows) for module, rows in modules.items()]
        return Linear(f"{self._ours}.{name}", slices, in_features, bias=bias, **self._common)

    def _norm(self, names: list[str], size: int, repeats: list[int] | None = None, eps: float | None = None) -> RMSNorm:
        config = self._config
        full = [f"{self._theirs}.{config.names.get(name, name)}.weight" for name in names]
        options = {"repeats": repeats, "offset": config.norm_offset, **self._common}
        norm = RMSNorm(full, size, config.rms_norm_eps if eps is None else eps, **options)
        self._norms.append(norm)
        return norm

    def _make_norms(self) -> None:
        self.input_norm = self._norm(["input_layernorm"], self._config.hidden_size)
        self.post_norm = self._norm(["post_attention_layernorm"], self._config.hidden_size)

    def forward(self, hidden: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """Compute the next layer's hidden [T, H] from hidden [T, H]."""
        qkv = self.qkv.forward(self.input_norm(hidden), batch)
        attended = self._attend_qkv(qkv, batch, kv)
        hidden = self.o.forward(attended, batch, residual=hidden)
        return self.mlp.forward(self.post_norm(hidden), batch, hidden)

    def forward_deferred(
        self, hidden: Tensor, delta: Tensor | None, batch: ForwardBatch, kv: LayerKV
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer for hidden + delta [T, H]; return such a pair, which the next norm adds."""
        if self._fuses(len(hidden), batch.adapters):
            return self._forward_fused(hidden if delta is None else hidden + delta, batch, kv), None
        if delta is None:
            normed = self.input_norm(hidden)
        else:
            normed, hidden = self.input_norm.add(delta, hidden)
        qkv = self.qkv.forward(normed, batch)
        attended = self._attend_qkv(qkv, batch, kv)
        normed, hidden = self.post_norm.add(self.o.forward(attended, batch), hidden)
        return hidden, self.mlp.forward(normed, batch)

    def _fuses(self, num_tokens: int, adapters: Any) -> bool:
        """True if products of few tokens take over norms, activation and residual stream."""
        mlp = self.mlp
        return (
            all(linear.fuses(num_tokens, adapters) for linear in (self.qkv, self.o))
            and isinstance(mlp, GatedMlp)
            and mlp.fuses(num_tokens, adapters)
        )

    def _forward_fused(self, hidden: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """Compute the next layer's hidden [T, H] in five launches and, with adapters, four more."""
        qkv = self.qkv.forward_fused(hidden, batch, norm=self.input_norm.weight)
        attended = self._attend_qkv(qkv, batch, kv)
        hidden = self.o.forward_fused(attended, batch, residual=hidden)
        assert isinstance(self.mlp, GatedMlp), "`_fuses` is True"
        return self.mlp.forward_fused(hidden, self.post_norm, batch)

    def _attend_qkv(self, qkv: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """Attention's result [T, H · D] for a projection's output qkv [T, (H + 2 Hk) · D], which is mutated."""
        scales = self.cache_scales if self.cache_scales.are_used and kv.k.dtype == CACHE_FLOAT8 else None
        norm = self.qk_norm if scales is None else scales.enter(qkv, self.qk_norm)
        rotation = batch.rotations[self._rope]
        attended = self._attention.forward_qkv(qkv, rotation, norm, kv, batch.attention, self._window, self._sinks)
        return attended if scales is None else scales.leave(attended)

    def linears(self) -> list[Linear]:
        """Linear layers in the order of the computation."""
        return [self.qkv, self.o, *self.mlp.linears()]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names."""
        slots = self.qkv.weight_slots() | self.o.weight_slots() | self.mlp.weight_slots()
        for norm in self._norms:
            slots |= norm.weight_slots()
        return slots

    def renamed_slots(self) -> dict[str, RenamedSlot]:
        """Slots of tensors that some checkpoints have instead of others."""
        renamed, slots = self.mlp.renamed_slots(), self.weight_slots() if self._config.aliases else {}
        for other, name in self._config.aliases.items():
            if (usual := f"{self._theirs}.{name}.weight") in slots:
                renamed[f"{self._theirs}.{other}.weight"] = RenamedSlot(slots[usual], (usual,))
        return renamed


class GeneralLayer(DecoderLayer):
    """Layer with any of the norms before and after attention and MLP, a factor of what these two add, sinks, and
    factors of queries by their positions."""

    sink_part: tuple[int, slice] | None = None
    """Heads of the whole layer and those of this process, set before it is loaded; None: all are its own."""

    def _make_norms(self) -> None:
        config = self._config
        self._before_attention, self._after_attention, self._before_mlp, self._after_mlp = (
            None if name is None else self._norm([name], config.hidden_size) for name in config.norms
        )
        self.wide_norms: list[tuple[RMSNorm, slice]] = []
        """Norms of all queries and of all keys, and their columns in those of this process."""
        if config.qk_norm_wide:
            heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
            for name, start, size in (("q", 0, heads), ("k", heads, kv_heads)):
                norm = self._norm([f"self_attn.{name}_norm"], size)
                self.wide_norms.append((norm, slice(start, start + size)))

    def forward(self, hidden: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """See DecoderLayer."""
        hidden, delta = self.forward_deferred(hidden, None, batch, kv)
        return hidden + delta

    def forward_deferred(
        self, hidden: Tensor, delta: Tensor | None, batch: ForwardBatch, kv: LayerKV
    ) -> tuple[Tensor, Tensor]:
        """See DecoderLayer."""
        normed, hidden = entering(self._before_attention, hidden, delta)
        delta = self._leaving(self._after_attention, self._mix(normed, batch, kv))
        normed, hidden = entering(self._before_mlp, hidden, delta)
        return hidden, self._leaving(self._after_mlp, self._feed(normed, hidden, batch))

    def _mix(self, normed: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """Result [T, H] of attention, or of what a layer has in its place, for normed hidden [T, H]."""
        config, qkv = self._config, self.qkv.forward(normed, batch)
        for norm, columns in self.wide_norms:
            qkv[:, columns] = norm(qkv[:, columns].contiguous())
        if config.query_scaling is not None:
            beta, length = config.query_scaling
            factors = 1 + beta * torch.log1p((batch.positions / length).floor())
            qkv[:, : config.num_heads * config.head_dim] *= factors.to(qkv.dtype).unsqueeze(1)
        return self.o.forward(self._attend_qkv(qkv, batch, kv), batch)

    def _feed(self, normed: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Result [T, H] of the MLP for normed hidden [T, H]; `hidden` [T, H] is not normalised."""
        return self.mlp.forward(normed, batch)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See DecoderLayer."""
        slots = super().weight_slots()
        if self._config.sinks:
            heads = self._config.num_heads if self.sink_part is None else self.sink_part[0]
            slots[f"{self._theirs}.self_attn.sinks"] = WeightSlot((heads,), self._load_sinks, 1.0)
        return slots

    def _load_sinks(self, tensor: Tensor) -> None:
        if self.sink_part is not None:
            tensor = tensor[self.sink_part[1]]
        # Rounded to the model's dtype first, as in a model that holds its weights in it.
        self._sinks = tensor.to(self._common["device"], self._config.dtype).float().contiguous()

    def _leaving(self, norm: RMSNorm | None, x: Tensor) -> Tensor:
        if norm is not None:
            x = norm(x)
        return x if self._config.residual_scale == 1.0 else x.mul_(self._config.residual_scale)


def entering(norm: RMSNorm | None, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Norm, if there is one, of hidden + delta, and this sum."""
    if norm is not None and delta is not None:
        return norm.add(delta, hidden)
    if delta is not None:
        hidden = hidden + delta
    return hidden if norm is None else norm(hidden), hidden
