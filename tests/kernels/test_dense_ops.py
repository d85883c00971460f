"""linear, rms_norm, rope and act_and_mul against their definitions in float64."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from outrider.kernels.act_and_mul import act_and_mul
from outrider.kernels.linear import pack
from outrider.kernels.rms_norm import prepare, rms_norm
from outrider.kernels.rope import apply_rope

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half precision: one rounding of the result (8 or 11 bits), and of intermediates for rope and act_and_mul.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_linear(dtype: torch.dtype, rows: int, bias: bool, residual: bool) -> None:
    x, weight = torch.randn(rows, 36).to(dtype), torch.randn(50, 36).mul(36**-0.5).to(dtype)
    b = torch.randn(50).to(dtype) if bias else None
    r = torch.randn(rows, 50).to(dtype) if residual else None
    expected = x.double() @ weight.double().T
    expected = expected + (b.double() if b is not None else 0) + (r.double() if r is not None else 0)
    kept = None if r is None else r.clone()
    linear = pack(weight, b)
    assert (linear.in_features, linear.out_features) == (36, 50)
    close(linear(x, r), expected)
    assert r is None or r.equal(kept)  # the residual is not changed


def test_linear_of_any_number_of_rows() -> None:
    """They are computed in pieces: rows, residuals and biases stay together."""
    x, weight, bias, residual = torch.randn(1200, 20), torch.randn(12, 20), torch.randn(12), torch.randn(1200, 12)
    linear = pack(weight, bias)
    expected = x.double() @ weight.double().T
    for rows in [0, *range(1, 70), 255, 513, 700, 1024, 1199]:
        y = linear(x[:rows], residual[:rows])
        assert y.shape == (rows, 12)
        close(y, expected[:rows] + bias.double() + residual[:rows].double())
        close(linear.without_bias(x[:rows]), expected[:rows])


MANY_ROWS = """
import psutil, torch
from outrider.kernels.linear.torch import pack

process, x = psutil.Process(), torch.randn(400, 256)
linears = [pack(torch.randn(size, 256)) for size in (256, 768, 1024)]
with torch.inference_mode():
    for linear in linears:
        linear(x[:1])
    before = process.memory_info().rss
    for rows in range(1, 401):
        for linear in linears:
            linear(x[:rows])
print((process.memory_info().rss - before) >> 20)
"""


def test_memory_does_not_grow_with_each_number_of_rows() -> None:
    """oneDNN keeps more than half a megabyte for each number of rows of each shape: 500 MiB if each were its own."""
    done = subprocess.run([sys.executable, "-c", MANY_ROWS], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 150


def test_packed_linear_owns_its_weight() -> None:
    weight = torch.randn(16, 8)
    x = torch.randn(2, 8)
    linear = pack(weight)
    before = linear(x)
    weight.zero_()
    assert linear(x).equal(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_rms_norm(dtype: torch.dtype, scale: float) -> None:
    x, weight = (torch.randn(5, 3, 48) * scale).to(dtype), torch.rand(3, 48).to(dtype)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    kept = x.clone()
    close(rms_norm(x, prepare(weight, 1e-5)), expected)
    assert x.equal(kept)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert rms_norm(torch.zeros(2, 8), prepare(torch.ones(8), 1e-6)).equal(torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_rotates_each_pair_by_its_angle(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, 10).to(dtype)
    angles = torch.rand(4, 1, 5, dtype=torch.float64) * 6
    cos, sin = angles.cos(), angles.sin()
    y = apply_rope(x, torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))
    rotated = torch.view_as_complex(torch.stack(x.double().chunk(2, -1), -1)) * torch.polar(
        torch.ones_like(angles), angles
    )
    close(y, torch.cat((rotated.real, rotated.imag), -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_act_and_mul(dtype: torch.dtype) -> None:
    x = torch.randn(7, 26).to(dtype)
    gate, up = x.double().chunk(2, -1)
    close(act_and_mul(x), gate * gate.sigmoid() * up)
    close(act_and_mul(x, "gelu"), F.gelu(gate) * up)
    close(act_and_mul(x, "gelu_pytorch_tanh"), F.gelu(gate, approximate="tanh") * up)
