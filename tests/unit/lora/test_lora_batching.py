"""Segments, masks and the reuse of a step's batch."""

import pytest
import torch

from outrider.lora.adapter import LoraWeights
from outrider.lora.batching import LONG_RUN, PACK_AFTER, LoraBatcher
from outrider.lora.layers import LoraSite
from outrider.lora.pool import RowPool

RANKS = {b"a": 2, b"b": 3, b"c": 1}
SIZES = (6, 4)
IN = 8


class Bench:
    """A pool with three adapters, one site, and the deltas by definition."""

    def __init__(self, dtype=torch.float32, num_rows=16):
        self.pool = RowPool(num_rows, 8)
        self.site = LoraSite(IN, SIZES, num_rows, dtype, torch.device("cpu"))
        self.batcher = LoraBatcher(self.pool, dtype, torch.device("cpu"))
        self.weights = {}
        for key, rank in RANKS.items():
            self.place(key, rank)

    def place(self, key, rank):
        allocation = self.pool.allocate(key, rank)
        weights = [LoraWeights(torch.randn(rank, IN), torch.randn(rank, size)) for size in SIZES]
        if key == b"c":
            weights[1] = None
        self.site.write(allocation, weights)
        self.weights[key] = weights

    def rows(self, *items):
        return [(self.pool.allocation(key) if key else None, count) for key, count in items]

    def check(self, *items):
        """One step over (key or None, tokens); returns its batch."""
        batch = self.batcher.build(self.rows(*items))
        x = torch.randn(sum(count for _, count in items), IN)
        y = torch.randn(len(x), sum(SIZES))
        want, start = y.clone(), 0
        for key, count in items:
            tokens = x[start : start + count]
            for index, weight in enumerate(self.weights.get(key, ())):
                if weight is not None:
                    columns = slice(sum(SIZES[:index]), sum(SIZES[: index + 1]))
                    want[start : start + count, columns] += tokens @ weight.a.T @ weight.b
            start += count
        if batch is not None:
            self.site.add(y, x, batch)
        torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-5)
        return batch


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
    ],
)
def test_every_token_gets_its_own_adapter(items):
    bench = Bench()
    for _ in range(PACK_AFTER + 3):  # unpacked at first, then packed
        batch = bench.check(*items)
    assert any(segment.packed for segment in batch.segments)


def test_no_batch_for_the_base_model_alone():
    assert Bench().check((None, 4), (None, 1)) is None


def test_long_base_runs_and_base_edges_are_skipped():
    batch = Bench().check((None, 2), (b"a", 1), (None, LONG_RUN), (b"b", 1), (None, 1))
    assert [(s.start, s.stop) for s in batch.segments] == [(2, 3), (LONG_RUN + 3, LONG_RUN + 4)]


def test_one_adapter_needs_no_mask_and_only_its_rows():
    (segment,) = Bench().check((b"b", 3)).segments
    assert segment.keep is None
    assert segment.selection.num_rows == 3


def test_the_same_rows_give_the_same_batch():
    bench = Bench()
    items = [(b"a", 1), (b"b", 1)]
    first = bench.check(*items)
    assert bench.check(*items) is first
    assert bench.check((b"a", 1), (b"b", 2)) is not first


def test_the_selection_lasts_while_it_covers_the_step():
    bench = Bench()
    first = bench.check((b"a", 1), (b"b", 1)).segments[0].selection
    assert bench.check((b"a", 1), (b"b", 2)).segments[0].selection is first
    assert bench.check((b"b", 1)).segments[0].selection is first, "a subset stays on it"
    assert bench.check((b"c", 1)).segments[0].selection is not first


def test_a_selection_that_has_become_far_too_large_is_left():
    bench = Bench(num_rows=128)
    bench.place(b"big", 100)
    assert bench.check((b"big", 1), (b"a", 1)).segments[0].selection.num_rows == 102
    assert bench.check((b"a", 1)).segments[0].selection.num_rows == 2


def test_rows_that_changed_hands_are_not_taken_for_the_old_ones():
    bench = Bench()
    for _ in range(PACK_AFTER + 2):
        bench.check((b"a", 1), (b"b", 1))
    bench.pool.evict(b"a")
    bench.place(b"d", 2)
    assert bench.pool.allocation(b"d").rows == (0, 1), "the rows of a"
    for _ in range(PACK_AFTER + 2):
        bench.check((b"d", 1), (b"b", 1))
    bench.check((b"b", 2))


def test_scattered_rows_are_gathered():
    bench = Bench()
    bench.pool.evict(b"b")
    bench.place(b"e", 12)
    assert bench.pool.allocation(b"e").rows == (2, 3, 4, *range(6, 15))
    for _ in range(PACK_AFTER + 2):
        bench.check((b"e", 2), (b"c", 1))


def test_a_row_written_again_holds_nothing_of_its_former_owner():
    bench = Bench()
    bench.pool.evict(b"b")
    bench.site._a[2:5], bench.site._b[1][2:5] = float("inf"), float("nan")
    allocation = bench.pool.allocate(b"f", 3)
    bench.site.write(allocation, [LoraWeights(torch.ones(1, IN), torch.ones(1, SIZES[0])), None])
    assert not bench.site._a[3:5].any()
    assert not bench.site._b[1][2:5].any()
