"""Medusa heads (Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads").

    head i:  x = h, then n times x = x + SiLU(W x + b), then its own lm_head: logits of the token i + 2 after h's

h is the target's hidden state after its final norm; its own head gives the token right after. Nothing is kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....models.config import named_architectures
from ....models.layers.linear import Linear
from ....models.layers.weights import WeightSlot
from ..base import PreparedAdapters
from ..checkpoint import StoredTensor, refuse

if TYPE_CHECKING:
    from ....models.model import ModelConfig

ARCHITECTURES = ("MedusaModel", "MedusaForCausalLM", "MedusaLlamaForCausalLM", "MedusaMistralForCausalLM")
_PREFIXES = ("medusa_heads.", "medusa_head.", "heads.")
# vLLM's names: blocks.{head}.layers.{layer}.* and lm_heads.{head}.*
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_LM_HEAD = re.compile(r"lm_heads\.(\d+)\.(weight|bias)")
_CANONICAL = re.compile(r"(\d+)\.(\d+)(\.linear)?\.(weight|bias)")
_MAX_HEADS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Heads of one shape."""

    num_heads: int
    num_layers: int
    """Residual blocks of a head."""
    hidden_size: int
    vocab_size: int
    biases: frozenset[str] = frozenset()
    """Modules with a bias, such as "0.0.linear"."""
    dtype: torch.dtype


def read_medusa_config(raw: Mapping[str, Any], target: ModelConfig) -> MedusaConfig:
    """Read config.json. The original format names neither sizes nor architectures: they are the target's.

    Raises:
        InvalidRequestError: it names other sizes than the target's, with both figures, or is not Medusa's.
    """
    named = named_architectures(raw)
    is_medusa = raw.get("model_type") == "medusa" or "medusa_num_heads" in raw or any(n in ARCHITECTURES for n in named)
    if not is_medusa:
        raise refuse(
            "config.json is not Medusa's: it has no medusa_num_heads, and names architectures "
            f"{', '.join(named) or 'none'}"
        )
    hidden, vocab = target.embedding_size, target.vocab_size
    for field, ours, what in (("hidden_size", hidden, "hidden size"), ("vocab_size", vocab, "vocabulary")):
        value = raw.get(field)
        if value is not None and value != ours:
            raise refuse(f"the Medusa heads' {field} is {value}, the target's {what} {ours}")
    return MedusaConfig(
        num_heads=_count(raw, ("medusa_num_heads", "num_heads")),
        num_layers=_count(raw, ("medusa_num_layers", "num_hidden_layers")),
        hidden_size=hidden,
        vocab_size=vocab,
        dtype=target.dtype,
    )


def _count(raw: Mapping[str, Any], fields: tuple[str, ...]) -> int:
    field = next((name for name in fields if raw.get(name) is not None), None)
    value = 1 if field is None else raw[field]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_HEADS:
        raise refuse(f"config.json: {field} must be an integer in [1, {_MAX_HEADS}], got {value!r}")
    return value


def canonical_names(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by the original format's names, "{head}.{layer}.linear.weight" and "{head}.{n}.weight", whichever of
    the public spellings the files use. Other names stay."""
    plain = {_without_prefix(name): tensor for name, tensor in tensors.items()}
    num_layers = 1 + max((int(m[2]) for m in map(_BLOCK.fullmatch, plain) if m), default=-1)

    def rename(name: str) -> str:
        if match := _BLOCK.fullmatch(name):
            return f"{match[1]}.{match[2]}.linear.{match[3]}"
        if match := _LM_HEAD.fullmatch(name):
            return f"{match[1]}.{num_layers}.{match[2]}"
        return name

    return {rename(name): tensor for name, tensor in plain.items()}


def _without_prefix(name: str) -> str:
    name = name.removeprefix("model.")
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)


def with_tensors(config: MedusaConfig, names: Mapping[str, StoredTensor]) -> MedusaConfig:
    """`config` with the heads, layers and biases shown by the canonical `names`: published configs have too low
    counts."""
    found = [match for match in map(_CANONICAL.fullmatch, names) if match]
    if not found:
        return config
    num_heads, num_layers = 1 + max(int(match[1]) for match in found), max(int(match[2]) for match in found)
    if max(num_heads, num_layers) > _MAX_HEADS:
        raise refuse(f"the weights name {num_heads} heads of {num_layers} layers; the limit is {_MAX_HEADS} each")
    biases = frozenset(match[0].removesuffix(".bias") for match in found if match[4] == "bias")
    return replace(config, num_heads=num_heads, num_layers=num_layers, biases=biases)


class MedusaHeads:
    """All heads, built without weights: fill every slot of `weight_slots`, then run them."""

    def __init__(self, config: MedusaConfig, device: str) -> None:
        self.config = config
        self.device = torch.device(device)
        self._blocks: list[list[Linear]] = []
        self._lm_heads: list[Linear] = []
        for head in range(config.num_heads):
            names = [f"{head}.{layer}.linear" for layer in range(config.num_layers)]
            self._blocks.append([self._linear(name, config.hidden_size, device) for name in names])
            self._lm_heads.append(self._linear(f"{head}.{config.num_layers}", config.vocab_size, device))

    def _linear(self, name: str, size: int, device: str) -> Linear:
        config = self.config
        return Linear(
            name,
            [(name, size)],
            config.hidden_size,
            bias=name in config.biases,
            dtype=config.dtype,
            device=torch.device(device),
        )

    def linears(self) -> list[Linear]:
        """The residual blocks' projections."""
        return [linear for blocks in self._blocks for linear in blocks]

    def quantizable(self) -> list[Linear]:
        """All projections."""
        return [*self.linears(), *self._lm_heads]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Every tensor that the heads need, by its canonical name."""
        slots: dict[str, WeightSlot] = {}
        for linear in self.quantizable():
            slots |= linear.weight_slots()
        return slots

    def logits(self, head: int, hidden: Tensor, adapters: Any, out: Tensor | None = None) -> Tensor:
        """float32 logits [B, V] of head `head` from hidden states [B, H], in `out` if given; `adapters` of these B
        rows."""
        rows = PreparedAdapters(adapters)
        x = hidden
        for linear in self._blocks[head]:
            x = x + F.silu(linear.forward(x, rows))
        logits = self._lm_heads[head].forward(x, rows)
        return logits.float() if out is None else out.copy_(logits)
