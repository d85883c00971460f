"""Prompts of a JSONL file, and their token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ...client.text.chat_template import ChatOptions, render_messages
from ...core.errors import InvalidRequestError, NotFoundError


class Prompt(NamedTuple):
    """One line of a prompts file."""

    content: Any
    """A text, messages, or token ids."""
    adapter: str | None


def read_prompts(path: Path) -> list[Prompt]:
    """Read lines of JSON: {"prompt": text}, {"messages": [...]} or {"prompt_token_ids": [...]}, and maybe "adapter".

    Raises:
        NotFoundError, InvalidRequestError: there is no such file, or a line is something else.
    """
    try:
        # `splitlines` would also break at separators that JSON allows inside strings.
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise NotFoundError(f"prompts file {path}: {error}", param="prompts") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"prompts file {path} is not UTF-8: {error}", param="prompts") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is JSON, but no text
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{path}, line {number}: not valid JSON: {error}", param="prompts") from None
        keys = [key for key in ("prompt", "messages", "prompt_token_ids") if isinstance(value, dict) and key in value]
        if len(keys) != 1:
            raise InvalidRequestError(
                f"{path}, line {number}: needs exactly one of prompt, messages, prompt_token_ids", param="prompts"
            )
        ids = value.get("prompt_token_ids", [])
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise InvalidRequestError(
                f"{path}, line {number}: prompt_token_ids must be a list of integers", param="prompts"
            )
        adapter = value.get("adapter")
        if adapter is not None and not isinstance(adapter, str):
            raise InvalidRequestError(
                f"{path}, line {number}: adapter must be a name, got {adapter!r:.40}", param="prompts"
            )
        found.append(Prompt(value[keys[0]], adapter))
    if not found:
        raise InvalidRequestError(f"{path} holds no prompts", param="prompts")
    return found


def encode(tokenizer: Any, content: Any) -> list[int]:
    """Token ids of a prompt; a text is a user's turn where the model has a chat template.

    Raises:
        InvalidRequestError: it is neither a text, nor messages, nor token ids.
    """
    if isinstance(content, str):
        if getattr(tokenizer, "chat_template", None) is None:
            return list(tokenizer.encode(content))
        content = [{"role": "user", "content": content}]
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"a prompt must be text, messages or token ids, got {content!r}", param="prompts")
    if all(type(item) is int for item in content):
        return content
    return list(tokenizer.encode(render_messages(tokenizer, content, ChatOptions()), add_special_tokens=False))
