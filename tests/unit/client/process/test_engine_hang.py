"""An engine that is alive but does not answer is ended and started again."""

import asyncio
import os
import signal
import time

import pytest
from async_helpers import QUICK, collect, first_output, run, until

from outrider.platform.client.async_llm import AsyncLLM
from outrider.platform.client.process.supervisor import EngineSpec
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import EngineDeadError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]


def make(model_path: str, hang_timeout: float) -> AsyncLLM:
    spec = EngineSpec(
        args=EngineArgs(model=model_path), engine="fake_engine:slow", restart=QUICK, hang_timeout=hang_timeout
    )
    return AsyncLLM.from_spec(spec)


def stop_engine(llm: AsyncLLM) -> int:
    """The engine's process hangs: it is stopped, not dead."""
    assert llm.engine_pid is not None
    os.kill(llm.engine_pid, signal.SIGSTOP)
    return llm.engine_pid


@pytest.mark.parametrize("busy", [False, True])
def test_a_hanging_engine_is_started_again(model_path, runner, busy):
    async def scenario(llm):
        running = [await first_output(llm)] if busy else []
        hung = stop_engine(llm)
        for stream in running:
            with pytest.raises(EngineDeadError, match=r"died: it did not answer for 1\.5 s"):
                await collect(stream)
        await until(lambda: llm.num_restarts == 1 and llm.state == "ready")
        assert llm.engine_pid != hung
        assert (await collect(llm.generate([5])))[-1].finished

    run(make(model_path, 1.5), scenario, runner)


def test_a_working_engine_is_left_alone(model_path):
    """For longer than its timeout, with work and without."""

    async def scenario(llm):
        stream = await first_output(llm)
        pid = llm.engine_pid
        await asyncio.sleep(3.0)
        await stream.aclose()
        await asyncio.sleep(3.0)
        assert (llm.engine_pid, llm.num_restarts) == (pid, 0)

    run(make(model_path, 2.5), scenario)


def test_a_hang_timeout_of_zero_never_restarts(model_path):
    async def scenario(llm):
        pid = stop_engine(llm)
        await asyncio.sleep(1.0)
        assert (llm.engine_pid, llm.num_restarts) == (pid, 0)
        os.kill(pid, signal.SIGCONT)
        assert (await collect(llm.generate([5])))[-1].finished

    run(make(model_path, 0.0), scenario)


def test_time_in_which_this_process_was_stopped_does_not_count(model_path):
    """A look at the clock alone would blame the engine for it."""

    async def scenario(llm):
        pid = llm.engine_pid
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGSTOP)  # both are stopped, as by a debugger or a moved virtual machine
        time.sleep(3.0)
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(0.5)
        assert (llm.engine_pid, llm.num_restarts) == (pid, 0)

    run(make(model_path, 2.0), scenario)
