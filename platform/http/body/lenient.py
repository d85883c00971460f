"""Request bodies as clients write them -> as the models of `protocol` have them.

A body is walked once, along with its model, before it is validated:

- a number or a flag written as a string, and a whole number written as `5.0`, become what the field's type says;
- a field that would change the answer and is not implemented is refused, unless its value is a no-op;
- a name that is a letter or two away from a field that is not given is refused with a suggestion;
- any other unknown field is taken out, and noted for the header `x-outrider-ignored`; refused with --strict-fields.
"""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, reduce
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict

from ...core.errors import InvalidRequestError, invalid
from ...core.text import shorten
from ..observe.request_log import log_ignored
from .foreign_fields import HARMLESS, IDLE, QUIET, Unsupported

MAX_COMPARED_NAMES = 16
"""Unknown names of one body that are compared with known ones."""
SIMILAR = 0.88
"""Ratio of `difflib` from which a name counts as misspelt: one letter too many or too few in four, or a wrong one in
nine."""
MAX_EXACT = 2**53
"""Largest whole number that a float holds exactly."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)
_FLOAT = re.compile(r"[+-]?([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})([eE][+-]?[0-9]{1,4})?", re.ASCII)
_FLAGS = {"true": True, "True": True, "false": False, "False": False}
_LONGEST_NAME = 40


class RequestModel(BaseModel):
    """Model with strict types, no unknown fields and finite numbers."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class LenientModel(BaseModel):
    """Model with strict types and finite numbers; `adapt` deals with fields that it does not have."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())
    unsupported: ClassVar[Mapping[str, Unsupported]] = {}
    """Fields that it does not have, and that are refused."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Kinds of JSON that a field takes. Alternatives of a union are one shape."""

    scalars: frozenset[type] = frozenset()
    items: Shape | None = None
    """Shape of a list's items."""
    values: Shape | None = None
    """Shape of the values of an object with any names."""
    model: type[LenientModel] | None = None
    """Model of an object with fields."""

    def __or__(self, other: Shape) -> Shape:
        return Shape(
            self.scalars | other.scalars,
            _either(self.items, other.items),
            _either(self.values, other.values),
            self.model or other.model,
        )


def _either(one: Shape | None, other: Shape | None) -> Shape | None:
    return one | other if one and other else one or other


