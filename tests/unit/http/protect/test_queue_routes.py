"""One bound for everything that waits, over HTTP: 503 at once, and nothing is left of who was refused."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest

from outrider.platform.core.constraint_check import CHECKER
from outrider.platform.http.app import create_app
from outrider.platform.http.server_config import ServerConfig
from outrider.platform.tenancy.accounts.principal import Limits, Principal
from outrider.platform.tenancy.limits.limiter import Limiter

PEOPLE = {
    "bounded": Principal(tenant="acme", key_id="k1", tenant_limits=Limits(max_concurrent_requests=1)),
    "free": Principal(tenant="globex", key_id="k2"),
}


class Ledger:
    """Takes everything; records the tenants of begun rows."""

    problem = None

    def __init__(self):
        self.begun = []

    def check(self):
        pass

    def begin(self, row):
        self.begun.append(row.tenant)

    def end(self, row):
        pass

    async def committed(self, row):
        pass


@pytest.fixture
def server(llm):
    """One seat and room for one that waits; the engine sends no second token."""
    llm.info = replace(llm.info, max_num_seqs=1, max_num_queued_reqs=1)
    llm.blocked = True
    directory = SimpleNamespace(authenticate=PEOPLE.get, is_valid=lambda principal: True)
    tenancy = SimpleNamespace(limiter=Limiter(lambda *which: None), ledger=Ledger(), directory=directory)
    app = create_app(llm, ServerConfig(served_model_names=("base",)), tenancy=tenancy)
    return SimpleNamespace(app=app, tenancy=tenancy, queue=app.state.serving.queue)


def client(app) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def end(*tasks) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_tenants_queues_and_the_engines_queue_are_bounded_together(server, llm):
    async def scenario():
        async with client(server.app) as http:

            def post(key, **body):
                headers = {"Authorization": f"Bearer {key}"}
                return http.post("/v1/completions", json={"prompt": "ab"} | body, headers=headers)

            running = asyncio.create_task(post("bounded"))
            await until(lambda: llm.running)
            waiting = asyncio.create_task(post("bounded"))
            await until(lambda: server.queue.num_waiting == 1)
            assert server.queue.num_for_slots == 1
            for key in PEOPLE:  # one would wait in the engine, the other for its tenant's slot
                answer = await post(key)
                assert (answer.status_code, answer.json()["error"]["type"]) == (503, "OverloadedError")
                assert "max_num_queued_reqs is 1" in answer.json()["error"]["message"]
            assert server.tenancy.ledger.begun == ["acme"]
            await end(waiting)
            late = asyncio.create_task(post("free"))
            await until(lambda: server.queue.num_in_engine == 2)
            assert (await post("bounded")).status_code == 503
            await end(late, running)
            assert server.queue.num_waiting == server.queue.num_in_engine == 0
            answer = await post("free", n=3)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")

    asyncio.run(scenario())


@pytest.mark.parametrize("prompt", ["ab", ["ab", "cd"]])
def test_without_tenants_a_full_queue_is_found_before_the_prompt_is_tokenized(llm, monkeypatch, prompt):
    llm.info = replace(llm.info, max_num_seqs=2, max_num_queued_reqs=0)
    llm.blocked = True
    app = create_app(llm, ServerConfig(served_model_names=("base",)))
    queue = app.state.serving.queue
    encoded, encode = [], llm.tokenizer.encode
    monkeypatch.setattr(llm.tokenizer, "encode", lambda *args, **options: encoded.append(args) or encode(*args))

    async def scenario():
        async with client(app) as http:
            two = asyncio.create_task(http.post("/v1/completions", json={"prompt": ["ab", "cd"]}))
            await until(lambda: len(llm.running) == 2)
            encoded.clear()
            answer = await http.post("/v1/completions", json={"prompt": prompt})
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "OverloadedError")
            assert not encoded
            await end(two)
            assert queue.num_in_engine == 0
            llm.blocked = False
            assert (await http.post("/v1/completions", json={"prompt": prompt})).status_code == 200
            assert queue.num_in_engine == 0

    asyncio.run(scenario())


def test_no_request_waits_for_a_slot_while_draining(server, llm):
    """Not even who was let in before, and was still being tokenized."""
    serving = server.app.state.serving
    prompts = serving.prompts

    async def and_then_drains(*args, **options):
        result = await prompts(*args, **options)
        if llm.running:
            serving.begin_draining()
        return result

    serving.prompts = and_then_drains

    async def scenario():
        async with client(server.app) as http:

            def post():
                return http.post("/v1/completions", json={"prompt": "ab"}, headers={"Authorization": "Bearer bounded"})

            running = asyncio.create_task(post())
            await until(lambda: llm.running)
            answer = await asyncio.wait_for(post(), 30)
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "ShuttingDownError")
            await end(running)

    asyncio.run(scenario())


def test_new_constraints_of_one_tenant_delay_no_other_tenant(server, llm, monkeypatch):
    checked, may_go_on = [], threading.Event()

    def check(params):
        checked.append(params.regex)
        assert may_go_on.wait(30)
        return []

    monkeypatch.setattr(CHECKER, "check", check)
    llm.info = llm.input_processor._info = replace(
        llm.info, max_num_seqs=64, max_num_queued_reqs=64, max_model_len=9999
    )
    llm.blocked = False
    server.tenancy.limiter = Limiter(lambda *which: None)
    people = {"many": Principal(tenant="acme", key_id="k1"), "one": Principal(tenant="globex", key_id="k2")}
    server.tenancy.directory.authenticate = people.get

    async def scenario():
        async with client(server.app) as http:

            def post(key, **body):
                headers = {"Authorization": f"Bearer {key}"}
                return http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 1} | body, headers=headers)

            asked = [post("many", structured_outputs={"regex": f"a{index}"}) for index in range(40)]
            tasks = [asyncio.create_task(request) for request in asked]
            await until(lambda: checked)
            tasks.append(asyncio.create_task(post("one", structured_outputs={"regex": "b"})))
            async with asyncio.timeout(30):
                assert (await post("one", prompt="ab" * 4000)).status_code == 200  # checked in a thread, as it is long
                await until(lambda: CHECKER.thread._work_queue.qsize())  # with b, behind the first a
            may_go_on.set()
            answers = await asyncio.gather(*tasks)
            assert {answer.status_code for answer in answers} == {200}

    asyncio.run(scenario())
    assert len(checked) >= 41
    assert checked.index("b") <= 2
