"""State that the routes share: the client of the engine, the options, the model names, the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from ..client.prepared import ParsedPrompt
from ..core.adapter_names import split_engine_name
from ..core.errors import (
    AsleepError,
    EngineDeadError,
    NotFoundError,
    OutriderError,
    PermissionDeniedError,
    ShuttingDownError,
    invalid,
)
from ..core.lora_request import LoRA
from ..tenancy.accounts.principal import Principal
from ..tenancy.limits.queue_bound import Bounds, QueueBound
from .adapters.database_sync import AdapterSync, PrefixSync
from .adapters.model_registry import ModelRegistry
from .adapters.source_policy import AdapterPolicy
from .batches.service import Batches
from .body.body_memory import BODIES_IN_MEMORY, BodyMemory, give_back_memory
from .body.bounds import MAX_VALUES
from .observe.metric_families import batch_families, tenancy_families
from .observe.prometheus_metrics import Metrics
from .observe.request_log import current_log, log_tokenizer
from .openai.chat_messages import num_chars
from .openai.protocol import TemplateFields
from .openai.responses.store import ResponseStore
from .protect.error_responses import EngineUnavailableError
from .protect.named_locks import NamedLocks
from .server_config import ServerConfig

if TYPE_CHECKING:
    from ..client.async_llm import AsyncLLM
    from ..client.input_processor import InputProcessor
    from ..client.weight_updates import AppliedUpdate
    from ..core.messages import EngineStats
    from ..tenancy.service import Tenancy
    from .observe.tracing import RequestTracer

logger = logging.getLogger(__name__)

STATS_TIMEOUT = 2.0
"""Seconds that the engine gets for a snapshot of its counts."""
_LONG_TEXT = 1500
"""Characters above which a prompt is tokenized in a thread, so that other streams continue: about 2 ms of work."""
_HUGE_TEXT = 50_000
"""Characters whose tokenizing takes tens of megabytes, which are given back to the system at once."""
_PIECE_CHARS = 50
"""Characters that a prompt or a message costs in addition to its own."""
MAX_TOKENIZED = 1 << 15
"""Tokens of a text that `/tokenize` takes, or a whole context if that is more."""

T = TypeVar("T")

PRINCIPAL = "principal"
"""Key of a request's state: the `Principal` behind it; None without a valid key, which only open routes see."""

