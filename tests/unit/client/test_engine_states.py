"""Admission in each state of an engine, in this process and in one of its own."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest
from async_helpers import LONG, collect, first_output, make, run, until

from outrider.platform.client.async_llm import AsyncLLM
from outrider.platform.client.engine_client import EngineClient, EngineState
from outrider.platform.client.llm import LLM
from outrider.platform.client.local_engine import LocalEngine
from outrider.platform.client.remote_engine import RemoteEngine
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import AsleepError, EngineDeadError, OutriderError, ShuttingDownError
from outrider.platform.core.sampling_params import SamplingParams

REFUSALS = {
    EngineState.STARTING: None,
    EngineState.READY: None,
    EngineState.PAUSED: None,  # once it has been resumed
    EngineState.RESTARTING: None,  # the process that is not there raises EngineDeadError
    EngineState.ASLEEP_1: AsleepError,
    EngineState.ASLEEP_2: AsleepError,
    EngineState.DRAINING: ShuttingDownError,
    EngineState.STOPPED: ShuttingDownError,
}


@pytest.mark.parametrize("state", EngineState)
def test_every_state_has_an_admission_and_a_name(state: EngineState) -> None:
    error = state.refusal("over")
    assert type(error) is (REFUSALS[state] or type(None))
    assert not isinstance(error, ShuttingDownError) or error.message == "over"
    assert (state.label == "sleeping") == (state.sleep_level > 0) == (state.name in ("ASLEEP_1", "ASLEEP_2"))


LOCAL: type[EngineClient[None]] = LocalEngine
REMOTE: type[EngineClient[Awaitable[None]]] = RemoteEngine
"""The type checker compares both with the protocol."""


async def request(llm: AsyncLLM) -> None:
    await collect(llm.generate([5, 6], SamplingParams(max_tokens=2)))


async def adapters(llm: AsyncLLM) -> None:
    await llm.adapters.list()


async def answers(llm: AsyncLLM, state: EngineState, *expected: type[OutriderError] | None) -> None:
    """Check the state, and the answers to a request and to a call about adapters."""
    assert llm.engine.state is state
    assert llm.state == state.label
    calls: tuple[Callable[[AsyncLLM], Awaitable[None]], ...] = (request, adapters)
    for call, error in zip(calls, expected, strict=True):
        if error is None:
            await call(llm)
        else:
            with pytest.raises(error):
                await call(llm)


def test_an_engine_process_that_sleeps_drains_and_stops(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        await answers(llm, EngineState.READY, None, None)
        await llm.sleep(1)
        await answers(llm, EngineState.ASLEEP_1, AsleepError, None)
        await llm.sleep(2)
        await answers(llm, EngineState.ASLEEP_2, AsleepError, AsleepError)
        await llm.wake_up()
        await answers(llm, EngineState.READY, None, None)
        await llm.drain(5)
        await answers(llm, EngineState.DRAINING, ShuttingDownError, None)
        await llm.shutdown()
        await answers(llm, EngineState.STOPPED, ShuttingDownError, ShuttingDownError)

    run(make(model_path), scenario)


def test_an_engine_process_that_starts_and_dies(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        running = await first_output(llm)
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await collect(running)
        await answers(llm, EngineState.RESTARTING, EngineDeadError, EngineDeadError)
        await until(lambda: llm.state == "ready")
        await answers(llm, EngineState.READY, None, None)

    llm = make(model_path)
    assert llm.engine.state is EngineState.STARTING
    run(llm, scenario)


def test_requests_wait_for_a_start(model_path: str) -> None:
    async def early() -> None:
        llm = make(model_path)
        waiting = asyncio.create_task(request(llm))
        await asyncio.sleep(0)
        assert llm.engine.state is EngineState.STARTING
        await waiting
        assert llm.engine.state is EngineState.READY
        await llm.shutdown()

    asyncio.run(asyncio.wait_for(early(), 60))


def test_draining_comes_before_sleep(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        await llm.sleep(2)
        await llm.drain(5)
        assert llm.state == "draining"
        with pytest.raises(ShuttingDownError):
            await request(llm)

    run(make(model_path), scenario)


def test_an_engine_in_this_process(model_path: str) -> None:
    llm = LLM.from_engine_args(EngineArgs(model=model_path), engine="fake_engine:FakeEngine")

    def check(state: EngineState, error: type[OutriderError] | None) -> None:
        assert llm.llm_engine.engine.state is state
        assert llm.is_sleeping() == (state.sleep_level > 0)
        for call in (lambda: llm.generate([[5]], LONG, use_tqdm=False), lambda: llm.adapters.list()):
            if error is None:
                call()
            else:
                with pytest.raises(error):
                    call()

    check(EngineState.READY, None)
    llm.sleep(1)
    check(EngineState.ASLEEP_1, AsleepError)
    with pytest.raises(AsleepError):
        llm.start_profile("/nowhere")
    llm.sleep(2)
    check(EngineState.ASLEEP_2, AsleepError)
    assert (llm.stats().num_running, llm.reset_prefix_cache()) == (0, True)
    llm.wake_up()
    check(EngineState.READY, None)
    llm.sleep(2)
    llm.shutdown()
    check(EngineState.STOPPED, ShuttingDownError)
    for verb in (llm.wake_up, llm.sleep, llm.stats):
        with pytest.raises(ShuttingDownError):
            verb()
