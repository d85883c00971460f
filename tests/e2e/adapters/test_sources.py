"""Adapters of a real server: found by name, fetched, loaded by admins from allowed sources, in spite of faults."""

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from ...error_answers import error_in
from .conftest import copy_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PROMPT = {"prompt": "List all customers", "max_tokens": 10, "temperature": 0}


@pytest.fixture(autouse=True)
def _others_are_served(client):
    yield
    response = client.post("/v1/completions", json={"model": "sql", "prompt": "All", "max_tokens": 2})
    assert response.status_code == 200, response.text


def load(http: httpx.Client, name: str, path: object, **extra) -> httpx.Response:
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **extra})


def unload(http: httpx.Client, name: str, **extra) -> httpx.Response:
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name, **extra})


def complete(http: httpx.Client, model: str) -> str:
    response = http.post("/v1/completions", json={"model": model, **PROMPT})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def card(http: httpx.Client, name: str) -> dict:
    return http.get(f"/v1/models/{name}").json()


def test_a_client_is_no_admin(client, guarded, place):
    assert error_in(load(client, "x", place / "root" / "good"), 403)["type"] == "PermissionDeniedError"
    for path in ("unload", "pin", "unpin"):
        error_in(client.post(f"/v1/{path}_lora_adapter", json={"lora_name": "sql"}), 403)
    error_in(load(guarded.http(), "x", place / "root" / "good"), 401)


def test_an_admin_loads_pins_and_unloads(client, admin, place):
    assert load(admin, "good", place / "root" / "good", pinned=True).status_code == 200
    shown = card(client, "good")
    assert (shown["tier"], shown["pinned"], shown["parent"]) == ("device", True, "outrider-demo")
    assert shown["rows"] >= shown["rank"] > 0
    assert shown["bytes"] > 0
    assert len(shown["digest"]) == 64
    assert shown["digest"] == card(client, "sql")["digest"], "the same content"
    assert complete(client, "good") == complete(client, "sql")
    assert admin.post("/v1/unpin_lora_adapter", json={"lora_name": "good"}).status_code == 200
    assert card(client, "good")["pinned"] is False
    assert admin.post("/v1/pin_lora_adapter", json={"lora_name": "good"}).status_code == 200
    assert card(client, "good")["pinned"] is True
    assert unload(admin, "good", mode="abort").status_code == 200
    error_in(client.post("/v1/completions", json={"model": "good", **PROMPT}), 404)


def test_a_folder_of_adapters(guarded, client, place):
    assert card(client, "first")["tier"] == "disk"
    assert complete(client, "first") == complete(client, "sql")
    guarded.wait_for(lambda: card(client, "first")["tier"] == "device")  # what a card says may be a second old
    error_in(client.post("/v1/completions", json={"model": "second", **PROMPT}), 404)
    copy_adapter(place / "dir" / "second", "json")
    body = {"model": "second", **PROMPT}
    guarded.wait_for(lambda: client.post("/v1/completions", json=body).status_code != 404)
    assert complete(client, "second") == complete(client, "json")
    assert "second" in {model["id"] for model in client.get("/v1/models").json()["data"]}


def test_plug_ins(client, admin, place):
    assert complete(client, "plug-good") == complete(client, "sql")
    error_in(client.post("/v1/completions", json={"model": "plug-nothing", **PROMPT}), 503)
    error = error_in(load(admin, "x", "down://store"), 503)
    assert (error["type"], error["param"]) == ("AdapterSourceError", "lora_path")
    assert "the store is down" in error["message"]


def test_a_slow_download_delays_no_other(client, admin, place):
    (place / "store" / "go").unlink(missing_ok=True)
    with ThreadPoolExecutor(3) as threads:
        loads = [threads.submit(load, admin, name, "slow://good") for name in ("slow-1", "slow-2", "slow-2")]
        for _ in range(5):
            complete(client, "sql")
        assert not any(future.done() for future in loads)
        (place / "store" / "go").touch()
        assert sorted(future.result(60).status_code for future in loads) == [200, 200, 400]
    assert complete(client, "slow-1") == complete(client, "sql")
    for name in ("slow-1", "slow-2"):
        assert unload(admin, name).status_code == 200


def outside(place):
    return place / "outside"


def dots(place):
    return f"{place}/root/good/../../outside"


def link(place):
    (place / "root" / "link").symlink_to(place / "outside")
    return place / "root" / "link"


