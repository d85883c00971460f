"""Which architectures are served, and the module of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..platform.core.errors import UnsupportedModelError
from .config import DecoderConfig, FamilyTraits, decoder_config, named_architectures


def _llama() -> FamilyTraits:
    from .llama import TRAITS

    return TRAITS


def _mistral() -> FamilyTraits:
    from .mistral import TRAITS

    return TRAITS


def _qwen2() -> FamilyTraits:
    from .qwen2 import TRAITS

    return TRAITS


def _qwen3() -> FamilyTraits:
    from .qwen3 import TRAITS

    return TRAITS


_FAMILIES: dict[str, Callable[[], FamilyTraits]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}


def supported_architectures() -> list[str]:
    """Names as in the `architectures` of config.json, sorted."""
    return sorted(_FAMILIES)


def architecture_of(raw: Mapping[str, Any]) -> str:
    """The first supported architecture that a HF config names.

    Raises:
        UnsupportedModelError: it names none, or they are no list of names; the message lists the supported ones.
    """
    named = named_architectures(raw)
    for name in named:
        if name in _FAMILIES:
            return name
    what = ", ".join(named) or f"none (model_type {raw.get('model_type')!r})"
    raise UnsupportedModelError(
        f"unsupported architecture: {what}; supported are {', '.join(supported_architectures())}", param="model"
    )


def config_from_hf(raw: Mapping[str, Any], dtype: torch.dtype) -> DecoderConfig:
    """The config of a model to be run in `dtype`, from its config.json.

    Raises:
        UnsupportedModelError: the architecture or one of its fields is not supported; `param` names the field.
    """
    architecture = architecture_of(raw)
    return decoder_config(raw, architecture, dtype, _FAMILIES[architecture]())
