"""Flags made from the fields of a dataclass."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from .option_types import count, json_object, list_of


def flag(option: str) -> str:
    """The flag of a field: "--max-model-len" for max_model_len."""
    return "--" + option.replace("_", "-")


def add_field_flag(
    group: argparse._ArgumentGroup,
    field: dataclasses.Field[Any],
    hint: Any,
    text: str,
    choices: Sequence[str] | None = None,
    parse: Callable[[str], Any] | None = None,
) -> None:
    """Add the flag of a field, of a type that fits its type hint unless `parse` is given. A namespace has it only when
    it is given: the default is the field's."""
    text = text.replace("%", "%%")
    kind = _plain_type(hint)
    if "(default" not in text and field.default is not None:
        text = f"{text} (default: {field.default})".strip()
    common: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
    if kind is bool:
        group.add_argument(flag(field.name), action=argparse.BooleanOptionalAction, **common)
    elif choices is not None:
        group.add_argument(flag(field.name), choices=choices, **common)
    else:
        parsers: dict[type, Callable[[str], Any]] = {int: count, dict: json_object, tuple: integers}
        metavar = {int: "N", float: "X", dict: "JSON", tuple: "N,N"}.get(kind, field.name.rpartition("_")[2].upper())
        group.add_argument(flag(field.name), type=parse or parsers.get(kind, kind), metavar=metavar, **common)


def integers(text: str) -> tuple[int, ...]:
    """Type of integers with commas between them."""
    return tuple(list_of(int)(text))


def _plain_type(hint: Any) -> type:
    """The type of a flag: int for `int | None`, dict for `dict[str, Any] | None`, str for `int | str | None`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hints = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        hint = str if str in hints else hints[0]
    plain = typing.get_origin(hint) or hint
    assert isinstance(plain, type), hint
    return plain


def given_fields(options: type[Any], namespace: argparse.Namespace, leave_out: Sequence[str] = ()) -> dict[str, Any]:
    """Fields of a dataclass that the command line gives, with their values."""
    names = (field.name for field in dataclasses.fields(options) if field.name not in leave_out)
    return {name: getattr(namespace, name) for name in names if hasattr(namespace, name)}
