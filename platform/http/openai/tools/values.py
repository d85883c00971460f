"""Values of arguments that a format writes as plain text: their types are those of the function's schema."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import regex

from .scanner import Kind, Lexeme, StringForm

_NUMBER = regex.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", regex.ASCII)
_CONSTANTS: dict[str, dict[str, bool | None]] = {
    "boolean": {"true": True, "false": False, "1": True, "0": False},
    "null": {"null": None, "none": None},
}
_TYPES = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
_MAX_LITERAL = 65_536
"""Longest text in characters that is read as a literal of Python: the parser needs about 100 times its memory."""


class TaggedForm(NamedTuple):
    """Form of calls whose values are between tags. A value ends at the first tag after which the call continues or
    ends."""

    mark: str
    """Text in the pattern of a response template by which the form is known."""
    value: StringForm
    in_lines: bool = False
    """True: a line break between a tag and a value is not a part of the value."""


def _tagged(mark: str, begin: str, end: str, behind: str, *, in_lines: bool = False) -> TaggedForm:
    """Form by patterns of the tags around a value, and of what may follow it."""
    value = StringForm("<", regex.compile(begin), regex.compile(rf"{end}(?=\s*(?:{behind}))"))
    return TaggedForm(mark, value, in_lines)


TAGGED_FORMS = (
    _tagged(
        "<parameter=",
        r"<parameter=(?P<key>[^>\n]+)>",
        "</parameter>",
        "<parameter=|</function>|</(?:seed:)?tool_call>",
        in_lines=True,
    ),
    _tagged(
        "<arg_key>", r"<arg_key>(?P<key>[^<>\n]+)</arg_key>\s*<arg_value>", "</arg_value>", "<arg_key>|</tool_call>"
    ),
    _tagged(
        '<parameter name="', r'<parameter name="(?P<key>[^">\n]+)">', "</parameter>", '<parameter name="|</invoke>'
    ),
    _tagged(
        '<｜DSML｜parameter name="',
        r'<｜DSML｜parameter name="(?P<key>[^">\n]+)"(?: string="(?:true|(?P<is_json>false))")?>',
        "</｜DSML｜parameter>",
        '<｜DSML｜parameter name="|</｜DSML｜invoke>',
    ),
)
"""Forms of Qwen3-Coder, GLM-4.5, MiniMax-M2 and DeepSeek-V3.2."""


def tagged_form(pattern: str) -> TaggedForm | None:
    """Form of the calls that a `tag_pattern` describes; None: it is none of `TAGGED_FORMS`."""
    return next((form for form in TAGGED_FORMS if form.mark in pattern), None)


def tagged_calls(name: str, lexemes: Sequence[Lexeme], form: TaggedForm) -> list[dict[str, Any]]:
    """The call whose values are between tags; none if there is other text, or a parameter twice."""
    arguments: dict[str, Any] = {}
    is_twice = is_json = False
    outside, key, value = "", "", ""
    for kind, text, match in lexemes:
        if kind is Kind.OPEN:
            key, value = match["key"], ""
            is_json = match.groupdict().get("is_json") is not None
            is_twice |= key in arguments
        elif kind is Kind.TEXT:
            value += text
        elif kind is Kind.CLOSE:
            value = value.removeprefix("\n").removesuffix("\n") if form.in_lines else value
            arguments[key] = _from_json(value) if is_json else value
        else:
            outside += text
    if is_twice or outside.strip() not in ("", "</function>"):
        return []
    return [{"name": name, "arguments": arguments}]


def _from_json(text: str) -> Any:
    """Value of a JSON text; the text itself if it is none, or if a number in it is not finite."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # 1e999 is infinite, too
    except (ValueError, RecursionError):
        return text
    return value


def properties_by_function(tools: Iterable[dict[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Schemas of each function's arguments."""
    return {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in tools}


def with_types(function: dict[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose texts are values of the types that the schema says."""
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):
        return function
    typed = {
        name: typed_value(value, properties.get(name)) if isinstance(value, str) else value
        for name, value in arguments.items()
    }
    return {**function, "arguments": typed}


def typed_value(text: str, schema: Any) -> Any:
    """The value that a text stands for; the text itself if the schema allows no other value that it may be."""
    if not isinstance(schema, dict):
        return text
    for value in _listed(schema):
        if value == text or (not isinstance(value, str) and text.strip() in (json.dumps(value), repr(value))):
            return value
    for name in _types(schema):
        found, value = _cast(text, name)
        if found:
            return value
    return text


def _options(schema: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """The schema and its alternatives."""
    yield schema
    for union in ("anyOf", "oneOf"):
        options = schema.get(union)
        for option in options if isinstance(options, list) else ():
            if isinstance(option, dict):
                yield from _options(option)


def _listed(schema: dict[str, Any]) -> Iterable[Any]:
    """Values that the schema lists."""
    for option in _options(schema):
        yield from option["enum"] if isinstance(option.get("enum"), list) else ()
        yield from [option["const"]] if "const" in option else ()


def _types(schema: dict[str, Any]) -> Iterable[str]:
    """Types that the schema has, or that the values have which it lists."""
    for option in _options(schema):
        declared = option.get("type")
        if declared is None:
            yield from (_TYPES.get(type(value), "") for value in _listed(option))
        for name in declared if isinstance(declared, list) else [declared]:
            if isinstance(name, str):
                yield name
        if option.get("nullable"):
            yield "null"


def _cast(text: str, name: str) -> tuple[bool, Any]:
    """Result of reading a text as a value of a type: whether it is one, and the value."""
    stripped = text.strip()
    if name in _CONSTANTS:
        constants, word = _CONSTANTS[name], stripped.lower()
        return word in constants, constants.get(word)
    if name in ("integer", "number"):
        return _number(stripped, name) if _NUMBER.fullmatch(stripped) else (False, None)
    if name in ("object", "array"):
        value = _container(stripped)
        return isinstance(value, dict if name == "object" else list), value
    return False, None


def _number(text: str, name: str) -> tuple[bool, Any]:
    try:
        return True, int(text)
    except ValueError:  # a fraction, an exponent, or more digits than Python reads
        value = float(text)
    if value in (float("inf"), float("-inf")) or (name == "integer" and not value.is_integer()):
        return False, None
    return True, int(value) if name == "integer" or (value.is_integer() and "." not in text) else value


def _container(text: str) -> Any:
    """Object or array as JSON, or as a literal of Python."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    if len(text) > _MAX_LITERAL:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return list(value) if isinstance(value, tuple) else value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
