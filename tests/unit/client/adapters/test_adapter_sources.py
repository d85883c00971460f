"""From sources to folders: object stores, plug-ins, names; shared results, memory and disk."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from outrider.platform.client.adapters.sources import AdapterSources, SourceOptions, resolver
from outrider.platform.client.waiting import Task
from outrider.platform.core.errors import AdapterError, AdapterSourceError, InvalidRequestError
from outrider.platform.core.lora_request import LoRAMix, LoRAPart, LoRARequest

T = TypeVar("T")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Store(MemoryFileSystem):
    """An object store in memory that counts, and waits or fails on command."""

    protocol = "teststore"
    store: dict = {}  # noqa: RUF012  (as in the base class)
    pseudo_dirs = [""]  # noqa: RUF012
    opened: list = []  # noqa: RUF012
    gate = threading.Event()
    error: Exception | None = None
    on_open = staticmethod(lambda path: None)

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("teststore://", "memory://"))

    def info(self, path, **options):
        if Store.error is not None:
            raise Store.error
        return super().info(path, **options)

    def open(self, path, mode="rb", **options):
        if mode == "rb":
            Store.opened.append(path)
            assert Store.gate.wait(10)
            Store.on_open(path)
        return super().open(path, mode, **options)


fsspec.register_implementation("teststore", Store, clobber=True)


@pytest.fixture(autouse=True)
def _empty_store():
    Store.store.clear()
    Store.opened.clear()
    Store.gate.set()
    Store.error, Store.on_open = None, staticmethod(lambda path: None)


def upload(folder: str, **files: bytes) -> str:
    """An adapter in the store; returns its URL. A file's dots and slashes are `_dot_` and `__` in its name."""
    contents = {CONFIG: b"{}", WEIGHTS: b"weights"}
    contents |= {name.replace("_dot_", ".").replace("__", "/"): content for name, content in files.items()}
    for name, content in contents.items():
        Store().pipe_file(f"/{folder}/{name}", content)
    return f"teststore://{folder}"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path, clock):
    def make(**options) -> AdapterSources:
        return AdapterSources(SourceOptions(**{"cache_dir": str(tmp_path / "cache"), **options}), clock=clock)

    return make


