"""Copies of loaded weights into those of a model in use: memory and addresses stay, which drafters that share parts,
kernels' tables of pointers and captured graphs hold."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor

_PACKAGE = __name__.rpartition(".models.")[0]
_HOLDERS = tuple(f"{_PACKAGE}.{part}." for part in ("models", "kernels", "spec_decode"))
_WITHOUT_WEIGHTS = tuple(f"{_PACKAGE}.models.{part}" for part in ("attention", "layers.rope", "config"))
"""Modules whose objects hold memory of steps, or what follows from the config."""


@torch.inference_mode()
def copy_weights(source: Any, target: Any) -> None:
    """Copy the tensors and numbers of `source`, a part of a model that was just loaded, into those of `target`, the
    same part of the model in use. What `source` lacks stays."""
    kept = _merge(source, target, set())
    assert kept is target, "a part of a model is mutable"


def _merge(source: Any, target: Any, seen: set[int]) -> Any:
    """The value to hold instead of `target`: itself, unless it cannot be changed."""
    if source is None or source is target or id(source) in seen:
        return target
    if target is None:
        return source
    if isinstance(source, Tensor):
        return _merge_tensor(source, target)
    if isinstance(source, float):
        return target if source == target else source
    if isinstance(source, tuple):
        parts = [_merge(new, old, seen) for new, old in zip(source, target, strict=True)]
        if all(new is old for new, old in zip(parts, target, strict=True)):
            return target
        return type(source)(*parts) if hasattr(source, "_fields") else tuple(parts)
    if isinstance(source, list | MutableMapping):
        seen.add(id(source))
        pairs = source.items() if isinstance(source, MutableMapping) else enumerate(source)
        for key, value in pairs:
            target[key] = _merge(value, target[key], seen)
        return target
    if _holds_weights(source):
        if type(source).__qualname__ != type(target).__qualname__:
            return source
        seen.add(id(source))
        for name, value in _attributes(source):
            old = getattr(target, name)
            new = _merge(value, old, seen)
            if new is not old:
                setattr(target, name, new)
    return target


def _merge_tensor(source: Tensor, target: Any) -> Tensor:
    is_like = (
        isinstance(target, Tensor)
        and (source.shape, source.dtype, source.device) == (target.shape, target.dtype, target.device)
        and not source.is_mkldnn
    )
    if is_like and source.stride() == target.stride():
        # Of elements that share memory the first one stands for all.
        index = tuple(slice(None if step else 1) for step in target.stride())
        target[index].copy_(source[index])
        return target
    if is_like:
        target.copy_(source)
        return target
    assert source.device.type == "cpu", "captured graphs would read the old weights"
    return source


def _holds_weights(value: object) -> bool:
    module = f"{type(value).__module__}."
    return module.startswith(_HOLDERS) and not module.startswith(_WITHOUT_WEIGHTS)


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    names = dict.fromkeys(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        names |= dict.fromkeys((slots,) if isinstance(slots, str) else slots)
    for name in names:
        if not name.startswith("__") and hasattr(value, name):
            yield name, getattr(value, name)
