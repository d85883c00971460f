"""Features that plug into admission, and into the preparation of a step. The composition root lists them.

The scheduler and the runner know none of them: they see the small protocols here and in `scheduler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.errors import InvalidRequestError, NotFoundError
from ..core.lora_request import LoRARequest
from ..core.messages import AdapterInfo
from ..core.request import Request


class NoAdapters:
    """Adapters when they are not enabled: a request that names one is refused, the rest cost nothing."""

    def resolve(self, request: Request) -> None:
        """Refuse a request that names an adapter."""
        if request.lora is not None:
            raise InvalidRequestError(
                f"adapter {request.lora.name!r} was requested, but LoRA is not enabled (enable_lora)",
                param="lora_request",
            )

    def forget(self, request: Request) -> None:
        """Nothing was resolved."""

    def admit(self, request: Request) -> str | None:
        """Always ready."""
        return None

    def release(self, request: Request) -> None:
        """Nothing is held."""

    def wait(self, timeout: float) -> None:
        """Nothing is loading."""

    def prepare(self, rows: Sequence[tuple[Any, int]]) -> None:
        """No row has an adapter."""
        return

    def namespace(self, request: Request) -> bytes:
        """The base model's."""
        return b""

    def load(self, request: LoRARequest, *, load_inplace: bool = False, pinned: bool = False) -> AdapterInfo:
        """Refused."""
        raise InvalidRequestError("LoRA is not enabled (enable_lora)", param="lora_name")

    def unload(self, name: str) -> None:
        """Refused: there is none."""
        raise NotFoundError(f"adapter {name!r} is not loaded", param="lora_name")

    def list(self) -> list[AdapterInfo]:
        """None."""
        return []

    def take_load_seconds(self) -> list[float]:
        """None were loaded."""
        return []

    def check_integrity(self) -> None:
        """Nothing to check."""
