"""Synchronisation with the database: adapters that are loaded over HTTP, and shared prefixes.

A server that starts has again what the database holds, and the servers of one database follow each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ...core.errors import NotFoundError, OutriderError
from ...core.lora_request import LoRARequest
from ...core.tasks import cancel
from ...tenancy.accounts.records import SharedPrefix, StoredAdapter
from .model_registry import ModelRegistry

if TYPE_CHECKING:
    from ...client.async_llm import AsyncLLM
    from ...tenancy.accounts.directory import Directory, Snapshot
    from ...tenancy.service import Tenancy

logger = logging.getLogger(__name__)

_Key = tuple[str, str]

RETRY_SECONDS = 5.0
"""Seconds after which a failure that may pass, such as an engine that starts again, is tried once more."""


class AdapterSync:
    """Synchronisation of the adapters loaded over HTTP. One object a server with a database; it belongs to the event
    loop."""

    def __init__(
        self,
        models: ModelRegistry,
        tenancy: Tenancy,
        allowed_roots: Callable[[Iterable[str | None], str], tuple[str, ...]],
    ) -> None:
        """`allowed_roots` is `AdapterPolicy.allowed_roots`."""
        self._models = models
        self._roots_of = allowed_roots
        self._tenancy = tenancy
        self._applied: dict[_Key, StoredAdapter] = {}  # what the registry has because of the database
        self._failed: dict[_Key, StoredAdapter] = {}  # what it could not take
        self._lock = asyncio.Lock()  # what is read of the database is applied before anything else changes
        self._changes = asyncio.Event()
        self._is_behind = False  # something failed that may go well without any change
        self._follower: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register the adapters of the database, and follow changes from then on.

        Raises:
            DatabaseUnavailableError: the database cannot be read.
        """
        await self._sync()
        self._tenancy.directory.subscribe(self._on_change)
        self._follower = asyncio.create_task(self._follow(), name="outrider-adapters")

    async def close(self) -> None:
        """Stop to follow the database."""
        await cancel(self._follower)

    # --- changes made here ---

    async def remember(self, adapter: StoredAdapter, max_adapters: int | None) -> None:
        """Store an adapter that has been loaded.

        Raises:
            DatabaseUnavailableError: it could not be.
            NotFoundError: there is no such tenant. InvalidUserInputError: it has `max_adapters` others.
        """
        async with self._lock:
            stored = await self._tenancy.database.run(self._tenancy.store.put_adapter, adapter, max_adapters)
            self._applied[stored.tenant, stored.name] = stored
            self._failed.pop((stored.tenant, stored.name), None)

    async def forget(self, tenant: str, name: str) -> bool:
        """Remove an adapter that is about to be unloaded; returns True when it was stored.

        Raises:
            DatabaseUnavailableError: it could not be.
        """
        async with self._lock:
            removed = await self._tenancy.database.run(self._tenancy.store.remove_adapter, tenant, name)
            self._applied.pop((tenant, name), None)
            self._failed.pop((tenant, name), None)
            return removed

    async def pin(self, tenant: str, name: str, pinned: bool) -> None:
        """Store that an adapter is pinned or not, if it is stored.

        Raises:
            DatabaseUnavailableError: it could not be.
        """
        async with self._lock:
            await self._tenancy.database.run(self._tenancy.store.set_adapter_pinned, tenant, name, pinned)

    def has(self, tenant: str, name: str) -> bool:
        """True for an adapter that this server has because of the database."""
        return (tenant, name) in self._applied

    # --- changes made elsewhere ---

    def _on_change(self, snapshot: Snapshot) -> None:
        self._changes.set()

    async def _follow(self) -> None:
        is_away = False
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changes.wait(), RETRY_SECONDS if self._is_behind else None)
            self._changes.clear()
            self._is_behind = False
            try:
                await self._sync()
                is_away = False
            except OutriderError as error:
                self._is_behind = True
                if not is_away:  # once
                    logger.warning("the adapters of the database cannot be read: %s", error.message)
                is_away = True
            except Exception:
                logger.exception("the adapters of the database cannot be followed")

    async def _sync(self) -> None:
        async with self._lock:
            rows = await self._tenancy.database.run(self._tenancy.store.list_adapters)
            await self._apply({(row.tenant, row.name): row for row in rows})

    async def _apply(self, wanted: dict[_Key, StoredAdapter]) -> None:
        for key in self._applied.keys() - wanted.keys():
            await self._unload(key)
        new = [row for key, row in wanted.items() if self._applied.get(key) != row]
        self._failed = {key: row for key, row in self._failed.items() if wanted.get(key) == row}
        for row in self._not_taken(new):
            await self._load(row)

    def _not_taken(self, rows: Iterable[StoredAdapter]) -> Iterable[StoredAdapter]:
        """Rows whose names are free on this server; its command line goes before the database."""
        for row in rows:
            key = (row.tenant, row.name)
            taken = row.name in self._models.base_names or self._models.has(row.name, row.tenant)
            if taken and key not in self._applied:
                if key not in self._failed:
                    logger.warning("the adapter %r of the database is hidden by one of that name", _shown(row))
                self._failed[key] = row
            else:
                yield row

    async def _load(self, row: StoredAdapter) -> None:
        """Take one adapter. A plain one is read when it is first requested. One that cannot be loaded is tried again at
        the next change, and sooner if that is not the adapter's fault."""
        key = (row.tenant, row.name)
        roots = self._roots_of((row.path, row.draft_path), row.tenant)
        request = LoRARequest(row.name, path=row.path, draft_path=row.draft_path, digest=row.digest, roots=roots)
        old = self._applied.get(key)
        try:
            if old is None and not row.pinned:
                await self._models.register(request, tenant=row.tenant)
            elif old is not None and (old.path, old.draft_path, old.created_at) == (
                row.path,
                row.draft_path,
                row.created_at,
            ):
                await self._models.set_pinned(row.name, row.pinned, tenant=row.tenant)
            else:
                await self._models.load(request, tenant=row.tenant, load_inplace=old is not None, pinned=row.pinned)
        except OutriderError as error:
            if self._failed.get(key) != row:
                logger.error("the adapter %r of the database cannot be loaded: %s", _shown(row), error.message)
            self._failed[key] = row
            self._is_behind |= error.status >= 500
        else:
            self._applied[key] = row
            self._failed.pop(key, None)

    async def _unload(self, key: _Key) -> None:
        tenant, name = key
        try:
            await self._models.unload(name, tenant=tenant)
        except NotFoundError:
            pass
        except OutriderError as error:
            logger.error("the adapter %r cannot be unloaded: %s", f"{tenant}/{name}" if tenant else name, error.message)
            self._is_behind = True
            return
        del self._applied[key]


