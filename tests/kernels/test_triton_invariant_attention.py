"""The batch-invariant kernel of a GPU, interpreted: a query's bits alone, in a batch, in a chunk, with drafts and after
a cached prefix; in one program a tile or in several."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from outrider.kernels.paged_attention import Chunks, Shape, Window, invariant, schedule
from outrider.kernels.paged_attention.schedule import Capacity, Gpu, Planner
from outrider.models.attention.triton import TritonAttention, TritonInvariantAttention

from . import test_batch_invariant_attention as plain
from .test_batch_invariant_attention import Row, dense

SHAPE = (2, 1, 16)
LENGTH = 140


pytestmark = pytest.mark.usefixtures("row_products")


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few keys have several units, and more of them than splits."""
    monkeypatch.setattr(invariant, "UNIT_KEYS", 64)
    for module in (invariant, schedule):
        monkeypatch.setattr(module, "INVARIANT_SPLITS", 2)


class Attend:
    """Attention by one backend."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        kind: type[TritonAttention],
        dtype: torch.dtype,
        num_splits: int | None = None,
    ) -> None:
        self.dtype = dtype
        monkeypatch.setattr(plain, "make_backend", lambda name, spec: kind(spec, num_splits))

    def __call__(self, chunks: list[tuple[Row, int, int]], window: Window = None, **options: Any) -> list[Tensor]:
        """Results of each chunk, [stop - start, H * D]."""
        got = plain.attend(chunks, SHAPE, seed=len(chunks), block_size=16, window=window, dtype=self.dtype, **options)
        return list(got.split([stop - start for _, start, stop in chunks]))


def batches(row: Row, others: list[Row]) -> Iterator[list[tuple[Row, int, int]]]:
    """Batches whose first chunk is of `row`."""
    last = row.length
    decodes = [(other, other.length - 1, other.length) for other in others]
    yield [(row, last - 1, last)]
    yield [(row, last - 1, last), *decodes]
    yield [(row, last - 5, last)]  # verification of 4 drafts
    yield [(row, last - 3, last), *((other, max(0, other.length - 5), other.length) for other in others[:2])]
    yield [(row, 96, last)]  # after a cached prefix
    yield [(row, 60, 90), (others[0], 0, others[0].length)]
    yield [(row, 95, 99), *decodes[:1]]


def differing(attend: Attend, window: Window, *, has_sinks: bool = False) -> int:
    """Batches in which some query of a row has other bits than in its whole prompt alone."""
    row = Row(LENGTH, SHAPE, attend.dtype, 0)
    others = [Row(1 + 61 * i % 150, SHAPE, attend.dtype, i) for i in (1, 3, 5)]
    whole = attend([(row, 0, LENGTH)], window, has_sinks=has_sinks)[0]
    expected = dense(row, window, torch.linspace(-2, 3, SHAPE[0]) if has_sinks else None)
    tolerance = 2e-5 if attend.dtype == torch.float32 else 6e-3
    torch.testing.assert_close(whole.double(), expected, atol=tolerance, rtol=tolerance)
    count = 0
    for chunks in batches(row, others):
        _, start, stop = chunks[0]
        count += not torch.equal(attend(chunks, window, has_sinks=has_sinks)[0], whole[start:stop])
    return count


@pytest.mark.parametrize(
    ("dtype", "window", "has_sinks", "num_splits"),
    [(torch.float32, None, False, None), (torch.float16, 70, True, 16), (torch.float32, Chunks(70), False, 16)],
)
def test_a_query_has_the_same_bits_in_every_step(
    dtype: torch.dtype, window: Window, has_sinks: bool, num_splits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `num_splits` decodes are split among programs here, and prompts are not."""
    attend = Attend(monkeypatch, TritonInvariantAttention, dtype, num_splits)
    assert differing(attend, window, has_sinks=has_sinks) == 0


def test_a_float8_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = Attend(monkeypatch, TritonInvariantAttention, torch.float16)
    row, other = Row(90, SHAPE, torch.float16, 0), Row(20, SHAPE, torch.float16, 1)
    for of_row in (row, other):  # what float8 holds: the interpreter's rounding to it is not torch's
        of_row.k, of_row.v = (x.to(torch.float8_e4m3fn).half() for x in (of_row.k, of_row.v))
    whole = attend([(row, 0, 90)], cache="fp8")[0]
    torch.testing.assert_close(whole.double(), dense(row, None), atol=6e-3, rtol=6e-3)
    for chunks in ([(row, 89, 90)], [(row, 85, 90), (other, 0, 20)]):
        _, start, stop = chunks[0]
        assert torch.equal(attend(chunks, cache="fp8")[0], whole[start:stop])


def test_busy_gpus_do_not_split_keys() -> None:
    """Else the parts of 256 rows of 8 tokens would take half a GiB of the memory of graphs."""
    planner = Planner(Shape(32, 8, 128), 2, Gpu(132, 90), invariant=True)
    splits = [planner.reserve(Capacity(rows, 4, 4 * rows, 9)).groups[0].num_splits for rows in (1, 65, 66, 256)]
    assert splits == [schedule.INVARIANT_SPLITS] * 2 + [1] * 2


def test_the_ordinary_kernel_depends_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches above distinguish them."""
    monkeypatch.setattr("outrider.kernels.paged_attention.triton.WHOLE_KEYS", 0)
    monkeypatch.setattr("outrider.kernels.paged_attention.triton.MIN_SPLIT_KEYS", 64)
    assert differing(Attend(monkeypatch, TritonAttention, torch.float32), None) > 2


def test_bits_depend_on_unit_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other boundaries give other bits."""
    attend = Attend(monkeypatch, TritonInvariantAttention, torch.float32)
    monkeypatch.setattr(invariant, "UNIT_KEYS", 32)
    row = Row(80, SHAPE, torch.float32, 0)
    chunk = [(row, 60, 80)]
    other = attend(chunk)[0]
    monkeypatch.setattr(invariant, "UNIT_KEYS", 64)
    assert not torch.equal(other, attend(chunk)[0])
