"""The networks of EAGLE heads: decoder layers. The first reads a token and the target's hidden state before it.

EAGLE-1/2 (Li et al. 2024), e being the token's embedding, h the target's hidden state after its final norm:

    x = fc([e; h]);  x += attention(x) without a norm before it;  x += mlp(norm(x));  logits = target's head(x)

EAGLE-3 (Li et al. 2025), g = fc([hidden states entering three layers of the target]):

    x = g + attention([norm(e); norm(g)]);  x += mlp(norm(x));  further layers as Llama's;  logits = head(norm(x))

x replaces h or g in further drafts. P-EAGLE (Hui et al. 2026) makes these in the same pass, with e and g of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....kernels.act_and_mul import act_and_mul
from ....kernels.rms_norm import adds_residuals
from ....kernels.rope import Rotation
from ....models.attention import attention_spec, make_attention
from ....models.batch import ForwardBatch, KVLayerSpec, SequenceRows
from ....models.decoder_layer import DecoderLayer
from ....models.layers.linear import Linear
from ....models.layers.norm import RMSNorm
from ....models.layers.rope import RotaryEmbedding
from ....models.layers.weights import WeightSlot
from ....models.model import LanguageModel
from ...verify.draft_sampling import DraftVocabulary
from ..base import PreparedAdapters
from ..checkpoint import check_shared, draft_vocabulary
from .config import MASK, EagleConfig

LAYER = "layers.0"


@dataclass(frozen=True, slots=True)
class LastRows:
    """The B tokens, of a batch of T, whose output is wanted; of the others only the KV is kept."""

    rows: SequenceRows
    adapters: Callable[[], Any]
    """Prepares the adapters of these B rows, when the adapters of the T tokens are no longer needed: on a device both
    use the same memory."""


class ShiftedRope(RotaryEmbedding):
    """The head's rotary embedding: the pair stored at position p of a sequence is rotated as position p - 1."""

    def rotations(
        self, positions: Tensor, end: int, in_long_prompt: Tensor | None = None, *, gathers: bool = True
    ) -> tuple[Rotation, ...]:
        """See `RotaryEmbedding`; all positions are at least 1."""
        return super().rotations(positions - 1, end, in_long_prompt, gathers=gathers)


