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


def read_prompts(path: Path, option: str) -> list[Prompt]:
    """Read lines of JSON: {"prompt": text}, {"messages": [...]} or {"prompt_token_ids": [...]}, and maybe "adapter".
    Errors name `option`.

    Raises:
        NotFoundError, InvalidRequestError: there is no such file, or a line is something else.
    """
    try:
        # `splitlines` would also break at separators that JSON allows inside strings.
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise NotFoundError(f"prompts file {path}: {error}", param=option) from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"prompts file {path} is not UTF-8: {error}", param=option) from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_prompt(line))
            except (ValueError, RecursionError) as error:
                raise InvalidRequestError(f"prompts file {path}, line {number}: {error}", param=option) from None
    if not found:
        raise InvalidRequestError(f"{path} holds no prompts", param=option)
    return found


def _prompt(line: str) -> Prompt:
    """The prompt of a line; ValueError or RecursionError with the reason when it is none."""
    value = json.loads(line)
    json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is JSON, but no text
    keys = [key for key in ("prompt", "messages", "prompt_token_ids") if isinstance(value, dict) and key in value]
    if len(keys) != 1:
        raise ValueError("needs exactly one of prompt, messages, prompt_token_ids")
    ids, adapter = value.get("prompt_token_ids", []), value.get("adapter")
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError("prompt_token_ids must be a list of integers")
    if adapter is not None and not isinstance(adapter, str):
        raise ValueError(f"adapter must be a name, got {adapter!r:.40}")
    return Prompt(value[keys[0]], adapter)


def encode(tokenizer: Any, content: Any, option: str) -> list[int]:
    """Token ids of a prompt; a text is a user's turn if the model has a chat template. Errors name
    `option`.

    Raises:
        InvalidRequestError: it is neither a text, nor messages, nor token ids.
    """
    if isinstance(content, str):
        if getattr(tokenizer, "chat_template", None) is None:
            return list(tokenizer.encode(content))
        content = [{"role": "user", "content": content}]
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"a prompt must be text, messages or token ids, got {content!r}", param=option)
    if all(type(item) is int for item in content):
        return content
    return list(tokenizer.encode(render_messages(tokenizer, content, ChatOptions()), add_special_tokens=False))
