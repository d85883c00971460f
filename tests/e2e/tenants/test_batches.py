"""Files and batches with the untouched `openai` client, two tenants, and a server that is killed in the middle."""

import json
import time

import openai
import pytest

COUNT = 60
ENDED = ("completed", "failed", "expired", "cancelled")
ASK = {"messages": [{"role": "user", "content": "List all customers from Berlin."}], "max_tokens": 24, "temperature": 0}


def request(custom_id: str, url: str = "/v1/chat/completions", **body) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body or ASK})


def begin(client: openai.OpenAI, lines: list[str], endpoint: str = "/v1/chat/completions", **options):
    file = client.files.create(
        file=("in.jsonl", "\n".join(lines).encode()),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert file.expires_at - file.created_at == 7200
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)


def wait(client: openai.OpenAI, batch, holds=lambda batch: batch.status in ENDED, seconds: float = 120):
    deadline = time.monotonic() + seconds
    while not holds(batch := client.batches.retrieve(batch.id)):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def content(client: openai.OpenAI, file_id: str) -> list[dict]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_killed_server_loses_and_repeats_nothing(site):
    server = site.server
    client = server.client(site.keys["batches"])
    lines = [request(f"r{i}", **ASK, model="sql" if i % 2 else "outrider-demo") for i in range(COUNT)]
    batch = begin(client, lines, metadata={"night": "1"})
    wait(client, batch, lambda b: b.request_counts.completed >= 5)
    try:
        server.process.kill()
        server.process.wait()
    finally:  # the other files use it too
        server = site.start_again()
    client, other = server.client(site.keys["batches"]), server.client(site.keys["few-batches"])
    for call in (
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.files.retrieve(batch.input_file_id),
        lambda: other.files.content(batch.input_file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    live = client.chat.completions.create(model="sql", **ASK).choices[0].message.content
    batch = wait(client, batch)
    assert (batch.status, batch.metadata, batch.error_file_id) == ("completed", {"night": "1"}, None)
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        COUNT,
        COUNT,
        0,
    )
    answers = content(client, batch.output_file_id)
    assert sorted(a["custom_id"] for a in answers) == sorted(f"r{i}" for i in range(COUNT))
    texts = {a["custom_id"]: a["response"]["body"]["choices"][0]["message"]["content"] for a in answers}
    assert {texts[f"r{i}"] for i in range(1, COUNT, 2)} == {live}
    assert texts["r0"] != live
    assert [b.id for b in client.batches.list()] == [batch.id]
    assert not list(other.batches.list())

    with site.http("operator") as operator:  # lines are the tenant's requests
        (row,) = operator.get("/admin/v1/usage?tenant=batches").raise_for_status().json()["data"]
    assert row["requests"] >= COUNT + 1

    half = begin(other, [request(str(i), "/v1/embeddings", input="a") for i in range(70)], "/v1/embeddings")
    half = wait(other, half, lambda b: b.request_counts.completed >= 40)
    time.sleep(1)
    half = other.batches.retrieve(half.id)
    assert half.status == "in_progress", "its tenant's rate is used up: it waits"
    assert half.request_counts.failed == 0
    other.batches.cancel(half.id)
    half = wait(other, half)
    assert half.status == "cancelled"
    assert len(content(other, half.output_file_id)) == half.request_counts.completed

    wrong = wait(client, begin(client, [request("a"), request("a"), "{"]))
    assert wrong.status == "failed"
    assert [(e.code, e.line) for e in wrong.errors.data] == [("duplicate_custom_id", 2), ("invalid_json_line", 3)]
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=b"a", purpose="fine-tune")
    assert client.files.delete(wrong.input_file_id).deleted
