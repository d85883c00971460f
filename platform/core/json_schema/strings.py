"""Patterns and formats of strings.

Regular expressions of `llguidance` have no look-around, which one automaton cannot follow. Its most common uses, by
pydantic, zod and people, can be expressed without: `^(?=a)b` is a string that matches both `^a` and `^b`, and
`^(?![.])` one that begins with another character.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from .document import Document

FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split())
"""Formats that `llguidance` enforces; "unknown" is any text."""
_UNDECIDED = "Unable to determine if regex is empty"
"""Prefix of the error of `llguidance` for a string whose keywords together are too complex."""
_LEAP = r"(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    r"(?:(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|"
    r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|"
    rf"(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_CALENDAR = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}
"""Dates that are in the calendar, without leap seconds: those of `llguidance` have February 29 in each year, the year 0
and a second 60 in every minute, which no program accepts."""
_UUID = re.compile(r"uuid([1-8])")
_ATOM = r"(?:\[\^?(?:[^\]\\]|\\.)+\]|\\[dDwWsS]|\\[^\w\s]|[^\\^$.|?*+()\[\]{}])"
_NOT_FIRST = re.compile(rf"\^?({_ATOM})")
_NOT_ALL = re.compile(r"\^?(\[\^?(?:[^\]\\]|\\.)+\])\*\$")
_NOT_WITHIN = re.compile(rf"\^?(?:\.\*|\[\\s\\S\]\*)({_ATOM})\1?")
_LOOK = re.compile(r"\(\?<?[=!]")
_QUANTIFIER = re.compile(r"[*+?]\??|\{\d+,?\d*\}\??")
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*(?:\]|\\?\Z)|.", re.DOTALL)
"""An escaped character, a class, which may lack its end, or another character."""
_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*\(\?:\\d\{0,(\d{1,3})\}\|"
    r"\(\?=\[\\d\.\]\{1,\d{1,3}\}0\*\$\)(?:\\d\{0,\d{1,3}\}\\\.\\d\{0,(\d{1,3})\}|\\d\*\\\.\\d\*)0\*\$\)"
)
"""Pattern of pydantic 2.12 for a `Decimal` with `max_digits`: digits before the point, or in all, and after it."""


def rewrite_pattern(schema: dict[str, Any]) -> list[str]:
    """Replace a pattern with look-around in place; return ["pattern"] if a part of it is left out.

    It is left out only if a served format constrains the string, too. Else the pattern stays, and is refused by name.
    """
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or not (groups := _look_around(pattern)):
        return []
    if (known := _DECIMAL.fullmatch(pattern)) is not None:
        schema["pattern"] = _decimal(int(known[1]), int(known[2]) if known[2] else None)
        return []
    found = _split(pattern, groups)
    if not found.is_exact and schema.get("format") not in FORMATS - {"unknown"}:
        return []
    schema["pattern"] = found.patterns[0]
    _add(schema, found.patterns[1:])
    return [] if found.is_exact else ["pattern"]


def rewrite_format(schema: dict[str, Any]) -> list[str]:
    """Replace a format in place; return ["format"] if it is left out, which the standard allows."""
    name = schema.get("format")
    if not isinstance(name, str) or name in FORMATS - _CALENDAR.keys():
        return []
    del schema["format"]
    if name in _CALENDAR:
        _add(schema, [_CALENDAR[name]])
        return []
    if (uuid := _UUID.fullmatch(name)) is not None:
        schema["format"] = "uuid"
        _add(schema, [f"^.{{14}}{uuid[1]}.{{4}}[89abAB]"])
        return []
    types = schema.get("type", "string")
    return ["format"] if types == "string" or (isinstance(types, list) and "string" in types) else []


def rewrite_lengths(schema: dict[str, Any], document: Document) -> list[str]:
    """Leave out in place, and return, the lengths of a string whose pattern and format are too complex with them."""
    lengths: list[str] = [keyword for keyword in ("minLength", "maxLength") if keyword in schema]
    if document.problem_of is None or not lengths or "format" not in schema or not {"pattern", "allOf"} & schema.keys():
        return []
    tried = {keyword: schema[keyword] for keyword in ("pattern", "format", *lengths) if keyword in schema}
    also = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    tried |= {
        "type": "string",
        "allOf": [part for part in also if isinstance(part, dict) and part.keys() == {"pattern"}],
    }
    if _UNDECIDED not in document.problem_of(tried):
        return []
    for keyword in lengths:
        del schema[keyword]
    return lengths


def _add(schema: dict[str, Any], patterns: list[str]) -> None:
    """Add patterns that a string must match too."""
    if patterns:
        also = schema.get("allOf")
        schema["allOf"] = [*(also if isinstance(also, list) else ()), *({"pattern": pattern} for pattern in patterns)]


def _decimal(whole: int, places: int | None) -> str:
    """Pattern for decimal numbers of a number of digits, `places` of them after the point."""
    if places is not None:
        return (
            rf"^[+-]?(?:\d{{1,{whole}}}(?:\.\d{{0,{places}}})?{'' if whole else '{0}'}|0*\.\d{{1,{max(places, 1)}}})$"
        )
    return rf"^[+-]?\d{{1,{max(whole, 1)}}}$"


class _Patterns(NamedTuple):
    patterns: list[str]
    """Patterns that a string must match all of; the first one is the rest of the given one."""
    is_exact: bool
    """False: a look-around is left out."""


def _split(pattern: str, groups: list[tuple[int, int]]) -> _Patterns:
    """A pattern without its look-around. `groups`: see `_look_around`."""
    others: list[str] = []
    rest, end, is_exact = "", 0, True
    is_one_way = pattern.startswith("^") and "|" not in _outside(pattern)
    for start, after in groups:
        if start < end:
            continue  # within the one before
        is_first = not rest and pattern[end:start] in ("^", "") and is_one_way
        other = _from_look_ahead(pattern[start:after]) if is_first else None
        if other is None:
            is_exact = False
        else:
            others.append(other)
        rest += "" if is_first else pattern[end:start]
        quantifier = _QUANTIFIER.match(pattern, after)
        is_exact &= quantifier is None
        end = after if quantifier is None else quantifier.end()
    head = "^" if pattern.startswith("^") and not rest.startswith("^") else ""
    return _Patterns([head + rest + pattern[end:], *others], is_exact)


def _from_look_ahead(group: str) -> str | None:
    """Pattern for strings at whose start a look-ahead matches; None if it cannot be expressed."""
    kind, body = group[:3], group[3:-1]
    if _look_around(body):
        return None
    if kind == "(?=":
        return f"^(?:{body.removeprefix('^')})" if "|" not in body else f"^(?:{body})"
    if kind != "(?!":
        return None
    if (found := _NOT_FIRST.fullmatch(body)) is not None:
        return rf"^(?:{_negated(found[1])}[\s\S]*)?$"
    if (found := _NOT_ALL.fullmatch(body)) is not None:
        return _negated(found[1])
    if (found := _NOT_WITHIN.fullmatch(body)) is not None:
        atom, other = found[1], _negated(found[1])
        is_twice = body.endswith(atom + atom)
        return f"^{atom}?(?:{other}{atom}?)*$" if is_twice else f"^{other}*$"
    return None


def _negated(atom: str) -> str:
    """Class of the characters that one of `_ATOM` does not match."""
    if atom.startswith("[^"):
        return "[" + atom[2:]
    return "[^" + atom[1:] if atom.startswith("[") else f"[^{atom}]"


def _look_around(pattern: str) -> list[tuple[int, int]]:
    """Start and end of each look-ahead and look-behind, by start."""
    found, opened = [], []
    for index, character in _syntax(pattern):
        if character == "(":
            opened.append(index)
        elif character == ")" and opened:
            start = opened.pop()
            if _LOOK.match(pattern, start):
                found.append((start, index + 1))
    return sorted(found)


def _outside(pattern: str) -> str:
    """Characters of a pattern outside of all groups."""
    depth, outside = 0, []
    for _, character in _syntax(pattern):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            outside.append(character)
    return "".join(outside)


def _syntax(pattern: str) -> list[tuple[int, str]]:
    """Characters with a meaning: outside of classes, and not after a backslash."""
    return [(found.start(), found[0]) for found in _TOKEN.finditer(pattern) if len(found[0]) == 1]
