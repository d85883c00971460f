"""Model families: one module a family says how its config.json is read, and `FAMILIES` finds it by architecture.

To add a family, write a module here with its `FamilyTraits` and add it to `FAMILIES`. All families run on the same
`Decoder`; a property that the decoder lacks becomes a field of `DecoderConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...platform.core.errors import UnsupportedModelError
from ..config import DecoderConfig, FamilyTraits, decoder_config, named_architectures
from . import llama, mistral, qwen2, qwen3

FAMILIES: dict[str, FamilyTraits] = {
    "LlamaForCausalLM": llama.TRAITS,
    "MistralForCausalLM": mistral.TRAITS,
    "Qwen2ForCausalLM": qwen2.TRAITS,
    "Qwen3ForCausalLM": qwen3.TRAITS,
}
"""Traits by a name in the `architectures` of config.json."""


def supported_architectures() -> list[str]:
    """Names of the architectures that are served, sorted."""
    return sorted(FAMILIES)


def architecture_of(raw: Mapping[str, Any]) -> str:
    """The first supported architecture that a HF config names.

    Raises:
        UnsupportedModelError: it names none, or its `architectures` are no list of names; the message lists the
            supported ones.
    """
    named = named_architectures(raw)
    for name in named:
        if name in FAMILIES:
            return name
    what = ", ".join(named) or f"none (model_type {raw.get('model_type')!r})"
    raise UnsupportedModelError(
        f"unsupported architecture: {what}; supported are {', '.join(supported_architectures())}", param="model"
    )


def config_from_hf(raw: Mapping[str, Any], dtype: torch.dtype) -> DecoderConfig:
    """The config of a model that runs in `dtype`, from its config.json.

    Raises:
        UnsupportedModelError: the architecture or one of its fields is not supported; `param` names the field.
    """
    architecture = architecture_of(raw)
    return decoder_config(raw, architecture, dtype, FAMILIES[architecture])
