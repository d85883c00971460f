"""The chat template that an adapter was trained with, from its folder."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...core.errors import AdapterError
from ...core.lora_request import LoRA, LoRARequest

MAX_BYTES = 16 << 20
"""Largest file that is read for a template; tokenizer_config.json lists every added token."""


def adapter_chat_template(lora: LoRA | None) -> str | None:
    """The template in the folder of a localized adapter: chat_template.jinja, else the one in tokenizer_config.json.

    None where there is none, and for a sum of adapters, which was trained with no template.

    Raises:
        AdapterError: there is one that cannot be read.
    """
    if not isinstance(lora, LoRARequest):
        return None
    for name, read in (("chat_template.jinja", _whole_file), ("tokenizer_config.json", _default_in_settings)):
        file = Path(lora.path) / name
        try:
            state = file.stat()
            if state.st_size > MAX_BYTES:
                raise ValueError(f"it has {state.st_size} bytes; at most {MAX_BYTES} are read")
            template = read(file, state.st_mtime_ns, state.st_size)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, RecursionError) as error:
            raise AdapterError(f"adapter {lora.name!r}: {name} cannot be read: {error}", param="lora_path") from error
        if template is not None:
            return template
    return None


@lru_cache(maxsize=256)
def _whole_file(file: Path, mtime_ns: int, size: int) -> str:
    return file.read_text(encoding="utf-8")


@lru_cache(maxsize=256)
def _default_in_settings(file: Path, mtime_ns: int, size: int) -> str | None:
    settings: Any = json.loads(file.read_text(encoding="utf-8"))
    templates = settings.get("chat_template") if isinstance(settings, dict) else None
    if isinstance(templates, list):  # several, by name
        named = [entry for entry in templates if isinstance(entry, dict) and entry.get("name") == "default"]
        templates = named[0].get("template") if named else None
    return templates if isinstance(templates, str) else None
