"""Batches from their upload to their answers."""

import asyncio
import json

import pytest
from batch_helpers import line


def test_a_batch_is_answered(site):
    async def work(api):
        batch = await api.begin("\n\n".join(line(f"r{i}") for i in range(20)), metadata={"a": "b"})
        assert (batch["object"], batch["status"], batch["errors"]) == ("batch", "validating", None)
        assert batch["expires_at"] - batch["created_at"] == 86400
        batch = await api.end(batch["id"])
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        assert batch["metadata"] == {"a": "b"}
        assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
        assert batch["error_file_id"] is None
        metrics = (await api.call("GET", "/metrics")).text
        assert "outrider:batch_lines_running 0.0" in metrics
        answers = await api.content(batch["output_file_id"])
        assert {a["custom_id"] for a in answers} == {f"r{i}" for i in range(20)}
        assert all(set(a) == {"id", "custom_id", "response", "error"} and a["error"] is None for a in answers)
        assert all(a["response"]["status_code"] == 200 and a["response"]["request_id"] == a["id"] for a in answers)
        assert answers[0]["response"]["body"]["choices"][0]["text"] == "Hello"
        file = (await api.call("GET", f"/v1/files/{batch['output_file_id']}")).json()
        assert (file["purpose"], file["object"], file["status"]) == ("batch_output", "file", "processed")

    site.run(work)


def test_refused_requests_are_in_the_error_file(site):
    lines = [line("good"), line("bad", prompt="a", max_tokens=-1), line("unknown", prompt="a", model="nobody")]

    async def work(api):
        batch = await api.end((await api.begin("\n".join(lines)))["id"])
        assert (batch["status"], batch["request_counts"]["failed"]) == ("completed", 2)
        errors = {e["custom_id"]: e for e in await api.content(batch["error_file_id"])}
        assert {name: e["response"]["status_code"] for name, e in errors.items()} == {"bad": 400, "unknown": 404}
        assert errors["bad"]["response"]["body"]["error"]["param"] == "max_tokens"
        assert [a["custom_id"] for a in await api.content(batch["output_file_id"])] == ["good"]

    site.run(work)


