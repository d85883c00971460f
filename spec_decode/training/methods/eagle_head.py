"""EAGLE heads: one decoder layer that reads the target's hidden states, then its own.

At index t the head pairs the embedding of token t + 1 with the state of position t, keeps position t, and guesses token
t + 2. In training it continues from every index with the text's tokens and its own states, as when drafting.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....models.config import DecoderConfig
from ...drafters.eagle.config import EagleConfig
from ..output_files import write_model
from ..target import Features, Target
from .base import STEP_DECAY, Step, TrainedDrafter, build_wanted, greedy_tokens, soft_cross_entropy
from .layers import MLP, ChainAttention, Chains, Columns, RMSNorm

UnrolledStep: TypeAlias = Callable[[Tensor], Tensor]
"""States [C, H] in step 0, later [R, H], to the next states [R, H] of the chains."""
FEATURE_NOISE = 0.1
"""Half width of the uniform noise on EAGLE's features (Li et al. 2024)."""
TOKEN_WEIGHT = 0.1
"""Weight of the tokens' cross entropy relative to the states' smooth L1, for EAGLE (Li et al. 2024)."""


class EagleHead(TrainedDrafter):
    """Common part of EAGLE and EAGLE-3 heads. Module names are those under which adapters address them."""

    def __init__(self, config: EagleConfig, target: Target, unroll: int) -> None:
        super().__init__()
        self.config = config
        self._target = target  # no module: its weights are no parameters of this one
        self._unroll = unroll

    @abstractmethod
    def start(self, features: Features) -> Tensor:
        """The state [..., H] that the first step reads, for features of any shape."""

    @abstractmethod
    def unrolled(self, embedded: Tensor, chains: Chains) -> UnrolledStep:
        """A step of an unroll, in which all steps share what is computed of the tokens' embeddings [C, H]."""

    def normed(self, state: Tensor) -> Tensor:
        """[..., H] as the lm_head reads it."""
        return state

    def _unrolled_steps(self, features: Features) -> list[tuple[Tensor, Tensor]]:
        """The steps that the loss counts."""
        return list(self.steps(features, self._unroll if self.whole or not self.training else 1))

    @property
    def lm_head_weight(self) -> Tensor:
        """[draft vocabulary, H]."""
        return self._target.lm_head

    def logits(self, state: Tensor) -> Tensor:
        """[..., H] to [..., draft vocabulary]."""
        weight = self.lm_head_weight
        return F.linear(self.normed(state).to(weight.dtype), weight)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids to [..., H]."""
        return self._target.embed(ids)

    def steps(self, features: Features, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """States [M, H] at the roots of each of `count` steps, and the labels [M] that they guess at.

        Step 0 computes the keys of every index, which the later ones read; all else starts from the roots alone.
        """
        labels, none = features.labels, cast(Any, None)
        chains = Chains(labels, features.ids, count)
        hidden = none if features.hidden is None else chains.pack(features.hidden)
        state = self.start(features._replace(hidden=hidden, aux=tuple(map(chains.pack, features.aux))))
        # The chain from index t reads token t + 1 + step.
        unrolled = self.unrolled(self.embed(features.ids[chains.rows, chains.positions + 1]), chains)
        for step in range(count):
            state = unrolled(state)
            roots, index = chains.at_labels(labels, step)
            yield state[roots], index

    def loss(self, features: Features) -> Tensor:
        """Mean over the steps of the unroll, each further one weighted less."""
        return self.token_loss(self._unrolled_steps(features), features)

    def token_loss(self, steps: Sequence[tuple[Tensor, Tensor]], features: Features) -> Tensor:
        """Cross entropy of the unroll over the draft vocabulary, at labels whose next token is in it."""
        states = [Step(self.normed(hidden), index) for hidden, index in steps]
        tokens = self.vocabulary
        if tokens is None:
            return soft_cross_entropy(states, self.lm_head_weight, build_wanted(features))
        known = torch.isin(features.next_tokens, tokens)
        kept = known.nonzero(as_tuple=True)[0]
        number = known.cumsum(0) - 1
        states = [Step(hidden[known[index]], number[index[known[index]]]) for hidden, index in states]
        return soft_cross_entropy(states, self.lm_head_weight, build_wanted(features, kept, tokens))

    def guesses(self, features: Features, k: int) -> Tensor:
        """As in `TrainedDrafter`."""
        found = features.labels.positions.new_full((len(features.labels.positions), k), -1)
        for step, (hidden, index) in enumerate(self.steps(features, k)):
            found[index, step] = self.token_ids(greedy_tokens(self.logits, hidden, self.config.draft_vocab_size))
        return found

    def token_ids(self, drafted: Tensor) -> Tensor:
        """Ids of the draft vocabulary to those of the target's."""
        return drafted


