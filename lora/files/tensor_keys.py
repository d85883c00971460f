"""From the keys of a PEFT file to a model's modules: prefixes, wrappers, adapter names and merged projections.

base_model.model.model.layers.3.mlp.up_proj.lora_A.default.weight
|  wrappers     | module as configured     | part | the adapter's name
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from torch import Tensor

from ..device.dora import BaseWeight
from ..tiers.step_signal import give_way
from .peft_config import adapter_error
from .tensor_header import FileLimits

T = TypeVar("T")

EMBEDDING, LM_HEAD = "model.embed_tokens", "lm_head"
"""Modules beside the linear ones of the layers."""
# Parts of a module's weights.
A, B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"

_KEY = re.compile(
    r"^(?P<module>.+)\.(?:"
    r"(?P<linear>lora_[AB])(?:\.[^.]+)?\.weight"
    r"|lora_embedding_(?P<embedding>[AB])(?:\.[^.]+)?"
    r"|(?P<magnitude>lora_magnitude_vector)(?:\.[^.]+)?(?:\.weight)?)$"
)
# PEFT's save_pretrained copies the base weights of an adapted embedding or head into the adapter's file; a trained one
# (modules_to_save) has the same key.
_COPY = re.compile(r"^(?P<module>.+?)(?:\.base_layer|\.original_module|\.modules_to_save(?:\.[^.]+)?)?\.weight$")
# What PEFT, and what torch.compile, FSDP, checkpointing and DDP, put around a model while it is trained.
_WRAPPERS = ("base_model.model.", "base_model.")
_TRAINING_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^module\."
)
# The text model inside a multimodal one.
_TEXT_MODEL = re.compile(r"(^|\.)language_model\.")
_REFUSED_KEYS = (
    (re.compile(r"\.lora_magnitude_vector"), "DoRA is not served here"),
    (re.compile(r"\.bias$"), "a trained bias is not served"),
    (re.compile(r"(^|\.)(lora_embedding_[AB]|embed_tokens)(\.|$)"), "an adapter on the embedding is not served"),
    (re.compile(r"(^|\.)lm_head\."), "an adapter on lm_head is not served"),
)
# Projections that some models merge, and what they are in models that do not.
_MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


_MORE_TENSORS, _MORE_ELEMENTS = 2048, 1 << 21
_MAX_KEY = 1000
"""Characters of a key."""
_MAX_REMEMBERED = 200
"""Characters of a key that is remembered."""


class ModuleShape(NamedTuple):
    """Weight that the base model has under a module's name."""

    in_features: int
    """The vocabulary for an embedding."""
    out_features: int
    embedding: bool = False
    """A table that is looked up; its adapters have lora_embedding_A and _B instead of lora_A and lora_B."""
    is_base: Callable[[Tensor], bool] | None = None
    """True when a tensor equals the module's own weight, for the copies of it that PEFT writes; None: copies are not
    served."""
    base: BaseWeight | None = None
    """For gains; None: DoRA is not served."""


def file_limits(known: Mapping[str, ModuleShape], max_rank: int) -> FileLimits:
    """The largest file that is looked at, for a model with `known` modules: of 8 bytes a number, with magnitudes and
    copies of the base's weights, and some more, so that one for another model is told by its keys."""
    num_tensors, num_elements = _MORE_TENSORS, _MORE_ELEMENTS
    for shape in known.values():
        num_tensors += 4
        num_elements += max_rank * (shape.in_features + shape.out_features) + shape.out_features
        if shape.is_base is not None:
            num_elements += shape.in_features * shape.out_features
    return FileLimits(num_tensors, 8 * num_elements)


class Owner(NamedTuple):
    """The model that weights are for, in messages."""

    kind: str
    words: str


BASE, DRAFTER = Owner("base", "the served model"), Owner("drafter", "the drafter")


@dataclass(slots=True)
class FileModule:
    """Tensors that a file has for one module, or for several that it knows as one merged projection."""

    name: str
    """As it is called among the model's; "…qkv_proj" for a merged one."""
    configured: str
    """As the file calls it: what the patterns of adapter_config.json are about."""
    targets: tuple[str, ...]
    """The model's modules: one, or those side by side in lora_B of the merged one."""
    shape: ModuleShape
    keys: dict[str, str] = field(default_factory=dict)
    """By part."""


class FileKeys(NamedTuple):
    """A file's keys, understood."""

    modules: dict[str, FileModule]
    copies: dict[str, str]
    """The modules of which the file holds a weight, by its key."""


