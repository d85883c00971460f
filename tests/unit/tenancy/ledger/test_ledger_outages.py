"""The ledger while the database is away, the journal is full or its disk fails."""

import asyncio
import contextlib
import errno
import os
import threading
import time

import pytest
from ledger_helpers import begun, finish, opened, record, rows, run, until

from outrider.platform.core.errors import OutriderError, OverloadedError
from outrider.platform.tenancy.database.connection import Database, DatabaseUnavailableError, parse_url
from outrider.platform.tenancy.database.migrations.upgrade import upgrade
from outrider.platform.tenancy.ledger import ledger as ledger_module
from outrider.platform.tenancy.ledger import writer as ledger_writer


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch):
    monkeypatch.setattr(ledger_writer, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(ledger_writer, "MAX_RETRY_SECONDS", 0.05)


class Outage:
    """Makes the database fail, as one that is stopped does."""

    def __init__(self, monkeypatch) -> None:
        self.on = False
        self.attempts = 0
        write, read = Database.write, Database.read

        def check(database):
            self.attempts += 1
            if self.on:
                raise DatabaseUnavailableError("it is away")

        def failing_write(database):
            check(database)
            return write(database)

        def failing_read(database):
            check(database)
            return read(database)

        monkeypatch.setattr(Database, "write", failing_write)
        monkeypatch.setattr(Database, "read", failing_read)


@pytest.fixture
def outage(monkeypatch) -> Outage:
    return Outage(monkeypatch)


def test_an_outage(sqlite, tmp_path, outage, monkeypatch):
    synced = []
    sync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(fd), sync(fd)))

    async def scenario():
        async with opened(sqlite, tmp_path) as ledger:
            await record(ledger, "before")
            assert not synced
            outage.on = True
            await record(ledger, "during")
            assert synced, "an answer was let go before its row was safe"
            await asyncio.gather(*(record(ledger, f"r{i}") for i in range(20)))
            assert ledger.status.database_is_away
            assert ledger.status.num_pending == 21
            assert ledger.status.lag_seconds > 0
            with pytest.raises(DatabaseUnavailableError):
                await ledger.tokens_between("acme", "", 0, 1e12)
            outage.on = False
            await until(lambda: ledger.status.num_pending == 0)
            assert not ledger.status.database_is_away
            assert len(rows(sqlite)) == 22
            assert await ledger.tokens_between("acme", "", 0, 1e12) == 22 * 7

    run(scenario)


def test_one_fsync_serves_many(sqlite, tmp_path, outage, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(fd), time.sleep(0.01)))

    async def scenario():
        async with opened(sqlite, tmp_path) as ledger:
            outage.on = True
            await record(ledger, "first")
            synced.clear()
            await asyncio.gather(*(record(ledger, f"r{i}") for i in range(50)))
            assert 1 <= len(synced) < 25

    run(scenario)


def test_attempts_are_spaced_while_the_database_is_away(sqlite, tmp_path, outage, monkeypatch):
    monkeypatch.setattr(ledger_writer, "FIRST_RETRY_SECONDS", 0.5)
    monkeypatch.setattr(ledger_writer, "MAX_RETRY_SECONDS", 0.5)

    async def scenario():
        async with opened(sqlite, tmp_path) as ledger:
            outage.on = True
            outage.attempts = 0
            for i in range(100):
                await record(ledger, f"r{i}")
            assert outage.attempts < 60
            outage.on = False

    run(scenario)
    assert len(rows(sqlite)) == 100


