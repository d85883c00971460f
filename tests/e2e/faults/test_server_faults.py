"""The server's own process survives jumps of the clock, and is killed; the next one's engine dies, and hangs; then that
server gets SIGTERM. In this order."""

import signal
import threading
import time

import httpx
import psutil
import pytest
from fault_helpers import FAULTS

HANG_SECONDS = 8
"""--engine-hang-timeout: longer than an engine stalls on a busy machine."""


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    return ("--journal", str(tmp_path_factory.mktemp("journal") / "journal"), "--max-model-len", "2000")


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    """A file with the offset of the server's wall clock (clock/sitecustomize.py)."""
    clock = tmp_path_factory.mktemp("clock") / "offset"
    clock.write_text("0")
    return clock


@pytest.fixture(scope="module")
def server(start, options, clock):
    return start(*options, PYTHONPATH=str(FAULTS / "clock"), OUTRIDER_TEST_CLOCK=str(clock))


@pytest.fixture(scope="module")
def second_server(start, options, server):
    """With the journal of the first one, which must have ended."""
    return start(*options, "--engine-hang-timeout", str(HANG_SECONDS))


@pytest.mark.parametrize("jump", [86400.0, -86400.0, -3e9])
def test_clock_jumps(server, clock, accounts, load, check_served, outcome, jump):
    """The wall clock of both processes goes a day forwards, a day back, to before 1970."""
    streams = load(server, f"jump{jump:g}", 3, max_tokens=250)
    streams.wait_until_all_stream(server)
    clock.write_text(str(jump))
    try:
        check_served(server)
        streams.join()
        assert len(set(streams.texts().values())) == 1
        assert server.http().get("/health").status_code == 200
        rows = accounts.by_client_id(f"jump{jump:g}")
        assert {row["status"] for row in rows.values()} == {"length"}
        for row in rows.values():  # durations are those of a clock that does not jump
            assert 0 <= row["first_token_at"] - row["received_at"] <= row["finished_at"] - row["received_at"] < 60
    finally:
        clock.write_text("0")
    check_served(server)
    outcome("3 streams and a new request were served, and their durations are right")


def test_api_process_killed_mid_stream(server, request, accounts, load, check_served, outcome):
    """`kill -9`: no engine is left behind, and the next server accounts for lost requests, once."""
    streams = load(server, "lost", 5, max_tokens=1900, n=4)  # for longer than a checkpoint takes
    streams.wait_until_all_stream(server, events=3)
    time.sleep(1.2)
    # Each has counts of a checkpoint: an event after one second passes one.
    streams.wait_until_all_stream(server, events=2 + max(map(len, streams.lines.values())))
    engine = server.engine()
    server.process.kill()
    streams.join()
    assert all(lines[-1] != "data: [DONE]" for lines in streams.lines.values())  # clients see that it is cut
    server.wait_for(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 10)
    again = request.getfixturevalue("second_server")
    again.wait_for(lambda: len(accounts.by_client_id("lost")) == 5)
    for row in accounts.by_client_id("lost").values():
        assert (row["status"], row["tenant"]) == ("lost", "acme")
        assert 0 < row["output_tokens"] < 4 * 1900
    check_served(again)
    assert len(accounts.by_client_id("lost")) == 5
    outcome("5 rows 'lost' with the counts of their last checkpoints; the engine process is gone")


@pytest.mark.parametrize("fault", ["killed", "hanging"])
def test_engine_fault_mid_stream(second_server, accounts, load, check_served, outcome, fault):
    """Typed errors to every client, streaming or not; a new engine; every request in the ledger once, with counts."""
    server = second_server
    server.wait_for(lambda: server.http().get("/health").status_code == 200)
    streams = load(server, fault, 6, max_tokens=1900)
    waiting: list[httpx.Response] = []

    def ask() -> None:
        headers = {"Authorization": f"Bearer {accounts.key}", "X-Request-Id": f"{fault}-whole"}
        with server.http(headers=headers) as http:
            waiting.append(
                http.post("/v1/completions", json={"prompt": "Once", "ignore_eos": True, "max_tokens": 1900})
            )

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


def test_server_process_paused(second_server, load, outcome, check_served):
    """Both processes are suspended for longer than the engine may hang, as in a moved virtual machine."""
    server = second_server
    server.wait_for(lambda: server.http().get("/health").status_code == 200)
    streams = load(server, "paused", 2, max_tokens=600)
    streams.wait_until_all_stream(server)
    engine = server.engine()
    server.process.send_signal(signal.SIGSTOP)
    engine.send_signal(signal.SIGSTOP)
    threading.Event().wait(HANG_SECONDS + 1)
    server.process.send_signal(signal.SIGCONT)
    threading.Event().wait(0.3)  # what would be in time to blame the engine, were clocks all that counts
    engine.send_signal(signal.SIGCONT)
    streams.join()
    assert len(set(streams.texts().values())) == 1
    assert server.engine().pid == engine.pid
    check_served(server)
    outcome("2 streams went on to their ends; the engine was not started again")


def test_sigterm_under_load(second_server, accounts, load, outcome):
    """Running requests finish, new ones are refused, the exit status is 0, and the ledger is complete."""
    server = second_server
    streams = load(server, "drained", 12, max_tokens=400)
    streams.wait_until_all_stream(server)
    server.process.send_signal(signal.SIGTERM)
    with server.http(headers={"Authorization": f"Bearer {accounts.key}", "X-Request-Id": "refused-1"}) as http:
        server.wait_for(lambda: http.get("/health").json()["status"] == "draining")
        refused = http.post("/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "ShuttingDownError")
    streams.join()
    assert server.process.wait(30) == 0
    assert "Traceback" not in server.output
    assert len(set(streams.texts().values())) == 1  # all are whole
    rows = accounts.by_client_id("drained")
    assert len(rows) == 12
    assert {(row["status"], row["output_tokens"]) for row in rows.values()} == {("length", 400)}
    assert accounts.by_client_id("refused") == {}
    outcome("12 streams finished, 12 rows 'length', a new request got ShuttingDownError, exit status 0")
