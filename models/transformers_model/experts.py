"""Experts of transformers' models whose weights are 3-D tensors: computed as those of native families, with adapters.

transformers marks such a class (`use_experts_implementation`): gate_up_proj [E, 2I, H] and down_proj [E, H, I], which
may be transposed, with or without biases. The operations between them are recognised by the numbers that it computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.act_and_mul import act_and_mul
from ...kernels.act_and_mul.torch import ACTIVATIONS
from ...kernels.experts import Routing
from ..layers.experts import ExpertForm, ExpertLayers
from .paged_attention import PassState

_WEIGHTS = frozenset({"gate_up_proj", "down_proj"})
_TOKENS = 3


def find_experts(module: Any) -> ExpertForm | None:
    """Form of a module of experts; None: it is of another kind."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    has_bias = getattr(module, "has_bias", None)
    wanted = _WEIGHTS | {f"{name}_bias" for name in _WEIGHTS} if has_bias else _WEIGHTS
    if has_bias is None or names != wanted or not module.has_gate or module.has_post_expert_norm:
        return None
    down = module.down_proj.shape
    if len(down) != 3:
        return None
    num_experts, hidden, inner = (down[0], down[2], down[1]) if module.is_transposed else down
    found = tuple(module.gate_up_proj.shape)
    if found != (num_experts, *((hidden, 2 * inner) if module.is_transposed else (2 * inner, hidden))):
        return None
    activation = _activation(module, inner)
    return None if activation is None else ExpertForm(num_experts, hidden, inner, activation, has_bias)


def _activation(module: Any, inner: int) -> str | None:
    x = 8 * torch.randn(_TOKENS, 2 * inner, generator=torch.Generator().manual_seed(0))
    try:
        y = module._apply_gate(x)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    names = (*ACTIVATIONS, "clamped_swiglu")
    known = (name for name in names if torch.allclose(y, act_and_mul(x, name), rtol=1e-4, atol=1e-4))
    return next(known, None)


class ServedExperts(nn.Module):
    """Experts with sites for adapters."""

    def __init__(self, layers: ExpertLayers, state: PassState) -> None:
        super().__init__()
        self.layers = layers
        self._state = state

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute [..., H] from hidden_states [..., H] of T tokens and [T, k] experts with their weights."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing = Routing(top_k_index.reshape(len(x), -1).long(), top_k_weights.reshape(len(x), -1).float())
        return self.layers.forward(x, routing, self._state.batch).view(hidden_states.shape)