def test_a_database_that_hangs(sqlite, tmp_path, monkeypatch):
    """It says neither yes nor no: after a while the journal has to do, and then at once."""
    monkeypatch.setattr(ledger_module, "COMMIT_SECONDS", 0.05)
    write, hangs = Database.write, threading.Event()

    def slow(database):
        hangs.wait(30)
        return write(database)

    monkeypatch.setattr(Database, "write", slow)

    async def scenario():
        async with opened(sqlite, tmp_path) as ledger:
            await record(ledger, "r1")
            assert ledger.status.database_is_away
            waits = []
            wait = asyncio.wait
            monkeypatch.setattr(asyncio, "wait", lambda *a, **o: (waits.append(o), wait(*a, **o))[1])
            await record(ledger, "r2")
            assert waits == [], "every answer would wait that long"
            monkeypatch.setattr(ledger_module, "COUNT_SECONDS", 0.05)
            with pytest.raises(DatabaseUnavailableError, match="does not answer"):
                await ledger.tokens_between("acme", "", 0, 1e12)
            hangs.set()
            await until(lambda: ledger.status.num_pending == 0)

    run(scenario)
    assert rows(sqlite) == {"r1": "stop", "r2": "stop"}


def test_the_journal_is_kept_when_the_server_ends_during_an_outage(sqlite, tmp_path, outage):
    async def scenario():
        async with opened(sqlite, tmp_path) as ledger:
            outage.on = True
            await record(ledger, "r1")
        outage.on = False
        assert rows(sqlite) == {}
        async with opened(sqlite, tmp_path) as ledger:
            await until(lambda: ledger.status.num_pending == 0)
        assert rows(sqlite) == {"r1": "stop"}

    run(scenario)


def test_a_full_journal_refuses_new_requests_until_the_database_is_back(sqlite, tmp_path, outage):
    async def scenario():
        async with opened(sqlite, tmp_path, 1 << 16) as ledger:
            outage.on = True
            running, count = begun("running"), 0
            ledger.begin(running)
            with contextlib.suppress(OverloadedError):
                while True:
                    await record(ledger, f"r{count}")
                    count += 1
            assert count > 20
            assert "full" in ledger.problem
            ledger.end(finish(running))
            await ledger.committed(running)
            outage.on = False
            await until(lambda: ledger.problem is None)
            await record(ledger, "after")
        assert len(rows(sqlite)) == count + 2

    run(scenario)


def test_a_disk_that_cannot_be_synced_refuses_new_requests_until_it_can(sqlite, tmp_path, outage, monkeypatch):
    async def scenario():
        async with opened(sqlite, tmp_path) as ledger:
            outage.on = True

            def fails(fd):
                raise OSError(errno.EIO, "Input/output error")

            monkeypatch.setattr(os, "fdatasync", fails)
            await record(ledger, "running")  # its answer is not held back forever
            with pytest.raises(OverloadedError, match="Input/output"):
                ledger.begin(begun("refused"))
            assert ledger.problem is not None
            monkeypatch.setattr(os, "fdatasync", os.fsync)
            await until(lambda: ledger.problem is None)
            outage.on = False
            await record(ledger, "after")
        assert rows(sqlite) == {"running": "stop", "after": "stop"}

    run(scenario)


def test_a_journal_that_fails_at_the_end_still_leaves_a_row(sqlite, tmp_path, monkeypatch):
    async def scenario():
        async with opened(sqlite, tmp_path) as ledger:
            row = begun()
            ledger.begin(row)

            def fails(*args):
                raise OSError(errno.EIO, "Input/output error")

            monkeypatch.setattr(os, "pwrite", fails)
            ledger.end(finish(row))
            await ledger.committed(row)
            assert rows(sqlite) == {"r1": "stop"}

    run(scenario)


@pytest.mark.slow
def test_a_server_of_postgresql_that_is_stopped_and_started(make_postgresql, tmp_path, monkeypatch):
    server = make_postgresql()
    database = Database(parse_url(server.new_database()))
    upgrade(database)

    async def scenario():
        async with opened(database, tmp_path) as ledger:
            await record(ledger, "before")
            server.stop()
            await record(ledger, "during")
            assert ledger.status.database_is_away
            with pytest.raises(OutriderError):
                await ledger.tokens_between("acme", "", 0, 1e12)
            server.start()
            await until(lambda: ledger.status.num_pending == 0)
            await record(ledger, "after")
            assert set(rows(database)) == {"before", "during", "after"}

    run(scenario)
    database.close()