class _Eagle3Layer(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        layer = config.layer
        size, eps = layer.hidden_size, layer.rms_norm_eps
        self._norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = ChainAttention(layer, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(layer)

    def unrolled(self, embedded: Tensor, chains: Chains) -> UnrolledStep:
        """See `EagleHead.unrolled`."""
        size = embedded.shape[-1]
        of_embedding, of_state = (self.self_attn.columns(start, size) for start in (0, size))
        known = of_embedding(self.input_layernorm(embedded))

        def step(state: Tensor) -> Tensor:
            number, normed = len(chains.keys), self.hidden_norm(state)
            qkv = of_state(normed) + (known[chains.ahead(number)] if number else known)
            residual = normed if self._norm_before_residual else state
            residual = residual if number else residual[chains.roots]
            residual = residual + self.self_attn(qkv, chains)
            return residual + self.mlp(self.post_attention_layernorm(residual))

        return step


class Eagle3Head(EagleHead):
    """EAGLE-3 (Li et al. 2025, arXiv:2503.01840): reads three layers, drafts from a vocabulary that may be smaller."""

    def __init__(
        self, config: EagleConfig, target: Target, unroll: int = 4, draft_tokens: list[int] | None = None
    ) -> None:
        """`draft_tokens`: the target's ids of the draft vocabulary, ascending; None when it is the target's. Tensors
        that `config` marks as the head's own are trained, and start as the target's if sizes agree."""
        super().__init__(config, target, unroll)
        layer = config.layer
        size = layer.hidden_size
        self.fc = nn.Linear(len(config.aux_layers) * config.target_hidden_size, size, bias=False)
        self.layers = nn.ModuleList([_Eagle3Layer(config)])
        self.norm = RMSNorm(size, layer.rms_norm_eps)
        tokens = torch.arange(layer.vocab_size) if draft_tokens is None else torch.tensor(draft_tokens)
        self._draft_tokens = tokens.to(target.lm_head.device)
        self._target_rows = target.lm_head if draft_tokens is None else target.lm_head[self._draft_tokens]
        self.embed_tokens: nn.Embedding | None = None
        self.lm_head: nn.Linear | None = None
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(layer.vocab_size, size)
            nn.init.normal_(self.embed_tokens.weight, std=0.02)
        if config.own_head:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        with torch.no_grad():
            if self.embed_tokens is not None and size == config.target_hidden_size:
                self.embed_tokens.weight.copy_(target.embeddings)
            if self.lm_head is not None and size == config.target_hidden_size:
                self.lm_head.weight.copy_(self._target_rows)

    @torch.no_grad()
    def begin_as_last_layer(self) -> None:
        """Copy the target's last layer, if sizes agree, applied to the input of the last of the three layers read.

        Of a wider MLP the first rows are copied. The part that reads embeddings starts with random weights and the
        first layer's norm. In 24 steps on SmolLM2-135M the held-out loss fell to 5.8 this way, and to 7.5 from a random
        fc.
        """
        size = self.config.layer.hidden_size
        if size != self.config.target_hidden_size:
            return
        self.fc.weight.zero_()[:, -size:].copy_(torch.eye(size))
        own = dict(self.named_parameters())
        names = {
            "norm.weight": "norm.weight",
            "first_norm.weight": "layers.0.input_layernorm.weight",
            "input_layernorm.weight": "layers.0.hidden_norm.weight",
        }
        for name, theirs in self._target.last_layer.items():
            mine = own.get(names.get(name, f"layers.0.{name}"))
            if mine is None:
                continue
            state = mine[:, -theirs.shape[1] :] if mine.ndim == 2 and "self_attn" in name else mine
            if ".mlp." in f".{name}" and all(a <= b for a, b in zip(state.shape, theirs.shape, strict=True)):
                theirs = theirs[: state.shape[0], : state.shape[1]]
            if state.shape == theirs.shape:
                state.copy_(theirs)

    @property
    def lm_head_weight(self) -> Tensor:
        """Its own, or the target's rows of the draft vocabulary."""
        return self._target_rows if self.lm_head is None else self.lm_head.weight

    @property
    def vocabulary(self) -> Tensor | None:
        """Rows of the `draft_tokens`."""
        return None if self.config.draft_vocab_size == self.config.layer.vocab_size else self._draft_tokens

    def start(self, features: Features) -> Tensor:
        """Fuse the three layers."""
        return self.fc(torch.cat(features.aux, dim=-1).float())

    def unrolled(self, embedded: Tensor, chains: Chains) -> UnrolledStep:
        """The next step reads the state before the norm."""
        layer: Any = self.layers[0]
        step: UnrolledStep = layer.unrolled(embedded, chains)
        return step

    def embed(self, ids: Tensor) -> Tensor:
        """Its own embeddings, or the target's."""
        return super().embed(ids) if self.embed_tokens is None else self.embed_tokens(ids)

    def normed(self, state: Tensor) -> Tensor:
        """The final norm."""
        return self.norm(state)

    def token_ids(self, drafted: Tensor) -> Tensor:
        """Through the draft vocabulary."""
        return self._draft_tokens[drafted]

    def export(self, folder: Path) -> None:
        """config.json and model.safetensors with the layer as `midlayer`; shared matrices are left out."""
        tensors: dict[str, Tensor] = {name.replace("layers.0.", "midlayer."): p for name, p in self.named_parameters()}
        if self.vocabulary is not None:
            tensors.setdefault("lm_head.weight", self._target_rows)
            tokens = self._draft_tokens.cpu()
            known = torch.zeros(self.config.layer.vocab_size, dtype=torch.bool)
            known[tokens] = True
            tensors |= {"d2t": tokens - torch.arange(len(tokens)), "t2d": known}
        config = llama_config(self.config.layer) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": self.config.draft_vocab_size,
            "target_hidden_size": self.config.target_hidden_size,
            "eagle_aux_hidden_state_layer_ids": list(self.config.aux_layers),
            "norm_before_residual": self.config.norm_before_residual,
        }
        write_model(folder, config, tensors)


class _EagleLayer(nn.Module):
    def __init__(self, layer: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = ChainAttention(layer, layer.hidden_size)
        self.post_attention_layernorm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.mlp = MLP(layer)

    def forward(self, x: Tensor, chains: Chains) -> Tensor:
        """Inputs [C, H] in step 0, later [R, H], to states [R, H]."""
        qkv = self.self_attn.columns(0, x.shape[-1])(x)
        residual = (x if chains.keys else x[chains.roots]) + self.self_attn(qkv, chains)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle1Head(EagleHead):
    """EAGLE (Li et al. 2024, arXiv:2401.15077): guesses the target's last hidden state and uses the target's lm_head.

    With `unroll` above 1 it is trained on its own states too (HASS, Zhang et al. 2024, arXiv:2408.15766).
    """

    def __init__(self, config: EagleConfig, target: Target, unroll: int = 1, noise: float = FEATURE_NOISE) -> None:
        """`noise`: half width of the uniform noise on features, in training."""
        super().__init__(config, target, unroll)
        self._noise = noise
        size = config.layer.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([_EagleLayer(config.layer)])

    def start(self, features: Features) -> Tensor:
        """The target's last hidden states; in training with noise, so that errors do not add up."""
        hidden = features.hidden.float()
        if self.training and self._noise:
            hidden = hidden + (torch.rand_like(hidden) * 2 - 1) * self._noise
        return hidden

    def unrolled(self, embedded: Tensor, chains: Chains) -> UnrolledStep:
        """Project both with fc, then run the layer."""
        size = embedded.shape[-1]
        of_embedding, of_state = (Columns([self.fc], start, size) for start in (0, size))
        known = of_embedding(embedded.float())

        def step(state: Tensor) -> Tensor:
            number = len(chains.keys)
            x = of_state(state.float()) + (known[chains.ahead(number)] if number else known)
            return self.layers[0](x.float(), chains)

        return step

    def loss(self, features: Features) -> Tensor:
        """Smooth L1 to the target's hidden states plus cross entropy of the tokens, both averaged over the unroll."""
        steps = self._unrolled_steps(features)
        losses = [_state_loss(hidden, features.labels.states[index]) for hidden, index in steps]
        factors = [STEP_DECAY**number for number in range(len(steps))]
        total = torch.stack([factor * loss for factor, loss in zip(factors, losses, strict=True)]).sum()
        return total / sum(factors) + TOKEN_WEIGHT * self.token_loss(steps, features)

    def export(self, folder: Path) -> None:
        """config.json and model.safetensors. The embeddings are included: loaders of this format expect them."""
        tensors = dict(self.named_parameters()) | {"embed_tokens.weight": self._target.embeddings}
        write_model(
            folder, llama_config(self.config.layer) | {"architectures": ["LlamaForCausalLM"], "bias": False}, tensors
        )


def _state_loss(hidden: Tensor, wanted: Tensor) -> Tensor:
    """Smooth L1 of states [M, H]; 0 without any."""
    return F.smooth_l1_loss(hidden.float(), wanted.float()) if len(hidden) else hidden.sum() * 0.0


def llama_config(layer: DecoderConfig) -> dict[str, Any]:
    """The part of config.json that both formats share."""
    return {
        "model_type": "llama",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": layer.vocab_size,
        "max_position_embeddings": layer.max_position_embeddings,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": layer.rope.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
