"""Helpers of the tests of `AsyncLLM`; imported by its name, as `fake_engine`."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import fake_engine

from outrider.platform.client.async_llm import AsyncLLM
from outrider.platform.client.process.supervisor import EngineSpec, RestartPolicy
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.outputs import RequestOutput
from outrider.platform.core.sampling_params import SamplingParams

QUICK = RestartPolicy(first_delay=0.01, max_delay=0.05, max_failures=3)
LONG = SamplingParams(max_tokens=100)
FOREVER: dict[str, Any] = {"prompt_token_ids": [fake_engine.NEVER_END, 70, 71]}

Scenario = Callable[[AsyncLLM], Awaitable[None]]


def make(model: str, engine: str = "FakeEngine", **options: Any) -> AsyncLLM:
    args = EngineArgs(model=model, **options)
    return AsyncLLM.from_spec(EngineSpec(args=args, engine=f"fake_engine:{engine}", restart=QUICK))


def run(llm: AsyncLLM, scenario: Scenario, runner: Callable[[Any], Any] = asyncio.run) -> None:
    """Run `scenario` inside `async with llm`, and check that its tasks and errors are gone afterwards."""

    async def whole() -> None:
        problems: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        async with llm:
            await asyncio.wait_for(scenario(llm), 60)
        assert llm.state == "stopped"
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert llm.num_running == 0
        gc.collect()
        await asyncio.sleep(0)
        assert problems == []

    runner(whole())


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def first_output(llm: AsyncLLM, **options: Any) -> AsyncIterator[RequestOutput]:
    stream = llm.generate(FOREVER, LONG, **options)
    await anext(stream)
    return stream


async def aborted(llm: AsyncLLM, request_id: str) -> None:
    """Wait until the engine has aborted it (the fake counts it in its statistics, by the engine's own ids)."""
    while not any(i.startswith(f"{request_id}~") for i in (await llm.stats()).running_adapters):
        await asyncio.sleep(0.005)