def names_in(folder: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


def localize(sources: AdapterSources, source: str, name: str = "x", **options) -> str:
    return sources.localize(LoRARequest(name, path=source), **options).result().path


def awaited(work: Task[T]) -> T:
    async def run() -> T:
        return await work

    return asyncio.run(run())


def test_passwords_and_signatures_are_not_shown():
    assert resolver.shown_source("https://me:secret@host/x?sig=abc") == "https://host/x"
    assert len(resolver.shown_source("s3://" + "x" * 1000)) <= 200


def test_local_folders_are_left_alone(make, tmp_path):
    sources = make()
    request = LoRARequest("x", path="/adapters/x", draft_path="/drafts")
    assert sources.localize(request).result() is request
    assert awaited(sources.localize(request)) is request
    mix = LoRAMix((LoRAPart(request, 0.5),))
    assert awaited(sources.localize(mix)) is mix
    assert localize(sources, "file:///adapters/x") == "/adapters/x"
    assert not (tmp_path / "cache").exists()


def test_a_download(make):
    sources = make()
    url = upload("bucket/sql", draft__adapter_config_dot_json=b"{}", README_dot_md=b"hello", optimizer_dot_pt=b"no")
    folder = localize(sources, url)
    assert names_in(folder) == [CONFIG, WEIGHTS, f"draft/{CONFIG}"]
    assert Path(folder, WEIGHTS).read_bytes() == b"weights"
    num_opened = len(Store.opened)
    assert localize(sources, url) == folder
    assert localize(sources, url, "another name") == folder
    assert localize(make(), url) == folder, "it is there after a restart, too"
    assert len(Store.opened) == num_opened


def test_draft_weights_may_have_their_own_source(make):
    base, draft = upload("a"), upload("d")
    request = make().localize(LoRARequest("x", 7, base, draft_path=draft)).result()
    assert (request.name, request.lora_int_id) == ("x", 7)
    assert {names_in(request.path)[0], names_in(request.draft_path)[0]} == {CONFIG}
    assert request.path != request.draft_path
    with pytest.raises(AdapterError) as caught:
        make().localize(LoRARequest("x", path=base, draft_path="teststore://nowhere")).result()
    assert caught.value.param == "draft_path"


def test_parts_of_a_mix(make):
    mix = LoRAMix((LoRAPart(LoRARequest("a", path=upload("a")), 0.7), LoRAPart(LoRARequest("b", path="/b"), 0.3)))
    for local in (make().localize(mix).result(), awaited(make().localize(mix))):
        assert [part.weight for part in local.parts] == [0.7, 0.3]
        assert os.path.isdir(local.parts[0].request.path)
        assert local.parts[1].request.path == "/b"


def test_a_new_content_is_found_when_it_is_loaded_again(make):
    sources = make()
    old = localize(sources, upload("a"))
    new_url = upload("a", adapter_model_dot_safetensors=b"new weights")
    assert localize(sources, new_url) == old, "until then the name keeps what it has"
    new = localize(sources, new_url, again=True)
    assert Path(new, WEIGHTS).read_bytes() == b"new weights"
    assert Path(old, WEIGHTS).read_bytes() == b"weights", "requests may still need it"
    assert localize(sources, new_url) == new


def test_requests_at_the_same_time_share_one_download(make):
    sources = make()
    url = upload("a")
    Store.gate.clear()
    with ThreadPoolExecutor(8) as threads:
        folders = [threads.submit(localize, sources, url, f"name {i}") for i in range(8)]
        while not Store.opened:
            pass
        Store.gate.set()
        assert len({future.result(10) for future in folders}) == 1
    assert len(Store.opened) == 2, "the files of one adapter"
    assert sources._cache.num_held() == 1


def test_a_request_that_gives_up_ends_nothing_for_the_others(make):
    sources = make()
    url = upload("a")
    Store.gate.clear()

    async def run() -> str:
        impatient = asyncio.ensure_future(sources.localize(LoRARequest("x", path=url)))
        patient = asyncio.ensure_future(sources.localize(LoRARequest("y", path=url)))
        await asyncio.sleep(0.01)
        impatient.cancel()
        Store.gate.set()
        return (await patient).path

    folder = asyncio.run(run())
    assert names_in(folder) == [CONFIG, WEIGHTS]
    for name in ("x", "y"):
        sources.restrict(name)
    assert sources._cache.num_held() == 0


def test_the_event_loop_goes_on_during_a_download(make):
    sources = make()
    url = upload("a")
    Store.gate.clear()

    async def run() -> None:
        loading = asyncio.ensure_future(sources.localize(LoRARequest("x", path=url)))
        while not Store.opened:
            await asyncio.sleep(0)
        assert not loading.done()
        Store.gate.set()
        await loading

    asyncio.run(run())


def test_a_failure_is_remembered_for_a_moment_and_then_tried_again(make, clock):
    sources = make()
    url = upload("a")
    Store.error = ConnectionError("no network")
    with pytest.raises(AdapterSourceError, match="no network") as caught:
        localize(sources, url)
    assert (caught.value.status, caught.value.param) == (503, "lora_path")
    Store.error = None
    clock.now += 4
    with pytest.raises(AdapterSourceError, match="no network"):
        localize(sources, url, "another name")
    clock.now += 2
    assert names_in(localize(sources, url)) == [CONFIG, WEIGHTS]


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("teststore://nowhere", AdapterError, "no adapter_config.json"),
        ("nosuch://bucket/x", AdapterError, "nosuch"),
        ("zip://x::file:///etc", AdapterError, "chained"),
        ("s3://bucket/x", AdapterError, "s3fs"),
        ("teststore://me:secret@a?token=abc", AdapterError, "no adapter_config.json"),
    ],
)
def test_sources_that_are_none(make, source, error, message):
    if source.startswith("s3") and "s3" in getattr(fsspec.registry, "target", {}):
        pytest.skip("the driver is installed")
    with pytest.raises(error, match=message) as caught:
        localize(make(), source)
    assert caught.value.param == "lora_path"
    assert "secret" not in caught.value.message
    assert "abc" not in caught.value.message


def test_no_weights(make):
    Store().pipe_file(f"/a/{CONFIG}", b"{}")
    with pytest.raises(AdapterError, match=r"no adapter_model\.safetensors"):
        localize(make(), "teststore://a")


def test_too_large_is_found_before_anything_is_read(make):
    url = upload("a", adapter_model_dot_safetensors=b"x" * 1000)
    with pytest.raises(AdapterError, match=r"1002 bytes; at most 1001"):
        localize(make(max_adapter_bytes=1001), url)
    assert Store.opened == []
    assert names_in(localize(make(max_adapter_bytes=1002), url))


def test_files_that_change_while_they_are_read(make, tmp_path):
    url = upload("a")

    def change(path: str) -> None:
        if len(Store.opened) <= 2:
            upload("a", adapter_model_dot_safetensors=b"other")

    Store.on_open = staticmethod(change)
    assert Path(localize(make(), url), WEIGHTS).read_bytes() == b"other"
    Store.on_open = staticmethod(lambda path: upload("a", adapter_model_dot_safetensors=b"x" * len(Store.opened)))
    upload("a", adapter_model_dot_safetensors=b"third")
    with pytest.raises(AdapterSourceError, match="changes while it is read"):
        localize(make(), url)
    assert not list((tmp_path / "cache").glob(".tmp-*"))


