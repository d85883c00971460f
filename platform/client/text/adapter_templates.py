"""The chat template that an adapter was trained with, from its folder."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from ...core.adapter_files import TEMPLATE_FILE, TOKENIZER_SETTINGS
from ...core.lora_request import LoRA, LoRARequest

MAX_BYTES = 4 << 20
"""Largest file that is read for a template; tokenizer_config.json lists every added token, of which 6,000 take 1 MB."""


def adapter_chat_template(lora: LoRA | None) -> str | None:
    """The template in the folder of a localized adapter: chat_template.jinja, else the one in tokenizer_config.json.

    None if there is none, and for a sum of adapters, which was trained with no template.

    Raises:
        AdapterError: there is one that cannot be read.
    """
    if not isinstance(lora, LoRARequest):
        return None
    folder = lora.folder
    for name, parse in ((TEMPLATE_FILE, bytes.decode), (TOKENIZER_SETTINGS, _default_in_settings)):
        content = folder.read(name, MAX_BYTES)
        if content is None:
            continue
        try:
            template = parse(content)
        except (ValueError, RecursionError) as error:
            raise folder.error(name, f"cannot be read: {error}"[:300]) from error
        if template is not None:
            return template
    return None


@lru_cache(maxsize=8)
def _default_in_settings(content: bytes) -> str | None:
    settings: Any = json.loads(content.decode())
    templates = settings.get("chat_template") if isinstance(settings, dict) else None
    if isinstance(templates, list):  # several, by name
        named = [entry for entry in templates if isinstance(entry, dict) and entry.get("name") == "default"]
        templates = named[0].get("template") if named else None
    return templates if isinstance(templates, str) else None
