"""`/pause`, `/sleep`, `/update_weights` and `/reset_prefix_cache` of a real server."""

import json
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.models.demo import demo_model_path

KEY = "operator"
ADMIN = {"Authorization": f"Bearer {KEY}"}
HELLO = [{"role": "user", "content": "Hello! Who are you? " * 12}]


@pytest.fixture(scope="module")
def http(start_server, fixed_drafts):
    server = start_server("--admin-api-key", KEY, *fixed_drafts)
    with server.http() as http:
        http.server = server
        yield http
    server.stop()


def chat(http, model="sql"):
    body = {"model": model, "messages": HELLO, "max_tokens": 40, "temperature": 0}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"], response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_prefix_cache_is_emptied(http):
    before, _ = chat(http)
    assert chat(http)[1] > 0
    assert http.post("/reset_prefix_cache", headers=ADMIN).json() == {"success": True}
    assert chat(http) == (before, 0)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(http, level):
    before = [chat(http, model)[0] for model in ("outrider-demo", "sql")]
    pid, memory = http.server.engine().pid, http.server.engine().memory_info().rss
    finished = []
    body = {"model": "sql", "prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as running:
        lines = running.iter_lines()
        next(lines)
        asleep = threading.Thread(target=http.post, args=(f"/sleep?level={level}",), kwargs={"headers": ADMIN})
        asleep.start()
        finished += lines  # what runs is finished first
        asleep.join()
    assert "data: [DONE]" in finished
    assert '"finish_reason":"length"' in "".join(finished)
    assert http.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": True}
    refused = http.post("/v1/chat/completions", json={"messages": HELLO})
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "EngineAsleep")
    assert http.get("/health").json()["status"] == "sleeping"
    assert http.get("/metrics").status_code == 200
    assert http.server.has_engine() == (level == 1)
    if level == 1:
        assert http.server.engine().memory_info().rss < memory
    assert http.post("/wake_up", headers=ADMIN).json() == {"is_sleeping": False}
    assert (http.server.engine().pid == pid) == (level == 1)
    assert [chat(http, model)[0] for model in ("outrider-demo", "sql")] == before


def test_operators_alone(http):
    for method, path in (
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("GET", "/is_sleeping"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("GET", "/is_paused"),
        ("GET", "/weight_info"),
        ("POST", "/update_weights"),
        ("POST", "/start_weight_update"),
        ("POST", "/start_draft_weight_update"),
        ("POST", "/finish_weight_update"),
        ("POST", "/update_weights_from_disk"),
    ):
        assert http.request(method, path).status_code == 403
    assert http.post("/sleep", headers=ADMIN | {"Origin": "https://example.com"}).status_code == 403
    wrong = http.post("/sleep?level=3", headers=ADMIN)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "level")
    wrong = http.post("/pause?mode=stop", headers=ADMIN)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "mode")
    wrong = http.post("/pause", json={"mode": "stop"}, headers=ADMIN)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "mode")
    assert http.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": False}