HELD_BODY = "held_body"
"""Key of a request's state: the `HeldBody` of a request that may wait."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


class Serving:
    """Shared state of the routes, in `app.state.serving`; one object a server, which lives as long as the app."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig, tenancy: Tenancy | None = None) -> None:
        self.started = time.monotonic()
        self.llm = llm
        self.config = config
        self.tenancy = tenancy
        """Tenants of the server; None without a database."""
        self.models = ModelRegistry(llm, config.served_model_names, config.model_aliases)
        self.adapter_policy = AdapterPolicy(config)
        self.metrics = Metrics(config.served_model_names[0] if config.metrics_prefix == "vllm" else None)
        if tenancy is not None:
            self.metrics.register(lambda: tenancy_families(tenancy))
        self.queue = QueueBound() if tenancy is None else tenancy.limiter.queue
        """Count of all that waits, for slots and in the engine."""
        self.queue.bounds = lambda: Bounds(llm.info.max_num_queued_reqs, llm.info.max_num_seqs)
        self.responses = ResponseStore()
        self.constraint_locks = NamedLocks()
        """Locks of tenants: each has one of its constraints checked at a time."""
        self.adapter_locks = NamedLocks()
        """Locks of adapters: what the engine has and what the database has of one change together."""
        self.bodies = BodyMemory(BODIES_IN_MEMORY * config.max_body_bytes)
        self.adapter_sync: AdapterSync | None = None
        """Synchronisation of the adapters loaded over HTTP, once `follow_database` has been called."""
        self.prefix_sync: PrefixSync | None = None
        """Synchronisation of the shared prefixes, likewise."""
        self.batches = batches = None if config.batch_dir is None else Batches(self)
        """Files and batches of the clients; None without a folder for them."""
        if batches is not None:
            self.metrics.register(lambda: batch_families(batches))
        self.tracer = _tracer(config.otlp_endpoint)
        self.weight_session: AppliedUpdate | None = None
        """Weight update that has been started and not finished."""
        self.draining = False
        """True from SIGTERM on; set before the engine's client is asked to drain."""

    @property
    def state(self) -> str:
        """ "starting", "ready", "paused", "restarting", "sleeping", "draining" or "stopped"."""
        return "draining" if self.draining and self.llm.state != "stopped" else str(self.llm.state)

    @property
    def takes_requests(self) -> bool:
        """True when requests are taken, even if they wait for the end of a pause."""
        return self.state in ("ready", "paused")

    @property
    def max_values(self) -> int:
        """Values that one body may hold: more than the longest prompt needs."""
        with contextlib.suppress(EngineDeadError):  # it has not started
            return max(MAX_VALUES, 4 * self.llm.info.max_model_len)
        return MAX_VALUES

    def has_tenant(self, name: str) -> bool:
        """True when there is a tenant of that name."""
        return self.tenancy is not None and name in self.tenancy.directory.tenants

    async def follow_database(self) -> None:
        """Follow the adapters and the shared prefixes of the database. Call it when the engine is ready; without a
        database it does nothing.

        Raises:
            DatabaseUnavailableError: the database cannot be read.
        """
        if self.tenancy is None:
            return
        self.adapter_sync = AdapterSync(self.models, self.tenancy, self.adapter_policy.allowed_roots)
        await self.adapter_sync.start()
        self.prefix_sync = PrefixSync(self.llm, self.tenancy.directory)
        await self.prefix_sync.start()

    async def update_metrics(self) -> EngineStats | None:
        """Take a snapshot of the engine's counts; None without an answer, and the last one stays."""
        try:
            stats = await asyncio.wait_for(self.llm.stats(), STATS_TIMEOUT)
        except (OutriderError, TimeoutError) as error:
            logger.debug("no snapshot from the engine: %s", error)
            return None
        self.metrics.update(stats)
        return stats

    def begin_draining(self) -> None:
        """Refuse new requests: those that come, and those that wait for one of their tenant's slots."""
        self.draining = True
        if self.batches is not None:
            self.batches.begin_draining()
        if self.tenancy is not None:
            self.tenancy.limiter.refuse_waiting(shutting_down())

    async def close(self) -> None:
        """Run no batches, follow the database no more, and send the last traces."""
        if self.batches is not None:
            await self.batches.close()
        for follower in (self.adapter_sync, self.prefix_sync):
            if follower is not None:
                await follower.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    def check_ready(self) -> None:
        """Refuse new work while the engine is not ready."""
        state = self.state
        if state in ("draining", "stopped"):
            raise shutting_down()
        if state == "sleeping":
            raise AsleepError("The engine sleeps and takes no requests until it is woken up")
        if not self.takes_requests:
            raise EngineUnavailableError(f"The engine is {state}; try again in a moment")

    async def prompts(
        self,
        prompts: list[str | list[int]],
        *,
        add_special_tokens: bool,
        lora: LoRA | None = None,
        field: str = "prompt",
    ) -> list[ParsedPrompt]:
        """Prompts for an adapter, tokenized; `field` is their name in the request.

        Raises:
            InvalidRequestError: a prompt is empty, far too long (PromptTooLongError) or has ids outside the vocabulary.
        """
        processor, most = await self.llm.requests.processor_of(lora), self.llm.info.max_model_len
        log_tokenizer(processor.tokenizer)
        num_ids = processor.num_ids(lora)

        def parse() -> list[ParsedPrompt]:
            parsed = [
                {"prompt_token_ids": processor.encode(prompt, add_special_tokens=False, most=most)}
                if isinstance(prompt, str) and not add_special_tokens
                else prompt
                for prompt in prompts
            ]
            return [replace(processor.parse_prompt(prompt, num_ids), field=field) for prompt in parsed]

        return await self._in_thread_if_long(sum(map(len, prompts)) + len(prompts) * _PIECE_CHARS, parse)

    async def encode(self, text: str, *, add_special_tokens: bool, lora: LoRA | None = None) -> list[int]:
        """Token ids of `text` for an adapter, which may be longer than a prompt.

        Raises:
            PromptTooLongError: it is far longer.
        """
        processor, most = await self.llm.requests.processor_of(lora), max(MAX_TOKENIZED, self.llm.info.max_model_len)
        return await self._in_thread_if_long(
            len(text), lambda: processor.encode(text, add_special_tokens=add_special_tokens, most=most)
        )

    async def cut(
        self, texts: list[str], most: int, *, add_special_tokens: bool, lora: LoRA | None = None
    ) -> list[tuple[int, ...]]:
        """Token ids of texts for an adapter, each cut to at most `most`.

        Raises:
            InvalidRequestError: a text cannot be tokenized.
        """
        processor = await self.llm.requests.processor_of(lora)
        most = min(most, self.llm.info.max_model_len)

        def parse() -> list[tuple[int, ...]]:
            return [processor.encode_cut(text, most, add_special_tokens=add_special_tokens) for text in texts]

        return await self._in_thread_if_long(sum(map(len, texts)) + len(texts) * _PIECE_CHARS, parse)

    async def _in_thread_if_long(self, num_chars: int, work: Callable[[], T]) -> T:
        """Call `work`, in a thread when it takes more than about a millisecond: tokenizers let others run."""
        if num_chars <= _LONG_TEXT:
            return work()
        try:
            return await asyncio.to_thread(work)
        finally:
            if num_chars > _HUGE_TEXT:
                await asyncio.to_thread(give_back_memory)

    async def chat_prompt(
        self, messages: list[dict[str, Any]], request: TemplateFields, lora: LoRA | None = None
    ) -> list[int]:
        """Token ids of `messages` under the chat template; unless `request` says otherwise, the template alone writes
        special tokens. The request's template comes before the server's, and that before those of `chat_template`.

        Raises:
            InvalidRequestError: the template refuses the messages, or the request may not bring one.
            AdapterError: the adapter's template cannot be read.
        """
        if request.chat_template is not None and not self.config.trust_request_chat_template:
            raise invalid(
                "chat_template", "is taken from requests only when the server runs with --trust-request-chat-template"
            )
        template = await self.chat_template(lora, request.chat_template or self.config.chat_template)
        size = num_chars(messages) + len(messages) * _PIECE_CHARS + sum(len(str(tool)) for tool in request.tools or ())
        processor = await self.llm.requests.processor_of(lora)
        log_tokenizer(processor.tokenizer)
        return await self._in_thread_if_long(size, lambda: self._chat_prompt(processor, messages, request, template))

    async def chat_template(self, lora: LoRA | None, given: str | None = None) -> str | None:
        """See `RequestMaker.chat_template`. A template is a program that can loop: a tenant's adapter has none."""
        if lora is not None and split_engine_name(lora.name)[0] and not self.config.trust_request_chat_template:
            lora = None
        return await self.llm.requests.chat_template(lora, given)

    def _chat_prompt(
        self,
        processor: InputProcessor,
        messages: list[dict[str, Any]],
        request: TemplateFields,
        template: str | None,
    ) -> list[int]:
        variables = {**self.config.chat_template_kwargs, **(request.chat_template_kwargs or {})}
        if request.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", request.reasoning_effort)
            variables.setdefault("enable_thinking", request.reasoning_effort != "none")
        continue_final = bool(request.continue_final_message)
        generation = request.add_generation_prompt
        rendered = processor.chat_prompt(
            messages,
            {
                "add_generation_prompt": not continue_final if generation is None else generation,
                "continue_final_message": continue_final,
                "chat_template": template,
                "tools": request.tools or None,
                "chat_template_kwargs": variables,
            },
        )
        if request.add_special_tokens:
            return processor.encode(rendered["prompt"], most=self.llm.info.max_model_len)
        return list(rendered["prompt_token_ids"])


