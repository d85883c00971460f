"""`/pause`, `/sleep` and `/reset_prefix_cache` of a real server: the text is the same before and after."""

import json
import threading

import pytest

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
