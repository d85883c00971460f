"""Transfers between the tiers, in the loader threads: disk to host memory, and host memory to device rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...platform.core.errors import AdapterError, OutriderError
from ..adapter import Adapter
from ..device.pool import Allocation
from ..files.errors import adapter_error, quote_path
from ..files.folder import AdapterFiles
from ..reader.reader_client import AdapterReader
from ..registry.mixes import check_mixable, mix_adapters
from ..registry.versions import AdapterVersion
from .host_tier import AdapterHostTier
from .loader_threads import MAX_BYTES, LoaderThreads
from .row_writer import RowWriter

AT_ONCE_BYTES = 4 << 20
"""Largest adapter that the stepping thread copies itself. That takes half a millisecond; a thread takes two or three,
alongside a step whose threads use every core."""


class ReadDone(NamedTuple):
    """A finished read, or construction of a mix."""

    version: AdapterVersion
    result: Adapter | OutriderError
    seconds: float
    parts: tuple[ReadDone, ...] = ()
    """Reads of those parts of a mix that were not in memory."""


class WriteDone(NamedTuple):
    """A finished write to device rows."""

    allocation: Allocation
    error: OutriderError | None


@contextlib.contextmanager
def _typed_errors(what: str) -> Iterator[None]:
    """Turn every exception into an OutriderError: one adapter that takes too much memory must not stop a thread."""
    try:
        yield
    except OutriderError:
        raise
    except Exception as error:
        raise adapter_error(f"cannot {what}: {type(error).__name__}: {error}") from error


class Transfers:
    """Starts reads and writes, and reports their end. Writes, which are short, do not wait for reads."""

    def __init__(
        self,
        files: AdapterFiles,
        writer: RowWriter,
        *,
        num_threads: int = 1,
        max_bytes: int | None = None,
        reader_process: bool = False,
    ) -> None:
        """Read up to `num_threads` adapters at once, of `max_bytes` together; None: of `MAX_BYTES`. With
        `reader_process` another process replaces one of the threads for the adapters that it can read."""
        self._files = files
        self._writer = writer
        self.reader = AdapterReader(files) if reader_process else None
        most = MAX_BYTES if max_bytes is None else min(max_bytes, MAX_BYTES)
        self._threads: LoaderThreads[ReadDone | WriteDone] = LoaderThreads(num_threads, most)
        self.num_reads = 0
        """Reads of `read` in flight, each with reserved room in host memory."""

    def read(self, version: AdapterVersion, host: AdapterHostTier) -> None:
        """Read the version's files, or of a mix those of the parts that are not in `host`."""
        version.loading = True
        self.num_reads += 1
        self.start_read(version, [host.get(part.version.digest) for part in version.parts])

    def start_read(self, version: AdapterVersion, held: Sequence[Adapter | None] = ()) -> None:
        """Read as `read` does, but reserve no room: the version is that of a call."""
        if version.parts:
            unread = [part.version.source for part, adapter in zip(version.parts, held, strict=True) if adapter is None]
        else:
            unread = [version.source]
        self._threads.submit(
            lambda: self._mix(version, held) if version.parts else self._read_version(version),
            num_bytes=lambda: sum(map(self._files.num_bytes, unread)),
        )

    def _read_version(self, version: AdapterVersion) -> ReadDone:
        source, started = version.source, time.perf_counter()
        try:
            with _typed_errors(f"load {quote_path(source.folder.label)}"):
                found = self.reader.read(source) if self.reader is not None else None
                found = self._writer.prepare(found or self._files.read(source))
        except OutriderError as error:
            return ReadDone(version, error, time.perf_counter() - started)
        seconds = time.perf_counter() - started
        return ReadDone(version, replace(found, load_seconds=seconds), seconds)

    def _mix(self, mix: AdapterVersion, held: Sequence[Adapter | None]) -> ReadDone:
        """Read the parts that are not `held`, and make the mix."""
        started = time.perf_counter()
        reads: list[ReadDone] = []
        found: list[tuple[Adapter, float]] = []

        def done(result: Adapter | OutriderError) -> ReadDone:
            return ReadDone(mix, result, time.perf_counter() - started, tuple(reads))

        for (version, weight), adapter in zip(mix.parts, held, strict=True):
            if adapter is None:
                reads.append(self._read_version(version))
                result = reads[-1].result
                if isinstance(result, AdapterError):
                    return done(AdapterError(f"adapter '{version.name}': {result}", param=result.param))
                if isinstance(result, OutriderError):
                    return done(result)
                adapter = result
            found.append((adapter, weight))
        try:
            with _typed_errors(f"load {quote_path(mix.name)}"):
                for (version, _), (adapter, _) in zip(mix.parts, found, strict=True):
                    check_mixable(version.name, adapter)
                adapter = self._writer.prepare(mix_adapters(found))
        except OutriderError as error:
            return done(error)
        return done(replace(adapter, load_seconds=time.perf_counter() - started))

    def write(self, allocation: Allocation, adapter: Adapter) -> None:
        """Write an adapter's rows: a small adapter at once, if rows are in host memory."""
        write, what = self._writer.writing(allocation, adapter), "write the adapter to the device"

        def job() -> WriteDone:
            try:
                with _typed_errors(what):
                    write()
            except OutriderError as error:
                return WriteDone(allocation, error)
            return WriteDone(allocation, None)

        if self._writer.on_gpu or adapter.num_bytes > AT_ONCE_BYTES:
            self._threads.submit_short(job)
            return
        result = WriteDone(allocation, adapter_error(f"cannot {what}: interrupted"))
        try:
            result = job()
        finally:  # after a KeyboardInterrupt no rows stay reserved without a write
            self._threads.add_result(result)

    def poll(self) -> Iterator[ReadDone | WriteDone]:
        """Return the transfers that have ended since the last call, without waiting.

        Each counts as in flight until it is returned: handling the one before must not drop its version.
        """
        return map(self._ended, self._threads.poll() if self._threads.num_in_flight else ())

    def wait(self, timeout: float) -> Iterator[ReadDone | WriteDone]:
        """Wait up to `timeout` seconds for the first transfer to end, unless none is in flight."""
        return map(self._ended, self._threads.wait(timeout))

    def _ended(self, done: ReadDone | WriteDone) -> ReadDone | WriteDone:
        if isinstance(done, ReadDone) and done.version.loading:
            self.num_reads -= 1
            done.version.loading = False
        return done

    def close(self) -> None:
        """Stop the reader process and the threads."""
        if self.reader is not None:
            self.reader.close()
        self._threads.close()
