"""Families in GGUF files: llama.cpp's names of architectures, facts that its files do not state, and the changes that
its converter makes to tensors."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from ...platform.core.errors import UnsupportedModelError

Values = Mapping[str, Any]
"""Values of a file by their keys, without the name of the architecture before them."""


def _nothing(values: Values, tensors: Container[str]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """Family of an architecture in a GGUF file."""

    architecture: str
    """Name in the `architectures` of config.json."""
    with_experts: str | None = None
    """Architecture of files with experts, if it is another one."""
    neighbours_rotated: bool = False
    """True: rows of q and k are in the order in which neighbours are rotated as pairs; ours rotate the two halves."""
    facts: Callable[[Values, Container[str]], dict[str, Any]] = _nothing
    """Function from a file's values and its tensors' names to keys of config.json that the file has in no other way."""


def _gemma(layers_of_largest: int) -> Callable[[Values, Container[str]], dict[str, Any]]:
    """Scores are scaled by the head's size; in the largest model, by hidden size / heads."""

    def facts(values: Values, tensors: Container[str]) -> dict[str, Any]:
        if values.get("block_count") == layers_of_largest:
            size = values["embedding_length"] // values["attention.head_count"]
        else:
            size = values.get("attention.key_length")
        return {} if size is None else {"query_pre_attn_scalar": size}

    return facts


def _olmo2(values: Values, tensors: Container[str]) -> dict[str, Any]:
    if values.get("attention.sliding_window"):
        raise UnsupportedModelError(
            "olmo2.attention.sliding_window: layers with a window (OLMo 3) are not supported", param="model"
        )
    return {}


def _qwen3_moe(values: Values, tensors: Container[str]) -> dict[str, Any]:
    return {"norm_topk_prob": values.get("expert_weights_norm", True)}


def _stablelm(values: Values, tensors: Container[str]) -> dict[str, Any]:
    return {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in tensors,
    }


GGUF_FAMILIES = {
    "gemma2": GgufFamily("Gemma2ForCausalLM", facts=_gemma(46)),
    "gemma3": GgufFamily("Gemma3ForCausalLM", facts=_gemma(62)),
    "glm4": GgufFamily("Glm4ForCausalLM"),
    "gpt2": GgufFamily("GPT2LMHeadModel"),
    "granite": GgufFamily("GraniteForCausalLM", neighbours_rotated=True),
    "llama": GgufFamily("LlamaForCausalLM", "MixtralForCausalLM", neighbours_rotated=True),  # Mistral too
    "olmo2": GgufFamily("Olmo2ForCausalLM", facts=_olmo2),
    "olmoe": GgufFamily("OlmoeForCausalLM"),
    "phi3": GgufFamily("Phi3ForCausalLM"),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", facts=_qwen3_moe),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", neighbours_rotated=True),
    "stablelm": GgufFamily("StableLmForCausalLM", facts=_stablelm),
    "starcoder2": GgufFamily("Starcoder2ForCausalLM"),
}
"""Families by `general.architecture`."""

GPT2_SPLITS = {"default", "gpt-2", "phi-2", "mpt", "olmo", "jais"}
"""Splits of text as GPT-2's, by `tokenizer.ggml.pre`."""
GPT2_SPLITS_WITHOUT_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Splits as GPT-2's after each digit was split off."""
GPT4_SPLITS = {"chatglm-bpe": 3, "glm4": 3, "stablelm2": 1}
"""Splits as GPT-4's, and the most digits that stay together."""
SPLITS_OF_WHOLE_WORDS = frozenset("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken".split())
"""Splits after which a known word is not merged, and where text begins with a token for that."""
