"""The Triton kernels of attention against its definition and against the torch backend; on a GPU or interpreted."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from outrider.kernels.paged_attention import (
    AttentionOptions,
    Chunks,
    LayerKV,
    RowArrays,
    Shape,
    Window,
    device_step,
    write_kv,
)
from outrider.kernels.paged_attention.device_step import DeviceStep
from outrider.kernels.paged_attention.schedule import TILE_FIELDS, Capacity, Gpu, Planner
from outrider.kernels.rope import Rotation
from outrider.models.attention import AttentionSpec
from outrider.models.attention.tables import RowTables
from outrider.models.attention.triton import TritonAttention
from outrider.models.batch import KVLayerSpec, SequenceRows, allocate_kv
from outrider.models.layers.norm import RMSNorm

from .attention_backends import attention_weights, hidden_keys, make_backend, unrotated

# float32: sums in another order. float16: weights and results are rounded to 11 bits.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
LLAMA, GPU = Shape(8, 2, 32), Gpu(1, 90)
MIXED = [(0, 1), (63, 1), (64, 5), (0, 18), (130, 3), (17, 20)]


class Inputs(NamedTuple):
    """A layer's cache with the past of all rows in it, what it is given, and the whole keys and values of each row."""

    sequences: SequenceRows
    positions: np.ndarray
    kv: LayerKV
    q: Tensor
    k: Tensor
    v: Tensor
    past: list[tuple[Tensor, Tensor]]
    block_size: int

    @property
    def rows(self) -> RowArrays:
        return RowTables(self.sequences, self.block_size).arrays(self.positions)


