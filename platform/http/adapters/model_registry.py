"""The models of this server: the base model, the adapters that all share, and each tenant's own.

Adapters go by the engine's names here (`core.adapter_names`); what a client may see and how it calls it is said by
its `ModelView`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ...client.adapters.sources.resolver import shown_source
from ...core.adapter_names import MARK, engine_name, split_engine_name
from ...core.errors import InvalidUserInputError, NotFoundError, OutriderError
from ...core.lora_request import LoRARequest
from ...core.messages import AdapterInfo
from ...core.text import shorten
from ...tenancy.accounts.principal import Principal
from .model_view import ModelView

if TYPE_CHECKING:
    from ...client.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

MAX_AGE = 1.0
"""Seconds for which a list of the engine's adapters is used; it is asked no more often, however many look."""
REFRESH_TIMEOUT = 2.0
"""Seconds to wait for the engine's list; after that the last one is shown again."""

MAX_GONE = 10_000
"""Largest number of unloaded adapters whose names are remembered."""

_UNREAD = AdapterInfo("", "", "", 0, 0, "disk")


@dataclasses.dataclass(slots=True)
class _Facts:
    """Facts on the card of an adapter."""

    created: int | None = None
    """Time of its load; None: it was only found."""
    root: str | None = None
    """Where it came from, as the user wrote it; None: its folder."""
    info: AdapterInfo = dataclasses.field(default_factory=lambda: _UNREAD)
    """Facts as the engine reported them last, with the changes made here since."""
    draft: str = ""
    """`AdapterInfo.draft` when the files had been read."""


