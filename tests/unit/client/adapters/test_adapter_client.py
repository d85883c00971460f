"""`LLM` and `AsyncLLM` with adapters that come from a store: the engine sees local folders alone."""

import asyncio
import os
from pathlib import Path

import pytest

from outrider.platform.client.adapters.sources import AdapterSources, SourceOptions
from outrider.platform.client.async_llm import AsyncLLM
from outrider.platform.client.llm import LLM
from outrider.platform.client.process.supervisor import EngineSpec, RestartPolicy
from outrider.platform.core.beam_search import BeamSearchParams
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import (
    AdapterError,
    AdapterSourceError,
    InvalidRequestError,
    InvalidUserInputError,
    NotFoundError,
)
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.sampling_params import SamplingParams

SHORT = SamplingParams(max_tokens=4)
ENGINE = "fake_engine:FakeEngine"


def upload(name: str, weights: bytes = b"weights") -> str:
    """An adapter in the store; returns its URL."""
    import fsspec

    store = fsspec.filesystem("memory")
    store.pipe_file(f"/{name}/adapter_config.json", b"{}")
    store.pipe_file(f"/{name}/adapter_model.safetensors", weights)
    return f"memory://{name}"


@pytest.fixture
def sources(tmp_path) -> AdapterSources:
    return AdapterSources(SourceOptions(cache_dir=str(tmp_path / "cache")))


@pytest.fixture
def llm(model_path, sources):
    with LLM.from_engine_args(EngineArgs(model=model_path), engine=ENGINE, sources=sources) as llm:
        yield llm


def is_fetched(path: str, tmp_path: Path) -> bool:
    return os.path.dirname(path) == str(tmp_path / "cache") and os.path.isdir(path)


def test_llm_loads_from_a_store(llm, sources, tmp_path):
    info = llm.load_lora_adapter(LoRARequest("sql", path=upload("sql")))
    assert is_fetched(info.path, tmp_path)
    [output] = llm.generate([[5]], SHORT, lora_request="sql", use_tqdm=False)
    assert output.lora_request.path == info.path
    new = llm.load_lora_adapter(LoRARequest("sql", path=upload("sql", b"new")), load_inplace=True)
    assert new.path != info.path
    assert sources.folders_of("sql") == (new.path,)
    llm.unload_lora_adapter("sql")
    assert sources.folders_of("sql") == ()


def test_llm_keeps_the_old_adapter_when_a_reload_fails(llm, sources):
    request = LoRARequest("sql", path=upload("sql"))
    info = llm.load_lora_adapter(request)
    upload("sql", b"new")
    with pytest.raises(InvalidUserInputError):
        llm.load_lora_adapter(request)
    assert sources.folders_of("sql") == (info.path,)


def test_llm_takes_a_source_in_a_request(llm, tmp_path):
    request = LoRARequest("sql", path=upload("sql"))
    outputs = llm.generate([[5], [6]], SHORT, lora_request=[request, (request, 0.5)], use_tqdm=False)
    assert len(outputs) == 2
    assert is_fetched(outputs[0].lora_request.path, tmp_path)
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        llm.generate([[5]], SHORT, lora_request=LoRARequest("x", path="memory://nothing"), use_tqdm=False)
    assert len(llm.generate([[5]], SHORT, use_tqdm=False)) == 1


@pytest.fixture
def spec(model_path) -> EngineSpec:
    return EngineSpec(args=EngineArgs(model=model_path), engine=ENGINE, restart=RestartPolicy(first_delay=0.01))


async def generate(llm: AsyncLLM, lora) -> None:
    async for _ in llm.generate([5], SHORT, lora_request=lora):
        pass


def test_async_llm(spec, sources, tmp_path):
    async def run() -> None:
        async with AsyncLLM.from_spec(spec, sources) as llm:
            info = await llm.adapters.load(LoRARequest("sql", path=upload("sql")))
            assert is_fetched(info.path, tmp_path)
            assert llm.adapters.requests["sql"].path == info.path
            await generate(llm, "sql")
            await generate(llm, LoRARequest("other", path=upload("other")))
            with pytest.raises(AdapterError):
                await llm.adapters.load(LoRARequest("bad", path="memory://nothing"))
            with pytest.raises(InvalidUserInputError):
                await llm.adapters.load(LoRARequest("sql", path=upload("sql", b"new")))
            assert sources.folders_of("sql") == (info.path,)
            await llm.unload_lora("sql")
            assert sources.folders_of("sql") == ()

    asyncio.run(run())