def test_keys_that_try_to_leave_the_folder(make, tmp_path):
    url = upload("a")
    for name in ("draft/../../evil/adapter_model.bin", "draft/../adapter_model.bin", "draft/deep/er/adapter_model.bin"):
        Store.store[f"/a/{name}"] = Store.store[f"/a/{WEIGHTS}"]
    folder = localize(make(), url)
    assert names_in(folder) == [CONFIG, WEIGHTS]
    assert not (tmp_path / "cache" / "evil").exists()


def test_registered_adapters_are_kept_and_the_rest_evicted(make, clock):
    size = 10 + len(b"{}")
    sources = make(max_cache_bytes=2 * size)
    a, b, c = (upload(name, adapter_model_dot_safetensors=name.encode() * 10) for name in "abc")
    folder_a, folder_b = localize(sources, a, "a"), localize(sources, b, "b")
    with pytest.raises(AdapterSourceError, match="full"):
        localize(sources, c, "c")
    sources.restrict("b")
    clock.now += 10
    assert os.path.isdir(localize(sources, c, "d"))
    assert os.path.isdir(folder_a)
    assert not os.path.isdir(folder_b)
    sources.restrict("a", (folder_a,))
    assert sources.folders_of("a") == (folder_a,)


# --- plug-ins ---------------------------------------------------------------------------------------------------------


class PlugIn:
    """Finds "plug://NAME", and names that begin with "db-"."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.calls: list[tuple[str, str | None]] = []

    def resolve(self, name: str, source: str | None) -> str | None:
        self.calls.append((name, source))
        if source == "plug://raises":
            raise RuntimeError("a bug")
        if (source or "").startswith("plug://") or (source is None and name.startswith("db-")):
            return self.folder
        return None


PLUG_IN = PlugIn()


def make_plug_in() -> PlugIn:
    return PLUG_IN


def make_nothing() -> None:
    return None


@pytest.fixture
def plug_in(tmp_path) -> PlugIn:
    PLUG_IN.calls.clear()
    folder = tmp_path / "plugged"
    folder.mkdir()
    (folder / CONFIG).write_text("{}")
    PLUG_IN.folder = str(folder)
    return PLUG_IN


@pytest.fixture
def plug_in_path(monkeypatch) -> str:
    import sys

    monkeypatch.setitem(sys.modules, "plug_in_of_tests", sys.modules[__name__])
    return "plug_in_of_tests:make_plug_in"


def test_a_plug_in(make, plug_in, plug_in_path):
    sources = make(resolvers=(plug_in_path,))
    assert localize(sources, "plug://sql") == plug_in.folder
    assert os.path.isdir(localize(sources, upload("a"))), "what it does not know is left to the others"
    plug_in.folder = "/nowhere"
    with pytest.raises(AdapterSourceError, match="not there"):
        localize(sources, "plug://other")
    with pytest.raises(AdapterSourceError, match="a bug"):
        localize(sources, "plug://raises")


def test_a_plug_in_finds_names(make, plug_in, plug_in_path, clock):
    sources = make(resolvers=(plug_in_path,))
    assert sources.finds_names

    async def run() -> None:
        found = await sources.find("db-sql")
        assert found == LoRARequest("db-sql", path=plug_in.folder, roots=("/",))
        assert await sources.find("other") is None
        assert await sources.find("other") is None
        clock.now += 1000
        assert await sources.find("db-sql") == found
        assert plug_in.calls == [("db-sql", None), ("other", None)], "asked once"
        assert await sources.find("other") is None
        sources.restrict("db-sql")
        assert await sources.find("db-sql") == found
        assert len(plug_in.calls) == 4

    asyncio.run(run())


@pytest.mark.parametrize("path", ["x", "no_such_module:f", "os:nothing", "plug_in_of_tests:make_nothing", ":", "os:"])
def test_plug_ins_that_are_none(make, plug_in_path, path):
    with pytest.raises(InvalidRequestError) as caught:
        make(resolvers=(path,))
    assert caught.value.param == "lora_resolver"


def test_a_special_file_of_a_plug_in_is_refused(make, plug_in, plug_in_path):
    os.mkfifo(os.path.join(plug_in.folder, WEIGHTS))
    with pytest.raises(AdapterError, match=f"{WEIGHTS} of the adapter is a named pipe"):
        localize(make(resolvers=(plug_in_path,)), "plug://x")
