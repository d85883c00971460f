"""Counts of the work that the host gives to a device: launches of graphs, single launches, and waits for the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.models.pass_graphs import PassGraphs
from outrider.platform.engine.runner.device_queue import DeviceQueue

from .call_tape import CallTape

_NO_LAUNCH = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "lift_fresh", "_reshape_alias")
"""Operations without a kernel that return new memory."""
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique2", "_unique2")
"""Operations whose result has a size or a value that the host reads."""
_READS = ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that make the host wait for the device."""


@dataclass
class Counts:
    """One step's work: what it needs of the device before the next one may be launched."""

    graphs: int = 0
    recordings: int = 0
    """Graphs that were replayed for the first time: the tape records them now, by single launches."""
    single: int = 0
    waits: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Names of the single launches, in order."""
    inside: bool = False
    """True within a launch or a replay, whose doubles on a CPU may read anything."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing meanwhile."""
        before, self.inside = self.inside, True
        try:
            with torch.utils._python_dispatch._disable_current_modes():
                yield
        finally:
            self.inside = before


class _Counter(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in _WAITS or (name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])):
            self._counts.waits.append(name)
        is_view = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
        if not is_view and name not in _NO_LAUNCH:
            self._counts.single += 1
            self._counts.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def _singly(counts: Counts) -> Iterator[None]:
    from triton.runtime.interpreter import GridExecutor

    call, thread = GridExecutor.__call__, threading.get_ident()

    def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            counts.single += 1
            counts.names.append(executor.fn.__name__)
        with counts.paused():
            return call(executor, *args, **kwargs)

    GridExecutor.__call__ = launch
    try:
        with _Counter(counts):
            yield
    finally:
        GridExecutor.__call__ = call


def count_steps(monkeypatch: pytest.MonkeyPatch, graphs: PassGraphs) -> list[Counts]:
    """Counts of each step that an engine submits from now on, in order. Replayed work is one launch."""
    steps: list[Counts] = []
    tape = graphs.backend
    assert isinstance(tape, CallTape)
    submit, replay = DeviceQueue.submit, PassGraphs.run

    def run(graphs: PassGraphs, *args: Any, **kwargs: Any) -> Any:
        with steps[-1].paused():
            return replay(graphs, *args, **kwargs)

    def counted(queue: DeviceQueue, work: Callable[[], Any]) -> Any:
        counts = Counts()
        steps.append(counts)

        def do() -> Any:
            before = graphs.num_replayed, len(tape.num_calls)
            for name in _READS:
                monkeypatch.setattr(Tensor, name, _noting(name, counts))
            try:
                with _singly(counts):
                    return work()
            finally:
                for name in _READS:
                    monkeypatch.setattr(Tensor, name, _ORIGINAL[name])
                counts.graphs, counts.recordings = graphs.num_replayed - before[0], len(tape.num_calls) - before[1]

        return submit(queue, do)

    monkeypatch.setattr(PassGraphs, "run", run)
    monkeypatch.setattr(DeviceQueue, "submit", counted)
    return steps


_ORIGINAL = {name: getattr(Tensor, name) for name in _READS}


def _noting(name: str, counts: Counts) -> Callable[..., Any]:
    thread, original = threading.get_ident(), _ORIGINAL[name]

    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and not counts.inside:
            counts.waits.append(name)
        return original(tensor, *args, **kwargs)

    return read
