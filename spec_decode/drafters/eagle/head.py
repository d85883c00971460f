"""The networks of EAGLE heads: one decoder layer that reads a token and the target's hidden state before it.

EAGLE-1/2 (Li et al. 2024), e being the token's embedding, h the target's hidden state after its final norm:

    x = fc([e; h]);  x += attention(x) without a norm before it;  x += mlp(norm(x));  logits = target's head(x)

EAGLE-3 (Li et al. 2025), g = fc([hidden states entering three layers of the target]):

    x = g + attention([norm(e); norm(g)]);  x += mlp(norm(x));  logits = head(norm(x))

x replaces h or g in further drafts.
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
from ....models.layers.linear import Linear
from ....models.layers.norm import RMSNorm
from ....models.layers.rope import RotaryEmbedding
from ....models.layers.weights import WeightSlot
from ....models.model import LanguageModel
from ...verify.draft_sampling import DraftVocabulary
from ..base import Adapters
from ..checkpoint import draft_vocabulary, refuse
from .config import EagleConfig

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
    """One layer, built without weights: fill every slot of `weight_slots`, then run it."""

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
        if layer.hidden_size != config.target_hidden_size and not (config.own_embedding and config.own_head):
            missing = "lm_head" if config.own_embedding else "embed_tokens"
            raise refuse(
                f"the head has no {missing}.weight, and its hidden size {layer.hidden_size} is not the target's "
                f"{config.target_hidden_size}: it cannot share the target's"
            )
        self.attention = make_attention(attention_spec(layer, self.device))
        self.rope = ShiftedRope([layer.rope], layer.head_dim, dtype=layer.dtype, device=self.device)
        self._build_linears()
        self._build_norms()
        self._embedding: Tensor | None = None
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
    def kv_layer(self) -> KVLayerSpec:
        """KV that the layer keeps of a token."""
        return KVLayerSpec(self.config.layer.num_kv_heads, self.config.layer.head_dim)

    def linears(self) -> list[Linear]:
        """In the order of the computation."""
        return [self._fc, self._qkv, self._o, self._gate_up, self._down]

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
        if config.own_embedding:
            slots["embed_tokens.weight"] = WeightSlot(
                (config.layer.vocab_size, hidden), self._load_embedding, hidden**-0.5
            )
        if config.own_vocabulary:
            slots["d2t"] = WeightSlot((config.draft_vocab_size,), self._load_vocabulary)
        return slots

    def _load_embedding(self, tensor: Tensor) -> None:
        self._embedding = tensor.to(self.device, self.config.layer.dtype, copy=True).contiguous()

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
        return self._fc.forward(joined, Adapters(adapters))

    def forward(self, batch: ForwardBatch, hidden: Tensor, last: LastRows | None) -> Tensor:
        """Compute a batch; the tokens' KV is written to `batch.kv[0]`.

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
        window = self.config.layer.windows[0]
        qkv = self._qkv.forward(x, batch)
        attended = self.attention.forward_qkv(qkv, batch.rotations[0], None, batch.kv[0], batch.attention, window)
        rows: ForwardBatch | Adapters = batch
        if last is not None:
            attended, residual = last.rows.last_of(attended, residual)
            rows = Adapters(last.adapters())
        if adds_residuals(self.device):
            normed, x = self._post_norm.add(self._o.forward(attended, rows), residual)
        else:
            x = self._o.forward(attended, rows, residual=residual)
            normed = self._post_norm(x)
        inner = act_and_mul(self._gate_up.forward(normed, rows), self.config.layer.hidden_act)
        x = self._down.forward(inner, rows, residual=x)
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
