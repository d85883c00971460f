"""Medusa heads (Cai et al. 2024, arXiv:2401.10774): head i predicts the token i + 2 positions after the state it
reads."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..output_files import aside, write_json
from ..target import Features
from .base import STEP_DECAY, Step, TrainedDrafter, at_roots, build_wanted, greedy_tokens, soft_cross_entropy

WEIGHTS_FILE = "medusa_lm_head.pt"


class MedusaHeads(TrainedDrafter):
    """Residual blocks that start as the identity, and an lm_head each that starts as the target's."""

    def __init__(self, lm_head: Tensor, num_heads: int, num_layers: int, base_name: str) -> None:
        """lm_head: the target's, [V, H]; base_name goes into config.json."""
        super().__init__()
        vocab_size, size = lm_head.shape
        self._base_name = base_name
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(size, size) for _ in range(num_layers)) for _ in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(nn.Linear(size, vocab_size, bias=False) for _ in range(num_heads))
        with torch.no_grad():
            for block in self.blocks.parameters():
                block.zero_()
            for head in self.lm_heads.parameters():
                head.copy_(lm_head)

    def _states(self, features: Features, head: int) -> tuple[Tensor, Tensor]:
        """Hidden states [M, H] of head `head` at its roots, and the labels [M] that it guesses."""
        hidden, index = at_roots(features.hidden, features.labels, head)
        hidden = hidden.float()
        layers = self.blocks[head]
        assert isinstance(layers, nn.ModuleList)
        for linear in layers:
            hidden = hidden + F.silu(linear(hidden))
        return hidden, index

    def loss(self, features: Features) -> Tensor:
        """Cross entropy of every head against the target's distribution, each further head weighted less."""
        wanted, total, factors = build_wanted(features), features.hidden.new_zeros((), dtype=torch.float32), 0.0
        for head, lm_head in enumerate(self.lm_heads):
            factor = STEP_DECAY**head
            step = Step(*self._states(features, head))
            total = total + factor * soft_cross_entropy([step], lm_head.get_parameter("weight"), wanted)
            factors += factor
        return total / factors

    def guesses(self, features: Features, k: int) -> Tensor:
        """As in `TrainedDrafter`; heads beyond those that exist guess nothing."""
        labels = features.labels
        found = labels.positions.new_full((len(labels.positions), k), -1)
        for head, lm_head in enumerate(list(self.lm_heads)[:k]):
            hidden, index = self._states(features, head)
            found[index, head] = greedy_tokens(lm_head, hidden, len(lm_head.get_parameter("weight")))
        return found

    def export(self, folder: Path) -> None:
        """config.json and medusa_lm_head.pt, with the original project's names."""
        tensors: dict[str, Tensor] = {}
        for head, layers in enumerate(self.blocks):
            assert isinstance(layers, nn.ModuleList)
            for layer, linear in enumerate(layers):
                for name, parameter in linear.named_parameters():
                    tensors[f"{head}.{layer}.linear.{name}"] = parameter
            tensors[f"{head}.{len(layers)}.weight"] = self.lm_heads[head].get_parameter("weight")
        first = self.blocks[0]
        assert isinstance(first, nn.ModuleList)
        (folder / WEIGHTS_FILE).unlink(missing_ok=True)
        config = {
            "medusa_num_heads": len(self.lm_heads),
            "medusa_num_layers": len(first),
            "base_model_name_or_path": self._base_name,
        }
        write_json(folder / "config.json", config)
        halves = {name: tensor.detach().to(torch.bfloat16).cpu() for name, tensor in tensors.items()}
        with aside(folder / WEIGHTS_FILE) as file:
            torch.save(halves, file)
