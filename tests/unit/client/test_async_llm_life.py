"""The life of the engine process behind `AsyncLLM`: death and restart, errors at the start, drain, the end."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_engine
import psutil
import pytest
from async_helpers import QUICK, collect, first_output, make, run, until

from outrider.platform.client.async_llm import AsyncLLM
from outrider.platform.client.process.supervisor import EngineProcess, EngineSpec
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import (
    EngineDeadError,
    InvalidUserInputError,
    OutriderError,
    ShuttingDownError,
    UnsupportedModelError,
)
from outrider.platform.core.lora_request import LoRARequest

pytestmark = pytest.mark.usefixtures("nothing_is_left")


# --- death and restart ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "reason"), [("raise", "RuntimeError: bug in step"), ("suicide", "SIGKILL"), ("kill", "SIGKILL")]
)
def test_death_fails_running_requests_and_restarts(
    model_path: str,
    runner: Callable[[Any], Any],
    death: str,
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        marker = tmp_path / "marker"
        marker.touch()
        await llm.adapters.load(LoRARequest("a", path="/a"), pinned=True)
        await llm.adapters.load(LoRARequest("gone\nERROR forged", path=f"once:{marker}"))
        running = [await first_output(llm) for _ in range(3)]
        pid = llm.engine_pid
        assert pid is not None
        if death == "kill":
            os.kill(pid, signal.SIGKILL)
        else:
            prompt = fake_engine.RAISE_IN_STEP if death == "raise" else fake_engine.KILL_PROCESS
            running.append(llm.generate([prompt]))
        for result in await asyncio.gather(*map(collect, running), return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert reason in result.message
        assert llm.state == "restarting"
        with pytest.raises(EngineDeadError, match="restarting"):
            await collect(llm.generate([5]))
        with pytest.raises(EngineDeadError):
            await llm.stats()
        await until(lambda: llm.state == "ready")
        assert llm.engine_pid not in (None, pid)
        assert llm.num_restarts == 1
        assert [(info.name, info.pinned) for info in await llm.adapters.list()] == [("a", True)]
        assert (await collect(llm.generate([5], lora_request="a")))[-1].finished

    run(make(model_path, "slow"), scenario, runner)
    (line,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "be loaded again" in text]
    assert "\n" not in line


@pytest.mark.slow
def test_unread_tokens_come_before_the_engines_death(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        stream = await first_output(llm, delta=True)
        (state,) = llm.output_processor._requests.values()
        await until(lambda: state.sequences[0].has_changed)
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGKILL)
        await until(lambda: llm.state == "restarting")
        assert await anext(stream)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await anext(stream)

    run(make(model_path, "slow"), scenario)


@pytest.mark.slow
def test_calls_fail_when_the_engine_dies(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await llm.adapters.load(LoRARequest("a", path="kill"))
        with pytest.raises(EngineDeadError):
            await llm.stats()
        await until(lambda: llm.num_restarts == 1 and llm.state == "ready")
        assert await llm.adapters.list() == []

    run(make(model_path), scenario)


@pytest.mark.slow
def test_state_is_stopped_if_the_restart_fails(model_path: str, tmp_path: Path) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        with pytest.raises(EngineDeadError):
            await collect(llm.generate([fake_engine.KILL_PROCESS]))
        await until(lambda: llm.state == "stopped")
        assert isinstance(llm.failure, UnsupportedModelError)
        assert llm.num_restarts == QUICK.max_failures
        with pytest.raises(EngineDeadError, match="the model is gone"):
            await collect(llm.generate([5]))

    permit = tmp_path / "permit"
    permit.touch()
    run(make(model_path, "starts_once", served_model_name=str(permit)), scenario)


@pytest.mark.parametrize(
    ("model", "options", "error", "words"),
    [
        ("unsupported", {}, UnsupportedModelError, "architecture Foo"),
        ("crash", {}, EngineDeadError, "exit status 7"),
        ("bug", {}, OutriderError, "KeyError: 'bug'"),
        ("/nowhere", {}, OutriderError, "nowhere"),  # the engine starts, the tokenizer is missing
        ("x", {"dtype": object()}, OutriderError, "object"),
    ],
)
def test_error_at_the_start_is_the_engines_own(
    model: str, options: dict[str, Any], error: type[OutriderError], words: str
) -> None:
    async def scenario() -> None:
        llm = make(model, **options)
        with pytest.raises(error, match=words) as caught:
            await llm.start()
        assert type(caught.value) is error or error is OutriderError
        assert llm.state == "stopped"
        with pytest.raises(error, match=words):
            await collect(llm.generate([5]))
        await llm.shutdown()
        with pytest.raises(error, match=words):
            async with make(model, **options):
                pass
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_engine_that_cannot_be_imported() -> None:
    async def scenario() -> None:
        llm = AsyncLLM.from_spec(EngineSpec(args=EngineArgs(), engine="no_such_module:Engine"))
        with pytest.raises(OutriderError, match="no_such_module"):
            await llm.start()
        await llm.shutdown()

    asyncio.run(scenario())


def no_space(*_: Any, **__: Any) -> str:
    raise OSError(28, "No space left on device")


def test_no_folder_at_the_start(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        llm = make(model_path)
        monkeypatch.setattr("tempfile.mkdtemp", no_space)
        with pytest.raises(OutriderError, match="No space left"):
            await asyncio.wait_for(llm.start(), 30)
        assert llm.state == "stopped"
        assert llm.failure is not None
        await llm.shutdown()

    asyncio.run(scenario())
    monkeypatch.undo()


def test_no_socket_leaves_no_folder(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        llm = make(model_path)
        monkeypatch.setattr("outrider.platform.client.process.ipc._open", no_space)
        with pytest.raises(OutriderError, match="No space left"):
            await asyncio.wait_for(llm.start(), 30)
        await llm.shutdown()

    asyncio.run(scenario())


@pytest.mark.parametrize("num_failures", [1, 100])
def test_no_folder_at_a_restart(model_path: str, monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
    mkdtemp, left = tempfile.mkdtemp, [num_failures]

    def sometimes(*args: Any, **options: Any) -> str:
        left[0] -= 1
        return no_space() if left[0] >= 0 else mkdtemp(*args, **options)

    async def scenario(llm: AsyncLLM) -> None:
        monkeypatch.setattr("tempfile.mkdtemp", sometimes)
        with pytest.raises(EngineDeadError):
            await collect(llm.generate([fake_engine.KILL_PROCESS]))
        await until(lambda: llm.state == ("ready" if num_failures == 1 else "stopped"))
        if num_failures == 1:
            assert (await collect(llm.generate([5])))[-1].finished
        else:
            assert llm.failure is not None
            with pytest.raises(EngineDeadError, match="No space left"):
                await collect(llm.generate([5]))

    run(make(model_path), scenario)


@pytest.mark.slow
def test_a_failed_supervisor_ends_all_waits(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: EngineProcess) -> None:
        await stop(self)
        raise RuntimeError("bug in stop")

    async def scenario(llm: AsyncLLM) -> None:
        monkeypatch.setattr(EngineProcess, "stop", broken)
        with pytest.raises(EngineDeadError):
            await collect(llm.generate([fake_engine.KILL_PROCESS]))
        await until(lambda: llm.state == "stopped")
        assert "bug in stop" in str(llm.failure)

    async def start() -> None:
        llm = make("crash")
        with pytest.raises(OutriderError, match="bug in stop"):
            await asyncio.wait_for(llm.start(), 30)
        await llm.shutdown()

    stop = EngineProcess.stop
    run(make(model_path), scenario)
    asyncio.run(start())


def test_belongs_to_one_event_loop(model_path: str) -> None:
    llm = make(model_path)

    async def use() -> None:
        assert (await collect(llm.generate([5])))[-1].finished

    async def end() -> None:
        await llm.shutdown()
        with pytest.raises(ShuttingDownError):
            await llm.start()

    asyncio.run(use())
    with pytest.raises(InvalidUserInputError, match="another event loop"):
        asyncio.run(use())
    asyncio.run(end())


def test_start_after_shutdown(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        await llm.shutdown()
        for call in (llm.start, llm.stats, llm.adapters.list):
            with pytest.raises(ShuttingDownError):
                await call()

    run(make(model_path), scenario)


def test_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match=r"AsyncLLM.*max_modle_len"):
        AsyncLLM("x", max_modle_len=5)


# --- the end --------------------------------------------------------------------------------------------------------


def test_forgotten_shutdown_leaves_nothing(model_path: str, runner: Callable[[Any], Any]) -> None:
    async def scenario() -> None:
        await collect(make(model_path).generate([5]))

    runner(scenario())  # the event loop cancels its tasks; the fixture looks for what is left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_of_the_terminal_do_not_end_the_engine(model_path: str, number: signal.Signals) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        stream = await first_output(llm)
        pid = llm.engine_pid
        assert pid is not None
        assert os.getpgid(pid) != os.getpgid(0)
        os.kill(pid, number)
        for _ in range(3):
            await anext(stream)
        assert llm.engine_pid == pid
        await stream.aclose()  # type: ignore[attr-defined]

    run(make(model_path, "slow"), scenario)


@pytest.mark.slow
def test_no_orphan_when_the_api_process_is_killed(model_path: str, tmp_path: Path) -> None:
    code = (
        "import asyncio, sys, tempfile\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"tempfile.tempdir = {tempfile.gettempdir()!r}\n"
        "from async_helpers import make\n"
        "async def main():\n"
        f"    llm = make({model_path!r})\n"
        "    await llm.start()\n"
        "    print(llm.engine_pid, flush=True)\n"
        "    await asyncio.sleep(100)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        engine = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        engine.wait(timeout=30)
    assert not psutil.pid_exists(engine.pid) or engine.status() == psutil.STATUS_ZOMBIE
    deadline = time.monotonic() + 5
    while list(Path(tempfile.gettempdir()).glob("outrider-*")) and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.slow
def test_no_file_descriptors_leak(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        await collect(llm.generate([5]))
        with pytest.raises(EngineDeadError):
            await collect(llm.generate([fake_engine.KILL_PROCESS]))
        await until(lambda: llm.state == "ready")

    run(make(model_path), scenario)  # what is opened once, stays
    before = psutil.Process().num_fds()
    for _ in range(2):
        run(make(model_path), scenario)
    gc.collect()
    deadline = time.monotonic() + 5  # ZeroMQ's own thread closes what is left of a socket a little later
    while psutil.Process().num_fds() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert psutil.Process().num_fds() <= before
