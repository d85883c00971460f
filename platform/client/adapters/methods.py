"""Methods that `LLM` and `AsyncLLM` have for adapters, with vLLM's names. The coroutines of `AsyncLLM` are awaited."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol

from ...core.adapter_verbs import Adapters, Info, Infos, Nothing
from ...core.compat.vllm_python import METHODS
from ...core.errors import InvalidRequestError, NotFoundError
from ...core.lora_request import LoRARequest
from ...core.messages import AdapterInfo
from ...core.sampling_params import quote_for_error
from .numbers import LoRANumbers


class NumberedAdapters(Adapters[Info, Infos, Nothing], Protocol):
    """Adapters that vLLM's integers may stand for."""

    numbers: LoRANumbers


class AdapterMethods(Generic[Info, Infos, Nothing]):
    """`adapters`, under the names that users of vLLM know."""

    adapters: NumberedAdapters[Info, Infos, Nothing]
    """Loads, unloads and pins adapters; each verb says what it raises."""

    def load_lora_adapter(self, lora_request: LoRARequest, *, load_inplace: bool = False, pinned: bool = False) -> Info:
        """See `Adapters.load`."""
        return self.adapters.load(_checked(lora_request), load_inplace=load_inplace, pinned=pinned)

    def register_lora_adapters(self, lora_requests: Sequence[LoRARequest]) -> Nothing:
        """See `Adapters.register`."""
        return self.adapters.register([_checked(request) for request in lora_requests])

    def unload_lora(self, lora_name: str, mode: str = "drain") -> Nothing:
        """See `Adapters.unload`."""
        return self.adapters.unload(lora_name, mode)

    def unload_lora_adapter(self, lora_name: str) -> Nothing:
        """Unload an adapter when its requests have finished."""
        return self.adapters.unload(lora_name)

    def pin_lora(self, lora_name: str | int) -> Info:
        """See `Adapters.pin`; the integer of a request stands for its adapter's name."""
        return self.adapters.pin(self.adapters.numbers.name_of(lora_name))

    def unpin_lora(self, lora_name: str | int) -> Info:
        """See `Adapters.unpin`."""
        return self.adapters.unpin(self.adapters.numbers.name_of(lora_name))

    def list_lora_adapters(self) -> Infos:
        """See `Adapters.list`."""
        return self.adapters.list()

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            """AttributeError; for a method of vLLM's it says what is here in its place."""
            sentence = f"{type(self).__name__}.{name} {METHODS.get(name, 'does not exist')}"
            raise AttributeError(sentence, name=name, obj=self)


class SyncAdapterMethods(AdapterMethods[AdapterInfo, list[AdapterInfo], None]):
    """Methods of `LLM` and `LLMEngine`."""

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter, or leave it as it is when it is loaded under its name from the same folder. Returns True."""
        if _is_new(_checked(lora_request), self.adapters.list(), self.adapters.numbers):
            self.adapters.load(lora_request)
        self.adapters.numbers.note(lora_request)
        return True

    def remove_lora(self, lora_id: int | str) -> bool:
        """Unload the adapter of an integer or a name when its requests have finished; False when there is none."""
        try:
            self.adapters.unload(self.adapters.numbers.name_of(lora_id))
        except NotFoundError:
            return False
        return True

    def list_loras(self) -> set[int]:
        """Integers of the registered adapters that were given with one; `list_lora_adapters` knows all."""
        return self.adapters.numbers.of(info.name for info in self.adapters.list())


class AsyncAdapterMethods(
    AdapterMethods[Coroutine[Any, Any, AdapterInfo], Coroutine[Any, Any, list[AdapterInfo]], Coroutine[Any, Any, None]]
):
    """Methods of `AsyncLLM`."""

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """See `LLM.add_lora`."""
        if _is_new(_checked(lora_request), await self.adapters.list(), self.adapters.numbers):
            await self.adapters.load(lora_request)
        self.adapters.numbers.note(lora_request)
        return True

    async def remove_lora(self, lora_id: int | str) -> bool:
        """See `LLM.remove_lora`."""
        try:
            await self.adapters.unload(self.adapters.numbers.name_of(lora_id))
        except NotFoundError:
            return False
        return True

    async def list_loras(self) -> set[int]:
        """See `LLM.list_loras`."""
        return self.adapters.numbers.of(info.name for info in await self.adapters.list())


def _checked(lora: object) -> LoRARequest:
    """The adapter that a caller gave.

    Raises:
        InvalidRequestError: it is no LoRARequest.
    """
    if not isinstance(lora, LoRARequest):
        raise InvalidRequestError(
            f"lora_request must be a LoRARequest, got {quote_for_error(lora)}", param="lora_request"
        )
    return lora


def _is_new(lora: LoRARequest, registered: Sequence[AdapterInfo], numbers: LoRANumbers) -> bool:
    """True unless the adapter is registered under its name from the same folder, or place on the hub."""
    return not any(info.name == lora.name and (info.path == lora.path or numbers.is_known(lora)) for info in registered)
