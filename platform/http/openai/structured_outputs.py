"""Constraint on an answer's form out of the fields in which clients write it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ...core.errors import InvalidRequestError
from ...core.sampling_params import quote_for_error
from ...core.structured_outputs import StructuredOutputsParams, parse

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "regex": "regex",
    "ebnf": "grammar",
}
"""vLLM's older fields and SGLang's, and what they are called in `structured_outputs`."""
FIELDS = ("response_format", "structured_outputs", *GUIDED)


def parse_constraint(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Constraint of a request's fields; None when it has none.

    Raises:
        InvalidRequestError: a field is wrong, or there are several that differ; `param` names it.
    """
    found = []
    for name in FIELDS:
        fields = _fields(name, given.get(name))
        if fields and name in GUIDED and given.get("guided_whitespace_pattern") is not None:
            fields["whitespace_pattern"] = given["guided_whitespace_pattern"]
        if fields:
            found.append(parse(fields, source=name))
    # Clients write one constraint in several fields, since servers read different ones.
    other = next((constraint for constraint in found if not _is_same(constraint, found[0])), None)
    if other is not None:
        names = " and ".join(constraint.source for constraint in found)
        raise InvalidRequestError(f"{names} exclude each other", param=other.source)
    return found[0] if found else None


def _is_same(one: StructuredOutputsParams, other: StructuredOutputsParams) -> bool:
    """True when two fields ask for the same."""
    return one is other or _meaning(one) == _meaning(other)


def _meaning(constraint: StructuredOutputsParams) -> dict[str, Any]:
    """Fields of a constraint, schemas as objects: each client writes them in its own way."""
    fields = {**dataclasses.asdict(constraint), "source": ""}
    for name in ("json", "structural_tag"):
        with contextlib.suppress(ValueError, RecursionError):
            fields[name] = fields[name] and json.loads(fields[name])
    return fields


def _fields(name: str, value: Any) -> dict[str, Any]:
    """Fields of `StructuredOutputsParams`; empty when the value asks for nothing."""
    if value is None or value is False or value in ("", []):
        return {}
    if name == "response_format":
        return _response_format(value) if value else {}
    if name == "structured_outputs":
        return {field: part for field, part in value.items() if part is not None}
    return {GUIDED[name]: value}


def _response_format(value: dict[str, Any]) -> dict[str, Any]:
    kind = value.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        described = value.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict | bool):
            raise InvalidRequestError(
                "response_format: json_schema.schema must be a JSON schema", param="response_format"
            )
        return {"json": json.dumps(schema)}
    if kind == "structural_tag":
        return {"structural_tag": {name: part for name, part in value.items() if name != "type"}}
    raise InvalidRequestError(
        f"response_format: type must be text, json_object, json_schema or structural_tag, got {quote_for_error(kind)}",
        param="response_format",
    )
