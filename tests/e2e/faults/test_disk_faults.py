"""Adapter files that break or go, and disks that are full."""

import shutil

import psutil
import pytest
from fault_helpers import FAULTS

from outrider.models.demo import demo_adapters

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("adapters").resolve()
    for name in ("first", "second", "third"):
        shutil.copytree(demo_adapters()["sql"], place / "served" / name)
    return place


@pytest.fixture(scope="module")
def server(start, place):
    # Small segments of the journal, which are soon full; room for one adapter of rank 16, or two of rank 8, in memory.
    return start(
        *("--lora-dir", str(place / "served"), "--lora-cache-dir", str(place / "cache"), "--max-cpu-loras", "1"),
        *("--max-loras", "1", "--max-lora-rank", "16", "--journal-max-bytes", str(1 << 20)),
        *("--lora-resolver", "store_of_tests:Resolver", "--lora-remote", "disk"),
        PYTHONPATH=str(FAULTS),
    )


@pytest.fixture
def ask(server, accounts):
    with server.http(headers={"Authorization": f"Bearer {accounts.key}"}) as http:

        def ask(model: str, **body):
            return http.post(
                "/v1/completions", json={"model": model, "prompt": "All", "max_tokens": 4, "temperature": 0} | body
            )

        yield ask


def cut(folder):
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(folder):
    """The header says another shape than the configuration."""
    file = folder / WEIGHTS
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])


INVALID, UNKNOWN = (400, "InvalidAdapter"), (404, "NotFoundError")


@pytest.mark.parametrize(
    ("fault", "answers"),
    # A folder that has gone is still known for a moment, until the directory is looked at again.
    [(cut, [INVALID]), (flip, [INVALID]), (shutil.rmtree, [INVALID, UNKNOWN])],
    ids=["cut short", "overwritten", "deleted"],
)
def test_adapter_files_broken(server, place, ask, check_served, outcome, fault, answers):
    """Not in memory any more when its files break: a typed error to its requests alone; whole again, it is served."""
    whole = ask("first")
    assert whole.status_code == 200
    for other in ("second", "json"):  # evict it from memory
        assert ask(other).status_code == 200
    fault(place / "served/first")
    refused = ask("first")
    assert (refused.status_code, refused.json()["error"]["type"]) in answers, refused.text
    check_served(server)
    assert ask("second").json()["choices"][0]["text"] == whole.json()["choices"][0]["text"]
    shutil.rmtree(place / "served/first", ignore_errors=True)
    shutil.copytree(demo_adapters()["sql"], place / "served/first")
    assert ask("first").json()["choices"][0]["text"] == whole.json()["choices"][0]["text"]
    outcome(
        f"its requests got {refused.status_code} {refused.json()['error']['type']}; others and the repaired one run"
    )


def test_files_of_an_adapter_in_use_deleted(place, ask, outcome):
    """The adapter in memory is still served."""
    before = ask("third")
    shutil.rmtree(place / "served/third")
    assert ask("third").json()["choices"] == before.json()["choices"]
    outcome("it is served from memory")


def test_disk_full_for_fetched_adapters(server, accounts, place, full_disk, ask, outcome):
    """A typed error, nothing half-fetched is kept, and with room it is fetched."""
    shutil.copytree(demo_adapters()["sql"], place / "store/far")
    load = {"lora_name": "far", "lora_path": f"disk://{place / 'store/far'}"}
    with server.http(headers={"Authorization": f"Bearer {accounts.key}"}) as http:
        with full_disk(psutil.Process(server.process.pid), 10_000):
            refused = http.post("/v1/load_lora_adapter", json=load)
        error = refused.json()["error"]
        assert (refused.status_code, error["type"]) == (503, "AdapterSourceError"), refused.text
        assert [path for path in place.glob("cache/**/*") if path.name == WEIGHTS] == []
        # A source that failed is left alone for a moment.
        server.wait_for(lambda: http.post("/v1/load_lora_adapter", json=load).status_code == 200)
        assert ask("far").status_code == 200
    outcome(f"{refused.status_code} {error['type']}; nothing is left in the cache; with room it is loaded")


def test_disk_full_for_journal_and_database(server, accounts, full_disk, load, outcome):
    """Neither the database nor the journal can grow: running requests finish and are accounted for, new ones get
    503 once there is no room to account for it; with room again, all is served and in the ledger."""
    running = load(server, "full-running", 3, max_tokens=700)
    running.wait_until_all_stream(server)
    answered, refused = 0, None
    headers = {"Authorization": f"Bearer {accounts.key}"}
    with server.http(headers=headers) as http, full_disk(psutil.Process(server.process.pid), (1 << 17) - 1):
        for number in range(600):
            answer = http.post(
                "/v1/completions", json={"prompt": "All", "max_tokens": 1}, headers={"X-Request-Id": f"full-{number}"}
            )
            if answer.status_code != 200:
                refused = answer
                break
            answered += 1
        assert refused is not None
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "OverloadedError"), refused.text
        assert "accounted for" in refused.json()["error"]["message"]
        health = http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "ledger_unavailable")
        running.join()
        assert len(set(running.texts().values())) == 1
    server.wait_for(lambda: server.http().get("/health").status_code == 200)
    server.wait_for(lambda: len(accounts.by_client_id("full-")) == answered + 3)
    assert {row["status"] for row in accounts.by_client_id("full-running").values()} == {"length"}
    outcome(f"after {answered} more requests new ones got 503; 3 running finished; all {answered + 3} rows are there")
