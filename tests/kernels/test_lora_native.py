"""The native LoRA kernel against the definition; its results for a token are the same bits in any company."""

import numpy as np
import pytest
import torch

from outrider.kernels.lora.native import NativeRows, RowSegments, is_native

DTYPES = [torch.float32, torch.bfloat16]
# Of y's rounding in the dtype, and of sums of a few hundred terms in float32.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
POOL = 40

pytestmark = pytest.mark.skipif(
    not is_native(torch.float32, torch.device("cpu")), reason="there is no C++ compiler here, or it is switched off"
)


class Pool:
    """Rows of one projection amid those of others, as in an arena."""

    def __init__(self, in_features, sizes, dtype, seed=0):
        generator = torch.Generator().manual_seed(seed)
        num_slices, out_features = len(sizes), sum(sizes)
        width = num_slices * in_features + out_features
        arena = torch.randn(POOL, width + 24, generator=generator).mul_(0.2).to(dtype)
        self.a = arena[:, 8 : 8 + num_slices * in_features].unflatten(1, (num_slices, in_features))
        self.b = arena[:, 8 + num_slices * in_features : 8 + width]
        self.sizes = sizes
        self.live = np.ones((POOL, num_slices + 2), np.uint8, order="F")[:, 1 : 1 + num_slices]
        self.rows = NativeRows(self.a, self.b, sizes, self.live)

    def expected(self, y, x, segments):
        y, x = y.double(), x.double()
        for start, stop, rows in segments:
            for index, part in enumerate(self.b.split(list(self.sizes), 1)):
                kept = [row for row in rows if self.live[row, index]]
                columns = slice(sum(self.sizes[:index]), sum(self.sizes[: index + 1]))
                h = x[start:stop] @ self.a[kept, index].double().T
                y[start:stop, columns] += h @ part[kept].double()
        return y


def inputs(pool, num_tokens, dtype, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, pool.a.shape[2], generator=generator).to(dtype)
    return torch.randn(num_tokens, sum(pool.sizes), generator=generator).to(dtype), x


SEGMENTS = [
    [(0, 1, [3])],
    [(0, 1, [0, 1, 2, 3]), (1, 2, [9, 4, 7]), (2, 3, [0, 1, 2, 3])],
    [(1, 6, [5, 6]), (8, 9, list(range(10, 26)))],
    [(0, 33, list(range(30, 38)))],
    [],
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("segments", SEGMENTS, ids=len)
@pytest.mark.parametrize(
    ("in_features", "sizes"), [(64, (64,)), (128, (96, 32, 32)), (57, (33, 7)), (300, (1, 1500)), (7, (3,))], ids=str
)
def test_definition(dtype, segments, in_features, sizes):
    pool = Pool(in_features, sizes, dtype)
    y, x = inputs(pool, 34, dtype)
    want = pool.expected(y, x, segments)
    pool.rows.add(y, x, RowSegments(segments))
    torch.testing.assert_close(y.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("team")
def test_bits_of_a_token_are_independent_of_the_batch(dtype, threads):
    pool = Pool(331, (700, 130), dtype)
    rows = [2, 3, 5, 8, 13]
    y, x = inputs(pool, 11, dtype)
    torch.set_num_threads(threads)
    together = y.clone()
    pool.rows.add(together, x, RowSegments([(0, 2, [7]), (2, 11, rows)]))
    for token in range(2, 11):
        alone = y[token : token + 1].clone()
        pool.rows.add(alone, x[token : token + 1], RowSegments([(0, 1, rows)]))
        assert torch.equal(alone[0], together[token])


def test_a_product_divided_among_threads():
    pool = Pool(512, (2048,), torch.bfloat16)
    y, x = inputs(pool, 48, torch.bfloat16)
    segments = [(start, start + 6, list(range(start // 2, start // 2 + 16))) for start in range(0, 48, 6)]
    want = pool.expected(y, x, segments)
    pool.rows.add(y, x, RowSegments(segments))
    torch.testing.assert_close(y.double(), want, atol=3e-2, rtol=2e-2)  # h is rounded too, and has 512 terms


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_weights_are_not_read(dtype):
    pool = Pool(48, (32, 16), dtype)
    pool.live[4, 0] = pool.live[5, 1] = 0
    pool.a[4, 0], pool.b[4, :32] = float("nan"), float("inf")
    pool.a[5, 1] = float("nan")
    y, x = inputs(pool, 3, dtype)
    segments = [(0, 3, [4, 5, 6])]
    want = pool.expected(y, x, segments)
    pool.rows.add(y, x, RowSegments(segments))
    torch.testing.assert_close(y.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_other_tokens_are_not_touched():
    pool = Pool(64, (64,), torch.bfloat16)
    y, x = inputs(pool, 5, torch.bfloat16)
    y[0], x[0] = float("nan"), float("inf")
    before = y.clone()
    pool.rows.add(y, x, RowSegments([(1, 4, [0, 1])]))
    assert torch.equal(y[4], before[4])
    assert torch.isnan(y[0]).all()
    assert torch.isfinite(y[1:4]).all()


def test_non_finite_outputs_stay_non_finite():
    pool = Pool(64, (80,), torch.bfloat16)
    y, x = inputs(pool, 2, torch.bfloat16)
    y[0, 3], y[1, 79], y[1, 4] = float("nan"), float("nan"), float("inf")
    pool.rows.add(y, x, RowSegments([(0, 2, [0])]))
    assert torch.isnan(y[0, 3])
    assert torch.isnan(y[1, 79])
    assert torch.isinf(y[1, 4])


@pytest.mark.parametrize("wrong", ["x", "y", "tokens", "dtype", "stride"])
def test_tensors_that_do_not_fit_are_refused(wrong):
    pool = Pool(16, (8,), torch.float32)
    y, x = inputs(pool, 3, torch.float32)
    stop = 3
    if wrong == "x":
        x = x[:, :-1].contiguous()
    elif wrong == "y":
        y = y[:, :-1].contiguous()
    elif wrong == "tokens":
        stop = 4
    elif wrong == "dtype":
        x = x.bfloat16()
    else:
        x = x.t().contiguous().t()
    with pytest.raises(ValueError, match="x"):
        pool.rows.add(y, x, RowSegments([(0, stop, [0])]))


def test_pools_that_are_not_rows_of_one_arena_are_refused():
    a, b, live = torch.zeros(4, 1, 8), torch.zeros(4, 6), np.ones((4, 1), np.uint8)
    with pytest.raises(ValueError, match="equally far apart"):
        NativeRows(a, b, (6,), live)
    with pytest.raises(ValueError, match="slices"):
        NativeRows(a, torch.zeros(4, 8), (6,), live)
    arena = torch.zeros(4, 22)
    with pytest.raises(ValueError, match="side by side"):
        NativeRows(arena[:, :16].unflatten(1, (2, 8)), arena[:, 16:], (2, 4), np.ones((4, 2), np.uint8))


def test_fewer_tokens_with_the_same_segments_are_refused():
    pool = Pool(16, (8,), torch.float32)
    y, x = inputs(pool, 3, torch.float32)
    segments = RowSegments([(0, 3, [0])])
    pool.rows.add(y, x, segments)
    with pytest.raises(ValueError, match="do not fit"):
        pool.rows.add(y[:2], x[:2], segments)
