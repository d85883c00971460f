"""Bounds of request bodies: one table of what a request may hold, checked before work is done on it.

    bytes  --check_shape-->  JSON of a bounded shape  --check_fields-->  fields within the table  -->  models

`check_shape` counts the values, strings and containers in the raw bytes, so that no parser makes millions of objects.
`check_fields` compares each field of the parsed object with the table, so that validation sees short lists and short
texts. A field without a row has the default bounds, and so has everything unknown.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
from pydantic import BaseModel

from ...core.errors import InvalidRequestError, invalid
from ...core.lora_request import MAX_PARTS
from ...core.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from ...core.structured_outputs import MAX_CHOICES, MAX_CONSTRAINT_CHARS
from ...core.text import shorten

# --- the body as a whole ---

MAX_VALUES = 1 << 18
"""Values in one body, or four for each token of the context if that is more: a parser makes 10 to 40 million a
second, and nothing else is served meanwhile."""
MAX_STRINGS = 1 << 16
"""Strings in one body, names of fields among them."""
MAX_CONTAINERS = 1 << 14
"""Lists and objects in one body."""
MAX_DEPTH = 64
"""Depth of containers inside each other."""
MAX_UNKNOWN_FIELDS = 64
"""Largest number of fields that the route does not know."""

MAX_LOGPROBS = 1 << 20
"""Log-probabilities that one request may ask for: of its prompts, and of all tokens of all its sequences. One takes
about 200 bytes in this process and 65 in the answer."""

# --- fields ---

MAX_TEXT = 4096
"""Characters of a text without a row of its own."""
MAX_SIZE = 1 << 16
"""Characters and values of a list or object without a row of its own, and of all unknown fields together."""
MAX_MESSAGES = 4096


class Bound(NamedTuple):
    """Bounds of one field; None: those of the body alone."""

    items: int | None = None
    """Entries of a list or object."""
    size: int | None = None
    """Characters of a text; of a list or object, characters and values at all depths, besides its own `items`."""


_IDENTIFIER = Bound(size=MAX_SALT_CHARS)
_DEFAULT = Bound(size=MAX_SIZE)
BOUNDS: Mapping[str, Bound] = {
    "prompt": Bound(),
    "input": Bound(),
    "instructions": Bound(),
    "text": Bound(),
    "messages": Bound(items=MAX_MESSAGES),
    "system": Bound(),
    "tokens": Bound(),
    "token_ids": Bound(),
    "sampling_params": Bound(size=MAX_ALLOWED_TOKEN_IDS + 4 * MAX_CONSTRAINT_CHARS),
    **dict.fromkeys(("generate_response", "generate_responses", "prompt_token_ids"), Bound()),
    **dict.fromkeys(("chat_request", "completion_request"), Bound()),
    **dict.fromkeys(("text_1", "text_2", "queries", "data_1", "data_2", "query", "documents"), Bound(size=1 << 20)),
    "tools": Bound(size=1 << 18),  # those of coding agents have more than 100,000 characters
    "stop": Bound(MAX_STOP_STRINGS, MAX_STOP_CHARS),
    "stop_token_ids": Bound(items=MAX_STOP_TOKEN_IDS),
    "bad_words": Bound(MAX_BAD_WORDS, MAX_BAD_WORD_CHARS),
    "allowed_token_ids": Bound(items=MAX_ALLOWED_TOKEN_IDS),
    "logit_bias": Bound(MAX_LOGIT_BIASES, MAX_SIZE),
    "adapters": Bound(size=MAX_PARTS * MAX_TEXT),
    "cache_salt": _IDENTIFIER,
    "user": _IDENTIFIER,
    "prompt_cache_key": _IDENTIFIER,
    "safety_identifier": _IDENTIFIER,
    "limits": Bound(items=64, size=1 << 20),
    "response_format": Bound(size=2 * MAX_CONSTRAINT_CHARS),
    "text.format": Bound(size=2 * MAX_CONSTRAINT_CHARS),
    "structured_outputs": Bound(size=2 * MAX_CONSTRAINT_CHARS),
    "guided_json": Bound(size=2 * MAX_CONSTRAINT_CHARS),
    "guided_regex": Bound(size=MAX_CONSTRAINT_CHARS),
    "guided_choice": Bound(MAX_CHOICES, MAX_CONSTRAINT_CHARS),
    "guided_grammar": Bound(size=MAX_CONSTRAINT_CHARS),
    "regex": Bound(size=MAX_CONSTRAINT_CHARS),
    "ebnf": Bound(size=MAX_CONSTRAINT_CHARS),
    "output_config": Bound(size=2 * MAX_CONSTRAINT_CHARS),
    "chat_template": Bound(size=1 << 16),
    "chat_template_kwargs": Bound(size=1 << 14),
}
"""Bounds of the fields, by their names; the same on every route."""

_SMALL_BODY = 16 << 10
"""Bytes of a body that is too small to hold too much: it is counted only if it has brackets enough to be deep."""
_PIECE = 256 << 10
"""Bytes that are counted in one go, a few milliseconds."""
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{},'))
_NESTING = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


async def check_shape(raw: bytearray, model: type[BaseModel], max_values: int = MAX_VALUES) -> None:
    """Count the values, strings and containers in a body, and let the event loop run in between.

    Raises:
        InvalidRequestError: too many values, strings or containers, or too deep; `param` names the longest field.
    """
    if len(raw) < _SMALL_BODY and raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return
    try:
        for _ in scan(raw, max_values):
            await asyncio.sleep(0)
    except InvalidRequestError as error:
        field = _longest_field(raw, model)
        where = "The body" if field is None else field
        raise InvalidRequestError(f"{where} {error.message}", param=field) from None


def scan(raw: bytearray, max_values: int) -> Iterator[None]:
    """Count one piece a step. Outside of strings every comma, and every opening bracket, stands for a value."""
    strings = containers = commas = depth = 0
    inside = False
    start = 0
    while start < len(raw):
        piece = bytes(raw[start : start + _PIECE])
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the character that is escaped is in the next piece
            piece = piece[:-1]
        start += max(1, len(piece))
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.translate(None, _NOT_STRUCTURE).split(b'"')
        structure = b"".join(parts[1 if inside else 0 :: 2])
        inside ^= len(parts) % 2 == 0
        strings += len(parts) - 1  # quotes
        commas += structure.count(b",")
        brackets = structure.translate(None, b",")
        containers += len(brackets)
        for count, most, what in (
            (strings // 2, MAX_STRINGS, "strings"),
            (containers // 2, MAX_CONTAINERS, "lists and objects"),
            (commas, max_values, "values"),
        ):
            if count > most:
                raise InvalidRequestError(f"has more than {most} {what}")
        levels = list(accumulate(map(_NESTING.__getitem__, brackets), initial=depth))
        depth = levels[-1]
        if max(levels) > MAX_DEPTH:
            raise InvalidRequestError(f"is nested more than {MAX_DEPTH} levels deep")
        yield


def _longest_field(raw: bytearray, model: type[BaseModel]) -> str | None:
    """Name of the model's field that takes most of the body; None if none of them does."""
    try:
        fields = msgspec.json.decode(raw, type=_raw_fields(model))
    except (msgspec.MsgspecError, RecursionError):
        return None
    sizes = {name: len(memoryview(getattr(fields, name))) for name in model.model_fields}
    name = max(sizes, key=sizes.__getitem__)
    return name if sizes[name] > len(raw) // 2 else None


