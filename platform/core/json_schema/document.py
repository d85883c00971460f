"""A schema with its references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

NESTED = ("items", "additionalItems", "additionalProperties", "propertyNames")
"""Keywords whose value is a schema."""
NESTED_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
"""Keywords whose value is a list of schemas."""
NESTED_MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value is an object of schemas."""
MAX_REFERENCES = 32
"""Longest chain of references that is followed."""

Probe = Callable[[dict[str, Any]], str]
"""Compiler of a small schema that returns its error, or "": that it cannot be compiled, or that its object must have a
property and can have none."""


class Document:
    """Root of a schema: its references are found in it, and new definitions are added to it."""

    def __init__(self, root: Any, problem_of: Probe | None = None) -> None:
        self._root = root
        self._num_defined = 0
        self.problem_of = problem_of
        """None: nothing is tried."""
        self.notes: dict[Any, Any] = {}
        """Findings about schemas, by identity: each is looked at once, however many references name it."""

    def resolve_reference(self, schema: Any) -> Any:
        """Schema that `$ref` of a schema names; None without one in this document."""
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found = self._root
        for part in reference.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(name)
            elif isinstance(found, list):
                found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
            else:
                return None
        return found

    def resolve(self, schema: Any) -> Any:
        """The schema behind references without other keywords; None if it is not found."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self.resolve_reference(schema)
        return None

    def define(self, schema: Any) -> Any:
        """A schema to write several times instead of this one: a reference to it, if it is long."""
        if not isinstance(schema, dict) or (
            len(schema) == 1 and isinstance(schema.get("type") or schema.get("$ref"), str)
        ):
            return schema
        definitions = self._root.setdefault("$defs", {})
        if not isinstance(definitions, dict):
            raise ValueError("$defs must be an object")
        while (name := f"shared{self._num_defined}") in definitions:
            self._num_defined += 1
        definitions[name] = schema
        return {"$ref": f"#/$defs/{name}"}
