"""Shutdown of an `AsyncLLM` with running and waiting requests."""

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from async_helpers import FOREVER, LONG, collect, first_output, make, run, until

from outrider.platform.client.adapters.sources import AdapterSources, SourceOptions
from outrider.platform.client.async_llm import AsyncLLM
from outrider.platform.client.process.supervisor import EngineSpec
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import ShuttingDownError
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_drain(model_path: str, runner: Callable[[Any], Any]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        endless = await first_output(llm, request_id="endless")
        task = asyncio.create_task(collect(llm.generate([70], SamplingParams(max_tokens=5))))
        await until(lambda: llm.num_running == 2)
        assert not await llm.drain(0.01)
        assert llm.state == "draining"
        with pytest.raises(ShuttingDownError):
            await collect(llm.generate([5]))
        assert (await task)[-1].finished
        await llm.abort("endless")
        await collect(endless)
        assert await llm.drain(10)

    run(make(model_path, "slow"), scenario, runner)


def test_shutdown_fails_running_requests(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        task = asyncio.create_task(collect(llm.generate(FOREVER, LONG)))
        await until(lambda: llm.num_running == 1)
        await llm.shutdown()
        with pytest.raises(ShuttingDownError):
            await task
        with pytest.raises(ShuttingDownError):
            await collect(llm.generate([5]))

    run(make(model_path, "slow"), scenario)


class Hanging:
    """A source of adapters that does not answer before the test ends."""

    num_asked = num_answered = 0
    answers = threading.Event()

    def resolve(self, name: str, source: str | None) -> str | None:
        if source == "hangs://c":
            Hanging.num_asked += 1
            Hanging.answers.wait(30)
            Hanging.num_answered += 1
        return None


def test_shutdown_fails_calls_that_wait(model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hanging", sys.modules[__name__])

    async def scenario(llm: AsyncLLM) -> None:
        hangs = LoRARequest("c", path="hangs://c")
        hanging = [f"until:{tmp_path / 'never'}"] * 2
        loads = [llm.adapters.load(LoRARequest(name, path=path)) for name, path in zip("ab", hanging, strict=True)]
        busy = llm.adapters.load(LoRARequest("b", path="/b"))  # waits for the load under the same name
        generate = [collect(llm.generate(FOREVER, LONG)), collect(llm.generate([5], lora_request=hangs))]
        waiting = [asyncio.create_task(work) for work in (*generate, *loads, busy, llm.adapters.load(hangs))]
        await until(lambda: llm.num_running == 1 and Hanging.num_asked == 1)
        await llm.stats()  # the engine has the calls
        waiting.append(asyncio.create_task(llm.stats()))
        await asyncio.sleep(0)
        ended = llm.shutdown()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [ShuttingDownError] * 7
        assert Hanging.num_answered == 0, "nothing waited for what hangs"
        await ended

    spec = EngineSpec(args=EngineArgs(model=model_path), engine="fake_engine:slow")
    run(AsyncLLM.from_spec(spec, AdapterSources(SourceOptions(resolvers=("hanging:Hanging",)))), scenario)
    Hanging.answers.set()


def test_shutdown_while_starting(model_path: str) -> None:
    async def scenario() -> None:
        llm = make(model_path)
        task = asyncio.create_task(collect(llm.generate([5])))
        await until(lambda: llm.engine_pid is not None)
        await llm.shutdown()
        with pytest.raises(ShuttingDownError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())
