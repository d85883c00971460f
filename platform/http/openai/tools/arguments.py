"""Rules in Lark's syntax for the arguments of a strict tool, one property at a time.

If a call is not JSON as a whole, its schema must be an object of properties. In `qwen3_coder` each value stands
between tags, a string as it is and anything else as JSON; the schema's types decide which of them it is.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ....core.errors import InvalidRequestError
from ....core.sampling_params import quote_for_error
from ....core.structured_outputs import WHITESPACE
from .choice import moved, tool_parameters

_ROOT = frozenset("type properties required additionalProperties $defs definitions title description $schema".split())
"""Keywords of a schema whose properties can be written one by one."""
_OF_TEXT = frozenset("type title description default examples nullable minLength maxLength enum const".split())
"""Keywords of a string between tags."""
_UNIONS = ("anyOf", "oneOf")
_WITH_UNION = frozenset("type title description default examples nullable".split())
"""Keywords allowed next to the alternatives of such a string."""
_TAG_NAME = r"[^<>\"\n\/~%]+"
"""Name of a property in a tag, which is a part of a reference too."""
_MAX_REFERENCES = 8
"""Longest chain of references, and of alternatives in alternatives, that is followed for the type of a property."""
_MAX_SCHEMAS = 500
"""Schemas of a tool, alternatives of properties included, that are looked at for types: about 1 ms."""


class Tags(NamedTuple):
    """Tags around a value."""

    begin: str
    """Text before a value; %s is the name of the property."""
    end: str
    """Text after it."""
    others: tuple[str, ...]
    """Texts that a string between tags does not have, and neither has it `end`'s tag: the parser may take them for the
    end of the value."""

    lark: Callable[[str], str] = json.dumps
    """Function that writes a text in Lark's syntax, with the tokenizer's tokens in it."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All that no string has."""
        return (self.end.strip(), *self.others)


FUNCTION_TAGS = Tags("<parameter=%s>\n", "\n</parameter>", ("<parameter=", "</function>"))
"""Tags of Qwen3-Coder and Seed-OSS."""
ARGUMENT_TAGS = Tags("<arg_key>%s</arg_key>\n<arg_value>", "</arg_value>", ("<arg_key>", "</tool_call>"))
"""Tags of GLM-4.5."""
INVOKE_TAGS = Tags('<parameter name="%s">', "</parameter>", ('<parameter name="', "</invoke>"))
"""Tags of MiniMax-M2."""


def json_rule(schema: dict[str, Any]) -> str:
    """JSON of a schema."""
    return f"%json {json.dumps(schema | {'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


def property_rule(function: dict[str, Any], name: str) -> str:
    """JSON of one property of a function's arguments."""
    root = "#/$defs/arguments"
    schema = {"$ref": f"{root}/properties/{name}", "$defs": {"arguments": moved(tool_parameters(function), root)}}
    return json_rule(schema)


def _refuse(place: str, what: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"{place}: {quote_for_error(what)} cannot be held to in this model's format, in which arguments are written "
        'one by one; leave out strict, or give tool_choice "required"',
        param=place,
    )


def checked_properties(index: int, function: dict[str, Any], names: str) -> dict[str, Any]:
    """Properties of a strict tool's arguments. `names`: pattern of the names that the format can write.

    Raises:
        InvalidRequestError: arguments that are written one by one cannot have all that the schema asks for.
    """
    schema = tool_parameters(function)
    place = f"tools[{index}].function.parameters"
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    is_list = isinstance(required, list) and all(isinstance(name, str) for name in required)
    if not isinstance(properties, dict) or not is_list:
        raise InvalidRequestError(f"{place}: properties must be an object, required a list of names", param=place)
    wrong = next((key for key in schema if key not in _ROOT), None)
    if wrong is None:
        wrong = next((key for key in (*properties, *required) if not re.fullmatch(names, key)), None)
    if wrong is None and set(required) - properties.keys():
        wrong = "required"
    if wrong is not None:
        raise _refuse(place, wrong)
    return properties


