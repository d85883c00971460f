"""Flags made from the options that a dataclass declares."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...core.errors import InvalidRequestError
from ...core.option import Option, declared_options
from .option_types import count, json_object, list_of, with_units


def flag(option: str) -> str:
    """The flag of a field: "--max-model-len" for max_model_len."""
    return "--" + option.replace("_", "-")


def add_flags(
    parser: argparse.ArgumentParser,
    owner: type,
    leave_out: Collection[str] = (),
    spellings: Mapping[str, Collection[str]] | None = None,
    checked: bool = False,
) -> dict[str, argparse._ArgumentGroup]:
    """Add the flags of a dataclass in groups, which are returned by title. A namespace has those that are given: the
    default is the field's.

    Args:
        spellings: option -> further choices.
        checked: refuse wrong values while arguments are parsed, if nothing checks them later.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, option in declared_options(owner).items():
        if name in leave_out:
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add_flag(groups[option.group], option, (spellings or {}).get(name, ()), checked=checked)
    return groups


def _add_flag(group: argparse._ArgumentGroup, option: Option, spellings: Collection[str], *, checked: bool) -> None:
    kind = option.kind
    common: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": option.help.replace("%", "%%")}
    if kind is bool:
        group.add_argument(flag(option.name), action=argparse.BooleanOptionalAction, **common)
    elif option.choices is not None:
        group.add_argument(flag(option.name), choices=(*option.choices, *spellings), **common)
    else:
        parsers: dict[type, Callable[[str], Any]] = {int: count, dict: json_object, tuple: integers}
        if option.parse is not None and kind is int:
            parsers[int] = with_units(option.parse)
        metavar = {int: "N", float: "X", dict: "JSON", tuple: "N,N"}.get(kind, option.name.rpartition("_")[2].upper())
        parse = parsers.get(kind, kind)
        parse = _checked(option, parse) if checked else parse
        group.add_argument(flag(option.name), type=parse, metavar=metavar, **common)


def _checked(option: Option, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Type that `parse` reads and that is a value of the option."""

    def read(text: str) -> Any:
        try:
            value = parse(text)
            option.check(value)
        except InvalidRequestError as error:
            raise argparse.ArgumentTypeError(error.message.removeprefix(f"{option.name} ")) from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
        return value

    return read


def integers(text: str) -> tuple[int, ...]:
    """Type of integers with commas between them."""
    return tuple(list_of(int)(text))


def given_fields(options: type[Any], namespace: argparse.Namespace, leave_out: Sequence[str] = ()) -> dict[str, Any]:
    """Fields of a dataclass that the command line gives, with their values."""
    names = (field.name for field in dataclasses.fields(options) if field.name not in leave_out)
    return {name: getattr(namespace, name) for name in names if hasattr(namespace, name)}
