"""JSON schemas as grammars: a grammar allows exactly the texts that fit the schema.

Texts are drawn from a grammar by a walk over its masks, one token a byte; `jsonschema` and pydantic are the judges.
"""

from __future__ import annotations

import itertools
import json
import operator
import random
import re
import time
from fractions import Fraction

import pytest
from jsonschema import Draft202012Validator

from outrider import InvalidRequestError, StructuredOutputsParams
from outrider.platform.core.constraint_check import CHECKER
from outrider.platform.core.json_schema import served
from outrider.platform.core.structured_outputs import MAX_CONSTRAINT_CHARS

from ...grammar_walk import accepts, compiled, draw, drawn, make_grammar_text


def check_valid(schema, seed=0, count=30):
    judge = Draft202012Validator(schema)
    for text in drawn(schema, seed, count):
        assert judge.is_valid(json.loads(text)), text


# --- bounds ---

EDGES = [-2, -0.5, 0, 0.05, 0.5, 2, 2.5]


def exact(value):
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


RULES = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
    "multipleOf": lambda value, step: (value / step).denominator == 1,
}


def make_judge(schema):
    """Function that returns True for a number that fits the schema."""
    rules = [(RULES[key], exact(bound)) for key, bound in schema.items() if key != "type"]
    is_integer = schema["type"] == "integer"
    return lambda value: (not is_integer or value.denominator == 1) and all(rule(value, b) for rule, b in rules)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize("step", [None, 3, 0.5, 0.1])
@pytest.mark.parametrize("low", [None, "minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("high", [None, "maximum", "exclusiveMaximum"])
def test_all_bounds_of_numbers(kind, step, low, high):
    rng = random.Random(f"{kind} {step} {low} {high}")
    values = sorted({Fraction(i, 20) for i in range(-240, 241)} | {Fraction(i, 40) for i in range(-80, 110)})
    for least, most in itertools.product(EDGES if low else [0], EDGES if high else [0]):
        schema = {"type": kind}
        schema |= ({low: least} if low else {}) | ({high: most} if high else {})
        schema |= {"multipleOf": step} if step else {}
        fits = make_judge(schema)
        inside = list(filter(fits, values))
        if not inside and low and high:
            with pytest.raises(AssertionError):  # of no number
                compiled(make_grammar_text(schema))
            continue
        grammar = make_grammar_text(schema)
        for text in filter(None, (draw(grammar, rng, 24) for _ in range(3))):
            if "e" not in text.lower():
                assert fits(exact(float(text)) if "." in text else Fraction(int(text))), (schema, text)
        digits = 1 if step == 0.1 or step == 0.5 else 0  # a multiple of 0.1 is written with a digit after the point
        for value in rng.sample(inside, min(3, len(inside))):
            text = f"{float(value):.{digits}f}" if value.denominator <= 10**digits and digits else repr(float(value))
            assert accepts(grammar, str(int(value)) if value.denominator == 1 else text), (schema, value)


@pytest.mark.parametrize(
    ("schema", "wrong", "right"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0", "-0", "0.0", "0.51"], ["0.001", "0.5"]),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["0", "-0", "-0.0"], ["-0.5", "-0.01"]),
        ({"type": "number", "exclusiveMinimum": 2, "maximum": 2.5}, ["2", "2.0"], ["2.5", "2.01"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-20}, ["0", "0.1"], []),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}], "type": "number"}, ["0"], ["0.25"]),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, ["0"], ["0.5"]),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}, [str(2**53)], [str(2**53 + 2)]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [str(2**63)], ["-5", str(2**63 - 1)]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["-1"], ["7", str(2**63 - 1)]),
        ({"type": "integer", "minimum": 10**18}, [str(10**18 - 1)], [str(10**18)]),
        ({"type": "number", "minimum": 0, "maximum": 1.7e308}, ["-1"], ["7.5"]),
        ({"type": ["integer", "null"], "exclusiveMinimum": 1.5}, ["1"], ["2", "null"]),
    ],
)  # fmt: skip
def test_exclusive_and_large_bounds_are_rewritten(schema, wrong, right):
    grammar = make_grammar_text(schema)
    assert [text for text in wrong if accepts(grammar, text)] == []
    assert [text for text in right if not accepts(grammar, text)] == []


