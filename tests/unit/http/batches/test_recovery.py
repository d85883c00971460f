"""Batches whose server is killed, and several servers with one folder."""

import asyncio
import contextlib
import shutil
import threading
import time

import pytest
from batch_helpers import Site, line

from outrider.platform.http.batches import run as run_module
from outrider.platform.http.batches.answers import Answers
from outrider.platform.http.batches.sender import error_line
from outrider.platform.http.batches.store import BatchStore

COUNT = 40


def lines() -> str:
    return "\n".join(line(str(i), prompt="ab", max_tokens=-1 if i % 5 == 0 else 3) for i in range(COUNT))


def stats(folder):
    """A fingerprint of a folder."""
    return {path: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for path in folder.rglob("*") for stat in [path.stat()]}


async def check_all(api, batch_id: str) -> None:
    """Every line has one answer or one error."""
    batch = await api.end(batch_id)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": COUNT, "completed": COUNT * 4 // 5, "failed": COUNT // 5}
    output, errors = await api.content(batch["output_file_id"]), await api.content(batch["error_file_id"])
    assert sorted(int(a["custom_id"]) for a in output) == [i for i in range(COUNT) if i % 5]
    assert sorted(int(a["custom_id"]) for a in errors) == [i for i in range(COUNT) if i % 5 == 0]
    files = (await api.call("GET", "/v1/files")).json()["data"]
    assert len(files) == 3


@pytest.mark.slow
def test_a_batch_resumes_from_any_copied_state(site, tmp_path):
    """A copy of the folder equals the disk after `kill -9`."""
    copies = []

    async def first(api):
        batch = await api.begin(lines())

        async def copy() -> None:
            while True:
                target = tmp_path / f"copy{len(copies)}"
                with contextlib.suppress(shutil.Error, FileNotFoundError):
                    state = stats(site.folder)
                    shutil.copytree(site.folder, target)  # here: no new work on the folder begins meanwhile
                    if stats(site.folder) == state:
                        copies.append(target)
                if target not in copies:  # the folder has changed meanwhile: no moment of any disk
                    shutil.rmtree(target, ignore_errors=True)
                await asyncio.sleep(0.01)

        copying = asyncio.create_task(copy())
        await check_all(api, batch["id"])
        copying.cancel()
        return batch["id"]

    batch_id = site.run(first, batch_concurrency=2)
    assert len(copies) >= 3
    for folder in copies:
        Site(site.llm, folder).run(lambda api: check_all(api, batch_id))


@pytest.mark.parametrize("state", ["validating", "in_progress", "finalizing"])
def test_a_server_that_stops_leaves_the_batch_to_the_next(site, state, monkeypatch):
    failing = [True]

    async def first(api):
        batch = await api.begin(lines())
        if state == "in_progress":
            await api.until(batch["id"], lambda b: b["request_counts"]["completed"] > 3)
        if state == "finalizing":
            await api.until(batch["id"], lambda b: not failing)
        return batch["id"]

    if state == "finalizing":
        real = run_module.BatchRun._adopt

        async def adopt(self, name, file_id):
            found = await real(self, name, file_id)
            if failing:
                failing.clear()
                raise OSError(28, "No space left on device")
            return found

        monkeypatch.setattr(run_module.BatchRun, "_adopt", adopt)
    batch_id = site.run(first, batch_concurrency=1)
    site.run(lambda api: check_all(api, batch_id))
    answered = [call for call in site.llm.calls if call["params"].max_tokens == 3]
    assert len(answered) <= COUNT * 4 // 5 + 1, "what had an answer was answered again"


def test_a_server_that_stops_while_it_takes_a_batch_leaves_it_to_the_next(site, monkeypatch):
    lock, is_locked = BatchStore.lock, threading.Event()

    def slow(self, folder):
        found = lock(self, folder)
        is_locked.set()
        time.sleep(0.2)  # the server stops meanwhile
        return found

    async def first(api):
        batch = await api.begin(lines())
        assert await asyncio.to_thread(is_locked.wait, 30)
        return batch["id"]

    monkeypatch.setattr(BatchStore, "lock", slow)
    batch_id = site.run(first)
    monkeypatch.setattr(BatchStore, "lock", lock)
    site.run(lambda api: check_all(api, batch_id))


@pytest.mark.slow
def test_two_servers_share_a_folder(site):
    async def main():
        async with site.server() as one, site.server() as other:
            made = [(await api.begin(lines()))["id"] for api in (one, other, one, other)]
            for batch_id in made:
                await check_batch(one, batch_id)

    async def check_batch(api, batch_id):
        batch = await api.end(batch_id)
        assert batch["request_counts"] == {"total": COUNT, "completed": COUNT * 4 // 5, "failed": COUNT // 5}
        assert len(await api.content(batch["output_file_id"])) == COUNT * 4 // 5

    asyncio.run(main())
    assert len(site.llm.calls) == 4 * COUNT * 4 // 5, "each line ran once"


def test_another_server_cancels(site):
    async def main():
        site.llm.blocked = True
        async with site.server() as one:
            batch = await one.begin(lines())
            await one.until(batch["id"], lambda b: b["status"] == "in_progress")
            async with site.server() as other:
                answer = await other.call("POST", f"/v1/batches/{batch['id']}/cancel")
                assert answer.json()["status"] == "cancelling"
            assert (await one.end(batch["id"]))["status"] == "cancelled"

    asyncio.run(main())


def entry(custom_id: str) -> bytes:
    return error_line("id", custom_id, "code", "message")


@pytest.mark.parametrize(
    "rest", [b"", b"{", entry("c")[:-1], b"\x00" * 4096, b"{}\n" + entry("c"), b"\n", b'{"custom_id": "\xff'], ids=repr
)
def test_a_torn_journal_is_cut(tmp_path, rest):
    whole = entry("a") + entry("b")
    (tmp_path / "output.jsonl").write_bytes(whole + rest)
    with Answers(tmp_path) as answers:
        assert answers.num_completed == 2
        assert "a" in answers.finished
        assert "c" not in answers.finished
        answers.append("a", entry("a"), is_error=True)
        answers.append("c", entry("c"), is_error=False)
    answers.append("d", entry("d"), is_error=False)  # it is closed
    assert (tmp_path / "output.jsonl").read_bytes() == whole + entry("c")
    assert (tmp_path / "errors.jsonl").read_bytes() == b""


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    from outrider.platform.http.batches import answers as module

    def write_half(descriptor, content):
        real(descriptor, content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    real = module.write_all
    with Answers(tmp_path) as answers:
        answers.append("a", entry("a"), is_error=False)
        monkeypatch.setattr(module, "write_all", write_half)
        with pytest.raises(OSError, match="No space"):
            answers.append("b", entry("b"), is_error=False)
        monkeypatch.undo()
        answers.append("c", entry("c"), is_error=False)
    assert (tmp_path / "output.jsonl").read_bytes() == entry("a") + entry("c")


def test_a_batch_goes_on_when_the_disk_has_room_again(site, monkeypatch):
    from outrider.platform.http.batches import answers as module
    from outrider.platform.http.batches import service

    failures = []
    real = module.write_all

    def fail_twice(descriptor, content):
        if len(failures) < 2:
            failures.append(content)
            raise OSError(28, "No space left on device")
        real(descriptor, content)

    monkeypatch.setattr(service, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(module, "write_all", fail_twice)

    async def work(api):
        await check_all(api, (await api.begin(lines()))["id"])

    site.run(work)
    assert len(failures) == 2
