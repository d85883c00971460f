"""Constraint on an answer's form out of the fields in which clients write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...core.errors import InvalidRequestError
from ...core.sampling_params import shown
from ...core.structured_outputs import StructuredOutputsParams, parse

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
"""vLLM's older fields, and what they are called now."""
FIELDS = ("response_format", "structured_outputs", *GUIDED)


def constraint_of(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Constraint of a request's fields; None when it has none.

    Raises:
        InvalidRequestError: a field is wrong, or there are several; `param` names it.
    """
    found = [(name, fields) for name in FIELDS if (fields := _fields(name, given.get(name)))]
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidRequestError(f"{names} exclude each other", param=found[1][0])
    name, fields = found[0]
    if given.get("guided_whitespace_pattern") is not None and name in GUIDED:
        fields["whitespace_pattern"] = given["guided_whitespace_pattern"]
    return parse(fields, source=name)


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
        f"response_format: type must be text, json_object, json_schema or structural_tag, got {shown(kind)}",
        param="response_format",
    )
