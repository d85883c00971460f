"""The engine's process dies or hangs in the middle of its work."""

import signal
import threading

import httpx
import pytest

LONG = {"max_tokens": 1900}


@pytest.fixture(scope="module")
def server(start):
    return start("--max-model-len", "2000", "--engine-hang-timeout", "3")


@pytest.mark.parametrize("fault", ["killed", "hanging"])
def test_engine_fault_mid_stream(server, accounts, load, check_served, outcome, fault):
    """Typed errors to every client, streaming or not; a new engine; every request in the ledger once, with counts."""
    server.wait_for(lambda: server.http().get("/health").status_code == 200)
    streams = load(server, fault, 6, **LONG)
    waiting: list[httpx.Response] = []

    def ask() -> None:
        headers = {"Authorization": f"Bearer {accounts.key}", "X-Request-Id": f"{fault}-whole"}
        with server.http(headers=headers) as http:
            waiting.append(http.post("/v1/completions", json={"prompt": "Once", "ignore_eos": True, **LONG}))

    whole = threading.Thread(target=ask)
    whole.start()
    streams.wait_until_all_stream(server, events=5)
    server.wait_for(lambda: server.metric("num_requests_running") == 7)
    engine = server.engine()
    engine.send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    streams.join()
    whole.join()
    for lines in streams.lines.values():
        assert '"type": "EngineDeadError"' in lines[-2]
        assert lines[-1] == "data: [DONE]"
    assert waiting[0].status_code == 503
    assert waiting[0].json()["error"]["type"] == "EngineDeadError"
    assert "retry-after" in waiting[0].headers
    rows = accounts.by_client_id(fault)
    assert len(rows) == 7
    for name, row in rows.items():
        assert (row["status"], row["error_type"], row["tenant"]) == ("error", "EngineDeadError", "acme")
        if name in streams.lines:
            assert row["output_tokens"] == streams.num_tokens(name)
            assert row["prompt_tokens"] > 0
    server.wait_for(lambda: server.has_engine() and server.http().get("/health").status_code == 200)
    assert server.engine().pid != engine.pid
    check_served(server)
    check_served(server, model="sql")
    outcome("7 clients got EngineDeadError, 7 rows 'error'; a new engine serves")


def test_server_process_paused(server, load, outcome, check_served):
    """Both processes are suspended for longer than the engine may hang, as in a moved virtual machine."""
    server.wait_for(lambda: server.http().get("/health").status_code == 200)
    streams = load(server, "paused", 2, max_tokens=600)
    streams.wait_until_all_stream(server)
    engine = server.engine()
    server.process.send_signal(signal.SIGSTOP)
    engine.send_signal(signal.SIGSTOP)
    threading.Event().wait(4)
    server.process.send_signal(signal.SIGCONT)
    threading.Event().wait(0.3)  # what would be in time to blame the engine, were clocks all that counts
    engine.send_signal(signal.SIGCONT)
    streams.join()
    assert len(set(streams.texts().values())) == 1
    assert server.engine().pid == engine.pid
    check_served(server)
    outcome("2 streams went on to their ends; the engine was not started again")
