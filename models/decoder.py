"""Decoder of all supported families, which differ in their DecoderConfig alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.rms_norm import adds_residuals
from .attention import AttentionBackend, AttentionSpec, make_attention
from .batch import ForwardBatch, KVLayerSpec, LayerKV
from .config import DecoderConfig
from .layers.embedding import Embedding
from .layers.experts import make_mlp
from .layers.linear import Linear
from .layers.norm import RMSNorm
from .layers.rope import RotaryEmbedding
from .layers.weights import RenamedSlot, WeightSlot


class DecoderOutput(NamedTuple):
    """Result of a forward pass."""

    hidden: Tensor
    """[T, H] hidden states after the final norm."""
    aux: tuple[Tensor, ...]
    """[T, H] each: hidden states that enter the requested layers; empty when they were copied."""


class DecoderLayer:
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, index: int, attention: AttentionBackend, device: torch.device) -> None:
        self._attention = attention
        self._window = config.windows[index]
        heads = config.num_heads * config.head_dim
        kv_heads = config.num_kv_heads * config.head_dim
        hidden = config.hidden_size
        common: Any = {"dtype": config.dtype, "device": device, "batch_invariant": config.batch_invariant}
        ours, theirs = f"layers.{index}", f"model.layers.{index}"

        def linear(name: str, modules: dict[str, int], in_features: int, bias: bool) -> Linear:
            slices = [(f"{theirs}.{module}", rows) for module, rows in modules.items()]
            return Linear(f"{ours}.{name}", slices, in_features, bias=bias, **common)

        def norm(names: list[str], size: int, repeats: list[int] | None = None) -> RMSNorm:
            full = [f"{theirs}.{name}.weight" for name in names]
            return RMSNorm(full, size, config.rms_norm_eps, repeats=repeats, **common)

        qkv = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads, "self_attn.v_proj": kv_heads}
        self.qkv = linear("qkv", qkv, hidden, config.qkv_bias)
        self.o = linear("o", {"self_attn.o_proj": hidden}, heads, config.o_bias)
        self.mlp = make_mlp(config, index, device)
        self.input_norm = norm(["input_layernorm"], hidden)
        self.post_norm = norm(["post_attention_layernorm"], hidden)
        self.qk_norm: RMSNorm | None = None
        if config.qk_norm:
            repeats = [config.num_heads, config.num_kv_heads]
            self.qk_norm = norm(["self_attn.q_norm", "self_attn.k_norm"], config.head_dim, repeats)

    def forward(self, hidden: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """Compute the next layer's hidden [T, H] from hidden [T, H]."""
        qkv = self.qkv.forward(self.input_norm(hidden), batch)
        attended = self._attention.forward_qkv(qkv, batch.rotation, self.qk_norm, kv, batch.attention, self._window)
        hidden = self.o.forward(attended, batch, residual=hidden)
        return self.mlp.forward(self.post_norm(hidden), batch, hidden)

    def forward_deferred(
        self, hidden: Tensor, delta: Tensor | None, batch: ForwardBatch, kv: LayerKV
    ) -> tuple[Tensor, Tensor]:
        """Compute the layer for hidden + delta [T, H]; return such a pair, which the next norm adds."""
        if delta is None:
            normed = self.input_norm(hidden)
        else:
            normed, hidden = self.input_norm.add(delta, hidden)
        qkv = self.qkv.forward(normed, batch)
        attended = self._attention.forward_qkv(qkv, batch.rotation, self.qk_norm, kv, batch.attention, self._window)
        normed, hidden = self.post_norm.add(self.o.forward(attended, batch), hidden)
        return hidden, self.mlp.forward(normed, batch)

    def linears(self) -> list[Linear]:
        """Linear layers in the order of the computation."""
        return [self.qkv, self.o, *self.mlp.linears()]

    def norms(self) -> list[RMSNorm]:
        """Norms in a fixed order."""
        return [norm for norm in (self.input_norm, self.post_norm, self.qk_norm) if norm is not None]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names."""
        slots = self.qkv.weight_slots() | self.o.weight_slots() | self.mlp.weight_slots()
        for norm in self.norms():
            slots |= norm.weight_slots()
        return slots


class Decoder:
    """Causal language model. It is built without weights: fill every slot of `weight_slots`, then run it."""

    def __init__(self, config: DecoderConfig, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.device = torch.device(device)
        spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            windows=frozenset(config.windows),
            dtype=config.dtype,
            device=self.device,
        )
        self.attention = make_attention(spec, batch_invariant=config.batch_invariant)
        self.rope = RotaryEmbedding(config.rope, config.head_dim, dtype=config.dtype, device=self.device)
        self._adds_in_norms = adds_residuals(self.device) and not config.batch_invariant
        self.layers = [DecoderLayer(config, i, self.attention, self.device) for i in range(config.num_layers)]
        common: Any = {"dtype": config.dtype, "device": self.device, "batch_invariant": config.batch_invariant}
        self._embedding = Embedding(
            config.vocab_size,
            config.hidden_size,
            tied=config.tie_word_embeddings,
            **common,
        )
        self._final_norm = RMSNorm(["model.norm.weight"], config.hidden_size, config.rms_norm_eps, **common)

    @property
    def kv_layers(self) -> list[KVLayerSpec]:
        """Cache of each layer for a token, in order."""
        return [KVLayerSpec(self.config.num_kv_heads, self.config.head_dim)] * self.config.num_layers

    @property
    def num_parameters(self) -> int:
        """Elements of all weights; a tied head counts once."""
        return sum(torch.Size(slot.shape).numel() for slot in self.weight_slots().values())

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, aux_layers: Sequence[int] = ()) -> DecoderOutput:
        """Compute a batch; the tokens' KV is written to `batch.kv`.

        Args:
            aux_layers: Layers whose entering hidden states are returned too; the number of layers means the output of
                the last one. They cost nothing but memory.
        """
        hidden = self._embedding.lookup(batch.input_ids, batch.adapters)
        if self._adds_in_norms:
            return self._forward_deferred(hidden, batch, aux_layers)
        entering: dict[int, Tensor] = {}
        for index, (layer, kv) in enumerate(zip(self.layers, batch.kv, strict=True)):
            if index in aux_layers:
                entering[index] = hidden
            hidden = layer.forward(hidden, batch, kv)
        last = len(self.layers)
        entering[last] = hidden
        return DecoderOutput(self._final_norm(hidden), tuple(map(entering.__getitem__, aux_layers)))

    def _forward_deferred(self, hidden: Tensor, batch: ForwardBatch, aux_layers: Sequence[int]) -> DecoderOutput:
        """Compute a batch with one launch less for each projection: norms add the residual stream."""
        entering: dict[int, Tensor] = {}
        delta: Tensor | None = None
        for index, (layer, kv) in enumerate(zip(self.layers, batch.kv, strict=True)):
            if index in aux_layers:
                hidden, delta = hidden if delta is None else hidden + delta, None
                entering[index] = hidden
            hidden, delta = layer.forward_deferred(hidden, delta, batch, kv)
        assert delta is not None, "there is a layer"
        normed, entering[len(self.layers)] = self._final_norm.add(delta, hidden)
        return DecoderOutput(normed, tuple(map(entering.__getitem__, aux_layers)))

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, adapters: Any = None, out: Tensor | None = None) -> Tensor:
        """Logits [R, vocab_size] float32 of hidden [R, H], in `out` if given. `adapters` is the input of the head's
        LoRA site for these R rows alone; None when none of them has an adapter there."""
        return self._embedding.logits(hidden, adapters, out)

    @property
    def embedding(self) -> Embedding:
        """Token embeddings and the head."""
        return self._embedding

    def linears(self) -> list[Linear]:
        """Linear layers that adapters may target."""
        return [linear for layer in self.layers for linear in layer.linears()]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots of all tensors that the model needs, by their names in HF checkpoints."""
        slots = self._embedding.weight_slots()
        for layer in self.layers:
            slots.update(layer.weight_slots())
        return slots | self._final_norm.weight_slots()

    def renamed_slots(self) -> dict[str, RenamedSlot]:
        """Slots of tensors that some checkpoints have instead of others."""
        return {name: slot for layer in self.layers for name, slot in layer.mlp.renamed_slots().items()}
