"""Experts in C++: one call routes the tokens, one multiplies. It reads the packed weights of the experts that have
tokens once, at memory speed, and needs no other pass over them. A row's result does not depend on other rows, bit for
bit."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..linear import NativeLinear, Packed
from ..linear.native import RELEASING_WORK
from ..native import DTYPES, INTEGER, POINTER, function
from ..quantized_linear import NativeQuantizedLinear
from .torch import Routing

_MAX_TOKENS = 1024
"""Most tokens of one call, which bounds its memory: more tokens share each weight no better."""


class _Experts(ctypes.Structure):
    _fields_ = (
        ("num_experts", INTEGER),
        ("hidden", INTEGER),
        ("inner", INTEGER),
        ("clamped", INTEGER),
        ("is_quantized", INTEGER),
        ("gate_up", POINTER),
        ("down", POINTER),
    )


class _Routing(ctypes.Structure):
    _fields_ = (("experts", POINTER), ("weights", POINTER), ("num_tokens", INTEGER), ("top_k", INTEGER))


class _Functions(NamedTuple):
    apply: Any
    releasing: Any
    """`apply`, without Python's lock during the call."""
    combine: Any
    route: Any


@functools.cache
def _functions() -> _Functions | None:
    name, types = "outrider_experts", (POINTER,) * 6
    apply = function(name, *types)
    if apply is None:
        return None
    combine = function("outrider_experts_combine", *(POINTER,) * 4, INTEGER, INTEGER)
    route = function("outrider_experts_route", POINTER, *(INTEGER,) * 6, POINTER, POINTER)
    return _Functions(apply, function(name, *types, releases_lock=True), combine, route)


Weights: TypeAlias = Sequence[NativeLinear] | Sequence[NativeQuantizedLinear]
"""Weights of each expert."""


def is_native(gate_up: Sequence[Packed], down: Sequence[Packed]) -> bool:
    """True when `NativeExperts` can hold these weights. Quantised ones must all take their inputs in one way."""
    if _functions() is None:
        return False
    if all(isinstance(weight, NativeLinear) for weight in (*gate_up, *down)):
        return True
    forms = [{getattr(weight, "input_form", None) for weight in part} for part in (gate_up, down)]
    return all(len(found) == 1 and None not in found for found in forms)


class NativeExperts:
    """Packed weights of each expert of a layer; immutable."""

    def __init__(self, gate_up: Weights, down: Weights, activation: str = "silu") -> None:
        """Make experts of weights for which `is_native` is True, without a copy."""
        self._kept = gate_up, down
        self._hidden, self._inner = gate_up[0].in_features, down[0].in_features
        self._pointers = [(POINTER * len(part))(*(weight.address for weight in part)) for part in (gate_up, down)]
        addresses = map(ctypes.addressof, self._pointers)
        options = activation != "silu", isinstance(gate_up[0], NativeQuantizedLinear)
        self._experts = _Experts(len(gate_up), self._hidden, self._inner, *options, *addresses)
        self._releasing = max(1, RELEASING_WORK // (3 * self._hidden * self._inner))  # pairs

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        """Compute y [T, H] from x [T, H] bfloat16, as a new tensor; `residual` [T, H] is added.

        Raises:
            ValueError: x or residual has another shape or dtype.
        """
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.shape[1:] != (self._hidden,) or any(t is not None and t.dtype != torch.bfloat16 for t in (x, residual)):
            raise ValueError(f"x must be bfloat16 [T, {self._hidden}]: {x.dtype} {tuple(x.shape)}")
        if residual is not None and residual.shape != y.shape:
            raise ValueError(f"residual must be {tuple(y.shape)}: {tuple(residual.shape)}")
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        functions = _functions()
        assert functions is not None
        top_k = routing.experts.shape[1]
        scratch = x.new_empty(min(len(x), _MAX_TOKENS) * top_k, self._hidden + 3 * self._inner)
        for start in range(0, len(x), _MAX_TOKENS):
            rows = slice(start, start + _MAX_TOKENS)
            part = _pointers(Routing(routing.experts[rows], routing.weights[rows]))
            added = None if residual is None else residual[rows].data_ptr()
            apply = functions.releasing if part.num_tokens * top_k >= self._releasing else functions.apply
            tensors = x[rows].data_ptr(), added, y[rows].data_ptr(), scratch.data_ptr()
            apply(ctypes.addressof(self._experts), ctypes.addressof(part), *tensors)
        return y


def _pointers(routing: Routing) -> _Routing:
    experts, weights = routing
    assert experts.is_contiguous()
    assert weights.is_contiguous()
    return _Routing(experts.data_ptr(), weights.data_ptr(), *experts.shape)


def combine(outputs: Tensor, routing: Routing, residual: Tensor | None) -> Tensor | None:
    """Weighted sum [T, H] of outputs [T, k, H], with the residual; None when the kernel does not serve them."""
    functions = _functions()
    if functions is None or not outputs.is_cpu or outputs.dtype not in DTYPES:
        return None
    y = outputs.new_empty(len(outputs), outputs.shape[2])
    residual = None if residual is None else residual.contiguous()
    part = _pointers(routing)
    added = None if residual is None else residual.data_ptr()
    dtype = DTYPES[outputs.dtype]
    functions.combine(ctypes.addressof(part), outputs.data_ptr(), added, y.data_ptr(), y.shape[1], dtype)
    return y


def route(logits: Tensor, top_k: int, *, renormalised: bool, rounded: bool) -> Routing | None:
    """See the package; None when the kernel does not serve the logits."""
    functions = _functions()
    if functions is None or not logits.is_cpu or logits.dtype not in DTYPES:
        return None
    logits = logits.contiguous()
    shape = len(logits), top_k
    routing = Routing(torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.float32))
    options = (*logits.shape, top_k, renormalised, rounded, DTYPES[logits.dtype])
    functions.route(logits.data_ptr(), *options, routing.experts.data_ptr(), routing.weights.data_ptr())
    return routing
