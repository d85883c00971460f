"""Triton's shrink and expand against a plain loop over tokens: ragged ranks, scattered rows, slices, tails, replays."""

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from outrider.kernels.lora import device_rows as kernel
from outrider.kernels.lora.groups import ENTRY, HEADER, SMALL_STEP, GroupBuffer, RowGroups, Segment
from outrider.kernels.lora.triton import MAX_SPLITS, split_inputs

from ..pairwise import pairwise

# float16: values between shrink and expand, and the result, are rounded to eleven bits; sums of some ten of them.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


class Pool:
    """Rank rows as an arena holds them: A and B of a site side by side in rows that are wider than both."""

    def __init__(self, num_rows: int, in_features: int, sizes: Sequence[int], dtype: torch.dtype, device: str) -> None:
        num_slices = len(sizes)
        width = num_slices * in_features + sum(sizes)
        rows = torch.randn(num_rows, width + 24, device=device).mul(in_features**-0.5).to(dtype)[:, 8 : width + 8]
        self.a = rows[:, : num_slices * in_features].unflatten(1, (num_slices, in_features))
        self.b = rows[:, num_slices * in_features :]
        self.sizes = list(sizes)
        self.live = torch.ones(num_rows, num_slices, dtype=torch.uint8, device=device)
        self.device = torch.device(device)
        self.dtype = dtype

    def kernel(self) -> kernel.TritonRows:
        return kernel.TritonRows(self.a, self.b, self.sizes, self.live)

    def expected(self, y: torch.Tensor, x: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        result = y.float().clone()
        for start, stop, rows in segments:
            begin = 0
            for part, size in enumerate(self.sizes):
                own = [row for row in rows if self.live[row, part]]
                h = x[start:stop].float() @ self.a[own, part].float().t()
                result[start:stop, begin : begin + size] += h @ self.b[own, begin : begin + size].float()
                begin += size
        return result.to(y.dtype)

    def check(self, num_tokens: int, segments: Sequence[Segment], buffer: GroupBuffer | None = None) -> None:
        in_features = self.a.shape[2]
        x = torch.randn(num_tokens, in_features, device=self.device).to(self.dtype)
        y = torch.randn(num_tokens, sum(self.sizes), device=self.device).to(self.dtype)
        expected = self.expected(y, x, segments)
        self.kernel().add(y, x, RowGroups(segments, num_tokens, self.device, buffer))
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("rank", "num_tokens", "dtype"), pairwise([1, 3, 8, 16, 17, 64], [1, 5], TOLERANCE))
def test_one_adapter(rank: int, num_tokens: int, dtype: torch.dtype, device: str) -> None:
    Pool(70, 72, [40], dtype, device).check(num_tokens, [(0, num_tokens, range(2, 2 + rank))])


@DTYPES
@pytest.mark.parametrize(
    ("in_features", "sizes"),
    [(64, [64]), (33, [7]), (300, [260, 20, 20]), (1100, [48, 48]), (7, [1, 300])],
    ids=["even", "odd", "qkv", "several splits", "more than a block"],
)
def test_widths_and_slices(in_features: int, sizes: list[int], dtype: torch.dtype, device: str) -> None:
    pool = Pool(24, in_features, sizes, dtype, device)
    pool.check(6, [(0, 1, [3, 4, 5]), (1, 4, range(8, 20)), (5, 6, [0, 22])])


@DTYPES
def test_ragged_ranks_of_scattered_rows(dtype: torch.dtype, device: str) -> None:
    pool = Pool(140, 48, [32, 16], dtype, device)
    order = torch.randperm(140).tolist()
    segments: list[Segment] = []
    token = row = 0
    for rank, count in [(1, 2), (64, 1), (5, 3), (16, 1), (33, 18), (2, 1)]:
        segments.append((token, token + count, sorted(order[row : row + rank])))
        token, row = token + count + (rank == 5), row + rank  # a token of the base after one of them
    pool.check(token + 2, segments)