def group_keys(shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, ModuleShape], owner: Owner) -> FileKeys:
    """Understand a file's keys for a model with `known` modules, called `owner` in messages.

    Raises:
        AdapterError: a key that is nothing served, two for the same weight, a weight that is missing.
    """
    modules: dict[str, FileModule] = {}
    copies: dict[str, str] = {}
    found: dict[str, FileModule | None] = {}  # each module has several keys
    for key in sorted(shapes):
        if len(key) > _MAX_KEY:
            raise adapter_error(f"a tensor's key has {len(key)} characters; at most {_MAX_KEY} are read")
        match = _matched(key)
        if match is None:
            copies[key] = _copied_module(key, known)
            continue
        if match["module"] not in found:
            found[match["module"]] = _find_module(match["module"], known)
            give_way()
        module = found[match["module"]]
        if module is None:
            raise _unknown_module(key, match["module"], owner)
        if match["magnitude"] is None and module.shape.embedding != bool(match["embedding"]):
            expected = "lora_embedding_A and lora_embedding_B" if module.shape.embedding else "lora_A and lora_B"
            raise adapter_error(f"{module.name}: an adapter here has {expected}, not {key}")
        module = modules.setdefault(module.name, module)
        part = match["magnitude"] or match["linear"] or f"lora_{match['embedding']}"
        if part in module.keys:
            raise adapter_error(f"two tensors for the same weight: {module.keys[part]} and {key}")
        module.keys[part] = key
    if not modules:
        raise adapter_error("the adapter holds no LoRA weights")
    _check_parts(modules)
    return FileKeys(modules, copies)


def _check_parts(modules: Mapping[str, FileModule]) -> None:
    owners: dict[str, str] = {}
    for name, module in modules.items():
        for part in (A, B):
            if part not in module.keys:
                raise adapter_error(f"{name}: {part} is missing")
        for target in module.targets:
            if target in owners:
                raise adapter_error(f"two adapters for {target}: {owners[target]} and {name}")
            owners[target] = name


def _remembered(understand: Callable[[str], T]) -> Callable[[str], T]:
    """Cache a function of a key: most adapters have the same keys as the one before. Long keys, which no model has,
    are not kept."""
    remembering = functools.lru_cache(4096)(understand)
    return lambda key: remembering(key) if len(key) <= _MAX_REMEMBERED else understand(key)


@_remembered
def _matched(key: str) -> re.Match[str] | None:
    return _KEY.match(key)


@_remembered
def _unwrapped(module: str) -> str:
    """A module's name without what was around the model in training."""
    module = _TRAINING_WRAPPERS.sub("", module)
    for wrapper in _WRAPPERS:
        if module.startswith(wrapper):
            return module[len(wrapper) :]
    return module


def _find_module(module: str, known: Mapping[str, ModuleShape]) -> FileModule | None:
    """Name in the model of a key's module; PEFT may have been given the inner model, or one around it."""
    configured = _unwrapped(module)
    text = _TEXT_MODEL.sub(r"\1", configured, count=1)
    for name in dict.fromkeys((configured, f"model.{configured}", text, f"model.{text}")):
        if name in known:
            return FileModule(name, configured, (name,), known[name])
        parent, _, last = name.rpartition(".")
        targets = tuple(f"{parent}.{part}" for part in _MERGED.get(last, ()))
        if targets and all(target in known for target in targets):
            out_features = sum(known[target].out_features for target in targets)
            return FileModule(name, configured, targets, ModuleShape(known[targets[0]].in_features, out_features))
    return None


def _copied_module(key: str, known: Mapping[str, ModuleShape]) -> str:
    match = _COPY.match(key)
    module = _find_module(match["module"], known) if match else None
    if module is not None and module.shape.is_base is not None:
        return module.name
    _check_refused(key, key)
    raise adapter_error(f"tensor {key} is no LoRA weight of a linear module; only those are served")


def _unknown_module(key: str, module: str, owner: Owner) -> Exception:
    _check_refused(key, f"{module}.")
    return adapter_error(
        f"{owner.kind} mismatch: {owner.words} has no linear module {_unwrapped(module)!r} (tensor {key})"
    )


def _check_refused(key: str, text: str) -> None:
    for pattern, message in _REFUSED_KEYS:
        if pattern.search(text):
            raise adapter_error(f"{message} ({key})")
