"""`/v1/files`: uploads in all forms, quotas, expiry."""

import asyncio
import os

import pytest
from batch_helpers import line

BOUNDARY = "b"
HEADERS = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def part(name: str, content: bytes, more: str = "") -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + content + b"\r\n"


def form(content: bytes = b"x\n", *others: bytes, purpose: bytes = b"batch") -> bytes:
    file = part("file", content, '; filename="in.jsonl"')
    return b"".join([file, part("purpose", purpose), *others, f"--{BOUNDARY}--\r\n".encode()])


def on_disk(site, pattern: str) -> list:
    return list(site.folder.glob(f"owners/*/files/{pattern}"))


def test_a_file_from_its_upload_to_its_end(site):
    async def work(api):
        content = b"".join(os.urandom(1000) + b"\r\n--b" for _ in range(1000))
        file = await api.upload(content)
        assert (file["object"], file["bytes"], file["filename"]) == ("file", len(content), "in.jsonl")
        assert (file["purpose"], file["status"]) == ("batch", "processed")
        assert file["expires_at"] - file["created_at"] == 30 * 86400
        path = f"/v1/files/{file['id']}"
        assert (await api.call("GET", path)).json() == file
        assert (await api.call("GET", f"{path}/content")).content == content
        (data,) = on_disk(site, "*.data")
        assert data.stat().st_mode & 0o077 == data.parent.stat().st_mode & 0o077 == 0
        assert (await api.call("DELETE", path)).json() == {"id": file["id"], "object": "file", "deleted": True}
        for method, gone in (("GET", path), ("GET", f"{path}/content"), ("DELETE", path)):
            assert (await api.call(method, gone)).status_code == 404
        assert not on_disk(site, "*")

    site.run(work)


def test_expiry(site):
    now = [1000.0]

    async def work(api):
        files = api.app.state.serving.batches.files
        files.clock = lambda: now[0]
        fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        file = await api.upload(b"a", **fields)
        assert file["expires_at"] == 1000 + 3600
        now[0] += 3600
        # At once: the server sweeps too, with no file in use.
        files.sweep(files.owner(""), [file["id"]])
        assert len(on_disk(site, "*")) == 2, "a batch reads it"
        assert (await api.call("GET", f"/v1/files/{file['id']}")).status_code == 404
        assert (await api.call("GET", "/v1/files")).json()["data"] == []
        files.sweep(files.owner(""), [])
        assert not on_disk(site, "*")

    site.run(work)


def test_leftovers_of_a_killed_server_are_removed(site):
    async def work(api):
        files = api.app.state.serving.batches.files
        file = await api.upload(b"a")
        folder = files.files("")
        for name in ("x.part", f"file-{'0' * 32}.data"):
            (folder / name).write_bytes(b"a")
        files.sweep(files.owner(""), [])
        assert len(on_disk(site, "*")) == 4, "somebody may be writing them"
        for path in folder.iterdir():
            os.utime(path, (1, 1))
        files.sweep(files.owner(""), [])
        assert {path.stem for path in on_disk(site, "*")} == {file["id"]}

    site.run(work)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None),
        (b"x" * 1000, 400, None),
        (form()[:-6], 400, None),
        (b"--b--\r\n", 400, "file"),
        (part("purpose", b"batch") + b"--b--\r\n", 400, "file"),
        (part("file", b"a") + b"--b--\r\n", 400, "purpose"),
        (form(purpose=b"fine-tune"), 400, "purpose"),
        (form(b"a", part("purpose", b"batch")), 400, "purpose"),
        (form(b"a", part("file", b"a")), 400, "file"),
        (form(b"a", part("more", b"a" * 1025)), 400, "more"),
        (form(b"a", *[part(str(i), b"") for i in range(20)]), 400, None),
        (form(b"a", part("x", b"", f"; a={'a' * 5000}")), 400, None),
        (form(b"a", part("expires_after[anchor]", b"now")), 400, "expires_after.anchor"),
        (form(b"a", part("expires_after[seconds]", b"3600")), 400, "expires_after.anchor"),
        *[
            (
                form(b"a", part("expires_after[anchor]", b"created_at"), part("expires_after[seconds]", seconds)),
                400,
                "expires_after.seconds",
            )
            for seconds in (b"3599", b"2592001", b"1e4", b"-1", "٣٦٠٠".encode(), b"9" * 100)
        ],
        (form(b"a") + b"x" * 66_000, 400, None),
        (form(b"a" * 2001), 413, "file"),
        (form(b"\r" * 2001), 413, "file"),
    ],
)
def test_wrong_forms_leave_nothing(site, body, status, param):
    async def work(api):
        async def pieces():
            for start in range(0, len(body), 700):
                yield body[start : start + 700]

        for content in (body, pieces()):
            answer = await api.call("POST", "/v1/files", content=content, headers=HEADERS)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
        await asyncio.sleep(0.05)
        assert not on_disk(site, "*")

    site.run(work, max_file_bytes=2000)


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=b"])
def test_other_content_types(site, kind):
    async def work(api):
        answer = await api.call("POST", "/v1/files", content=form(), headers={"content-type": kind})
        assert answer.status_code == 400

    site.run(work)


