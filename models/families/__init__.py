"""Model families: one module a family holds its traits, and `FAMILIES` finds them by architecture.

To add a family, write a module here with its `FamilyTraits` and add it to `FAMILIES`. All families run on the same
`Decoder`; a property that the decoder lacks becomes a field of `DecoderConfig` and of `FamilyTraits`.
"""

from __future__ import annotations

from . import (
    bamba,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    falcon,
    falcon_h1,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    granite,
    granite_moe_hybrid,
    kimi_linear,
    lfm2,
    lfm2_moe,
    llama,
    llama4,
    mamba2,
    mimo,
    minimax_m2,
    ministral,
    ministral3,
    mistral,
    mixtral,
    nemotron_h,
    olmo2,
    olmo3,
    olmo_hybrid,
    olmoe,
    opt,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from .multimodal import WRAPPERS
from .traits import PRE_NORMS, FamilyTraits, NormNames

__all__ = ["CLASSIFIER", "FAMILIES", "PRE_NORMS", "FamilyTraits", "NormNames", "find_traits", "supported_architectures"]

CLASSIFIER = "ForSequenceClassification"
"""End of the names of architectures that have a score matrix in place of a head."""

FAMILIES: dict[str, FamilyTraits] = {
    "BambaForCausalLM": bamba.TRAITS,
    "Cohere2ForCausalLM": cohere2.TRAITS,
    "DeepseekV2ForCausalLM": deepseek_v2.TRAITS,
    "DeepseekV32ForCausalLM": deepseek_v32.TRAITS,
    "DeepseekV3ForCausalLM": deepseek_v3.TRAITS,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe.TRAITS,
    "Ernie4_5ForCausalLM": ernie4_5.TRAITS,
    "Exaone4ForCausalLM": exaone4.TRAITS,
    "FalconForCausalLM": falcon.TRAITS,
    "Gemma2ForCausalLM": gemma2.TRAITS,
    "Gemma3ForCausalLM": gemma3.TRAITS,
    "Gemma3nForCausalLM": gemma3n.TRAITS,
    "Gemma4ForCausalLM": gemma4.TRAITS,
    "Glm4ForCausalLM": glm4.TRAITS,
    "Glm4MoeForCausalLM": glm4_moe.TRAITS,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite.TRAITS,
    "GlmMoeDsaForCausalLM": glm_moe_dsa.TRAITS,
    "GPT2LMHeadModel": gpt2.TRAITS,
    "FalconH1ForCausalLM": falcon_h1.TRAITS,
    "GPTBigCodeForCausalLM": gpt_bigcode.TRAITS,
    "GPTNeoXForCausalLM": gpt_neox.TRAITS,
    "GptOssForCausalLM": gpt_oss.TRAITS,
    "GraniteForCausalLM": granite.TRAITS,
    "GraniteMoeHybridForCausalLM": granite_moe_hybrid.TRAITS,
    "KimiLinearForCausalLM": kimi_linear.TRAITS,
    "Lfm2ForCausalLM": lfm2.TRAITS,
    "Lfm2MoeForCausalLM": lfm2_moe.TRAITS,
    "Llama4ForCausalLM": llama4.TRAITS,
    "LlamaForCausalLM": llama.TRAITS,
    "Mamba2ForCausalLM": mamba2.TRAITS,
    "MiMoForCausalLM": mimo.TRAITS,
    "MiniMaxM2ForCausalLM": minimax_m2.TRAITS,
    "Ministral3ForCausalLM": ministral3.TRAITS,
    "MinistralForCausalLM": ministral.TRAITS,
    "MistralForCausalLM": mistral.TRAITS,
    "MixtralForCausalLM": mixtral.TRAITS,
    "NemotronHForCausalLM": nemotron_h.TRAITS,
    "Olmo2ForCausalLM": olmo2.TRAITS,
    "Olmo3ForCausalLM": olmo3.TRAITS,
    "OlmoHybridForCausalLM": olmo_hybrid.TRAITS,
    "OlmoeForCausalLM": olmoe.TRAITS,
    "OPTForCausalLM": opt.TRAITS,
    "Phi3ForCausalLM": phi3.TRAITS,
    "PhiForCausalLM": phi.TRAITS,
    "Qwen2ForCausalLM": qwen2.TRAITS,
    "Qwen2MoeForCausalLM": qwen2_moe.TRAITS,
    "Qwen3ForCausalLM": qwen3.TRAITS,
    "Qwen3MoeForCausalLM": qwen3_moe.TRAITS,
    "Qwen3NextForCausalLM": qwen3_next.TRAITS,
    "Qwen3_5ForCausalLM": qwen3_5.TRAITS,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe.TRAITS,
    "SeedOssForCausalLM": seed_oss.TRAITS,
    "SmolLM3ForCausalLM": smollm3.TRAITS,
    "StableLmForCausalLM": stablelm.TRAITS,
    "Starcoder2ForCausalLM": starcoder2.TRAITS,
}
"""Traits by a name in the `architectures` of config.json."""


def find_traits(architecture: str) -> FamilyTraits | None:
    """Traits of an architecture, or of the family's decoder beneath a classifier; None: it is not served natively."""
    if not architecture.endswith(CLASSIFIER):
        return FAMILIES.get(architecture)
    traits = FAMILIES.get(architecture.removesuffix(CLASSIFIER) + "ForCausalLM")
    return traits if traits is not None and traits.block is None else None


def supported_architectures() -> list[str]:
    """Names of the architectures that are served, sorted."""
    return sorted([*FAMILIES, *WRAPPERS])