def stream(http, finished):
    """The lines of an endless answer, and the thread that reads them."""
    body = {"model": "sql", "prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True, "temperature": 0}
    first = threading.Event()

    def read():
        with http.stream("POST", "/v1/completions", json=body) as running:
            for line in running.iter_lines():
                finished.append(line)
                first.set()
        first.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert first.wait(60)
    return reader


def text_of(lines):
    pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"])


@pytest.mark.parametrize(
    ("query", "body", "reason"),
    [
        ("?mode=keep&clear_cache=false", None, "length"),
        ("", {"mode": "keep"}, "length"),
        ("?mode=wait", None, "length"),
        ("", None, "abort"),
    ],
)
def test_pause(http, query, body, reason):
    whole, lines, later = [], [], []
    stream(http, whole).join()
    reader = stream(http, lines)
    paused = http.post(f"/pause{query}", json=body, headers=ADMIN)
    assert (paused.status_code, paused.json()) == (200, {"status": "paused"})
    assert http.get("/is_paused", headers=ADMIN).json() == {"is_paused": True}
    assert (http.get("/health").status_code, http.get("/health").json()["status"]) == (200, "paused")
    asking = threading.Thread(target=lambda: later.append(chat(http)[0]))
    asking.start()
    asking.join(0.2)
    assert later == []
    assert http.post("/resume", headers=ADMIN).json() == {"status": "resumed"}
    reader.join()
    asking.join()
    assert len(later) == 1
    assert f'"finish_reason":"{reason}"' in "".join(lines)
    assert text_of(whole).startswith(text_of(lines))
    assert (text_of(whole) == text_of(lines)) == (reason == "length")
    assert http.get("/is_paused", headers=ADMIN).json() == {"is_paused": False}


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory):
    """The demo's checkpoint with a norm of half the size."""
    folder = shutil.copytree(demo_model_path(), tmp_path_factory.mktemp("weights") / "new")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * torch.linspace(
        0.2, 1.5, len(tensors["model.norm.weight"])
    )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def post(http, path, body=None, status=200):
    answer = http.post(path, json=body, headers=ADMIN)
    assert answer.status_code == status, answer.text
    return answer.json()


def text(http):
    body = {"model": "outrider-demo", "prompt": "Hello", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    return post(http, "/v1/completions", body)["choices"][0]["text"]


def test_new_weights(http, new_weights):
    before, old = text(http), {"path": str(demo_model_path())}
    lines = []
    reader = stream(http, lines)
    error = post(http, "/update_weights", {"path": str(new_weights)}, 400)["error"]
    assert (error["type"], "pause" in error["message"]) == ("InvalidUserInput", True)
    post(http, "/pause", {"mode": "keep"})
    update = {"update_info": {"weights_path": str(new_weights)}, "weight_version": "7"}
    assert post(http, "/update_weights", update) == {"message": "Weights updated"}
    post(http, "/resume")
    reader.join()
    assert '"finish_reason":"length"' in "".join(lines)
    assert http.get("/weight_info", headers=ADMIN).json() == {"weight_version": "7"}
    after = text(http)
    assert after != before
    http.server.engine().kill()  # the next one reads the new files
    http.server.wait_for(lambda: http.get("/health").status_code == 503)
    http.server.wait_for(lambda: http.get("/health").status_code == 200)
    assert text(http) == after
    post(http, "/start_weight_update")
    assert "has been started" in post(http, "/start_draft_weight_update", status=400)["error"]["message"]
    assert post(http, "/update_weights", old) == {"message": "Weights received"}
    assert text(http) == after
    assert post(http, "/finish_weight_update", {"weight_version": "8"})["weight_version"] == "8"
    assert text(http) == before
    assert post(http, "/update_weights_from_disk", {"model_path": str(new_weights)})["success"]
    assert text(http) == after
    assert post(http, "/update_weights_from_disk", {"model_path": old["path"], "abort_all_requests": True})["success"]
    assert text(http) == before
    assert http.get("/is_paused", headers=ADMIN).json() == {"is_paused": False}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/update_weights", {}, "path"),
        ("/update_weights", {"path": "/a", "shared_memory": "b"}, "path"),
        ("/update_weights", {"path": "/a", "weights_path": "/a"}, "weights_path"),
        ("/update_weights", {"shared_memory": "../etc/passwd"}, "shared_memory"),
        ("/update_weights", {"shared_memory": ".hidden"}, "shared_memory"),
        ("/update_weights", {"shared_memory": "n" * 256}, "shared_memory"),
        ("/update_weights", {"path": "/" + "p" * 4096}, "path"),
        ("/update_weights", {"path": "/a", "weight_version": "v" * 257}, "weight_version"),
        ("/finish_weight_update", None, None),
    ],
)
def test_wrong_updates(http, path, body, param):
    error = post(http, path, body, 400)["error"]
    assert error["param"] == param
