"""Methods that `LLM` and `AsyncLLM` have for adapters, with vLLM's names. The coroutines of `AsyncLLM` are awaited."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias

from ...core.adapter_verbs import Adapters, Info, Infos, Nothing
from ...core.compat.vllm_python import METHODS
from ...core.lora_request import LoRARequest
from ...core.messages import AdapterInfo


class AdapterMethods(Generic[Info, Infos, Nothing]):
    """`adapters`, under the names that users of vLLM know."""

    adapters: Adapters[Info, Infos, Nothing]
    """Loads, unloads and pins adapters; each verb says what it raises."""

    def load_lora_adapter(self, lora_request: LoRARequest, *, load_inplace: bool = False, pinned: bool = False) -> Info:
        """See `Adapters.load`."""
        return self.adapters.load(lora_request, load_inplace=load_inplace, pinned=pinned)

    def register_lora_adapters(self, lora_requests: Sequence[LoRARequest]) -> Nothing:
        """See `Adapters.register`."""
        return self.adapters.register(lora_requests)

    def unload_lora(self, lora_name: str, mode: str = "drain") -> Nothing:
        """See `Adapters.unload`."""
        return self.adapters.unload(lora_name, mode)

    def unload_lora_adapter(self, lora_name: str) -> Nothing:
        """Unload an adapter when its requests have finished."""
        return self.adapters.unload(lora_name)

    def pin_lora(self, lora_name: str) -> Info:
        """See `Adapters.pin`."""
        return self.adapters.pin(lora_name)

    def unpin_lora(self, lora_name: str) -> Info:
        """See `Adapters.unpin`."""
        return self.adapters.unpin(lora_name)

    def list_lora_adapters(self) -> Infos:
        """See `Adapters.list`."""
        return self.adapters.list()

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            """AttributeError; for a method of vLLM's it says what is here in its place."""
            sentence = f"{type(self).__name__}.{name} {METHODS.get(name, 'does not exist')}"
            raise AttributeError(sentence, name=name, obj=self)


SyncAdapterMethods: TypeAlias = AdapterMethods[AdapterInfo, list[AdapterInfo], None]
AsyncAdapterMethods: TypeAlias = AdapterMethods[
    Coroutine[Any, Any, AdapterInfo], Coroutine[Any, Any, list[AdapterInfo]], Coroutine[Any, Any, None]
]
