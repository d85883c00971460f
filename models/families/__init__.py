"""Model families: one module a family holds its traits, and `FAMILIES` finds them by architecture.

To add a family, write a module here with its `FamilyTraits` and add it to `FAMILIES`. All families run on the same
`Decoder`; a property that the decoder lacks becomes a field of `DecoderConfig` and of `FamilyTraits`.
"""

from __future__ import annotations

from . import llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from .traits import FamilyTraits

__all__ = ["FAMILIES", "FamilyTraits", "supported_architectures"]

FAMILIES: dict[str, FamilyTraits] = {
    "LlamaForCausalLM": llama.TRAITS,
    "MistralForCausalLM": mistral.TRAITS,
    "MixtralForCausalLM": mixtral.TRAITS,
    "Qwen2ForCausalLM": qwen2.TRAITS,
    "Qwen2MoeForCausalLM": qwen2_moe.TRAITS,
    "Qwen3ForCausalLM": qwen3.TRAITS,
    "Qwen3MoeForCausalLM": qwen3_moe.TRAITS,
}
"""Traits by a name in the `architectures` of config.json."""


def supported_architectures() -> list[str]:
    """Names of the architectures that are served, sorted."""
    return sorted(FAMILIES)
