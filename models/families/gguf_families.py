"""Families in GGUF files: llama.cpp's names of architectures, and the changes that its converter makes to tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """Family of an architecture in a GGUF file."""

    architecture: str
    """Name in the `architectures` of config.json."""
    neighbours_rotated: bool = False
    """True: rows of q and k are in the order in which neighbours are rotated as pairs; ours rotate the two halves."""

    scored_by_hidden_size: tuple[int | None, ...] = ()
    """Layers of the sizes whose scores are scaled by hidden size / heads, where the others' are by the head's size; the
    file does not say it."""


GGUF_FAMILIES = {
    "gemma2": GgufFamily("Gemma2ForCausalLM", scored_by_hidden_size=(46,)),
    "gemma3": GgufFamily("Gemma3ForCausalLM", scored_by_hidden_size=(62,)),
    "llama": GgufFamily("LlamaForCausalLM", neighbours_rotated=True),  # Mistral too
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
}
"""Families by `general.architecture`."""
