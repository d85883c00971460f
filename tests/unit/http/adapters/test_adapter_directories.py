"""Adapters that are not loaded: those of --lora-dir and of a plug-in; fields of their cards."""

import shutil
from pathlib import Path

import pytest

from outrider.platform.client.adapters.sources import AdapterSources, SourceOptions
from outrider.platform.core.errors import AdapterError, AdapterSourceError
from outrider.platform.core.messages import AdapterInfo

from ....error_answers import error_in


def make_adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"x" * 10)
    return folder


@pytest.fixture
def directory(llm, tmp_path):
    path = tmp_path / "adapters"
    make_adapter(path / "sql")
    llm.now = 0.0
    llm.sources = AdapterSources(SourceOptions(directories=(str(path),), max_adapter_bytes=1000), clock=lambda: llm.now)
    return path


def used(http, llm, model):
    response = http.post("/v1/completions", {"model": model, "prompt": "x"})
    assert response.status_code == 200, response.text
    return llm.calls[-1]["lora_request"]


def test_adapters_are_found_by_name(directory, http, llm):
    for model in ("sql", "base:sql"):
        assert used(http, llm, model).path == str(directory / "sql")
    mix = used(http, llm, "+sql:0.5")
    assert [part.request.path for part in mix.parts] == [str(directory / "sql")]
    card = http.get("/v1/models/sql").json()
    assert (card["tier"], card["rows"], card["parent"], card["root"]) == ("disk", 0, "base", str(directory / "sql"))
    assert http.post("/tokenize", {"model": "sql", "prompt": "a"}).status_code == 200


def test_new_ones_are_found_and_removed_ones_forgotten(directory, http, llm):
    assert http.post("/v1/completions", {"model": "new", "prompt": "x"}).status_code == 404
    make_adapter(directory / "new")
    llm.now = 2.0
    assert used(http, llm, "new").path == str(directory / "new")
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["base", "alias", "new", "sql"]
    llm.in_engine["new"] = AdapterInfo("new", str(directory / "new"), "d", 8, 8, "device")  # as its first request does
    shutil.rmtree(directory / "new")
    llm.now = 4.0
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["base", "alias", "sql"]
    assert http.post("/v1/completions", {"model": "new", "prompt": "x"}).status_code == 404
    assert "new" not in llm.in_engine, "memory returns"


def test_all_parts_of_a_sum_are_found(directory, http, llm):
    make_adapter(directory / "json")
    for body in ({"model": "sql:0.5+json:0.5"}, {"adapters": ["sql", {"name": "json", "weight": 0.5}]}):
        response = http.post("/v1/completions", {"prompt": "x", **body})
        assert response.status_code == 200, response.text
        assert {part.request.name for part in llm.calls[-1]["lora_request"].parts} == {"sql", "json"}


@pytest.mark.parametrize("model", ["..", "../adapters/sql", "/etc", ".", "sql/", "./sql", "sql\0", "\n", "x" * 4000])
def test_names_that_are_no_folders(directory, http, model):
    error = error_in(http.post("/v1/completions", {"model": model, "prompt": "x"}), 404)
    assert error["param"] == "model"


def test_a_link_to_a_folder_outside(directory, http, llm, tmp_path):
    outside = make_adapter(tmp_path / "outside")
    (directory / "link").symlink_to(outside)
    error = error_in(http.post("/v1/completions", {"model": "link", "prompt": "x"}))
    assert (error["type"], error["param"]) == ("InvalidAdapter", "model")
    assert used(http, llm, "sql"), "the others go on"


def test_a_loaded_adapter_wins(directory, http, llm):
    assert http.load_adapter("sql", "/other/sql").status_code == 200
    assert used(http, llm, "sql").path == "/other/sql"
    assert http.get("/v1/models/sql").json()["root"] == "/other/sql"


def test_found_adapters_can_be_pinned_and_reloaded(directory, http, llm):
    assert http.post("/v1/pin_lora_adapter", {"lora_name": "sql"}).status_code == 200
    assert llm.in_engine["sql"].pinned
    assert llm.in_engine["sql"].path == str(directory / "sql")
    error_in(http.post("/v1/pin_lora_adapter", {"lora_name": "other"}), 404)


def test_details_of_a_card(http, llm):
    http.load_adapter("x")
    llm.in_engine["x"] = AdapterInfo(
        "x", "/adapters/x", "abc", 8, 16, "host", True, 3, num_waiting=2, num_bytes=12345, load_seconds=0.25
    )
    card = http.get("/v1/models/x").json()
    expected = {"tier": "host", "rank": 8, "rows": 16, "bytes": 12345, "pinned": True, "digest": "abc"}
    expected |= {"num_running": 3, "num_waiting": 2, "load_seconds": 0.25, "parent": "base", "draft": ""}
    assert {key: card[key] for key in expected} == expected


def test_a_plug_in_that_fails_concerns_its_names_only(http, llm, monkeypatch):
    class Broken(AdapterSources):
        finds_names = True

        async def find(self, name):
            raise AdapterSourceError("the store is down") if name == "x" else AdapterError("odd", param="model")

        async def in_directories(self):
            return {}

    llm.sources = Broken()
    assert error_in(http.post("/v1/completions", {"model": "x", "prompt": "a"}), 503)["message"] == "the store is down"
    assert error_in(http.post("/v1/completions", {"model": "y", "prompt": "a"}))["message"] == "odd"
    assert http.post("/v1/completions", {"model": "base", "prompt": "a"}).status_code == 200
