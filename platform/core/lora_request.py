"""Which adapter a request wants."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidRequestError


@dataclass(slots=True, frozen=True, init=False)
class LoRARequest:
    """Names an adapter and where its files are.

    Both spellings work: `LoRARequest("sql", 1, "/adapters/sql")` as in vLLM, and `LoRARequest("sql",
    path="/adapters/sql")`. The integer is kept for the caller and has no meaning here: adapters are told apart by
    the digest of their content.

    `draft_path` is the folder of its draft weights, a PEFT adapter for the engine's draft model or draft head; without
    one they are looked for in the adapter's own folder, under `draft/`. Engines that draft with neither ignore it.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    draft_path: str | None = None

    def __init__(
        self,
        lora_name: str,
        lora_int_id: int = 0,
        lora_path: str | None = None,
        *,
        path: str | None = None,
        draft_path: str | None = None,
    ) -> None:
        where = lora_path if path is None else path
        if not isinstance(lora_name, str) or not lora_name:
            raise InvalidRequestError("lora_name must be a non-empty string", param="lora_name")
        if not isinstance(lora_int_id, int):
            raise InvalidRequestError(
                f"lora_int_id must be an integer, not {lora_int_id!r}; give the folder as path=...", param="lora_int_id"
            )
        if where is None or not str(where):
            raise InvalidRequestError("lora_path must name the adapter's folder", param="lora_path")
        object.__setattr__(self, "lora_name", lora_name)
        object.__setattr__(self, "lora_int_id", lora_int_id)
        if draft_path is not None and not str(draft_path):
            raise InvalidRequestError("draft_path must name the draft weights' folder", param="draft_path")
        object.__setattr__(self, "lora_path", str(where))
        object.__setattr__(self, "draft_path", None if draft_path is None else str(draft_path))

    @property
    def name(self) -> str:
        """The adapter's name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The adapter's folder."""
        return self.lora_path