def test_base_tokens_are_unchanged(device: str) -> None:
    pool = Pool(8, 16, [24], torch.float32, device)
    x, y = torch.randn(6, 16, device=device), torch.randn(6, 24, device=device)
    before = y.clone()
    pool.kernel().add(y, x, RowGroups([(2, 4, [1, 2])], 6, pool.device))
    assert torch.equal(y[[0, 1, 4, 5]], before[[0, 1, 4, 5]])
    assert not torch.equal(y[2:4], before[2:4])


@DTYPES
def test_rows_without_weights_are_not_read(dtype: torch.dtype, device: str) -> None:
    pool = Pool(20, 40, [16, 24], dtype, device)
    pool.live[4:, 0] = 0  # of the first slice four rows
    pool.live[:10, 1] = 0  # of the second none of the first adapter's
    pool.a[4:, 0] = torch.nan
    pool.a[:10, 1] = torch.inf
    pool.b[4:, :16] = torch.nan
    pool.b[:10, 16:] = torch.nan
    pool.check(7, [(0, 1, range(10)), (1, 4, range(10)), (4, 7, range(10, 20))])


def test_an_adapter_without_weights_here_changes_no_bit(device: str) -> None:
    pool = Pool(4, 8, [8], torch.float32, device)
    pool.live.zero_()
    y = torch.full((3, 8), -0.0, device=device)
    pool.kernel().add(y, torch.randn(3, 8, device=device), RowGroups([(0, 1, [0]), (1, 3, [1, 2])], 3, pool.device))
    assert torch.equal(y.signbit(), torch.ones_like(y, dtype=torch.bool))


@DTYPES
def test_many_segments_and_shared_adapters(dtype: torch.dtype, device: str) -> None:
    pool = Pool(60, 24, [20], dtype, device)
    rows = [list(range(index * 5, index * 5 + 1 + index % 5)) for index in range(12)]
    pool.check(90, [(token, token + 1, rows[token * 7 % 12]) for token in range(90) if token % 4])


@DTYPES
@pytest.mark.parametrize("num_tokens", [64, 70, 129])
def test_long_runs(num_tokens: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.kernels.lora.groups.SMALL_STEP", 32)  # so that they go through the large tiles
    pool = Pool(40, 80, [130, 32], dtype, device)
    segments = [(0, 1, [39]), (1, num_tokens - 3, range(20)), (num_tokens - 3, num_tokens - 1, range(20, 39))]
    assert RowGroups(segments, num_tokens, pool.device).tile == 64
    pool.check(num_tokens, segments)


def test_rows_of_x_and_y_may_lie_apart(device: str) -> None:
    pool = Pool(10, 40, [24], torch.float32, device)
    x, y = torch.randn(5, 56, device=device)[:, 8:48], torch.randn(5, 40, device=device)
    segments: list[Segment] = [(0, 3, [1, 2, 9]), (4, 5, [5])]
    expected = y.clone()
    expected[:, 8:32] = pool.expected(y[:, 8:32], x, segments)
    groups = RowGroups(segments, 5, pool.device)
    pool.kernel().add(y[:, 8:32], x, groups)
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)
    columns = torch.randn(40, 5, device=device).t()  # not even the elements of a row are neighbours
    expected = pool.expected(y[:, 8:32], columns, segments)
    pool.kernel().add(y[:, 8:32], columns, groups)
    torch.testing.assert_close(y[:, 8:32], expected, rtol=2e-5, atol=2e-5)


