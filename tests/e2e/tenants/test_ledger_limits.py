"""Limits and the ledger with a real engine, as the openai client and the database see them."""

import openai
import pytest

MESSAGES = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def client(site):
    """client(tenant): of the `openai` package."""
    return lambda tenant: site.server.client(site.keys[tenant])


def test_429_as_the_openai_client_sees_it(client):
    slow = client("slow")
    answer = slow.chat.completions.with_raw_response.create(model="outrider-demo", messages=MESSAGES, max_tokens=5)
    assert answer.headers["x-ratelimit-limit-requests"] == "2"
    assert answer.headers["x-ratelimit-remaining-requests"] == "1"
    used = answer.parse().usage.total_tokens
    # A token or two may have come back since.
    assert 5000 - used <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= 5000
    slow.chat.completions.create(model="outrider-demo", messages=MESSAGES, max_tokens=5)
    with pytest.raises(openai.RateLimitError) as caught:
        slow.chat.completions.create(model="outrider-demo", messages=MESSAGES, max_tokens=5, stream=True)
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.param == "requests_per_minute"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30


def test_a_budget_that_is_used_up(client, site):
    poor = client("poor")

    def use_up() -> None:
        while True:
            poor.completions.create(model="outrider-demo", prompt="One, two,", max_tokens=20)

    with pytest.raises(openai.RateLimitError) as caught:
        use_up()
    assert caught.value.code == "insufficient_quota"
    used = sum(row.prompt_tokens + row.output_tokens for row in site.rows("poor"))
    assert 0 < used <= 60


def test_a_row_of_an_adapters_request(client, site):
    free = client("free")
    adapter = next(card for card in site.http("free").get("/v1/models").json()["data"] if card["parent"])
    answer = free.chat.completions.create(
        model=adapter["id"], messages=MESSAGES, n=2, max_tokens=24, extra_headers={"X-Request-Id": "mine"}
    )
    row = next(row for row in site.rows("free") if row.request_id == answer.id)
    assert (row.client_request_id, row.adapter, row.model) == ("mine", adapter["id"], adapter["id"])
    assert row.adapter_digest == adapter["digest"] != ""
    assert (row.prompt_tokens, row.output_tokens) == (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert 0 < row.accepted_tokens <= row.drafted_tokens
    assert row.received_at < row.first_token_at <= row.finished_at


def test_a_disconnected_client_is_charged_for_its_tokens(client, site):
    free = client("free")
    stream = free.completions.create(
        model="outrider-demo", prompt="Once upon a time", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    first = next(iter(stream))
    stream.close()
    site.server.wait_for(lambda: any(row.request_id == first.id for row in site.rows("free")))
    row = next(row for row in site.rows("free") if row.request_id == first.id)
    assert row.status == "abort"
    assert 0 < row.output_tokens < 400


def test_a_missing_max_tokens_is_lowered_and_a_named_one_is_not(client):
    narrow = client("narrow")
    answer = narrow.completions.create(model="outrider-demo", prompt="a", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16
    answer = narrow.chat.completions.create(model="outrider-demo", messages=MESSAGES, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 20
    with pytest.raises(openai.BadRequestError, match="max_output_tokens"):
        narrow.completions.create(model="outrider-demo", prompt="a", max_tokens=21)
