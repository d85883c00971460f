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


GGUF_FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", neighbours_rotated=True),  # Mistral too
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
}
"""Families by `general.architecture`."""