@DTYPES
def test_embeddings(dtype: torch.dtype, device: str) -> None:
    pool = Pool(40, 300, [270], dtype, device)
    pool.live[3] = 0
    ids = torch.randint(300, (9,), device=device)
    segments: list[Segment] = [(0, 1, range(5)), (2, 3, range(5)), (3, 6, range(6, 40)), (8, 9, [5])]
    y = torch.randn(9, 270, device=device).to(dtype)
    one_hot = torch.nn.functional.one_hot(ids, 300).to(dtype)
    expected = pool.expected(y, one_hot, segments)
    pool.kernel().add_embeddings(y, ids, RowGroups(segments, 9, pool.device))
    torch.testing.assert_close(y, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_token_bits_do_not_depend_on_the_batch(device: str) -> None:
    pool = Pool(30, 600, [40], torch.float32, device)
    x = torch.randn(8, 600, device=device)
    alone, among = torch.zeros(8, 40, device=device), torch.zeros(8, 40, device=device)
    pool.kernel().add(alone, x, RowGroups([(2, 3, range(7))], 8, pool.device))
    pool.kernel().add(among, x, RowGroups([(0, 2, range(9, 30)), (2, 3, range(7)), (3, 8, [8])], 8, pool.device))
    assert torch.equal(alone[2], among[2])


@pytest.mark.parametrize(("with_bias", "with_residual", "dtype"), pairwise([False, True], [False, True], TOLERANCE))
def test_gains(with_bias: bool, with_residual: bool, dtype: torch.dtype, device: str) -> None:
    wide = torch.randn(5, 1500, device=device).to(dtype)
    y, excess = wide[:, 100:1200], torch.randn(3, 1100, device=device).to(dtype)
    bias = torch.randn(1100, device=device).to(dtype) if with_bias else None
    residual = torch.randn(5, 1100, device=device).to(dtype) if with_residual else None
    slots = torch.tensor([2, -1, 0, 0, -1], dtype=torch.int32, device=device)
    expected = wide.float().clone()
    for token in (0, 2, 3):
        base = y[token].float() - (0 if bias is None else bias.float())
        base -= 0 if residual is None else residual[token].float()
        expected[token, 100:1200] += excess[slots[token]].float() * base
    before = wide.clone()
    kernel.apply_gains(y, excess, slots, bias, residual)
    assert torch.equal(wide[[1, 4]], before[[1, 4]])
    torch.testing.assert_close(wide, expected.to(dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


class Launches:
    """Records the launches of a kernel and can do them again, as a CUDA graph does: the same grid and arguments."""

    def __init__(self, jitted: object) -> None:
        self._jitted = jitted
        self.calls: list[tuple[object, tuple[object, ...], dict[str, object]]] = []

    def __getitem__(self, grid: object) -> object:
        def launch(*args: object, **kwargs: object) -> None:
            self.calls.append((grid, args, kwargs))
            self._jitted[grid](*args, **kwargs)  # type: ignore[index]

        return launch

    def replay(self) -> None:
        for grid, args, kwargs in self.calls:
            self._jitted[grid](*args, **kwargs)  # type: ignore[index]


def test_launches_of_one_adapter_replay_for_others(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grids, addresses and numbers in a captured graph serve more segments, other ranks and no adapter."""
    pool = Pool(90, 500, [40, 24], torch.float32, device)
    shrink, expand = Launches(kernel.shrink_kernel), Launches(kernel.expand_kernel)
    monkeypatch.setattr(kernel, "shrink_kernel", shrink)
    monkeypatch.setattr(kernel, "expand_kernel", expand)
    buffer = GroupBuffer(90, 40, pool.device)
    rows = pool.kernel()
    x, y = torch.randn(12, 500, device=device), torch.zeros(12, 64, device=device)
    rows.add(y, x, RowGroups([(0, 12, [3])], 12, pool.device, buffer))
    assert len(shrink.calls) == len(expand.calls) == 1
    mixes: list[list[Segment]] = [
        [(token, token + 1, range(token * 7, token * 7 + 1 + token % 7)) for token in range(12)],
        [(0, 2, range(40)), (3, 4, range(40, 80)), (4, 9, [88, 89]), (9, 12, range(40))],
        [(5, 6, [1])],
        [],
    ]
    for segments in mixes:
        x.copy_(torch.randn(12, 500))
        y.copy_(torch.randn(12, 64))
        expected = pool.expected(y, x, segments)
        RowGroups(segments, 12, pool.device, buffer)
        shrink.replay()
        expand.replay()
        torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
def test_captured_graph_replays_for_more_segments() -> None:
    pool = Pool(90, 512, [64, 32], torch.float16, "cuda")
    buffer = GroupBuffer(90, 64, pool.device)
    rows = pool.kernel()
    x, y = torch.randn(16, 512, device="cuda").half(), torch.zeros(16, 96, device="cuda").half()
    one = RowGroups([(0, 16, [3])], 16, pool.device, buffer)
    rows.add(y, x, one)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.add(y, x, one)
    segments = [(token, token + 1, range(token * 5, token * 5 + 1 + token % 5)) for token in range(16)]
    y.copy_(torch.randn(16, 96))
    expected = pool.expected(y, x, segments)
    RowGroups(segments, 16, pool.device, buffer)
    graph.replay()
    torch.testing.assert_close(y, expected, rtol=4e-3, atol=4e-3)


def test_no_segments_launch_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(4, 8, [8], torch.float32, device)
    shrink = Launches(kernel.shrink_kernel)
    monkeypatch.setattr(kernel, "shrink_kernel", shrink)
    pool.kernel().add(torch.zeros(3, 8), torch.zeros(3, 8), RowGroups([(1, 1, [2]), (2, 3, [])], 3, pool.device))
    assert not shrink.calls


def test_groups_pad_nothing() -> None:
    segments = [(0, 1, [2, 7]), (2, 3, [5]), (4, 24, range(10, 30)), (24, 26, [2, 7])]
    groups = RowGroups(segments, 26, torch.device("cpu"))
    values = groups.data.tolist()
    num_tiles, num_items, items, order, rows = values[:5]
    tiles = [values[HEADER + ENTRY * index :][:6] for index in range(num_tiles)]
    # Rows [2, 7] with three tokens, row 5 with one, and twenty rows with twenty tokens in two tiles.
    assert tiles == [[0, 3, 0, 2, 0, 2], [3, 1, 2, 1, 6, 1], [4, 16, 3, 20, 7, 20], [20, 4, 3, 20, 7 + 16 * 20, 20]]
    assert [values[items + ENTRY * index :][:6] for index in range(num_items)][3:] == [
        [4, 16, 19, 4, 23, 20],
        [20, 4, 3, 16, 327, 20],
        [20, 4, 19, 4, 343, 20],
    ]
    assert values[order:rows] == [0, 24, 25, 2, *range(4, 24)]
    assert values[rows:] == [2, 7, 5, *range(10, 30)]
    assert groups.h_size == 3 * 2 + 1 + 20 * 20


@pytest.mark.parametrize(
    ("num_tokens", "rank", "replayable"),
    [(3, 4, True), (3, 5, False), (SMALL_STEP, 4, True), (SMALL_STEP + 1, 1, False)],
)
def test_groups_too_large_for_captured_graphs_get_separate_memory(
    num_tokens: int, rank: int, replayable: bool, device: str
) -> None:
    buffer = GroupBuffer(8, 4, torch.device(device))
    groups = RowGroups([(0, 1, range(rank))], num_tokens, torch.device(device), buffer)
    assert groups.replayable == replayable
    assert (groups.data.data_ptr() == buffer.data.data_ptr()) == replayable


def test_misfits_are_refused(device: str) -> None:
    pool = Pool(4, 8, [8], torch.float32, device)
    rows = pool.kernel()
    groups = RowGroups([(0, 3, [0, 1])], 3, pool.device)
    with pytest.raises(ValueError, match="segments end at token 3 of 2"):
        RowGroups([(0, 3, [0])], 2, pool.device)
    with pytest.raises(ValueError, match="does not fit 2 tokens"):
        rows.add(torch.zeros(2, 8, device=device), torch.zeros(2, 8, device=device), groups)
    with pytest.raises(ValueError, match="float16"):
        rows.add(torch.zeros(3, 8, device=device).half(), torch.zeros(3, 8, device=device).half(), groups)
    with pytest.raises(ValueError, match=r"\[T, 8\]"):
        rows.add(torch.zeros(3, 8, device=device), torch.zeros(3, 9, device=device), groups)
    with pytest.raises(ValueError, match="one slice and integers"):
        rows.add_embeddings(torch.zeros(3, 8, device=device), torch.zeros(3, device=device), groups)
    with pytest.raises(ValueError, match="equally far apart"):
        kernel.TritonRows(pool.a, pool.b.contiguous(), [8], pool.live)
    with pytest.raises(ValueError, match="slices"):
        kernel.TritonRows(pool.a, pool.b, [4, 4], pool.live)
    with pytest.raises(ValueError, match="uint8"):
        kernel.TritonRows(pool.a, pool.b, [8], pool.live.bool())


@triton.jit
def _splits_kernel(out, features, num_units, units, most, block):
    splits, chunk = split_inputs(features, num_units, units, most, block)
    tl.store(out, splits)
    tl.store(out + 1, chunk)


def plan_splits(features: int, num_units: int, device: str) -> tuple[int, int]:
    """(parts of the sums, inputs of a part) of a shrink with this number of units of work before they are split."""
    out = torch.zeros(2, dtype=torch.int32, device=device)
    _splits_kernel[(1,)](out, features, num_units, 512, max(1, min(MAX_SPLITS, features // 256)), 256)
    return tuple(out.tolist())


def test_splits_keep_large_devices_busy_and_sums_long(device: str) -> None:
    assert plan_splits(4096, 3, device) == (MAX_SPLITS, 256)
    assert plan_splits(4096, 4, device) == (MAX_SPLITS, 256)  # one adapter with 64 tokens
    assert plan_splits(4096, 64, device) == (8, 512)  # 64 adapters with one token each
    assert plan_splits(4096, 512, device) == (1, 4096)
    assert plan_splits(512, 1, device) == (2, 256)
    assert plan_splits(100, 1, device) == (1, 256)


@pytest.mark.parametrize("in_features", [100, 896, 1100, 8960, 11008, 14336, 18944])
@pytest.mark.parametrize("num_units", [1, 8, 64, 500])
def test_no_split_is_empty(in_features: int, num_units: int, device: str) -> None:
    """An unrolled loop that starts after its end runs once too often on a GPU; the interpreter does not show it."""
    splits, chunk = plan_splits(in_features, num_units, device)
    assert (splits - 1) * chunk < in_features <= splits * chunk


@pytest.mark.parametrize("adapters", [1, 4, 64])
def test_a_captured_step_divides_the_work_of_its_adapters(adapters: int, device: str) -> None:
    """The same launch splits the sums of one adapter for 64 tokens further than those of 64 adapters: the values
    between shrink and expand that it writes show how far."""
    pool = Pool(64, 4096, [32], torch.float32, device)
    buffer = GroupBuffer(64, 1, pool.device)
    each = 64 // adapters
    segments: list[Segment] = [(index * each, (index + 1) * each, [index]) for index in range(adapters)]
    groups = RowGroups(segments, 64, pool.device, buffer)
    h = torch.full((MAX_SPLITS, groups.h_size), torch.nan, device=device)
    x, y = torch.randn(64, 4096, device=device), torch.zeros(64, 32, device=device)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(kernel.torch, "empty", lambda *shape, **_: h)
        pool.kernel().add(y, x, groups)
    written = int(h.isfinite().all(1).sum())
    assert written == {1: 16, 4: 16, 64: 8}[adapters]
    torch.testing.assert_close(y, pool.expected(torch.zeros_like(y), x, segments), rtol=1e-4, atol=1e-4)
