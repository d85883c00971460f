"""Triton's RMSNorm and SiLU·mul against the torch paths: odd widths, strided rows, overflow."""

import pytest
import torch

pytest.importorskip("triton")

from outrider.kernels.act_and_mul import torch as silu_reference
from outrider.kernels.act_and_mul import triton as silu
from outrider.kernels.rms_norm import add_rms_norm, prepare
from outrider.kernels.rms_norm import torch as norm_reference
from outrider.kernels.rms_norm import triton as norm

# One unit in the last place of each dtype, as a share of the value; sums in another order are worth a few in float32.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=2 * tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (17, 64), (9, 96), (2, 1000), (1, 4096), (2, 5120)])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(rows, width, device=device).mul(3).to(dtype)
    weight = prepare(torch.randn(width, device=device).to(dtype), 1e-5)
    close(norm.rms_norm(x, weight), norm_reference.rms_norm(x, weight))


def test_rms_norm_of_strided_rows(device: str) -> None:
    wide = torch.randn(5, 200, device=device)
    weight = prepare(torch.randn(33, device=device), 1e-5)
    x = wide[:, 40:73]
    close(norm.rms_norm(x, weight), norm_reference.rms_norm(x, weight))
    columns = torch.randn(33, 5, device=device).t()  # not even the elements of a row are neighbours
    close(norm.rms_norm(columns, weight), norm_reference.rms_norm(columns, weight))


def test_no_rows(device: str) -> None:
    weight = prepare(torch.ones(8, device=device), 1e-6)
    assert norm.rms_norm(torch.empty(0, 8, device=device), weight).shape == (0, 8)
    assert silu.act_and_mul(torch.empty(0, 8, device=device)).shape == (0, 4)


@pytest.mark.parametrize("value", [1e-30, 1e4, 1e18, 1e25, torch.inf, torch.nan])
def test_rms_norm_at_the_ends_of_the_range(value: float, device: str) -> None:
    x = torch.randn(3, 40, device=device)
    x[1, 3] = value
    x[2] *= 1e-25
    weight = prepare(torch.ones(40, device=device), 1e-6)
    actual, expected = norm.rms_norm(x, weight), norm_reference.rms_norm(x, weight)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-30, equal_nan=True)


def test_rms_norm_of_zeros_is_zero(device: str) -> None:
    weight = prepare(torch.ones(16, device=device), 1e-6)
    assert not norm.rms_norm(torch.zeros(2, 16, device=device), weight).any()


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 40), (6, 96), (3, 1500)])
def test_a_residual_is_added_before_and_the_sum_returned(
    rows: int, width: int, dtype: torch.dtype, device: str
) -> None:
    x = torch.randn(rows, 2 * width, device=device).to(dtype)[:, :width]
    stream = torch.randn(rows, width + 8, device=device).to(dtype)
    weight = prepare(torch.randn(width, device=device).to(dtype), 1e-5)
    expected_residual = stream[:, :width] + x
    before = stream.clone()
    y, total = norm.add_rms_norm(x, stream[:, :width], weight)
    assert torch.equal(total, expected_residual)
    assert torch.equal(stream, before)
    close(y, norm_reference.rms_norm(expected_residual, weight))


def test_residual_without_a_kernel() -> None:
    x, residual = torch.randn(2, 3, 24)
    weight = prepare(torch.randn(24), 1e-5)
    total = x + residual
    y, added = add_rms_norm(x, residual, weight)
    close(y, norm_reference.rms_norm(total, weight))
    assert torch.equal(added, total)


def test_unsupported_norms_use_torch(device: str) -> None:
    weight = prepare(torch.ones(8, device=device), 1e-5)
    assert norm.serves(torch.zeros(2, 8, device=device), weight)
    assert not norm.serves(torch.zeros(2, 16, device=device), weight)
    assert not norm.serves(torch.zeros(2, 4, 8, device=device), weight)
    assert not norm.serves(torch.zeros(4, 8, device=device), prepare(torch.ones(4, 8, device=device), 1e-5))


@DTYPES
@pytest.mark.parametrize(("rows", "half"), [(1, 1), (3, 17), (5, 64), (2, 1024), (2, 1500), (1, 4864)])
def test_act_and_mul(rows: int, half: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(rows, 2 * half, device=device).mul(4).to(dtype)
    for activation in silu_reference.ACTIVATIONS if half < 64 else ("silu",):
        close(silu.act_and_mul(x, activation), silu_reference.act_and_mul(x.float(), activation).to(dtype))


def test_act_and_mul_of_strided_rows(device: str) -> None:
    wide = torch.randn(4, 300, device=device)
    close(silu.act_and_mul(wide[:, 20:120]), silu_reference.act_and_mul(wide[:, 20:120]))
    columns = torch.randn(14, 4, device=device).t()
    close(silu.act_and_mul(columns), silu_reference.act_and_mul(columns))


def test_act_and_mul_of_large_numbers(device: str) -> None:
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], device=device)
    x = torch.cat([gate, torch.full((5,), 2.0, device=device)])[None]
    close(silu.act_and_mul(x), silu_reference.act_and_mul(x))