def test_a_client_that_goes_away_leaves_nothing(site):
    async def work(api):
        messages = [{"type": "http.request", "body": form(b"a" * 5000)[:3000], "more_body": True}]

        async def receive():
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message):
            raise AssertionError("nobody is there")

        scope = {"type": "http", "method": "POST", "path": "/v1/files", "query_string": b"", "app": api.app}
        scope["headers"] = [(b"content-type", HEADERS["content-type"].encode())]
        await api.app(scope, receive, send)
        await asyncio.sleep(0.05)
        assert not on_disk(site, "*")
        await api.upload(b"a" * 900)  # nor in the count of bytes

    site.run(work, max_tenant_bytes=5000)


def test_quotas(site):
    async def work(api):
        first = await api.upload(b"a" * 900)
        error = (await api.upload(b"a" * 2000, 400))["error"]
        assert "max_tenant_bytes is 2500" in error["message"]
        second = ("file", ("in.jsonl", b"a" * 700))
        for _ in range(100):  # a refused upload counts until its request has ended, a moment after the answer
            answer = await api.call("POST", "/v1/files", files=[second], data={"purpose": "batch"})
            if answer.is_success:
                break
            await asyncio.sleep(0.05)
        assert answer.is_success, answer.text
        error = (await api.upload(b"a", 400))["error"]
        assert "max_tenant_files is 2" in error["message"]
        await api.call("DELETE", f"/v1/files/{first['id']}")
        await api.upload(b"a")

    site.run(work, max_tenant_bytes=2500, max_tenant_files=2)


def test_batches_leave_no_more_files_than_a_tenant_may_have(site):
    async def work(api):
        file = await api.upload(line("a"))
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        statuses = []
        for _ in range(5):
            answer = await api.call("POST", "/v1/batches", json=body)
            statuses.append(answer.status_code)
            if answer.is_success:
                await api.end(answer.json()["id"])
        assert statuses == [200, 200, 200, 400, 400]
        assert "max_tenant_files is 5" in answer.json()["error"]["message"]
        assert len((await api.call("GET", "/v1/files")).json()["data"]) == 4

    site.run(work, max_tenant_files=5)


def test_concurrent_uploads_share_the_quota(site):
    async def work(api):
        async def upload() -> int:
            async def pieces():
                body = form(b"a" * 1000)
                for start in range(0, len(body), 100):
                    yield body[start : start + 100]
                    await asyncio.sleep(0)

            return (await api.call("POST", "/v1/files", content=pieces(), headers=HEADERS)).status_code

        statuses = await asyncio.gather(*(upload() for _ in range(6)))
        assert 400 in statuses
        files = api.app.state.serving.batches.files
        assert sum(file.bytes for file in files.list_files("")) <= 3500
        await asyncio.sleep(0.05)
        assert not on_disk(site, "*.part")
        for file in files.list_files(""):
            await api.call("DELETE", f"/v1/files/{file.id}")
        assert await upload() == 200, "those that were refused count no more"

    site.run(work, max_tenant_bytes=3500)


def test_lists(site):
    async def work(api):
        made = {(await api.upload(str(i)))["id"] for i in range(3)}
        page = (await api.call("GET", "/v1/files?limit=2")).json()
        rest = (await api.call("GET", f"/v1/files?after={page['last_id']}")).json()
        assert (page["has_more"], rest["has_more"]) == (True, False)
        ids = [file["id"] for file in page["data"] + rest["data"]]
        assert set(ids) == made
        ascending = (await api.call("GET", "/v1/files?order=asc")).json()
        assert [file["id"] for file in ascending["data"]] == ids[::-1]
        assert (await api.call("GET", "/v1/files?purpose=batch_output")).json()["data"] == []
        assert (await api.call("GET", "/v1/files?after=x")).json()["error"]["param"] == "after"
        assert (await api.call("GET", "/v1/files?limit=0")).status_code == 400

    site.run(work)


def test_the_input_of_a_running_batch_stays(site):
    async def work(api):
        site.llm.blocked = True
        batch = await api.begin(line("a"))
        path = f"/v1/files/{batch['input_file_id']}"
        answer = await api.call("DELETE", path)
        assert (answer.status_code, batch["id"] in answer.json()["error"]["message"]) == (400, True)
        await api.call("POST", f"/v1/batches/{batch['id']}/cancel")
        await api.end(batch["id"])
        assert (await api.call("DELETE", path)).status_code == 200

    site.run(work)


def test_pages_of_other_sites_upload_nothing(site):
    async def work(api):
        for origin, status in (("https://evil.example", 403), ("https://good.example", 200), ("http://test", 200)):
            answer = await api.call("POST", "/v1/files", content=form(), headers={**HEADERS, "origin": origin})
            assert answer.status_code == status
        answer = await api.call("POST", "/v1/batches/x/cancel", headers={"origin": "https://evil.example"})
        assert answer.status_code == 403

    site.run(work, cors_origins=("https://good.example",))


def test_names_of_files_hold_no_control_characters(site):
    async def work(api):
        body = part("file", b"a", '; filename="../\x1b[2J\u202ex.jsonl"') + part("purpose", b"batch") + b"--b--\r\n"
        file = (await api.call("POST", "/v1/files", content=body, headers=HEADERS)).json()
        assert file["filename"].isprintable()
        answer = await api.call("GET", f"/v1/files/{file['id']}/content")
        assert answer.headers["content-disposition"].startswith("attachment; filename*=utf-8''")

    site.run(work)
