"""Exactly one row a request, whatever becomes of it and of the process."""

import asyncio
import os

from ledger_helpers import BYTES, begun, finish, opened, record, rows, run, until
from sqlalchemy import select, text

from outrider.platform.tenancy.database.schema import usage
from outrider.platform.tenancy.ledger.journal import Journal
from outrider.platform.tenancy.ledger.usage_row import UsageRow


def test_every_column_arrives(database, tmp_path):
    row = UsageRow(
        request_id="r1", client_request_id="mine", tenant="acme", key_id="k1", endpoint="/v1/completions", model="m",
        adapter="a+b", adapter_digest="d" * 64, prompt_tokens=1, cached_tokens=2, output_tokens=3, drafted_tokens=4,
        accepted_tokens=5, received_at=1.25, first_token_at=2.25, finished_at=3.25, status="length", error_type="",
    )  # fmt: skip

    async def scenario():
        async with opened(database, tmp_path) as ledger:
            ledger.begin(row)
            ledger.end(row)
            await ledger.committed(row)
            with database.read() as connection:
                assert connection.execute(select(usage)).one()._asdict() == row.values()

    run(scenario)


def test_rows_that_end_together_share_a_commit(database, tmp_path):
    async def scenario():
        async with opened(database, tmp_path) as ledger:
            await asyncio.gather(*(record(ledger, f"r{i}") for i in range(200)))
            assert len(rows(database)) == 200
            assert ledger.status.num_committed == 200
            assert ledger.status.num_commits < 100
            assert ledger.status.num_pending == 0

    run(scenario)


def test_whatever_text_a_row_has_the_database_takes_it(database, tmp_path):
    async def scenario():
        async with opened(database, tmp_path) as ledger:
            await record(ledger, "r1", model="\0null", adapter="x" * 5000, client_request_id="\ud800 surrogate é 🦊")
            assert rows(database) == {"r1": "stop"}

    run(scenario)


def test_only_the_first_end_counts(sqlite, tmp_path):
    async def scenario():
        async with opened(sqlite, tmp_path) as ledger:
            row = begun()
            ledger.begin(row)
            ledger.end(finish(row))
            other = begun()
            ledger.end(finish(other, "abort"))
            ledger.checkpoint(other)
            await ledger.committed(row)
            await ledger.committed(other)  # nothing to wait for
        assert rows(sqlite) == {"r1": "stop"}

    run(scenario)


def test_a_dropped_request_leaves_no_row(sqlite, tmp_path):
    async def scenario():
        async with opened(sqlite, tmp_path) as ledger:
            row = begun()
            ledger.begin(row)
            ledger.drop(row)
            ledger.end(finish(row))
        assert rows(sqlite) == {}

    run(scenario)


def test_a_waiting_request_may_be_cancelled(sqlite, tmp_path):
    async def scenario():
        async with opened(sqlite, tmp_path) as ledger:
            row = begun()
            ledger.begin(row)
            ledger.end(finish(row))
            waiting = asyncio.create_task(ledger.committed(row))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert rows(sqlite) == {"r1": "stop"}

    run(scenario)


def test_requests_that_run_at_the_end_are_lost(sqlite, tmp_path):
    async def scenario():
        async with opened(sqlite, tmp_path) as ledger:
            ledger.begin(begun())
        assert rows(sqlite) == {"r1": "lost"}

    run(scenario)


# --- crashes ---


def test_a_journal_is_replayed_once(database, tmp_path):
    journal = Journal(tmp_path / "journal", BYTES)
    journal.begin(begun("running"))
    journal.update(begun("running", output_tokens=3))
    journal.begin(begun("ended"))
    journal.end(finish(begun("ended")))
    journal._let_go()  # as kill -9 does

    async def scenario():
        async with opened(database, tmp_path):
            await until(lambda: len(rows(database)) == 2)
        assert rows(database) == {"running": "lost", "ended": "stop"}
        assert os.listdir(tmp_path / "journal") == ["lock"]

    run(scenario)
    with database.read() as connection:
        assert connection.scalar(select(usage.c.output_tokens).where(usage.c.request_id == "running")) == 3


def test_a_journal_that_the_database_has_already_changes_nothing(database, tmp_path):
    """The process died between the commit and forgetting."""

    async def scenario():
        async with opened(database, tmp_path) as ledger:
            await record(ledger, "r1")
        journal = Journal(tmp_path / "journal", BYTES)
        journal.begin(begun("r1"))  # says "lost"
        journal._let_go()
        async with opened(database, tmp_path) as ledger:
            await until(lambda: ledger.status.num_pending == 0)
        assert rows(database) == {"r1": "stop"}

    run(scenario)


def test_a_row_that_the_database_refuses_does_not_hold_up_the_others(database, tmp_path, caplog):
    with database.write() as connection:
        connection.execute(text("CREATE UNIQUE INDEX strange ON usage (client_request_id, tenant)"))

    async def scenario():
        async with opened(database, tmp_path) as ledger:
            await asyncio.gather(*(record(ledger, f"r{i}", client_request_id=str(i // 2)) for i in range(4)))
            assert sorted(status for status in rows(database).values()) == ["stop", "stop"]
            assert ledger.status.num_pending == 0

    try:
        run(scenario)
    finally:
        with database.write() as connection:  # other tests get the same tables
            connection.execute(text("DROP INDEX strange"))
    assert sum("refuses a row" in message for message in caplog.messages) == 2


def test_a_number_that_is_too_large_for_the_database_does_not_hold_up_the_others(database, tmp_path, caplog):
    """PostgreSQL refuses it as bad data, SQLite takes it."""

    async def scenario():
        async with opened(database, tmp_path) as ledger:
            await asyncio.gather(*(record(ledger, f"r{i}", prompt_tokens=2**31 * (i == 1)) for i in range(3)))
            assert {"r0", "r2"} <= rows(database).keys()
            assert ledger.status.num_pending == 0
            assert not ledger.status.database_is_away

    run(scenario)
    assert any("refuses a row" in message for message in caplog.messages) is not database.is_sqlite


# --- what has been used ---


def test_tokens_between(database, tmp_path):
    async def scenario():
        async with opened(database, tmp_path) as ledger:
            for name, tenant, key, end in (
                ("a", "acme", "k1", 10.0),
                ("b", "acme", "k2", 20.0),
                ("c", "other", "k3", 10.0),
                ("d", "acme", "k1", 30.0),
            ):
                row = begun(name, tenant=tenant, key_id=key)
                ledger.begin(row)
                row.prompt_tokens, row.output_tokens, row.finished_at = 100, 5, end
                ledger.end(row)
            assert await ledger.tokens_between("acme", "", 0, 30) == 210
            assert await ledger.tokens_between("acme", "k1", 0, 31) == 210
            assert await ledger.tokens_between("acme", "k1", 10.5, 31) == 105
            assert await ledger.tokens_between("nobody", "", 0, 100) == 0

    run(scenario)


def test_an_answer_holds_all_that_ended_before_and_nothing_else(sqlite, tmp_path):
    async def scenario():
        async with opened(sqlite, tmp_path) as ledger:
            answers = []
            for number in range(50):
                row = begun(f"r{number}")
                ledger.begin(row)
                ledger.end(finish(row, tokens=1))
                answers.append(asyncio.create_task(ledger.tokens_between("acme", "", 0, 1e12)))
                await asyncio.sleep(0)
            assert await asyncio.gather(*answers) == list(range(1, 51))

    run(scenario)
