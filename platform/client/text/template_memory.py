"""Bound of the memory that a chat template takes.

Templates are programs of strangers, and one expression such as `"x" * 10**10` asks for 10 GB in a single call of C
code, which no deadline interrupts. So whatever makes text or lists out of smaller ones is counted before it is done:
operators, calls of methods, filters, and the output. All that one rendering makes is added up, also what is free again.

transformers compiles templates in an environment of its own. This module makes the same environment with counting, and
puts its compiler in the place of theirs. Outside `template_memory` nothing is counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any

from jinja2.compiler import CodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_VALUE = 16 << 20
"""Bytes of the largest value. The text of a million tokens has some 6 MB."""
MAX_TOTAL = 256 << 20
"""Bytes of all values of one rendering together."""
_NODE_BYTES = 16
"""Bytes that each element of a list or an object counts in addition to its text."""
_MAX_BITS = 1 << 16
"""Bits of the largest integer."""
_MAX_WIDTH = 10_000
"""Largest number in a format, such as "%10d"."""
_NUMBERS = re.compile(r"\d{5,}")
_TAKEN_WIDTH = re.compile(r"\*|:[^}]*{")
"""Width that is one of the values."""

_left: ContextVar[list[int] | None] = ContextVar("template_memory", default=None)


class TemplateMemoryError(BaseException):
    """Error of a template that wants too much memory. Code that catches every Exception does not catch it."""


@contextmanager
def template_memory() -> Iterator[None]:
    """Raise TemplateMemoryError in this block when a template makes more than `MAX_TOTAL` bytes."""
    _use_bounded_compiler()
    token = _left.set([MAX_TOTAL])
    try:
        yield
    finally:
        _left.reset(token)


def _charge(num_bytes: int) -> None:
    left = _left.get()
    if left is None:
        return
    left[0] -= num_bytes
    if num_bytes > MAX_VALUE or left[0] < 0:
        what, most = ("one value", MAX_VALUE) if num_bytes > MAX_VALUE else ("all that it makes", MAX_TOTAL)
        raise TemplateMemoryError(f"wants too much memory (more than {most} bytes for {what})")


def _size(value: object) -> int:
    """Bytes of a value, and of its text: each occurrence of a part counts. Stops when the value is too large."""
    total, rest = 0, [value]
    while rest and total <= MAX_VALUE:
        item = rest.pop()
        total += _NODE_BYTES
        if isinstance(item, str):
            total += len(item) * (1 if item.isascii() else 4)
        elif isinstance(item, bytes):
            total += len(item)
        elif isinstance(item, dict):
            total += 2 * _NODE_BYTES * len(item)
            rest += (*item.keys(), *item.values()) if total <= MAX_VALUE else ()
        elif isinstance(item, (list, tuple, set, frozenset)):
            total += _NODE_BYTES * len(item)
            rest += item if total <= MAX_VALUE else ()
        elif isinstance(item, Namespace):
            rest.append(item._Namespace__attrs)
        elif isinstance(item, int):
            total += item.bit_length()
    return total


def _times(value: object, count: object) -> int:
    """Bytes of a text or a list times an integer; 0 for anything else."""
    if not isinstance(count, int) or not isinstance(value, (str, bytes, list, tuple)):
        return 0
    once = _size(value) - _NODE_BYTES if isinstance(value, (str, bytes)) else _NODE_BYTES * len(value)
    return once * abs(count)


def _check_format(text: object, values: Iterable[Any]) -> None:
    """Count the text of a format: fields and widths are numbers in it, or values."""
    if not isinstance(text, (str, bytes)):
        return
    shown = text if isinstance(text, str) else text.decode("latin-1")
    values = list(values)
    is_wide = any(isinstance(value, int) and abs(value) > _MAX_WIDTH for value in values)
    if _NUMBERS.search(shown) or (is_wide and _TAKEN_WIDTH.search(shown)):
        _charge(MAX_VALUE + 1)
    fields = shown.count("%") + shown.count("{")
    _charge(_size(shown) + fields * (_MAX_WIDTH if fields < 100 else 0) + fields * _size(values))


def _check_method(owner: str | bytes, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count what a method of a text makes, before it is called."""
    given = (*args, *kwargs.values())
    if name in ("center", "ljust", "rjust", "zfill"):
        _charge(_size(owner) + 4 * max((abs(value) for value in given if isinstance(value, int)), default=0))
    elif name == "expandtabs":
        _charge(_size(owner) * (1 + max((abs(value) for value in given if isinstance(value, int)), default=8)))
    elif name == "replace":
        _check_replace(owner, *args[:2], **kwargs)
    elif name == "join":
        _check_join(args[0] if args else (), owner)
    elif name in ("format", "format_map"):
        _check_format(owner, given)
    elif name == "translate":
        table = given[0] if given else {}
        longest = max(map(_size, table.values()), default=0) if isinstance(table, dict) else 0
        _charge(_size(owner) + len(owner) * longest)
    else:
        _charge(_size(owner))