class PrefixSync:
    """Synchronisation of the shared prefixes. One object a server with a database; it belongs to the event loop, and
    prefixes of millions of tokens are split up in a thread."""

    def __init__(self, llm: AsyncLLM, directory: Directory) -> None:
        self._llm = llm
        self._directory = directory
        self._wanted: tuple[SharedPrefix, ...] = ()
        self._key: tuple[tuple[str, float], ...] | None = None  # of those; a name may be given again, later
        self._applying: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Apply the present prefixes, and every change of them from then on."""
        self._directory.subscribe(self._on_change)
        await self.applied()

    def _on_change(self, snapshot: Snapshot) -> None:
        key = tuple((prefix.name, prefix.created_at) for prefix in snapshot.prefixes)
        if key == self._key:
            return  # something else has changed
        self._key, self._wanted = key, snapshot.prefixes
        if self._applying is None:
            self._applying = asyncio.create_task(self._apply(), name="outrider-prefixes")

    async def _apply(self) -> None:
        """Apply the wanted prefixes, one set after another, until the newest is applied."""
        try:
            done = None
            while done != self._key:
                done = self._key
                await self._llm.share_prefixes([prefix.token_ids for prefix in self._wanted])
        except Exception:
            self._key = None  # so that the next change is taken, whatever it is
            logger.exception("the shared prefixes cannot be taken")
        finally:
            self._applying = None

    async def applied(self) -> None:
        """Wait until all changes that the directory has announced are applied."""
        while self._applying is not None:
            await asyncio.shield(self._applying)

    async def close(self) -> None:
        """Stop to follow the directory."""
        await cancel(self._applying)


def _shown(row: StoredAdapter) -> str:
    return f"{row.tenant}/{row.name}" if row.tenant else row.name
