"""Choice between the shared decoder, which runs families natively, and transformers' own code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..platform.core.errors import UnsupportedModelError
from .config import DecoderConfig, config_from_hf, named_architectures
from .config_values import check_values, shown
from .decoder import Decoder
from .families import find_traits

if TYPE_CHECKING:
    import torch

    from .model import LanguageModel
    from .transformers_model.config import TransformersConfig

AUTO, NATIVE, TRANSFORMERS = "auto", "native", "transformers"


def read_config(raw: Mapping[str, Any], dtype: torch.dtype, impl: str = AUTO) -> DecoderConfig | TransformersConfig:
    """Config of a model that runs in `dtype`, from its config.json. AUTO: native if there is a family.

    Raises:
        UnsupportedModelError: the model is not served so; the message says why.
    """
    is_family = any(find_traits(name) is not None for name in named_architectures(raw))
    if impl == NATIVE or (impl == AUTO and is_family):
        return config_from_hf(raw, dtype)
    check_values(raw)
    from .checkpoint.tokenizer import import_transformers
    from .transformers_model.config import transformers_config

    import_transformers()  # which takes a second; a thread for the tokenizer may be at it
    found = transformers_config(raw, dtype)
    if found is None and is_family:
        named = ", ".join(named_architectures(raw))
        raise UnsupportedModelError(
            f"config.json: transformers has no {named} of model_type {shown(raw.get('model_type'))}", param="model"
        )
    # An architecture that neither knows: the error lists the families.
    return found or config_from_hf(raw, dtype)


def choose_implementation(config: object) -> str:
    """NATIVE or TRANSFORMERS."""
    return NATIVE if isinstance(config, DecoderConfig) else TRANSFORMERS


def build_model(config: DecoderConfig | TransformersConfig, device: torch.device | str) -> LanguageModel:
    """Model without weights.

    Raises:
        InvalidRequestError: it does not do what the config asks for.
    """
    if isinstance(config, DecoderConfig):
        return Decoder(config, device)
    from .transformers_model.model import TransformersModel

    return TransformersModel(config, device)