def _tracer(endpoint: str | None) -> RequestTracer | None:
    if endpoint is None:
        return None
    from .observe.tracing import RequestTracer  # needs packages that are there only for this

    return RequestTracer(endpoint)


def shutting_down() -> ShuttingDownError:
    """Error of requests that come after SIGTERM, or that still wait when the shutdown cancels them."""
    return ShuttingDownError("The server is shutting down and takes no new requests")


def serving_of(request: Request) -> Serving:
    """The server's shared objects."""
    serving = request.app.state.serving
    assert isinstance(serving, Serving)
    return serving


def batches_of(request: Request) -> Batches:
    """The server's files and batches.

    Raises:
        NotFoundError: the server keeps none.
    """
    batches = serving_of(request).batches
    if batches is None:
        raise NotFoundError("This server keeps no files and runs no batches: start it with --batch-dir")
    return batches


def principal_of(request: Request) -> Principal:
    """The principal of a request to a guarded route."""
    principal = getattr(request.state, PRINCIPAL, None)
    assert isinstance(principal, Principal), "`Authentication` admits no other request"
    return principal


def require_admin(request: Request) -> None:
    """Refuse a caller that may not run the server, before anything of the request is read.

    Raises:
        PermissionDeniedError: the key has not the scope "admin".
    """
    if not principal_of(request).is_admin:
        raise PermissionDeniedError("This call needs an admin's API key")


def new_request_id(kind: str) -> str:
    """An id for an answer and the engine: "chatcmpl-…", or "resp_…" if the kind has its own end. Never the client's
    own, which need not be unique."""
    request_id = f"{kind}{'' if kind.endswith('_') else '-'}{uuid.uuid4().hex}"
    log = current_log()
    if log is not None:
        log.id = request_id
    return request_id


def valid_request_id(value: str) -> bool:
    """True when an `X-Request-Id` may be sent back as it came."""
    return _REQUEST_ID.fullmatch(value) is not None