@pytest.mark.parametrize("step", ["0.07", "0.28", "0.56", "0.81", "0.007", "1.15", "12.34", "0.00001"])
def test_steps_are_read_as_they_are_written(step):
    """Some are moved by a unit in the last place, or they would be rounded."""
    exact, digits = Fraction(step), len(step.partition(".")[2])
    rng = random.Random(step)
    counts = [0, 1, 2, 3, 10, *(rng.randint(4, 10**6) for _ in range(20))]
    for kind in ("number", "integer"):
        schema = {"type": kind, "multipleOf": float(step)}
        assert CHECKER.check(StructuredOutputsParams(json=schema)) == []
        grammar = make_grammar_text(schema)
        for value in (exact * count + more for count in counts for more in (0, Fraction(1, 10**digits))):
            is_whole = value.denominator == 1
            text = str(value) if is_whole else f"{float(value):.{digits}f}"
            is_right = (value / exact).denominator == 1 and (kind == "number" or is_whole)
            assert accepts(grammar, text) == is_right, text


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "integer", "minimum": 10**19}, "minimum"),
        ({"type": "number", "maximum": -1e30}, "maximum"),
        ({"const": 2**53 + 1}, "const"),
        ({"enum": [1, {"id": [2**60 + 1]}]}, "enum"),
        ('{"const": 1e999}', "const"),
        ('{"minimum": 1e999}', "minimum"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0}, "exclusiveMinimum"),
        ({"type": "number", "multipleOf": 0.53}, "multipleOf: 0.53 is not served"),
        ({"type": "number", "multipleOf": 5e-324}, "multipleOf"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "prefixItems": [{}], "items": {}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"format": "uuid"}}, "propertyNames"),
        ({"type": "string", "pattern": "^a(?!b)"}, r"pattern \^a\(\?!b\) .*look-around"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "oneOf is served if"),
    ],
)
def test_unsupported_keywords_are_refused_by_name(schema, named):
    with pytest.raises(InvalidRequestError, match=rf"(?s)^structured_outputs: .*{named}") as caught:
        CHECKER.check(StructuredOutputsParams(json=schema))
    assert not re.search("coerce|lenient|limits", caught.value.message)


# --- unions ---


def tagged(name, **properties):
    return {"type": "object", "properties": {"kind": {"const": name}, **properties}, "additionalProperties": False}


CAT, DOG = tagged("cat", lives={"type": "integer"}), tagged("dog", good={"type": "boolean"})
DEFINED = {"cat": CAT, "dog": DOG, "pet": {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}}
FISH = {"allOf": [{"$ref": "#/$defs/cat/properties"}, tagged("fish")]}


@pytest.mark.parametrize(
    "union",
    [
        {"oneOf": [CAT, DOG]},
        {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "discriminator": {"propertyName": "kind"}},
        {"oneOf": [{"$ref": "#/$defs/pet"}, tagged("fish")]},
        {"oneOf": [{"$ref": "#/$defs/pet"}, {"type": "null"}, {"type": "integer"}, {"enum": ["cat", "dog"]}]},
        {"oneOf": [{"type": ["string", "null"]}, {"type": "array", "items": {"$ref": "#/$defs/pet"}}]},
        {"oneOf": [{"const": 1}, {"enum": [2, "1", True]}, {"const": {"a": 1}}, {"enum": [{"a": 2}, None]}]},
        {"oneOf": [{"allOf": [{"$ref": "#/$defs/cat"}]}, {"$ref": "#/$defs/dog"}]},
        {"type": "object", "oneOf": [{"properties": {"k": {"const": n}}, "required": ["k"]} for n in (1, 2)]},
        {"oneOf": [{"properties": {"k": {"enum": [n]}}} for n in "ab"], "discriminator": {"propertyName": "k"}},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"oneOf": [{"properties": {"a": {"const": 1}, "k": {"const": n}}, "type": "object"} for n in (1, 2)]},
    ],
)  # fmt: skip
def test_unions_whose_branches_exclude_each_other(union):
    schema = {"$defs": DEFINED, **union}
    CHECKER.check(StructuredOutputsParams(json=schema))
    check_valid(schema)


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "number"}, {"type": "integer"}],
        [{"const": 1}, {"const": 1.0}],
        [{"type": "array", "items": {"type": "string"}}, {"type": "array"}],
        [CAT, {**CAT}],
        [CAT, {"type": "object"}],
        [{"required": ["a"]}, {"required": ["b"]}],
        [{"$ref": "#"}, {"type": "object"}],
        [{"$ref": "#/$defs/loop"}, {"type": "string"}],
    ],
)
def test_unions_that_are_not_known_to_be_disjoint_are_refused(branches):
    schema = {"$defs": {"loop": {"$ref": "#/$defs/pool"}, "pool": {"$ref": "#/$defs/loop"}}, "oneOf": branches}
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        CHECKER.check(StructuredOutputsParams(json=schema))


