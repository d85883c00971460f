"""What the routes share: the client of the engine, the options, the model names, the metrics."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import TYPE_CHECKING

from starlette.requests import Request

from ..core.errors import InvalidRequestError, PermissionDeniedError, ShuttingDownError
from ..tenancy.principal import Principal
from ..tenancy.queue_bound import Bounds, QueueBound
from .adapter_policy import AdapterPolicy
from .config import ServerConfig
from .errors import EngineUnavailableError
from .hardening import BODIES_IN_MEMORY, BodyMemory
from .metrics import Metrics
from .observation import current_note
from .prefix_follower import PrefixFollower
from .protocol import TemplateFields
from .registry import ModelRegistry
from .tenancy_metrics import TenancyCollector

if TYPE_CHECKING:
    from ..client.async_llm import AsyncLLM
    from ..tenancy.service import Tenancy
    from .adapter_keeper import AdapterKeeper
    from .tracing import RequestTracer

_LONG_TEXT = 20_000
"""Characters above which a prompt is tokenized in a thread, so that other streams go on."""

PRINCIPAL = "principal"
"""In a request's state: the `Principal` behind it; None without a valid key, which only open routes see."""

HELD_BODY = "held_body"
"""In a request's state: the `HeldBody` of one that may wait."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


class Serving:
    """One object a server, in `app.state.serving`; lives as long as the app."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig, tenancy: Tenancy | None = None) -> None:
        self.started = time.monotonic()
        self.llm = llm
        self.config = config
        self.tenancy = tenancy
        """None on a server without a database."""
        self.models = ModelRegistry(llm, config.served_model_names)
        self.adapter_policy = AdapterPolicy(config)
        self.metrics = Metrics()
        if tenancy is not None:
            self.metrics.register(TenancyCollector(tenancy))
        self.queue = QueueBound() if tenancy is None else tenancy.limiter.queue
        """What waits, for places and in the engine."""
        self.queue.bounds = lambda: Bounds(llm.info.max_num_queued_reqs, llm.info.max_num_seqs)
        self.bodies = BodyMemory(BODIES_IN_MEMORY * config.max_body_bytes)
        self.keeper: AdapterKeeper | None = None
        """Of the adapters that are loaded over HTTP, once `follow_database` has been called."""
        self.prefixes: PrefixFollower | None = None
        """The same for shared prefixes."""
        self.tracer = _tracer(config.otlp_endpoint)
        self.draining = False
        """Set by the server on SIGTERM, before the engine's client is asked to drain."""

    @property
    def state(self) -> str:
        """ "starting", "ready", "restarting", "draining" or "stopped"."""
        return "draining" if self.draining and self.llm.state != "stopped" else str(self.llm.state)

    def has_tenant(self, name: str) -> bool:
        """Whether there is a tenant of that name."""
        return self.tenancy is not None and name in self.tenancy.directory.tenants

    async def follow_database(self) -> None:
        """Take the adapters and the shared prefixes that stand in the database, and every change of them. Call it when
        the engine is ready; without a database it does nothing.

        Raises:
            DatabaseUnavailableError: the database cannot be read.
        """
        if self.tenancy is None:
            return
        from .adapter_keeper import AdapterKeeper  # needs the database's packages

        self.keeper = AdapterKeeper(self.models, self.tenancy)
        await self.keeper.start()
        self.prefixes = PrefixFollower(self.llm, self.tenancy.directory)
        await self.prefixes.start()

    def begin_draining(self) -> None:
        """Take no new requests: neither those that come, nor those that wait for one of their tenant's places."""
        self.draining = True
        if self.tenancy is not None:
            self.tenancy.limiter.refuse_waiting(_shutting_down())

    async def close(self) -> None:
        """Follow the database no more, and send the last traces."""
        for follower in (self.keeper, self.prefixes):
            if follower is not None:
                await follower.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    def check_ready(self) -> None:
        """Refuse new work while there is nobody to do it."""
        state = self.state
        if state in ("draining", "stopped"):
            raise _shutting_down()
        if state != "ready":
            raise EngineUnavailableError(f"The engine is {state}; try again in a moment")

    async def prompts(self, prompts: list[str | list[int]], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of prompts, all of them checked.

        Raises:
            InvalidRequestError: a prompt is empty, too long (PromptTooLongError) or has ids outside the vocabulary.
        """

        def parse() -> list[list[int]]:
            processor = self.llm.input_processor
            parsed = [
                {"prompt_token_ids": self._encode(prompt, False)}
                if isinstance(prompt, str) and not add_special_tokens
                else prompt
                for prompt in prompts
            ]
            return [processor.parse_prompt(prompt).token_ids for prompt in parsed]

        if sum(map(len, prompts)) > _LONG_TEXT:
            return await asyncio.to_thread(parse)
        return parse()

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        if len(text) > _LONG_TEXT:
            return await asyncio.to_thread(self._encode, text, add_special_tokens)
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.llm.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def chat_prompt(self, messages: list[dict[str, str]], request: TemplateFields) -> list[int]:
        """Token ids of `messages` under the chat template; unless `request` says otherwise, the template alone writes
        special tokens.

        Raises:
            InvalidRequestError: the template refuses the messages, or the request may not bring one.
        """
        if request.chat_template is not None and not self.config.trust_request_chat_template:
            raise InvalidRequestError(
                "chat_template is taken from requests only when the server runs with --trust-request-chat-template",
                param="chat_template",
            )
        if sum(len(message["content"]) for message in messages) > _LONG_TEXT:
            return await asyncio.to_thread(self._chat_prompt, messages, request)
        return self._chat_prompt(messages, request)

    def _chat_prompt(self, messages: list[dict[str, str]], request: TemplateFields) -> list[int]:
        continue_final = bool(request.continue_final_message)
        generation = request.add_generation_prompt
        rendered = self.llm.input_processor.chat_prompt(
            messages,
            {
                "add_generation_prompt": not continue_final if generation is None else generation,
                "continue_final_message": continue_final,
                "chat_template": request.chat_template or self.config.chat_template,
                "chat_template_kwargs": request.chat_template_kwargs,
            },
        )
        if request.add_special_tokens:
            return self._encode(rendered["prompt"], True)
        return list(rendered["prompt_token_ids"])


def _tracer(endpoint: str | None) -> RequestTracer | None:
    if endpoint is None:
        return None
    from .tracing import RequestTracer  # needs packages that are there only for this

    return RequestTracer(endpoint)


def _shutting_down() -> ShuttingDownError:
    return ShuttingDownError("The server is shutting down and takes no new requests")


def serving_of(request: Request) -> Serving:
    """The server's shared objects."""
    serving = request.app.state.serving
    assert isinstance(serving, Serving)
    return serving


def principal_of(request: Request) -> Principal:
    """Whom a request to a guarded route comes from."""
    principal = getattr(request.state, PRINCIPAL, None)
    assert isinstance(principal, Principal), "the gate lets nobody else through"
    return principal


def require_admin(request: Request) -> None:
    """Refuse who may not run the server, before anything of the request is read.

    Raises:
        PermissionDeniedError: the key has not the scope "admin".
    """
    if not principal_of(request).is_admin:
        raise PermissionDeniedError("This call needs an admin's API key")


def new_request_id(kind: str) -> str:
    """An id for an answer and the engine: "chatcmpl-…". Never the client's own, which need not be unique."""
    request_id = f"{kind}-{uuid.uuid4().hex}"
    note = current_note()
    if note is not None:
        note.id = request_id
    return request_id


def valid_request_id(value: str) -> bool:
    """Whether an `X-Request-Id` may be sent back as it came."""
    return _REQUEST_ID.fullmatch(value) is not None
