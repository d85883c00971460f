"""The database goes away and comes back."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fault_helpers import Accounts


@pytest.fixture(scope="module")
def postgresql_server(make_postgresql):
    """One that is stopped here."""
    return make_postgresql()


@pytest.fixture(scope="module")
def accounts(postgresql_server):
    accounts = Accounts(postgresql_server.new_database())
    yield accounts
    accounts.close()


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    return ("--journal", str(tmp_path_factory.mktemp("journal")), "--journal-max-bytes", str(1 << 20))


@pytest.fixture(scope="module")
def server(start, options):
    return start(*options)


def test_database_stopped_under_load(server, accounts, postgresql_server, load, check_served, outcome):
    """Known keys are served; rows that the database misses are in the journal, and follow."""
    before = load(server, "before", 4, max_tokens=900)  # they end when it has stopped
    before.wait_until_all_stream(server)
    postgresql_server.stop()
    during = load(server, "during", 8, max_tokens=30)
    during.join()
    before.join()
    assert set(during.status.values()) == {200}
    assert len(set(during.texts().values())) == 1
    assert len(set(before.texts().values())) == 1
    assert server.http().get("/health").status_code == 200
    assert server.metric("ledger_database_up") == 0
    assert server.metric("ledger_pending_rows") == 12
    postgresql_server.start()
    server.wait_for(lambda: server.metric("ledger_pending_rows") == 0)
    for prefix, count, tokens in (("before", 4, 900), ("during", 8, 30)):
        rows = accounts.by_client_id(prefix)
        assert len(rows) == count
        assert {(row["status"], row["output_tokens"]) for row in rows.values()} == {("length", tokens)}
    check_served(server)
    outcome("12 requests were answered without it; 12 rows followed when it was back")


def test_journal_full_while_the_database_is_away(server, accounts, postgresql_server, load, outcome):
    """Bounded: new requests are refused before anything would go unaccounted; running ones finish."""
    running = load(server, "running", 2, max_tokens=1200)
    running.wait_until_all_stream(server)
    postgresql_server.stop()
    headers = {"Authorization": f"Bearer {accounts.key}"}
    with server.http(headers=headers) as http:

        def fill(worker: int) -> tuple[int, httpx.Response]:
            """Until one is refused."""
            for number in range(1000):
                name = f"fill-{worker}-{number}-{'x' * 200}"
                answer = http.post(
                    "/v1/completions", json={"prompt": "All", "max_tokens": 1}, headers={"X-Request-Id": name}
                )
                if answer.status_code != 200:
                    return number, answer
            raise AssertionError("the journal has no end")

        with ThreadPoolExecutor(6) as pool:
            fillers = list(pool.map(fill, range(6)))
        assert http.get("/health").json()["status"] == "ledger_unavailable"
    answered = sum(number for number, _ in fillers)
    for _, refused in fillers:
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "OverloadedError"), refused.text
    running.join()
    assert len(set(running.texts().values())) == 1
    postgresql_server.start()
    server.wait_for(lambda: server.metric("ledger_pending_rows") == 0)
    assert len(accounts.by_client_id("fill")) == answered
    assert len(accounts.by_client_id("running")) == 2
    assert server.http().get("/health").status_code == 200
    outcome(f"{answered} requests filled the journal, then 503; 2 running finished; all rows followed")


def test_server_killed_while_the_database_is_away(start, server, options, accounts, postgresql_server, load, outcome):
    """Both at once: the next server, started when the database is back, has it all in its journal. Ends the first."""
    postgresql_server.stop()
    load(server, "ended", 3, max_tokens=5).join()
    lost = load(server, "cut", 2, max_tokens=1500)
    lost.wait_until_all_stream(server)
    server.process.kill()
    lost.join()
    postgresql_server.start()
    again = start(*options)
    again.wait_for(lambda: len(accounts.by_client_id("cut")) == 2 and len(accounts.by_client_id("ended")) == 3)
    assert {row["status"] for row in accounts.by_client_id("ended").values()} == {"length"}
    assert {row["status"] for row in accounts.by_client_id("cut").values()} == {"lost"}
    assert again.stop() == 0
    outcome("3 finished rows 'length' and 2 cut ones 'lost' were replayed from the journal")
