"""`LLM.adapters`: the adapters of an engine in this process, and where their files come from."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ...core.adapter_verbs import LocalAdapters
from ...core.errors import OutriderError
from ...core.lora_request import LoRARequest
from ...core.messages import AdapterInfo
from .lora_int_ids import LoRAIntIds
from .sources import AdapterSources

logger = logging.getLogger(__name__)

NO_FILES = "changed"
"""The digest of no files: what is registered with it is refused when it is read."""


class LLMAdapters:
    """The verbs of `core.adapter_verbs` for callers that may wait for files."""

    def __init__(
        self, engine: Callable[[], LocalAdapters], sources: AdapterSources, demo: Mapping[str, LoRARequest]
    ) -> None:
        """`engine` returns the engine's adapters, or raises ShuttingDownError. `demo` are adapters that are known
        without having been loaded."""
        self._engine = engine
        self._sources = sources
        self.int_ids = LoRAIntIds()
        """Integers that stand for adapters."""
        self._kept: dict[str, LoRARequest] = {}  # with local folders
        self._again: list[tuple[LoRARequest, AdapterInfo]] = []
        self.known = _KnownAdapters(engine, demo, self._kept)
        """The adapters that a name may mean."""

    def load(self, request: LoRARequest, *, load_inplace: bool = False, pinned: bool = False) -> AdapterInfo:
        """Fetch and load an adapter."""
        engine, name = self._engine(), request.name
        before = self._sources.folders_of(name)
        try:
            local = self._sources.localize(request, again=True).result()
            info = engine.load(local, load_inplace=load_inplace, pinned=pinned)
        except OutriderError:
            self._sources.restrict(name, before)
            raise
        self._sources.restrict(name, (local.path, local.draft_path))
        self._kept[name] = local
        return info

    def register(self, requests: Sequence[LoRARequest]) -> None:
        """Fetch adapters and make them known by name."""
        local = [self._sources.localize(request).result() for request in requests]
        self._engine().register(local)
        self._kept.update({request.name: request for request in local})

    def unload(self, name: str, mode: str = "drain") -> None:
        """Forget an adapter."""
        self._engine().unload(name, mode)
        self._kept.pop(name, None)
        self._sources.restrict(name)

    def pin(self, name: str) -> AdapterInfo:
        """Keep an adapter on the device."""
        return self._engine().pin(name)

    def unpin(self, name: str) -> AdapterInfo:
        """Let an adapter make way again."""
        return self._engine().unpin(name)

    def list(self) -> builtins.list[AdapterInfo]:
        """The registered adapters."""
        return self._engine().list()

    def remember(self, engine: LocalAdapters) -> None:
        """Note what an engine has, before it ends, for `load_again`."""
        self._again = [
            (self._kept.get(info.name) or LoRARequest(info.name, path=info.path), info) for info in engine.list()
        ]

    def load_again(self) -> None:
        """Register with a new engine what the last one had. An adapter whose files have another content by now keeps
        its name, and its requests get the error for that."""
        engine, again, self._again = self._engine(), self._again, []
        for request, before in again:
            try:
                if not before.digest:
                    engine.register([request])
                elif engine.load(request, pinned=before.pinned).digest != before.digest:
                    engine.unload(request.name)
                    engine.register([replace(request, digest=NO_FILES)])
            except OutriderError as error:
                logger.error("Adapter %r cannot be loaded again: %r", request.name, error.message)


class _KnownAdapters(Mapping[str, LoRARequest]):
    """Adapters by name: those of the engine, which is asked for one at a time, and those of the demo."""

    def __init__(
        self,
        engine: Callable[[], LocalAdapters],
        demo: Mapping[str, LoRARequest],
        kept: Mapping[str, LoRARequest],
    ) -> None:
        """`kept`: requests of adapters that were loaded or registered."""
        self._engine = engine
        self._demo = demo
        self._kept = kept

    def __getitem__(self, name: str) -> LoRARequest:
        info = self._engine().find(name)
        if info is None:
            return self._demo[name]
        kept = self._kept.get(name)
        return kept if kept is not None and kept.path == info.path else LoRARequest(name, path=info.path)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._demo, **{info.name: None for info in self._engine().list()}})

    def __len__(self) -> int:
        return sum(1 for _ in self)
