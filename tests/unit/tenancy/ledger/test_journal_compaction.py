"""Compaction: the old copy is deleted when the new one is on the disk, and no request waits for that."""

import asyncio
import errno
import os
import shutil
import threading

import pytest
from ledger_helpers import begun, finish, opened, rows, run, until

from .test_journal import BYTES, Journal, ended, found, on_disk, row, sync


def compacted(journal) -> None:
    """Write until lines of old segments have been copied."""
    number = 0
    while not journal.needs_sync:
        for name in (f"keep{number}", f"gone{number}", f"more{number}"):
            journal.begin(row(name))
            journal.end(ended(name))
        journal.forget([f"gone{number}", f"more{number}"])
        number += 1


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "journal", BYTES)


def no_disk(fd):
    raise AssertionError("the disk was waited for")


def files(journal) -> set[str]:
    return {path.name for path in journal.folder.glob("*.journal")}


def test_the_old_copy_stays_until_the_new_one_is_on_the_disk(journal, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", no_disk)
        patch.setattr(os, "fsync", no_disk)
        compacted(journal)
        waiting = [segment.path.name for segment in journal._segments[:-1] if not segment.num_live]
        assert waiting
        journal.delete_dead()
        assert set(waiting) <= files(journal)
    live, newest = set(journal._states), journal._segments[-1]
    assert journal._states["keep0"].segment is newest, "it was copied"
    # A power cut now: what the newest segment holds has not reached the disk.
    shutil.copytree(journal.folder, tmp_path / "cut")
    (tmp_path / "cut" / newest.path.name).write_bytes(b"\0" * 1000)
    assert "keep0" in found(Journal(tmp_path / "cut", BYTES))
    before = journal.num_bytes
    sync(journal)
    assert not set(waiting) & files(journal)
    assert not journal.needs_sync
    assert on_disk(journal) == journal.num_bytes < before
    assert set(found(_reopened(journal))) >= live


def test_a_disk_that_fails_keeps_the_old_copy(journal, monkeypatch):
    def fails(fd):
        raise OSError(errno.EIO, "Input/output error")

    compacted(journal)
    kept = files(journal)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fails)
        with pytest.raises(OSError, match="Input/output"):
            journal.sync()()
        journal.delete_dead()
    assert files(journal) == kept
    assert journal.needs_sync
    sync(journal)
    assert files(journal) < kept


def test_copies_that_land_in_several_segments(journal, monkeypatch):
    """The newest one fails in the middle: the old copy waits for both."""
    journal.begin(row("a"))
    journal.end(ended("a"))
    journal.begin(row("b"))
    journal.end(ended("b"))
    journal._rotate(BYTES // 8)
    old, newest = journal._segments
    write, written = os.pwrite, []

    def fails_once(fd, data, offset):
        written.append(fd)
        return 3 if len(written) == 2 else write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", fails_once)
    journal._compact(0)
    assert [segment for segment, _ in old.copies] == [newest, journal._segments[-1]] != [newest, newest]
    newest.synced = newest.offset
    journal.delete_dead()
    assert old in journal._segments
    sync(journal)
    assert old not in journal._segments
    assert set(found(_reopened(journal))) == {"a", "b"}


def _reopened(journal) -> Journal:
    journal._let_go()
    return Journal(journal.folder, BYTES)


# --- in the ledger ---


class SlowDisk:
    """A disk that answers on command; it records the threads that waited for it."""

    def __init__(self, monkeypatch) -> None:
        self.answers = threading.Event()
        self.waiting = threading.Event()
        self.threads: set[int] = set()
        monkeypatch.setattr(os, "fdatasync", self._wait)

    def _wait(self, fd) -> None:
        self.threads.add(threading.get_ident())
        self.waiting.set()
        assert threading.get_ident() == threading.main_thread().ident or self.answers.wait(30)


def test_a_slow_disk_delays_no_request(sqlite, tmp_path, monkeypatch):
    """The database takes the rows; the journal alone is compacted around requests that run long."""
    disk = SlowDisk(monkeypatch)

    async def scenario():
        async with opened(sqlite, tmp_path, 1 << 17) as ledger:
            journal = ledger._journal
            for i in range(10_000):
                if journal.needs_sync:
                    break
                long = begun(f"long{i}")
                ledger.begin(long)
                if i >= 20:
                    ledger.end(finish(long))
                if i % 50 == 49:
                    await until(lambda: ledger.status.num_pending == 0)
            assert journal.needs_sync
            await until(disk.waiting.is_set)
            waiting = journal.num_bytes
            short = begun("meanwhile")
            ledger.begin(short)
            ledger.end(finish(short))
            await ledger.committed(short)
            assert not disk.answers.is_set(), "it was waited for"
            assert journal.num_bytes >= waiting
            disk.answers.set()
            await until(lambda: not journal.needs_sync)
            assert journal.num_bytes < waiting

    run(scenario)
    assert threading.get_ident() not in disk.threads
    assert rows(sqlite)["meanwhile"] == "stop"


def test_journal_writes_do_not_queue_behind_other_work(sqlite, tmp_path, monkeypatch):
    """Long prompts are tokenized in the loop's own threads, as many as there are."""

    async def scenario():
        async with opened(sqlite, tmp_path) as ledger:
            ledger._is_away = True
            free = threading.Event()
            others = [asyncio.ensure_future(asyncio.to_thread(free.wait, 30)) for _ in range(64)]
            try:
                row = begun()
                ledger.begin(row)
                await asyncio.wait_for(ledger._sync(), 10)
                assert not free.is_set()
                ledger.end(finish(row))
            finally:
                free.set()
                await asyncio.gather(*others)

    run(scenario)
