"""Ragged rows over a paged cache against dense attention of each row by itself."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.native import library
from outrider.kernels.paged_attention import (
    CACHE_FLOAT8,
    AttentionOptions,
    Chunks,
    LayerKV,
    NativeStep,
    Shape,
    WholeRow,
    Window,
    Workspace,
    is_native,
    write_kv,
)
from outrider.models.attention import AttentionSpec
from outrider.models.attention.torch import split_by_length
from outrider.models.batch import KVLayerSpec, SequenceRows, allocate_kv

from ..pairwise import pairwise
from .attention_backends import attend, attention_weights, hidden_keys, make_backend, unrotated

BACKENDS = ["torch", "native"] if library() is not None else ["torch"]
# float32: sums in another order. bfloat16: scores, weights and results are rounded to 8 bits.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def dense(q: Tensor, k: Tensor, v: Tensor, start: int, window: Window, sinks: Tensor | None) -> Tensor:
    """q [n, H, D] at positions start.., k and v [start + n, Hk, D]; the definition, in float64."""
    fold = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(fold, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(q.shape[-1])
    positions = torch.arange(start, start + q.shape[0])[:, None]
    hidden = hidden_keys(positions, k.shape[0], window)
    return torch.einsum("hqk,khd->qhd", attention_weights(scores.masked_fill(hidden, -torch.inf), sinks), v)


def leave_behind(kv: LayerKV, kind: str) -> None:
    """Fill a cache with what former owners of its blocks may have written."""
    if kind == "large":
        for cache in kv:
            cache.fill_(min(1e3, torch.finfo(cache.dtype).max))
        return
    heads, blocks, size, dim = kv.k.shape
    slots = torch.arange(blocks * size)
    dtype = torch.float32 if kv.k.dtype == CACHE_FLOAT8 else kv.k.dtype
    huge = torch.full((len(slots), heads, dim), torch.finfo(dtype).max, dtype=dtype)
    huge[..., ::2] *= -1
    if kind == "one sign":
        huge = huge.abs()
    write_kv(huge.clone(), huge.clone(), kv, slots)


def run(
    rows: list[tuple[int, int]],
    *,
    shape=(4, 2, 8),
    block_size=4,
    window=None,
    dtype=torch.float32,
    seed=0,
    left="large",
    name="torch",
    cache="auto",
    has_sinks=False,
    shared=False,
):
    """Attention of `rows` (start, query_len) in one batch; returns it and what it should be, [T, H*D] each. With an fp8
    cache keys and values are such that it can hold."""
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    options = AttentionOptions(shared=shared)
    spec = AttentionSpec(heads, kv_heads, dim, frozenset({window}), dtype, torch.device("cpu"), options)
    backend = make_backend(name, spec)
    sinks = torch.randn(heads, generator=generator) * 2 if has_sinks else None
    needed = [-(-(start + count) // block_size) for start, count in rows]
    order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    layer = KVLayerSpec(kv_heads, dim, shared=shared)
    kv = allocate_kv([layer], sum(needed) + 3, block_size, dtype, kv_cache_dtype=cache)[0]
    leave_behind(kv, left)
    expected, queries, new_keys, new_values = [], [], [], []
    for (start, count), table in zip(rows, tables, strict=True):
        k, v = (torch.randn(start + count, kv_heads, dim, generator=generator) for _ in range(2))
        k, v = (x.to(kv.k.dtype).to(dtype) for x in (k, k if shared else v))
        q = torch.randn(count, heads, dim, generator=generator).to(dtype)
        for position in range(start):
            slot = table[position // block_size], position % block_size
            kv.k[:, slot[0], slot[1]], kv.v[:, slot[0], slot[1]] = k[position], v[position]
        queries.append(q)
        new_keys.append(k[start:])
        new_values.append(v[start:])
        expected.append(dense(q, k, v, start, window, sinks))
    sequences = SequenceRows([0] * sum(n for _, n in rows), [n for _, n in rows], [s for s, _ in rows], tables)
    positions = np.concatenate([np.arange(start, start + count) for start, count in rows])
    plan = backend.plan(sequences, positions, block_size)
    values = None if shared else torch.cat(new_values)
    out = attend(backend, torch.cat(queries), torch.cat(new_keys), values, kv, plan, window, sinks)
    return out, torch.cat(expected).flatten(1).to(dtype)


def check(rows: list[tuple[int, int]], **options) -> None:
    out, expected = run(rows, **options)
    tolerance = TOLERANCE[options.get("dtype", torch.float32)]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@settings(max_examples=30)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 5, 8, 9, 16, 17, 40])), min_size=1, max_size=9
    ),
    shape=st.sampled_from([(4, 2, 8), (3, 3, 6), (6, 1, 10), (1, 1, 2)]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, None, WholeRow(), 1, 3, 16, 1000, Chunks(1), Chunks(5), Chunks(16), Chunks(1000)]),
    seed=st.integers(0, 9),
    name=st.sampled_from(BACKENDS),
)
def test_any_rows_match_dense_attention(rows, shape, block_size, window, seed, name) -> None:
    check(rows, shape=shape, block_size=block_size, window=window, seed=seed, name=name)


@pytest.mark.parametrize("name", BACKENDS)
def test_queries_alone_read_the_keys_of_an_earlier_layer(name) -> None:
    spec = AttentionSpec(4, 2, 8, frozenset({None, Chunks(6)}), torch.float32, torch.device("cpu"))
    backend = make_backend(name, spec)
    kv = allocate_kv([KVLayerSpec(2, 8)], 9, 4, torch.float32)[0]
    q, k, v = (torch.randn(21, heads, 8) for heads in (4, 2, 2))
    rows = SequenceRows([0] * 21, [20, 1], [0, 0], [[1, 2, 3, 4, 5], [7]])
    plan = backend.plan(rows, np.array([*range(20), 0]), 4)
    expected = attend(backend, q, k, v, kv, plan, Chunks(6))
    kept = [cache.clone() for cache in kv]
    _, rotation = unrotated(q, k, v)
    got = backend.forward_qkv(q.flatten(1), rotation, None, kv, plan, Chunks(6))
    torch.testing.assert_close(got, expected, atol=0, rtol=0)
    assert all(map(torch.equal, kv, kept))


STEPS = [
    [(7, 1)],
    [(8, 1)] * 6,  # equal lengths: no mask
    [(i, 1) for i in range(12)],
    [(3, 5), (9, 1), (0, 4), (21, 2), (30, 8)],
    [(0, 600)],  # more than one tile
    [(300, 530)],
    [(0, 33), (12, 1), (40, 12), (5, 5), (100, 20)],
    [(3000, 1), (0, 1), (5, 1), (9, 2), (3001, 1)],  # not worth padding together
]


@pytest.mark.parametrize(
    ("rows", "window", "dtype"), pairwise(STEPS, [None, 13, Chunks(13), WholeRow()], [torch.float32, torch.bfloat16])
)
@pytest.mark.parametrize("name", BACKENDS)
def test_shapes_of_a_step(name, rows, window, dtype) -> None:
    check(rows, window=window, dtype=dtype, shape=(8, 2, 16), block_size=16, name=name)
    check(rows, window=window, dtype=dtype, shape=(8, 2, 16), block_size=16, name=name, has_sinks=True)


@pytest.mark.parametrize(
    ("rows", "left", "dtype", "dim"),
    pairwise(
        [[(7, 1)], [(3, 5), (9, 1), (0, 4), (21, 2), (30, 8)], [(0, 33), (12, 1), (300, 40)]],
        ["large", "one sign"],
        [torch.float32, torch.bfloat16],
        [6, 16, 64],
    ),
)
@pytest.mark.parametrize("name", [*BACKENDS, "invariant"])
def test_an_fp8_cache_is_attended_as_rounded(name, dim, dtype, left, rows) -> None:
    check(rows, dtype=dtype, shape=(8, 2, dim), block_size=16, left=left, name=name, cache="fp8")


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 576])
@pytest.mark.parametrize("name", [*BACKENDS, "invariant"])
def test_keys_shared_with_values(name, dim, dtype, cache) -> None:
    """The heads of DeepSeek-V2 among them, which are the largest that the native kernel serves."""
    assert name != "native" or is_native(Shape(16, 1, dim), dtype, torch.device("cpu"))
    rows = [(70, 1), (3, 5), (0, 40), (130, 2)]
    check(rows, dtype=dtype, shape=(16, 1, dim), block_size=16, name=name, cache=cache, shared=True)


@pytest.mark.skipif(library() is None, reason="no compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_kernel_rounds_to_fp8_as_torch_does(dtype) -> None:
    """Every bfloat16, NaN and infinities among them: to the nearest, ties to even, cut off at 448."""
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).to(dtype)
    if dtype == torch.float32:  # and what lies between
        x = torch.cat((x, torch.nextafter(x, torch.tensor(0.0)), torch.nextafter(x, torch.tensor(torch.inf))))
    x = x.view(-1, 1, 64).repeat(1, 1, 2)  # both halves alike, so that no rotation is none of infinities too
    num_blocks = len(x) // 16
    got, want = (allocate_kv([KVLayerSpec(1, 128)], num_blocks, 16, dtype, kv_cache_dtype="fp8")[0] for _ in range(2))
    step = NativeStep(Shape(1, 1, 128), dtype, 16, [len(x)], [0], [list(range(num_blocks))])
    qkv, rotation = unrotated(torch.ones_like(x), x, x)
    out = step.attend_qkv(qkv, rotation, None, got, None)
    write_kv(x.clone(), x.clone(), want, torch.arange(len(x)))
    assert out.isfinite().all()
    for mine, theirs in zip(got, want, strict=True):
        assert mine.view(torch.uint8).equal(theirs.view(torch.uint8))


def test_an_fp8_cache_does_not_round_states() -> None:
    layers = allocate_kv([KVLayerSpec(2, 4), KVLayerSpec(1, 8, is_attention=False)], 3, 4, torch.bfloat16, "cpu", "fp8")
    assert [part.dtype for layer in layers for part in layer] == [CACHE_FLOAT8] * 2 + [torch.bfloat16] * 2


def test_written_kv_is_made_finite() -> None:
    kv = allocate_kv([KVLayerSpec(2, 4)], 2, 4, torch.float32)[0]
    bad = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0]).expand(8, 2, 4)
    write_kv(bad.clone(), bad.clone(), kv, torch.arange(8))
    assert kv.k.isfinite().all()
    assert kv.v.isfinite().all()
    assert kv.v[..., 3].eq(1.0).all()


def test_write_kv_writes_nothing_but_its_slots() -> None:
    kv = allocate_kv([KVLayerSpec(2, 4)], 3, 4, torch.float32)[0]
    k, v = torch.randn(2, 2, 4), torch.randn(2, 2, 4)
    write_kv(k.clone(), v.clone(), kv, torch.tensor([9, 2]))
    assert kv.k[:, 2, 1].equal(k[0])
    assert kv.v[:, 0, 2].equal(v[1])
    assert kv.k.count_nonzero() == kv.v.count_nonzero() == 2 * 2 * 4


def test_workspace_gathers_blocks_of_changing_number_and_dtype() -> None:
    workspace = Workspace()
    for dtype in (torch.float32, torch.bfloat16):
        kv = LayerKV(torch.randn(2, 9, 4, 6).to(dtype), torch.randn(2, 9, 4, 6).to(dtype))
        for index in ([3], [8, 0, 8, 1, 2], [5, 5]):
            keys, values = workspace.gather(kv, torch.tensor(index), kv.k.dtype)
            assert keys.equal(kv.k[:, index])
            assert values.equal(kv.v[:, index])


def test_split_by_length_keeps_every_row_and_bounds_padding() -> None:
    lengths = np.array([5000, 10, 20, 4990, 900, 15, 1])
    groups = split_by_length(range(7), lengths)
    assert sorted(row for group in groups for row in group) == list(range(7))
    assert [sorted(group) for group in groups] == groups
    for group in groups:
        assert sum(lengths[group].max() - lengths[group]) <= 1024
    assert split_by_length([], lengths) == []


@pytest.mark.parametrize("name", [*BACKENDS, "invariant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("left", ["one sign", "both signs"])
def test_overflow_values_do_not_leak_to_other_requests(left, dtype, name):
    """Rows of different lengths together: the shorter ones are padded with keys that are not theirs."""
    if name == "native" and dtype == torch.float16:
        pytest.skip("no such kernel")
    got, expected = run([(0, 1), (5, 1), (9, 3), (2, 1), (30, 2)], dtype=dtype, left=left, name=name)
    tolerance = {torch.float16: 1e-2}.get(dtype, TOLERANCE.get(dtype))
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)
