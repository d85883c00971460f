"""Loads whose adapter comes with the call: the form, shared memory, rights and bounds. The engine is a script."""

import hashlib
import json
import os

import pytest

from outrider.platform.client.adapters.sources import AdapterSources, SourceOptions
from outrider.platform.client.adapters.sources.memory import MAX_CONFIG_BYTES
from outrider.platform.client.adapters.sources.shared_memory import SHARED_MEMORY
from outrider.platform.core.adapter_files import CONFIG_FILE, WEIGHT_FILES
from outrider.platform.core.errors import AdapterError
from outrider.platform.http.files.form import MAX_FIELD_BYTES

from ....error_answers import error_in

LOAD = "/v1/load_lora_adapter"
WEIGHTS = os.urandom(3_000_000)
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
CONFIG = '{\n  "r": 8\n}'


def post(http, data=None, weights=WEIGHTS, **options):
    """A form with `data` and the weights."""
    fields = {"lora_name": "policy", "config": CONFIG} | (data or {})
    fields = {name: value for name, value in fields.items() if value is not None}
    files = {} if weights is None else {"file": ("adapter_model.safetensors", weights)}
    return http.request("POST", LOAD, data=fields, files=files or {"x": (None, b"")}, **options)


@pytest.fixture
def loaded(llm, monkeypatch):
    """Each load: the request, its configuration and weights as the engine reads them, and the options."""
    loads, load = [], llm.adapters.load

    async def record(request, **options):
        folder = request.folder
        loads.append((request, folder.read(CONFIG_FILE, 1 << 20), folder.read(WEIGHT_FILES[0], 1 << 30), options))
        llm.sources.memory.hold(request)
        return await load(request, **options)

    monkeypatch.setattr(llm.adapters, "load", record)
    return loads


def test_a_form(http, llm, loaded):
    response = post(http)
    assert response.status_code == 200, response.text
    assert response.headers["x-outrider-adapter-digest"] == "digest"
    [(request, config, weights, options)] = loaded
    assert (request.name, config, weights) == ("policy", CONFIG.encode(), WEIGHTS)
    assert options == {"load_inplace": False, "pinned": False, "running": "finish"}
    assert http.get("/v1/models/policy").json()["root"] == request.path
    error = error_in(post(http))
    assert (error["type"], error["param"]) == ("InvalidUserInput", "lora_name")
    response = post(http, {"load_inplace": "true", "running": "abort", "pinned": "true", "sha256": SHA256})
    assert response.status_code == 200, response.text
    assert loaded[1][3] == {"load_inplace": True, "pinned": True, "running": "abort"}
    assert llm.sources.memory.num_bytes == len(WEIGHTS) + len(CONFIG), "the same content"


def test_a_configuration_that_is_a_file(http, loaded):
    files = {"config": (CONFIG_FILE, CONFIG), "file": ("x", WEIGHTS)}
    assert http.request("POST", LOAD, data={"lora_name": "policy"}, files=files).status_code == 200
    assert loaded[0][1] == CONFIG.encode()


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({"lora_name": None}, "lora_name"),
        ({"lora_name": ""}, "lora_name"),
        ({"lora_name": "a\x1fb"}, None),
        ({"lora_name": "base"}, "lora_name"),
        ({"config": None}, "config"),
        ({"config": "x" * (MAX_CONFIG_BYTES + 1)}, "config"),
        ({"lora_path": "/etc"}, "lora_path"),
        ({"load_inplace": "perhaps"}, "load_inplace"),
        ({"running": "stop"}, "running"),
        ({"sha256": "abc"}, "sha256"),
        ({"sha256": "0" * 64}, "sha256"),
        ({"tenant": "nobody"}, "tenant"),
        ({"tenant": "x" * (MAX_FIELD_BYTES + 1)}, "tenant"),
    ],
)
def test_wrong_fields(http, llm, loaded, data, param):
    response = post(http, data)
    if param is None:
        assert response.status_code == 200, "the mark cannot be sent"
        assert "\x1f" not in loaded[0][0].name
        return
    assert error_in(response, 404 if data.get("tenant") == "nobody" else 400)["param"] == param
    assert not loaded
    assert llm.sources.memory.num_bytes == 0


def test_the_largest_configuration(http, loaded):
    assert post(http, {"config": " " * MAX_CONFIG_BYTES}).status_code == 200
    assert len(loaded[0][1]) == MAX_CONFIG_BYTES


def test_a_form_without_a_file(http, llm):
    assert error_in(post(http, weights=None))["param"] == "file"
    error_in(http.request("POST", LOAD, content=b"x", headers={"content-type": "multipart/form-data; boundary=b"}))
    error_in(http.request("POST", LOAD, content=b"x", headers={"content-type": "multipart/form-data"}))
    body = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n' + WEIGHTS
    cut = http.request("POST", LOAD, content=body, headers={"content-type": "multipart/form-data; boundary=b"})
    assert "boundary" in error_in(cut)["message"]
    assert llm.sources.memory.num_bytes == 0


