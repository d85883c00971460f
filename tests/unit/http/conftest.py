"""The application in front of an engine that answers from a script."""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.platform.client.adapters.sources import AdapterSources
from outrider.platform.client.input_processor import InputProcessor
from outrider.platform.client.prepared import Prepared
from outrider.platform.client.requests import RequestMaker
from outrider.platform.client.sampling_defaults import SamplingDefaults
from outrider.platform.client.waiting import Steps, dual
from outrider.platform.core.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from outrider.platform.core.errors import InvalidUserInputError, NotFoundError, OutriderError
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.messages import AdapterInfo, EngineInfo, EngineStats
from outrider.platform.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.http.app import create_app
from outrider.platform.http.server_config import ServerConfig

sys.path.insert(0, str(Path(__file__).parent))

from connection_helpers import App, Served

INFO = EngineInfo(
    model="/models/base", architecture="LlamaForCausalLM", dtype="float32", device="cpu", vocab_size=256,
    max_model_len=64, max_logprobs=5, num_kv_blocks=100, block_size=16, num_parameters=1_234_567, enable_lora=True,
    max_loras=4, max_lora_rank=16, speculation="ngram, 3 drafts a step", load_seconds=0.5,
)  # fmt: skip


class CharTokenizer:
    """One token a character below 256; 1 begins a text."""

    chat_template = "fake"
    all_special_ids = (1, 2)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(c) for c in text]

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(chr(i) for i in ids if i > 2)

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(256)}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [chr(i) for i in ids]

    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool, **options: Any) -> str:
        template = options.get("chat_template") or self.chat_template
        text = "" if template == self.chat_template else template  # a template is said by itself
        text += "".join(f"{m['role'][0]}:{m['content']}|" for m in conversation)
        return text + "a:" * add_generation_prompt


class FakeAdapters:
    """`AsyncLLM.adapters`, with the engine's adapters in `in_engine` of `llm`."""

    def __init__(self, llm: "FakeAsyncLLM") -> None:
        self.requests: dict[str, LoRARequest] = {}
        self._llm = llm

    async def load(
        self, request: LoRARequest, *, load_inplace: bool = False, pinned: bool = False, running: str = "finish"
    ) -> AdapterInfo:
        if request.path == "/broken":
            raise self._llm.error
        if request.name in self._llm.in_engine and not load_inplace:
            raise InvalidUserInputError("taken", param="lora_name")
        draft = "loaded" if request.draft_path else ""
        info = AdapterInfo(request.name, request.path, "digest", 8, 8, "device", pinned, draft=draft)
        self._llm.in_engine[request.name] = info
        self.requests[request.name] = request
        return info

    async def register(self, requests: Sequence[LoRARequest]) -> None:
        for request in requests:
            if request.path == "/broken":
                raise self._llm.error
            self._llm.in_engine[request.name] = AdapterInfo(request.name, request.path, "", 0, 0, "disk")
            self.requests[request.name] = request

    async def unload(self, name: str, mode: str = "drain") -> None:
        self._llm.calls.append({"unload": name, "mode": mode})
        self.requests.pop(name, None)
        if name not in self._llm.in_engine:
            raise NotFoundError("unknown", param="lora_name")
        del self._llm.in_engine[name]

    async def pin(self, name: str) -> AdapterInfo:
        return self._set_pinned(name, True)

    async def unpin(self, name: str) -> AdapterInfo:
        return self._set_pinned(name, False)

    def _set_pinned(self, name: str, pinned: bool) -> AdapterInfo:
        if name not in self._llm.in_engine:
            raise NotFoundError("unknown", param="lora_name")
        info = self._llm.in_engine[name] = replace(self._llm.in_engine[name], pinned=pinned)
        return info

    async def list(self) -> Any:
        return [*self._llm.in_engine.values()]


class FakeRequests(RequestMaker):
    """Checks requests in the threads of `AsyncLLM`. The folders of its adapters do not exist."""

    @dual
    def processor_of(self, lora_request: Any) -> Steps[InputProcessor]:
        yield from ()
        return self.input_processor


