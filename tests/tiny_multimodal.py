"""Tiny random multimodal models, as transformers makes them. Adapters target projections of their vision towers too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .tiny_families import (
    ATTENTION,
    DELTA,
    GATED,
    GEMMA4,
    GLM_MOE,
    LLAMA4,
    MERGED,
    MINISTRAL3_ROPE,
    PER_LAYER,
    SIZES,
    Family,
)

_VISION = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
_PATCHES = {
    **{"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "patch_size": 14},
    "out_hidden_size": SIZES["hidden_size"],
}
_DEEPSTACK = {**_PATCHES, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}


def _text(**changes: Any) -> dict[str, Any]:
    return {**SIZES, **changes}


def _mrope(*section: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **more}}


def _family(prefix: str, text: dict[str, Any], vision: dict[str, Any], *more: str, **config: Any) -> Family:
    whole = {"text_config": text, "vision_config": vision, **config}
    return Family(prefix, whole, [*ATTENTION, *(more or GATED)], is_multimodal=True)


_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9, "num_hidden_layers": 3}
_GEMMA |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 16}
_WIDE = {"head_dim": 16}
_LLAMA4_VISION = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
MULTIMODAL: dict[str, Family] = {
    "gemma3": _family("Gemma3", _text(**_GEMMA), _VISION, mm_tokens_per_image=4),
    "gemma4": replace(
        _family("Gemma4", _text(**GEMMA4), {**_VISION, "head_dim": 16, "num_key_value_heads": 2}),
        targets=rf".*(language_model.*({'|'.join([*ATTENTION, *GATED, *PER_LAYER])})|vision.*q_proj\.linear)",
    ),
    "mistral3": _family(
        "Mistral3",
        _text(model_type="mistral", sliding_window=None, **_WIDE),
        {**_VISION, **_WIDE, "model_type": "pixtral"},
        tie_word_embeddings=False,
    ),
    "ministral3": _family(
        "Mistral3",
        _text(model_type="ministral3", rope_parameters=MINISTRAL3_ROPE, **_WIDE),
        {**_VISION, **_WIDE, "model_type": "pixtral"},
        tie_word_embeddings=False,
    ),
    "glm4v-moe": _family(
        "Glm4vMoe",
        _text(**{**GLM_MOE, "hidden_size": 64}, **_mrope(2, 1, 1, partial_rotary_factor=0.5)),
        {**_PATCHES, "image_size": 28, "out_hidden_size": 64},
    ),
    "llama4": _family("Llama4", _text(**LLAMA4), {**_VISION, **_LLAMA4_VISION}),
    "llava": _family("Llava", _text(model_type="llama"), {**_VISION, "model_type": "clip_vision_model"}),
    "llava-next": _family("LlavaNext", _text(model_type="mistral"), {**_VISION, "model_type": "clip_vision_model"}),
    "llava-onevision": _family(
        "LlavaOnevision", _text(model_type="qwen2"), {**_VISION, "model_type": "siglip_vision_model"}
    ),
    "internvl": _family(
        "InternVL",
        _text(model_type="qwen3", **_WIDE),
        {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]},
        tie_word_embeddings=False,
    ),
    "idefics3": _family("Idefics3", _text(model_type="llama"), _VISION, scale_factor=1),
    "smolvlm": _family("SmolVLM", _text(model_type="llama"), _VISION, scale_factor=1, tie_word_embeddings=True),
    "qwen2-vl": _family("Qwen2VL", _text(**_mrope(2, 2, 2)), {**_PATCHES, "embed_dim": 32, "hidden_size": 48}),
    "qwen2.5-vl": _family("Qwen2_5_VL", _text(**_mrope(2, 2, 2)), _PATCHES, tie_word_embeddings=True),
    "qwen3-vl": _family("Qwen3VL", _text(**_WIDE, **_mrope(4, 2, 2, mrope_interleaved=True)), _DEEPSTACK),
    "qwen3-vl-moe": _family("Qwen3VLMoe", _text(**_EXPERTS, **_mrope(4, 2, 2)), _DEEPSTACK, "qkv"),
    "qwen3.5-vl": _family(
        "Qwen3_5",
        _text(**DELTA, **_WIDE, **_mrope(2, 1, 1, partial_rotary_factor=0.5)),
        {**_PATCHES, "num_position_embeddings": 16},
    ),
    "qwen3.5-vl-moe": _family(
        "Qwen3_5Moe",
        _text(
            **{**DELTA, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
            **{**_EXPERTS, "shared_expert_intermediate_size": 72},
            **_mrope(2, 1, 1, partial_rotary_factor=0.5),
        ),
        {**_PATCHES, "num_position_embeddings": 16},
    ),
    "glm4v": _family(
        "Glm4v", _text(**_mrope(1, 1, 1, partial_rotary_factor=0.5)), {**_PATCHES, "image_size": 28}, *MERGED
    ),
}
