"""Which names clients may put into `model`: the base model's, the adapters', and `base:adapter`."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from ..core.errors import InvalidUserInputError, NotFoundError, OutriderError
from ..core.lora_request import LoRARequest
from .text import shorten

if TYPE_CHECKING:
    from ..client.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

REFRESH_TIMEOUT = 2.0
"""Seconds that the engine gets to say what its adapters are; after that its last word is shown again."""


class ModelRegistry:
    """The names this server answers to.

    Adapters are registered through this process alone, so its client of the engine knows them without asking; after a
    restart of the engine it registers them there again, and forgets those that cannot be read any more. Nothing of
    that is kept twice: this object only looks.
    """

    def __init__(self, llm: AsyncLLM, base_names: tuple[str, ...]) -> None:
        self._llm = llm
        self._base_names = base_names
        self._created: dict[str, int] = dict.fromkeys(base_names, int(time.time()))
        self._draft: dict[str, str] = {}  # `AdapterInfo.draft` as the engine said last

    @property
    def base_name(self) -> str:
        """The first of the base model's names."""
        return self._base_names[0]

    @property
    def adapters(self) -> dict[str, LoRARequest]:
        """By name."""
        return self._llm.adapters

    def resolve(self, model: str | None) -> LoRARequest | None:
        """The adapter that `model` selects; None for the base model.

        Raises:
            NotFoundError: no model or adapter of that name.
        """
        if model is None or model in self._base_names:
            return None
        adapters = self.adapters
        if model in adapters:
            return adapters[model]
        for base in self._base_names:
            if model.startswith(f"{base}:") and model[len(base) + 1 :] in adapters:
                return adapters[model[len(base) + 1 :]]
        raise NotFoundError(
            f"The model {shorten(model)!r} does not exist; /v1/models lists those that do", param="model"
        )

    async def load(self, request: LoRARequest, *, load_inplace: bool = False, pinned: bool = False) -> None:
        """Register an adapter; the engine validates it first."""
        if request.name in self._base_names:
            raise InvalidUserInputError(f"{shorten(request.name)!r} is the name of the base model", param="lora_name")
        if not load_inplace:
            self._check_free(request.name)
        try:
            info = await self._llm.load_adapter(request, load_inplace=load_inplace, pinned=pinned)
        except InvalidUserInputError:
            # Taken in the engine alone: a request that was under way when the name was unloaded can bring it back.
            if load_inplace:
                raise
            self._check_free(request.name)
            info = await self._llm.load_adapter(request, load_inplace=True, pinned=pinned)
        self._created[request.name] = int(time.time())
        self._draft[request.name] = info.draft

    def _check_free(self, name: str) -> None:
        if name in self.adapters:
            raise InvalidUserInputError(
                f"The LoRA adapter {shorten(name)!r} has already been loaded; "
                "set load_inplace to load it again under the same name",
                param="lora_name",
            )

    async def unload(self, name: str) -> None:
        """Take an adapter away, wherever its name is known; requests that run with it finish."""
        known = name in self.adapters
        try:
            await self._llm.unload_adapter(name)
        except NotFoundError:
            if not known:  # else the engine has lost it, and now it is gone everywhere
                raise NotFoundError(f"The LoRA adapter {shorten(name)!r} does not exist", param="lora_name") from None
        self._created.pop(name, None)
        self._draft.pop(name, None)

    async def refresh(self) -> None:
        """Ask the engine what became of adapters' draft weights: after a restart, or out of memory, it has read the
        files again."""
        known = self.adapters
        if not known or self._llm.state != "ready":
            return
        try:
            infos = await asyncio.wait_for(self._llm.list_adapters(), REFRESH_TIMEOUT)
        except (OutriderError, TimeoutError) as error:
            logger.debug("no list of adapters from the engine: %s", error)
            return
        # One without a digest has not been read yet.
        self._draft.update({info.name: info.draft for info in infos if info.digest and info.name in known})

    def cards(self) -> list[dict[str, Any]]:
        """One OpenAI model card a name, as of the last `refresh`."""
        info = self._llm.info
        bases = [self._card(name, info.model, None, info.max_model_len) for name in self._base_names]
        adapters = self.adapters.values()
        return bases + [
            self._card(a.name, a.path, self.base_name, info.max_model_len) | {"draft": self._draft.get(a.name, "")}
            for a in adapters
        ]

    def card(self, name: str) -> dict[str, Any]:
        """The card of `name`, which may be `base:adapter`; NotFoundError when there is none."""
        adapter = self.resolve(name)
        wanted = name if adapter is None else adapter.name
        return next(card for card in self.cards() if card["id"] == wanted)

    def _card(self, name: str, root: str, parent: str | None, max_model_len: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created.get(name, self._created[self.base_name]),
            "owned_by": "outrider",
            "root": root,
            "parent": parent,
            "max_model_len": max_model_len,
        }
