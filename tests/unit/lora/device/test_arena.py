"""Rows packed, copied and cleared."""

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.lora.device.arena import RowArena
from outrider.lora.device.layout import LoraWeights, RowLayout
from outrider.lora.device.pool import Allocation

CPU = torch.device("cpu")
# (modules and their outputs, inputs) of each site
SITES = [({"q": 8, "k": 4, "v": 4}, 8), ({"o": 8}, 8), ({"gate": 40, "up": 40}, 8), ({"down": 8}, 40)]
MODULES = {name: (inputs, size) for sizes, inputs in SITES for name, size in sizes.items()}
NUM_ROWS = 10


def make(dtype=torch.float32, is_apart=None):
    arena = RowArena(RowLayout(dtype), CPU, is_apart=is_apart)
    for sizes, inputs in SITES:
        arena.layout.reserve(list(sizes), inputs, list(sizes.values()))
    arena.allocate(NUM_ROWS)
    return arena


def weights(ranks, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: LoraWeights(*(torch.randn(rank, size, generator=generator).to(dtype) for size in MODULES[name]))
        for name, rank in ranks.items()
    }


def held(arena, rows):
    """Content of the arena's `rows`, by module: A and B."""
    layout = arena.layout
    return {
        name: [arena.rows[list(rows), columns] for columns in layout.pieces[index]]
        for name, index in layout.modules.items()
    }


def test_modules_of_a_site_are_side_by_side():
    layout = make().layout
    end = 0
    for sizes, inputs in SITES:
        pieces = [layout.pieces[layout.modules[name]] for name in sizes]
        for columns, lengths in zip(zip(*pieces, strict=True), ([inputs] * len(sizes), sizes.values()), strict=True):
            assert end <= columns[0].start < end + 64
            for part, length in zip(columns, lengths, strict=True):
                assert part.stop - part.start == length
            assert all(one.stop == other.start for one, other in itertools.pairwise(columns))
            end = columns[-1].stop


def check(arena, rows, modules):
    for index, (name, (a, b)) in enumerate(held(arena, rows).items()):
        rank = len(modules[name].a) if name in modules else 0
        if rank:
            assert torch.equal(a[:rank], modules[name].a)
            assert torch.equal(b[:rank], modules[name].b)
        assert not a[rank:].any()
        assert not b[rank:].any()
        assert arena.live[list(rows), index].tolist() == [1] * rank + [0] * (len(rows) - rank)


RANKS = st.dictionaries(st.sampled_from(sorted(MODULES)), st.integers(1, 4))


@settings(max_examples=60)
@given(RANKS, RANKS, st.permutations(range(NUM_ROWS)), st.booleans())
def test_rows_hold_the_last_write(first, second, order, is_apart):
    arena = make(is_apart=is_apart)
    for seed, ranks in enumerate((first, second)):
        modules = weights(ranks, seed)
        rows = tuple(sorted(order[seed : seed + 4]))
        arena.write(Allocation(b"x", rows), arena.layout.pack(modules))
        check(arena, rows, modules)


@settings(max_examples=60)
@given(RANKS)
def test_views_are_the_weights(ranks):
    arena = make()
    modules = weights(ranks)
    packed = arena.layout.pack(modules)
    views = packed.weights()
    assert views.keys() == modules.keys()
    assert all(packed.has(name) == (name in modules) for name in MODULES)
    for name, (a, b) in views.items():
        assert torch.equal(a, modules[name].a)
        assert torch.equal(b, modules[name].b)
        assert a.untyped_storage().data_ptr() == packed.data.untyped_storage().data_ptr()


def test_an_adapter_of_all_modules_is_one_span_and_of_some_takes_less():
    arena = make()
    whole = arena.layout.pack(weights(dict.fromkeys(MODULES, 2)))
    assert len(whole.spans) == 1
    some = arena.layout.pack(weights({"q": 2, "down": 2}))
    assert len(some.spans) == 3
    assert some.num_bytes < whole.num_bytes / 2
    assert arena.row_bytes * 2 >= whole.data.nbytes > arena.row_bytes * 2 - 2 * 64


