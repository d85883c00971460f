"""Layer with latent attention (DeepSeek-V2, DeepSeek-AI 2024, section 2.1).

A token's cache is one vector [R + L]: the rotated part of its keys, which all heads share, and its latent c. Keys and
values of a head are W_k c and W_v c, but they are never computed: a query is multiplied by W_k, attends to the latents
as to keys and values of one KV head, and W_v multiplies the result ("absorbed" form).

T tokens, H heads, L rank, R rotated and N other elements of a query, V elements of a value.
"""

from __future__ import annotations

from torch import Tensor

from .batch import ForwardBatch, LayerKV
from .decoder_layer import DecoderLayer
from .layers.latent_products import LatentProducts
from .layers.linear import Linear
from .layers.norm import RMSNorm
from .layers.weights import WeightSlot

_EPS = 1e-6
"""Epsilon of the norms between two projections, whatever the file says of the others."""


class LatentLayer(DecoderLayer):
    """Layer of DeepSeek-V2: latent attention and MLP, each after a norm and added to the residual stream."""

    def _make_projections(self) -> None:
        config, latent = self._config, self._config.latent
        assert latent is not None, "the config has latent attention"
        self._latent = latent
        hidden, heads = config.hidden_size, config.num_heads
        queries = {"self_attn.q_proj": heads * latent.query_dim}
        self._query_norm: RMSNorm | None = None
        self._query_b: Linear | None = None
        if latent.query_rank is not None:
            queries = {"self_attn.q_a_proj": latent.query_rank}
            self._query_norm = self._norm(["self_attn.q_a_layernorm"], latent.query_rank, eps=_EPS)
            full = {"self_attn.q_b_proj": heads * latent.query_dim}
            self._query_b = self._linear("q_b", full, latent.query_rank, bias=False)
        self._key_norm = self._norm(["self_attn.kv_a_layernorm"], latent.rank, eps=_EPS)
        first = queries | {"self_attn.kv_a_proj_with_mqa": latent.key_dim}
        self.qkv = self._linear("qkv", first, hidden, bias=config.qkv_bias)
        self.o = self._linear("o", {"self_attn.o_proj": hidden}, heads * latent.value_dim, bias=config.o_bias)
        name = f"{self._theirs}.self_attn.kv_b_proj"
        self._products = LatentProducts(f"{self._ours}.kv_b", name, heads, latent, **self._common)

    def forward(self, hidden: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """See DecoderLayer."""
        hidden = self.o.forward(self._attend(self.input_norm(hidden), batch, kv), batch, residual=hidden)
        return self.mlp.forward(self.post_norm(hidden), batch, hidden)

    def forward_deferred(
        self, hidden: Tensor, delta: Tensor | None, batch: ForwardBatch, kv: LayerKV
    ) -> tuple[Tensor, Tensor]:
        """See DecoderLayer."""
        normed, hidden = (self.input_norm(hidden), hidden) if delta is None else self.input_norm.add(delta, hidden)
        normed, hidden = self.post_norm.add(self.o.forward(self._attend(normed, batch, kv), batch), hidden)
        return hidden, self.mlp.forward(normed, batch)

    def _attend(self, x: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """Values [T, H · V] of the heads for x [T, hidden]."""
        latent, heads = self._latent, self._config.num_heads
        first = self.qkv.forward(x, batch)
        query, c, rotated = first.split([first.shape[1] - latent.key_dim, latent.rank, latent.rope_dim], 1)
        if self._query_b is not None and self._query_norm is not None:
            query = self._query_b.forward(self._query_norm(query.contiguous()), batch)
        plain, turned = query.reshape(len(x), heads, -1).split([latent.plain_dim, latent.rope_dim], 2)
        qkv = x.new_empty(len(x), heads + 1, latent.key_dim)
        qkv[:, :heads, : latent.rope_dim] = turned
        qkv[:, :heads, latent.rope_dim :] = self._products.queries(plain, batch)
        qkv[:, heads, : latent.rope_dim] = rotated
        qkv[:, heads, latent.rope_dim :] = self._key_norm(c.contiguous())
        attended = self._attention.forward_qkv(
            qkv.flatten(1), batch.rotations[self._rope], None, kv, batch.attention, self._window
        )
        return self._products.values(attended.view(len(x), heads, -1)[..., latent.rope_dim :], batch).flatten(1)

    def linears(self) -> list[Linear]:
        """See DecoderLayer."""
        between = [] if self._query_b is None else [self._query_b]
        return [self.qkv, *between, self._products, self.o, *self.mlp.linears()]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See DecoderLayer."""
        slots = super().weight_slots()
        if self._query_b is not None:
            slots |= self._query_b.weight_slots()
        return slots | self._products.weight_slots()
