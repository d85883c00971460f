"""The updates that an engine needs that is started again."""

import asyncio

from async_helpers import make, run, until

from outrider.platform.client.async_llm import AsyncLLM
from outrider.platform.client.weight_updates import AppliedUpdate, WeightUpdates
from outrider.platform.core.weight_source import WeightSource


def update(*paths: str, draft: bool = False) -> AppliedUpdate:
    return AppliedUpdate([WeightSource(path) for path in paths], draft)


def test_updates_that_others_replace_are_forgotten() -> None:
    updates = WeightUpdates()
    for _ in range(3):  # a trainer writes the same files again
        updates.add(update("a", "b"), is_whole=False, version=None)
        updates.add(update("c"), is_whole=False, version="1")
        updates.add(update("a", draft=True), is_whole=True, version=None)
    assert updates.applied == [update("a", "b"), update("c"), update("a", draft=True)]
    updates.add(update("d"), is_whole=True, version="2")
    assert updates.applied == [update("a", draft=True), update("d")]
    assert updates.version == "2"


def test_an_update_whose_caller_gives_up_is_recorded(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        updating = asyncio.create_task(llm.update_weights("a", weight_version="2"))
        for _ in range(10):  # until the engine has been told
            await asyncio.sleep(0)
        updating.cancel()
        await asyncio.wait({updating})
        assert updating.cancelled()
        await until(lambda: llm.engine.weights.version == "2")
        assert llm.engine.weights.applied == [update("a")]

    run(make(model_path), scenario)