def flat(schema: Any, root: dict[str, Any], steps: Iterator[int], depth: int = 0) -> dict[str, Any]:
    """A property's schema with its types in sight: references of it, and of its alternatives, are followed.

    Args:
        steps: One item for each schema that may still be looked at; the types of others stay out of sight.
    """
    if next(steps, None) is None:
        return {}
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        found: Any = root
        for part in reference.split("/")[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        schema = found | rest if isinstance(found, dict) else {}
    if not isinstance(schema, dict):
        return {}
    for union in _UNIONS:
        if isinstance(schema.get(union), list):
            if depth == _MAX_REFERENCES:
                deque(steps, 0)  # all are too many
            schema = schema | {union: [flat(option, root, steps, depth + 1) for option in schema[union]]}
    return schema


def flat_tools(tools: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    """Tools whose properties have their types in sight, for a parser that turns texts into values."""
    found = []
    for tool in tools:
        steps = iter(range(_MAX_SCHEMAS))
        parameters = tool["function"].get("parameters") or {}
        properties = parameters.get("properties")
        if isinstance(properties, dict):
            parameters = {"properties": {name: flat(schema, parameters, steps) for name, schema in properties.items()}}
            found.append({"function": {"name": tool["function"]["name"], "parameters": parameters}})
    return found


# --- values between tags ---


def tagged_arguments(index: int, function: dict[str, Any], tags: Tags) -> list[str]:
    """Rules of `args_{index}`, in the order of the schema's properties.

    Raises:
        InvalidRequestError: values between tags cannot have all that the schema of a strict tool asks for.
    """
    if not function.get("strict"):
        before, after = map(tags.lark, tags.begin.split("%s"))
        tag = f"{before} /{_TAG_NAME}/ {after}"
        return [f"args_{index}: any_{index}*", f'any_{index}: {tag} text_{index} "\\n"', _text(f"text_{index}", tags)]
    properties = checked_properties(index, function, _TAG_NAME)
    schema, steps = tool_parameters(function), iter(range(_MAX_SCHEMAS))
    rules, written = [], []
    shapes = [flat(value, schema, steps) for value in properties.values()]
    if next(steps, None) is None:
        raise _refuse(f"tools[{index}].function.parameters", f"more than {_MAX_SCHEMAS} schemas, or deeper ones")
    for number, (name, shape) in enumerate(zip(properties, shapes, strict=True)):
        one = f"value_{index}_{number}"
        place = f"tools[{index}].function.parameters.properties.{name}"
        rules += _tagged_value(one, shape, property_rule(function, name), place, tags)
        rules.append(f'tag_{one}: {tags.lark(tags.begin % name)} {one} "\\n"')
        written.append(f"tag_{one}" + ("" if name in (schema.get("required") or []) else "?"))
    return [f"args_{index}: {' '.join(written) or json.dumps('')}", *rules]


def _types(schema: dict[str, Any]) -> set[str]:
    declared = schema.get("type")
    found = set(declared if isinstance(declared, list) else [declared] if isinstance(declared, str) else [])
    found |= {kind for union in _UNIONS for option in schema.get(union) or () for kind in _types(option)}
    return found | ({"null"} if schema.get("nullable") else set())


def _pattern(text: str) -> str:
    """Pattern of a text in Lark's syntax."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def _text(rule: str, tags: Tags, least: int = 0, most: int | None = None) -> str:
    """Rule of a string between tags, of `least` to `most` characters, and of the tag that ends it."""
    marks = "|".join([_pattern(tags.end.strip()) + r"(.|\n)", *map(_pattern, tags.others)])
    count = f"{{{least},{'' if most is None else most}}}"
    if tags.lark(tags.end) != json.dumps(tags.end):  # no text has a token
        text = rf"{rule.upper()}: /(.|\n){count}/ & ~/(.|\n)*({marks})(.|\n)*/"
        return f"{text}\n{rule}: {rule.upper()} {tags.lark(tags.end)}"
    return rf"{rule}[lazy]: /(.|\n){count}{_pattern(tags.end)}/ & ~/(.|\n)*({marks})(.|\n)*/"


def _impossible(schema: dict[str, Any]) -> str | None:
    """Keyword with a value that it cannot have, of a schema whose types are in sight or of its alternatives."""
    kinds, least, most = schema.get("type", []), schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(kinds, str) and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        return "type"
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        return "enum"
    if type(least) is not int or least < 0:
        return "minLength"
    if most is not None and (type(most) is not int or most < least):
        return "maxLength"
    for union in _UNIONS:
        options = schema.get(union, ())
        if union in schema and not (isinstance(options, list) and options):
            return union
        for option in options:
            if (wrong := _impossible(option)) is not None:
                return wrong
    return None


def _tagged_value(rule: str, schema: dict[str, Any], as_json: str, place: str, tags: Tags) -> list[str]:
    """Rules of a value and of the tag that ends it."""
    if (wrong := _impossible(schema)) is not None:
        raise _refuse(place, wrong)
    types = _types(schema)
    if types and "string" not in types:
        return [f"{rule}: {as_json} {tags.lark(tags.end)}"]
    if types - {"string", "null"}:
        raise _refuse(place, "type: a string or something else")  # "12" could be either
    union = next((name for name in _UNIONS if name in schema), None)
    other = next((key for key in schema if key not in _WITH_UNION and key != union), None)
    if union is not None and other is not None:
        raise _refuse(place, other)
    rules, ways = [], []
    for number, option in enumerate([schema] if union is None else schema[union]):
        allowed = _OF_TEXT if union is None else _OF_TEXT - {"nullable"}
        wrong = next((key for key in option if key not in allowed), None)
        if wrong is not None:
            raise _refuse(place, wrong)
        if _types(option) == {"null"}:
            continue
        words = option.get("enum") if "enum" in option else [option["const"]] if "const" in option else None
        if words is None:
            ways.append(f"{rule}_text_{number}")
            rules.append(_text(ways[-1], tags, option.get("minLength", 0), option.get("maxLength")))
        elif not all(
            isinstance(word, str) and not any(mark in word for mark in tags.marks)
            for word in words
            if word is not None or "null" not in types
        ):
            raise _refuse(place, "enum" if "enum" in option else "const")
        else:
            ways += [f"{json.dumps(word)} {tags.lark(tags.end)}" for word in words if word is not None]
    if "null" in types:
        ways.append(f'"null" {tags.lark(tags.end)}')
    return [f"{rule}: {' | '.join(ways)}", *rules]
