"""Adapters are loaded again by one rule: after a restart, and after a sleep of level 2 in both clients."""

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from async_helpers import make, run, until

from outrider.platform.client.adapters.loaded_adapters import LoadedAdapters
from outrider.platform.client.async_llm import AsyncLLM
from outrider.platform.client.llm import LLM
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import AdapterError, NotFoundError
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.messages import AdapterInfo


class Site:
    """Adapters on a disk, and the calls with which a client gets to know them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("kept", "changed"):
            (folder / name).mkdir()
            self.write(name, "old")
        for name in ("gone", "unknown"):
            (folder / name).touch()

    def write(self, name: str, content: str) -> None:
        (self.folder / name / "adapter_model.safetensors").write_text(content)

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        first, second, kept, changed, last = (
            LoRARequest(name, path=str(self.folder / name)) for name in ("first", "second", "kept", "changed", "last")
        )
        gone, unknown = (LoRARequest(name, path=f"once:{self.folder / name}") for name in ("gone", "unknown"))
        return [
            ("load", {"request": kept, "pinned": True}),
            ("register", {"requests": [first, second]}),
            ("load", {"request": gone}),
            ("load", {"request": changed}),
            ("register", {"requests": [unknown]}),
            ("register", {"requests": [last]}),
            ("pin", {"name": "second"}),
            ("pin", {"name": "changed"}),
            ("unpin", {"name": "changed"}),
            ("load", {"request": kept, "pinned": True, "load_inplace": True}),
        ]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    (tmp_path / "adapters").mkdir()
    return Site(tmp_path / "adapters")


def facts(infos: list[AdapterInfo]) -> list[tuple[str, bool, str, str]]:
    return [(info.name, info.pinned, info.digest, info.draft) for info in infos]  # the fake's draft: what is expected


BEFORE = ["kept", "first", "second", "gone", "changed", "unknown", "last"]
AFTER = [
    ("kept", True, "old", ""),
    ("first", False, "", ""),
    ("second", True, "digest", ""),
    ("changed", False, "", "changed"),
    ("last", False, "", ""),
]
"""In the order of registration, without those that are gone; one with another content is refused to its requests."""


def restart(llm: AsyncLLM) -> None:
    assert llm.engine_pid is not None
    os.kill(llm.engine_pid, signal.SIGKILL)


@pytest.mark.parametrize("ways", [["restart"], ["sleep"], ["restart", "sleep", "restart"]], ids="-".join)
def test_in_an_engine_process(model_path: str, site: Site, ways: list[str]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        for verb, arguments in site.calls():
            await getattr(llm.adapters, verb)(**arguments)
        assert [info.name for info in await llm.adapters.list()] == BEFORE
        site.write("changed", "new")
        for number, way in enumerate(ways, 1):
            if way == "restart":
                restart(llm)
            else:
                await llm.sleep(2)
                await llm.wake_up()
            await until(lambda number=number: llm.num_restarts == number and llm.state == "ready")  # type: ignore[misc]
            assert facts(await llm.adapters.list()) == AFTER
            assert [*llm.adapters.requests] == [name for name, *_ in AFTER]
        with pytest.raises(NotFoundError):
            await llm.adapters.unload("gone")

    run(make(model_path), scenario)


@pytest.mark.parametrize("levels", [[2], [1, 2]])
def test_in_this_process(model_path: str, site: Site, levels: list[int]) -> None:
    with LLM.from_engine_args(EngineArgs(model=model_path), engine="fake_engine:FakeEngine") as llm:
        for verb, arguments in site.calls():
            getattr(llm.adapters, verb)(**arguments)
        assert [info.name for info in llm.adapters.list()] == BEFORE
        site.write("changed", "new")
        for _ in range(2):  # the second time too, one that changed is refused
            for level in levels:
                llm.sleep(level)
            llm.wake_up()
            assert facts(llm.adapters.list()) == AFTER
        with pytest.raises(NotFoundError):
            llm.adapters.unload("gone")


def test_adapters_of_requests_are_known_after_a_sleep(model_path: str) -> None:
    """An engine in this process is asked for its adapters before it ends."""
    with LLM.from_engine_args(EngineArgs(model=model_path), engine="fake_engine:FakeEngine") as llm:
        engine: Any = llm.llm_engine.engine_core
        engine.adapters.load(LoRARequest("of-a-request", path="/a"))
        llm.sleep(2)
        llm.wake_up()
        assert llm.llm_engine.engine_core is not engine
        assert [(info.name, info.path) for info in llm.adapters.list()] == [("of-a-request", "/a")]


def test_loads_of_a_reload_are_in_flight_together() -> None:
    """The engine gets all of them in their order before it has read one; names alone are registered in between."""
    order: list[tuple[str, ...]] = []
    in_flight, most = 0, 0

    def info(name: str, digest: str = "d") -> AdapterInfo:
        return AdapterInfo(name=name, path=f"/{name}", digest=digest, rank=1, rows=1, level="host")

    async def call(verb: str, **arguments: Any) -> AdapterInfo:
        nonlocal in_flight, most
        if verb == "adapters.unload":
            order.append((verb, arguments["name"]))
            return info(arguments["name"])
        requests = arguments.get("requests") or [arguments["request"]]
        order.append((verb, *(request.name for request in requests)))
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0.001 * (30 - len(order)))  # the first ones take longest
        in_flight -= 1
        if requests[0].name == "l3":
            raise AdapterError("gone")
        order.append(("done", requests[0].name))
        return info(requests[0].name, "new" if requests[0].name == "l1" else "d")

    async def scenario() -> None:
        async def start() -> None:
            return

        async def localize(request: LoRARequest, *, again: bool = False) -> LoRARequest:
            return request

        memory = SimpleNamespace(find=lambda name, path: None)
        sources = SimpleNamespace(folders_of=lambda name: (), restrict=lambda name, needed=(): None, memory=memory)
        adapters = LoadedAdapters(start, call, localize, sources)  # type: ignore[arg-type]
        adapters.adopt([*map(info, ["l0", "l1"]), info("n0", ""), info("n1", ""), *map(info, ["l2", "l3", "l4"])])
        await adapters.reload_after_restart(call)
        assert [*adapters.requests] == ["l0", "l1", "n0", "n1", "l2", "l4"]

    asyncio.run(scenario())
    assert most == 3
    calls = [entry for entry in order if entry[0] != "done"]
    assert calls[:2] == [("adapters.load", "l0"), ("adapters.load", "l1")]
    assert calls[-3:] == [("adapters.load", "l2"), ("adapters.load", "l3"), ("adapters.load", "l4")]
    assert ("adapters.register", "n0", "n1") in calls
    assert order.index(("adapters.load", "l1")) < order.index(("done", "l0"))
    assert ("adapters.register", "l1") in calls, "its files have another content"


def test_nothing_is_forgotten_when_the_process_dies_in_a_reload(model_path: str, site: Site) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        names = ["a", "b", "c"]
        for name in names:
            await llm.adapters.load(LoRARequest(name, path=f"/{name}"))
        for number in (1, 2, 3):
            restart(llm)
            await until(lambda number=number: llm.num_restarts == number and llm.engine_pid is not None)  # type: ignore[misc]
        await until(lambda: llm.state == "ready")
        assert sorted(info.name for info in await llm.adapters.list()) == names  # two are read at once

    run(make(model_path), scenario)


def test_a_request_accepted_before_a_load_in_place_runs_on_the_new_version(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        await llm.adapters.load(LoRARequest("sql", path="/old"))
        accepted = llm.adapters.requests["sql"]
        await llm.adapters.load(LoRARequest("sql", path="/new"), load_inplace=True)
        for lora, path in ((accepted, "/new"), (LoRARequest("sql", path="/old"), "/old")):
            prepared = await llm.prepare([5], lora_request=lora)
            (sequence,) = await llm.requests.sequences(prepared, "x")
            assert isinstance(sequence.lora, LoRARequest)
            assert (sequence.lora.path, sequence.lora.loaded) == (path, path == "/new")
        await llm.adapters.unload("sql")
        with pytest.raises(NotFoundError, match="unloaded"):
            await llm.requests.sequences(await llm.prepare([5], lora_request=accepted), "x")

    run(make(model_path), scenario)
