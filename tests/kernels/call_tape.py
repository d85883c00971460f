"""A CUDA graph's double on a CPU: it records the calls of some work, with their numbers and their tensors' addresses,
and makes the same calls on the same memory again. What the work would read from the host a second time is not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.kernels.act_and_mul import native as silu
from outrider.kernels.graphs import Captured, GraphBackend, Work
from outrider.kernels.rms_norm import native as norm

_MAKES_MEMORY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


class _Recorder(TorchDispatchMode):
    """Calls of torch's operations and launches of Triton's kernels, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
        self.memory: list[Any] = []
        """Whatever was made: a graph's memory is its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, schema = func._schema.name.removeprefix("aten::"), func._schema
        if name == "_local_scalar_dense":
            raise RuntimeError("the host reads the device while it captures")
        made = func(*args, **kwargs)
        self.memory.append((made, args, kwargs))
        if any(arg.alias_info is not None and arg.alias_info.is_write for arg in schema.arguments):
            self.calls.append(lambda: func(*args, **kwargs))
        elif name not in _MAKES_MEMORY and (
            all(out.alias_info is None for out in schema.returns) or _is_copy(made, args)
        ):
            self.calls.append(lambda: self._into(made, func(*args, **kwargs)))
        return made

    def launch(self, executor: Any, args: Any, kwargs: Any, call: Callable[..., Any]) -> None:
        """A kernel, now and in every replay."""
        self.memory.append((args, kwargs))
        self.work(lambda: call(executor, *args, **kwargs))

    def work(self, call: Callable[[], Any]) -> None:
        """Call that bypasses torch's operations, now and in every replay."""
        self.calls.append(call)
        with torch.utils._python_dispatch._disable_current_modes():
            call()

    def replay(self) -> None:
        for call in self.calls:
            call()

    @staticmethod
    def _into(made: Any, again: Any) -> None:
        for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)


def _is_copy(made: Any, args: Any) -> bool:
    """True for a view that could not be one, as `reshape` and `contiguous` may find."""
    held = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
    return isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in held


_recorders: dict[int, _Recorder] = {}
"""By the thread that records."""
_changing = Lock()


@contextmanager
def _record_launches(recorder: _Recorder) -> Iterator[None]:
    """Record this thread's launches. Several threads may record at once."""
    from triton.runtime.interpreter import GridExecutor

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        of_thread = _recorders.get(get_ident())
        if of_thread is None:
            launch.call(executor, *args, **kwargs)  # type: ignore[attr-defined]
        else:
            of_thread.launch(executor, args, kwargs, launch.call)  # type: ignore[attr-defined]

    with _changing:
        if not _recorders:
            launch.call = GridExecutor.__call__  # type: ignore[attr-defined]
            GridExecutor.__call__ = launch
        _recorders[get_ident()] = recorder
    try:
        yield
    finally:
        with _changing:
            del _recorders[get_ident()]
            if not _recorders:
                GridExecutor.__call__ = GridExecutor.__call__.call


def record(call: Callable[[], Any]) -> None:
    """Make a call that bypasses torch's operations, and make it again whenever what this thread records is
    replayed."""
    recorder = _recorders.get(get_ident())
    if recorder is None:
        call()
    else:
        recorder.work(call)


class _LateRecording:
    """A `Captured` that is recorded at its first replay."""

    def __init__(self, tape: CallTape, work: Work) -> None:
        self._tape, self._work = tape, work
        self._captured: Captured | None = None

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Valid after a replay."""
        assert self._captured is not None
        return self._captured.outputs

    def replay(self) -> None:
        if self._captured is None:
            self._captured = self._tape.record(self._work)
        self._captured.replay()


class CallTape:
    """A GraphBackend."""

    def __init__(self, *, lazily: bool = False) -> None:
        """`lazily`: record each capture at its first replay: the interpreter is slow, and many shapes are unused."""
        self.num_calls: list[int] = []
        """Number of calls of each recording."""
        self.lazily = lazily

    def capture(self, work: Work) -> Captured:
        """See GraphBackend. The outputs hold NaN, or numbers that are no ids, until the first replay."""
        return cast(Captured, _LateRecording(self, work)) if self.lazily else self.record(work)

    def record(self, work: Work) -> Captured:
        """Record `work` now."""
        work()
        recorder = _Recorder()
        with _record_launches(recorder), recorder:
            outputs = work()
        for output in outputs:
            output.fill_(torch.nan if output.is_floating_point() else -1)
        self.num_calls.append(len(recorder.calls))
        return Captured(outputs, recorder.replay)


def without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No calls of a pass go around torch and Triton."""
    for module in (norm, silu):
        monkeypatch.setattr(module, "_function", lambda: None)


def graph_backend(device: str, *, lazily: bool = False) -> GraphBackend:
    """CUDA's if there is one; else a `CallTape`, see there."""
    if device == "cuda":
        from outrider.kernels.graphs import CudaGraphs

        return CudaGraphs(torch.device(device))
    return CallTape(lazily=lazily)
