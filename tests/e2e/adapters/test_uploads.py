"""Adapters that a trainer sends to a real server: by form, through shared memory, over restarts, with their digests."""

import hashlib
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import safetensors.torch
import torch

from outrider.models.demo import demo_adapters

from ...error_answers import error_in
from .conftest import SIZE

DIGEST = "x-outrider-adapter-digest"
PROMPT = {"prompt": "List all customers", "max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def openai_client(guarded):
    return guarded.client("client")


def files_of(name: str) -> tuple[bytes, bytes]:
    """Configuration and weights of one of the demo's adapters."""
    folder = Path(demo_adapters()[name])
    return tuple((folder / file).read_bytes() for file in ("adapter_config.json", "adapter_model.safetensors"))


def send(http: httpx.Client, name: str, weights: bytes, config: bytes | str | None, **fields) -> httpx.Response:
    data = {"lora_name": name, "config": config, **fields}
    data = {field: value for field, value in data.items() if value is not None}
    return http.post("/v1/load_lora_adapter", data=data, files={"file": ("adapter_model.safetensors", weights)})


def load(http: httpx.Client, name: str, of: str, **fields) -> str:
    """Send one of the demo's adapters; returns its digest."""
    config, weights = files_of(of)
    response = send(http, name, weights, config, load_inplace="true", **fields)
    assert response.status_code == 200, response.text
    return response.headers[DIGEST]


@pytest.fixture
def policy(admin):
    """The digest of the adapter "policy", which is `sql`."""
    yield load(admin, "policy", "sql")
    admin.post("/v1/unload_lora_adapter", json={"lora_name": "policy"})


def answer(client, model: str) -> tuple[str, str | None]:
    raw = client.completions.with_raw_response.create(model=model, **PROMPT)
    return raw.parse().choices[0].text, raw.headers.get(DIGEST)


def test_a_sent_adapter_answers(openai_client, admin, policy):
    text, digest = answer(openai_client, "policy")
    assert digest == policy
    assert text == answer(openai_client, "sql")[0]
    assert admin.get("/v1/models/policy").json()["digest"] == policy
    assert answer(openai_client, "outrider-demo")[1] is None


def test_each_route_says_which_version_answered(openai_client, client, policy):
    chat = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    bodies = {
        "/v1/completions": {"model": "policy", **PROMPT, "n": 2},
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"model": "policy", "input": "hi", "max_output_tokens": 4},
    }
    for path, body in bodies.items():
        for stream in (False, True):
            with client.stream("POST", path, json={**body, "stream": stream}) as response:
                assert response.status_code == 200, response.read()
                assert response.headers[DIGEST] == policy, (path, stream)
    for path, body in (("/v1/embeddings", {"input": ["a", "b"]}), ("/v1/score", {"text_1": "a", "text_2": "b"})):
        response = client.post(path, json={"model": "policy", **body})
        assert response.headers[DIGEST] == policy, path
    mixed = client.post("/v1/completions", json={"model": "policy:0.5+json:0.5", **PROMPT}).headers[DIGEST]
    assert mixed not in (policy, "")
    assert DIGEST not in error_in_headers(client.post("/v1/completions", json={"model": "nothing", **PROMPT}))
    with openai_client.chat.completions.with_streaming_response.create(**chat, stream=True) as raw:
        assert raw.headers[DIGEST] == policy


def error_in_headers(response: httpx.Response) -> httpx.Headers:
    error_in(response, 404)
    return response.headers


