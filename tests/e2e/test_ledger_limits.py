"""Limits and the ledger with a real engine, as the openai client and the database see them."""

import signal

import openai
import pytest
from sqlalchemy import select

from outrider.platform.tenancy.accounts.principal import Limits
from outrider.platform.tenancy.accounts.records import Tenant
from outrider.platform.tenancy.database.connection import Database, parse_url
from outrider.platform.tenancy.database.migrations.upgrade import upgrade
from outrider.platform.tenancy.database.schema import usage
from outrider.platform.tenancy.database.store import Store

MESSAGES = [{"role": "user", "content": "Name three colours."}]


class Accounts:
    def __init__(self, url: str) -> None:
        self.database = Database(parse_url(url))
        upgrade(self.database)
        self.store = Store(self.database)

    def key(self, tenant: str, **limits) -> str:
        self.store.create_tenant(Tenant(name=tenant, limits=Limits(**limits)))
        return self.store.create_key(tenant)[1]

    def rows(self, tenant: str) -> list:
        with self.database.read() as connection:
            query = select(usage).where(usage.c.tenant == tenant).order_by(usage.c.finished_at)
            return connection.execute(query).all()


@pytest.fixture(scope="module")
def accounts(tmp_path_factory):
    accounts = Accounts(f"sqlite:///{tmp_path_factory.mktemp('accounts') / 'outrider.db'}")
    yield accounts
    accounts.database.close()


@pytest.fixture(scope="module")
def keys(accounts) -> dict[str, str]:
    """Keys of tenants that exist when the server starts."""
    return {
        "free": accounts.key("free"),
        "slow": accounts.key("slow", requests_per_minute=2, tokens_per_minute=5000),
        "poor": accounts.key("poor", token_budget=60, budget_period="month"),
        "narrow": accounts.key("narrow", max_concurrent_requests=1, max_output_tokens=20),
    }


@pytest.fixture(scope="module")
def server(start_server, accounts, keys, fixed_drafts):
    url = accounts.database.url.render_as_string(hide_password=False)
    server = start_server("--database", url, "--shutdown-timeout", "0", *fixed_drafts)
    yield server
    server.stop()


def test_429_as_the_openai_client_sees_it(server, keys):
    client = server.client(keys["slow"])
    answer = client.chat.completions.with_raw_response.create(model="outrider-demo", messages=MESSAGES, max_tokens=5)
    assert answer.headers["x-ratelimit-limit-requests"] == "2"
    assert answer.headers["x-ratelimit-remaining-requests"] == "1"
    used = answer.parse().usage.total_tokens
    # A token or two may have come back since.
    assert 5000 - used <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= 5000
    client.chat.completions.create(model="outrider-demo", messages=MESSAGES, max_tokens=5)
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="outrider-demo", messages=MESSAGES, max_tokens=5, stream=True)
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.param == "requests_per_minute"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30


def test_a_budget_that_is_used_up(server, keys, accounts):
    client = server.client(keys["poor"])

    def use_up() -> None:
        while True:
            client.completions.create(model="outrider-demo", prompt="One, two,", max_tokens=20)

    with pytest.raises(openai.RateLimitError) as caught:
        use_up()
    assert caught.value.code == "insufficient_quota"
    used = sum(row.prompt_tokens + row.output_tokens for row in accounts.rows("poor"))
    assert 0 < used <= 60


def test_a_row_of_an_adapters_request(server, keys, accounts):
    client = server.client(keys["free"])
    models = server.http(headers={"Authorization": f"Bearer {keys['free']}"}).get("/v1/models").json()["data"]
    adapter = next(card for card in models if card["parent"])
    answer = client.chat.completions.create(
        model=adapter["id"], messages=MESSAGES, n=2, max_tokens=24, extra_headers={"X-Request-Id": "mine"}
    )
    row = next(row for row in accounts.rows("free") if row.request_id == answer.id)
    assert (row.client_request_id, row.adapter, row.model) == ("mine", adapter["id"], adapter["id"])
    assert row.adapter_digest == adapter["digest"] != ""
    assert (row.prompt_tokens, row.output_tokens) == (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert 0 < row.accepted_tokens <= row.drafted_tokens
    assert row.received_at < row.first_token_at <= row.finished_at


def test_a_disconnected_client_is_charged_for_its_tokens(server, keys, accounts):
    client = server.client(keys["free"])
    stream = client.completions.create(
        model="outrider-demo", prompt="Once upon a time", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    first = next(iter(stream))
    stream.close()
    server.wait_for(lambda: any(row.request_id == first.id for row in accounts.rows("free")))
    row = next(row for row in accounts.rows("free") if row.request_id == first.id)
    assert row.status == "abort"
    assert 0 < row.output_tokens < 400


def test_a_missing_max_tokens_is_lowered_and_a_named_one_is_not(server, keys):
    client = server.client(keys["narrow"])
    answer = client.completions.create(model="outrider-demo", prompt="a", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16
    answer = client.chat.completions.create(model="outrider-demo", messages=MESSAGES, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 20
    with pytest.raises(openai.BadRequestError, match="max_output_tokens"):
        client.completions.create(model="outrider-demo", prompt="a", max_tokens=21)


def test_a_shutdown_without_a_wait_accounts_for_cut_requests(server, keys, accounts):
    """The last test: it ends the server."""
    client = server.client(keys["free"])
    body = {"model": "outrider-demo", "prompt": "Once", "stream": True, "extra_body": {"ignore_eos": True}}
    streams = [client.completions.create(**body, max_tokens=450) for _ in range(8)]
    ids = {next(iter(stream)).id for stream in streams}
    server.process.send_signal(signal.SIGTERM)
    errors = []
    for stream in streams:
        try:
            with stream:
                for _ in stream:
                    pass
        except openai.APIError as error:
            errors.append(error.body["type"])
    assert server.process.wait(60) == 0
    assert set(errors) == {"ShuttingDownError"}
    rows = [row for row in accounts.rows("free") if row.request_id in ids]
    assert len(rows) == 8
    assert [row.status for row in rows].count("error") == len(errors)
    for row in rows:
        assert (row.status, row.error_type) in (("error", "ShuttingDownError"), ("length", ""))
        assert row.output_tokens > 0
    assert len(accounts.rows("free")) == len({row.request_id for row in accounts.rows("free")})
