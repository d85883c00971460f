"""Which names clients may put into `model`: the base model's, the adapters', and `base:adapter`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..client.adapter_sources.resolver import shown_source
from ..core.errors import InvalidUserInputError, NotFoundError, OutriderError
from ..core.lora_request import MAX_PARTS, LoRARequest
from ..core.messages import AdapterInfo
from .text import shorten

if TYPE_CHECKING:
    from ..client.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

REFRESH_TIMEOUT = 2.0
"""Seconds that the engine gets to say what its adapters are; after that its last word is shown again."""

_UNREAD = AdapterInfo("", "", "", 0, 0, "disk")


class ModelRegistry:
    """The names this server answers to.

    Adapters are registered through this process alone, so its client of the engine knows them without asking; after a
    restart of the engine it registers them there again, and forgets those that cannot be read any more. Nothing of
    that is kept twice: this object only looks. Others are found by their names when they are first asked for
    (`discover`): the engine registers them with their first request.
    """

    def __init__(self, llm: AsyncLLM, base_names: tuple[str, ...]) -> None:
        self._llm = llm
        self._base_names = base_names
        self._created: dict[str, int] = dict.fromkeys(base_names, int(time.time()))
        self._roots: dict[str, str] = {}  # where adapters came from, when it was no local folder
        self._found: dict[str, LoRARequest] = {}  # by `discover`
        self._in_directories: dict[str, str] = {}  # name -> folder, as of the last `refresh`
        self._infos: dict[str, AdapterInfo] = {}  # as the engine said last
        self._draft: dict[str, str] = {}  # `AdapterInfo.draft` when the files had been read

    @property
    def base_name(self) -> str:
        """The first of the base model's names."""
        return self._base_names[0]

    def _adapter(self, name: str) -> LoRARequest | None:
        """What has been loaded under a name, else what has been found."""
        return self._llm.adapters.get(name) or self._found.get(name)

    # --- names in requests ---

    def resolve(self, model: str | None) -> LoRARequest | None:
        """The adapter that `model` selects; None for the base model.

        Raises:
            NotFoundError: no model or adapter of that name.
        """
        if model is None or model in self._base_names:
            return None
        adapter = self._adapter(model)
        for base in self._base_names:
            if adapter is None and model.startswith(f"{base}:"):
                adapter = self._adapter(model[len(base) + 1 :])
        if adapter is not None:
            return adapter
        raise NotFoundError(
            f"The model {shorten(model)!r} does not exist; /v1/models lists those that do", param="model"
        )

    async def discover(self, model: str | None, parts: Sequence[str] = ()) -> None:
        """Look for adapters that nobody has loaded, so that `resolve` knows them: all that `model`, maybe a weighted
        sum, and the adapters `parts` may name. One whose folder is gone is no longer known, and leaves the engine.

        Raises:
            AdapterError: there is one that may not be read.
            OutriderError: a plug-in failed.
        """
        if not self._llm.sources.finds_names:
            return
        for name in dict.fromkeys(self._names_in([model or "", *parts[:MAX_PARTS]])):
            if not name or name in self._base_names or name in self._llm.adapters:
                continue
            found = await self._llm.sources.find(name)
            if found is not None:
                self._found[name] = found
            elif self._found.pop(name, None) is not None:
                with contextlib.suppress(OutriderError):  # it may never have been used
                    await self._llm.unload_lora(name)

    def _names_in(self, texts: Sequence[str]) -> Iterator[str]:
        """Every adapter's name that they may hold: with a base model's name before it, a weight behind it, in a sum."""
        for text in texts:
            for piece in (text, *text.split("+")[: MAX_PARTS + 1]):
                for name in (piece, piece.rpartition(":")[0]):
                    yield name
                    for base in self._base_names:
                        if name.startswith(f"{base}:"):
                            yield name[len(base) + 1 :]

    # --- what admins do ---

    def check_free(self, name: str, *, load_inplace: bool) -> None:
        """InvalidUserInputError unless an adapter may be loaded under this name."""
        if name in self._base_names:
            raise InvalidUserInputError(f"{shorten(name)!r} is the name of the base model", param="lora_name")
        if not load_inplace and name in self._llm.adapters:
            raise InvalidUserInputError(
                f"The LoRA adapter {shorten(name)!r} has already been loaded; "
                "set load_inplace to load it again under the same name",
                param="lora_name",
            )

    async def load(
        self, request: LoRARequest, *, load_inplace: bool = False, pinned: bool = False, root: str | None = None
    ) -> None:
        """Register an adapter; the engine validates it first. `root`: where it comes from, as the user wrote it."""
        self.check_free(request.name, load_inplace=load_inplace)
        try:
            info = await self._llm.load_adapter(request, load_inplace=load_inplace, pinned=pinned)
        except InvalidUserInputError:
            # Taken in the engine alone: by one that was found by its name, or that a request under way brought back
            # when it had been unloaded.
            if load_inplace:
                raise
            self.check_free(request.name, load_inplace=False)
            info = await self._llm.load_adapter(request, load_inplace=True, pinned=pinned)
        self._created[request.name] = int(time.time())
        self._roots[request.name] = shown_source(request.path if root is None else root)
        self._infos[request.name] = info
        self._draft[request.name] = info.draft

    async def unload(self, name: str, mode: str = "drain") -> None:
        """Take an adapter away, wherever its name is known; requests that run with it finish, or are aborted."""
        known = name in self._llm.adapters
        try:
            await self._llm.unload_lora(name, mode)
        except NotFoundError:
            if not known:  # else the engine has lost it, and now it is gone everywhere
                raise self._unknown(name) from None
        self._llm.sources.restrict(name)
        for memory in (self._created, self._roots, self._found, self._infos, self._draft):
            memory.pop(name, None)

    async def set_pinned(self, name: str, pinned: bool) -> None:
        """Keep an adapter on the device, or not; one that was only found is loaded to be pinned."""
        try:
            await (self._llm.pin_lora(name) if pinned else self._llm.unpin_lora(name))
        except NotFoundError:
            await self.discover(name)
            if not pinned or name not in self._found:
                raise self._unknown(name) from None
            await self.load(self._found[name], pinned=True)

    @staticmethod
    def _unknown(name: str) -> NotFoundError:
        return NotFoundError(f"The LoRA adapter {shorten(name)!r} does not exist", param="lora_name")

    # --- cards ---

    async def refresh(self) -> None:
        """Ask the engine where adapters are and what became of their draft weights: after a restart, or out of memory,
        it has read the files again. Look what there is in directories, too."""
        self._in_directories = await self._llm.sources.in_directories()
        if self._llm.state != "ready":
            return
        for name in self._found.keys() - self._in_directories.keys():
            with contextlib.suppress(OutriderError):
                await self.discover(name)
        known = self._llm.adapters.keys() | self._found.keys() | self._in_directories.keys()
        if not known:
            return
        try:
            infos = await asyncio.wait_for(self._llm.list_adapters(), REFRESH_TIMEOUT)
        except (OutriderError, TimeoutError) as error:
            logger.debug("no list of adapters from the engine: %s", error)
            return
        self._infos = {info.name: info for info in infos}
        # One without a digest has not been read yet.
        self._draft.update({info.name: info.draft for info in infos if info.digest and info.name in known})

    def cards(self) -> list[dict[str, Any]]:
        """One OpenAI model card a name, as of the last `refresh`."""
        model = self._llm.info.model
        requests = self._found | self._llm.adapters
        folders = self._in_directories | {name: request.path for name, request in requests.items()}
        return [self._card(name, model, None) for name in self._base_names] + [
            self._card(name, self._roots.get(name, folder), self.base_name) | self._details(name)
            for name, folder in folders.items()
            if name not in self._base_names
        ]

    def card(self, name: str) -> dict[str, Any]:
        """The card of `name`, which may be `base:adapter`; NotFoundError when there is none."""
        adapter = self.resolve(name)
        wanted = name if adapter is None else adapter.name
        return next(card for card in self.cards() if card["id"] == wanted)

    def _card(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created.get(name, self._created[self.base_name]),
            "owned_by": "outrider",
            "root": root,
            "parent": parent,
            "max_model_len": self._llm.info.max_model_len,
        }

    def _details(self, name: str) -> dict[str, Any]:
        """What an adapter's card says beside OpenAI's fields."""
        info = self._infos.get(name, _UNREAD)
        return {
            "draft": self._draft.get(name, ""),
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
