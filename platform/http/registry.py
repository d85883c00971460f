"""Which names clients may put into `model`: the base model's, the adapters', and `base:adapter`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..core.errors import InvalidUserInputError, NotFoundError
from ..core.lora_request import LoRARequest

if TYPE_CHECKING:
    from ..client.async_llm import AsyncLLM


class ModelRegistry:
    """The names this server answers to.

    Adapters are registered through this process alone, so it knows them without asking the engine; after a restart
    of the engine the client registers them there again.
    """

    def __init__(self, llm: AsyncLLM, base_names: tuple[str, ...]) -> None:
        self._llm = llm
        self._base_names = base_names
        self._adapters: dict[str, LoRARequest] = {}
        self._created: dict[str, int] = dict.fromkeys(base_names, int(time.time()))

    @property
    def base_name(self) -> str:
        """The first of the base model's names."""
        return self._base_names[0]

    @property
    def adapters(self) -> dict[str, LoRARequest]:
        """By name."""
        return dict(self._adapters)

    def resolve(self, model: str | None) -> LoRARequest | None:
        """The adapter that `model` selects; None for the base model.

        Raises:
            NotFoundError: no model or adapter of that name.
        """
        if model is None or model in self._base_names:
            return None
        adapter = self._adapters.get(model)
        if adapter is not None:
            return adapter
        for base in self._base_names:
            if model.startswith(f"{base}:") and model[len(base) + 1 :] in self._adapters:
                return self._adapters[model[len(base) + 1 :]]
        raise NotFoundError(f"The model {model!r} does not exist; /v1/models lists those that do", param="model")

    async def load(self, request: LoRARequest, *, load_inplace: bool = False, pinned: bool = False) -> None:
        """Register an adapter; the engine validates it first."""
        if request.name in self._base_names:
            raise InvalidUserInputError(f"{request.name!r} is the name of the base model", param="lora_name")
        if request.name in self._adapters and not load_inplace:
            raise InvalidUserInputError(
                f"The LoRA adapter {request.name!r} has already been loaded; "
                "set load_inplace to load it again under the same name",
                param="lora_name",
            )
        await self._llm.load_adapter(request, load_inplace=load_inplace, pinned=pinned)
        self._adapters[request.name] = request
        self._created[request.name] = int(time.time())

    async def unload(self, name: str) -> None:
        """Take an adapter away; requests that run with it finish."""
        if name not in self._adapters:
            raise NotFoundError(f"The LoRA adapter {name!r} does not exist", param="lora_name")
        await self._llm.unload_adapter(name)
        self._adapters.pop(name, None)

    def cards(self) -> list[dict[str, Any]]:
        """One OpenAI model card a name."""
        info = self._llm.info
        bases = [self._card(name, info.model, None, info.max_model_len) for name in self._base_names]
        adapters = self._adapters.values()
        return bases + [self._card(a.name, a.path, self.base_name, info.max_model_len) for a in adapters]

    def card(self, name: str) -> dict[str, Any]:
        """The card of `name`, which may be `base:adapter`; NotFoundError when there is none."""
        adapter = self.resolve(name)
        wanted = name if adapter is None else adapter.name
        return next(card for card in self.cards() if card["id"] == wanted)

    def _card(self, name: str, root: str, parent: str | None, max_model_len: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created[name],
            "owned_by": "outrider",
            "root": root,
            "parent": parent,
            "max_model_len": max_model_len,
        }
