"""DFlash and DSpark drafters (arXiv 2602.06036, 2607.05147): layers over blocks of masks and a projected context.

A block starts at an *anchor*, a token of the text: its j-th draft guesses the token 1 + j positions later from the
target's states before the anchor. In training some anchors of each text are drawn at random.

N texts of T tokens, A anchors each, B tokens of a block, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....models.config import DecoderConfig
from ...drafters.dflash.config import DFlashConfig
from ..output_files import write_model
from ..target import Features, Labels, Target
from .base import Step, TrainedDrafter, build_wanted, greedy_tokens, soft_cross_entropy
from .layers import MLP, RMSNorm, rotate

ANCHORS = 32
"""Most anchors of a text in a step of training."""
_CONFIDENCE_STATES = 64
"""Most drafts of a step on which the confidence is trained: each needs two distributions over the vocabulary."""


class Blocks(NamedTuple):
    """Blocks of a batch of texts."""

    anchors: Tensor
    """[N, A] positions, ascending; those beyond a text's own are 0."""
    drafts: int
    """Drafts of each block."""
    positions: Tensor
    """[N, A · B] of the blocks' tokens."""
    mask: Tensor
    """[N, 1, A · B, T + A · B] True for the keys, of the context and then of the blocks, that a token sees."""


def block_mask(anchors: Tensor, length: int, size: int) -> Tensor:
    """See `Blocks.mask`: a token sees the context before its anchor, and its own block."""
    number = anchors.shape[1]
    context = torch.arange(length, device=anchors.device) < anchors[:, :, None]
    own = torch.eye(number, dtype=torch.bool, device=anchors.device).repeat_interleave(size, 1)
    seen = torch.cat((context, own.expand(len(anchors), -1, -1)), -1)
    return seen.repeat_interleave(size, 1)[:, None]


class _BlockAttention(nn.Module):
    def __init__(self, layer: DecoderConfig) -> None:
        super().__init__()
        self._layer = layer
        heads, kv_heads = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        self.q_proj = nn.Linear(layer.hidden_size, heads, bias=False)
        self.k_proj = nn.Linear(layer.hidden_size, kv_heads, bias=False)
        self.v_proj = nn.Linear(layer.hidden_size, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, layer.hidden_size, bias=False)
        self.q_norm = RMSNorm(layer.head_dim, layer.rms_norm_eps)
        self.k_norm = RMSNorm(layer.head_dim, layer.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, blocks: Blocks) -> Tensor:
        """Blocks x [N, A · B, H] over the context [N, T, H] and themselves."""
        layer, theta = self._layer, self._layer.rope.theta
        there = torch.arange(context.shape[1], device=x.device).expand(len(x), -1)
        read, positions = torch.cat((context, x), 1), torch.cat((there, blocks.positions), 1)

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)

        q = rotate(self.q_norm(heads(self.q_proj(x))), blocks.positions[:, None], theta)
        k = rotate(self.k_norm(heads(self.k_proj(read))), positions[:, None], theta)
        v = heads(self.v_proj(read))
        grouped = layer.num_heads != layer.num_kv_heads
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=blocks.mask, enable_gqa=grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class _BlockLayer(nn.Module):
    def __init__(self, layer: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.self_attn = _BlockAttention(layer)
        self.post_attention_layernorm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.mlp = MLP(layer)

    def forward(self, x: Tensor, context: Tensor, blocks: Blocks) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, blocks)
        return x + self.mlp(self.post_attention_layernorm(x))


class _MarkovHead(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.layer.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)


class _ConfidenceHead(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.layer.hidden_size + config.markov_rank, 1)


