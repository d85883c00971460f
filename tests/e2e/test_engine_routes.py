"""`/sleep`, `/wake_up` and `/reset_prefix_cache` of a real server: the text is the same before and after."""

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
    ):
        assert http.request(method, path).status_code == 403
    assert http.post("/sleep", headers=ADMIN | {"Origin": "https://example.com"}).status_code == 403
    wrong = http.post("/sleep?level=3", headers=ADMIN)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "level")
    assert http.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": False}
