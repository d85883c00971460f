"""Bodies of up to 8 MiB for each field of each route of an OpenAPI document: the largest and the most numerous values,
right and wrong in type."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from outrider.platform.http.body.reader import documented
from outrider.platform.http.openai.chat_messages import ChatMessage

SIZE = (8 << 20) - 4096
EVERY_VALUE = os.environ.get("OUTRIDER_TEST_HOSTILE") == "all"
"""True: each field gets all of its values wherever it is, which takes three times as long."""
MOST_PLACES = 3
"""Places of a field that are tried otherwise."""


def repeated(item: bytes, count: int = 1 << 30) -> bytes:
    """A list of `count` items, or of as many as fit."""
    return b"[" + b",".join([item] * min(count, SIZE // (len(item) + 1))) + b"]"


def named(count: int, value: bytes = b"1") -> bytes:
    return b"{" + b",".join(b'"%06d":%s' % (i, value) for i in range(count)) + b"}"


def quoted(text: str) -> bytes:
    """A string of as many of these characters as fit."""
    return b'"' + text.encode() * (SIZE // len(text.encode())) + b'"'


@cache
def long_texts() -> list[bytes]:
    """The longest texts: of one, two and four bytes a character, escaped, and of white space."""
    return [*map(quoted, ("1:+a", "İ", "😀", "\\u00e9", " \\n"))]


@cache
def most_values() -> dict[str, bytes]:
    """The most of each kind, which are beyond the bounds of a body."""
    return {
        "numbers": repeated(b"1"),
        "texts": repeated(b'"a"'),
        "lists": repeated(b"[]"),
        "objects": repeated(b'{"a":[]}'),
        "names": named(SIZE // 11),
    }


@cache
def many_values() -> dict[str, bytes]:
    """As many of each kind as a body may hold."""
    return {
        "numbers": repeated(b"1", 262_000),
        "texts": repeated(b'"a"', 65_000),
        "objects": repeated(b"{}", 16_000),
        "names": named(65_000),
    }


@cache
def huge_bodies() -> dict[str, bytes]:
    return {
        "unknown fields": named(SIZE // 11),
        "long name": b'{"' + b"n" * SIZE + b'":1}',
        "same name": b"{" + repeated(b'"u":1')[1:-1] + b"}",
        "depth": b'{"n":' + b"[" * (SIZE // 2) + b"]" * (SIZE // 2) + b"}",
        "digits": b'{"n":' + b"9" * SIZE + b"}",
        "escapes": b'{"n":"' + b'\\"' * (SIZE // 2) + b'"}',
        "not JSON": b"[" * SIZE,
    }


SMALL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
    "/admin/v1/tenants": {"name": "acme"},
    "/admin/v1/keys": {"tenant": "acme"},
    "/admin/v1/prefixes": {"name": "a", "token_ids": [5]},
}
"""Fields that a route needs in addition to the huge one."""


class Case(NamedTuple):
    method: str
    path: str
    name: str
    body: bytes
    status: int = 0
    """The one that is expected; 0: any below 500."""


# --- every field ---


def body_schema(content: dict[str, Any]) -> dict[str, Any]:
    return content["requestBody"]["content"]["application/json"]["schema"]


def places(schema: dict[str, Any], around: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """The path of each field, of names and of "[]" for an item of a list, and its schema."""
    for form in (schema, *schema.get("anyOf", ())):
        for name, field in form.get("properties", {}).items():
            if name == "messages":
                field = {"type": "array", "items": body_schema(documented(ChatMessage))}
            yield (*around, name), field
            yield from places(field, (*around, name))
        if "items" in form:
            yield from places(form["items"], (*around, "[]"))


def body_with(value: bytes, place: tuple[str, ...], rest: dict[str, Any]) -> bytes:
    """A body with a value at a place, and all else that the route needs."""
    before, after = b"", b""
    for name in place:
        before += b"[" if name == "[]" else b"{%s:" % json.dumps(name).encode()
        after = (b"]" if name == "[]" else b"}") + after
    others = {name: item for name, item in rest.items() if name != place[0]}
    if others:
        before = json.dumps(others).encode()[:-1] + b"," + before[1:]
    return b"".join((before, value, after))


SMALL_ITEMS = {
    "messages": (4_000, b'{"role":"user","content":"a"}'),
    "content": (16_000, b'{"type":"text","text":"a"}'),
    "tool_calls": (8_000, b'{"function":{"name":"f","arguments":"{}"}}'),
    "adapters": (16_000, b'{"name":"a"}'),
    "input": (4_000, b'{"role":"user","content":"a"}'),
    "tools": (128, b'{"type":"function","name":"f"}'),
}
"""Number and entry of a list of objects that is right in type."""


def is_number(kinds: set[str]) -> bool:
    return not kinds.isdisjoint({"integer", "number"})


def field_values(name: str, schema: dict[str, Any], turn: int) -> dict[str, bytes]:
    """The largest and the most numerous values of a field that are right in type, and every other time one that is
    wrong. `turn` chooses that one, and the characters of texts, every other time the plain ones."""
    text, digits = long_texts()[(turn % 2) * (turn // 2 % len(long_texts()))], b"9" * SIZE
    forms = (schema, *schema.get("anyOf", ()))
    kinds = {form["type"] for form in forms if "type" in form}
    items = [form["items"] for form in forms if "items" in form]
    values = {
        "text": (b"%s", text),
        "digits": (b"%s", digits),
        "text in a list": (b"[%s]", text),
        "digits in a list": (b"[%s]", digits),
        "text in an object": (b'{"5":%s}', text),
        **{kind: (b"%s", value) for kind, value in many_values().items()},
    }
    right = {"digits"} if is_number(kinds) else set()
    if "string" in kinds:
        right.add("text")
    for item in items:
        item_kinds = {form["type"] for form in (item, *item.get("anyOf", ())) if "type" in form}
        if is_number(item_kinds):
            right |= {"digits in a list", "numbers"}
        if "string" in item_kinds:
            right |= {"text in a list", "texts"}
        if "object" in item_kinds:
            count, small = SMALL_ITEMS.get(name, (16_000, b"{}"))
            values["entries"] = b"%s", repeated(small, count)
            right.add("entries")
    if "object" in kinds:
        right |= {"text in an object", "names"}
    wrong = sorted(values.keys() - right)
    chosen = sorted(right | ({wrong[turn // 2 % len(wrong)]} if turn % 2 == 0 or not right else set()))
    return {kind: values[kind][0] % values[kind][1] for kind in chosen}


def field_key(place: tuple[str, ...], schema: dict[str, Any]) -> str:
    """Equal for fields of one name and schema, wherever they are."""
    return json.dumps((next(name for name in reversed(place) if name != "[]"), schema))


def cases(document: dict[str, Any]) -> Iterator[list[Case]]:
    """The cases of each field, and of each route as a whole. A body beyond its bounds ends before its fields are known:
    one field of each route stands for all. Places of a field, as in chat and completions, share its values: each gets
    at least one of them, and together they get all; unless EVERY_VALUE, MOST_PLACES get every other one."""
    routes = [
        (method.upper(), path, list(places(body_schema(operation))))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    ]
    shared = Counter(field_key(*field) for _, _, fields in routes for field in fields)
    seen: Counter[str] = Counter()
    for method, path, fields in routes:
        where = path.replace("{name}", "acme").replace("{key_id}", "none")
        for index, (place, schema) in enumerate(fields):
            key = field_key(place, schema)
            values = list(field_values(json.loads(key)[0], schema, index).items())
            parts = min(shared[key], len(values))
            values = values[seen[key] % parts :: parts]
            seen[key] += 1
            if not EVERY_VALUE:
                if index and seen[key] > MOST_PLACES:
                    continue
                values = values[index % 2 :: 2] or values
            if index == 0:
                values += [(f"most {kind}", value) for kind, value in most_values().items()]
            bodies = [(kind, body_with(value, place, SMALL.get(path, {}))) for kind, value in values]
            yield [Case(method, where, f"{'.'.join(place)}: {kind}", body) for kind, body in bodies]
        yield [Case(method, where, *whole) for whole in list(huge_bodies().items())[len(path) % 2 :: 2]]
