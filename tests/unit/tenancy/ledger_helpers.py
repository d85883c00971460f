"""Helpers of the ledger's tests; imported by its name."""

import asyncio
from contextlib import asynccontextmanager

from sqlalchemy import select

from outrider.platform.tenancy.database.schema import usage
from outrider.platform.tenancy.ledger.ledger import Ledger
from outrider.platform.tenancy.ledger.usage_row import UsageRow

BYTES = 1 << 20


def begun(name="r1", **fields) -> UsageRow:
    fixed = {
        "tenant": "acme",
        "key_id": "k1",
        "endpoint": "/v1/completions",
        "received_at": 100.0,
        "finished_at": 100.0,
    }
    return UsageRow(request_id=name, **(fixed | fields))


def finish(row: UsageRow, status="stop", tokens=7) -> UsageRow:
    row.status, row.output_tokens, row.finished_at = status, tokens, 101.0
    return row


def rows(database) -> dict[str, str]:
    """(request id -> status) in the database."""
    with database.read() as connection:
        return {row.request_id: row.status for row in connection.execute(select(usage))}


@asynccontextmanager
async def opened(database, tmp_path, max_bytes=BYTES):
    ledger = await Ledger.open(database, tmp_path / "journal", max_bytes)
    try:
        yield ledger
    finally:
        await ledger.close()


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def record(ledger, name, **fields) -> None:
    row = begun(name, **fields)
    ledger.begin(row)
    ledger.end(finish(row))
    await ledger.committed(row)