class EagleHead:
    """Layers, built without weights: fill every slot of `weight_slots`, then run them."""

    def __init__(self, config: EagleConfig, target: LanguageModel, device: str) -> None:
        """`target` lends embeddings and head if the head has none.

        Raises:
            InvalidRequestError: its hidden size differs.
        """
        self.config = config
        self.device = torch.device(device)
        self.target = target
        """Lends the embedding and the output head that the head lacks."""
        layer = config.layer
        own = {"own_embedding": config.own_embedding, "own_head": config.own_head}
        check_shared("head", layer.hidden_size, config.target_hidden_size, **own)
        self.attention = make_attention(attention_spec(layer, self.device))
        self.rope = ShiftedRope(layer.ropes, layer.head_dim, dtype=layer.dtype, device=self.device)
        self._build_linears()
        self._build_norms()
        self._further = [DecoderLayer(layer, i, self.attention, self.device) for i in range(1, layer.num_layers)]
        self._embedding: Tensor | None = None
        self._mask: Tensor | None = None
        self._mask_state: Tensor | None = None  # without adapters
        self.vocabulary: DraftVocabulary | None = None
        """Set by the slot "d2t"."""

    def _build_linears(self) -> None:
        config, layer = self.config, self.config.layer
        hidden, inner, heads = layer.hidden_size, layer.intermediate_size, layer.num_heads * layer.head_dim
        kv_heads = layer.num_kv_heads * layer.head_dim
        fused = len(config.aux_layers) * config.target_hidden_size

        def linear(name: str, modules: dict[str, int], in_features: int, bias: bool) -> Linear:
            return Linear(name, list(modules.items()), in_features, bias=bias, dtype=layer.dtype, device=self.device)

        attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
        qkv = {f"{attention}.q_proj": heads, f"{attention}.k_proj": kv_heads, f"{attention}.v_proj": kv_heads}
        gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
        self._fc = linear("fc", {"fc": hidden}, fused if config.eagle3 else 2 * hidden, config.fc_bias)
        self._qkv = linear(f"{LAYER}.qkv", qkv, 2 * hidden if config.eagle3 else hidden, layer.qkv_bias)
        self._o = linear(f"{LAYER}.o", {f"{attention}.o_proj": hidden}, heads, layer.o_bias)
        self._gate_up = linear(f"{LAYER}.gate_up", gate_up, hidden, layer.mlp_bias)
        self._down = linear(f"{LAYER}.down", {f"{mlp}.down_proj": hidden}, inner, layer.mlp_bias)
        self._head = linear("lm_head", {"lm_head": config.draft_vocab_size}, hidden, False) if config.own_head else None

    def _build_norms(self) -> None:
        config, layer = self.config, self.config.layer
        self._norms: list[RMSNorm] = []

        def norm(name: str, size: int = layer.hidden_size) -> RMSNorm:
            made = RMSNorm([f"{name}.weight"], size, layer.rms_norm_eps, dtype=layer.dtype, device=self.device)
            self._norms.append(made)
            return made

        self._post_norm = norm(f"{LAYER}.post_attention_layernorm")
        self._qk_norm: RMSNorm | None = None
        if layer.qk_norm:
            names = [f"{LAYER}.self_attn.{part}_norm.weight" for part in ("q", "k")]
            options: Any = {"repeats": [layer.num_heads, layer.num_kv_heads], "dtype": layer.dtype}
            self._qk_norm = RMSNorm(names, layer.head_dim, layer.rms_norm_eps, device=self.device, **options)
            self._norms.append(self._qk_norm)
        self._fused_norm: RMSNorm | None = None
        self._aux_norms: list[RMSNorm] = []
        if not config.eagle3:
            return
        self._token_norm = norm(f"{LAYER}.input_layernorm")
        self._hidden_norm = norm(f"{LAYER}.hidden_norm")
        self._final_norm = norm("norm")
        if config.norm_before_fc:
            self._fused_norm = norm("input_norm", len(config.aux_layers) * config.target_hidden_size)
        if config.fc_norm:
            self._aux_norms = [norm(f"fc_norm.{i}", config.target_hidden_size) for i in range(len(config.aux_layers))]

    @property
    def kv_layers(self) -> tuple[KVLayerSpec, ...]:
        """KV that each layer keeps of a token."""
        layer = self.config.layer
        return (KVLayerSpec(layer.num_kv_heads, layer.head_dim),) * layer.num_layers

    def linears(self) -> list[Linear]:
        """In the order of the computation."""
        first = [self._fc, self._qkv, self._o, self._gate_up, self._down]
        return first + [linear for layer in self._further for linear in layer.linears()]

    def quantizable(self) -> list[Linear]:
        """All projections, the head's own output head among them."""
        return [*self.linears(), *([] if self._head is None else [self._head])]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Every tensor that the head needs, by its canonical name."""
        config, hidden = self.config, self.config.layer.hidden_size
        slots: dict[str, WeightSlot] = {}
        for linear in self.quantizable():
            slots |= linear.weight_slots()
        for norm in self._norms:
            slots |= norm.weight_slots()
        for layer in self._further:
            slots |= layer.weight_slots()
        slots = {name.removeprefix("model."): slot for name, slot in slots.items()}
        if config.own_embedding:
            slots["embed_tokens.weight"] = WeightSlot(
                (config.layer.vocab_size, hidden), self._load_embedding, hidden**-0.5
            )
        if config.drafts_in_parallel:
            slots[MASK] = WeightSlot((len(config.aux_layers) * config.target_hidden_size,), self._load_mask, 1.0)
        if config.own_vocabulary:
            slots["d2t"] = WeightSlot((config.draft_vocab_size,), self._load_vocabulary)
        return slots

    def _load_embedding(self, tensor: Tensor) -> None:
        self._embedding = tensor.to(self.device, self.config.layer.dtype, copy=True).contiguous()

    def _load_mask(self, tensor: Tensor) -> None:
        self._mask = tensor.to(self.device, self.config.layer.dtype, copy=True)

    def _load_vocabulary(self, offsets: Tensor) -> None:
        self.vocabulary = draft_vocabulary(offsets, self.config.layer.vocab_size, self.device)

    def fuse(self, states: Sequence[Tensor], adapters: Any) -> Tensor:
        """The layer's input [T, H] from the target's hidden states of T tokens."""
        if not self.config.eagle3:
            return states[0]
        if self._aux_norms:
            states = [norm(state) for norm, state in zip(self._aux_norms, states, strict=True)]
        joined = torch.cat(list(states), dim=-1)
        if self._fused_norm is not None:
            joined = self._fused_norm(joined)
        return self._fc.forward(joined, PreparedAdapters(adapters))

    def mask_states(self, count: int, adapters: Any) -> Tensor:
        """The first layer's input [count, H] of masks, each fused with its adapter's weights."""
        assert self._mask is not None, "a P-EAGLE head"
        parts = self._mask.view(len(self.config.aux_layers), 1, -1)
        if adapters is not None:
            return self.fuse(parts.repeat(1, count, 1).unbind(), adapters)
        if self._mask_state is None:
            self._mask_state = self.fuse(parts.unbind(), None)
        return self._mask_state.expand(count, -1)

    def forward(self, batch: ForwardBatch, hidden: Tensor, last: LastRows | None) -> Tensor:
        """Compute a batch; the tokens' KV is written to `batch.kv`. Layers before the last compute all T tokens.

        Args:
            hidden: [T, H], for each token the fused hidden states, or the head's own output, of the position before it.
            last: tokens whose output is wanted; None: all T.

        Returns: [B, H]: input of the head for the next draft, and of `logits`.
        """
        embedded = self._embed(batch.input_ids)
        if self.config.eagle3:
            normed = self._hidden_norm(hidden)
            residual = normed if self.config.norm_before_residual else hidden
            x = torch.cat((self._token_norm(embedded), normed), dim=-1)
        else:
            x = residual = self._fc.forward(torch.cat((embedded, hidden), dim=-1), batch)
        layer = self.config.layer
        window = layer.windows[0]
        qkv = self._qkv.forward(x, batch)
        rotation = batch.rotations[layer.ropes.index(layer.layer_ropes[0]) if layer.layer_ropes else 0]
        attended = self.attention.forward_qkv(qkv, rotation, self._qk_norm, batch.kv[0], batch.attention, window)
        rows: ForwardBatch | PreparedAdapters = batch
        if last is not None and not self._further:
            attended, residual = last.rows.last_of(attended, residual)
            rows = PreparedAdapters(last.adapters())
        if adds_residuals(self.device):
            normed, x = self._post_norm.add(self._o.forward(attended, rows), residual)
        else:
            x = self._o.forward(attended, rows, residual=residual)
            normed = self._post_norm(x)
        inner = act_and_mul(self._gate_up.forward(normed, rows), self.config.layer.hidden_act)
        x = self._down.forward(inner, rows, residual=x)
        for further, kv in zip(self._further, batch.kv[1:], strict=True):
            x = further.forward(x, batch, kv)
        if last is not None and self._further:
            (x,) = last.rows.last_of(x)
        return self._final_norm(x) if self.config.norm_output else x

    def logits(self, state: Tensor, out: Tensor | None = None) -> Tensor:
        """float32 logits of the next token, [B, draft vocabulary], from `forward`'s result [B, H]; in `out` if
        given."""
        if self.config.eagle3 and not self.config.norm_output:
            state = self._final_norm(state)
        if self._head is None:
            return self.target.compute_logits(state, out=out)
        logits = self._head.packed(state)
        return logits.float() if out is None else out.copy_(logits)

    def _embed(self, input_ids: Tensor) -> Tensor:
        if self._embedding is None:
            return self.target.embedding.lookup(input_ids)
        return F.embedding(input_ids, self._embedding)
