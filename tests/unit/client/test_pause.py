"""`pause_generation` and `resume_generation` with a fake engine, in a process of its own and in this one."""

import asyncio
import os
import signal

import fake_engine
import pytest
from async_helpers import FOREVER, LONG, collect, first_output, make, run, until

from outrider.platform.client.async_llm import AsyncLLM
from outrider.platform.client.engine_client import EngineState
from outrider.platform.client.llm import LLM
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import (
    AsleepError,
    EngineDeadError,
    InvalidRequestError,
    InvalidUserInputError,
    OverloadedError,
    RequestAbortedError,
    ShuttingDownError,
)
from outrider.platform.core.sampling_params import SamplingParams

SHORT = SamplingParams(max_tokens=3)


async def generate(llm: AsyncLLM) -> list[int]:
    return (await collect(llm.generate([5, 6], SHORT)))[-1].outputs[0].token_ids


async def still_waits(task: asyncio.Task[list[int]]) -> bool:
    return not (await asyncio.wait({task}, timeout=0.1))[0]


def test_abort_ends_what_runs_with_its_tokens_and_later_requests_wait(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        running = await first_output(llm)
        await llm.pause_generation()
        last = (await collect(running))[-1].outputs[0]
        assert (last.finish_reason, len(last.token_ids) > 0) == ("abort", True)
        assert (llm.state, await llm.is_paused(), await llm.is_sleeping()) == ("paused", True, False)
        await llm.check_health()
        later = asyncio.create_task(generate(llm))
        assert await still_waits(later)
        await llm.pause_generation()  # those that wait survive another one
        assert await still_waits(later)
        await llm.resume_generation()
        assert await later == [5, 6, 5]
        await llm.resume_generation()
        assert (llm.state, await llm.is_paused()) == ("ready", False)

    run(make(model_path), scenario)


def test_an_aborted_request_without_a_text_is_an_error_to_retry(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        embedding = asyncio.create_task(llm.embed(FOREVER))
        await until(lambda: llm.num_running == 1)
        await llm.pause_generation()
        with pytest.raises(RequestAbortedError) as caught:
            await embedding
        assert caught.value.status == 503

    run(make(model_path), scenario)


@pytest.mark.parametrize("older_name", [False, True])
def test_wait_lets_what_runs_finish_first(model_path: str, older_name: bool) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        running = asyncio.create_task(collect(llm.generate([7, 8], LONG)))
        await until(lambda: llm.num_running == 1)
        pausing = asyncio.create_task(
            llm.pause_generation(wait_for_inflight_requests=True) if older_name else llm.pause_generation("wait")
        )
        await until(lambda: llm.state == "paused")
        later = asyncio.create_task(generate(llm))
        await pausing
        assert (await running)[-1].outputs[0].finish_reason == "length"
        assert await still_waits(later)
        await llm.resume_generation()
        assert await later == [5, 6, 5]

    run(make(model_path, "slow"), scenario)


def test_another_mode_takes_the_place_of_wait(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        running = await first_output(llm)
        pausing = asyncio.create_task(llm.pause_generation("wait"))
        await until(lambda: llm.state == "paused")
        await llm.pause_generation("abort")
        await pausing
        assert (await collect(running))[-1].outputs[0].finish_reason == "abort"

    run(make(model_path), scenario)


def test_a_resume_ends_a_wait(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        running = await first_output(llm)
        pausing = asyncio.create_task(llm.pause_generation("wait"))
        await until(lambda: llm.state == "paused")
        await llm.resume_generation()
        with pytest.raises(InvalidUserInputError, match="resumed"):
            await pausing
        await running.aclose()  # type: ignore[attr-defined]

    run(make(model_path), scenario)


def test_keep_freezes_what_runs(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        running = asyncio.create_task(collect(llm.generate([7, 8], LONG)))
        await until(lambda: llm.num_running == 1)
        await llm.pause_generation("keep", clear_cache=False)
        steps = (await llm.stats()).num_steps
        assert not (await asyncio.wait({running}, timeout=0.1))[0]
        assert (await llm.stats()).num_steps == steps
        with pytest.raises(InvalidUserInputError, match="sleep without them"):
            await llm.sleep(1)
        await llm.resume_generation()
        assert (await running)[-1].outputs[0].token_ids == [7, 8] * 50

    run(make(model_path, "slow"), scenario)


def test_a_pause_outlasts_a_sleep_and_a_dead_process(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        await llm.pause_generation()
        for level in (1, 2):
            await llm.sleep(level)
            assert (llm.state, await llm.is_paused()) == ("sleeping", True)
            for refused in (llm.pause_generation(), llm.resume_generation(), generate(llm)):
                with pytest.raises(AsleepError):
                    await refused
        await llm.wake_up()
        assert llm.state == "paused"
        waiting = asyncio.create_task(generate(llm))
        assert await still_waits(waiting)
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await waiting
        await until(lambda: llm.state == "paused")
        later = asyncio.create_task(generate(llm))
        assert await still_waits(later)
        await llm.resume_generation()
        assert await later == [5, 6, 5]

    run(make(model_path), scenario)


def test_a_resume_counts_while_the_process_is_started_again(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        await llm.pause_generation()
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGKILL)
        await until(lambda: llm.state == "restarting")
        with pytest.raises(EngineDeadError):
            await llm.resume_generation()
        await until(lambda: llm.state not in ("restarting", "starting"))
        assert llm.state == "ready"
        assert await generate(llm) == [5, 6, 5]

    run(make(model_path), scenario)


def test_a_caller_who_gives_up_a_pause_knows_that_it_is_on(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        running = asyncio.create_task(collect(llm.generate([7, 8], LONG)))
        await until(lambda: llm.num_running == 1)
        pausing = asyncio.create_task(llm.pause_generation("keep"))
        for _ in range(10):  # until the engine has been told
            await asyncio.sleep(0)
        pausing.cancel()
        await asyncio.wait({pausing})
        assert pausing.cancelled()
        assert llm.state == "paused"
        await llm.resume_generation()
        assert (await running)[-1].outputs[0].finish_reason == "length"

    run(make(model_path, "slow"), scenario)


def test_a_drain_waits_for_requests_that_a_resume_lets_run(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        running = asyncio.create_task(collect(llm.generate([7, 8], LONG)))
        await until(lambda: llm.num_running == 1)
        pausing = asyncio.create_task(llm.pause_generation("wait"))
        await until(lambda: llm.state == "paused")
        draining = asyncio.create_task(llm.drain(60))
        await until(lambda: llm.state == "draining")
        await llm.resume_generation()
        assert await draining
        assert (await running)[-1].outputs[0].finish_reason == "length"
        with pytest.raises(InvalidUserInputError, match="resumed"):
            await pausing

    run(make(model_path, "slow"), scenario)


def test_a_shutdown_while_paused_fails_what_waits_at_once(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        await llm.pause_generation("keep")
        waiting = asyncio.create_task(generate(llm))
        await until(lambda: llm.num_running == 1)
        assert not await asyncio.wait_for(llm.drain(600), 30)
        await llm.shutdown()
        with pytest.raises(ShuttingDownError):
            await waiting

    run(make(model_path), scenario)


def test_a_drain_of_a_paused_engine_lets_the_running_ones_finish(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        running = asyncio.create_task(collect(llm.generate([7, 8], LONG)))
        await until(lambda: llm.num_running == 1)
        pausing = asyncio.create_task(llm.pause_generation("wait"))
        await until(lambda: llm.state == "paused")
        await llm.drain(60)
        await pausing
        assert (await running)[-1].outputs[0].finish_reason == "length"

    run(make(model_path, "slow"), scenario)


def test_an_unknown_mode_changes_nothing(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidRequestError, match="mode must be one of") as caught:
            await llm.pause_generation("stop")
        assert (caught.value.param, llm.state) == ("mode", "ready")
        assert await generate(llm) == [5, 6, 5]

    run(make(model_path), scenario)


def test_the_queue_stays_bounded(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        await llm.pause_generation()
        first = asyncio.create_task(generate(llm))
        await until(lambda: llm.num_running == 1)
        with pytest.raises(OverloadedError):
            await generate(llm)
        await llm.resume_generation()
        assert await first == [5, 6, 5]

    run(make(model_path, "FakeEngine", max_num_queued_reqs=1), scenario)


def test_an_engine_in_this_process(model_path: str) -> None:
    llm = LLM.from_engine_args(EngineArgs(model=model_path), engine="fake_engine:FakeEngine")
    engine = llm.llm_engine
    engine.add_request("before", FOREVER, LONG)
    engine.step()
    llm.pause_generation("keep")
    assert llm.is_paused()
    assert engine.engine.state is EngineState.PAUSED
    engine.add_request("later", [5, 6], SHORT)
    assert engine.step() == []
    assert engine.get_num_unfinished_requests() == 2
    llm.pause_generation("abort")
    [output] = engine.step()
    assert (output.request_id, output.outputs[0].finish_reason) == ("before", "abort")
    assert output.outputs[0].token_ids == [fake_engine.NEVER_END]
    with pytest.raises(InvalidUserInputError, match="request"):
        llm.generate([[5]], SHORT, use_tqdm=False)
    llm.resume_generation()
    outputs = [*engine.step(), *engine.step(), *engine.step()]
    assert outputs[-1].outputs[0].token_ids == [5, 6, 5]
    llm.pause_generation()
    with pytest.raises(InvalidUserInputError, match="resume_generation"):
        llm.generate([[5]], SHORT, use_tqdm=False)
    assert engine.get_num_unfinished_requests() == 0
    llm.sleep(2)
    for verb in (llm.pause_generation, llm.resume_generation):
        with pytest.raises(AsleepError):
            verb()
    llm.wake_up()
    assert llm.is_paused()
    llm.resume_generation()
    assert llm.generate([[5]], SHORT, use_tqdm=False)[0].outputs[0].token_ids == [5, 5, 5]
    llm.shutdown()
