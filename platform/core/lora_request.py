"""Which adapter a request wants."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

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
        lora_path: str | os.PathLike[str] | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        draft_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """InvalidRequestError names the field that is wrong."""
        if not isinstance(lora_name, str) or not lora_name:
            raise InvalidRequestError("lora_name must be a non-empty string", param="lora_name")
        if not isinstance(lora_int_id, int):
            raise InvalidRequestError(
                f"lora_int_id must be an integer, not {lora_int_id!r}; give the folder as path=...", param="lora_int_id"
            )
        where = _folder("lora_path", lora_path if path is None else path, "the adapter's folder")
        drafts = None if draft_path is None else _folder("draft_path", draft_path, "the draft weights' folder")
        object.__setattr__(self, "lora_name", lora_name)
        object.__setattr__(self, "lora_int_id", lora_int_id)
        object.__setattr__(self, "lora_path", where)
        object.__setattr__(self, "draft_path", drafts)

    @property
    def name(self) -> str:
        """The adapter's name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The adapter's folder."""
        return self.lora_path


def _folder(field: str, path: Any, what: str) -> str:
    """A path as text: no other object is, whatever its `str` would be."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise InvalidRequestError(f"{field} must name {what}: a string or a path object", param=field)
    return text