# --- names of properties ---


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"score": {"multipleOf": 5}}, "patternProperties": {"^score$": {"type": "integer"}}},
        {"properties": {"score": {"minimum": 0}}, "patternProperties": {"^s": {"type": "integer", "maximum": 5}}},
        {"properties": {"a": {"minimum": 2}, "b": {}}, "patternProperties": {"^[ab]$": {"enum": [1, 2, 3]}}},
        {"properties": {"a": {}, "": {}}, "patternProperties": {"^a?$": {"type": "null"}, "^c": {"type": "string"}}},
        {"additionalProperties": {"type": "integer"}, "propertyNames": {"enum": ["a", "b"]}},
        {"properties": {"a": {"type": "null"}, "c": {}}, "propertyNames": {"enum": ["a", "b"]}},
        {"additionalProperties": {"type": "integer"}, "propertyNames": {"enum": ["a", "b"]}, "minProperties": 1},
        {"additionalProperties": {"type": "integer"}, "propertyNames": {"pattern": "^x"}},
        {"additionalProperties": {"type": "integer"}, "propertyNames": {"minLength": 2, "maxLength": 3}},
        {"propertyNames": {"type": "string"}},
    ],
)
def test_names_of_properties(schema):
    closed = {"type": "object", "additionalProperties": False, **schema}
    if "propertyNames" in schema and "additionalProperties" not in schema:
        del closed["additionalProperties"]
    CHECKER.check(StructuredOutputsParams(json=closed))
    check_valid(closed)


def test_a_dictionary_of_known_names_takes_all_of_them():
    schema = {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"minimum": 3}}
    grammar = make_grammar_text(schema)
    for text in ("{}", '{"a": 3}', '{"b": 4}', '{"a": 3, "b": 4}'):
        assert accepts(grammar, text), text
    assert not any(accepts(grammar, text) for text in ('{"c": 3}', '{"a": 2}', '{"a": 3, "a": 3}'))


# --- patterns and formats ---

EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"  # zod's
DECIMALS = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": (["1", "-0.5", "+.5", "10."], ["", ".", "+", "-."]),
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$": (["1", "1.25", "-.5"], ["", ".", "1.234"]),
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,4}|(?=[\d.]{1,7}0*$)\d{0,4}\.\d{0,2}0*$)": (["1234", "1.25"], ["", "1.234", "12345"]),
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,5}|(?=[\d.]{1,6}0*$)\d*\.\d*0*$)": (["12345", "-1"], ["", "123456"]),
}
"""Patterns that pydantic 2.12 writes for `Decimal`; texts that match, and that must not."""


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        *((pattern, *texts) for pattern, texts in DECIMALS.items()),
        (r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{4,8}$", ["aB3d", "1Abc"], ["abcd", "ABCD", "a1b2"]),
        (r"^(?!\d)\w{1,4}$", ["ab", "_1"], ["1a", "9"]),
        (r"^(?![ab])[a-d]*$", ["", "ca"], ["ab", "b"]),
        (r"^(?!.*--)[a-z-]*$", ["", "a-b-c", "-a-"], ["a--b", "--"]),
        (r"^(?!.*x)[a-z]*$", ["", "abc"], ["x", "axb"]),
        (r"^(?=ab|c)[a-c]{2}$", ["ab", "ca"], ["ba", "bb"]),
    ],
)
def test_look_ahead_is_rewritten_without_look_ahead(pattern, right, wrong):
    schema = {"type": "string", "pattern": pattern}
    assert CHECKER.check(StructuredOutputsParams(json=schema)) == []
    grammar = make_grammar_text(schema)
    assert [text for text in right if not accepts(grammar, f'"{text}"')] == []
    assert [text for text in wrong if accepts(grammar, f'"{text}"')] == []
    for text in drawn(schema, 3, 40, limit=60):
        assert re.search(pattern, json.loads(text)), text


