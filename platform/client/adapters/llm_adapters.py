"""`LLM.adapters`: the adapters of an engine in this process."""

from __future__ import annotations

import builtins
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ...core.lora_request import LoRARequest
from ...core.messages import AdapterInfo
from .loaded_adapters import LoadedAdapters
from .sources import AdapterSources

if TYPE_CHECKING:
    from ..local_engine import LocalEngine

T = TypeVar("T")


class LLMAdapters:
    """The verbs of `LoadedAdapters` for callers that may wait for files."""

    def __init__(self, engine: LocalEngine, sources: AdapterSources, demo: Mapping[str, LoRARequest]) -> None:
        """`demo` are adapters that are known without having been loaded."""

        async def start() -> None:
            engine.check_admits()

        async def call(verb: str, **arguments: Any) -> Any:
            return engine.call(verb, **arguments)

        async def localize(request: LoRARequest, *, again: bool = False) -> LoRARequest:
            return sources.localize(request, again=again).result()

        self._call = call
        self.loaded = LoadedAdapters(start, call, localize, sources)
        """The same verbs as coroutines, which wait for no event loop."""
        self.int_ids = self.loaded.int_ids
        """Integers that stand for adapters."""
        self.known: Mapping[str, LoRARequest] = _KnownAdapters(engine, demo, self.loaded.requests, sources)
        """The adapters that a name may mean."""

    def load(
        self, request: LoRARequest, *, load_inplace: bool = False, pinned: bool = False, running: str = "finish"
    ) -> AdapterInfo:
        """Fetch and load an adapter."""
        return _run(self.loaded.load(request, load_inplace=load_inplace, pinned=pinned, running=running))

    def register(self, requests: Sequence[LoRARequest]) -> None:
        """Fetch adapters and make them known by name."""
        _run(self.loaded.register(requests))

    def unload(self, name: str, mode: str = "drain") -> None:
        """Forget an adapter."""
        _run(self.loaded.unload(name, mode))

    def pin(self, name: str) -> AdapterInfo:
        """Keep an adapter on the device."""
        return _run(self.loaded.pin(name))

    def unpin(self, name: str) -> AdapterInfo:
        """Let an adapter be evicted again."""
        return _run(self.loaded.unpin(name))

    def list(self) -> builtins.list[AdapterInfo]:
        """The registered adapters."""
        return _run(self.loaded.list())

    def add(self, request: LoRARequest) -> bool:
        """See `LoadedAdapters.add`."""
        return _run(self.loaded.add(request))

    def remove(self, lora_id: int | str) -> bool:
        """See `LoadedAdapters.remove`."""
        return _run(self.loaded.remove(lora_id))

    def ids(self) -> set[int]:
        """See `LoadedAdapters.ids`."""
        return _run(self.loaded.ids())

    def reload_after_restart(self) -> None:
        """See `LoadedAdapters.reload_after_restart`."""
        _run(self.loaded.reload_after_restart(self._call, _run_in_turn))


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for no event loop."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("the coroutine waits for an event loop")


async def _run_in_turn(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines that wait for no event loop."""
    for work in works:
        await work


class _KnownAdapters(Mapping[str, LoRARequest]):
    """Adapters by name: those of the engine, which is asked for one at a time, and those of the demo."""

    def __init__(
        self,
        engine: LocalEngine,
        demo: Mapping[str, LoRARequest],
        requests: Mapping[str, LoRARequest],
        sources: AdapterSources,
    ) -> None:
        """`requests`: those of adapters that were loaded or registered."""
        self._engine = engine
        self._demo = demo
        self._requests = requests
        self._sources = sources

    def __getitem__(self, name: str) -> LoRARequest:
        info = self._engine.adapters.find(name)
        if info is None:
            return self._demo[name]
        kept = self._requests.get(name)
        if kept is not None and kept.path == info.path:
            return kept
        return self._sources.memory.find(name, info.path) or LoRARequest(name, path=info.path)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._demo, **{info.name: None for info in self._engine.adapters.list()}})

    def __len__(self) -> int:
        return sum(1 for _ in self)
