"""JSON schemas in the form that `llguidance` serves correctly (https://json-schema.org/draft/2020-12).

The package reads most of a schema as the standard specifies. `served` rewrites the rest first: a schema means the same
afterwards, or is slightly stricter, so that text that fits the rewritten schema fits the requested one. Some keywords
are left out instead, and named: `uniqueItems` of a list whose items have one schema (a set), of a string those that no
grammar can enforce together with its `format`, and an unknown `format`. The package refuses the remaining errors by
name.

Each schema within a schema is visited once, without recursion, and nothing is copied into several places: the cost
grows with the length of the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from .document import NESTED, NESTED_LISTS, NESTED_MAPS, Document, Probe
from .numbers import check_exact, rewrite_bounds, rewrite_step
from .objects import rewrite_pattern_properties, rewrite_property_names
from .strings import rewrite_format, rewrite_lengths, rewrite_pattern
from .unions import rewrite_one_of


class ServedSchema(NamedTuple):
    """A rewritten schema."""

    schema: Any
    ignored: list[str]
    """Paths of the keywords that are left out, such as "properties.tags.uniqueItems"."""


def served(text: str, problem_of: Probe | None = None) -> ServedSchema:
    """A schema as `llguidance` is to read it.

    Args:
        text: The schema as JSON.
        problem_of: Compiler of small schemas. Without one nothing is tried out: lengths together with a format and a
        pattern stay, and so do `patternProperties` whose names are all properties.

    Raises:
        ValueError: the text is not JSON, or a value in it cannot be served; the message names the keyword.
        RecursionError: it is nested too deeply.
    """
    root = json.loads(text)
    document = Document(root, problem_of)
    ignored: list[str] = []
    seen: dict[int, Any] = {}  # by identity; the values keep the identities from being used again
    waiting: list[tuple[Any, str]] = [(root, "")]
    if isinstance(root, dict) and root.pop("x-guidance", None) is not None:
        ignored.append("x-guidance")  # options of `llguidance`, which leave out more
    while waiting:
        schema, place = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen[id(schema)] = schema
        ignored += [place + keyword for keyword in _rewrite(schema, document)]
        waiting += _nested(schema, place)
        target = document.resolve_reference(schema)
        if target is not None:
            waiting.append((target, str(schema["$ref"]).strip("#/").replace("/", ".") + "."))
    return ServedSchema(root, sorted(ignored))


_ANNOTATIONS = ("discriminator", "deprecated", "example")
"""Keywords that do not constrain a value. `llguidance` treats them as if they did, and refuses them together with
references of a schema to itself."""


def _rewrite(schema: dict[str, Any], document: Document) -> list[str]:
    """Rewrite one schema in place, without those within it; return the keywords that were left out."""
    check_exact(schema)
    rewrite_bounds(schema)
    rewrite_step(schema)
    ignored = [*rewrite_pattern(schema), *rewrite_lengths(schema, document), *rewrite_format(schema)]
    if is_set(schema):
        del schema["uniqueItems"]
        if schema.get("maxItems") not in (0, 1):
            ignored.append("uniqueItems")
    elif schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    rewrite_one_of(schema, document)
    rewrite_property_names(schema, document)
    rewrite_pattern_properties(schema, document)
    for keyword in _ANNOTATIONS:
        schema.pop(keyword, None)
    return ignored


def is_set(schema: dict[str, Any]) -> bool:
    """True for a list without repetitions whose items share one schema, as pydantic writes a `set`."""
    return (
        schema.get("uniqueItems") is True
        and schema.get("type") == "array"
        and isinstance(schema.get("items"), dict | bool)
        and "prefixItems" not in schema
    )


def _nested(schema: dict[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    """Schemas directly within a schema, and their paths."""
    for keyword in NESTED:
        if keyword in schema:
            yield schema[keyword], f"{place}{keyword}."
    for keyword in NESTED_LISTS:
        options = schema.get(keyword)
        for index, option in enumerate(options if isinstance(options, list) else ()):
            yield option, f"{place}{keyword}[{index}]."
    for keyword in NESTED_MAPS:
        named = schema.get(keyword)
        for name, option in named.items() if isinstance(named, dict) else ():
            yield option, f"{place}{keyword}.{name}."
