"""Language models inside multimodal checkpoints, which are served as text models: vision towers are never read.

config.json of the checkpoint  --language_config--> config.json of a text family
name of a tensor               --language_name-->   its name there; None: it belongs to a tower or a projector

To add an architecture, name the type of its text model in `WRAPPERS`; to add a text model, an entry in `TEXT_MODELS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...platform.core.errors import UnsupportedModelError
from ..config_values import shown, wrong

OUTER = "multimodal_architecture"
"""Key of a text family's config that was made of a multimodal one: the checkpoint's architecture."""


class TextModel(NamedTuple):
    """Text model by the `model_type` of a `text_config`."""

    architecture: str
    """Family that computes it."""
    defaults: Mapping[str, Any] = {}
    """Keys that a `text_config` may leave out, if the family's defaults are others; None: no value."""
    model_type: str | None = None
    """`model_type` of the family in transformers; None: that of the `text_config`."""


_LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
_QWEN2_VL = {"vocab_size": 152064, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
_QWEN3_VL = {"max_position_embeddings": 128000, "rope_theta": 5e5}
_GLM4V = {"head_dim": None, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}
_GLM4V_MOE = {"vocab_size": 151424, "max_position_embeddings": 65536, "attention_bias": True}
_GEMMA3 = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}
TEXT_MODELS: dict[str, TextModel] = {
    "gemma3_text": TextModel("Gemma3ForCausalLM", _GEMMA3),
    "gemma3n_text": TextModel("Gemma3nForCausalLM"),
    "gemma4_text": TextModel("Gemma4ForCausalLM"),
    "glm4v_text": TextModel("Glm4ForCausalLM", _GLM4V, "glm4"),
    "glm4v_moe_text": TextModel("Glm4MoeForCausalLM", _GLM4V_MOE, "glm4_moe"),
    "granite": TextModel("GraniteForCausalLM"),
    "llama": TextModel("LlamaForCausalLM", _LLAMA),
    "llama4_text": TextModel("Llama4ForCausalLM"),
    "mistral": TextModel("MistralForCausalLM", {**_LLAMA, "intermediate_size": 14336}),
    "ministral3": TextModel("Ministral3ForCausalLM"),
    "phi3": TextModel("Phi3ForCausalLM"),
    "qwen2": TextModel("Qwen2ForCausalLM", {**_LLAMA, "intermediate_size": 22016}),
    "qwen2_vl_text": TextModel("Qwen2ForCausalLM", _QWEN2_VL, "qwen2"),
    "qwen2_5_vl_text": TextModel("Qwen2ForCausalLM", _QWEN2_VL, "qwen2"),
    "qwen3": TextModel("Qwen3ForCausalLM"),
    "qwen3_5_text": TextModel("Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": TextModel("Qwen3_5MoeForCausalLM"),
    "qwen3_moe": TextModel("Qwen3MoeForCausalLM"),
    "qwen3_vl_text": TextModel("Qwen3ForCausalLM", _QWEN3_VL, "qwen3"),
    "qwen3_vl_moe_text": TextModel("Qwen3MoeForCausalLM", {**_QWEN3_VL, "norm_topk_prob": True}, "qwen3_moe"),
}
WRAPPERS: dict[str, str] = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma3nForConditionalGeneration": "gemma3n_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Glm4vForConditionalGeneration": "glm4v_text",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe_text",
    "Idefics3ForConditionalGeneration": "llama",
    "InternVLForConditionalGeneration": "qwen2",
    "Llama4ForConditionalGeneration": "llama4_text",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
    "SmolVLMForConditionalGeneration": "llama",
}
"""Type of the text model, if its `text_config` names none, by a name in `architectures`."""

_SHARED = (
    *("dtype", "torch_dtype", "quantization_config", "compression_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Keys that count for the language model if the outer config has them."""
_NAMES = re.compile(
    r"(?:(?:model\.)?(?:language_model|text_model)\.)?(?:model\.)?"
    r"(?P<inner>(?:embed_tokens(?:_per_layer)?|layers|norm|per_layer_(?:model_projection|projection_norm)"
    r"|altup_(?:unembed_)?projections)\..+)"
    r"|(?:language_model\.)?(?P<head>lm_head\..+)"
)
_TOWER = re.compile(
    r"(?:^|\.)(?:vision_tower|vision_model|vision_encoder|visual|image_newline|multi_modal_projector|connector"
    r"|audio_tower|embed_vision|embed_audio)(?:\.|$)"
)


def language_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Config of the language model inside a multimodal checkpoint with this config.json; of any other `raw` itself.

    Raises:
        UnsupportedModelError: the text model is not served.
    """
    named = raw.get("architectures")
    outer = next((name for name in named if name in WRAPPERS), None) if isinstance(named, list) else None
    if outer is None:
        return dict(raw)
    text = raw.get("text_config")
    kind = WRAPPERS[outer]
    if text is None:  # older files have its keys among their own
        text = {key: value for key, value in raw.items() if key != "vision_config"}
    elif not isinstance(text, dict):
        raise wrong("text_config", f"must be an object, got {shown(text)}")
    else:
        kind = text.get("model_type") or kind
    found = TEXT_MODELS.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise UnsupportedModelError(
            f"unsupported architecture: {outer} with a text model of type {shown(kind)}; supported are "
            f"{', '.join(TEXT_MODELS)}",
            param="model",
        )
    values = {**found.defaults, **text, **{key: raw[key] for key in _SHARED if raw.get(key) is not None}}
    # Versions of transformers go by one of the two; the loader looks for a head of its own.
    ties = [source["tie_word_embeddings"] for source in (raw, text) if source.get("tie_word_embeddings") is not None]
    if ties:
        values["tie_word_embeddings"] = next(filter(None, ties), ties[0])
    return values | {"architectures": [found.architecture], "model_type": found.model_type or kind, OUTER: outer}


def language_name(name: str) -> str | None:
    """Name in its text family of a tensor of a multimodal checkpoint; None: it is not of the language model."""
    match = _NAMES.fullmatch(name)
    if match is None:
        return None
    return f"model.{match['inner']}" if match["inner"] else match["head"]


def is_of_tower(name: str) -> bool:
    """True for a module or a tensor of a vision tower or of its projector, through which no text passes."""
    return _TOWER.search(name) is not None
