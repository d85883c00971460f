"""Times, tables and sums."""

import pytest
from sqlalchemy import insert

from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.tenancy.database.schema import usage
from outrider.platform.tenancy.ledger import reports
from outrider.platform.tenancy.ledger.csv_table import to_csv
from outrider.platform.tenancy.ledger.reports import UsageFilter, list_requests, parse_groups, sum_usage
from outrider.platform.tenancy.times import format_time, parse_duration, parse_time

DAY = 86400.0
START = 1767225600.0  # 2026-01-01


# --- times ---


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1767225600", START), ("1767225600.5", START + 0.5), ("2026-01-01", START), ("2026-01-01T00:00Z", START),
        ("2026-01-01T01:00+01:00", START), ("2026-01-01 00:00:00", START), ("1970-01-01", 0.0),
    ],
)  # fmt: skip
def test_parse_time(text, seconds):
    assert parse_time(text, "from") == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "2026-13-01", "1960-01-01", "1e30", "9" * 400, "2026", "nan", "inf", "1_0"]
)
def test_times_that_are_none(text):
    with pytest.raises(InvalidRequestError) as refused:
        parse_time(text, "from")
    assert refused.value.param == "from"


def test_durations_and_back():
    durations = [parse_duration(text) for text in ("90s", "2m", "3h", "1d", "2w", "1y", "d", "")]
    assert durations == [90, 120, 10800, DAY, 14 * DAY, None, None, None]
    assert format_time(START + 0.9) == "2026-01-01T00:00:00Z"
    assert format_time(None) == ""


# --- CSV ---


def test_csv():
    rows = [{"a": 'x,"y"\nz', "b": -1.5}, {"a": None, "b": 3}]
    assert to_csv(["a", "b"], rows) == 'a,b\r\n"x,""y""\nz",-1.5\r\n,3\r\n'


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx"])
def test_csv_holds_no_formulas(text):
    assert to_csv(["a"], [{"a": text}]).splitlines()[1].startswith("'")


# --- sums ---


def row(number: int, **values) -> dict:
    return {
        "request_id": f"r{number}", "tenant": "acme", "key_id": "key-1", "endpoint": "/v1/completions", "adapter": "",
        "prompt_tokens": 10, "cached_tokens": 4, "output_tokens": 3, "drafted_tokens": 2, "accepted_tokens": 1,
        "received_at": START, "finished_at": START + number * DAY, "status": "stop",
    } | values  # fmt: skip


@pytest.fixture
def ledger(database):
    rows = [
        row(0),
        row(1, adapter="sql"),
        row(2, tenant="other", key_id="key-2"),
        row(40, adapter="sql", status="abort"),
    ]
    with database.write() as connection:
        connection.execute(insert(usage), rows)
    return database


def counts(rows: list[dict], *names: str) -> list[tuple]:
    return [tuple(row[name] for name in names) for row in rows]


def test_sum_usage(ledger):
    (total,) = sum_usage(ledger, (), UsageFilter())
    assert total == {
        "requests": 4, "prompt_tokens": 40, "cached_tokens": 16, "output_tokens": 12, "drafted_tokens": 8,
        "accepted_tokens": 4,
    }  # fmt: skip
    assert all(type(value) is int for value in total.values())


def test_groups(ledger):
    rows = sum_usage(ledger, ("tenant", "adapter"), UsageFilter())
    assert counts(rows, "tenant", "adapter", "requests") == [("acme", "", 1), ("acme", "sql", 2), ("other", "", 1)]
    assert list(rows[0])[:3] == ["tenant", "adapter", "requests"]
    for group in ("key", "model", "endpoint", "status"):
        assert sum(r["requests"] for r in sum_usage(ledger, (group,), UsageFilter())) == 4


def test_groups_of_time(ledger):
    assert counts(sum_usage(ledger, ("day",), UsageFilter()), "day", "requests") == [
        ("2026-01-01", 1), ("2026-01-02", 1), ("2026-01-03", 1), ("2026-02-10", 1),
    ]  # fmt: skip
    assert counts(sum_usage(ledger, ("month",), UsageFilter()), "month", "requests") == [("2026-01", 3), ("2026-02", 1)]
    assert sum_usage(ledger, ("hour",), UsageFilter())[0]["hour"] == "2026-01-01T00:00Z"


@pytest.mark.parametrize(
    ("which", "requests"),
    [
        ({"tenant": "acme"}, 3), ({"tenant": "nobody"}, 0), ({"key": "key-2"}, 1), ({"adapter": "sql"}, 2),
        ({"adapter": ""}, 2), ({"start": START + DAY}, 3), ({"end": START + DAY}, 1),
        ({"start": START + DAY, "end": START + 2 * DAY, "tenant": "acme"}, 1),
    ],
)  # fmt: skip
def test_filters(ledger, which, requests):
    (total,) = sum_usage(ledger, (), UsageFilter(**which))
    assert total["requests"] == requests
    assert len(list_requests(ledger, UsageFilter(**which))) == requests


def test_requests_are_listed_newest_first(ledger):
    rows = list_requests(ledger, UsageFilter(), 2)
    assert [row["request_id"] for row in rows] == ["r40", "r2"]
    assert set(rows[0]) == set(usage.c.keys())
    for limit in (0, 1001):
        with pytest.raises(InvalidRequestError):
            list_requests(ledger, UsageFilter(), limit)


def test_no_sum_is_cut_off_in_silence(ledger, monkeypatch):
    monkeypatch.setattr(reports, "MAX_ROWS", 2)
    with pytest.raises(InvalidRequestError, match="more than 2 rows"):
        sum_usage(ledger, ("day",), UsageFilter())


def test_group_names():
    assert parse_groups("tenant, adapter,tenant", "by") == ("tenant", "adapter")
    assert parse_groups("", "by") == ()
    with pytest.raises(InvalidRequestError, match="by: must be some of"):
        parse_groups("tenant,name", "by")