@pytest.mark.parametrize(
    ("schema", "ignored"),
    [
        ({"format": "email", "pattern": EMAIL}, []),
        ({"format": "email", "pattern": EMAIL, "minLength": 6, "maxLength": 100}, []),
        ({"format": "email", "maxLength": 100}, []),
        ({"format": "email", "pattern": r"^[^@]+@example\.com$", "maxLength": 50}, []),
        (
            {"format": "email", "pattern": r"@example\.com$", "minLength": 3, "maxLength": 50},
            ["minLength", "maxLength"],
        ),
        ({"format": "email", "pattern": r"^(?=.{3,20}$)a(?!b).*@b\.c$"}, ["pattern"]),
        ({"format": "duration", "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+D)?(T\d+H)?)$"}, ["pattern"]),
        ({"format": "uuid4"}, []),
        ({"format": "date-time", "pattern": "^2024-02-2.*Z$", "maxLength": 30}, []),
        ({"format": "password"}, ["format"]),
    ],
)
def test_formats_together_with_other_keywords(schema, ignored):
    schema = {"type": "object", "properties": {"a": {"type": "string", **schema}}, "required": ["a"]}
    found = CHECKER.check(StructuredOutputsParams(json=schema, source="response_format"))
    assert sorted(found) == sorted(f"response_format.properties.a.{keyword}" for keyword in ignored)
    kept = {key: value for key, value in schema["properties"]["a"].items() if key not in ignored}
    check_valid({"type": "object", "properties": {"a": kept}, "required": ["a"]}, count=12)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        (
            "date",
            "2024-02-29 2000-02-29 2023-02-28 0004-02-29 9999-12-31",
            "2023-02-29 1900-02-29 0000-01-01 2023-04-31",
        ),
        ("time", "23:59:59Z 00:00:00.5+01:00", "23:59:60Z 24:00:00Z 12:00Z"),
        (
            "date-time",
            "2024-02-29T10:00:00Z 2023-01-31t10:00:00.123-05:30",
            "2023-02-29T10:00:00Z 2023-01-01T10:00:60Z",
        ),
    ],
)
def test_dates_are_in_the_calendar(name, right, wrong):
    grammar = make_grammar_text({"type": "string", "format": name})
    assert [text for text in right.split() if not accepts(grammar, f'"{text}"')] == []
    assert [text for text in wrong.split() if accepts(grammar, f'"{text}"')] == []


# --- paths and cost ---


def test_paths_of_keywords_that_are_left_out():
    schema = {
        "$defs": {"tags": {"type": "array", "items": {"format": "x", "type": "string"}, "uniqueItems": True}},
        "properties": {"a": {"$ref": "#/$defs/tags"}, "b": {"anyOf": [{"$ref": "#/other/c"}, {"type": "null"}]}},
        "other": {"c": {"type": "array", "items": True, "uniqueItems": True}},
        "x-guidance": {"lenient": True},
    }
    assert served(json.dumps(schema)).ignored == [
        "$defs.tags.items.format",
        "$defs.tags.uniqueItems",
        "other.c.uniqueItems",
        "x-guidance",
    ]


def repeated(make, wrap):
    """The longest allowed schema, of parts; `make` writes part number i."""
    parts: list[str] = []
    room = MAX_CONSTRAINT_CHARS - len(wrap) - 60
    while (room := room - len(part := make(len(parts))) - 1) >= 0:
        parts.append(part)
    return wrap.replace("@", ",".join(parts))


ALL_OF_A = '{"additionalProperties":{"properties":{"x":{"minimum":0}}},"propertyNames":{"enum":[@]}}'
LARGEST = {
    "numbers": repeated(lambda i: f'"a{i}":{{"exclusiveMinimum":0,"maximum":0.5}}', '{"properties":{@}}'),
    "values": repeated(lambda i: f'{{"const":{i}}}', '{"oneOf":[@]}'),
    "tags": repeated(lambda i: f'{{"type":"object","properties":{{"k":{{"const":{i}}}}}}}', '{"oneOf":[@]}'),
    "references": repeated(
        lambda i: f'"d{i}":{{"oneOf":[{{"$ref":"#/$defs/d{i + 1}"}},{{"$ref":"#/$defs/d{i + 1}"}}]}}',
        '{"$defs":{@},"oneOf":[{"$ref":"#/$defs/d0"},{"type":"null"}]}',
    ),
    "a circle": '{"$defs":{"a":{"allOf":[{"$ref":"#/$defs/a"}]}},"oneOf":[{"$ref":"#/$defs/a"},{"$ref":"#"}]}',
    "classes": json.dumps({"pattern": "(?=a)" + "[" * 65_000}),
    "look-ahead": json.dumps({"pattern": "^" + "(?=a)" * 12_000}),
    "look-ahead within": json.dumps({"pattern": "^" + "(?=" * 15_000 + ")" * 15_000}),
    "names": repeated(lambda i: f'"n{i}"', ALL_OF_A),
    "sets": repeated(lambda i: '{"type":"array","items":{},"uniqueItems":true}', '{"anyOf":[@]}'),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_schemas_are_rewritten_in_bounded_time_and_size(name):
    text = LARGEST[name]
    assert len(text) <= MAX_CONSTRAINT_CHARS
    began = time.process_time()
    schema = served(text).schema
    assert time.process_time() - began < 5  # 0.3 s on an EPYC
    assert len(json.dumps(schema)) < 8 * MAX_CONSTRAINT_CHARS


def test_a_schema_nested_too_deeply_is_refused():
    with pytest.raises(InvalidRequestError, match="recursion"):
        CHECKER.check(StructuredOutputsParams(json='{"items":' * 6000 + "{}" + "}" * 6000))
