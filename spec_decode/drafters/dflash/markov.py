"""DSpark's heads (arXiv 2607.05147): a bias of a draft's logits by the token before it, and the confidence in a draft.

With e = W1[token before], h the block's hidden state of the draft, r the rank:

    vanilla   bias = W2 e
    gated     bias = W2 (sigmoid(G [h; e] + b) · e)
    rnn       g, c, o = chunks of J [s; e; h] + b;  s = sigmoid(g) · s + (1 - sigmoid(g)) · tanh(c);  bias = W2 tanh(o)

    confidence = sigmoid(w [h; e] + b): probability that the draft is accepted if those before it are
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ....models.layers.linear import Linear
from ....models.layers.weights import WeightSlot
from ..base import Adapters
from .config import DFlashConfig

_NO_ADAPTERS = Adapters(None)


class MarkovHead:
    """Sequential part of the block: one call for each draft, in their order."""

    def __init__(self, config: DFlashConfig, device: torch.device) -> None:
        layer, rank, hidden = config.layer, config.markov_rank, config.layer.hidden_size
        self._config, self._device = config, device

        def linear(name: str, out: int, in_features: int, *, bias: bool) -> Linear:
            module = f"markov_head.{name}"
            return Linear(module, [(module, out)], in_features, bias=bias, dtype=layer.dtype, device=device)

        self._project = linear("markov_w2", config.draft_vocab_size, rank, bias=False)
        self._gate: Linear | None = None
        if config.markov_head == "gated":
            self._gate = linear("gate_proj", rank, hidden + rank, bias=True)
        elif config.markov_head == "rnn":
            self._gate = linear("joint_proj", 3 * rank, hidden + 2 * rank, bias=True)
        self._embedding: Tensor | None = None
        self._confidence: Tensor | None = None
        self._confidence_bias: Tensor | None = None

    def linears(self) -> list[Linear]:
        """Projections, for quantisation."""
        return [self._project] if self._gate is None else [self._project, self._gate]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Every tensor that the heads need, by its canonical name."""
        config, rank = self._config, self._config.markov_rank
        slots = {"markov_head.markov_w1.weight": WeightSlot((config.layer.vocab_size, rank), self._load_table, 1.0)}
        for linear in self.linears():
            slots |= linear.weight_slots()
        if config.has_confidence:
            size = config.layer.hidden_size + rank * config.confidence_reads_markov
            slots["confidence_head.proj.weight"] = WeightSlot((1, size), self._load_confidence, size**-0.5)
            if config.confidence_bias:
                slots["confidence_head.proj.bias"] = WeightSlot((1,), self._load_confidence_bias, 1.0)
        return slots

    def _load_table(self, tensor: Tensor) -> None:
        self._embedding = tensor.to(self._device, self._config.layer.dtype, copy=True).contiguous()

    def _load_confidence(self, tensor: Tensor) -> None:
        self._confidence = tensor.to(self._device, torch.float32, copy=True)

    def _load_confidence_bias(self, tensor: Tensor) -> None:
        self._confidence_bias = tensor.to(self._device, torch.float32, copy=True)

    def embed(self, token_ids: Tensor) -> Tensor:
        """e [B, r] of the tokens [B] before the drafts, by the target's ids."""
        assert self._embedding is not None, "the loader left no slot empty"
        return F.embedding(token_ids.clamp(max=len(self._embedding) - 1), self._embedding)

    def bias(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Bias [B, draft vocabulary] float32 of a draft's logits, and the state [B, r] for the next draft.

        Args:
            embedded: e [B, r].
            hidden: h [B, hidden size].
            state: result for the draft before; None for the first.
        """
        if self._gate is None:
            return self._project.forward(embedded, _NO_ADAPTERS).float(), None
        if self._config.markov_head == "gated":
            gate = self._gate.forward(torch.cat((hidden, embedded), -1), _NO_ADAPTERS).sigmoid()
            return self._project.forward(gate * embedded, _NO_ADAPTERS).float(), None
        state = torch.zeros_like(embedded) if state is None else state
        joint = self._gate.forward(torch.cat((state, embedded, hidden), -1), _NO_ADAPTERS)
        gate, candidate, output = joint.chunk(3, -1)
        state = torch.lerp(candidate.tanh(), state, gate.sigmoid())
        return self._project.forward(output.tanh(), _NO_ADAPTERS).float(), state

    def confidence(self, embedded: Tensor, hidden: Tensor) -> Tensor | None:
        """Probability [B] float32 that a draft is accepted if those before it are; None without such a head."""
        if self._confidence is None:
            return None
        x = torch.cat((hidden, embedded), -1) if self._config.confidence_reads_markov else hidden
        return F.linear(x.float(), self._confidence, self._confidence_bias).sigmoid().squeeze(-1)
