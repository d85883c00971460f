"""Transfers between the tiers, by the loader's threads: disk to host memory, and host memory to device rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ...platform.core.errors import AdapterError, OutriderError
from ..adapter import AdapterSource
from ..device.pool import Allocation
from ..files.folder import AdapterFiles
from ..files.peft_config import adapter_error, shown
from ..reader.client import AdapterReader
from ..registry.mixes import Part, mix_adapters
from ..registry.versions import AdapterVersion
from .host_tier import HostTier
from .loader import Done, Loader
from .row_writer import HostEntry, Placer

AT_ONCE_BYTES = 4 << 20
"""Bytes that are copied in half a millisecond. A thread takes two or three, beside a step whose threads want every
core."""


class Read(NamedTuple):
    """An adapter's files have been read, or cannot be; a mix has been made, or cannot be."""

    version: AdapterVersion
    entry: HostEntry | None
    error: OutriderError | None
    seconds: float
    parts: tuple[Read, ...] = ()
    """Parts of a mix: its parts that were not in memory."""


class Written(NamedTuple):
    """An adapter's rows have been written, or could not be."""

    allocation: Allocation
    error: OutriderError | None


class Transfers:
    """Starts reads and writes, and tells when they have ended. Writes, which are short, do not wait for reads."""

    def __init__(self, files: AdapterFiles, placer: Placer, *, reader_process: bool = False) -> None:
        """`reader_process`: another process reads what it can instead of the calling thread."""
        self._files = files
        self._placer = placer
        self.reader = AdapterReader(files, placer.layouts) if reader_process else None
        self._loader: Loader[AdapterVersion | Allocation] = Loader()
        self.num_reads = 0
        """Under way."""

    def start_reader(self) -> None:
        """Start the reader process, if there is to be one, before it is needed."""
        if self.reader is not None:
            self.reader.start()

    def step(self, counts: Iterable[int]) -> None:
        """A step begins, with rows of so many tokens."""
        if self.reader is not None:
            self.reader.signal.step(counts)

    def reading(self, source: AdapterSource) -> Callable[[], HostEntry]:
        """The work of reading and checking an adapter, for any thread. AdapterError comes out of it."""

        def read() -> HostEntry:
            try:
                ready = self.reader.read(source) if self.reader is not None else None
                if ready is not None:
                    return self._placer.adopt(*ready)
                return self._placer.pack(self._files.read(source))
            except OutriderError:
                raise
            except Exception as error:  # out of memory, for one
                what = f"{type(error).__name__}: {error}"
                raise adapter_error(f"cannot load {shown(source.path)}: {what}") from error

        return read

    def read(self, version: AdapterVersion, host: HostTier) -> None:
        """Read the version's files; of a mix those of the parts that are not in `host`."""
        version.loading = True
        self.num_reads += 1
        if version.parts:
            held = [host.get(part.version.digest) for part in version.parts]
            self._loader.submit(version, lambda: self._mix(version, held), f"load {shown(version.name)}")
        else:
            self._loader.submit(version, self.reading(version.source), f"load {shown(version.path)}")

    def _mix(self, mix: AdapterVersion, held: Sequence[HostEntry | None]) -> Read:
        """Read the parts that are not `held`, and make the mix. The loader knows the seconds."""
        read: list[Read] = []
        found: list[Part] = []
        for (version, weight), entry in zip(mix.parts, held, strict=True):
            if entry is None:
                started = time.perf_counter()
                try:
                    entry = self.reading(version.source)()
                except AdapterError as error:
                    read.append(Read(version, None, error, time.perf_counter() - started))
                    failure = AdapterError(f"adapter '{version.name}': {error}", param=error.param)
                    return Read(mix, None, failure, 0.0, (*read,))
                read.append(Read(version, entry, None, time.perf_counter() - started))
            found.append(Part(version.name, entry.adapter, weight))
        try:
            return Read(mix, self._placer.pack(mix_adapters(found)), None, 0.0, (*read,))
        except AdapterError as error:
            return Read(mix, None, error, 0.0, (*read,))

    def write(self, allocation: Allocation, entry: HostEntry) -> None:
        """Write an adapter's rows: a small one's at once, where rows are in host memory."""
        work, what = self._placer.writing(allocation, entry), "write the adapter to the device"
        if not self._placer.on_gpu and entry.num_bytes <= AT_ONCE_BYTES:
            self._loader.do(allocation, work, what)
        else:
            self._loader.submit(allocation, work, what, short=True)

    def poll(self) -> Iterator[Read | Written]:
        """Transfers that have ended since the last call, without waiting. Each counts as under way until its turn: what
        the one before it changes must not drop its version."""
        return map(self._ended, self._loader.poll() if self._loader.num_in_flight else ())

    def wait(self, timeout: float) -> Iterator[Read | Written]:
        """Wait up to `timeout` seconds for the first when any is under way."""
        return map(self._ended, self._loader.wait(timeout))

    def _ended(self, done: Done[AdapterVersion | Allocation]) -> Read | Written:
        if isinstance(done.ticket, Allocation):
            return Written(done.ticket, done.error)
        self.num_reads -= 1
        done.ticket.loading = False
        if isinstance(done.result, Read):
            return done.result._replace(seconds=done.seconds)
        return Read(done.ticket, done.result, done.error, done.seconds)

    def close(self) -> None:
        """Stop the reader process and the threads."""
        if self.reader is not None:
            self.reader.close()
        self._loader.close()
