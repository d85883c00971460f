"""The grid of captured passes: which shapes there are, and which one serves which rows."""

from __future__ import annotations

import itertools
import random

import pytest

from outrider.models.pass_grid import Grid, PassLimits, PassShape, bucket, make_grid, spread


def grid_for(rows: int, drafts: int, each: int = 1, **more: int) -> Grid:
    return make_grid(PassLimits(rows, 4096, max_drafts=drafts, graphs_per_shape=each, **more))


def smallest(shapes: tuple[PassShape, ...], query_lens: list[int]) -> PassShape | None:
    return next((shape for shape in shapes if shape.fits(query_lens, 16)), None)


def test_buckets_waste_at_most_a_third() -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 17, 25, 200, 256)] == [
        *(1, 2, 3, 4, 6, 6, 8, 12, 12, 16, 24, 32, 256, 256)
    ]
    assert all(n <= bucket(n) <= max(n + 1, 1.5 * n) for n in range(1, 600))


@pytest.mark.parametrize(
    ("rows", "drafts", "each"), [*itertools.product((1, 5, 64, 256, 512), (0, 1, 4, 16), (1, 2, 3))]
)
def test_there_are_few_shapes_and_they_serve_all_steps(rows: int, drafts: int, each: int) -> None:
    grid = grid_for(rows, drafts, each)
    assert each * (len(grid.decodes) + len(grid.prompts)) <= 60
    rng = random.Random(rows)
    for _ in range(50):
        count = rng.randint(1, rows)
        query_lens = [rng.randint(1, 1 + drafts) for _ in range(count)]
        if sum(query_lens) <= 1024:  # the logits of a shape of prompts are launched singly
            assert smallest(grid.decodes + grid.prompts, query_lens) is not None
        assert smallest(grid.decodes, [1] * count) is not None
        if sum(query_lens) + 40 <= 1024 and count < rows:
            assert smallest(grid.prompts, [*query_lens, 40]) is not None


@pytest.mark.parametrize(("rows", "drafts", "each"), [(256, 0, 2), (256, 4, 2), (256, 4, 3), (64, 4, 3), (64, 7, 3)])
def test_steps_without_drafts_are_padded_least(rows: int, drafts: int, each: int) -> None:
    """A pass of an 8B model takes about as long as reading the weights takes, and for each 256 tokens as long again: of
    that time padding takes at most an eighth, and for one request nothing."""
    grid = grid_for(rows, drafts, each)
    for count in range(1, rows + 1):
        shape = smallest(grid.decodes, [1] * count)
        assert shape is not None
        assert (256 + shape.tokens) / (256 + count) < 1.125
    assert smallest(grid.decodes, [1]) == (1, 1, 1, False)
    if drafts:
        assert smallest(grid.decodes, [1 + drafts]) == (1, 1 + drafts, 1 + drafts, False)


def test_rows_share_the_tokens_of_a_shape() -> None:
    """Few rows with many drafts among many without need no shape of their own."""
    grid = grid_for(16, 4)
    assert smallest(grid.decodes, [5, *[1] * 9]) == smallest(grid.decodes, [2] * 4 + [1] * 6)
    shape = smallest(grid.prompts, [5, 100, 1])
    assert shape == (16, 5, 128, True)
    assert smallest(grid.prompts, [16] * 5) is None, "tiles of 5 queries, of which there are 16"


def test_price_is_that_of_the_shape() -> None:
    grid = grid_for(8, 4)
    assert grid.padded(8, 0) == 0
    assert {grid.padded(8, drafts) for drafts in range(1, 9)} == {8}
    assert {grid.padded(8, drafts) for drafts in range(9, 33)} == {32}
    assert grid.padded(9, 3.5) == 3.5, "there is no shape"


@pytest.mark.parametrize("count", [0, 1, 2, 3, 60])
def test_each_prefix_of_a_spread_order_covers_the_range(count: int) -> None:
    order = spread(range(count))
    assert sorted(order) == list(range(count))
    assert order[:2] == [0, count - 1][:count]
    for taken in (5, 9, 17, 33):
        gaps = [high - low for low, high in itertools.pairwise(sorted(order[:taken]))]
        assert max(gaps, default=0) <= -(-count // (taken - 1)) + 1
