"""`oneOf` as `anyOf`: the same if each instance fits at most one branch.

Branches exclude each other by their types, by the values of `const` and `enum`, or, if they are objects, by such
values of one property, the tag. pydantic's discriminated unions have a tag that is not required, as it has a default;
it is made required, since a union without the tag cannot be read.
"""

from __future__ import annotations

import json
from typing import Any

from .document import MAX_REFERENCES, Document

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_ALL = None
"""Any value of a type."""
Values = set[str] | None
"""Values of a type, as JSON, or any."""
Kinds = dict[str, Values]
"""Types, each with its values."""
MAX_TAGS = 16
"""Most properties of a branch that are tried as the tag, in order; the one that `discriminator` names comes first."""


def rewrite_one_of(schema: dict[str, Any], document: Document) -> None:
    """Replace `oneOf` in place, if its branches exclude each other; else it stays."""
    branches = schema.get("oneOf")
    if not isinstance(branches, list) or not branches or "anyOf" in schema:
        return
    if isinstance(schema.get("discriminator"), dict):  # only objects have one
        for target in map(document.resolve, branches):
            if isinstance(target, dict) and "properties" in target:
                target.setdefault("type", "object")
    own = _types(schema)
    kinds = [_both(own, _kinds(branch, document)) for branch in branches]
    for kind in _TYPES:
        values = [found[kind] for found in kinds if kind in found]
        if kind == "object" and any(found is _ALL for found in values):
            continue
        if not _are_disjoint(values):
            return
    objects = [branch for branch, found in zip(branches, kinds, strict=True) if "object" in found]
    if len(objects) > 1 and any(found.get("object", set()) is _ALL for found in kinds):
        tag = _tag(schema, objects, document)
        if tag is None:
            return
        for branch in objects:
            _require(branch, tag, document)
    schema["anyOf"] = schema.pop("oneOf")


def _are_disjoint(values: list[Values]) -> bool:
    seen: set[str] = set()
    if len(values) > 1 and any(each is _ALL for each in values):
        return False
    for each in values:
        if each is not None:
            if not seen.isdisjoint(each):
                return False
            seen |= each
    return True


def _kinds(schema: Any, document: Document, depth: int = 0) -> Kinds:
    """Types of a schema's instances, each with its values; a superset if they are not known."""
    schema = document.resolve(schema)
    if not isinstance(schema, dict) or depth == MAX_REFERENCES:
        return {} if schema is False else dict.fromkeys(_TYPES)
    known = document.notes.get(id(schema))
    if known is not None:
        return known
    kinds = _types(schema)
    document.notes[id(schema)] = kinds  # for a schema within itself
    listed = _listed(schema)
    if listed is not None:
        kinds = _both(kinds, _of_values(listed))
    for part in _list_in(schema, "allOf"):
        kinds = _both(kinds, _kinds(part, document, depth + 1))
    for union in ("anyOf", "oneOf"):
        if options := _list_in(schema, union):
            kinds = _both(kinds, _any_of([_kinds(option, document, depth + 1) for option in options]))
    document.notes[id(schema)] = kinds
    return kinds


def _types(schema: dict[str, Any]) -> Kinds:
    types = schema.get("type", list(_TYPES))
    names = types if isinstance(types, list) else [types]
    return dict.fromkeys("number" if kind == "integer" else str(kind) for kind in names)


def _of_values(values: list[Any]) -> Kinds:
    kinds: dict[str, set[str]] = {}
    for value in values:
        kinds.setdefault(_json_type(value), set()).add(_key(value))
    return {**kinds}


def _both(one: Kinds, other: Kinds) -> Kinds:
    met: Kinds = {}
    for kind in one:
        if kind in other:
            mine, theirs = one[kind], other[kind]
            met[kind] = theirs if mine is None else mine if theirs is None else mine & theirs
    return met


