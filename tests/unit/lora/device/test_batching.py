"""A step's runs and segments, native and masked, against the deltas by definition; the reuse of a step's batch."""

import pytest
import torch

from outrider.lora.device import batching, layers
from outrider.lora.device.arena import RowArena
from outrider.lora.device.batching import LONG_RUN, LoraBatcher
from outrider.lora.device.layers import EmbeddingSite, LoraSite
from outrider.lora.device.layout import LoraWeights, RowLayout
from outrider.lora.device.pool import RowPool

RANKS = {b"a": 2, b"b": 3, b"c": 1}
SIZES = (6, 4)
NAMES = ("first", "second")
IN = 8
CPU = torch.device("cpu")


class Bench:
    """A pool with three adapters, one site, and the deltas by definition."""

    def __init__(self, dtype=torch.float32, num_rows=16, batch_invariant=False):
        self.pool = RowPool(num_rows, 8)
        self.arena = RowArena(RowLayout(dtype), CPU)
        self.arena.layout.reserve(NAMES, IN, SIZES)
        first, second = (columns.start for columns in self.arena.layout.pieces[0])
        self.arena.allocate(num_rows)
        a = self.arena.rows[:, first : first + 2 * IN].unflatten(1, (2, IN))
        b = self.arena.rows[:, second : second + sum(SIZES)]
        self.site = LoraSite(a, b, SIZES, self.arena.live)
        self.batcher = LoraBatcher(dtype, CPU, batch_invariant=batch_invariant)
        self.weights = {}
        for key, rank in RANKS.items():
            self.place(key, rank)

    def place(self, key, rank):
        allocation = self.pool.allocate(key, rank)
        weights = {
            name: LoraWeights(torch.randn(rank, IN), torch.randn(rank, size))
            for name, size in zip(NAMES, SIZES, strict=True)
        }
        if key == b"c":
            del weights["second"]
        self.arena.write(allocation, self.arena.layout.pack(weights))
        self.weights[key] = weights

    def rows(self, *items):
        return [(self.pool.allocation(key) if key else None, count) for key, count in items]

    def check(self, *items):
        """One step over (key or None, tokens), and every second token of it; returns the step's batch."""
        batch = self.batcher.build(self.rows(*items))
        x = torch.randn(sum(count for _, count in items), IN)
        y = torch.randn(len(x), sum(SIZES))
        want, half, start = y.clone(), y[::2].clone(), 0
        for key, count in items:
            tokens = x[start : start + count]
            for index, name in enumerate(NAMES):
                weight = self.weights.get(key, {}).get(name)
                if weight is not None:
                    columns = slice(sum(SIZES[:index]), sum(SIZES[: index + 1]))
                    want[start : start + count, columns] += tokens @ weight.a.T @ weight.b
            start += count
        if batch is not None:
            self.site.add(y, x, batch)
            if (some := batch.of(range(0, len(x), 2))) is not None:
                self.site.add(half, x[::2].contiguous(), some)
        for found, expected in ((y, want), (half, want[::2])):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        return batch


@pytest.fixture(params=["native", "torch"])
def path(request, monkeypatch):
    """The kernels in use."""
    if request.param == "torch":
        for module in (batching, layers):
            monkeypatch.setattr(module, "is_native", lambda dtype, device: False)
    elif not batching.is_native(torch.float32, CPU):
        pytest.skip("there are no native kernels here")
    return request.param


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    "items",
    [
        [(b"a", 1)],
        [(b"a", 5), (b"a", 1)],
        [(None, 3), (b"a", 1), (None, 2), (b"b", 4), (None, 1)],
        [(b"a", 1), (b"b", 1), (b"c", 1), (b"a", 2)],
        [(b"a", LONG_RUN), (b"b", 1), (b"c", 2)],
        [(b"b", 1), (None, LONG_RUN), (b"c", 2)],
        [(b"a", 1), (b"b", LONG_RUN + 3), (None, LONG_RUN), (b"c", 1), (b"a", 1)],
        [(b"a", LONG_RUN)],
        [(b"c", LONG_RUN), (b"a", LONG_RUN)],
    ],
)
def test_every_token_gets_its_own_adapter(path, items, batch_invariant):
    batch = Bench(batch_invariant=batch_invariant).check(*items)
    assert (batch.native is not None) == (path == "native")


def test_no_batch_for_the_base_model_alone(path):
    assert Bench().check((None, 4), (None, 1)) is None


def test_the_same_rows_give_the_same_batch(path):
    bench = Bench()
    items = [(b"a", 1), (b"b", 1)]
    first = bench.check(*items)
    assert bench.check(*items) is first
    assert bench.check((b"a", 1), (b"b", 2)) is not first


def test_rows_that_changed_hands_are_not_taken_for_the_old_ones(path):
    bench = Bench()
    bench.check((b"a", 1), (b"b", 1))
    bench.pool.evict(b"a")
    bench.place(b"d", 2)
    assert bench.pool.allocation(b"d").rows == (0, 1), "the rows of a"
    bench.check((b"d", 1), (b"b", 1))


def test_scattered_rows(path):
    bench = Bench()
    bench.pool.evict(b"b")
    bench.place(b"e", 12)
    assert bench.pool.allocation(b"e").rows == (2, 3, 4, *range(6, 15))
    bench.check((b"e", 2), (b"c", 1))
    bench.check((b"e", LONG_RUN), (b"c", LONG_RUN))


@pytest.mark.parametrize("path", ["torch"], indirect=True)
class TestMasked:
    def test_long_base_runs_and_base_edges_are_skipped(self, path):
        batch = Bench().check((None, 2), (b"a", 1), (None, LONG_RUN), (b"b", 1), (None, 1))
        assert [(s.start, s.stop) for s in batch.segments] == [(2, 3), (LONG_RUN + 3, LONG_RUN + 4)]

    def test_one_adapter_needs_no_mask_and_only_its_rows(self, path):
        (segment,) = Bench().check((b"b", 3)).segments
        assert segment.keep is None
        assert segment.selection.num_rows == 3


def test_embeddings(path):
    arena = RowArena(RowLayout(torch.float32), CPU)
    arena.layout.reserve(["embedding"], 50, [6])
    arena.allocate(12)
    site = EmbeddingSite(*(arena.rows[:, columns] for columns in arena.layout.pieces[0]), arena.live)
    pool, batcher = RowPool(12, 4), LoraBatcher(torch.float32, CPU)
    weights = {}
    for key, rank in ((b"a", 2), (b"b", 4), (b"none", 1)):
        weights[key] = LoraWeights(torch.randn(rank, 50), torch.randn(rank, 6))
        arena.write(pool.allocate(key, rank), arena.layout.pack({} if key == b"none" else {"embedding": weights[key]}))
    owners = [b"a", b"b", None, b"none", b"b"]
    ids, y = torch.tensor([3, 49, 7, 1, 0]), torch.randn(5, 6)
    want = y.clone()
    for token, key in enumerate(owners):
        if key in (b"a", b"b"):
            want[token] += weights[key].a[:, ids[token]] @ weights[key].b
    site.add(y, ids, batcher.build([(pool.allocation(key) if key else None, 1) for key in owners]))
    torch.testing.assert_close(y, want)