def _check_replace(text: object, old: object = "", new: object = "", *_: object, **__: object) -> None:
    if isinstance(text, str) and isinstance(old, str):
        _charge(_size(text) + text.count(old) * (_size(new) - _NODE_BYTES))


def _check_join(items: object, separator: object) -> None:
    if isinstance(items, (list, tuple, str)):
        _charge(_size(items) + len(items) * (_size(separator) - _NODE_BYTES))


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts what it makes."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, given = args[skipped] if len(args) > skipped else "", (*args[skipped + 1 :], *kwargs.values())
        numbers = [abs(number) for number in given if isinstance(number, int) and not isinstance(number, bool)]
        if name == "join":
            value = value if isinstance(value, (list, tuple, str)) else list(value)
            args = (*args[:skipped], value, *args[skipped + 1 :])
            _check_join(value, given[0] if given else "")
        elif name == "replace":
            _check_replace(str(value) if isinstance(value, (str, int)) else value, *args[skipped + 1 : skipped + 3])
        elif name == "format":
            _check_format(value, given)
        elif name in ("indent", "tojson", "wordwrap", "pprint", "urlize"):
            texts = [len(text) for text in given if isinstance(text, str)]
            widths = numbers if name in ("indent", "tojson") else []
            _charge(_size(value) * (1 + max([*widths, *texts], default=0)))
        elif name in ("center", "batch", "slice", "truncate"):
            _charge(8 * max(numbers, default=0))
        elif not isinstance(value, (str, int, float)) and name in ("string", "escape", "e", "forceescape", "upper"):
            _charge(_size(value))
        return _counted(function(*args, **kwargs))

    return bounded


def _counted(result: Any) -> Any:
    """Count a result that was made."""
    if isinstance(result, (str, bytes)):
        _charge(_size(result))
    elif isinstance(result, (list, tuple, dict)):
        _charge(_NODE_BYTES * len(result))
    return result


class _Generator(CodeGenerator):
    """Code in which `~` is counted."""

    def visit_Concat(self, node: Any, frame: Any) -> None:
        """Write the call that joins texts."""
        self.write("environment.join_texts((")
        for arg in node.nodes:
            self.visit(arg, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox that counts what is made."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    @classmethod
    def like(cls, other: ImmutableSandboxedEnvironment) -> BoundedEnvironment:
        """Return an environment with the settings of another one."""
        made = object.__new__(cls)
        made.__dict__.update(other.__dict__)
        made.filters = {name: _filter(name, function) for name, function in other.filters.items()}
        made.globals = {name: value for name, value in other.globals.items() if name != "lipsum"}
        made.finalize = made.shown
        made.cache = None
        return made

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator, once its result is known to be small."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS and operator != "%":
                _charge(MAX_VALUE + 1)
        elif operator == "*":
            _charge(max(_times(left, right), _times(right, left)))
        elif operator == "%":
            _check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "+" and isinstance(left, (str, bytes, list, tuple)):
            _charge(_size(left) + _size(right) if isinstance(left, (str, bytes)) else 8 * (len(left) + len(right)))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call an object, once its result is known to be small."""
        method = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, (str, bytes)):
            _check_method(owner, name, args, kwargs)
        elif name in ("to_bytes", "strftime_now"):
            _check_format(args[0] if args else "", ())
            _charge(max((abs(value) for value in (*args, *kwargs.values()) if isinstance(value, int)), default=0))
        return _counted(super().call(__context, __obj, *args, **kwargs))

    def join_texts(self, values: Iterable[Any]) -> str:
        """Compute `~`."""
        values = tuple(values)
        _charge(_size(values))
        return "".join(map(str, values))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join the pieces of an output."""
        found = []
        for piece in pieces:
            _charge(len(piece) * (1 if piece.isascii() else 4) + _NODE_BYTES)
            found.append(piece)
        return "".join(found)

    @staticmethod
    def shown(value: Any) -> Any:
        """Count a value that is put out; all but texts are made texts."""
        if isinstance(value, (list, tuple, dict, set, Namespace)):
            _charge(_size(value))
        return value


@lru_cache(maxsize=1)
def _use_bounded_compiler() -> None:
    """Replace transformers' compiler by the bounded one."""
    from transformers.utils import chat_template_utils as library

    # Of an empty template: to compile one computes what is constant in it.
    theirs = library._compile_jinja_template("").environment

    @lru_cache(maxsize=64)
    def compile_bounded(template: str) -> Any:
        return BoundedEnvironment.like(theirs).from_string(template)

    library._compile_jinja_template = compile_bounded