class LongStream:
    """A stream on the adapter that runs while something happens."""

    def __init__(self, http: httpx.Client, happen: Callable[[], None]) -> None:
        body = {"model": "policy", **PROMPT, "max_tokens": 600, "stream": True, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            self.digest = response.headers[DIGEST]
            events = response.iter_lines()
            next(events)
            happen()
            self.events = [json.loads(event[6:]) for event in events if event.startswith("data: {")]


@pytest.mark.parametrize("running", ["finish", "abort"])
def test_a_stream_keeps_its_version_during_a_load(openai_client, admin, policy, running):
    digests = []
    stream = LongStream(admin, lambda: digests.append(load(admin, "policy", "support", running=running)))
    assert stream.digest == policy != digests[0]
    assert answer(openai_client, "policy")[1] == digests[0]
    last = stream.events[-1]
    if running == "finish":
        assert last["choices"][0]["finish_reason"] == "length"
    else:
        assert last["error"]["type"] == "AdapterReplaced"


def test_answers_during_loads_match_the_version_in_their_header(openai_client, admin, policy):
    """Every answer is that of the version in its header."""
    texts: dict[str, set[str]] = {}
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            text, digest = answer(openai_client, "policy")
            texts.setdefault(str(digest), set()).add(text)

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        try:
            digests = {load(admin, "policy", name) for name in ("support", "sql") * 5}
        finally:
            stop.set()
        for asked in asking:
            asked.result()
    assert texts.keys() <= digests | {policy}
    assert all(len(found) == 1 for found in texts.values())


# --- shared memory ----------------------------------------------------------------------------------------------------


@pytest.fixture
def shm():
    """Puts bytes into a shared memory object; returns its name."""
    path = Path(f"/dev/shm/outrider-test-e2e-{os.getpid()}")
    yield lambda value: path.write_bytes(value) and path.name
    path.unlink(missing_ok=True)


def test_shared_memory(openai_client, admin, client, policy, shm):
    config, weights = files_of("support")
    body = {"lora_name": "policy", "lora_shm": shm(weights), "config": json.loads(config), "load_inplace": True}
    sha256 = hashlib.sha256(weights).hexdigest()
    response = admin.post("/v1/load_lora_adapter", json=body | {"sha256": sha256})
    assert response.status_code == 200, response.text
    shm(b"overwritten")
    assert answer(openai_client, "policy") == (answer(openai_client, "support")[0], response.headers[DIGEST])
    error = error_in(admin.post("/v1/load_lora_adapter", json=body | {"sha256": sha256}))
    assert (error["type"], error["param"]) == ("InvalidAdapter", "sha256")
    error_in(client.post("/v1/load_lora_adapter", json=body), 403)


# --- what is refused --------------------------------------------------------------------------------------------------


def header_claims(weights: bytes, change: Callable[[dict], None]) -> bytes:
    """The file with another header."""
    size = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + weights[8 + size :]


def grow(header: dict) -> None:
    key = next(key for key in header if key != "__metadata__")
    header[key]["data_offsets"][1] += 1 << 40


def odd_dtype(header: dict) -> None:
    for key, entry in header.items():
        if key != "__metadata__":
            entry["dtype"] = "Q8"


def as_integers(weights: bytes) -> bytes:
    tensors = safetensors.torch.load(weights)
    return safetensors.torch.save({key: tensor.to(torch.int32) for key, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (lambda weights: weights[:-1], "file"),
        (lambda weights: weights[:100], "file"),
        (lambda weights: b"", "file"),
        (lambda weights: (1 << 63).to_bytes(8, "little") + weights[8:], "file"),
        (lambda weights: header_claims(weights, grow), "file"),
        (lambda weights: header_claims(weights, odd_dtype), "file"),
        (as_integers, "file"),
        (lambda weights: weights + bytes(SIZE), "file"),
    ],
    ids=["cut", "cut-header", "empty", "length", "sizes", "unknown-dtype", "integers", "large"],
)
def test_a_wrong_file(openai_client, admin, policy, change, param):
    config, weights = files_of("sql")
    error = error_in(send(admin, "policy", change(weights), config, load_inplace="true"))
    assert (error["type"], error["param"]) == ("InvalidAdapter", param)
    assert answer(openai_client, "policy")[1] == policy, "the one that had the name stays"


@pytest.mark.parametrize(
    ("config", "param"),
    [(None, "config"), ("{", "config"), ("[]", "config"), ("{}", "config"), ('{"peft_type": "IA3"}', "config")],
)
def test_a_wrong_configuration(admin, policy, config, param):
    error = error_in(send(admin, "policy", files_of("sql")[1], config, load_inplace="true"))
    assert error["param"] == param, error


def test_a_name_that_is_taken(admin, policy):
    config, weights = files_of("sql")
    error = error_in(send(admin, "policy", weights, config))
    assert (error["type"], error["param"]) == ("InvalidUserInput", "lora_name")
    error = error_in(send(admin, "x", weights, config, sha256="0" * 64))
    assert error["param"] == "sha256"


def test_memory_is_given_back(admin, policy):
    """More loads than fit together: each is in place of the last one, or refused."""
    for number in range(6):
        load(admin, "policy", ("json", "sql")[number % 2])
    config, weights = files_of("json")
    for number in range(5):
        send(admin, f"more-{number}", weights, config.replace(b'"r"', b" " * number + b'"r"'))
    error = error_in(send(admin, "more-5", weights, config.replace(b'"r"', b" " * 5 + b'"r"')))
    assert "--lora-upload-bytes" in error["message"]
    for number in range(5):
        admin.post("/v1/unload_lora_adapter", json={"lora_name": f"more-{number}"})
    load(admin, "policy", "sql")


# --- restarts ---------------------------------------------------------------------------------------------------------


def test_the_engine_dies_and_sleeps(guarded, openai_client, admin, policy):
    """An adapter from memory is there again, after the engine's process was killed and after a sleep of level 2."""
    text, digest = answer(openai_client, "policy")
    guarded.engine().kill()
    guarded.wait_for(lambda: admin.get("/v1/models/policy").json().get("digest") == digest and guarded.has_engine())
    guarded.wait_for(lambda: admin.post("/v1/completions", json={"model": "policy", **PROMPT}).status_code == 200)
    assert answer(openai_client, "policy") == (text, digest)
    assert admin.post("/sleep", params={"level": 2}).status_code == 200
    assert not guarded.has_engine()
    assert admin.post("/wake_up").status_code == 200
    assert answer(openai_client, "policy") == (text, digest)
