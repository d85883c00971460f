"""Thousands of mixed requests: at the end nothing is held, and nothing has grown.

The suite runs a part; OUTRIDER_SOAK_REQUESTS=5000 is the whole.
"""

import asyncio
import collections
import os
import random
import signal
import string
from pathlib import Path

import httpx
import psutil
import pytest

from outrider.models.demo import demo_adapters

NUM_REQUESTS = int(os.environ.get("OUTRIDER_SOAK_REQUESTS", "300"))
CONCURRENCY = 32
MIB = 1 << 20
MAX_GROWTH = {"api": 16 * MIB, "engine": 16 * MIB}
"""Resident memory, from the middle to the end."""

MODELS = ["outrider-demo", *sorted(demo_adapters())]
STREAM = {"stream": True, "echo": False}
SHARED = "The same words before every question of this kind. " * 6


class Soak:
    """Sends requests of all kinds, and counts how they ended."""

    def __init__(self, server, adapter: str) -> None:
        self.server = server
        self.ends: collections.Counter[str] = collections.Counter()
        self._adapter = adapter
        self._dice = random.Random(11)
        self._loaded = 0

    async def run(self, count: int) -> None:
        numbers = iter(range(count))
        limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=120, limits=limits) as http:

            async def worker() -> None:
                for _ in numbers:
                    await self._one(http)

            await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))

    async def _one(self, http: httpx.AsyncClient) -> None:
        kinds = {
            self._whole: 40, self._stream: 25, self._chat: 10, self._aborted_stream: 10, self._impatient: 4,
            self._bad: 9, self._load_and_unload: 2,
        }  # fmt: skip
        (kind,) = self._dice.choices(list(kinds), list(kinds.values()))
        await kind(http)

    def _body(self) -> dict:
        dice = self._dice
        parts = ":0.5+".join(dice.sample(MODELS[1:], 2)) + ":0.5"
        prompt = dice.choice([SHARED, "", ""]) + "".join(
            dice.choices(string.ascii_letters + " ", k=dice.randint(1, 80))
        )
        body = {"model": dice.choice([*MODELS, *MODELS, parts]), "prompt": prompt, "max_tokens": dice.randint(1, 12)}
        extras = (
            ("temperature", 0.0), ("seed", dice.randint(0, 99)), ("n", 2), ("logprobs", 2), ("stop", [" the", "e"]),
            ("speculative", dice.choice([False, 1, True])), ("ignore_eos", True), ("echo", True),
            ("cache_salt", dice.choice("ab")), ("prompt", [prompt, "and another"]), ("frequency_penalty", 0.5),
        )  # fmt: skip
        return body | {name: value for name, value in extras if dice.random() < 0.12}

    async def _whole(self, http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/completions", json=self._body())
        assert answer.status_code == 200, answer.text
        self.ends["whole"] += 1

    async def _chat(self, http: httpx.AsyncClient) -> None:
        messages = [{"role": "user", "content": "x" * self._dice.randint(1, 60)}]
        body = {"model": self._dice.choice(MODELS), "messages": messages, "max_tokens": 6}
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        self.ends["chat"] += 1

    async def _stream(self, http: httpx.AsyncClient) -> None:
        async with http.stream("POST", "/v1/completions", json=self._body() | STREAM) as answer:
            assert answer.status_code == 200, await answer.aread()
            *_, last = [line async for line in answer.aiter_lines() if line]
        assert last == "data: [DONE]"
        self.ends["stream"] += 1

    async def _aborted_stream(self, http: httpx.AsyncClient) -> None:
        body = self._body() | STREAM | {"max_tokens": 400, "ignore_eos": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for _ in answer.aiter_lines():
                break
        self.ends["aborted stream"] += 1

    async def _impatient(self, http: httpx.AsyncClient) -> None:
        body = self._body() | {"max_tokens": 400, "ignore_eos": True}
        try:
            await http.post("/v1/completions", json=body, timeout=self._dice.choice([0.01, 0.1]))
        except httpx.TimeoutException:
            self.ends["given up"] += 1

    async def _bad(self, http: httpx.AsyncClient) -> None:
        changes = [
            {"temperature": -1}, {"model": "nobody"}, {"prompt": "word " * 20_000}, {"prompt": [10**9]},
            {"use_beam_search": True, "stream": True},
            {"max_tokens": 0}, {"model": "+sql:2000.0"}, {"logprobs": 99},
        ]  # fmt: skip
        change = self._dice.choice(changes)
        answer = await http.post("/v1/completions", json={"prompt": "x", **change})
        assert answer.status_code == (404 if change == {"model": "nobody"} else 400), answer.text
        self.ends["refused"] += 1

    async def _load_and_unload(self, http: httpx.AsyncClient) -> None:
        self._loaded += 1
        name = f"extra-{self._loaded}"
        loaded = await http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": self._adapter})
        assert loaded.status_code == 200, loaded.text
        answer = await http.post("/v1/completions", json={"model": name, "prompt": "All", "max_tokens": 3})
        assert answer.status_code == 200, answer.text
        unloaded = await http.post("/v1/unload_lora_adapter", json={"lora_name": name})
        assert unloaded.status_code == 200, unloaded.text
        self.ends["loaded and unloaded"] += 1

    def memory(self) -> dict[str, int]:
        """Memory of both processes, when nothing runs."""
        self.wait_until_idle()
        processes = {"api": psutil.Process(self.server.process.pid), "engine": self.server.engine()}
        return {name: process.memory_info().rss for name, process in processes.items()}

    def wait_until_idle(self) -> None:
        names = ("num_requests_running", "num_requests_waiting")
        self.server.wait_for(lambda: all(self.server.metric(name) == 0 for name in names))


@pytest.fixture(scope="module")
def soak(start_server):
    server = start_server(
        *("--lora-root", str(demo_adapters()["sql"].parent), "--max-num-seqs", "32", "--max-model-len", "600"),
        # Few blocks: all have been touched when the first half is through, and sequences preempt each other.
        *("--num-gpu-blocks-override", "500"),
        program="soak_server", PYTHONPATH=str(Path(__file__).parent),
        # oneDNN, and torch's layer above it, keep the code of up to 1,024 shapes of products each, 0.3 MB a piece: it
        # takes thousands of requests to fill them.
        ONEDNN_PRIMITIVE_CACHE_CAPACITY="48", LRU_CACHE_CAPACITY="16",
    )  # fmt: skip
    return Soak(server, str(demo_adapters()["sql"]))


def test_soak(soak, record_property):
    server = soak.server
    asyncio.run(
        soak.run(NUM_REQUESTS // 2)
    )  # every kind has been, many times: caches and pools are as large as they get
    middle = soak.memory()
    asyncio.run(soak.run(NUM_REQUESTS - NUM_REQUESTS // 2))
    end = soak.memory()
    growth = {name: end[name] - middle[name] for name in end}
    record_property("growth", str(growth))
    print(dict(soak.ends), {name: f"{value / MIB:.1f} MiB" for name, value in growth.items()}, end)
    assert set(soak.ends) == {
        "whole", "chat", "stream", "aborted stream", "given up", "refused", "loaded and unloaded"
    }  # fmt: skip
    assert all(growth[name] < MAX_GROWTH[name] for name in growth), growth
    assert server.metric("kv_cache_usage_perc") == 0  # all blocks are free
    with server.http() as http:
        for name in MODELS[1:]:
            assert http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
    server.wait_for(lambda: server.metric("lora_rows_used") == 0)  # and all rows
    server.process.send_signal(signal.SIGUSR1)
    server.wait_for(lambda: "integrity: " in server.output)
    assert "integrity: clean" in server.output
    assert server.stop() == 0
    assert "Traceback" not in server.output
