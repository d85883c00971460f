"""Names of an object's properties."""

from __future__ import annotations

import re
from typing import Any

from .document import Document

MAX_TESTED = 64
"""Most properties of an object that are tried one by one against a pattern: about 1 ms each."""


def rewrite_property_names(schema: dict[str, Any], document: Document) -> None:
    """Replace `propertyNames` in place: a list of names becomes properties, as of `dict[Literal["a", "b"], int]`, and a
    pattern or a length `patternProperties`. Another one stays, and is refused by name."""
    if "propertyNames" not in schema:
        return
    names = document.resolve(schema["propertyNames"])
    if names is True or (isinstance(names, dict) and not names.keys() - {"type", "title", "description"}):
        if names is True or names.get("type", "string") == "string":
            del schema["propertyNames"]
        return
    if not isinstance(names, dict) or "patternProperties" in schema:
        return
    values = schema.get("additionalProperties", True)
    allowed = [names["const"]] if "const" in names else names.get("enum")
    if isinstance(allowed, list):
        _list_names(schema, [name for name in allowed if isinstance(name, str)], values, document)
        return
    if "properties" in schema or names.keys() - {"type", "title", "description", "pattern", "minLength", "maxLength"}:
        return
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if "pattern" in names and ("minLength" in names or "maxLength" in names):
        return
    pattern = names.get("pattern", rf"^[\s\S]{{{least},{most}}}$")
    if isinstance(pattern, str):
        del schema["propertyNames"]
        schema["patternProperties"] = {pattern: values}
        schema["additionalProperties"] = False


def _list_names(schema: dict[str, Any], names: list[str], values: Any, document: Document) -> None:
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False
    own = {name: value if name in names else False for name, value in properties.items()}
    others = [name for name in names if name not in properties]
    if not own and len(names) > 1 and ("minProperties" in schema or "maxProperties" in schema):
        # Only properties that match a pattern count for a number of properties.
        one_of_them = "|".join(map(re.escape, names))
        schema["patternProperties"] = {f"^(?:{one_of_them})$": values}
        return
    if others and len(others) > 1:
        values = document.define(values)
    schema["properties"] = own | dict.fromkeys(others, values)


def rewrite_pattern_properties(schema: dict[str, Any], document: Document) -> None:
    """Remove patterns whose names are all properties: `llguidance` would offer a further name, but there is none."""
    patterns, properties = schema.get("patternProperties"), schema.get("properties")
    problem_of = document.problem_of
    if not isinstance(patterns, dict) or not isinstance(properties, dict) or problem_of is None:
        return
    for pattern in [pattern for pattern in patterns if "^" in pattern and "$" in pattern]:
        free = {"type": "object", "patternProperties": {pattern: True}, "additionalProperties": False}
        if not problem_of({**free, "properties": dict.fromkeys(properties, False), "minProperties": 1}):
            continue
        if len(properties) > MAX_TESTED:
            raise ValueError(
                f"patternProperties: {pattern[:100]!r} has no other names than the {len(properties)} properties"
            )
        values = document.define(patterns.pop(pattern))
        for name in properties:
            if not problem_of({**free, "required": [name]}):
                properties[name] = {"allOf": [properties[name], values]}
    if not patterns:
        del schema["patternProperties"]
