"""Shared prefixes are tokenized off the event loop, and the last declaration counts."""

import asyncio
import threading
from functools import partial
from types import MappingProxyType, SimpleNamespace

import pytest

from outrider.platform.client import request_streams
from outrider.platform.client.input_processor import InputProcessor
from outrider.platform.http.adapters.database_sync import PrefixSync
from outrider.platform.tenancy.accounts.directory import Snapshot
from outrider.platform.tenancy.accounts.records import SharedPrefix

from ..conftest import INFO, CharTokenizer


class Directory:
    """A directory that publishes on command."""

    def __init__(self) -> None:
        self.revision = 0

    def subscribe(self, listener) -> None:
        self._listener = listener
        self.tell()

    def tell(self, *names: str, at: float = 1.0) -> None:
        self.revision += 1
        prefixes = tuple(SharedPrefix(name=name, token_ids=tuple(map(ord, name)), created_at=at) for name in names)
        self._listener(Snapshot(self.revision, self.revision, MappingProxyType({}), prefixes))


class Cutter:
    """Stands in for `SharedPrefixes`: runs until released."""

    def __init__(self, monkeypatch) -> None:
        self.may_end = threading.Event()
        self.began: list[list[str]] = []
        self.threads: set[int] = set()
        monkeypatch.setattr(request_streams, "SharedPrefixes", self._cut)

    def _cut(self, prefixes, block_size):
        self.threads.add(threading.get_ident())
        self.began.append(["".join(map(chr, prefix)) for prefix in prefixes])
        names = self.began[-1]
        assert threading.current_thread() is threading.main_thread() or self.may_end.wait(30)
        return names


@pytest.fixture
def llm():
    """The client, as far as prefixes are concerned."""
    llm = SimpleNamespace(info=INFO, input_processor=InputProcessor(CharTokenizer(), INFO, eos_token_ids=[2]))
    text_side = SimpleNamespace(requests=llm)
    streams = SimpleNamespace(text_side=text_side, engine=llm)
    llm.share_prefixes = partial(request_streams.RequestStreams.share_prefixes, streams)
    return llm


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_superseded_declarations_are_skipped_and_do_not_block_the_loop(llm, monkeypatch):
    cutter = Cutter(monkeypatch)

    async def scenario():
        directory = Directory()
        follower = PrefixSync(llm, directory)
        starting = asyncio.create_task(follower.start())
        await until(lambda: cutter.began == [[]])
        directory.tell("first")
        directory.tell("first", "second")
        applied = asyncio.create_task(follower.applied())
        await asyncio.sleep(0)
        assert not starting.done()
        assert not applied.done(), "an answer said that it counts before it did"
        cutter.may_end.set()
        await asyncio.gather(starting, applied)
        assert cutter.began == [[], ["first", "second"]], "superseded declarations are skipped"
        assert llm.input_processor.shared_prefixes == ["first", "second"]
        await follower.close()

    run(scenario())
    assert threading.get_ident() not in cutter.threads


def test_other_changes_of_the_directory_cost_nothing(llm, monkeypatch):
    cutter = Cutter(monkeypatch)
    cutter.may_end.set()

    async def scenario():
        directory = Directory()
        follower = PrefixSync(llm, directory)
        await follower.start()
        for at, count in ((1.0, 2), (1.0, 2), (2.0, 3)):  # the last one: removed and declared again
            directory.tell("a", at=at)
            await follower.applied()
            assert len(cutter.began) == count

    run(scenario())


def test_a_failure_is_logged_and_the_next_change_applied(llm, monkeypatch, caplog):
    cutter = Cutter(monkeypatch)
    cutter.may_end.set()

    async def scenario():
        directory = Directory()
        follower = PrefixSync(llm, directory)
        await follower.start()
        with monkeypatch.context() as patch:
            patch.setattr(request_streams, "SharedPrefixes", None)
            directory.tell("a")
            await follower.applied()
        assert "cannot be taken" in caplog.text
        directory.tell("a")
        await follower.applied()
        assert llm.input_processor.shared_prefixes == ["a"]

    run(scenario())
