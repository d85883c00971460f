"""Lookup of `lora_int_id`, vLLM's integer of an adapter. Adapters have names here; an integer stands for a name."""

from __future__ import annotations

from collections.abc import Iterable

from ...core.errors import NotFoundError
from ...core.lora_request import LoRARequest


class LoRAIntIds:
    """Names of the adapters whose `lora_int_id` has been given."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._paths: dict[str, str] = {}

    def record(self, lora: object) -> None:
        """Record the integer of an adapter; 0 is none."""
        if isinstance(lora, LoRARequest) and lora.lora_int_id:
            self._names[lora.lora_int_id], self._paths[lora.name] = lora.name, lora.path

    def is_known(self, lora: LoRARequest) -> bool:
        """True when a request with this name and folder has been recorded."""
        return self._paths.get(lora.name) == lora.path

    def name_of(self, lora_id: int | str) -> str:
        """The name that an integer stands for; a name stands for itself.

        Raises:
            NotFoundError: no adapter has that integer.
        """
        if isinstance(lora_id, str):
            return lora_id
        if lora_id not in self._names:
            raise NotFoundError(f"no adapter has the integer {lora_id!r}", param="lora_id")
        return self._names[lora_id]

    def of(self, names: Iterable[str]) -> set[int]:
        """The integers that stand for these names."""
        among = set(names)
        return {number for number, name in self._names.items() if name in among}
