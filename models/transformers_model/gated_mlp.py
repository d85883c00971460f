"""Gated MLPs of transformers' models: recognised by the numbers that they compute, and run with our kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...kernels.act_and_mul import act_and_mul
from ...kernels.act_and_mul.torch import ACTIVATIONS
from .direct import set_forward
from .layers import AdaptedLinear, MergedLinear
from .paged_attention import PassState

_SIZE = 16
_SCALES = torch.tensor([[4.0], [4.0], [1e3]])
"""Sizes of each token's numbers. The last ones are beyond the limits that some models set."""


def use_mlp_kernel(model: nn.Module, state: PassState) -> None:
    """Let all gated MLPs of a model, whose linear layers are ours, compute activation and product in one call."""
    for module in model.modules():
        activation = find_activation(module)
        if activation is not None:
            set_forward(module, _gated_mlp(module, activation, state))


def find_activation(module: nn.Module) -> str | None:
    """Activation of a gated MLP whose gate and up projections are merged; None: the module is of another kind.

    The module computes random numbers, so that no name of a class or a child counts.
    """
    merged, down, others = _parts(module)
    if len(merged) != 2 or len(down) != 1 or len(inspect.signature(module.forward).parameters) != 1:
        return None
    x = _SCALES * torch.randn(len(_SCALES), 2 * _SIZE, generator=torch.Generator().manual_seed(0))
    whole = x[None]
    halves = whole.split(_SIZE, 2)
    probe = object.__new__(type(module))
    given = {name: _Given(whole, halves[child.index]) for name, child in merged.items()}
    probe.__dict__.update(module.__dict__, _modules={**others, **given, **dict.fromkeys(down, nn.Identity())})
    try:
        found = probe.forward(whole)
    except (TypeError, RuntimeError, ValueError, AttributeError, LookupError, ArithmeticError, AssertionError):
        return None
    if not isinstance(found, Tensor) or found.shape != (1, len(_SCALES), _SIZE):
        return None
    return next((name for name in ACTIVATIONS if torch.allclose(found[0], act_and_mul(x, name), atol=1e-5)), None)


def _parts(module: nn.Module) -> tuple[dict[str, MergedLinear], dict[str, AdaptedLinear], dict[str, nn.Module]]:
    """Children: merged linear layers, other linear layers, the rest."""
    children = dict(module.named_children())
    merged = {name: child for name, child in children.items() if isinstance(child, MergedLinear)}
    plain = {name: child for name, child in children.items() if isinstance(child, AdaptedLinear)}
    return merged, plain, {name: child for name, child in children.items() if name not in {**merged, **plain}}


def _gated_mlp(module: nn.Module, activation: str, state: PassState) -> Callable[..., Tensor]:
    merged, plain, _ = _parts(module)
    gate_up = next(iter(merged.values())).shared.linear
    down = next(iter(plain.values())).linear

    def forward(_: nn.Module, x: Tensor) -> Tensor:
        batch = state.batch
        rows = x.view(-1, x.shape[-1])  # of [1, T, H], or of a shared expert's [T, H]
        return down.forward(act_and_mul(gate_up.forward(rows, batch), activation), batch).view(*x.shape[:-1], -1)

    return forward


class _Given(nn.Module):
    """Linear layer with a fixed output for one input."""

    def __init__(self, x: Tensor, value: Tensor) -> None:
        super().__init__()
        self._x, self._value = x, value

    def forward(self, x: Tensor) -> Tensor:
        if x is not self._x:
            raise ValueError("the module changes its input first")
        return self._value
