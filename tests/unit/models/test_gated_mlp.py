"""Gated MLPs of transformers' models: which of them run with our kernel."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from outrider.models.layers.linear import Linear
from outrider.models.transformers_model.gated_mlp import find_activation
from outrider.models.transformers_model.layers import AdaptedLinear, MergedLinear, SharedInput
from outrider.models.transformers_model.paged_attention import PassState


def linear(*slices: tuple[str, int]) -> Linear:
    return Linear("mlp", slices, 8, dtype=torch.float32, device=torch.device("cpu"))


class Mlp(nn.Module):
    def __init__(self, formula) -> None:
        super().__init__()
        state = PassState()
        shared = SharedInput(linear(("w1", 12), ("w2", 12)), state)
        self.first, self.second = MergedLinear(shared, 0), MergedLinear(shared, 1)
        self.out = AdaptedLinear(linear(("w3", 8)), state)
        self.formula = formula

    def forward(self, x):
        return self.out(self.formula(self.first(x), self.second(x)))


@pytest.mark.parametrize(
    ("formula", "found"),
    [
        (lambda gate, up: F.silu(gate) * up, "silu"),
        (lambda gate, up: up * F.gelu(gate, approximate="tanh"), "gelu_pytorch_tanh"),
        (lambda gate, up: F.gelu(gate) * up, "gelu"),
        (lambda gate, up: F.silu(up) * gate, None),
        (lambda gate, up: F.silu(gate.clamp(max=7)) * up, None),
        (lambda gate, up: F.silu(gate).clamp(max=16) * up, None),
        (lambda gate, up: [gate][1], None),
        (lambda gate, up: F.silu(gate) * (up + 1), None),
        (lambda gate, up: F.relu(gate).square() * up, None),
        (lambda gate, up: gate.undefined, None),
    ],
)
def test_an_mlp_is_recognised_by_its_numbers(formula, found):
    assert find_activation(Mlp(formula)) == found


class Halved(Mlp):
    def forward(self, x):
        return super().forward(0.5 * x)


class TwoInputs(Mlp):
    def forward(self, x, residual=None):
        return super().forward(x)


@pytest.mark.parametrize("kind", [Halved, TwoInputs])
def test_an_mlp_that_does_more_is_left_alone(kind):
    assert find_activation(kind(lambda gate, up: F.silu(gate) * up)) is None