def make_inputs(
    rows: list[tuple[int, int]], shape: Shape, dtype: torch.dtype, device: str, block_size: int = 16, seed: int = 0
) -> Inputs:
    """Rows (start, query_len); the cache's other slots are full of huge values."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, dim = shape
    needed = [-(-(start + count) // block_size) for start, count in rows]
    order = torch.randperm(sum(needed) + 2, generator=generator).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    kv = allocate_kv([KVLayerSpec(kv_heads, dim)], sum(needed) + 2, block_size, dtype)[0]
    for cache in kv:
        cache.fill_(6e4)
    total = sum(count for _, count in rows)
    q = torch.randn(total, heads, dim, generator=generator).to(dtype)
    past, new = [], []
    for (start, count), table in zip(rows, tables, strict=True):
        k, v = (torch.randn(start + count, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
        slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(start)]).long()
        write_kv(k[:start].clone(), v[:start].clone(), kv, slots)
        past.append((k, v))
        new.append((k[start:], v[start:]))
    k, v = (torch.cat(parts) for parts in zip(*new, strict=True))
    sequences = SequenceRows([0] * total, [n for _, n in rows], [start for start, _ in rows], tables)
    positions = np.concatenate([np.arange(start, start + count) for start, count in rows])
    on_device = LayerKV(*(cache.to(device) for cache in kv))
    return Inputs(sequences, positions, on_device, q.to(device), k.to(device), v.to(device), past, block_size)


def dense(inputs: Inputs, window: Window = None, first_key: int = 0, sinks: Tensor | None = None) -> Tensor:
    """The definition in float64, [T, H * D]."""
    results, token = [], 0
    for start, count, (k, v) in zip(inputs.sequences.starts, inputs.sequences.query_lens, inputs.past, strict=True):
        q = inputs.q[token : token + count].cpu().double()
        fold = q.shape[1] // k.shape[1]
        k, v = (x.double().repeat_interleave(fold, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        hidden = hidden_keys(torch.arange(start, start + count)[:, None], start + count, window)
        hidden |= torch.arange(start + count) < first_key
        results.append(
            torch.einsum("hqk,khd->qhd", attention_weights(scores.masked_fill(hidden, -torch.inf), sinks), v)
        )
        token += count
    return torch.cat(results).flatten(1)


def make_step(inputs: Inputs, shape: Shape, num_splits: int = 1, first_key: int = 0) -> DeviceStep:
    dtype, device = inputs.q.dtype, inputs.q.device
    planner = Planner(shape, dtype.itemsize, GPU, num_splits)
    return DeviceStep(planner, dtype, inputs.block_size, inputs.rows, device, first_key)


def check(
    rows: list[tuple[int, int]],
    shape: Shape,
    device: str,
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    num_splits: int = 1,
    window: Window = None,
) -> None:
    inputs = make_inputs(rows, shape, dtype, device, block_size)
    close(attend(make_step(inputs, shape, num_splits), inputs, window), dense(inputs, window))


def attend(step: DeviceStep, inputs: Inputs, window: Window = None, sinks: Tensor | None = None) -> Tensor:
    """Attention without rotation."""
    qkv, rotation = unrotated(inputs.q, inputs.k, inputs.v)
    return step.attend_qkv(qkv, rotation, None, inputs.kv, window, sinks)


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double().cpu(), expected.double().cpu(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.float16, 20), (torch.float32, Chunks(20))])
def test_rows_of_all_kinds_together(device: str, dtype: torch.dtype, window: Window) -> None:
    check(MIXED, LLAMA, device, dtype=dtype, window=window)


@pytest.mark.parametrize("fold", range(1, 9))
def test_query_heads_a_kv_head(device: str, fold: int) -> None:
    check([(9, 1), (30, 4), (0, 17)], Shape(fold, 1, 16), device)


@pytest.mark.parametrize("head_dim", [6, 32, 64, 80, 96, 128, 256])
def test_head_sizes(device: str, head_dim: int) -> None:
    check([(40, 1), (3, 2)], Shape(2, 1, head_dim), device, dtype=torch.float16)


@pytest.mark.parametrize("block_size", [1, 16, 24, 32, 64, 128])
def test_block_sizes(device: str, block_size: int) -> None:
    check([(150, 1), (20, 70)], Shape(2, 1, 16), device, block_size=block_size)


def test_keys_shared_with_values(device: str) -> None:
    shape = Shape(16, 1, 48)
    inputs = make_inputs(MIXED, shape, torch.float16, device)
    inputs = inputs._replace(past=[(k, k) for k, _ in inputs.past], kv=LayerKV(inputs.kv.k, inputs.kv.k))
    planner = Planner(shape, 2, GPU, 2, options=AttentionOptions(shared=True))
    step = DeviceStep(planner, torch.float16, inputs.block_size, inputs.rows, torch.device(device))
    qkv, rotation = unrotated(inputs.q, inputs.k, None)
    close(step.attend_qkv(qkv, rotation, None, inputs.kv, None), dense(inputs))


@pytest.mark.parametrize("window", [1, 65, Chunks(48)])
def test_chunks_of_prompts_in_windows(device: str, window: int) -> None:
    """In tiles of several loops, whose ends are masked and whose middle is not."""
    check([(100, 129), (0, 130)], Shape(1, 1, 16), device, dtype=torch.float16, window=window)


@pytest.mark.parametrize("start", [1, 63, 64, 200])
def test_chunks_of_prompts_anywhere(device: str, start: int) -> None:
    check([(start, 140)], Shape(1, 1, 16), device, dtype=torch.float16)


def test_more_query_heads_than_a_short_tile_holds(device: str) -> None:
    check([(20, 1), (5, 3)], Shape(71, 1, 16), device)


def test_positions_before_the_first_key_are_not_seen(device: str) -> None:
    inputs = make_inputs([(9, 1), (100, 2), (3, 40)], LLAMA, torch.float32, device)
    step = make_step(inputs, LLAMA, first_key=3)
    close(attend(step, inputs), dense(inputs, first_key=3))


def test_tensors_that_are_not_contiguous(device: str) -> None:
    """A slice of a wider product, and a cache that is a part of another."""
    inputs = make_inputs([(70, 1), (9, 30)], LLAMA, torch.float32, device)
    qkv, rotation = unrotated(inputs.q, inputs.k, inputs.v)
    both = torch.stack((inputs.kv.k, inputs.kv.v), 1)
    wide = torch.cat((qkv, qkv), 1)[:, : qkv.shape[1]]
    got = make_step(inputs, LLAMA).attend_qkv(wide, rotation, None, LayerKV(both[:, 0], both[:, 1]), None)
    close(got, dense(inputs))


def test_overflow_values_do_not_leak_to_other_requests(device: str) -> None:
    for dtype in (torch.float32, torch.float16):
        inputs = make_inputs([(5, 1), (9, 3), (30, 20)], LLAMA, dtype, device)
        untouched = inputs.kv.k == 6e4
        inputs.kv.k[untouched] = torch.finfo(dtype).max
        inputs.kv.v[untouched] = -torch.finfo(dtype).max
        close(attend(make_step(inputs, LLAMA), inputs), dense(inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_written_is_finite_and_limited(device: str, dtype: torch.dtype) -> None:
    """As `write_kv`: bit for bit, but that the interpreter rounds to bfloat16 towards zero."""
    values = torch.tensor([math.nan, math.inf, -math.inf, 1.5, 3e38, -3e38, 0.0, -7e4]).to(dtype)
    rows = make_inputs([(3, 2), (0, 4)], Shape(2, 2, 16), torch.float32, "cpu").rows
    k, v = values.repeat(6, 2, 2), values.flip(0).repeat(6, 2, 2)
    got, expected = (
        LayerKV(*(torch.full((2, 9, 16, 16), 7.0, dtype=dtype, device=place) for _ in range(2)))
        for place in (device, "cpu")
    )
    step = DeviceStep(Planner(Shape(2, 2, 16), dtype.itemsize, GPU), dtype, 16, rows, torch.device(device))
    # No rotation of infinities is none because both halves of a head are alike.
    qkv, rotation = unrotated(*(x.to(device) for x in (torch.ones_like(k), k, v)))
    step.write_qkv(qkv, rotation, None, got)
    write_kv(k.clone(), v.clone(), expected, torch.from_numpy(rows.slots))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=0, rtol=2**-7 if dtype == torch.bfloat16 else 0)


class Projection(NamedTuple):
    """Output of a layer's projection, and the rotation of its tokens."""

    qkv: Tensor
    rotation: Rotation