def test_an_empty_adapter_takes_nothing_and_clears_its_rows():
    arena = make()
    arena.write(Allocation(b"x", (1, 2, 5)), arena.layout.pack(weights(dict.fromkeys(MODULES, 3))))
    empty = arena.layout.pack({})
    assert empty.data.numel() == 0
    arena.write(Allocation(b"y", (1, 2, 5)), empty)
    check(arena, (1, 2, 5), {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_start_on_cache_lines_and_not_all_in_the_same_sets(dtype):
    arena = RowArena(RowLayout(dtype), CPU)
    arena.layout.reserve(["x"], 4096, [4096])
    arena.allocate(3)
    assert arena.rows.data_ptr() % 64 == 0
    stride = arena.rows.stride(0) * dtype.itemsize
    assert stride % 64 == 0
    assert stride % 4096 >= 64


def test_rows_are_written_while_others_are_read():
    arena = make()
    kept = weights({"q": 2, "gate": 2}, 5)
    arena.write(Allocation(b"kept", (0, 1)), arena.layout.pack(kept))
    packed = [arena.layout.pack(weights(dict.fromkeys(MODULES, 4), seed)) for seed in range(2)]
    stop = threading.Event()

    def write():
        while not stop.is_set():
            for one in packed:
                arena.write(Allocation(b"other", (3, 4, 6, 7)), one)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(50):
            check(arena, (0, 1), kept)
    finally:
        stop.set()
        thread.join()


def test_unused_memory_is_not_touched():
    arena = RowArena(RowLayout(torch.float32), CPU)
    arena.layout.reserve(["x"], 1 << 20, [1 << 20])
    before = resident_bytes()
    arena.allocate(256)  # 2 GiB
    arena.write(
        Allocation(b"x", (7,)), arena.layout.pack({"x": LoraWeights(torch.ones(1, 1 << 20), torch.ones(1, 1 << 20))})
    )
    assert resident_bytes() - before < 128 << 20


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_live_flags_are_contiguous_bytes():
    arena = make()
    assert arena.live.dtype == np.uint8
    assert arena.live.strides[0] == 1


class Copies(TorchDispatchMode):
    """Copies from packed rows, and memory that is made, while an adapter is written."""

    def __init__(self, packed):
        super().__init__()
        self._packed = packed.data.untyped_storage().data_ptr()
        self.copies, self.num_made = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name == "copy_" and args[1].untyped_storage().data_ptr() == self._packed:
            waits = not (args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False))
            self.copies.append((args[1].is_contiguous() and args[0].is_contiguous(), waits, args[1].nbytes))
        held = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        self.num_made += isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in held
        return made


@pytest.mark.parametrize("names", [list(MODULES), ["q", "v"], ["k", "down"]])
@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (1, 2, 5, 9)])
def test_a_gpu_copies_each_row_once_without_waiting(names, rows):
    """From pinned memory only if both sides are contiguous; and a step waits when device memory is allocated."""
    arena = make(is_apart=True)
    packed = arena.layout.pack(weights(dict.fromkeys(names, len(rows))))
    with Copies(packed) as seen:
        arena.write(Allocation(b"x", rows), packed)
    assert seen.copies == [(True, False, packed.data.nbytes // len(rows))] * len(rows)
    assert seen.num_made == 0
    check(arena, rows, weights(dict.fromkeys(names, len(rows))))


def test_rows_beyond_the_staging_buffer_are_copied_one_by_one(monkeypatch):
    monkeypatch.setattr("outrider.lora.device.arena._STAGED_BYTES", 1)
    arena = make(is_apart=True)
    modules = weights(dict.fromkeys(MODULES, 4))
    arena.write(Allocation(b"x", (2, 3, 4, 8)), arena.layout.pack(modules))
    check(arena, (2, 3, 4, 8), modules)
