"""Types of pydantic: the schema of each is served, and the type accepts the grammar's texts."""

from __future__ import annotations

import datetime
import ipaddress
import json
import uuid
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest
from jsonschema import Draft202012Validator
from pydantic import UUID4, AnyUrl, BaseModel, ConfigDict, Field, TypeAdapter, WithJsonSchema, conint

from outrider import StructuredOutputsParams
from outrider.platform.core.constraint_check import CHECKER

from ...grammar_walk import drawn


class Color(StrEnum):
    RED, BLUE = "red", "blue"


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Cat(Closed):
    kind: Literal["cat"] = "cat"
    lives: conint(gt=0, lt=10)


class Dog(Closed):
    kind: Literal["dog", "wolf"] = "dog"
    pups: list[Dog] = []


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


class Sum(Closed):
    op: Literal["sum"]
    left: Expression
    right: Expression


class Number(Closed):
    op: Literal["number"]
    value: Annotated[float, Field(gt=0, le=0.5)]


Expression = Annotated[Sum | Number, Field(discriminator="op")]
Sum.model_rebuild()


class Node(Closed):
    value: int
    next: Optional[Node] = None  # noqa: UP045 (the old spelling is what many write)


EmailStr = Annotated[str, WithJsonSchema({"type": "string", "format": "email"})]
"""The schema of pydantic's type, whose package is not needed for it."""
OldDecimal = Annotated[
    Decimal,
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}),
]
"""A Decimal as pydantic 2.12 describes it."""
TYPES: dict[str, tuple[Any, list[str]]] = {
    "Decimal": (Decimal, ["Decimal"]),
    "Decimal of 2.12": (OldDecimal, []),
    "set": (set[int], ["uniqueItems"]),
    "frozenset": (frozenset[Color], ["uniqueItems"]),
    "set of one": (Annotated[set[int], Field(max_length=1)], []),
    "dict of names": (dict[Literal["a", "b"], int], []),
    "dict of an enum": (dict[Color, set[int]], ["uniqueItems"]),
    "dict of lengths": (dict[Annotated[str, Field(min_length=2)], int], []),
    "dict of a pattern": (dict[Annotated[str, Field(pattern="^a")], int], ["dict of a pattern"]),
    "email": (EmailStr, []),
    "email of a length": (
        Annotated[str, WithJsonSchema({"type": "string", "format": "email", "maxLength": 60}), Field(max_length=60)],
        [],
    ),
    "UUID": (uuid.UUID, []),
    "UUID4": (UUID4, []),
    "AnyUrl": (AnyUrl, ["AnyUrl"]),
    "datetime": (datetime.datetime, []),
    "date": (datetime.date, []),
    "time": (datetime.time, []),
    "IPv4Address": (ipaddress.IPv4Address, []),
    "Path": (Path, ["format"]),
    "conint": (conint(ge=-5, lt=20, multiple_of=5), []),
    "float": (Annotated[float, Field(gt=0, lt=1)], []),
    "negative": (Annotated[float, Field(lt=0, ge=-0.5)], []),
    "int64": (Annotated[int, Field(ge=-(2**63), le=2**63 - 1)], []),
    "text": (Annotated[str, Field(pattern=r"^\d+$", min_length=2, max_length=4)], []),
    "Enum": (Color, []),
    "Literal": (Literal[1, "a", None, True], []),
    "Optional": (Optional[Annotated[int, Field(gt=3)]], []),  # noqa: UP045
    "tuple": (tuple[int, str], []),
    "union": (Pet, []),
    "optional union": (Optional[Pet], []),  # noqa: UP045
    "union in a union": (list[Pet | Annotated[Sum | Number, Field(discriminator="op")]], []),
    "recursive union": (Expression, []),
    "recursive": (Node, []),
}
"""Types, and the keywords that are left out; a type's own name if its schema is weaker than pydantic's check."""


@pytest.mark.parametrize("name", TYPES)
def test_types_of_pydantic(name):
    kind, left_out = TYPES[name]
    says_less = left_out == [name]
    adapter = TypeAdapter(kind)
    inner = adapter.json_schema(ref_template="#/$defs/{model}")
    schema = {"$defs": inner.pop("$defs", {}), "type": "object", "properties": {"a": inner}, "required": ["a"]}
    schema["additionalProperties"] = False
    found = CHECKER.check(StructuredOutputsParams(json=schema))
    assert [place.rsplit(".", 1)[1] for place in found] == ([] if says_less else left_out)
    judge = Draft202012Validator(schema)
    for text in drawn(schema, 5, 24, limit=500):
        value = json.loads(text)
        if not left_out or says_less:
            assert judge.is_valid(value), text
        if not says_less:
            adapter.validate_json(json.dumps(value["a"]))
