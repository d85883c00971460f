"""`AsyncLLM.sleep` and `wake_up` with a fake engine in a real process: no engine process is left over."""

import asyncio

import pytest
from async_helpers import collect, make, run, until

from outrider.platform.client.async_llm import AsyncLLM
from outrider.platform.core.beam_search import BeamSearchParams
from outrider.platform.core.errors import AsleepError, ShuttingDownError
from outrider.platform.core.sampling_params import SamplingParams


async def generate(llm: AsyncLLM) -> list[int]:
    return (await collect(llm.generate([5, 6], SamplingParams(max_tokens=3))))[-1].outputs[0].token_ids


def test_a_cancelled_wake_up_shuts_its_engine_down(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        await llm.sleep(2)
        assert llm.engine_pid is None
        waking = asyncio.create_task(llm.wake_up())
        await until(lambda: llm.engine_pid is not None)
        waking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waking
        assert llm.engine_pid is None
        assert llm.state == "sleeping"
        for refused in (generate(llm), llm.check_health()):
            with pytest.raises(AsleepError):
                await refused
        await llm.wake_up()
        assert await generate(llm) == [5, 6, 5]

    run(make(model_path), scenario)


def test_a_shutdown_comes_before_a_wake_up_that_waits(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        sleeping = asyncio.create_task(llm.sleep(2))
        await until(lambda: llm.state == "sleeping")
        waking = asyncio.create_task(llm.wake_up())
        await asyncio.sleep(0)
        await llm.shutdown()
        await sleeping
        with pytest.raises(ShuttingDownError):
            await waking
        assert llm.engine_pid is None

    run(make(model_path), scenario)


@pytest.mark.parametrize("ends", ["sleep", "drain"])
def test_a_beam_search_in_flight_is_a_running_request(model_path: str, ends: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        search = asyncio.create_task(llm.beam_search([6, 7], BeamSearchParams(1, 10, ignore_eos=True)))
        while not llm.num_running:  # every turn of the event loop: a fast engine is soon done
            await asyncio.sleep(0)
        assert await (llm.sleep(1) if ends == "sleep" else llm.drain(60)) in (None, True)
        assert len(search.result().sequences[0].tokens) == 12
        for refused in (llm.beam_search([6], BeamSearchParams(1, 2)), generate(llm)):
            with pytest.raises(AsleepError if ends == "sleep" else ShuttingDownError):
                await refused

    run(make(model_path), scenario)
