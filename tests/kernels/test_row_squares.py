"""Squared norms of a weight's rows, with the kernel if there is one and without."""

import pytest
import torch

from outrider.kernels.linear import row_squares


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 16), (64, 331), (3, 0)], ids=str)
def test_row_squares(dtype, shape):
    weight = torch.randn(shape).to(dtype)
    squares = row_squares(weight)
    assert squares.dtype == torch.float32
    torch.testing.assert_close(squares.double(), weight.double().square().sum(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(row_squares(weight.t().contiguous().t()), squares)