class ModelRegistry:
    """Names of the base model and the adapters of this server.

    Adapters are registered through this process alone, so its client of the engine knows them without asking; after a
    restart of the engine it registers them there again, and forgets those that cannot be read any more. Nothing of
    that is kept twice: this object only looks. Others, which all share, are found by their names when they are first
    asked for (`discover`): the engine registers them with their first request.
    """

    def __init__(self, llm: AsyncLLM, base_names: tuple[str, ...], aliases: tuple[str, ...] = ()) -> None:
        """`aliases` mean the base model in requests, and have no card."""
        self._llm = llm
        self.base_names = (*base_names, *aliases)
        self._shown_names = base_names
        self._started = int(time.time())
        self._gone: dict[str, None] = {}  # names of unloaded adapters that could be read as a sum
        self._found: dict[str, LoRARequest] = {}  # by `discover`
        self._in_directories: dict[str, str] = {}  # name -> folder, as of the last `refresh`
        self._facts: defaultdict[str, _Facts] = defaultdict(_Facts)
        self._asked_at: float | None = None  # when the engine listed its adapters; None: it has to be asked
        self._engine_run = 0  # of the engine that listed them
        self._num_changes = 0  # of adapters, made here
        self._asking: asyncio.Task[None] | None = None
        self._loading: Counter[str] = Counter()  # names that are being loaded now

    @property
    def base_name(self) -> str:
        """The first of the base model's names."""
        return self.base_names[0]

    def seen_by(self, principal: Principal) -> ModelView:
        """The models as `principal` sees them."""
        return ModelView(self, principal)

    def adapter(self, name: str) -> LoRARequest | None:
        """The adapter loaded under an engine's name, else the one found by `discover`."""
        return self._llm.adapters.requests.get(name) or self._found.get(name)

    def was_adapter(self, name: str) -> bool:
        """True when an adapter of this engine's name was unloaded, and is not there again. Names are remembered since
        this server's start, and only those that could be read as a weighted sum."""
        return name in self._gone and self.adapter(name) is None

    def known(self) -> dict[str, str]:
        """All adapters: engine's name -> where it comes from, as of the last `refresh`."""
        roots = dict(self._in_directories)
        for requests in (self._found, self._llm.adapters.requests):
            roots |= {name: request.path for name, request in requests.items()}
        roots |= {name: facts.root for name, facts in self._facts.items() if facts.root is not None and name in roots}
        return {name: root for name, root in roots.items() if name not in self.base_names}

    # --- names in requests ---

    async def discover(self, names: Iterable[str]) -> None:
        """Look for adapters that are not loaded. One whose folder is gone is no longer known, and leaves the engine.

        Raises:
            AdapterError: there is one that may not be read.
            OutriderError: a plug-in failed.
        """
        if not self._llm.sources.finds_names:
            return
        for name in dict.fromkeys(names):
            if not name or MARK in name or name in self.base_names or name in self._llm.adapters.requests:
                continue
            found = await self._llm.sources.find(name)
            if found is not None:
                self._found[name] = found
            elif self._found.pop(name, None) is not None:
                self._remember_gone(name)
                with contextlib.suppress(OutriderError):  # it may never have been used
                    await self._llm.adapters.unload(name)

    # --- loading and unloading; `tenant` is "" for adapters that all share ---

    def check_free(self, name: str, *, tenant: str = "", load_inplace: bool) -> None:
        """Check that an adapter may be loaded under this name; InvalidUserInputError otherwise."""
        if name in self.base_names:
            raise InvalidUserInputError(f"{shorten(name)!r} is the name of the base model", param="lora_name")
        if not load_inplace and engine_name(tenant, name) in self._llm.adapters.requests:
            raise InvalidUserInputError(
                f"The LoRA adapter {shorten(name)!r} has already been loaded; "
                "set load_inplace to load it again under the same name",
                param="lora_name",
            )

    @contextlib.contextmanager
    def room_for(self, name: str, tenant: str, max_adapters: int) -> Iterator[None]:
        """Keep one of the tenant's adapter slots while its adapter is being loaded.

        Raises:
            InvalidUserInputError: it has as many adapters as it may have.
        """
        wanted = engine_name(tenant, name)
        own = {wanted, *self._of(tenant, self._llm.adapters.requests), *self._of(tenant, self._loading)}
        if len(own) > max_adapters:
            raise InvalidUserInputError(
                f"The tenant has {len(own) - 1} adapters of its own, and may have at most {max_adapters}; "
                "unload one first",
                param="lora_name",
            )
        self._loading[wanted] += 1
        try:
            yield
        finally:
            self._loading[wanted] -= 1
            if not self._loading[wanted]:
                del self._loading[wanted]

    @staticmethod
    def _of(tenant: str, names: Iterable[str]) -> Iterator[str]:
        prefix = engine_name(tenant, "")
        return (name for name in names if name.startswith(prefix))

    async def fetch(self, request: LoRARequest) -> LoRARequest:
        """Replace the sources of an adapter by local folders."""
        return await self._llm.sources.localize(request, again=True)

    async def load(
        self,
        request: LoRARequest,
        *,
        tenant: str = "",
        load_inplace: bool = False,
        pinned: bool = False,
        running: str = "finish",
        root: str | None = None,
    ) -> AdapterInfo:
        """Register an adapter under its plain name; the engine validates it first. `root`: where it comes from, as the
        user wrote it."""
        self.check_free(request.name, tenant=tenant, load_inplace=load_inplace)
        owned = _owned(request, tenant)
        try:
            info = await self._llm.adapters.load(owned, load_inplace=load_inplace, pinned=pinned, running=running)
        except InvalidUserInputError:
            # Taken in the engine alone: by one that was found by its name, or that a request in flight brought back
            # when it had been unloaded.
            if load_inplace:
                raise
            self.check_free(request.name, tenant=tenant, load_inplace=False)
            info = await self._llm.adapters.load(owned, load_inplace=True, pinned=pinned, running=running)
        self._note(owned, root)
        facts = self._facts[owned.name]
        facts.info, facts.draft = info, info.draft
        self._note_change()
        return info

    async def register(self, request: LoRARequest, *, tenant: str = "") -> None:
        """Make an adapter known by its plain name; its files are read when requests come."""
        owned = _owned(request, tenant)
        await self._llm.adapters.register([owned])
        self._note(owned, None)
        self._note_change()

    def _note(self, owned: LoRARequest, root: str | None) -> None:
        facts = self._facts[owned.name]
        facts.created, facts.root = int(time.time()), shown_source(owned.path if root is None else root)

    def has(self, name: str, tenant: str = "") -> bool:
        """True when an adapter has been loaded under this plain name."""
        return engine_name(tenant, name) in self._llm.adapters.requests

    async def unload(self, name: str, mode: str = "drain", *, tenant: str = "") -> None:
        """Unload an adapter, wherever its name is known; requests that run with it finish, or are aborted."""
        owned = self._own_spelling(name, tenant)
        known = owned in self._llm.adapters.requests
        try:
            await self._llm.adapters.unload(owned, mode)
        except NotFoundError:
            if not known:  # else the engine has lost it, and now it is gone everywhere
                raise unknown_adapter(name) from None
        self._llm.sources.restrict(owned)
        self._remember_gone(owned)
        self._found.pop(owned, None)
        self._facts.pop(owned, None)
        self._note_change()

    def _remember_gone(self, name: str) -> None:
        if ":" in name or "+" in name:
            self._gone[name] = None
            if len(self._gone) > MAX_GONE:
                del self._gone[next(iter(self._gone))]

    async def set_pinned(self, name: str, pinned: bool, *, tenant: str = "") -> None:
        """Keep an adapter on the device, or not; one that was only found is loaded to be pinned."""
        owned = self._own_spelling(name, tenant)
        try:
            await (self._llm.adapters.pin(owned) if pinned else self._llm.adapters.unpin(owned))
        except NotFoundError:
            if not tenant:
                await self.discover([name])
            if not pinned or owned not in self._found:
                raise unknown_adapter(name) from None
            await self.load(self._found[owned], pinned=True)
        else:
            if owned in self._facts:
                self._facts[owned].info = dataclasses.replace(self._facts[owned].info, pinned=pinned)
            self._note_change()

    def _own_spelling(self, name: str, tenant: str) -> str:
        """The engine's name of a plain one; refuses names that are spelt like the engine's."""
        if MARK in name:
            raise unknown_adapter(name)
        return engine_name(tenant, name)

    # --- cards ---

    async def refresh(self) -> None:
        """Update the facts on the cards."""
        self._in_directories = await self._llm.sources.in_directories()
        if self._llm.state not in ("ready", "paused"):
            return
        for name in self._found.keys() - self._in_directories.keys():
            with contextlib.suppress(OutriderError):
                await self.discover([name])
        if not self._known_names() or self._is_fresh():
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.shield(self._asking)  # who leaves does not end it for the others

    def _known_names(self) -> set[str]:
        return self._llm.adapters.requests.keys() | self._found.keys() | self._in_directories.keys()

    def _is_fresh(self) -> bool:
        is_young = self._asked_at is not None and time.monotonic() - self._asked_at < MAX_AGE
        return is_young and self._engine_run == self._llm.num_restarts

    def _note_change(self) -> None:
        """Have the engine asked again: a change made here may have moved other adapters, such as off the device."""
        self._num_changes += 1
        self._asked_at = None

    async def _ask(self) -> None:
        began, run, changes = time.monotonic(), self._llm.num_restarts, self._num_changes
        try:
            infos = await asyncio.wait_for(self._llm.adapters.list(), REFRESH_TIMEOUT)
        except (OutriderError, TimeoutError) as error:
            logger.debug("no list of adapters from the engine: %s", error)
            return
        if changes != self._num_changes:
            return  # it may be of before a change that has been noted here: the next one who looks asks again
        self._asked_at, self._engine_run = began, run
        known, listed = self._known_names(), {info.name: info for info in infos}
        for name in self._facts.keys() - known:
            del self._facts[name]
        for name in known & (self._facts.keys() | listed.keys()):
            facts = self._facts[name]
            facts.info = listed.get(name, _UNREAD)
            if facts.info.digest:  # else it has not been read yet
                facts.draft = facts.info.draft

    def base_cards(self) -> list[dict[str, Any]]:
        """OpenAI model cards of the base model, one a name."""
        model = self._llm.info.model
        return [self._card(name, model, None, None) for name in self._shown_names]

    def adapter_card(self, name: str, shown: str, root: str) -> dict[str, Any]:
        """The card of an adapter, by the engine's name, as of the last `refresh`."""
        facts = self._facts.get(name, _Facts())
        info = facts.info
        card = self._card(shown, root, self.base_name, facts.created)
        tenant, _ = split_engine_name(name)
        card |= {
            "draft": facts.draft,
            "tier": info.level,
            "rank": info.rank,
            "rows": info.rows,
            "bytes": info.num_bytes,
            "pinned": info.pinned,
            "digest": info.digest,
            "num_running": info.num_running,
            "num_waiting": info.num_waiting,
            "load_seconds": round(info.load_seconds, 6),
        }
        return card | {"tenant": tenant} if tenant else card

    def _card(self, shown: str, root: str, parent: str | None, created: int | None) -> dict[str, Any]:
        return {
            "id": shown,
            "object": "model",
            "created": self._started if created is None else created,
            "owned_by": "outrider",
            "root": root,
            "parent": parent,
            "max_model_len": self._llm.info.max_model_len,
        }


def unknown_adapter(name: str) -> NotFoundError:
    """The error for an adapter that does not exist, or not for this client."""
    return NotFoundError(f"The LoRA adapter {shorten(name)!r} does not exist", param="lora_name")


def _owned(request: LoRARequest, tenant: str) -> LoRARequest:
    if not tenant:
        return request
    return dataclasses.replace(request, lora_name=engine_name(tenant, request.name))
