"""Draft weights of an adapter: a LoRA (Hu et al. 2021) of a drafter, in PEFT's format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..output_files import write_model
from ..target import Features, import_peft
from .base import Step, TrainedDrafter, build_wanted, greedy_tokens, soft_cross_entropy
from .block_head import BlockHead
from .eagle_head import EagleHead

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


class LoraLinear(nn.Module):
    """Adapted projection: base(x) + scale * B(A x); the base is frozen."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = scale
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    @property
    def added(self) -> tuple[Tensor, Tensor]:
        """A [r, in] and B [out, r] with the scale."""
        return self.lora_A.weight, self.scale * self.lora_B.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self.base(x) + self.scale * self.lora_B(self.lora_A(x))


def adapter_config(rank: int, alpha: float, modules: list[str], base_name: str) -> dict[str, Any]:
    """adapter_config.json as PEFT reads it."""
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "use_rslora": False,
        "inference_mode": True,
    }


class HeadLora(TrainedDrafter):
    """A LoRA of `fc` and of every projection of the layers, of an EAGLE head or a drafter of blocks."""

    def __init__(self, head: EagleHead | BlockHead, rank: int, alpha: float, base_name: str) -> None:
        super().__init__()
        self.head = head.requires_grad_(False)
        self._rank, self._alpha, self._base_name = rank, alpha, base_name
        self._adapted: dict[str, LoraLinear] = {}
        linears = {n: m for n, m in head.named_modules() if isinstance(m, nn.Linear)}
        plain = {name: linear for name, linear in linears.items() if name == "fc" or name.startswith("layers.")}
        for name, linear in plain.items():
            parent, _, leaf = name.rpartition(".")
            self._adapted[name] = LoraLinear(linear, rank, alpha / rank)
            setattr(head.get_submodule(parent), leaf, self._adapted[name])

    def loss(self, features: Features) -> Tensor:
        """The head's own."""
        return self.head.loss(features)

    def guesses(self, features: Features, k: int) -> Tensor:
        """The head's own."""
        return self.head.guesses(features, k)

    def export(self, folder: Path) -> None:
        """adapter_config.json and adapter_model.safetensors; modules as the engine names them."""
        tensors = {}
        for name, module in self._adapted.items():
            tensors[f"{PREFIX}{name}.lora_A.weight"] = module.lora_A.weight
            tensors[f"{PREFIX}{name}.lora_B.weight"] = module.lora_B.weight
        modules = list(dict.fromkeys(name.rpartition(".")[2] for name in self._adapted))
        config = adapter_config(self._rank, self._alpha, modules, self._base_name)
        write_model(folder, config, tensors, "adapter_")


class DraftModelLora(TrainedDrafter):
    """A PEFT LoRA of a causal LM with the target's vocabulary."""

    def __init__(self, causal: Any, rank: int, alpha: float, base_name: str) -> None:
        super().__init__()
        peft = import_peft()
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM")
        self._rank, self._alpha, self._base_name = rank, alpha, base_name
        self.model = peft.get_peft_model(causal, config)
        self._peft = peft

    def _hidden(self, features: Features) -> Tensor:
        """[N, H] of the draft model at the labels: it has read everything before the token that it guesses."""
        causal = self.model.get_base_model()
        hidden: Tensor = causal.base_model(input_ids=features.ids, use_cache=False).last_hidden_state
        return hidden[features.labels.rows, features.labels.positions]

    def loss(self, features: Features) -> Tensor:
        """Cross entropy against the target's distribution."""
        hidden = self._hidden(features)
        step = Step(hidden, torch.arange(len(hidden), device=hidden.device))
        return soft_cross_entropy([step], self._lm_head.weight, build_wanted(features))

    def guesses(self, features: Features, k: int) -> Tensor:
        """Guesses [N, k], equal at every position of a round: correct drafts are the text itself."""
        tokens = greedy_tokens(self._lm_head, self._hidden(features), len(self._lm_head.weight))
        roots = features.labels.positions[:, None] - 1 - torch.arange(k, device=tokens.device)
        return torch.where(roots >= 0, tokens[:, None], -1)

    @property
    def _lm_head(self) -> nn.Linear:
        head: nn.Linear = self.model.get_base_model().get_output_embeddings()
        return head

    def export(self, folder: Path) -> None:
        """In PEFT's format, in bfloat16."""
        weights: Mapping[str, Tensor] = self._peft.get_peft_model_state_dict(self.model)
        config = adapter_config(self._rank, self._alpha, list(PROJECTIONS), self._base_name)
        write_model(folder, config | {"task_type": "CAUSAL_LM"}, weights, "adapter_")
