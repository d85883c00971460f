"""Modules that stand in a model of transformers for its linear layers, embedding, head and inner model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.rms_norm import prepare, rms_norm
from ..layers.embedding import Embedding
from ..layers.linear import AdapterRows, Linear
from ..layers.weights import WeightSlot
from .direct import set_forward
from .paged_attention import PassState


class AdaptedLinear(nn.Module):
    """Linear layer with a site for adapters."""

    def __init__(self, linear: Linear, state: PassState) -> None:
        super().__init__()
        self.linear = linear
        self._state = state

    def forward(self, x: Tensor) -> Tensor:
        """Compute [1, T, out] from x [1, T, in], or without the first 1."""
        return self.linear.forward(x.view(-1, x.shape[-1]), self._state.batch).view(*x.shape[:-1], -1)


class SharedInput:
    """Several linear layers of one input, merged into one product."""

    def __init__(self, linear: Linear, state: PassState) -> None:
        self.linear = linear
        self._state = state
        self._sizes = [rows for _, rows in linear.slices]
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def output(self, x: Tensor, index: int) -> Tensor:
        """Output [1, T, out] of one layer from x [1, T, in], or without the first 1. The product is kept until the last
        layer has asked."""
        if x is not self._input:
            y = self.linear.forward(x.view(-1, x.shape[-1]), self._state.batch)
            self._outputs = y.view(*x.shape[:-1], -1).split_with_sizes(self._sizes, -1)
            self._input = x
        found = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return found


class MergedLinear(nn.Module):
    """One layer of a `SharedInput`."""

    def __init__(self, shared: SharedInput, index: int) -> None:
        super().__init__()
        self.shared = shared
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        """Compute [1, T, out] from x [1, T, in]."""
        return self.shared.output(x, self.index)


class _NoAdapters:
    adapters = None


class BareLinear(nn.Module):
    """Linear layer that is computed for other rows than a pass's tokens."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear
        self._rows: AdapterRows = _NoAdapters()

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., out] from x [..., in]."""
        y = self.linear.forward(x.reshape(-1, x.shape[-1]), self._rows)
        return y.view(*x.shape[:-1], -1)


class TokenEmbedding(nn.Module):
    """Token embeddings."""

    def __init__(self, embedding: Embedding, state: PassState) -> None:
        super().__init__()
        self._embedding = embedding
        self._state = state

    def forward(self, input_ids: Tensor) -> Tensor:
        """Compute [1, T, H] from input_ids [1, T]."""
        return self._embedding.lookup(input_ids[0], self._state.batch.adapters).unsqueeze(0)


class Head(nn.Module):
    """Output head."""

    def __init__(self, embedding: Embedding, state: PassState) -> None:
        super().__init__()
        self._embedding = embedding
        self._state = state

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute float32 logits [1, R, vocab] from hidden [1, R, H]."""
        return self._embedding.logits(hidden[0], self._state.head_adapters).unsqueeze(0)


class _States(tuple[Tensor]):
    """Output of an inner model that has its last hidden states alone; all else is None."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class GivenStates(nn.Module):
    """Inner model that returns hidden states computed before, so that the outer one makes logits of them."""

    def __init__(self) -> None:
        super().__init__()
        self.states: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> _States:
        """Return the states [1, R, H]."""
        assert self.states is not None
        return _States((self.states,))


def outer_model(model: Any) -> Callable[[Tensor], Tensor]:
    """Function from hidden states [R, H] to logits [R, vocab]: the code around the inner model, which is taken out."""
    given = GivenStates()
    setattr(model, model.base_model_prefix, given)

    def logits(hidden: Tensor) -> Tensor:
        given.states = hidden[None]
        found: Tensor = model(inputs_embeds=given.states, use_cache=False).logits[0]
        return found

    return logits


def use_norm_kernel(module: Any) -> None:
    """Let a loaded RMS norm of transformers run our kernel, if both give the same for random rows: families differ in
    their formulas, such as 1 + weight."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or module.weight.dim() != 1:
        return
    weight = module.weight
    prepared = prepare(weight, eps)
    rows = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    if torch.allclose(module(rows), rms_norm(rows, prepared), rtol=4 * torch.finfo(weight.dtype).eps, atol=1e-5):
        set_forward(module, lambda _, x: rms_norm(x, prepared))


def parameter_slot(module: nn.Module, leaf: str, device: torch.device) -> WeightSlot:
    """Slot of a parameter or buffer that stays in its module, in its dtype."""
    parameter = module._parameters.get(leaf)
    tensor = parameter if parameter is not None else module._buffers[leaf]
    assert tensor is not None
    dtype = tensor.dtype

    def load(stored: Tensor) -> None:
        value = stored.to(device, dtype, copy=True)
        if parameter is not None:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
            if type(module).__name__.endswith("RMSNorm"):
                use_norm_kernel(module)
        else:
            module._buffers[leaf] = value

    shape = tuple(tensor.shape)
    return WeightSlot(shape, load, scale=shape[-1] ** -0.5 if len(shape) > 1 else 0.0)
