"""Native products of quantised weights against float64; a row's bits do not depend on the other rows or on the threads.

Everything is tested as the machine compiles it, and as a processor with AVX2 alone does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.kernels.lora.native import NativeRows, RowSegments
from outrider.kernels.quantized_linear import QuantizedWeight, native
from outrider.kernels.quantized_linear.native import NativeQuantizedLinear

from .avx2_library import MACHINES, use_kernels

NF4 = [-1, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1]
IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
KINDS = [
    *("int8", "uint8", "int8 minimum", "w8a8", "fp8", "nf4", "iq4"),
    *("int4", "int4 zero points", "int4 minimum", "int4 coarse", "ordered"),
]


@pytest.fixture(scope="module", params=MACHINES)
def machine(request, tmp_path_factory):
    """Kernels for this machine, or for one with AVX2 alone."""
    with use_kernels(native, request.param, tmp_path_factory.mktemp("kernels")):
        yield request.param


def make(kind: str, outputs: int, inputs: int, group: int, seed: int = 0) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    group = inputs if kind == "w8a8" else min(group, inputs)

    def codes(low: int, high: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.randint(low, high, (outputs, inputs), generator=generator).to(dtype)

    def values() -> Tensor:
        return torch.rand(outputs, -(-inputs // group), generator=generator) * 0.01 + 0.001

    def zeros(low: int, high: int) -> Tensor:
        return torch.randint(low, high, scales.shape, generator=generator).float()

    scales = values()
    scales[0] = 0
    if kind in ("int8", "w8a8", "int8 minimum"):
        made = QuantizedWeight(bits=8, codes=codes(-128, 128, torch.int8), scales=scales, group=group)
        if kind == "int8 minimum":
            return replace(made, offsets=values())
        return replace(made, input_bits=8 if kind == "w8a8" else None)
    if kind == "uint8":
        return QuantizedWeight(
            bits=8, codes=codes(0, 256), scales=scales, group=group, offsets=-scales * zeros(99, 150)
        )
    if kind == "fp8":
        plain = codes(0, 256)
        plain[plain & 127 == 127] = 0  # NaN
        return QuantizedWeight(bits=8, codes=plain.view(torch.float8_e4m3fn), scales=scales, group=group)
    made = QuantizedWeight(bits=4, codes=codes(0, 16), scales=scales, group=group)
    if kind == "int4":
        return replace(made, offsets=-8 * scales)
    if kind == "int4 zero points":
        return replace(made, offsets=-scales * zeros(0, 16))
    if kind in ("int4 minimum", "int4 coarse"):
        return replace(made, offsets=-8 * values(), coarse_inputs=kind == "int4 coarse")
    if kind == "ordered":
        return replace(made, offsets=-8 * scales, order=torch.randperm(inputs, generator=generator))
    return replace(made, levels=torch.tensor(NF4 if kind == "nf4" else IQ4, dtype=torch.float32))


def make_inputs(rows: int, width: int, seed: int = 1) -> Tensor:
    """Inputs with outliers, and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    x[:, torch.randint(0, width, (3,), generator=generator)] *= 100
    x[rows // 2 : rows // 2 + 1] = 0
    return x.bfloat16()


def rounded(x: Tensor) -> Tensor:
    """Inputs that share a scale, in a row, rounded to int8: [rows, width] float64."""
    largest = x.float().abs().amax(1, keepdim=True)
    scales = largest / 127
    return torch.where(largest > 0, x.float() / scales, 0.0).round().double() * scales.double()


def check(y: Tensor, x: Tensor, weight: QuantizedWeight, extra: Tensor | None = None) -> None:
    """Compare with float64. Errors: of the result 2^-8, as of levels that are no integers; of scales and offsets 2^-12;
    of inputs in fixed point 2^-15 of the largest of those that share a scale (256 at most); of float32's sums less.
    """
    dense, numbers = weight.dequantized().double(), x.double()
    functions = native._functions()
    is_coarse = weight.coarse_inputs and functions is not None and functions.has_integers
    if weight.input_bits or is_coarse:
        width = native._chunk(weight.group, x.shape[1]) if is_coarse else x.shape[1]
        numbers = torch.cat([rounded(part) for part in x.split(width, 1)], 1)
    expected = numbers @ dense.T
    if extra is not None:
        expected += extra.double()
    size = dense.abs()
    if weight.offsets is not None:
        size = size + 2 * weight.offsets.abs().amax(1, keepdim=True)  # that of the scaled codes and of the offsets
    bound = 2**-8 * expected.abs() + 2**-11.5 * (x.double().abs() @ size.T)
    if weight.levels is not None and not torch.equal(weight.levels, weight.levels.round()):
        bound += 2**-8 * (x.double().abs() @ dense.abs().T)
    if not weight.input_bits and not is_coarse:
        order = torch.arange(x.shape[1]) if weight.order is None else weight.order
        for part in order.split(min(weight.group, 256)):
            bound += 2**-15 * x.double()[:, part].abs().amax(1, keepdim=True) * dense[:, part].abs().sum(1)
    assert ((y.double() - expected).abs() <= bound + 1e-30).all()


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_dense_weight(machine, kind):
    shapes = [(1, 2, 32), (64, 32, 32), (70, 7, 6), (129, 1027, 128), (65, 600, 300), (200, 96, 16), (3, 530, 999)]
    for outputs, width, group in shapes:
        weight = make(kind, outputs, width, group)
        generator = torch.Generator().manual_seed(2)
        bias = torch.randn(outputs, generator=generator).bfloat16()
        linear = NativeQuantizedLinear([weight], bias)
        assert (linear.in_features, linear.out_features) == (width, outputs)
        for rows in (0, 1, 3, 5, 14):
            x, residual = make_inputs(rows, width), torch.randn(rows, outputs, generator=generator).bfloat16()
            check(linear.without_bias(x), x, weight)
            check(linear(x), x, weight, bias)
            check(linear(x, residual), x, weight, bias + residual.double())


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_has_the_same_bits_with_any_threads(machine, kind):
    weight = make(kind, 300, 1400, 64)
    linear, x = NativeQuantizedLinear([weight], None), make_inputs(210, 1400)
    together, before = linear(x), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(linear(x), together)
            for start, stop in [(0, 1), (5, 7), (100, 113), (190, 210), (209, 210)]:
                assert torch.equal(linear(x[start:stop]), together[start:stop])
    finally:
        torch.set_num_threads(before)


def mixed(sizes: tuple[int, ...], width: int) -> list[QuantizedWeight]:
    """Blocks as in files with several forms; two have an order of their own."""
    kinds = ["int4 minimum", "ordered", "int8", "fp8", "ordered", "iq4"]
    places = range(len(sizes))
    return [make(kinds[i], sizes[i], width, 32 if i % 2 else 16, i) for i in places]


@pytest.mark.parametrize("sizes", [(64, 128, 64, 192, 64, 8), (3, 64, 5, 70, 129, 60)], ids=str)
def test_blocks_of_several_forms_are_one_weight(machine, sizes):
    blocks, x, first = mixed(sizes, 130), make_inputs(9, 130), 0
    bias = torch.randn(sum(sizes)).bfloat16()
    y = NativeQuantizedLinear(blocks, bias)(x)
    for block, size in zip(blocks, sizes, strict=True):
        rows = slice(first, first + size)
        assert torch.equal(y[:, rows], NativeQuantizedLinear([block], bias[rows])(x))
        first += size


@pytest.mark.parametrize("sizes", [(64, 128, 64), (60, 131, 65)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 9, 97])
def test_adapters_are_added_by_the_same_call(machine, sizes, num_tokens):
    blocks, outputs = mixed(sizes, 320), sum(sizes)
    linear, x = NativeQuantizedLinear(blocks, torch.randn(outputs)), make_inputs(num_tokens, 320)
    residual, generator = torch.randn(num_tokens, outputs).bfloat16(), torch.Generator().manual_seed(3)
    arena = torch.randn(40, 2 * 320 + outputs, generator=generator).mul_(0.2).bfloat16()
    live = np.ones((40, 2), np.uint8, order="F")
    rows = NativeRows(arena[:, :640].unflatten(1, (2, 320)), arena[:, 640:], (190, outputs - 190), live)
    segments = RowSegments([(0, 1, range(1, 4)), (min(3, num_tokens - 1), num_tokens, range(8, 24))])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            expected = linear(x, residual)
            rows.add(expected, x, segments)
            assert torch.equal(linear(x, residual, rows.address, segments), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_dense_weight(machine, kind):
    blocks = [make(kind, 70, 300, 32), make(kind, 40, 300, 32, 1)]
    dense = torch.cat([block.dequantized() for block in blocks])
    linear, ids = NativeQuantizedLinear(blocks, None), torch.tensor([109, 0, 70, 69, 3, 3])
    # The scale's 2^-12 may come on top of the result's 2^-8; an offset's is larger than the difference.
    torch.testing.assert_close(linear.rows(ids).float(), dense[ids], rtol=2**-7.9, atol=1e-4)
    assert torch.equal(linear.rows(ids.int()), linear.rows(ids))
    assert linear.rows(ids[:0]).shape == (0, 300)
    with pytest.raises(IndexError, match="rows are 0 to 109"):
        linear.rows(torch.tensor([110]))


def test_every_float8_is_multiplied_exactly(machine):
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 127 == 127] = 0
    codes = codes.view(torch.float8_e4m3fn)
    weight = QuantizedWeight(bits=8, codes=codes[:, None].expand(256, 2), scales=torch.ones(256, 1), group=2)
    linear = NativeQuantizedLinear([weight], None)
    assert torch.equal(linear(torch.tensor([[1.0, 0]]).bfloat16())[0], codes.bfloat16())
    assert torch.equal(linear.rows(torch.arange(256))[:, 1], codes.bfloat16())


@pytest.mark.parametrize("kind", ["int8", "uint8", "int4", "levels"])
@pytest.mark.parametrize("offset", [-300.0, 200.0, 255.0])
def test_sums_of_numbers_far_from_zero_do_not_overflow(machine, kind, offset):
    """A chunk of the largest codes times the largest inputs: 32 bits hold its sum for numbers below 256 alone."""
    codes = {"int8": torch.tensor(127, dtype=torch.int8), "uint8": torch.tensor(255, dtype=torch.uint8)}
    made = codes.get(kind, torch.tensor(15, dtype=torch.uint8)).expand(5, 256)
    weight = QuantizedWeight(bits=8 if kind in codes else 4, codes=made, scales=torch.ones(5, 1), group=256)
    if kind == "levels":
        weight = replace(weight, levels=offset + torch.arange(16.0))
    else:
        weight = replace(weight, offsets=torch.full((5, 1), offset))
    x = torch.full((3, 256), 1.9921875).bfloat16()
    expected = x.double() @ weight.dequantized().double().T
    torch.testing.assert_close(NativeQuantizedLinear([weight], None)(x).double(), expected, rtol=2**-7, atol=0)


def test_inputs_within_seven_binades_are_exact(machine):
    weight = replace(make("int8", 5, 64, 64), scales=torch.ones(5, 1))
    x = torch.exp2(-torch.arange(64) % 8).bfloat16()[None] * 1.25
    expected = x.double() @ weight.dequantized().double().T  # of few bits
    assert torch.equal(NativeQuantizedLinear([weight], None)(x), expected.bfloat16())


@pytest.mark.parametrize("kind", ["int8", "w8a8", "int4", "nf4"])
def test_non_finite_inputs_stay_in_their_row(machine, kind):
    x = make_inputs(8, 90)
    x[2, 5], x[4, 33] = float("nan"), float("inf")
    weight = make(kind, 66, 90, 32)
    y = NativeQuantizedLinear([replace(weight, scales=weight.scales + 0.1)], None)(x)
    assert torch.isnan(y[2]).all()
    assert not torch.isfinite(y[4]).any()
    assert torch.isfinite(y[[0, 1, 3, 5, 6, 7]]).all()


def test_misfits_are_refused(machine):
    weight = make("int4", 66, 34, 32)
    linear, x = NativeQuantizedLinear([weight], None), make_inputs(4, 34)
    for wrong in (x[:, :-2], x.float()):
        with pytest.raises(ValueError, match="x must be"):
            linear(wrong)
    with pytest.raises(ValueError, match="residual must be"):
        linear(x, torch.zeros(3, 66).bfloat16())
    for value in (float("nan"), float("inf"), 2.0**24):
        weight.scales[5, 0] = value
        with pytest.raises(ValueError, match="scales must be finite and below 2"):
            NativeQuantizedLinear([weight], None)


def test_unsupported_weights_use_other_paths(machine):
    weight = make("int8", 6, 8, 8)
    assert native.is_native([weight], torch.bfloat16)
    assert not native.is_native([weight], torch.float32)
    assert not native.is_native([replace(weight, codes=weight.codes[:0], scales=weight.scales[:0])], torch.bfloat16)
