"""The native product against the definition; a row's bits do not depend on the other rows or on the threads.

Everything is tested as the machine compiles it, and as a processor with AVX2 alone does.
"""

import numpy as np
import pytest
import torch

from outrider.kernels.linear import NativeLinear, pack
from outrider.kernels.linear import native as products
from outrider.kernels.lora.native import NativeRows, RowSegments

from ..pairwise import pairwise
from .avx2_library import MACHINES, use_kernels


@pytest.fixture(scope="module", params=MACHINES, autouse=True)
def machine(request, tmp_path_factory):
    """Kernels for this machine, or for one with AVX2 alone."""
    with use_kernels(products, request.param, tmp_path_factory.mktemp("kernels")):
        yield request.param


SHAPES = [(1, 2), (64, 32), (70, 6), (129, 1026), (200, 2050), (17, 96)]


def native(weight, bias=None):
    """The native product, even if another is faster (`linear.trial`)."""
    return NativeLinear([weight] if isinstance(weight, torch.Tensor) else weight, bias)


def operands(rows, shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    out_features, in_features = shape
    weight = torch.randn(shape, generator=generator).mul_(in_features**-0.5).bfloat16()
    x = torch.randn(rows, in_features, generator=generator).bfloat16()
    bias = torch.randn(out_features, generator=generator).bfloat16()
    return weight, x, bias, torch.randn(rows, out_features, generator=generator).bfloat16()


@pytest.mark.parametrize(
    ("rows", "shape", "extras"),
    pairwise([1, 2, 5, 6, 7, 13, 193, 400], SHAPES, ["", "bias", "residual", "bias and residual"]),
)
def test_products_are_those_of_the_definition(rows, shape, extras):
    weight, x, bias, residual = operands(rows, shape)
    bias = bias if "bias" in extras else None
    residual = residual if "residual" in extras else None
    linear = native(weight, bias)
    expected = x.double() @ weight.double().T
    plain = expected.clone()
    if bias is not None:
        expected += bias.double()
    if residual is not None:
        expected += residual.double()
    torch.testing.assert_close(linear(x, residual).double(), expected, rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(linear.without_bias(x).double(), plain, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("sizes", [(64, 128, 8), (8,), (64, 64), (3, 64, 5), (128, 7, 64)], ids=str)
def test_blocks_of_rows_are_the_weight_they_make_up(sizes):
    weight, x, bias, _ = operands(9, (sum(sizes), 36))
    blocks = [block.t().contiguous().t() for block in weight.split(list(sizes))]
    linear = native(blocks, bias)
    assert torch.equal(linear(x), native(weight, bias)(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_blocks_are_packed_whatever_packs_them(dtype):
    blocks = [torch.randn(rows, 10).to(dtype) for rows in (4, 64, 9)]
    x = torch.randn(3, 10).to(dtype)
    expected = x.double() @ torch.cat(blocks).double().T
    linear = pack(blocks)
    assert (linear.out_features, linear.in_features) == (77, 10)
    for block in blocks:
        block.zero_()  # the packed copy is independent of them
    torch.testing.assert_close(linear(x).double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_alone_has_the_same_bits(shape):
    weight, x, bias, residual = operands(210, shape)
    linear = native(weight, bias)
    together = linear(x, residual)
    for start, stop in [(0, 1), (5, 7), (100, 113), (190, 210), (209, 210)]:
        assert torch.equal(linear(x[start:stop], residual[start:stop]), together[start:stop])


@pytest.mark.usefixtures("team")
def test_the_number_of_threads_changes_no_bits():
    weight, x, bias, _ = operands(40, (200, 512))
    linear = native(weight, bias)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(linear(x))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_call_that_releases_the_lock_has_the_same_bits():
    weight, x, _, _ = operands(600, (512, 1024))
    linear = native(weight)
    assert linear._rows < 600
    assert torch.equal(linear(x)[:3], linear(x[:3]))


def test_the_weight_may_be_changed_once_packed_and_need_not_be_contiguous():
    weight, x, _, _ = operands(3, (66, 34))
    linear, turned = native(weight), native(weight.t().contiguous().t())
    expected = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), expected)
    assert torch.equal(turned(x), expected)


def test_x_and_residual_need_not_be_contiguous():
    weight, x, _, residual = operands(6, (66, 34))
    linear = native(weight)
    expected = linear(x, residual)
    assert torch.equal(linear(x.t().contiguous().t(), residual.t().contiguous().t()), expected)


def test_no_rows():
    weight, x, _, _ = operands(0, (66, 34))
    assert native(weight)(x).shape == (0, 66)


def test_non_finite_inputs_stay_in_their_row():
    weight, x, _, _ = operands(8, (66, 34))
    x[2, 5], x[4, 33] = float("nan"), float("inf")
    y = native(weight)(x)
    assert torch.isnan(y[2]).all()
    assert not torch.isfinite(y[4]).any()
    assert torch.isfinite(y[[0, 1, 3, 5, 6, 7]]).all()


@pytest.mark.parametrize("wrong", ["width", "dtype", "residual shape", "residual dtype"])
def test_misfits_are_refused(wrong):
    weight, x, _, residual = operands(4, (66, 34))
    linear = native(weight)
    if wrong == "width":
        x = x[:, :-2]
    elif wrong == "dtype":
        x = x.float()
    elif wrong == "residual shape":
        residual = residual[:3]
    else:
        residual = residual.float()
    with pytest.raises(ValueError, match="residual" if "residual" in wrong else "x must be"):
        linear(x, residual)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("num_tokens", [3, 9, 40, 97])
@pytest.mark.usefixtures("team")
def test_adapters_are_added_by_the_same_call(machine, num_tokens, threads):
    """With few tokens and with many; two slices, of which a row has one; as `add` does it, and for each token alone."""
    weight, x, bias, residual = operands(num_tokens, (250, 320))
    generator = torch.Generator().manual_seed(3)
    arena = torch.randn(40, 2 * 320 + 250, generator=generator).mul_(0.2).bfloat16()
    live = np.ones((40, 2), np.uint8, order="F")
    live[[3, 7], [0, 1]] = 0
    rows = NativeRows(arena[:, :640].unflatten(1, (2, 320)), arena[:, 640:], (190, 60), live)
    segments = [(0, 2, range(1, 4)), (2, 3, [7]), (3, num_tokens, range(8, 24))]
    step = RowSegments([(start, stop, list(own)) for start, stop, own in segments if stop > start])
    linear = native(weight, bias)
    torch.set_num_threads(threads)
    got = linear(x, residual, rows.address, step)
    expected = linear(x, residual)
    rows.add(expected, x, step)
    if machine == "native":  # else `rows` has other products of the adapters
        assert torch.equal(got, expected)
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-7)
    for start, stop, own in segments:
        for token in range(start, stop):
            one = slice(token, token + 1)
            alone = linear(x[one], residual[one], rows.address, RowSegments([(0, 1, list(own))]))
            assert torch.equal(alone[0], got[token])
    with pytest.raises(ValueError, match="adapters up to token"):
        linear(x[:-1], residual[:-1], rows.address, step)


def test_unsupported_weights_use_other_paths():
    assert not isinstance(pack(torch.randn(8, 6)), NativeLinear)
    assert not isinstance(pack(torch.randn(8, 5).bfloat16()), NativeLinear)
    assert not isinstance(pack(torch.randn(8, 6).half()), NativeLinear)