def make_projection(num_tokens: int, shape: Shape, dtype: torch.dtype, rotary_dim: int | None = None) -> Projection:
    heads, kv_heads, dim = shape
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.rand(num_tokens, 1, (rotary_dim or dim) // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(dtype)
    return Projection(qkv, Rotation(both[:, 0], both[:, 1]))


PART = AttentionOptions(rotary_dim=20)
NEIGHBOURS = AttentionOptions(rotary_dim=20, interleaved=True)


@pytest.mark.parametrize("rows", [MIXED, [(0, 1), (63, 3), (64, 1), (14, 4), (130, 1)]], ids=["mixed", "short"])
@pytest.mark.parametrize(
    ("shape", "dtype", "qk_norm", "options"),
    [
        (LLAMA, torch.float32, True, AttentionOptions()),
        (Shape(9, 1, 80), torch.float16, False, AttentionOptions()),
        (LLAMA, torch.float32, False, PART),
        (LLAMA, torch.float32, True, NEIGHBOURS),
    ],
)
def test_attention_of_a_projection_is_that_of_torch(
    device: str, rows: list[tuple[int, int]], shape: Shape, dtype: torch.dtype, qk_norm: bool, options: AttentionOptions
) -> None:
    inputs = make_inputs(rows, shape, dtype, "cpu")
    qkv, rotation = make_projection(len(inputs.positions), shape, dtype, options.rotary_dim)
    results = []
    for name, place in (("torch", "cpu"), ("triton", device)):
        norm = None
        if qk_norm:
            repeats = [shape.num_heads, shape.num_kv_heads]
            where = torch.device(place)
            norm = RMSNorm(["q", "k"], shape.head_dim, 1e-6, repeats=repeats, dtype=dtype, device=where)
            for index, slot in enumerate(norm.weight_slots().values()):
                slot.load(torch.rand(shape.head_dim, generator=torch.Generator().manual_seed(index)) + 0.5)
        backend = make_backend(name, AttentionSpec(*shape, frozenset({None}), dtype, torch.device(place), options))
        plan = backend.plan(inputs.sequences, inputs.positions, inputs.block_size)
        kv = LayerKV(*(cache.clone().to(place) for cache in inputs.kv))
        angles = Rotation(rotation.cos.to(place), rotation.sin.to(place))
        out = backend.forward_qkv(qkv.clone().to(place), angles, norm, kv, plan, None)
        results.append((out, kv.k, kv.v))
    for got, expected in zip(results[1], results[0], strict=True):
        close(got, expected)


def test_queries_of_prompts_are_rotated_on_the_way(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory they stay as they are: the write before moves keys and values alone, a third of a projection here."""
    grids, kernel = [], device_step.write_kernel

    class Launches:
        def __getitem__(self, grid: tuple[int, int]) -> object:
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(device_step, "write_kernel", Launches())
    inputs = make_inputs(MIXED, LLAMA, torch.float32, device)
    qkv, rotation = make_projection(len(inputs.positions), LLAMA, torch.float32)
    given, angles = qkv.clone().to(device), Rotation(*(x.to(device) for x in rotation[:2]))
    step = make_step(inputs, LLAMA)
    assert step.layout.long is not None
    step.attend_qkv(given, angles, None, inputs.kv, None)
    assert torch.equal(given.cpu(), qkv)
    assert grids == [(len(qkv), 2)]  # keys and values of 2 heads


def test_a_float8_cache(device: str) -> None:
    """Keys and values are rounded to float8; the reference takes the rounded ones from the cache."""
    inputs = make_inputs([(0, 30), (0, 1), (0, 5)], LLAMA, torch.float16, device)
    cache = LayerKV(*(torch.zeros(x.shape, dtype=torch.float8_e4m3fn, device=device) for x in inputs.kv))
    got = attend(make_step(inputs, LLAMA, 2), inputs._replace(kv=cache))
    numbers = [x.float().cpu().flatten(1, 2) for x in cache]
    slots = torch.from_numpy(inputs.rows.slots).split(inputs.sequences.query_lens)
    past = [tuple(x[:, places].transpose(0, 1) for x in numbers) for places in slots]
    if device == "cuda":  # the interpreter's rounding to float8 loses carries
        for (k, _), (rounded, _) in zip(inputs.past, past, strict=True):
            torch.testing.assert_close(rounded, k.float(), atol=2**-10, rtol=2**-4)
    close(got, dense(inputs._replace(past=past)))


def test_a_reserved_step_takes_any_rows_that_fit(device: str) -> None:
    """Its launches and tensors stay the same: what a captured graph replays."""
    shape, capacity = Shape(4, 2, 16), Capacity(num_rows=5, num_queries=3, num_tokens=11, num_blocks=40)
    planner = Planner(shape, 4, GPU)
    step = DeviceStep(planner, torch.float32, 16, capacity, torch.device(device))
    layout = step.layout
    for rows in ([(300, 1), (4, 3), (17, 2)], [(9, 1)], [(i, 2) for i in range(5)], [(0, 3)] * 3):
        inputs = make_inputs(rows, shape, torch.float32, device)
        step.refill(inputs.rows)
        count = len(inputs.q)
        q, k, v = (torch.cat((x, x.new_full((11 - count, *x.shape[1:]), 1e5))) for x in inputs[3:6])
        before = inputs.kv.k.clone()
        got = attend(step, inputs._replace(q=q, k=k, v=v))
        close(got[:count], dense(inputs))
        written = (before != inputs.kv.k).any(0).any(-1).flatten().nonzero().flatten().tolist()
        assert sorted(inputs.rows.slots.tolist()) == written  # padding is written nowhere
        assert step.layout == layout


def test_a_reserved_step_refuses_what_does_not_fit(device: str) -> None:
    shape = Shape(4, 2, 16)
    step = DeviceStep(Planner(shape, 4, GPU), torch.float32, 16, Capacity(2, 2, 4, 5), torch.device(device))
    for rows, problem in (
        ([(0, 1)] * 3, "room for 2 tiles"),
        ([(0, 3), (0, 2)], "room for 4 tokens"),
        ([(100, 1)], "5 blocks"),
        ([(0, 3), (0, 1)], "room for 2 tiles of 2 queries"),
    ):
        with pytest.raises(ValueError, match=problem):
            step.refill(make_inputs(rows, shape, torch.float32, "cpu").rows)
    with pytest.raises(ValueError, match="at most 16"):
        DeviceStep(Planner(shape, 4, GPU), torch.float32, 16, Capacity(2, 17, 34, 5), torch.device(device))


def test_launches_do_not_depend_on_lengths() -> None:
    planner = Planner(Shape(32, 8, 128), 2, Gpu(132, 90))
    layouts = []
    for start in (1, 100, 30_000):
        rows = make_inputs([(start, 1)], Shape(1, 1, 2), torch.float32, "cpu").rows
        layouts.append(planner.layout(rows)._replace(num_blocks=0))
    assert layouts[0] == layouts[1] == layouts[2]
    assert layouts[0].short is not None
    assert layouts[0].short.num_splits == 64  # one row must keep 132 multiprocessors busy
    many = make_inputs([(9, 1)] * 300, Shape(1, 1, 2), torch.float32, "cpu").rows
    short = planner.layout(many).short
    assert short is not None
    assert short.num_splits == 4


def test_tiles_hold_every_query_once_and_begin_with_the_longest() -> None:
    planner = Planner(Shape(6, 2, 64), 2, GPU)
    rows = make_inputs([(7, 1), (0, 100), (500, 21), (30, 22)], Shape(1, 1, 2), torch.float32, "cpu").rows
    layout = planner.layout(rows)
    packed = planner.pack(rows, layout)
    tiles = packed[: layout.first_slot].reshape(-1, TILE_FIELDS)
    assert layout.short is not None
    assert layout.short.num_tiles == 2
    seen = np.concatenate([np.arange(tile[0], tile[0] + tile[1]) for tile in tiles])
    assert sorted(seen.tolist()) == list(range(144))
    ends = tiles[layout.short.num_tiles :, 2] + tiles[layout.short.num_tiles :, 1]
    assert (np.diff(ends) <= 0).all()
    assert packed[layout.first_slot :][:144].tolist() == rows.slots.tolist()
    assert packed[layout.first_block :].tolist() == rows.blocks.tolist()
    assert layout.first_block % 4 == 0


def test_wrong_tensors_are_refused(device: str) -> None:
    inputs = make_inputs([(9, 2)], LLAMA, torch.float32, device)
    step = make_step(inputs, LLAMA)
    kv, (qkv, rotation) = inputs.kv, unrotated(inputs.q, inputs.k, inputs.v)
    for wrong in (qkv[:1], qkv[:, :-32], qkv.half(), qkv.t().contiguous().t()):
        with pytest.raises(ValueError, match="qkv must be"):
            step.attend_qkv(wrong, rotation, None, kv, None)
    for cache in (LayerKV(kv.k.half(), kv.v.half()), LayerKV(kv.k[..., :8], kv.v[..., :8])):
        with pytest.raises(ValueError, match="a cache must be"):
            step.attend_qkv(qkv, rotation, None, cache, None)


def test_the_backend_reserves_plans(device: str) -> None:
    spec = AttentionSpec(*LLAMA, frozenset({None, 9}), torch.float32, torch.device(device))
    backend, inputs = TritonAttention(spec), make_inputs([(40, 1), (3, 2)], LLAMA, torch.float32, device)
    plan = backend.reserve(Capacity(2, 2, 3, 6), 16)
    plan.refill(inputs.rows)
    for window in (None, 9):
        close(attend(plan, inputs, window), dense(inputs, window))
