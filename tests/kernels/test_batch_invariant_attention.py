"""Attention of a query depends on its own row alone: the same bits in any batch, chunking and order of blocks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.native import library
from outrider.kernels.paged_attention import Chunks, Window
from outrider.models.attention import AttentionSpec
from outrider.models.batch import KVLayerSpec, SequenceRows, allocate_kv

from ..pairwise import pairwise
from . import attention_backends
from .attention_backends import make_backend

BACKENDS = ["invariant", "native"] if library() is not None else ["invariant"]
SHAPES = [(4, 2, 32), (3, 3, 6), (6, 1, 80), (1, 1, 2), (14, 2, 64), (4, 4, 64)]


class Row:
    """A sequence with its queries, keys and values."""

    def __init__(self, length: int, shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
        heads, kv_heads, dim = shape
        generator = torch.Generator().manual_seed(seed)
        self.length = length
        self.q = (torch.randn(length, heads, dim, generator=generator) * 2).to(dtype)
        self.k, self.v = (torch.randn(length, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))


def attend(
    chunks: list[tuple[Row, int, int]],
    shape,
    *,
    block_size,
    window,
    dtype,
    seed=0,
    name="invariant",
    has_sinks=False,
    cache="auto",
) -> Tensor:
    """Queries [start, stop) of each row in one batch, what is before in the cache; [sum(stop - start), H * D]."""
    heads, kv_heads, dim = shape
    spec = AttentionSpec(heads, kv_heads, dim, frozenset({window}), dtype, torch.device("cpu"))
    backend = make_backend(name, spec)
    needed = [-(-stop // block_size) for _, _, stop in chunks]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    layers = [KVLayerSpec(kv_heads, dim)]
    kv = allocate_kv(layers, sum(needed) + 3, block_size, dtype, torch.device("cpu"), cache)[0]
    for part in kv:  # what others left behind
        part.copy_((torch.randn(part.shape, generator=generator) * 1e3).clamp(-448, 448))
    for (row, start, _), table in zip(chunks, tables, strict=True):
        slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(start)]).long()
        for part, written in zip(kv, (row.k, row.v), strict=True):  # as bytes, which float8 can be indexed by too
            held = written[:start].to(part.dtype).transpose(0, 1).contiguous()
            part.view(kv_heads, -1, dim).view(torch.uint8)[:, slots] = held.view(torch.uint8)
    counts = [stop - start for _, start, stop in chunks]
    rows = SequenceRows([0] * sum(counts), counts, [start for _, start, _ in chunks], tables)
    positions = np.concatenate([np.arange(start, stop) for _, start, stop in chunks])
    plan = backend.plan(rows, positions, block_size)
    q, k, v = (torch.cat([getattr(row, part)[start:stop] for row, start, stop in chunks]) for part in "qkv")
    sinks = torch.linspace(-2, 3, heads) if has_sinks else None
    return attention_backends.attend(backend, q, k, v, kv, plan, window, sinks)


def dense(row: Row, window: Window, sinks: Tensor | None = None) -> Tensor:
    """The definition, in float64: [length, H * D]."""
    fold = row.q.shape[1] // row.k.shape[1]
    k, v = (x.double().repeat_interleave(fold, 1) for x in (row.k, row.v))
    scores = torch.einsum("qhd,khd->hqk", row.q.double(), k) / math.sqrt(row.q.shape[-1])
    positions = torch.arange(row.length)
    hidden = positions > positions[:, None]
    if window is not None:
        hidden |= positions < attention_backends.first_seen(positions[:, None], window)
    weights = attention_backends.attention_weights(scores.masked_fill(hidden, -torch.inf), sinks)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


@settings(max_examples=30)
@given(data=st.data(), dtype=st.sampled_from([torch.bfloat16, torch.float32]), name=st.sampled_from(BACKENDS))
def test_a_row_is_the_same_bits_alone_in_a_batch_and_in_chunks(
    data: st.DataObject, dtype: torch.dtype, name: str
) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    options = {
        "block_size": data.draw(st.sampled_from([1, 4, 16, 24])),
        "window": data.draw(st.sampled_from([None, None, 1, 3, 17, 150, 1000, Chunks(17), Chunks(150)])),
        "dtype": dtype,
        "name": name,
        "has_sinks": data.draw(st.booleans()),
    }
    lengths = data.draw(st.lists(st.sampled_from([1, 2, 5, 17, 40, 127, 128, 129, 300]), min_size=1, max_size=6))
    rows = [Row(length, shape, dtype, seed) for seed, length in enumerate(lengths)]
    whole = [attend([(row, 0, row.length)], shape, **options) for row in rows]
    # Each row's positions in a few steps, each step with a part of all rows that still have some.
    done = [0] * len(rows)
    step = 0
    while any(done[i] < row.length for i, row in enumerate(rows)):
        chunks, owners = [], []
        for i, row in enumerate(rows):
            left = row.length - done[i]
            if left:
                size = min(left, data.draw(st.sampled_from([1, 1, 2, 4, 6, 9, 40, 200])))
                size = left if step > 6 else size
                chunks.append((row, done[i], done[i] + size))
                owners.append(i)
        got = attend(chunks, shape, **options, seed=step).split([stop - start for _, start, stop in chunks])
        for i, (_, start, stop), part in zip(owners, chunks, got, strict=True):
            assert torch.equal(part, whole[i][start:stop]), (i, start, stop)
            done[i] = stop
        step += 1


@pytest.mark.parametrize(
    ("shape", "name", "window", "dtype"), pairwise(SHAPES, BACKENDS, [None, 100], [torch.bfloat16, torch.float32])
)
def test_invariant_attention_equals_dense(
    name: str, shape: tuple[int, int, int], window: Window, dtype: torch.dtype
) -> None:
    rows = [Row(length, shape, dtype, seed) for seed, length in enumerate((300, 1, 129, 40))]
    options = {"block_size": 16, "window": window, "dtype": dtype, "name": name}
    for sinks in (None, torch.linspace(-2, 3, shape[0])):
        got = attend([(row, 0, row.length) for row in rows], shape, **options, has_sinks=sinks is not None)
        expected = torch.cat([dense(row, window, sinks) for row in rows]).to(dtype)
        # bfloat16: scores, weights and chunks' results are rounded to 8 bits.
        tolerance = 2e-5 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("batch", [*range(1, 10), 15, 16, 17, 31, 32, 33, 40])
@pytest.mark.parametrize("name", BACKENDS)
def test_decode_rows_do_not_depend_on_their_number(name: str, batch: int) -> None:
    shape, options = (4, 2, 32), {"block_size": 16, "window": None, "dtype": torch.bfloat16, "name": name}
    rows = [Row(1 + 37 * i % 400, shape, torch.bfloat16, i) for i in range(batch)]
    got = attend([(row, row.length - 1, row.length) for row in rows], shape, **options, seed=batch)
    for i in {0, batch // 2, batch - 1}:
        alone = attend([(rows[i], rows[i].length - 1, rows[i].length)], shape, **options)
        assert torch.equal(got[i : i + 1], alone)