def linked_file(place):
    folder = copy_adapter(place / "root" / "linked-file")
    (folder / CONFIG).unlink()
    (folder / CONFIG).symlink_to("/etc/passwd")
    return folder


def linked_draft(place):
    folder = copy_adapter(place / "root" / "linked-draft")
    shutil.rmtree(folder / "draft", ignore_errors=True)
    (folder / "draft").symlink_to(place / "outside")
    return folder


def fifo(place):
    folder = copy_adapter(place / "root" / "fifo")
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    return folder


def sparse(place):
    folder = copy_adapter(place / "root" / "sparse")
    with open(folder / WEIGHTS, "r+b") as file:
        file.truncate(1 << 40)
    return folder


def root_of_all(place):
    return "/"


def process(place):
    return "/proc/self/cwd"


def remote(place):
    return "s3://bucket/x"


def local_url(place):
    return f"file://{place}/outside"


HOSTILE = [outside, dots, link, linked_file, linked_draft, fifo, sparse, root_of_all, process, remote, local_url]


@pytest.mark.parametrize("make", HOSTILE)
def test_hostile_paths(admin, client, place, make):
    error = error_in(load(admin, "bad", make(place)))
    assert (error["type"], error["param"]) == ("InvalidAdapter", "lora_path")
    error_in(client.get("/v1/models/bad"), 404)


def deep_config(folder):
    (folder / CONFIG).write_text("[" * 200_000)


def config_that_is_no_object(folder):
    (folder / CONFIG).write_text("[1]")


def config_of_wrong_types(folder):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"r": {"x": [1]}, "lora_alpha": "much"}))


def huge_config(folder):
    (folder / CONFIG).write_bytes(b" " * (2 << 20))


def cut_weights(folder):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    "spoil", [deep_config, config_that_is_no_object, config_of_wrong_types, huge_config, cut_weights]
)
def test_hostile_files(admin, client, place, tmp_path, spoil):
    folder = copy_adapter(place / "root" / tmp_path.name)
    spoil(folder)
    error = error_in(load(admin, "bad", folder))
    assert (error["type"], error["param"]) == ("InvalidAdapter", "lora_path")
    error_in(client.get("/v1/models/bad"), 404)


def test_hostile_names_of_models(client):
    for model in ("../outside", "..", "/etc", "first/../first", "first\0", "dir/first"):
        error_in(client.post("/v1/completions", json={"model": model, **PROMPT}), 404)


def test_a_spoiled_adapter_in_the_folder(client, place):
    (place / "dir" / "spoiled").mkdir()
    (place / "dir" / "spoiled" / CONFIG).write_text("{")
    (place / "dir" / "escaped").symlink_to(place / "outside")
    for name in ("spoiled", "escaped"):
        threading.Event().wait(1.1)  # what was known of the folder is forgotten
        assert error_in(client.post("/v1/completions", json={"model": name, **PROMPT}))["type"] == "InvalidAdapter"


def test_many_loads_of_one_name_at_once(admin, client, place):
    with ThreadPoolExecutor(6) as threads:
        answers = [*threads.map(lambda _: load(admin, "contested", place / "root" / "good"), range(6))]
    assert sorted(answer.status_code for answer in answers) == [200, *[400] * 5]
    assert {error_in(a)["type"] for a in answers if a.status_code == 400} == {"InvalidUserInput"}
    assert complete(client, "contested") == complete(client, "sql")
    assert unload(admin, "contested").status_code == 200


def test_loads_while_the_engine_dies_and_comes_back(guarded, admin, client, place):
    assert load(admin, "kept", place / "root" / "good").status_code == 200
    guarded.engine().kill()
    answers = []
    while not answers or answers[-1].status_code != 200:
        answers.append(load(admin, "new", place / "root" / "good"))
        assert len(answers) < 1000
        threading.Event().wait(0.05)
    for answer in answers[:-1]:
        error = error_in(answer, 503)
        assert error["type"] in ("EngineDeadError", "ServiceUnavailableError")
    for name in ("kept", "new", "first", "plug-good"):
        assert complete(client, name) == complete(client, "sql")
    for name in ("kept", "new"):
        assert unload(admin, name).status_code == 200


def test_adapters_removed_from_the_folder_are_forgotten(guarded, client, place):
    shutil.rmtree(place / "dir" / "first")
    guarded.wait_for(lambda: client.get("/v1/models/first").status_code == 404)
