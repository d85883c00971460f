"""Models of transformers without weights: built on the meta device, then given buffers and our layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...platform.core.errors import UnsupportedModelError
from ..config import named_architectures
from .paged_attention import NAME, register

_LARGEST = 1 << 40
"""Largest integer that a config may hold: a larger one is a damaged file."""
_MOST_LAYERS = 1 << 12
_MOST_NUMBERS = 1 << 28
"""Most numbers of a table that a model computes when it is made; GPT-J's has 131,072."""
_NOT_READ = frozenset(
    "auto_map attn_implementation experts_implementation return_dict torchscript "
    "output_attentions output_hidden_states output_router_logits quantization_config compression_config".split()
)
"""Keys of config.json that would choose other code, or change the form of a pass's output."""


def refused(architecture: str, reason: str) -> UnsupportedModelError:
    """Error for a model that this way does not serve."""
    return UnsupportedModelError(
        f"unsupported architecture: {architecture} cannot run through transformers' code: {reason}", param="model"
    )


def find_architecture(raw: Mapping[str, Any]) -> str | None:
    """The causal language model of transformers that a config.json names; None when it names none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(raw.get("model_type")))
    return known if known in named_architectures(raw) else None


def build_on_meta(raw: Mapping[str, Any], architecture: str, dtype: torch.dtype) -> Any:
    """Model of transformers for a config.json, without weights. No code of the checkpoint is run.

    Raises:
        UnsupportedModelError: transformers cannot build it; the message has its reason.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    _check_sizes(raw, architecture)
    register()
    try:
        cls = getattr(transformers, architecture)
        if getattr(cls, "_is_stateful", False):
            raise refused(architecture, "it has state-space layers, whose state is not kept in blocks")
        values = {key: value for key, value in raw.items() if key not in _NOT_READ}
        config = CONFIG_MAPPING[str(raw.get("model_type"))].from_dict(values)
        if config.is_encoder_decoder:
            raise refused(architecture, "it has an encoder")
        _without_dynamic_rope(config)
        with torch.device("meta"):
            model = cls._from_config(config, dtype=dtype, attn_implementation=NAME).eval()
    except UnsupportedModelError:
        raise
    except KeyError as error:
        reason = "its attention is its own" if NAME in error.args else f"its config.json has no {error}"
        raise refused(architecture, reason) from error
    except Exception as error:  # a wrong value raises whatever it runs into
        raise refused(architecture, _first_line(error)) from error
    _check_buffers(model, raw, architecture)
    return model.requires_grad_(False)


def _without_dynamic_rope(config: Any) -> None:
    """Make `dynamic` scaling the default: it changes no angle within `max_position_embeddings`, which is the context
    length, and transformers would look at each pass's positions for it."""
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        if isinstance(part, dict) and part.get("rope_type") == "dynamic":
            part["rope_type"] = "default"


def _check_buffers(model: Any, raw: Mapping[str, Any], architecture: str) -> None:
    """Refuse a table, such as GPT-J's of all positions, that is as long as a damaged config says."""
    for name, buffer in model.named_buffers():
        if buffer.numel() > _MOST_NUMBERS:
            field = next((key for key, value in raw.items() if value == max(buffer.shape)), name)
            shape = " x ".join(map(str, buffer.shape))
            raise refused(architecture, f"config.json: {field:.80} makes a table of {shape} numbers ({name})")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200] if text else ''}"


def _check_sizes(raw: Mapping[str, Any], architecture: str) -> None:
    for key, value in raw.items():
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise refused(architecture, f"config.json: {key:.80} is larger than {_LARGEST}")
        if "layer" in key and isinstance(value, int) and value > _MOST_LAYERS:
            raise refused(architecture, f"config.json: {key:.80} is larger than {_MOST_LAYERS}")


def find_linears(model: nn.Module) -> dict[nn.Module, str]:
    """Plain Linear and Conv1D modules, and their names."""
    from transformers.pytorch_utils import Conv1D

    return {module: name for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)}


def replace_linears(model: nn.Module, make: Callable[[str, nn.Module], nn.Module], keep: object = None) -> None:
    """Replace every plain Linear and Conv1D, except `keep`, by `make(name, module)`."""
    for module, name in find_linears(model).items():
        if module is not keep:
            replace(model, name, make(name, module))


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule `name` by `module`."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def module_name(model: nn.Module, wanted: nn.Module) -> str:
    """Name of a submodule."""
    return next(name for name, module in model.named_modules() if module is wanted)


def linear_sizes(module: Any) -> tuple[int, int]:
    """Input and output features of a Linear or a Conv1D."""
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (module.nx, module.nf)


def fill_buffers(model: Any, device: torch.device) -> None:
    """Compute buffers such as rotary frequencies, as transformers does after loading."""
    for module in model.modules():
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name in names:
            module._buffers[name] = torch.zeros_like(module._buffers[name], device="cpu")
        if names:
            model._init_weights(module)
        for name in names:
            module._buffers[name] = module._buffers[name].to(device)
