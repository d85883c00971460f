"""Products with quantised weights: the reference against float64, in every form that a format needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.kernels.quantized_linear import QuantizedWeight, row_squares
from outrider.kernels.quantized_linear.torch import TorchQuantizedLinear

INPUTS = 1100  # more than the integers that are summed at once


def make(kind: str, outputs: int = 40, inputs: int = INPUTS, seed: int = 0) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)

    def codes(low: int, high: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.randint(low, high, (outputs, inputs), generator=generator).to(dtype)

    def values(group: int) -> Tensor:
        return torch.rand(outputs, -(-inputs // group), generator=generator) * 0.01 + 0.001

    if kind == "int8":
        return QuantizedWeight(bits=8, codes=codes(-127, 128, torch.int8), scales=values(inputs), group=inputs)
    if kind == "w8a8":
        return replace(make("int8", outputs, inputs), input_bits=8)
    if kind == "fp8":
        plain = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)
        return QuantizedWeight(bits=8, codes=plain, scales=values(128), group=128)
    common = {"bits": 4, "codes": codes(0, 16)}
    if kind == "int4":  # the last group is shorter
        return QuantizedWeight(**common, scales=values(128), group=128, offsets=-8 * values(128))
    if kind == "ordered":
        order = torch.randperm(inputs, generator=generator)
        return QuantizedWeight(**common, scales=values(32), group=32, offsets=-values(32), order=order)
    levels = torch.linspace(-1, 1, 16) ** 3
    return QuantizedWeight(**common, scales=values(64), group=64, levels=levels)


def dense(weight: QuantizedWeight) -> Tensor:
    """W in float64, element by element as its docstring says."""
    result = torch.zeros(weight.shape, dtype=torch.float64)
    numbers = weight.codes.double() if weight.levels is None else weight.levels.double()[weight.codes.long()]
    for column in range(weight.shape[1]):
        group = column // weight.group
        value = numbers[:, column] * weight.scales[:, group].double()
        if weight.offsets is not None:
            value += weight.offsets[:, group].double()
        result[:, column if weight.order is None else int(weight.order[column])] = value
    return result


KINDS = ["int8", "fp8", "int4", "ordered", "levels"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("invariant", [False, True])
def test_product_equals_that_of_the_dense_weight(kind: str, invariant: bool) -> None:
    blocks = [make(kind), make("int8", 3, seed=1)]
    weight, bias = torch.cat([dense(block) for block in blocks]), torch.randn(43)
    packed = TorchQuantizedLinear(blocks, bias, torch.float32, batch_invariant=invariant)
    assert (packed.in_features, packed.out_features) == (INPUTS, 43)
    x, residual = torch.randn(5, INPUTS), torch.randn(5, 43)
    expected = x.double() @ weight.t()
    torch.testing.assert_close(packed.without_bias(x).double(), expected, rtol=1e-4, atol=1e-4)
    expected += bias + residual.double()
    y = packed(x, residual)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    if invariant:
        assert torch.equal(packed(x[2:3], residual[2:3]), y[2:3])


def test_rounded_inputs_are_multiplied_exactly() -> None:
    weight = make("w8a8")
    packed = TorchQuantizedLinear([weight], None, torch.float32, batch_invariant=False)
    x = torch.randn(4, INPUTS)
    x[1] = 0
    scales = x.abs().amax(1, keepdim=True) / 127
    codes = torch.where(scales > 0, x / scales, 0.0).round().double()
    expected = codes @ weight.codes.double().t() * scales.double() * weight.scales[:, 0].double()
    y = packed(x)
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(packed(x[2:3]), y[2:3])
    assert not packed(x)[1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_row_squares_are_those_of_the_dense_weight(kind: str) -> None:
    weight = make(kind)
    torch.testing.assert_close(row_squares(weight).double(), dense(weight).square().sum(1), rtol=1e-5, atol=1e-8)


def test_codes_of_four_bits_share_a_byte() -> None:
    weight = make("int4", 64, 512)
    packed = TorchQuantizedLinear([weight], None, torch.bfloat16, batch_invariant=False)
    assert packed.num_bytes == 64 * 512 // 2 + 2 * 64 * 4 * 4
