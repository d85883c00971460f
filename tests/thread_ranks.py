"""Ranks of tensor parallelism that are threads of one process."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Thread
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from outrider.models.batch import SequenceRows, allocate_kv, build_batch
from outrider.models.model import LanguageModel
from outrider.models.states.memory import allocate_states
from outrider.platform.core.batch import RowStates
from outrider.platform.core.config import EngineConfig
from outrider.platform.engine.executor import collectives, parallel, rank_process
from outrider.platform.engine.executor.launch import THIS_MACHINE, RankSite

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
    kv, memory = (
        allocate_kv(model.kv_layers, 4, 16, torch.float32),
        allocate_states(model.state_layers, 4, torch.float32),
    )
    states = [RowStates([1, 2], 2), RowStates([3, 4], 2)] if memory else []
    rows = SequenceRows(list(range(0, 130, 10)), [8, 5], [0, 0], [[0], [1]], states=states)
    hidden = model.forward(build_batch(rows, model, kv, states=memory)).hidden
    return model.compute_logits(hidden)


def on_ranks(size: int, work: Callable[[ThreadRanks], Result]) -> list[Result]:
    """Results of `work` on each rank."""
    shared: list[Any] = [None] * size
    barrier = Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(ThreadRanks(rank, shared, barrier)), range(size)))


class RankThread:
    """The loop of a rank in a thread. A RemoteRank."""

    def __init__(self) -> None:
        self.link, theirs = socket.socketpair()
        self.error: BaseException | None = None
        self._thread = Thread(target=self._run, args=[theirs], daemon=True)
        self._thread.start()

    def _run(self, link: socket.socket) -> None:
        with link, contextlib.suppress(EOFError, ConnectionError):
            try:
                rank_process.run(link)
            except Exception as error:
                self.error = error
                raise

    def ended(self) -> str | None:
        self._thread.join(0.5)
        return None if self._thread.is_alive() else repr(self.error)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)
        self.link.close()
        self._thread.join(20)
        assert not self._thread.is_alive(), "the loop ends with its socket"


class ThreadLaunch:
    """Ranks in threads, which take no seconds to start. A Launch."""

    def __init__(self, config: EngineConfig) -> None:
        size = config.num_ranks
        self.sites = [RankSite(THIS_MACHINE, size, torch.get_num_threads(), 0)] * size
        self._folder = tempfile.TemporaryDirectory()
        self.store: list[Any] = ["file", str(Path(self._folder.name) / "store")]
        self.remote = [RankThread() for _ in range(1, size)]

    def open_store(self) -> Any:
        return collectives.open_store(self.store, len(self.sites))

    def close(self) -> None:
        for rank in self.remote:
            rank.end()
        self.remote.clear()
        self._folder.cleanup()


def ranks_as_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines of several ranks run all of them in this process."""
    monkeypatch.setattr(parallel, "ProcessLaunch", ThreadLaunch)
