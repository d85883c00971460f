"""Model families: one module a family holds its traits, and `FAMILIES` finds them by architecture.

To add a family, write a module here with its `FamilyTraits` and add it to `FAMILIES`. All families run on the same
`Decoder`; a property that the decoder lacks becomes a field of `DecoderConfig` and of `FamilyTraits`.
"""

from __future__ import annotations

from . import (
    deepseek_v2,
    deepseek_v3,
    ernie4_5,
    exaone4,
    falcon,
    gemma2,
    gemma3,
    glm4,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    granite,
    lfm2,
    llama,
    mimo,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from .multimodal import WRAPPERS
from .traits import PRE_NORMS, FamilyTraits, NormNames

__all__ = ["CLASSIFIER", "FAMILIES", "PRE_NORMS", "FamilyTraits", "NormNames", "supported_architectures", "traits_of"]

CLASSIFIER = "ForSequenceClassification"
"""End of the names of architectures that have a score matrix in place of a head."""

FAMILIES: dict[str, FamilyTraits] = {
    "DeepseekV2ForCausalLM": deepseek_v2.TRAITS,
    "DeepseekV3ForCausalLM": deepseek_v3.TRAITS,
    "Ernie4_5ForCausalLM": ernie4_5.TRAITS,
    "Exaone4ForCausalLM": exaone4.TRAITS,
    "FalconForCausalLM": falcon.TRAITS,
    "GPTBigCodeForCausalLM": gpt_bigcode.TRAITS,
    "GPTNeoXForCausalLM": gpt_neox.TRAITS,
    "GptOssForCausalLM": gpt_oss.TRAITS,
    "Gemma2ForCausalLM": gemma2.TRAITS,
    "Gemma3ForCausalLM": gemma3.TRAITS,
    "Glm4ForCausalLM": glm4.TRAITS,
    "GPT2LMHeadModel": gpt2.TRAITS,
    "GraniteForCausalLM": granite.TRAITS,
    "Lfm2ForCausalLM": lfm2.TRAITS,
    "LlamaForCausalLM": llama.TRAITS,
    "MiMoForCausalLM": mimo.TRAITS,
    "MistralForCausalLM": mistral.TRAITS,
    "MixtralForCausalLM": mixtral.TRAITS,
    "Olmo2ForCausalLM": olmo2.TRAITS,
    "Olmo3ForCausalLM": olmo3.TRAITS,
    "OlmoeForCausalLM": olmoe.TRAITS,
    "OPTForCausalLM": opt.TRAITS,
    "PhiForCausalLM": phi.TRAITS,
    "Phi3ForCausalLM": phi3.TRAITS,
    "Qwen2ForCausalLM": qwen2.TRAITS,
    "Qwen2MoeForCausalLM": qwen2_moe.TRAITS,
    "Qwen3ForCausalLM": qwen3.TRAITS,
    "Qwen3MoeForCausalLM": qwen3_moe.TRAITS,
    "Qwen3NextForCausalLM": qwen3_next.TRAITS,
    "Qwen3_5ForCausalLM": qwen3_5.TRAITS,
    "SeedOssForCausalLM": seed_oss.TRAITS,
    "StableLmForCausalLM": stablelm.TRAITS,
    "Starcoder2ForCausalLM": starcoder2.TRAITS,
    "SmolLM3ForCausalLM": smollm3.TRAITS,
}
"""Traits by a name in the `architectures` of config.json."""


def traits_of(architecture: str) -> FamilyTraits | None:
    """Traits of an architecture, or of the family's decoder beneath a classifier; None: it is not served natively."""
    if not architecture.endswith(CLASSIFIER):
        return FAMILIES.get(architecture)
    traits = FAMILIES.get(architecture.removesuffix(CLASSIFIER) + "ForCausalLM")
    return traits if traits is not None and traits.block is None else None


def supported_architectures() -> list[str]:
    """Names of the architectures that are served, sorted."""
    return sorted([*FAMILIES, *WRAPPERS])
