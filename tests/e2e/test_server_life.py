"""A server's life: starting, keys, disconnects, death of the engine, draining."""

import signal
import socket
import subprocess
import sys
import time

import httpx
import openai
import psutil
import pytest

LONG = {"model": "outrider-demo", "prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
"""Runs for seconds."""


@pytest.fixture(scope="module")
def own_server(start_server, fixed_drafts):
    """One whose engine these tests may kill. With keys, to see that they hold; float32, so that text is exact."""
    arguments = "--api-key key-1 --api-key key-2 --max-model-len 2000 --log-level error --dtype float32"
    return start_server(*arguments.split(), *fixed_drafts)


@pytest.fixture(scope="module")
def own_http(own_server):
    with own_server.http(headers={"Authorization": "Bearer key-1"}) as http:
        yield http


def test_summary(server):
    output = server.output
    assert output.startswith("Outrider is loading outrider-demo\n")
    for text in ("outrider-demo", "16,384 tokens", "KV cache", "json (rank", "eagle3, 4 drafts", "curl "):
        assert text in output, output
    assert "Traceback" not in output


def test_defaults_of_a_first_start(start_server):
    """Without options: the demo, its adapters, and as much speculation as pays. In float32, so that text is exact."""
    server = start_server("--dtype", "float32")
    assert "eagle3, at most 4 drafts" in server.output
    with server.http() as http:
        texts = set()
        for speculative in (False, None):
            body = {"model": "json", "prompt": "Anna from Lisbon", "max_tokens": 24, "speculative": speculative}
            texts.add(http.post("/v1/completions", json=body | {"seed": 3}).json()["choices"][0]["text"])
        card = http.get("/v1/models/json").json()
    assert len(texts) == 1
    assert card["draft"] == "loaded"
    assert server.stop() == 0


def test_open_routes(server, http):
    assert http.get("/health").json() == {"status": "ready"}
    assert http.get("/version").json()["version"]
    assert "outrider:num_requests_running 0.0" in http.get("/metrics").text


def test_keys(own_server):
    with pytest.raises(openai.AuthenticationError) as refused:
        own_server.client("wrong").models.list()
    assert refused.value.code == "invalid_api_key"
    for key in ("key-1", "key-2"):
        assert own_server.client(key).models.list().data
    assert own_server.http().get("/health").status_code == 200


@pytest.mark.parametrize("model", ["outrider-demo", "sql"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 7}])
def test_speculation_does_not_change_the_text(own_http, model, sampling):
    body = {"model": model, "prompt": "The capital of", "max_tokens": 60, "return_metrics": True, **sampling}
    answers = [own_http.post("/v1/completions", json=body | {"speculative": k}).json() for k in (False, 1, True)]
    counts = [answer["metrics"]["speculative_decoding"] for answer in answers]
    assert counts[0]["num_draft_tokens"] == 0
    for count, most in zip(counts[1:], (1, 4), strict=True):
        assert count["num_draft_tokens"] > 0
        assert len(count["steps_by_k"]) == most + 1, "no step verifies more than the request allows, and some so many"
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1


def test_closed_connection_aborts(server, http):
    with http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()  # kept: without it the connection is closed at once
        next(lines)
        server.wait_for(lambda: server.metric("num_requests_running") == 1)
        aborted = server.metric("request_success_total", finished_reason="abort")
    server.wait_for(lambda: server.metric("num_requests_running") == 0)
    server.wait_for(lambda: server.metric("request_success_total", finished_reason="abort") == aborted + 1)


def test_impatient_client_without_stream_aborts(server):
    with pytest.raises(httpx.ReadTimeout), server.http() as http:
        http.post("/v1/completions", json={**LONG, "stream": False}, timeout=httpx.Timeout(60, read=0.1))
    server.wait_for(lambda: server.metric("num_requests_running") == 0)


