"""kernels.lora against the definition, adapter by adapter and token by token."""

import pytest
import torch

from outrider.kernels.lora import keep_mask, shrink_expand

# Rounding of one accumulation in the dtype, times the size of the values here (a few units).
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2}


def make(num_tokens, num_rows, in_features, sizes, dtype):
    """y, x, a, b and which rows each token owns (the last token owns none)."""
    y = torch.randn(num_tokens, sum(sizes)).to(dtype)
    x = torch.randn(num_tokens, in_features).to(dtype)
    a = (torch.randn(num_rows, len(sizes), in_features) / in_features**0.5).to(dtype)
    b = [torch.randn(num_rows, size).to(dtype) * 0.5 for size in sizes]
    owned = torch.rand(num_tokens, num_rows) < 0.4
    owned[-1] = False
    return y, x, a, b, owned


def expected(y, x, a, b, owned):
    parts = []
    for index, weight in enumerate(b):
        h = (x.double() @ a[:, index].double().T).to(x.dtype).double() * owned
        parts.append(h @ weight.double())
    return y.double() + torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("sizes", [(24,), (16, 8, 8), (4500, 4500)], ids=str)
@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (1, 8), (7, 13), (33, 24)])
class TestDefinition:
    def test_masked(self, dtype, sizes, num_tokens, num_rows):
        y, x, a, b, owned = make(num_tokens, num_rows, 40, sizes, dtype)
        want, base = expected(y, x, a, b, owned), y[-1].clone()
        shrink_expand(y, x, a, b, keep_mask(owned, dtype))
        torch.testing.assert_close(y.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype] / 4)
        assert torch.equal(y[-1], base)

    def test_without_a_mask(self, dtype, sizes, num_tokens, num_rows):
        y, x, a, b, owned = make(num_tokens, num_rows, 40, sizes, dtype)
        want = expected(y, x, a, b, torch.ones_like(owned))
        shrink_expand(y, x, a, b, None)
        torch.testing.assert_close(y.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype] / 4)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("sizes", [(12,), (8, 4)], ids=str)
def test_a_row_that_overflows_does_not_affect_other_tokens(dtype, sizes):
    y, x, a, b, _ = make(3, 2, 16, sizes, dtype)
    a[1], x[:] = 3e38, 1.0  # the products with row 1 are infinite
    owned = torch.tensor([[True, False], [False, False], [False, True]])
    before = y.clone()
    shrink_expand(y, x, a, b, keep_mask(owned, dtype))
    assert torch.isfinite(y[:2]).all()
    assert torch.equal(y[1], before[1])
    assert not torch.isfinite(y[2]).all()


def test_rows_of_a_larger_batch_are_written_in_place():
    y, x, a, b, _ = make(6, 4, 16, (8, 4), torch.float32)
    before, inside = y.clone(), y[2:5]
    shrink_expand(inside, x[2:5], a, b, None)
    assert torch.equal(y[:2], before[:2])
    assert torch.equal(y[5:], before[5:])
    assert not torch.equal(y[2:5], before[2:5])


@pytest.mark.parametrize("wrong", ["x", "y", "b", "keep"])
def test_shapes_that_do_not_fit_are_refused(wrong):
    y, x, a, b, owned = make(3, 4, 16, (8,), torch.float32)
    keep = keep_mask(owned, torch.float32)
    if wrong == "x":
        x = x[:, :-1]
    elif wrong == "y":
        y = y[:, :-1]
    elif wrong == "b":
        b = [b[0][:-1]]
    else:
        keep = keep[:, :-1]
    with pytest.raises(ValueError, match=r"\d"):
        shrink_expand(y, x, a, b, keep)