def shape_of(annotation: Any) -> Shape:
    """The shape of a type. One in the metadata of an `Annotated` comes first."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return next((extra for extra in args[1:] if isinstance(extra, Shape)), None) or shape_of(args[0])
    if origin in (Union, types.UnionType):
        return reduce(Shape.__or__, map(shape_of, args))
    if origin is list:
        return Shape(items=shape_of(args[0]))
    if origin is dict:
        return Shape(values=shape_of(args[1]))
    if origin is Literal:
        return Shape(frozenset(map(type, args)))
    if annotation in (bool, int, float, str):
        return Shape(frozenset({annotation}))
    if isinstance(annotation, type) and issubclass(annotation, LenientModel):
        return Shape(model=annotation)
    return Shape()


@cache
def _shapes(model: type[LenientModel]) -> dict[str, Shape]:
    """The shape of each field of a model."""
    return {
        name: shape_of(Annotated[field.annotation, *field.metadata, ...]) for name, field in model.model_fields.items()
    }


@cache
def _spellings(model: type[LenientModel]) -> dict[str, str]:
    """Names that a client may have meant, by their letters alone: fields, and foreign names that are no plain words."""
    foreign = [name for name in model.unsupported if "_" in name or name == "tools"]
    return {_letters(name): name for name in (*foreign, *model.model_fields)}


def _letters(name: str) -> str:
    """A name without what naming styles differ in: `topP`, `top-p` and `top_p` are one."""
    return name.lower().replace("_", "").replace("-", "")


def adapt(content: dict[str, Any], model: type[BaseModel], *, strict: bool) -> None:
    """Change a body in place to what `model` has; one that is no `LenientModel` is left alone.

    Args:
        strict: refuse what would be ignored.

    Raises:
        InvalidRequestError: a field that is not implemented, or misspelt; `param` names it.
    """
    if issubclass(model, LenientModel):
        _Walk(strict).walk(content, model, "")


class _Walk:
    """Walk through one body."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._to_compare = MAX_COMPARED_NAMES

    def walk(self, content: dict[str, Any], model: type[LenientModel], place: str) -> None:
        """Walk through an object; `place` is the prefix of its fields' paths, such as "messages[0]."."""
        shapes = _shapes(model)
        for name in [name for name in content if name in shapes]:
            if content[name] is not None:
                content[name] = self._value(content[name], shapes[name], place + name)
        if not place:
            self._drop_idle(content)
        for name in [name for name in content if name not in shapes]:
            self._check_foreign(content, name, model, place)
            del content[name]

    def _value(self, value: Any, shape: Shape, path: str) -> Any:
        kind = type(value)
        if kind is dict and shape.model is not None:
            self.walk(value, shape.model, f"{path}.")
        elif kind is dict and shape.values is not None:
            for name, item in value.items():
                value[name] = self._value(item, shape.values, path)
        elif kind is list and shape.items is not None:
            if not shape.items.scalars.issuperset(map(type, value)):
                value[:] = [self._value(item, shape.items, f"{path}[{i}]") for i, item in enumerate(value)]
        elif kind not in shape.scalars:
            return _converted(value, shape.scalars)
        return value

    def _drop_idle(self, content: dict[str, Any]) -> None:
        """Ignore fields that other fields of the body leave without a meaning."""
        for name, (other, idle) in IDLE.items():
            if content.get(name) and content.get(other) in idle:
                self._ignore(name)
                del content[name]

    def _check_foreign(self, content: dict[str, Any], name: str, model: type[LenientModel], place: str) -> None:
        """Refuse or note a field that the model does not have."""
        value, rule = content[name], model.unsupported.get(name)
        if rule is not None:
            if type(value) is dict:
                value = {key: item for key, item in value.items() if item is not None}
            if value is None or _converted(value, frozenset(map(type, rule.no_ops))) in rule.no_ops:
                return
            has_instead = rule.instead in model.model_fields
            if not has_instead or content.get(rule.instead) is None:
                path = shorten(place + name)
                advice = f"here it is {rule.instead!r}" if has_instead else rule.advice
                raise invalid(path, f"is not supported: {advice}")
        elif name in HARMLESS:
            if not value or value in QUIET.get(name, ()):
                return
        elif value is not None or self._strict:
            self._check_spelling(content, name, model, place)
        else:
            return
        self._ignore(place + name)

    def _check_spelling(self, content: dict[str, Any], name: str, model: type[LenientModel], place: str) -> None:
        if self._to_compare == 0 or len(name) > _LONGEST_NAME:
            return
        self._to_compare -= 1
        spellings = _spellings(model)
        letters = _letters(name)
        matches = difflib.get_close_matches(letters, spellings, cutoff=SIMILAR)
        matches.sort(key=lambda match: match[0] != letters[0])  # few misspell the first letter
        for match in matches[:1]:
            meant = spellings[match]
            if content.get(meant) is None:  # else the client has both, and knows the right one
                path = place + name
                raise InvalidRequestError(f"Unsupported field: {path!r}; did you mean {meant!r}?", param=path)

    def _ignore(self, path: str) -> None:
        ignore(path, strict=self._strict)


def ignore(path: str, *, strict: bool) -> None:
    """Record an ignored field; InvalidRequestError if that is not allowed."""
    if strict:
        path = shorten(path)
        raise InvalidRequestError(f"Unsupported field: {path!r}", param=path)
    log_ignored(path)


def _converted(value: Any, scalars: frozenset[type]) -> Any:
    """The value converted to one of these types if it is certain which, else unchanged."""
    number = value
    if type(value) is str:
        if bool in scalars and value in _FLAGS:
            return _FLAGS[value]
        if int in scalars and _INTEGER.fullmatch(value):
            return int(value)
        if scalars & {int, float} and str not in scalars and _FLOAT.fullmatch(value):
            number = float(value)
    if type(number) is float:
        if float in scalars:
            return number if math.isfinite(number) else value
        if int in scalars and abs(number) <= MAX_EXACT and number.is_integer():
            return int(number)
    return value