def test_dead_engine_fails_its_requests_and_comes_back(own_server, own_http):
    engine = own_server.engine()
    own_http.post("/v1/completions", json={"model": "sql", "prompt": "All", "max_tokens": 20, "ignore_eos": True})
    drafts, looked_up = "spec_decode_num_drafts_total", "prefix_cache_queries_total"
    before = own_server.metric(drafts, adapter="sql"), own_server.metric(looked_up)
    assert min(before) > 0
    with own_http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        engine.kill()
        *_, error, done = [line for line in lines if line]
    assert "EngineDeadError" in error
    assert done == "data: [DONE]"
    health = own_http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "restarting")
    refused = own_http.post("/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    own_server.wait_for(lambda: own_http.get("/health").status_code == 200)
    assert own_server.engine().pid != engine.pid
    answer = own_http.post("/v1/completions", json={"model": "sql", "prompt": "All", "max_tokens": 2})
    assert answer.status_code == 200, answer.text  # the adapters are back too
    card = own_http.get("/v1/models/sql").json()
    assert card["draft"] == "loaded"
    assert own_server.metric(drafts, adapter="sql") >= before[0], "a counter fell"
    assert own_server.metric(looked_up) > before[1]


def test_sigterm_drains(own_server, own_http):
    """The last test of this server. Running requests finish, new ones are refused, and the exit status is 0."""
    body = {**LONG, "max_tokens": 1000, "speculative": False}  # for longer than all requests below take
    with own_http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        own_server.process.send_signal(signal.SIGTERM)
        own_server.wait_for(lambda: own_http.get("/health").json()["status"] == "draining")
        refused = own_http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "ShuttingDownError")
        *_, last, done = [line for line in lines if line]
    assert '"finish_reason":"length"' in last
    assert done == "data: [DONE]"
    assert own_server.process.wait(30) == 0
    assert "Traceback" not in own_server.output


def test_dead_rank_fails_its_requests_and_the_engine_comes_back(start_server):
    server = start_server(*"-tp 2 --no-speculation --max-model-len 2000 --log-level error --dtype float32".split())
    engine = server.engine()
    with server.http() as http:
        with http.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            (rank,) = (child for child in engine.children() if "executor.rank_process" in " ".join(child.cmdline()))
            rank.kill()
            *_, error, done = [line for line in lines if line]
        assert "EngineDeadError" in error
        assert "rank 1 of 2 is gone" in error
        assert done == "data: [DONE]"
        server.wait_for(lambda: http.get("/health").status_code == 200)
        assert server.engine().pid != engine.pid
        answer = http.post("/v1/completions", json={"model": "sql", "prompt": "All", "max_tokens": 2})
        assert answer.status_code == 200, answer.text
    assert server.stop() == 0


def test_port_in_use_is_found_at_once(start_server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        second = start_server("--port", port, ready=False)
        assert second.process.wait(30) == 1
        second.stop()
    assert f"outrider: error: argument --port: cannot listen on 127.0.0.1:{port}" in second.output
    assert "Traceback" not in second.output


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["/nowhere/at-all"], 1, "/nowhere/at-all"),
        (["--lora-modules", "x=/nowhere/at-all", "--no-speculation"], 1, "/nowhere/at-all"),
        (["--lora-resolver", "no_such_module:factory"], 1, "--lora-resolver"),
        (["--max-num-seqs", "none"], 2, "--max-num-seqs"),
    ],
)
def test_failed_starts_give_a_one_line_reason(start_server, arguments, status, text):
    server = start_server(*arguments, ready=False)
    assert server.process.wait(60) == status
    server.stop()
    (line,) = [line for line in server.output.splitlines() if "error:" in line]
    assert text in line
    assert "Traceback" not in server.output


def test_sigterm_while_starting(start_server):
    server = start_server(ready=False)
    server.wait_for(server.has_engine)
    assert server.stop() == 0
    assert "ready on" not in server.output
    assert "Traceback" not in server.output


def test_a_killed_test_run_leaves_no_server(repo_root):
    """A process that starts a server as the tests do is killed: the server ends, and its engine with it."""
    code = (
        "import importlib.util, subprocess, sys, time\n"
        f"spec = importlib.util.spec_from_file_location('setup', {str(repo_root / 'tests' / 'conftest.py')!r})\n"
        "setup = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(setup)\n"
        "serve = [sys.executable, '-m', 'outrider.platform.cli.main', 'serve', '--port', '0', '--no-speculation']\n"
        "server = subprocess.Popen(setup.tethered_command(serve), stdout=subprocess.DEVNULL)\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        server = psutil.Process(int(run.stdout.readline()))
        wait_until(server.children)
        left = [server, *server.children()]
        run.kill()
    wait_until(lambda: not any(map(is_alive, left)))


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_interrupt_while_it_starts_is_one_line(start_server):
    server = start_server(ready=False)
    server.wait_for(lambda: "Outrider is loading" in server.output)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    server.stop()
    assert server.output.splitlines() == [
        "Outrider is loading outrider-demo",
        "Outrider was stopped before it was ready",
    ]