def _any_of(parts: list[Kinds]) -> Kinds:
    names = {kind for part in parts for kind in part}
    return {kind: _joined([part[kind] for part in parts if kind in part]) for kind in names}


def _joined(values: list[Values]) -> Values:
    joined: set[str] = set()
    for each in values:
        if each is None:
            return _ALL
        joined |= each
    return joined


def _listed(schema: dict[str, Any]) -> list[Any] | None:
    """Values of `const` or `enum`."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _key(value: Any) -> str:
    """Identity of a JSON value: 1.0 is 1, and true is not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


# --- tags of objects ---


def _tag(schema: dict[str, Any], branches: list[Any], document: Document) -> str | None:
    """Name of the property whose values distinguish these branches."""
    discriminator = schema.get("discriminator")
    named = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    names = [named] if isinstance(named, str) else []
    for name in [*names, *_listed_properties(branches[0], document)]:
        seen: set[str] = set()
        for branch in branches:
            values = _tag_values(branch, name, document)
            if values is None or not seen.isdisjoint(values):
                break
            seen |= values
        else:
            return name
    return None


def _listed_properties(schema: Any, document: Document, depth: int = 0) -> list[str]:
    """Properties with listed values in a branch; of a union those of its first branch."""
    schema = document.resolve(schema)
    if not isinstance(schema, dict) or depth == MAX_REFERENCES:
        return []
    key = id(schema), None
    if (known := document.notes.get(key)) is not None:
        return known
    document.notes[key] = found = []
    properties = schema.get("properties")
    for name, value in properties.items() if isinstance(properties, dict) else ():
        value = document.resolve(value)
        if isinstance(value, dict) and _listed(value) is not None:
            found.append(name)
    first = [options[0] for union in ("anyOf", "oneOf") if (options := _list_in(schema, union))]
    for part in [*_list_in(schema, "allOf"), *first]:
        if len(found) >= MAX_TAGS:
            break
        found += _listed_properties(part, document, depth + 1)
    del found[MAX_TAGS:]
    return found


def _tag_values(schema: Any, name: str, document: Document, depth: int = 0) -> set[str] | None:
    """Values that a property has in a branch; None when it may have any."""
    schema = document.resolve(schema)
    if not isinstance(schema, dict) or depth == MAX_REFERENCES:
        return None
    key = id(schema), name
    if key not in document.notes:
        document.notes[key] = None  # for a schema within itself
        document.notes[key] = _find_tag_values(schema, name, document, depth)
    found: set[str] | None = document.notes[key]
    return found


def _find_tag_values(schema: dict[str, Any], name: str, document: Document, depth: int) -> set[str] | None:
    properties = schema.get("properties")
    value = document.resolve(properties.get(name)) if isinstance(properties, dict) else None
    if isinstance(value, dict) and (listed := _listed(value)) is not None:
        return set(map(_key, listed))
    for union in ("anyOf", "oneOf"):
        if options := _list_in(schema, union):
            found = [_tag_values(option, name, document, depth + 1) for option in options]
            if None not in found:
                return set().union(*(values for values in found if values is not None))
    for part in _list_in(schema, "allOf"):
        values = _tag_values(part, name, document, depth + 1)
        if values is not None:
            return values
    return None


def _require(schema: Any, name: str, document: Document, depth: int = 0) -> None:
    """Make a property required in a branch, in place; in each branch of a branch that is a union."""
    schema = document.resolve(schema)
    if (
        not isinstance(schema, dict)
        or depth == MAX_REFERENCES
        or (key := ("required", id(schema), name)) in document.notes
    ):
        return
    document.notes[key] = True
    options = next((options for union in ("anyOf", "oneOf") if (options := _list_in(schema, union))), [])
    if options and all(_tag_values(option, name, document) for option in options):
        for option in options:
            _require(option, name, document, depth + 1)
    elif name not in (required := _list_in(schema, "required")):
        schema["required"] = [*required, name]


def _list_in(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