@pytest.mark.slow
def test_fetched_adapters_are_registered_again_after_a_restart(spec, sources):
    async def run() -> None:
        async with AsyncLLM.from_spec(spec, sources) as llm:
            info = await llm.adapters.load(LoRARequest("sql", path=upload("sql")))
            import fsspec

            fsspec.filesystem("memory").rm("/sql", recursive=True)  # the store is not needed for it
            os.kill(llm.engine_pid, 9)
            while llm.num_restarts == 0 or llm.state != "ready":
                await asyncio.sleep(0.01)
            assert [adapter.path for adapter in await llm.adapters.list()] == [info.path]

    asyncio.run(run())


@pytest.mark.slow
def test_files_that_changed_before_a_restart_are_not_taken(spec, sources, tmp_path):
    """The name stays, with a digest that no files have: its requests get an error that asks to load it again."""
    folders = {name: tmp_path / name for name in ("same", "other")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_text("old")

    async def run() -> None:
        async with AsyncLLM.from_spec(spec, sources) as llm:
            for name, folder in folders.items():
                await llm.adapters.load(LoRARequest(name, path=str(folder)))
            (folders["other"] / "adapter_model.safetensors").write_text("new")
            for number in (1, 2):
                os.kill(llm.engine_pid, 9)
                while llm.num_restarts < number or llm.state != "ready":
                    await asyncio.sleep(0.01)
                found = {info.name: (info.digest, info.draft) for info in await llm.adapters.list()}
                assert found == {"same": ("old", ""), "other": ("", "changed")}
            assert set(llm.adapters.requests) == set(folders)
            info = await llm.adapters.load(LoRARequest("other", path=str(folders["other"])), load_inplace=True)
            assert info.digest == "new"

    asyncio.run(run())


@pytest.mark.slow
def test_names_are_registered_without_a_load(spec, sources, tmp_path):
    """From a store too, and again after a restart: all by one call, or without those that are gone."""

    async def run() -> None:
        async with AsyncLLM.from_spec(spec, sources) as llm:
            url, once = upload("sql"), tmp_path / "once"
            with pytest.raises(AdapterError):
                await llm.adapters.register([LoRARequest("x", path=url), LoRARequest("y", path="memory://nothing")])
            assert sources.folders_of("x") == ()
            await llm.adapters.register([LoRARequest(name, path="/a") for name in "abc"])
            await llm.adapters.register([LoRARequest("sql", path=url)])
            assert is_fetched(llm.adapters.requests["sql"].path, tmp_path)
            assert sources.folders_of("sql") == (llm.adapters.requests["sql"].path,)
            for num_restarts, num_calls, names in ((1, 1, ["a", "b", "c", "sql"]), (2, 5, ["b", "c", "sql"])):
                os.kill(llm.engine_pid, 9)
                while llm.num_restarts < num_restarts or llm.state != "ready":
                    await asyncio.sleep(0.01)
                assert [info.name for info in await llm.adapters.list()] == names
                assert list(llm.adapters.requests) == names
                assert (await llm.stats()).num_preemptions == num_calls  # the fake's name for registrations
                if num_restarts == 1:
                    once.touch()
                    await llm.unload_lora("a")
                    await llm.adapters.register([LoRARequest("gone", path=f"once:{once}")])

    asyncio.run(run())


def test_an_adapter_that_is_unloaded_while_its_request_waits(spec, sources):
    async def run() -> None:
        async with AsyncLLM.from_spec(spec, sources) as llm:

            async def load(*requests: LoRARequest) -> None:
                for request in requests:
                    await llm.adapters.load(request, load_inplace=True)

            await load(LoRARequest("a", path="/a"), LoRARequest("b", path="/b"))
            named = [await llm.prepare([5], SHORT, lora_request=lora) for lora in ("a", [("a", 0.5), ("b", 0.5)])]
            other = await llm.prepare([5], SHORT, lora_request=LoRARequest("c", path="/c"))
            await llm.adapters.unload("a")
            for prepared in named:
                with pytest.raises(NotFoundError, match="'a' was unloaded while the request waited"):
                    await anext(llm.run(prepared))
            assert [info.name for info in await llm.adapters.list()] == ["b"]
            await load(LoRARequest("a", path="/new"))
            one, mix, brought = [(await anext(llm.run(prepared))).lora_request for prepared in (*named, other)]
            assert [one.path, mix.parts[0].request.path, brought.path] == ["/new", "/new", "/c"]

    asyncio.run(run())


def test_a_request_that_comes_during_an_unload(spec, sources):
    """The engine would get it after the unload."""

    async def run() -> None:
        async with AsyncLLM.from_spec(spec, sources) as llm:
            await llm.adapters.load(LoRARequest("a", path="/a"))
            prepared = await llm.prepare([5], SHORT, lora_request="a")
            unload = asyncio.create_task(llm.adapters.unload("a"))
            await asyncio.sleep(0)  # the call is sent
            with pytest.raises(NotFoundError, match="'a' was unloaded while the request waited"):
                await anext(llm.run(prepared))
            await unload
            assert await llm.adapters.list() == []

    asyncio.run(run())


def test_a_beam_search_brings_back_no_adapter(spec, sources):
    async def run() -> None:
        async with AsyncLLM.from_spec(spec, sources) as llm:
            await llm.adapters.load(LoRARequest("a", path="/a"))
            unloads: list[asyncio.Task[None]] = []

            def on_step(num_tokens: int) -> None:
                if num_tokens == 2:
                    unloads.append(asyncio.create_task(llm.adapters.unload("a")))

            params = BeamSearchParams(1, 100, ignore_eos=True)
            with pytest.raises(NotFoundError, match="'a' was unloaded while the request waited"):
                await llm.beam_search([5], params, lora_request="a", on_step=on_step)
            await unloads[0]
            assert await llm.adapters.list() == []

    asyncio.run(run())


def test_an_unload_that_is_refused(spec, sources):
    async def run() -> None:
        async with AsyncLLM.from_spec(spec, sources) as llm:
            await llm.adapters.load(LoRARequest("a", path="/a"))
            with pytest.raises(InvalidRequestError, match="mode"):
                await llm.adapters.unload("a", "bad mode")
            assert (await anext(llm.run(await llm.prepare([5], SHORT, lora_request="a")))).lora_request.path == "/a"

    asyncio.run(run())


def test_a_folder_found_by_name_serves_the_request_of_an_unloaded_adapter(spec, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text("{}")

    async def run() -> None:
        async with AsyncLLM.from_spec(spec, AdapterSources(SourceOptions(directories=(str(tmp_path),)))) as llm:
            await llm.adapters.load(LoRARequest("a", path="/a"))
            prepared = await llm.prepare([5], SHORT, lora_request="a")
            await llm.adapters.unload("a")
            assert (await anext(llm.run(prepared))).lora_request.path == str(tmp_path / "a")

    asyncio.run(run())


def test_concurrent_loads_of_one_name(spec, sources):
    """One wins; its files are kept, however the others end."""

    async def run() -> None:
        async with AsyncLLM.from_spec(spec, sources) as llm:
            requests = [LoRARequest("x", path=upload(name)) for name in ("a", "a", "b", "c")]
            results = await asyncio.gather(*map(llm.adapters.load, requests), return_exceptions=True)
            won = [result for result in results if not isinstance(result, Exception)]
            assert len(won) == 1
            assert all(isinstance(r, InvalidUserInputError) for r in results if isinstance(r, Exception))
            assert sources.folders_of("x") == (won[0].path,)
            assert sources._cache.num_held() == 1

    asyncio.run(run())


@pytest.mark.slow
def test_a_load_while_the_engine_dies(spec, sources):
    async def run() -> None:
        async with AsyncLLM.from_spec(spec, sources) as llm:
            await llm.adapters.load(LoRARequest("good", path=upload("good")))
            with pytest.raises(Exception, match="died"):
                await llm.adapters.load(LoRARequest("x", path="kill"))
            while llm.num_restarts == 0 or llm.state != "ready":
                await asyncio.sleep(0.01)
            assert set(llm.adapters.requests) == {"good"}
            assert sources._cache.num_held() == 1
            await generate(llm, "good")

    asyncio.run(run())


def test_a_store_that_fails_concerns_its_requests_alone(spec, tmp_path):
    class Failing:
        def resolve(self, name, source):
            raise OSError("the store is down") if source else AssertionError

    sources = AdapterSources(SourceOptions(cache_dir=str(tmp_path)))
    sources._plugins = [Failing()]

    async def run() -> None:
        async with AsyncLLM.from_spec(spec, sources) as llm:
            lora = LoRARequest("x", path="memory://x")
            results = await asyncio.gather(*(generate(llm, x) for x in (lora, None, lora)), return_exceptions=True)
            assert [type(result) for result in results] == [AdapterSourceError, type(None), AdapterSourceError]

    asyncio.run(run())
