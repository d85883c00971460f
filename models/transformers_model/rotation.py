"""Rotation left to the attention backend: one launch, or none, instead of a dozen operations a layer.

Attention modules of transformers call `apply_rotary_pos_emb` of their file. If that is Llama's, and what it returns
goes to attention unchanged, they get one that only notes the angles. The functions of transformers stay as they are.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.rope import Rotation, apply_rope
from .direct import set_forward

_NAME = "apply_rotary_pos_emb"

Rotate = Callable[..., tuple[Tensor, Tensor]]


class NotedRotation:
    """Angles of the layer that is computed."""

    def __init__(self) -> None:
        self.rotation: Rotation | None = None
        self._cos: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Note cos and sin [1, T, D], which all layers of a pass may share; return q and k as they are."""
        if cos is not self._cos:
            self._cos = cos
            self.rotation = signed(cos, sin)
        return q, k


def signed(cos: Tensor, sin: Tensor) -> Rotation:
    """Rotation of a backend from cos and sin [1, T, D]."""
    half = sin.shape[2] // 2
    sines = torch.cat((-sin[0, :, :half], sin[0, :, half:]), 1)
    return Rotation(cos[0].contiguous().unsqueeze(1), sines.unsqueeze(1))


def replace_rotation(module: nn.Module, rotate: Rotate) -> None:
    """Let a module call `rotate` instead, if its function is Llama's; the module alone changes."""
    forward: Any = inspect.unwrap(type(module).forward)
    if _NAME not in forward.__code__.co_names or not _is_llamas(forward.__globals__.get(_NAME)):
        return
    names = {**forward.__globals__, _NAME: rotate}
    ours = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    set_forward(module, ours)


def _is_llamas(function: Any) -> bool:
    """True when it rotates the halves of heads as `apply_rope` does."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    q, k, angles = (
        torch.randn(shape, generator=generator, device="cpu") for shape in ((1, 2, 3, 8), (1, 1, 3, 8), (1, 3, 4))
    )
    cos, sin = (torch.cat((x, x), 2) for x in (angles.cos(), angles.sin()))
    try:
        found = function(q, k, cos, sin)
    except (TypeError, RuntimeError, ValueError):
        return False
    rotation = signed(cos, sin)
    return all(
        torch.allclose(x[0].transpose(0, 1), apply_rope(y[0].transpose(0, 1), rotation.cos, rotation.sin), atol=1e-5)
        for x, y in zip(found, (q, k), strict=True)
    )