DEEP = '{"a":' * 30_000 + "1" + "}" * 30_000
FILES = {
    "empty": (b"", "empty_file", None),
    "only white space": (b"\n \n", "empty_file", None),
    "no JSON": (b"{", "invalid_json_line", 1),
    "not an object": (b"[1]", "invalid_json_line", 1),
    "not UTF-8": (b'{"custom_id": "\xff"}', "invalid_json_line", 1),
    "NUL": (b'{"custom_id": "\x00"}', "invalid_json_line", 1),
    "half a character": (line("a").replace('"a"', '"\\ud800"').encode(), "invalid_json_line", 1),
    "deep": (b'{"custom_id": "a", "body": ' + b"[" * 30_000 + b"]" * 30_000 + b"}", "invalid_json_line", 1),
    "deep and long": (f'{{"custom_id": "a", "body": {DEEP}}}'.encode(), "invalid_request", 1),
    "many values": (b'{"custom_id": "a", "body": [' + b"1," * 300_000 + b"1]}", "invalid_request", 1),
    "long": (line("a").encode() + b"\n" + b" " * 200_000 + b"x", "invalid_request", 2),
    "duplicate": (f"{line('a')}\n\n{line('a')}".encode(), "duplicate_custom_id", 3),
    "no id": (b'{"url": "/v1/completions", "body": {}}', "missing_required_parameter", 1),
    "id is null": (b'{"custom_id": null, "url": "/v1/completions", "body": {}}', "missing_required_parameter", 1),
    "id is a number": (b'{"custom_id": 1, "url": "/v1/completions", "body": {}}', "invalid_value", 1),
    "id is empty": (line("").encode(), "invalid_value", 1),
    "id is long": (line("a" * 513).encode(), "invalid_value", 1),
    "another url": (f"{line('a')}\n{line('b', '/v1/embeddings')}".encode(), "invalid_url", 2),
    "unknown url": (line("a", "/v1/load_lora_adapter").encode(), "invalid_url", 1),
    "no url": (b'{"custom_id": "a", "body": {}}', "missing_required_parameter", 1),
    "method": (line("a").replace("POST", "GET").encode(), "invalid_method", 1),
    "no body": (b'{"custom_id": "a", "url": "/v1/completions"}', "missing_required_parameter", 1),
    "body is a text": (b'{"custom_id": "a", "url": "/v1/completions", "body": "x"}', "invalid_value", 1),
    "stream": (line("a", prompt="a", stream=True).encode(), "invalid_value", 1),
    "many empty lines": (b"\n" * 500_001, "too_many_tasks", None),
    "too many": ("\n".join(line(str(i)) for i in range(50_001)).encode(), "too_many_tasks", 50_001),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_wrong_files_fail_with_the_line(site, name):
    content, code, number = FILES[name]

    async def work(api):
        batch = await api.end((await api.begin(content))["id"])
        assert batch["status"] == "failed"
        assert batch["failed_at"] is not None
        assert (batch["output_file_id"], batch["in_progress_at"]) == (None, None)
        assert batch["errors"]["object"] == "list"
        (error,) = batch["errors"]["data"]
        assert set(error) == {"code", "message", "param", "line"}
        assert (error["code"], error["line"]) == (code, number), error
        assert len(json.dumps(error)) < 1000
        assert not site.llm.calls

    site.run(work, max_body_bytes=1 << 20 if name in ("deep and long", "many values") else 100_000)


def test_no_more_than_a_hundred_errors(site):
    async def work(api):
        batch = await api.end((await api.begin("{\n" * 1000))["id"])
        assert [error["line"] for error in batch["errors"]["data"]] == list(range(1, 101))

    site.run(work)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/load_lora_adapter"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
def test_wrong_fields(site, fields, param):
    async def work(api):
        assert (await api.begin(line("a"), 400, **fields))["error"]["param"] == param

    site.run(work)


def test_missing_files_and_batches(site):
    async def work(api):
        for file_id in ("file-" + "0" * 32, "../../etc/passwd", "file-\x00", ""):
            body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
            answer = await api.call("POST", "/v1/batches", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (404, "input_file_id")
        for batch_id in ("batch_" + "0" * 32, "..%2f..%2fx", "x"):
            assert (await api.call("GET", f"/v1/batches/{batch_id}")).status_code == 404
            assert (await api.call("POST", f"/v1/batches/{batch_id}/cancel")).status_code == 404

    site.run(work)


def test_answers_are_no_input(site):
    async def work(api):
        batch = await api.end((await api.begin(line("a")))["id"])
        body = {"input_file_id": batch["output_file_id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        answer = await api.call("POST", "/v1/batches", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_file_id")

    site.run(work)


def test_lists_have_pages(site):
    async def work(api):
        made = []
        for _ in range(3):
            made.append((await api.begin(line("a")))["id"])
            await api.end(made[-1])
        page = (await api.call("GET", "/v1/batches?limit=2")).json()
        assert (page["object"], len(page["data"]), page["has_more"]) == ("list", 2, True)
        rest = (await api.call("GET", f"/v1/batches?limit=2&after={page['last_id']}")).json()
        assert (len(rest["data"]), rest["has_more"]) == (1, False)
        assert {batch["id"] for batch in page["data"] + rest["data"]} == set(made)
        assert (await api.call("GET", "/v1/batches?after=x")).json()["error"]["param"] == "after"

    site.run(work)


def test_cancel_keeps_finished_lines(site):
    async def work(api):
        batch = await api.begin("\n".join(line(str(i)) for i in range(50)))
        await api.until(batch["id"], lambda b: b["request_counts"]["completed"] >= 2)
        site.llm.blocked = True
        answer = (await api.call("POST", f"/v1/batches/{batch['id']}/cancel")).json()
        assert (answer["status"], answer["cancelling_at"] is None) == ("cancelling", False)
        batch = await api.end(batch["id"])
        assert (batch["status"], batch["cancelled_at"] is None) == ("cancelled", False)
        assert not site.llm.running
        completed = batch["request_counts"]["completed"]
        assert 2 <= completed < 50
        assert len(await api.content(batch["output_file_id"])) == completed
        again = (await api.call("POST", f"/v1/batches/{batch['id']}/cancel")).json()
        assert again["status"] == "cancelled"

    site.llm.reply = "x" * 40
    site.run(work, batch_concurrency=1)


def test_expired_lines_are_errors(site):
    now = [1000.0]

    async def work(api):
        api.app.state.serving.batches.files.clock = lambda: now[0]
        site.llm.blocked = True
        batch = await api.begin("\n".join(line(str(i)) for i in range(5)))
        await api.until(batch["id"], lambda b: b["status"] == "in_progress" and bool(site.llm.running))
        now[0] += 86400
        batch = await api.end(batch["id"])
        assert (batch["status"], batch["expired_at"]) == ("expired", 1000 + 86400)
        errors = await api.content(batch["error_file_id"])
        assert {e["custom_id"] for e in errors} == set("01234")
        assert all(e["error"]["code"] == "batch_expired" and e["response"] is None for e in errors)
        assert batch["request_counts"] == {"total": 5, "completed": 0, "failed": 5}

    site.run(work)


def test_batches_in_flight_are_bounded(site):
    async def work(api):
        site.llm.blocked = True
        for _ in range(2):
            await api.begin(line("a"))
        error = (await api.begin(line("a"), 429))["error"]
        assert (error["param"], "2" in error["message"]) == ("max_tenant_batches", True)

    site.run(work, max_tenant_batches=2)


def test_lines_run_behind_clients_requests(site):
    async def work(api):
        batch = await api.begin("\n".join([line("a"), line("b", prompt="ab", priority=-3)]))
        await api.end(batch["id"])
        assert sorted(call["priority"] for call in site.llm.calls) == [-3, 1000]

    site.run(work)


def test_refusals_for_a_time_are_waited_for(site):
    async def work(api):
        batch = await api.begin("\n".join(line(str(i)) for i in range(3)))
        site.llm.state = "restarting"
        await api.until(batch["id"], lambda b: b["status"] == "in_progress")
        await asyncio.sleep(0.2)
        assert not site.llm.calls
        site.llm.state = "ready"
        batch = await api.end(batch["id"])
        assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}

    site.run(work)


def test_off_without_a_folder(http):
    for call in ("GET /v1/files", "POST /v1/files", "GET /v1/batches/x", "POST /v1/batches"):
        answer = http.request(*call.split())
        assert answer.status_code == 404
        assert "--batch-dir" in answer.json()["error"]["message"]