def test_a_file_that_is_too_large(llm, http, monkeypatch):
    monkeypatch.setattr(llm, "sources", AdapterSources(SourceOptions(max_adapter_bytes=1 << 20)))
    assert error_in(post(http), 413)["param"] == "file", "by its length"
    body = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n' + WEIGHTS + b"\r\n--b--"

    async def pieces():
        for start in range(0, len(body), 100_000):
            yield body[start : start + 100_000]

    headers = {"content-type": "multipart/form-data; boundary=b"}
    error = error_in(http.request("POST", LOAD, content=pieces(), headers=headers))
    assert (error["type"], error["param"]) == ("InvalidAdapter", "file")
    assert "--max-lora-bytes" in error["message"]
    monkeypatch.setattr(llm, "sources", AdapterSources(SourceOptions(max_upload_bytes=1 << 20)))
    assert "--lora-upload-bytes" in error_in(post(http))["message"]
    assert llm.sources.memory.num_bytes == 0


def test_errors_are_about_what_arrived(http, llm, monkeypatch):
    problems = []

    async def load(request, **options):
        raise AdapterError(problems[-1], param="lora_path")

    monkeypatch.setattr(llm.adapters, "load", load)
    for problem, param in ((f"{CONFIG_FILE}: r is wrong", "config"), ("rank 9 exceeds the limit", "file")):
        problems.append(problem)
        assert error_in(post(http))["param"] == param
    assert llm.sources.memory.num_bytes == 0


# --- rights -----------------------------------------------------------------------------------------------------------


def test_upload_needs_an_admin_key(make_http, llm, loaded):
    http = make_http(api_keys=("client",), admin_api_keys=("admin",))
    error_in(post(http), 401)
    error_in(post(http, headers={"Authorization": "Bearer client"}), 403)
    assert not loaded
    assert post(http, headers={"Authorization": "Bearer admin"}).status_code == 200


def test_an_engine_that_is_not_there_is_said_before_the_file_is_read(http, llm, loaded):
    llm.state = "restarting"
    error_in(post(http, {"config": None}), 503)
    assert not loaded


def test_a_page_of_another_site(http, make_http, loaded):
    origin = {"origin": "https://evil.example"}
    assert error_in(post(http, headers=origin), 403)["type"] == "PermissionDeniedError"
    assert not loaded
    assert post(make_http(cors_origins=("https://evil.example",)), headers=origin).status_code == 200


# --- shared memory ----------------------------------------------------------------------------------------------------


@pytest.fixture
def shm():
    """Name of a shared memory object with the weights."""
    name = f"outrider-test-upload-{os.getpid()}"
    with open(f"{SHARED_MEMORY}/{name}", "wb") as file:
        file.write(WEIGHTS)
    yield name
    os.unlink(f"{SHARED_MEMORY}/{name}")


def load_shm(http, shm, **fields):
    body = {"lora_name": "policy", "lora_shm": shm, "config": {"r": 8}} | fields
    return http.post(LOAD, {name: value for name, value in body.items() if value is not None})


def test_shared_memory(make_http, llm, loaded, shm):
    http = make_http(lora_roots=(SHARED_MEMORY,))
    response = load_shm(http, shm, sha256=SHA256)
    assert response.status_code == 200, response.text
    assert response.headers["x-outrider-adapter-digest"] == "digest"
    [(request, config, weights, _)] = loaded
    assert (request.name, json.loads(config), weights) == ("policy", {"r": 8}, WEIGHTS)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"config": None}, "config"),
        ({"lora_shm": ""}, "lora_shm"),
        ({"lora_shm": "../shm/x"}, "lora_shm"),
        ({"lora_shm": "outrider-test-nothing"}, "lora_shm"),
        ({"lora_path": "/adapters/x"}, "lora_path"),
        ({"draft_path": "/adapters/x"}, "draft_path"),
        ({"lora_shm": None, "config": None}, "lora_path"),
        ({"lora_shm": None, "lora_path": "/adapters/x"}, "config"),
        ({"lora_shm": None, "lora_path": "/adapters/x", "config": None, "sha256": SHA256}, "sha256"),
        ({"sha256": "0" * 64}, "sha256"),
        ({"sha256": "0" * 63}, "sha256"),
    ],
)
def test_wrong_fields_of_shared_memory(http, llm, loaded, shm, fields, param):
    assert error_in(load_shm(http, shm, **fields))["param"] == param
    assert not loaded
    assert llm.sources.memory.num_bytes == 0


def test_a_used_name_is_refused_before_shared_memory_is_read(make_http, loaded, shm):
    http = make_http(lora_roots=(SHARED_MEMORY,))
    assert load_shm(http, shm).status_code == 200
    assert error_in(load_shm(http, "outrider-test-nothing"))["param"] == "lora_name"


def test_shared_memory_needs_a_root(make_http, loaded, shm):
    error = error_in(load_shm(make_http(lora_roots=()), shm))
    assert error["param"] == "lora_shm"
    assert "--lora-root /dev/shm" in error["message"]
    assert not loaded
