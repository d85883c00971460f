"""Modules of transformers that compute without torch's work around each call.

A step of one token calls hundreds of modules, and torch looks for hooks before each, and for children by their names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

_IDLE_WRAPPERS = frozenset({"forward_with_checkpointing", "wrapped_func"})
"""Functions around the `forward` of a layer that do nothing in inference: checkpoints of gradients, and warnings of
renamed arguments."""


def set_forward(module: Any, forward: Callable[..., Any]) -> None:
    """Let a module compute `forward(module, ...)` when it is called; its hooks are not asked."""
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__call__": forward})


def call_directly(model: nn.Module) -> None:
    """Let modules compute without asking for hooks, which they do not have, and find their children at once."""
    for module in model.modules():
        module.__dict__.update(module._modules)
        cls: Any = type(module)
        # Classes of `set_forward` belong to one module each: kept, they would keep its weights.
        if cls.__call__ is nn.Module.__call__ and not (module._forward_hooks or module._forward_pre_hooks):
            module.__class__ = _direct(cls)


def with_hooks(module: Any) -> nn.Module:
    """Let a module ask for its hooks again; returns it."""
    if "__call__" in vars(type(module)):
        module.__class__ = type(module).__base__
    return module


@functools.cache
def _direct(cls: Any) -> type:
    if cls is nn.ModuleList:
        return _Layers
    forward = cls.forward
    while getattr(forward, "__code__", None) is not None and forward.__code__.co_name in _IDLE_WRAPPERS:
        forward = forward.__wrapped__
    return type(cls.__name__, (cls,), {"__call__": forward})


class _Layers(nn.ModuleList):
    """List of layers. A slice of all of them, over which models loop, is the list itself."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return self
        return super().__getitem__(index)
