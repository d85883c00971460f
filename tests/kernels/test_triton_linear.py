"""Triton's product with one order of sums: against float64, and a row's bits in batches of any size."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from outrider.kernels import act_and_mul, rms_norm
from outrider.kernels.linear import device_invariant, invariant
from outrider.kernels.linear.device_invariant import TritonInvariantLinear
from outrider.kernels.linear.invariant import pack_invariant, trial_operands

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    if request.param == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter's products of bfloat16 are wrong")
    return request.param


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (130, 64), (77, 1100), (200, 2048)])
def test_products(outputs: int, inputs: int, dtype: torch.dtype, device: str) -> None:
    """Tails everywhere, parts of the inputs, a bias, and a residual whose rows lie apart."""
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    packed = TritonInvariantLinear(weight.to(device), bias.to(device))
    assert (packed.in_features, packed.out_features) == (inputs, outputs)
    for rows in (0, 1, 5, 64, 65):
        x, wide = torch.randn(rows, inputs).to(dtype), torch.randn(rows, outputs + 3).to(dtype)
        expected = x.double() @ weight.double().t()
        limit = TOLERANCE[dtype] * (x.double().abs() @ weight.double().abs().t()).amax() if rows else 0.0
        y = packed(x.to(device), wide.to(device)[:, :outputs]).double().cpu()
        torch.testing.assert_close(packed.without_bias(x.to(device)).double().cpu(), expected, rtol=0, atol=limit)
        torch.testing.assert_close(y, expected + bias.double() + wide.double()[:, :outputs], rtol=0, atol=limit)


def test_a_rows_bits_do_not_depend_on_the_batch(dtype: torch.dtype, device: str) -> None:
    """Batches in parts and of more than a tile; the sums cancel, so that another order shows."""
    x, weight = trial_operands((150, 2100), (70, 2100), torch.Generator().manual_seed(3))
    x, weight = x.to(device, dtype), weight.to(device, dtype)
    packed = TritonInvariantLinear(weight, torch.randn(70, device=device).to(dtype))
    y = packed(x)
    for rows in (1, 7, 32, 64, 65):
        for _ in range(2):  # the second time on what the first has left
            assert torch.equal(packed(x[:rows]), y[:rows]), rows
        if device == "cuda":  # the interpreter's sums depend on a token's index in its tile
            assert torch.equal(packed(x[-rows:]), y[-rows:]), rows


def test_the_order_of_sums_is_that_of_the_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above sees nothing."""
    x, weight = trial_operands((4, 4096), (70, 4096), torch.Generator().manual_seed(3))
    x, weight = x.to(device), weight.to(device)
    y = TritonInvariantLinear(weight, None)(x)
    monkeypatch.setattr(device_invariant, "_MAX_PARTS", 1)
    assert not torch.equal(TritonInvariantLinear(weight, None)(x), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_invariant_packing_is_used_for_every_product(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of weights used once, as adapters'; and norms and activations of a row, in any batch."""
    for module in (invariant, rms_norm, act_and_mul):
        monkeypatch.setattr(module, "use_triton", lambda x: True)
    x, weight = (torch.randn(n, 1100).to(device, dtype) for n in (40, 70))
    packed = pack_invariant(weight)
    assert isinstance(packed, TritonInvariantLinear)
    scale = rms_norm.prepare(torch.rand(1100).to(device), 1e-6)
    for operation in (
        packed,
        lambda rows: invariant.product(rows, weight),
        lambda rows: rms_norm.rms_norm_invariant(rows, scale),
        act_and_mul.act_and_mul_invariant,
    ):
        y = operation(x)
        for rows in (1, 7, 32):
            assert torch.equal(operation(x[:rows]), y[:rows])
    assert torch.equal(invariant.product(x, weight), packed(x))