@functools.cache
def _raw_fields(model: type[BaseModel]) -> type[Any]:
    return msgspec.defstruct("RawFields", [(name, msgspec.Raw, msgspec.Raw()) for name in model.model_fields])


def check_fields(content: dict[str, Any], model: type[BaseModel]) -> None:
    """Compare a parsed body with the table.

    Raises:
        InvalidRequestError: a field is too long or has too many entries, or there are too many unknown ones.
    """
    unknown = [name for name in content if name not in model.model_fields]
    if len(unknown) > MAX_UNKNOWN_FIELDS:
        raise InvalidRequestError(
            f"Unsupported field: {shorten(unknown[0])!r}, and {len(unknown) - 1} more; at most {MAX_UNKNOWN_FIELDS} "
            "are looked at",
            param=shorten(unknown[0]),
        )
    for name in unknown:
        if not _fits([name, content[name]], MAX_SIZE):
            name = shorten(name)
            raise InvalidRequestError(f"Unsupported field: {name!r}, of more than {MAX_SIZE} characters", param=name)
    for name, value in content.items():
        if name in model.model_fields:
            check_field(name, value)


def check_field(name: str, value: Any) -> None:
    """Compare one field with its row. Errors: see `check_fields`."""
    items, size = BOUNDS.get(name, _DEFAULT)
    if isinstance(value, str):
        most = MAX_TEXT if name not in BOUNDS else size
        if most is not None and len(value) > most:
            raise invalid(name, f"has {len(value)} characters; at most {most} are allowed")
    elif isinstance(value, list | dict):
        if items is not None and len(value) > items:
            raise invalid(name, f"has {len(value)} entries; at most {items} are allowed")
        if size is not None and not _fits(value, size + (items or 0)):
            raise invalid(name, f"is too long: at most {size} characters and values are allowed in it")


def _fits(value: Any, room: int) -> bool:
    """True when `value` has at most `room` characters and values; looks at no more than that."""
    waiting = [value]
    while waiting and room >= 0:
        item = waiting.pop()
        if isinstance(item, str):
            room -= len(item)
        elif isinstance(item, list):
            room -= len(item)
            waiting += item[: room + 1] if room >= 0 else []
        elif isinstance(item, dict):
            room -= len(item) + sum(map(len, item))
            waiting += item.values() if room >= 0 else []
    return room >= 0
