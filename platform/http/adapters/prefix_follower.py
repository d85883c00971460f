"""Brings the shared prefixes of the database to the engine's client."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ...tenancy.accounts.records import SharedPrefix

if TYPE_CHECKING:
    from ...client.async_llm import AsyncLLM
    from ...tenancy.accounts.directory import Directory, Snapshot

logger = logging.getLogger(__name__)


class PrefixFollower:
    """One object a server with a database. Belongs to the event loop, beside which the prefixes are cut up: they may
    have millions of tokens."""

    def __init__(self, llm: AsyncLLM, directory: Directory) -> None:
        self._llm = llm
        self._directory = directory
        self._wanted: tuple[SharedPrefix, ...] = ()
        self._key: tuple[tuple[str, float], ...] | None = None  # of those; a name may be given again, later
        self._applying: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take the prefixes that there are, and every change of them from then on."""
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
        """Wait until what the directory has told so far counts."""
        while self._applying is not None:
            await asyncio.shield(self._applying)

    async def close(self) -> None:
        """Take no more."""
        if self._applying is not None:
            self._applying.cancel()
            await asyncio.gather(self._applying, return_exceptions=True)
