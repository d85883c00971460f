"""Options: fields of a dataclass, each declared once. The command line, the checks and the reference page read them."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import invalid
from .sampling_params import MAX_SEED, check_integer, check_number, check_text

_MAX_NUMBER = 1e6
"""Upper bound of a number without bounds of its own."""


def option(default: Any, text: str, **more: Any) -> Any:
    """A field that is an option. `more` has other fields of `Option`; `MISSING` is no default."""
    return field(default=default, metadata={"text": text, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Declaration of one option."""

    name: str
    type: Any
    """Type hint of the field."""
    default: Any
    text: str
    """Help text, a phrase. It names the default, as "(default: ...)", if that of the field says too little."""
    group: str
    """Title of its group: by default, the docstring of the class that declares it."""
    choices: tuple[str, ...] | None = None
    within: tuple[float, float] | None = None
    """Least and largest value; None: 1 to `MAX_SEED` for integers, 0 to `_MAX_NUMBER` for other numbers."""
    low_open: bool = False
    """True if the least value itself is refused."""
    parse: Callable[[str, Any], Any] | None = None
    """Function of the name and a value as users write it, such as `parse_bytes`; returns the value to check."""
    methods: tuple[str, ...] | None = None
    """The only methods to which it applies."""

    @property
    def kind(self) -> type:
        """The type without None: int for `int | None`, dict for `dict[str, Any] | None`, str for `int | str | None`."""
        hint = self.type
        if isinstance(hint, types.UnionType):
            hints = [arg for arg in typing.get_args(hint) if arg is not type(None)]
            hint = str if str in hints else hints[0]
        plain = str if self.choices is not None else typing.get_origin(hint) or hint
        assert isinstance(plain, type), hint
        return plain

    @property
    def help(self) -> str:
        """The text with the methods to which the option applies, and with its default."""
        methods = f"; only for {', '.join(self.methods)}" if self.methods else ""
        is_plain = "(default" not in self.text and self.default is not None
        return self.text + methods + (f" (default: {self.default})" if is_plain else "")

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Least and largest value; None if it is no number."""
        if self.kind not in (int, float):
            return None
        return self.within or ((1, MAX_SEED) if self.kind is int else (0.0, _MAX_NUMBER))

    def check(self, value: Any) -> None:
        """Refuse a value that is wrong whatever the other options: `InvalidRequestError` names it and the limit."""
        if self.parse is not None and value is not None:
            value = self.parse(self.name, value)
        if value is None and type(None) in typing.get_args(self.type):
            return
        if self.choices is not None:
            if value not in self.choices:
                raise invalid(self.name, f"must be one of {', '.join(self.choices)}; got {value!r}")
        elif self.kind is bool:
            if not isinstance(value, bool):
                raise invalid(self.name, f"must be true or false, got {value!r}")
        elif self.bounds is not None:
            low, high = self.bounds
            if self.kind is int:
                check_integer(self.name, value, int(low), int(high))
            else:
                check_number(self.name, value, low, high, low_open=self.low_open)
        elif self.kind is str and self.parse is None:
            check_text(self.name, value)


@functools.cache
def declared_options(owner: type) -> dict[str, Option]:
    """The options of a dataclass by name, in the order of its bases; other fields are left out."""
    hints = typing.get_type_hints(owner)
    found = {}
    for base in (*owner.__bases__, owner):
        names = inspect.get_annotations(base)
        for item in fields(owner):
            if item.name in names and item.metadata:
                declared = {"group": (base.__doc__ or base.__name__).partition(".")[0], **item.metadata}
                found[item.name] = Option(name=item.name, type=hints[item.name], default=item.default, **declared)
    return found
