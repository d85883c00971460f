"""Products of float8 weights with inputs rounded to float8, against float64, and what a device is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode

from outrider.kernels.quantized_linear import QuantizedWeight, device_weight
from outrider.kernels.quantized_linear.device_linear import TritonQuantizedLinear
from outrider.kernels.quantized_linear.float8 import SCALED_TOKENS

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}
"""Share of the largest result: sums in another order, and results of 11 or 8 bits."""
OUTPUTS, INPUTS = 48, 330
"""Inputs with a tail in a block, in a chunk and in 16."""


def make(scale: float | None, outputs: int = OUTPUTS, inputs: int = INPUTS) -> QuantizedWeight:
    codes = (torch.randn(outputs, inputs) * 30).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = (0.1 + torch.rand(outputs, 1)) / 100
    return QuantizedWeight(bits=8, codes=codes, scales=scales, group=inputs, float8_scale=scale)


def rounded(x: Tensor, scale: float, bound: float = math.inf) -> Tensor:
    """Inputs as float8 holds them, times their scales: float64."""
    scales = (
        x.float().abs().amax(1, keepdim=True).clamp(max=bound) / 448 if scale == 0 else torch.full((len(x), 1), scale)
    )
    codes = (x.float() / torch.where(scales > 0, scales, 1.0)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.double() * scales.double()


def pack(dtype: torch.dtype, *blocks: QuantizedWeight, bias: Tensor | None = None, **options: Any) -> Any:
    return TritonQuantizedLinear(blocks, bias, dtype, **({"batch_invariant": False} | options))


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert (actual.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.fixture
def on_a_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float8 as on a device that multiplies it; products in the interpreter, and torch's own on the CPU."""
    if device == "cuda":
        pytest.skip("counted and compared without a GPU")
    monkeypatch.setattr(device_weight, "multiplies_float8", lambda device: True)