class BlockHead(TrainedDrafter):
    """A drafter of blocks. Embeddings and output head are the target's. Module names are those of the format."""

    def __init__(self, config: DFlashConfig, target: Target) -> None:
        super().__init__()
        self.config = config
        self._target = target  # no module: its weights are no parameters of this one
        layer, fused = config.layer, len(config.aux_layers) * config.target_hidden_size
        self.fc = nn.Linear(fused, layer.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.layers = nn.ModuleList(_BlockLayer(layer) for _ in range(layer.num_layers))
        self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.markov_head = _MarkovHead(config) if config.markov_rank else None
        self.confidence_head = _ConfidenceHead(config) if config.has_confidence else None

    def states(self, features: Features, anchors: Tensor, drafts: int) -> Tensor:
        """[N, A, drafts, H] as the output head reads them, of the blocks of `anchors` [N, A]."""
        ids, size = features.ids, drafts if self.config.sample_from_anchor else drafts + 1
        tokens = ids.gather(1, anchors)[:, :, None]
        masks = tokens.new_full((*anchors.shape, size - 1), self.config.mask_token_id)
        x = F.embedding(torch.cat((tokens, masks), -1).flatten(1), self._target.embeddings).float()
        positions = (anchors[:, :, None] + torch.arange(size, device=ids.device)).flatten(1)
        blocks = Blocks(anchors, drafts, positions, block_mask(anchors, ids.shape[1], size))
        context = self.hidden_norm(self.fc(torch.cat(features.aux, dim=-1).float()))
        for layer in self.layers:
            x = layer(x, context, blocks)
        return self.norm(x).unflatten(1, (anchors.shape[1], size))[:, :, -drafts:]

    def steps(self, features: Features, anchors: Tensor, drafts: int) -> list[Step]:
        """For each draft its inputs of the output head, and the labels that it guesses; `anchors` [N, A] are
        ascending, and 0 if there is none."""
        hidden, labels = self.states(features, anchors, drafts), features.labels
        index = label_index(labels, features.ids)
        found = []
        for draft in range(drafts):
            kept, number = guessed_labels(index, anchors, draft)
            states = hidden[:, :, draft][kept]
            if self.markov_head is not None:
                at = (anchors + draft).clamp(max=index.shape[1] - 1)
                before = features.ids.gather(1, at)[kept]
                states = torch.cat((states, self.markov_head.markov_w1(before).to(states.dtype)), -1)
            found.append(Step(states, number))
        return found

    def _steps_in_parts(self, features: Features, anchors: Tensor) -> list[Step]:
        """`steps` of any number of anchors, `ANCHORS` at a time: a mask grows with the square of their number."""
        parts = [self.steps(features, some, self.config.max_drafts) for some in anchors.split(ANCHORS, dim=1)]
        return parts[0] if len(parts) == 1 else [_joined(of_draft) for of_draft in zip(*parts, strict=True)]

    @property
    def output_weight(self) -> Tensor:
        """[V, H], or [V, H + r] with the Markov head."""
        head = self._target.lm_head
        return head if self.markov_head is None else torch.cat((head.float(), self.markov_head.markov_w2.weight), -1)

    def loss(self, features: Features) -> Tensor:
        """Mean cross entropy of the drafts, each further one weighted less, and the confidence's."""
        anchors = draw_anchors(features.labels, features.ids, ANCHORS if self.training else None)
        steps, weight = self._steps_in_parts(features, anchors), self.output_weight
        loss = soft_cross_entropy(steps, weight, build_wanted(features))
        return loss if self.confidence_head is None else loss + self._confidence_loss(steps, weight, features)

    def _confidence_loss(self, steps: list[Step], weight: Tensor, features: Features) -> Tensor:
        """Cross entropy with the probability that rejection sampling accepts a draft: 1 - |p - q| / 2."""
        states, labels = (torch.cat(parts) for parts in zip(*steps, strict=True))
        if len(labels) > _CONFIDENCE_STATES:
            chosen = torch.randperm(len(labels), device=labels.device)[:_CONFIDENCE_STATES]
            states, labels = states[chosen], labels[chosen]
        states = states.detach()
        with torch.no_grad():
            q = F.linear(states.to(weight.dtype), weight).float().softmax(-1)
            p = features.head.logits(features.labels.states[labels], None).float().softmax(-1)
            accepted = (1 - 0.5 * (p - q).abs().sum(-1)).clamp(0.0, 1.0)
        assert self.confidence_head is not None
        return F.binary_cross_entropy_with_logits(self.confidence_head.proj(states.float()).squeeze(-1), accepted)

    def guesses(self, features: Features, k: int) -> Tensor:
        """As in `TrainedDrafter`; a block makes no more drafts than the longest."""
        found = features.labels.positions.new_full((len(features.labels.positions), k), -1)
        drafts, weight = min(k, self.config.max_drafts), self.output_weight
        anchors = draw_anchors(features.labels, features.ids, None, before=drafts - 1)
        for some in anchors.split(ANCHORS, dim=1):
            for draft, (states, index) in enumerate(self.steps(features, some, drafts)):
                found[index, draft] = greedy_tokens(
                    lambda rows: F.linear(rows.to(weight.dtype), weight), states, len(weight)
                )
        return found

    def export(self, folder: Path) -> None:
        """config.json and model.safetensors in the authors' format, without the target's matrices."""
        config, layer = self.config, self.config.layer
        sequential = {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head,
            "enable_confidence_head": config.has_confidence,
            "confidence_head_with_markov": config.confidence_reads_markov,
        }
        values = {
            "architectures": ["DSparkDraftModel" if config.markov_rank else "DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": layer.hidden_size,
            "intermediate_size": layer.intermediate_size,
            "num_hidden_layers": layer.num_layers,
            "num_attention_heads": layer.num_heads,
            "num_key_value_heads": layer.num_kv_heads,
            "head_dim": layer.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": layer.rms_norm_eps,
            "rope_theta": layer.rope.theta,
            "vocab_size": layer.vocab_size,
            "max_position_embeddings": layer.max_position_embeddings,
            "attention_bias": False,
            "num_target_layers": self._target.config.num_layers,
            "block_size": config.block_size,
            "dflash_config": {
                "mask_token_id": config.mask_token_id,
                "target_layer_ids": [index - 1 for index in config.aux_layers],
                "sample_from_anchor": config.sample_from_anchor,
            },
            **(sequential if config.markov_rank else {}),
        }
        write_model(folder, values, dict(self.named_parameters()))


def _joined(parts: Sequence[Step]) -> Step:
    """One step of all states, by ascending labels."""
    hidden, labels = (torch.cat(list(column)) for column in zip(*parts, strict=True))
    order = labels.argsort()
    return Step(hidden[order], labels[order])


def label_index(labels: Labels, ids: Tensor) -> Tensor:
    """[N, T] the number of the label at each position, -1 without one."""
    index = torch.full_like(ids, -1)
    index[labels.rows, labels.positions] = torch.arange(len(labels.rows), device=ids.device)
    return index


def guessed_labels(index: Tensor, anchors: Tensor, draft: int) -> tuple[Tensor, Tensor]:
    """[N, A] True for the blocks whose draft of this number guesses at a label, and the numbers [M] of these labels.
    `index`: of `label_index`."""
    at = anchors + draft
    known = (anchors > 0) & (at < index.shape[1])
    number = index.gather(1, at.clamp(max=index.shape[1] - 1)).masked_fill(~known, -1)
    return number >= 0, number[number >= 0]


def draw_anchors(labels: Labels, ids: Tensor, most: int | None, before: int = 0) -> Tensor:
    """[N, A] positions with labels, and up to `before` positions before them, ascending: `most` of each text, drawn at
    random, or all; 0 if a text has fewer. Position 0 has no context, and is no anchor."""
    valid = label_index(labels, ids) >= 0
    for _ in range(before):
        valid = valid | F.pad(valid[:, 1:], (0, 1))
    valid[:, 0] = False
    most = min(int(valid.sum(1).max()), ids.shape[1] if most is None else most)
    chance = torch.rand(valid.shape, device=ids.device).masked_fill(~valid, -1.0)
    chosen = chance.topk(max(most, 1), dim=1)
    return chosen.indices.masked_fill(chosen.values < 0, 0).sort(1).values
