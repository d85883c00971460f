"""`/pause`, `/sleep`, `/update_weights` and `/reset_prefix_cache` of a real server, and its KV events."""

import json
import shutil
import threading
import time

import pytest
import torch
import zmq
from safetensors.torch import load_file, save_file

from outrider.models.demo import demo_model_path

from ..kv_consumer import AllBlocksCleared, CacheView, decode

KEY = "operator"
ADMIN = {"Authorization": f"Bearer {KEY}"}
HELLO = [{"role": "user", "content": "Hello! Who are you? " * 12}]
EVENTS = json.dumps(
    {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://127.0.0.1:0",
        "replay_endpoint": "tcp://127.0.0.1:0",
        "topic": "kv@pod@demo",
    }
)
END = b"\xff" * 8


@pytest.fixture(scope="module")
def http(start_server, fixed_drafts):
    server = start_server("--admin-api-key", KEY, "--kv-events-config", EVENTS, *fixed_drafts)
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
def test_sleep(http, make_router, level):
    before = [chat(http, model)[0] for model in ("outrider-demo", "sql")]
    pid, memory = http.server.engine().pid, http.server.engine().memory_info().rss
    endpoint = make_router().source["endpoint"]
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
    assert http.get("/kv_event_sources", headers=ADMIN).status_code == (200 if level == 1 else 503)
    if level == 1:
        assert http.server.engine().memory_info().rss < memory
    assert http.post("/wake_up", headers=ADMIN).json() == {"is_sleeping": False}
    assert (http.server.engine().pid == pid) == (level == 1)
    assert [chat(http, model)[0] for model in ("outrider-demo", "sql")] == before
    router = make_router()
    assert (router.source["endpoint"] == endpoint) == (level == 1), "another engine has another port"
    router.catch_up()
    assert router.view.held["GPU"]


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
        ("GET", "/kv_event_sources"),
        ("GET", "/get_world_size"),
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
    post(http, "/start_draft_weight_update")
    assert post(http, "/update_weights", {"path": "/gone"}) == {"message": "Weights received"}
    post(http, "/start_weight_update")  # drops the session before, whose trainer may be gone
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


class Router:
    """A subscriber of the server's events, and the cache as it knows it."""

    def __init__(self, context, source):
        self.source, self.view, self.next, self.batches = source, CacheView(), 0, []
        self._events, self._past = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._events.connect(source["endpoint"])
        self._events.subscribe(b"kv@")
        self._past.connect(source["replay_endpoint"])

    def catch_up(self):
        """Apply what was published before, from the first number that is missing."""
        self._past.send_multipart([b"", self.next.to_bytes(8)])
        while True:
            assert self._past.poll(20_000)
            _, _, number, payload = self._past.recv_multipart()
            if number == END:
                return
            self._apply(int.from_bytes(number), payload)

    def wait(self, condition):
        """Apply events as they come, and those that were missed, until `condition` holds."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            if self._events.poll(100):
                topic, number, payload = self._events.recv_multipart()
                assert topic == b"kv@pod@demo"
                if int.from_bytes(number) > self.next:
                    self.catch_up()
                self._apply(int.from_bytes(number), payload)
            else:  # the subscription may be younger than the last event
                self.catch_up()

    def _apply(self, number, payload):
        if number < self.next:
            return
        assert number == self.next, "a batch is missing"
        self.next += 1
        self.batches.append(decode(payload))
        self.view.apply(self.batches[-1])


@pytest.fixture
def make_router(http):
    with zmq.Context() as context:

        def make():
            (source,) = http.get("/kv_event_sources", headers=ADMIN).json()
            return Router(context, source)

        yield make
        context.destroy(linger=0)


def blocks(http, router, body):
    """Keys of the blocks of a prompt, as a router makes them from the request."""
    tokens = http.post("/tokenize", json=body).raise_for_status().json()["tokens"]
    size, adapter = router.source["block_size"], None if body["model"] == "outrider-demo" else body["model"]
    keys = []
    for index in range((len(tokens) - 1) // size):
        extra = tuple(key for key in (adapter, "" if index else body.get("cache_salt")) if key)
        keys.append((tuple(tokens[index * size : (index + 1) * size]), adapter, extra or None, ""))
    return keys


def test_a_router_knows_the_cached_prefix_of_each_request(http, make_router):
    http.post("/reset_prefix_cache", headers=ADMIN)
    router = make_router()
    assert {name: router.source[name] for name in ("data_parallel_rank", "topic")} == {
        "data_parallel_rank": 0,
        "topic": "kv@pod@demo",
    }
    router.catch_up()
    assert router.view.held == {"GPU": {}, "CPU": {}}
    bodies = [
        {"model": model, "messages": HELLO, "max_tokens": 4, "temperature": 0} | salt
        for model in ("outrider-demo", "sql")
        for salt in ({}, {"cache_salt": "pepper"})
    ]
    for body in bodies:
        keys = blocks(http, router, body)
        assert router.view.num_found(keys) == 0, "adapters and salts have blocks of their own"
        for _ in range(2):
            found = router.view.num_found(keys)
            answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == found * router.source["block_size"]
            router.wait(lambda keys=keys: router.view.num_found(keys) == len(keys))
    late = make_router()
    late.catch_up()
    assert late.view.held == router.view.held
    assert http.post("/reset_prefix_cache", headers=ADMIN).json() == {"success": True}
    router.wait(lambda: not router.view.held["GPU"])
    assert router.batches[-1].events == [AllBlocksCleared()]
    assert http.server.metric("kv_event_batches_total") >= router.next
    assert http.server.metric("kv_event_batches_dropped_total") == 0


def test_new_weights_clear_a_routers_cache(http, make_router):
    chat(http, "outrider-demo")
    router = make_router()
    router.catch_up()
    assert router.view.held["GPU"]
    post(http, "/update_weights", {"path": str(demo_model_path())})
    router.wait(lambda: router.batches[-1].events == [AllBlocksCleared()])
