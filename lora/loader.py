"""Disk to host memory: a thread that parses adapters, and the host tier, an LRU over parsed adapters."""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from ..platform.core.errors import OutriderError
from .adapter import Adapter, AdapterSource
from .peft_config import adapter_error, shown

T = TypeVar("T")


class Loaded(NamedTuple, Generic[T]):
    """A finished load: either the adapter or the reason why there is none."""

    ticket: T
    adapter: Adapter | None
    error: OutriderError | None
    seconds: float


class ReadAdapter(NamedTuple):
    """An adapter's files, read and checked, before it is registered."""

    adapter: Adapter
    seconds: float


class AdapterLoader(Generic[T]):
    """Parses adapters one after another in a thread of its own, so that a step never waits for a disk.

    Everything but the parsing happens in the caller's thread: results are handed over by `poll` and `wait`.
    """

    def __init__(self, parse: Callable[[AdapterSource], Adapter]) -> None:
        """`parse` takes the adapter's folders and raises typed errors; it runs in the thread."""
        self._parse = parse
        self._jobs: queue.SimpleQueue[tuple[T, AdapterSource] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Loaded[T]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.num_in_flight = 0
        """Submitted and not yet handed over."""

    def submit(self, ticket: T, source: AdapterSource) -> None:
        """Start loading `source`; the result carries `ticket`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lora-loader", daemon=True)
            self._thread.start()
        self.num_in_flight += 1
        self._jobs.put((ticket, source))

    def poll(self) -> list[Loaded[T]]:
        """Loads that have ended since the last call, without waiting."""
        results: list[Loaded[T]] = []
        while self.num_in_flight and not self._done.empty():
            results.append(self._done.get())
            self.num_in_flight -= 1
        return results

    def wait(self, timeout: float) -> list[Loaded[T]]:
        """The same, but wait up to `timeout` seconds for the first when any is under way."""
        if not self.num_in_flight:
            return []
        try:
            first = self._done.get(timeout=timeout)
        except queue.Empty:
            return []
        self.num_in_flight -= 1
        return [first, *self.poll()]

    def close(self) -> None:
        """End the thread after the load under way; those not begun are dropped."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        while not self._jobs.empty():
            self._jobs.get()
        self._jobs.put(None)
        thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            ticket, source = job
            started = time.perf_counter()
            adapter, error = None, None
            try:
                adapter = self._parse(source)
            except OutriderError as caught:
                error = caught
            except Exception as caught:  # whatever an adapter's files do, the thread lives on for the others
                error = adapter_error(f"cannot load {shown(source.path)}: {type(caught).__name__}: {caught}")
            self._done.put(Loaded(ticket, adapter, error, time.perf_counter() - started))


class HostTier:
    """Parsed adapters by digest, least recently used first. Bounded by its owner, who knows which ones may go."""

    def __init__(self, max_adapters: int) -> None:
        self.max_adapters = max_adapters
        self._adapters: OrderedDict[bytes, Adapter] = OrderedDict()

    def __contains__(self, digest: object) -> bool:
        return digest in self._adapters

    def __len__(self) -> int:
        return len(self._adapters)

    def digests(self) -> list[bytes]:
        """Digests, least recently used first."""
        return list(self._adapters)

    def get(self, digest: bytes) -> Adapter | None:
        """The adapter, which becomes the most recently used; None when it is not here."""
        adapter = self._adapters.get(digest)
        if adapter is not None:
            self._adapters.move_to_end(digest)
        return adapter

    def put(self, adapter: Adapter) -> None:
        """Keep the adapter as the most recently used."""
        self._adapters[adapter.digest] = adapter
        self._adapters.move_to_end(adapter.digest)

    def drop(self, digest: bytes) -> None:
        """Forget the adapter, if it is here."""
        self._adapters.pop(digest, None)