@pytest.fixture
def any_dtype(on_a_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding in dtypes that the interpreter multiplies, too."""
    monkeypatch.setattr(device_weight, "rounds_to_float8", lambda weight, dtype: weight.float8_scale is not None)


@pytest.fixture
def calls(on_a_device: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    """Operands of each `torch._scaled_mm`. torch checks them as it does on a GPU: types, layouts, sizes, scales."""
    multiply, found = torch._scaled_mm, []

    def recorded(*operands: Tensor, bias: Tensor | None, out_dtype: torch.dtype, **rest: Any) -> Tensor:
        found.append(operands)
        with FakeTensorMode():
            fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in operands]
            multiply(*fakes, out_dtype=out_dtype)
        assert bias is None or bias.dtype == out_dtype == torch.bfloat16
        assert operands[1].data_ptr() % 16 == 0  # the weight as it is held
        return multiply(*operands, bias=bias, out_dtype=out_dtype, **rest)

    monkeypatch.setattr(torch, "_scaled_mm", recorded)
    return found


@pytest.mark.parametrize("scale", [0.0, 0.013])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_few_tokens(dtype: torch.dtype, scale: float, any_dtype: None, calls: list[Any]) -> None:
    weight, bias = make(scale), torch.randn(OUTPUTS).to(dtype)
    packed = pack(dtype, weight, bias=bias)
    for rows in (1, SCALED_TOKENS - 1):
        x, residual = torch.randn(rows, INPUTS).to(dtype), torch.randn(rows, OUTPUTS).to(dtype)
        expected = rounded(x, scale) @ weight.dequantized().double().t()
        check(packed.without_bias(x), expected, dtype)
        check(packed(x, residual), expected + bias.double() + residual.double(), dtype)
        exact = x.double() @ weight.dequantized().double().t()
        assert (expected - exact).abs().max() > TOLERANCE[dtype] * expected.abs().max()  # rounding is seen
    assert not calls


@pytest.mark.parametrize("scale", [0.0, 0.013])
def test_more_tokens_are_multiplied_by_the_library(scale: float, calls: list[tuple[Tensor, ...]]) -> None:
    weight, bias = make(scale), torch.randn(OUTPUTS).bfloat16()
    packed = pack(torch.bfloat16, weight, bias=bias)
    for rows in (SCALED_TOKENS, 40):
        calls.clear()
        x, residual = torch.randn(rows, INPUTS).bfloat16(), torch.randn(rows, OUTPUTS).bfloat16()
        expected = rounded(x, scale) @ weight.dequantized().double().t()
        check(packed.without_bias(x), expected, torch.bfloat16)
        check(packed(x, residual), expected + bias.double() + residual.double(), torch.bfloat16)
        ((codes, codes_t, scales, factors), _) = calls
        assert codes.shape == (rows, 384)  # as the weight's: padded to 128
        assert codes_t.shape == (384, OUTPUTS)
        assert (scales.shape, factors.shape) == ((rows, 1), (1, OUTPUTS))


def test_scalar_scales_are_passed_as_numbers(calls: list[tuple[Tensor, ...]]) -> None:
    weight = make(0.013)
    weight = replace(weight, scales=torch.full((OUTPUTS, 1), 0.004))
    x = torch.randn(20, INPUTS).bfloat16()
    y = pack(torch.bfloat16, weight)(x)
    check(y, rounded(x, 0.013) @ weight.dequantized().double().t(), torch.bfloat16)
    ((_, _, scales, factors),) = calls
    assert scales.numel() == factors.numel() == 1
    calls.clear()
    other = replace(weight, scales=torch.full((OUTPUTS, 1), 0.005))  # merged projections
    pack(torch.bfloat16, weight, other)(x)
    assert calls[0][3].shape == (1, 2 * OUTPUTS)


@pytest.mark.parametrize(("scales", "common"), [((0.013, 0.02), 0.02), ((0.0, 0.02), 0.0)])
def test_merged_projections_have_one_rounding(
    scales: tuple[float, float], common: float, calls: list[tuple[Tensor, ...]]
) -> None:
    """The largest of fixed scales, which cuts nothing off; or each row's own."""
    blocks = [make(scale) for scale in scales]
    x = torch.randn(20, INPUTS).bfloat16()
    y = pack(torch.bfloat16, *blocks)(x)
    dense = torch.cat([block.dequantized() for block in blocks])
    check(y, rounded(x, common) @ dense.double().t(), torch.bfloat16)
    assert len(calls) == 1


def test_blocks_that_round_and_others(calls: list[tuple[Tensor, ...]]) -> None:
    """A result that is a part of the rows of a larger one."""
    blocks = make(0.0), make(None)
    packed = pack(torch.bfloat16, *blocks)
    x = torch.randn(20, INPUTS).bfloat16()
    y = packed(x)
    check(y[:, :OUTPUTS], rounded(x, 0.0) @ blocks[0].dequantized().double().t(), torch.bfloat16)
    assert y.shape == (20, 2 * OUTPUTS)  # the interpreter's numbers of bfloat16 weights are wrong
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:overflow encountered in divide")  # bfloat16's largest, of the interpreter
def test_inputs_are_rounded_to_nearest_and_keep_nan(calls: list[tuple[Tensor, ...]]) -> None:
    """All bfloat16 numbers with a fixed scale, as torch rounds them; a row of zeros, and one with a NaN."""
    every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    x = torch.nn.functional.pad(every, (0, -len(every) % 256)).view(-1, 256)
    unit = torch.eye(256).to(torch.float8_e4m3fn)
    weight = QuantizedWeight(bits=8, codes=unit, scales=torch.ones(256, 1), group=256, float8_scale=0.5)
    assert torch.equal(pack(torch.bfloat16, weight)(x).double(), rounded(x, 0.5).bfloat16().double())
    rows = torch.zeros(SCALED_TOKENS, 256).bfloat16()
    rows[1, 3] = torch.nan
    y = pack(torch.bfloat16, replace(weight, float8_scale=0.0))(rows)
    assert not y[0].any()
    assert y[1].isnan().all()


@pytest.mark.parametrize("rows", [SCALED_TOKENS - 1, SCALED_TOKENS])
def test_inputs_beyond_the_bound_are_cut_off(rows: int, any_dtype: None, calls: list[tuple[Tensor, ...]]) -> None:
    """fbgemm's activation_scale_ub: an outlier does not take the precision of the other inputs of its token."""
    dtype = torch.float16 if rows < SCALED_TOKENS else torch.bfloat16
    weight = replace(make(0.0), float8_bound=4.0)
    x = torch.randn(rows, INPUTS).to(dtype)
    x[0, 5], x[1, 7] = 900.0, -900.0
    y = pack(dtype, weight)(x)
    check(y, rounded(x, 0.0, 4.0) @ weight.dequantized().double().t(), dtype)
    assert (rounded(x, 0.0, 4.0).abs() < 4.1).all()
    merged = pack(dtype, weight, replace(make(0.0), float8_bound=4.0))(x)[:, :OUTPUTS]
    check(merged, y.double(), dtype)


RULES: dict[str, Callable[[QuantizedWeight], QuantizedWeight]] = {
    "not said": lambda weight: replace(weight, float8_scale=None),
    "blocks": lambda weight: replace(weight, group=128, scales=torch.rand(len(weight.scales), 3)),
    "sizes": lambda weight: weight.rows(0, 40),
}


@pytest.mark.parametrize("reason", [*RULES, "device", "dtype"])
def test_inputs_stay_as_they_are(reason: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """If the checkpoint, the device, the dtype or the shape requires it; as on a CPU."""
    weight = RULES.get(reason, lambda weight: weight)(make(0.0))
    dtype = torch.float16 if reason == "dtype" else torch.bfloat16
    if reason == "device":
        monkeypatch.setattr(device_weight, "multiplies_float8", lambda device: False)
    (stored,) = pack(dtype, weight).device_weights
    assert stored.float8_scale is None
    (stored,) = pack(torch.bfloat16, make(0.0)).device_weights
    assert (stored.float8_scale is None) is (reason == "device")


def test_a_row_does_not_depend_on_others(any_dtype: None, calls: list[Any]) -> None:
    packed = pack(torch.float16, make(0.0), batch_invariant=True)
    x = torch.randn(40, INPUTS).half()
    y = packed(x)
    for rows in (slice(0, 1), slice(0, 20), slice(32, 40)):
        assert torch.equal(packed(x[rows]), y[rows])
    assert not calls  # a library's sums have another order for other numbers of rows
