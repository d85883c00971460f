"""Ranks of tensor parallelism that are threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor

from outrider.models.batch import SequenceRows, allocate_kv, build_batch
from outrider.models.model import LanguageModel

Result = TypeVar("Result")


class ThreadRanks:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, shared: list[Any], barrier: Barrier) -> None:
        self.rank, self.size = rank, len(shared)
        self._shared, self._barrier = shared, barrier

    def gather(self, x: Tensor) -> Tensor:
        self._shared[self.rank] = x
        self._barrier.wait(20)
        found = torch.stack(self._shared)
        self._barrier.wait(20)
        return found

    def sum(self, x: Tensor) -> Tensor:
        return x.copy_(self.gather(x.clone()).sum(0))


def logits(model: LanguageModel) -> Tensor:
    """Logits [13, vocab] of two rows of tokens."""
    kv = allocate_kv(model.kv_layers, 4, 16, torch.float32)
    rows = SequenceRows(list(range(0, 130, 10)), [8, 5], [0, 0], [[0], [1]])
    hidden = model.forward(build_batch(rows, model, kv)).hidden
    return model.compute_logits(hidden)


def on_ranks(size: int, work: Callable[[ThreadRanks], Result]) -> list[Result]:
    """Results of `work` on each rank."""
    shared: list[Any] = [None] * size
    barrier = Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(ThreadRanks(rank, shared, barrier)), range(size)))