@dataclass
class FakeAsyncLLM:
    """`AsyncLLM`, whose engine answers `reply`, one character a token."""

    reply: str = "Hello"
    info: EngineInfo = field(default_factory=lambda: INFO)
    state: str = "ready"
    num_restarts: int = 0
    fail_after: int | None = None
    """Number of tokens after which `error` is raised."""
    error: Exception = field(default_factory=lambda: OutriderError("boom"))
    blocked: bool = False
    """Never send another token after the first."""
    running: set[str] = field(default_factory=set)
    calls: list[dict[str, Any]] = field(default_factory=list)
    searches: list[tuple[list[int], BeamSearchParams, Any]] = field(default_factory=list)
    """Prompt, parameters and adapter of each beam search."""
    sources: AdapterSources = field(default_factory=AdapterSources)
    in_engine: dict[str, AdapterInfo] = field(default_factory=dict)
    drafted: Callable[[int], bool] = lambda i: i % 2 == 1
    """True when the token of that index was a draft. Each other one rejects as many drafts as its index."""
    snapshot: EngineStats = field(default_factory=EngineStats)

    def __post_init__(self) -> None:
        self.adapters = FakeAdapters(self)
        self.sampling_defaults = SamplingDefaults("auto", self.sources)
        self.tokenizer = CharTokenizer()
        self.input_processor = InputProcessor(self.tokenizer, self.info, eos_token_ids=[2])

    @property
    def requests(self) -> RequestMaker:
        return FakeRequests(self.input_processor, dict, self.sources, self.sampling_defaults)

    async def beam_search(
        self, prompt: Any, params: BeamSearchParams, request_id: str, **options: Any
    ) -> BeamSearchOutput:
        ids = prompt.token_ids
        self.searches.append((ids, params, options["lora_request"]))
        found = [(-1.5 - number, [*ids, *map(ord, "ab"), 2]) for number in range(params.beam_width)]
        return BeamSearchOutput([BeamSearchSequence(tokens, [], None, score, "", "stop") for score, tokens in found])

    async def prepare(
        self, prompt: Any, params: SamplingParams, request_id: str, *, lora_request: Any, **options: Any
    ) -> Prepared:
        return await self.requests.prepare(prompt, params, request_id=request_id, lora_request=lora_request, **options)

    async def run(self, prepared: Prepared, *, delta: bool) -> AsyncGenerator[RequestOutput]:
        assert delta
        request_id, sampling_params, ids = prepared.request_id, prepared.params, prepared.prompt.token_ids
        called = {"prompt": {"prompt_token_ids": ids}, "params": sampling_params, "request_id": request_id}
        self.calls.append({**called, "lora_request": prepared.lora, **prepared.options})
        self.running.add(request_id)
        waited = time.monotonic() - prepared.arrival_time
        metrics = RequestMetrics(arrival_time=prepared.arrival_time, num_cached_tokens=2, queue_seconds=waited)
        max_tokens = sampling_params.max_tokens
        text = self.reply[:max_tokens]
        reason = "length" if len(text) == max_tokens else "stop"
        try:
            for i, char in enumerate(text):
                if self.fail_after == i:
                    raise self.error
                if self.blocked and i == 1:
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
                last = i == len(text) - 1
                if last:
                    metrics.num_verifications, metrics.num_draft_tokens = 2, 6
                    metrics.num_accepted_tokens, metrics.accepted_per_pos = 3, [2, 1, 0]
                    metrics.steps_by_k = [1, 0, 0, 2]
                outputs = [
                    CompletionOutput(
                        index,
                        char,
                        [ord(char)],
                        logprobs=self._logprobs(sampling_params.logprobs, char),
                        finish_reason=reason if last else None,
                        drafted=[self.drafted(i)],
                        rejected_drafts=[0 if self.drafted(i) else i],
                    )
                    for index in range(sampling_params.n)
                ]
                prompt_logprobs = self._prompt_logprobs(sampling_params, ids) if i == 0 else None
                yield RequestOutput(request_id, None, ids, outputs, last, metrics, prompt_logprobs)
        finally:
            self.running.discard(request_id)

    def _logprobs(self, count: int | None, char: str) -> list[dict[int, Logprob]] | None:
        if count is None:
            return None
        entries = {ord(char): Logprob(-2.5, 9, char)}
        return [entries | {200 + i: Logprob(-1.0 - i, i + 1, chr(200 + i)) for i in range(count)}]

    def _prompt_logprobs(self, params: SamplingParams, ids: list[int]) -> list[Any] | None:
        if params.prompt_logprobs is None:
            return None
        return [None, *({i: Logprob(float("-inf"), 3, chr(i))} for i in ids[1:])]

    async def share_prefixes(self, prefixes: Iterable[Sequence[int]]) -> None:
        self.shared_prefixes = [list(prefix) for prefix in prefixes]

    async def stats(self) -> EngineStats:
        return self.snapshot


class Http:
    """Requests to an application, each in an event loop of its own."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return self.request("POST", path, json=json, **options)

    def load_adapter(self, name: str, path: str = "/adapters/x", **extra: Any) -> httpx.Response:
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **extra})


@pytest.fixture
def llm() -> FakeAsyncLLM:
    return FakeAsyncLLM()


@pytest.fixture
def http(llm: FakeAsyncLLM) -> Http:
    return Http(create_app(llm, ServerConfig(served_model_names=("base", "alias"), lora_roots=("/",))))  # type: ignore[arg-type]


@pytest.fixture
def make_http(llm: FakeAsyncLLM):
    def make(**options: Any) -> Http:
        return Http(create_app(llm, ServerConfig(**{"served_model_names": ("base",), "lora_roots": ("/",), **options})))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="module")
def servers():
    started: dict[tuple, Any] = {}
    yield started
    for served in started.values():
        served.stop()


@pytest.fixture
def serve(servers):
    """Servers with the same limits are one, which all connections must have left when a test ends."""
    used = []

    def start(**limits: Any) -> Served:
        key = tuple(limits.items())
        if key not in servers:
            servers[key] = Served(App(), **limits)
        served = servers[key]
        served.app.reset()
        used.append(served)
        return served

    yield start
    for served in used:
        served.until(lambda served=served: (served.admission.num_open, served.admission.num_refused) == (0, 0))
