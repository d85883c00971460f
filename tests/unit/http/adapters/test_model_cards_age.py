"""The list of models comes from the API process: the engine is asked seldom, and never for names."""

import asyncio
from dataclasses import replace

import pytest

from outrider.platform.core.errors import EngineDeadError
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.messages import AdapterInfo
from outrider.platform.http.adapters import model_registry as registry_module
from outrider.platform.http.adapters.model_registry import ModelRegistry
from outrider.platform.tenancy.accounts.principal import OPEN


@pytest.fixture(autouse=True)
def _long_age(monkeypatch):
    """No test waits for an answer to get old."""
    monkeypatch.setattr(registry_module, "MAX_AGE", 3600.0)


class Engine:
    """Counts how often it is asked, and answers when it is let to."""

    def __init__(self, llm) -> None:
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._llm = llm
        llm.adapters.list = self.list_adapters

    async def list_adapters(self) -> list[AdapterInfo]:
        self.asked += 1
        answer = list(self._llm.in_engine.values())
        await self.gate.wait()
        return answer


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario, 10))


async def cards(models) -> dict[str, dict]:
    await models.refresh()
    return {card["id"]: card for card in models.seen_by(OPEN).cards()}


def test_the_engine_is_asked_once_however_many_look(llm):
    async def scenario():
        engine, models = Engine(llm), ModelRegistry(llm, ("base",))
        assert list(await cards(models)) == ["base"]
        assert engine.asked == 0, "there is nothing to ask about"
        await models.load(LoRARequest("x", path="/x"))
        engine.gate.clear()
        looking = [asyncio.create_task(cards(models)) for _ in range(50)]
        await asyncio.sleep(0)
        looking[0].cancel()
        engine.gate.set()
        for task in looking[1:]:
            assert (await task)["x"]["digest"] == "digest"
        for _ in range(10):
            await cards(models)
        assert engine.asked == 1

    run(scenario())


def test_changes_made_here_are_seen_at_once(llm):
    async def scenario():
        engine, models = Engine(llm), ModelRegistry(llm, ("base",))
        await models.load(LoRARequest("x", path="/x"))
        await models.load(LoRARequest("y", path="/y"))
        assert list(await cards(models)) == ["base", "x", "y"]
        await models.set_pinned("x", True)
        assert (await cards(models))["x"]["pinned"]
        await models.load(LoRARequest("x", path="/newer", draft_path="/d"), load_inplace=True)
        card = (await cards(models))["x"]
        assert (card["root"], card["draft"], card["pinned"]) == ("/newer", "loaded", False)
        await models.unload("x")
        await models.register(LoRARequest("z", path="/z"))
        shown = await cards(models)
        assert (list(shown), shown["z"]["tier"]) == (["base", "y", "z"], "disk")

        async def dead():
            raise EngineDeadError("it died")

        llm.adapters.list = dead
        await models.set_pinned("y", True)
        await models.unload("z")
        shown = await cards(models)
        assert (list(shown), shown["y"]["pinned"]) == (["base", "y"], True), "no engine call is needed for these"
        assert engine.asked

    run(scenario())


@pytest.mark.parametrize("change", ["load", "unload", "pin"])
def test_an_answer_of_before_a_change_changes_nothing(llm, change):
    async def scenario():
        engine, models = Engine(llm), ModelRegistry(llm, ("base",))
        await models.load(LoRARequest("x", path="/x"))
        engine.gate.clear()
        looking = asyncio.create_task(cards(models))
        while not engine.asked:
            await asyncio.sleep(0)
        if change == "load":
            await models.load(LoRARequest("new", path="/new"))
        elif change == "unload":
            await models.unload("x")
            await models.register(LoRARequest("x", path="/x"))
        else:
            await models.set_pinned("x", True)
        engine.gate.set()
        shown = await looking
        assert shown["new" if change == "load" else "x"]["tier"] == ("disk" if change == "unload" else "device")
        assert shown["x"]["pinned"] is (change == "pin")
        await cards(models)
        assert engine.asked == 2, "the engine's word on all others was not taken"

    run(scenario())


def test_after_a_restart_the_engine_is_asked_again(llm):
    async def scenario():
        engine, models = Engine(llm), ModelRegistry(llm, ("base",))
        for name in ("x", "gone"):
            await models.load(LoRARequest(name, path=f"/{name}"))
        assert (await cards(models))["x"]["tier"] == "device"
        llm.state, llm.num_restarts = "restarting", 1
        assert list(await cards(models)) == ["base", "x", "gone"]
        assert engine.asked == 1
        llm.state = "ready"
        del llm.adapters.requests["gone"], llm.in_engine["gone"]  # as AsyncLLM does when it cannot be read again
        llm.in_engine["x"] = replace(llm.in_engine["x"], level="host")
        for _ in range(2):
            shown = await cards(models)
            assert (list(shown), shown["x"]["tier"]) == (["base", "x"], "host")
        assert engine.asked == 2

    run(scenario())
