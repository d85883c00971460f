"""A server whose database does not open: the engine that is starting meanwhile ends, too."""

import asyncio
import os
import signal

import pytest

from outrider.platform.client.async_llm import AsyncLLM
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.http.server import Service, _Server, bind
from outrider.platform.http.server_config import ServerConfig
from outrider.platform.tenancy.database.connection import DatabaseUnavailableError
from outrider.platform.tenancy.service import Tenancy


class StartingLLM:
    """An engine that takes forever to start."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def start(self) -> None:
        self.events.append("start")
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append("cancelled")

    async def shutdown(self) -> None:
        self.events.append("shutdown")


@pytest.fixture
def llm(monkeypatch) -> StartingLLM:
    llm = StartingLLM()
    monkeypatch.setattr(AsyncLLM, "from_spec", lambda *arguments: llm)
    return llm


def run(database: str) -> int:
    async def serve() -> int:
        with bind("127.0.0.1", 0) as listener:
            return await _Server(Service(EngineArgs(), ServerConfig(database=database)), listener).run()

    return asyncio.run(serve())


def test_a_database_that_is_not_there(llm, tmp_path):
    with pytest.raises(DatabaseUnavailableError, match=r"postgresql\+psycopg://u:\*\*\*@/d.* failed: ") as refused:
        run(f"postgresql://u:secret@/d?host={tmp_path}")
    assert "secret" not in str(refused.value)
    assert llm.events == ["start", "cancelled", "shutdown"]


def test_an_address_that_is_none(llm, tmp_path):
    with pytest.raises(InvalidRequestError) as refused:
        run(f"sqlite:///{tmp_path}/no/x.db")
    assert refused.value.param == "database"
    assert llm.events[-1] == "shutdown"


def test_a_signal_while_the_database_opens(llm, monkeypatch):
    closed = []

    async def wait(*arguments: object, **options: object) -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    monkeypatch.setattr(Tenancy, "open", wait)
    assert run("sqlite:////x.db") == 0
    assert closed == [True]
    assert llm.events == ["start", "cancelled", "shutdown"]
