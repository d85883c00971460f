"""Grammars of chat answers: allowed tokens, one by one, with marks as text and as tokens."""

from __future__ import annotations

import copy
import json

import pytest

from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_model_path
from outrider.platform.core.constraint_check import CHECKER
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.structured_outputs import StructuredOutputsParams, parser_limits
from outrider.platform.http.openai.tools.arguments import flat_tools
from outrider.platform.http.openai.tools.choice import ToolChoice
from outrider.platform.http.openai.tools.formats import FORMATS
from outrider.platform.http.openai.tools.grammar import answer_constraint
from outrider.platform.http.openai.tools.parser import FormatParser

from .format_calls import BEFORE, CALLS, MARKS, TAGS, call

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = ToolChoice(
    (
        {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
        {"type": "function", "function": {"name": "other"}},
    )
)
JSON = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.fixture(scope="module")
def tokenizer_with():
    plain = load_tokenizer(demo_model_path())

    def make(marks):
        tokenizer = copy.deepcopy(plain)
        tokenizer.add_tokens(marks)
        return tokenizer

    return make


def accepts(tokenizer, constraint, *texts):
    """Which of the texts the grammar lets through to their end."""
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    CHECKER.check(constraint)
    vocabulary = from_tokenizer(tokenizer, len(tokenizer))
    matcher = LLMatcher(vocabulary, constraint.grammar_text(), log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    found = []
    for text in texts:
        ids, copied = tokenizer.encode(text, add_special_tokens=False), matcher.deep_copy()
        found.append(copied.try_consume_tokens(ids) == len(ids) and copied.is_accepting())
    return found


def find_format(kind):
    return FORMATS[kind.split()[-1]]


@pytest.mark.parametrize(
    ("kind", "as_tokens"),
    [
        (kind, as_tokens)
        for kind in CALLS
        for as_tokens in (True, False)
        if as_tokens or kind not in ("openai", "mistral")
    ],
)
def test_strict_calls_among_free_text(kind, as_tokens, tokenizer_with):
    tokenizer = tokenizer_with(MARKS[kind] if as_tokens else [])
    tokenizer.eos_token = "<|pad|>"  # the end of harmony's answers is not <|end|>
    constraint = answer_constraint(None, TOOLS, find_format(kind), tokenizer, "")
    other = call(kind, "other", '{"x": [1]}')
    right = [BEFORE.get(kind, "") + "Hello [1], f(2)", call(kind), other]
    if kind == "openai":
        right.append("<|channel|>analysis<|message|>so<|end|><|start|>assistant" + call(kind))
    else:
        right.append("I look. " + (call(kind)[:-1] + ", " + other[1:] if kind == "pythonic" else call(kind) + other))
    misfit = "{}" if kind in TAGS else '{"city": 1}'  # there it is the text "1"
    wrong = [call(kind, arguments='{"town": "Rome"}'), call(kind, arguments=misfit), call(kind, "third", "{}")]
    if kind != "openai":
        wrong += ["So: " + call(kind, "third", "{}"), "So: " + call(kind, arguments=misfit)]
    if kind == "qwen3_coder":  # the parser takes it for a call
        wrong += [prefix + call(kind).removeprefix("<tool_call>\n") for prefix in ("", "So: ", call(kind))]
    assert accepts(tokenizer, constraint, *right, *wrong) == [True] * len(right) + [False] * len(wrong)
    for text in right[1:]:
        parser = FormatParser(find_format(kind), "", with_calls=True)
        parser.feed(text)
        parser.finish()
        assert parser.has_calls


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("hermes", {}),
        ("qwen3_coder", {"content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>"}}),
        ("gemma4", {"open_pattern": r"<\|tool_call>call:(?P<name>\w+)"}),
    ],
)
def test_a_tokenizers_own_template_of_a_known_format(kind, change, tokenizer_with):
    own = copy.deepcopy(FORMATS[kind])
    own["fields"]["tool_calls"] |= change
    constraint = answer_constraint(None, TOOLS, own, tokenizer_with(MARKS[kind]), "")
    assert accepts(tokenizer_with(MARKS[kind]), constraint, call(kind), call(kind, arguments='{"town": 1}')) == [
        True,
        False,
    ]
    own["fields"]["tool_calls"]["close"] = "<end>"
    assert answer_constraint(None, TOOLS, own, tokenizer_with(MARKS[kind]), "") is None


def test_reasoning_whose_mark_begins_with_a_token(tokenizer_with):
    constraint = answer_constraint(None, TOOLS, FORMATS["gemma4"], tokenizer_with(MARKS["gemma4"]), "")
    texts = [
        "<|channel>thought\nHm.<channel|>" + call("gemma4"),
        "<|channel>thought\nHm.<channel|>Hello",
        "<|channel>so",
    ]
    assert accepts(tokenizer_with(MARKS["gemma4"]), constraint, *texts) == [True, True, False]


def test_other_prefixes_of_calls_are_no_text(tokenizer_with):
    """A call is held to the schema in every form that the parser reads."""
    constraint = answer_constraint(None, TOOLS, FORMATS["llama3_json"], tokenizer_with(MARKS["llama3_json"]), "")
    wrong = '"name":"weather","parameters":{"town":1}}'
    texts = ["{" + wrong, "{ " + wrong, "So: {" + wrong, '{"type": "function", ' + wrong, "<|python_tag|>{" + wrong]
    right = ['The object {"town": 1} is no call.', 'So: {"name": "weather", "parameters": {"city": "Rome"}}']
    assert accepts(tokenizer_with(MARKS["llama3_json"]), constraint, *texts, *right) == [False] * 5 + [True] * 2


@pytest.mark.parametrize("broken", [{"properties": ["a"]}, {"properties": 3}, {"required": 3}, {"required": [1]}])
def test_a_schema_that_is_none_is_refused(broken, tokenizer_with):
    function = {"name": "f", "parameters": {"type": "object"} | broken, "strict": True}
    tools = ToolChoice(({"type": "function", "function": function},), parallel=False)
    with pytest.raises(InvalidRequestError, match="parameters"):
        answer_constraint(None, tools, FORMATS["pythonic"], tokenizer_with([]), "")


ORDER = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 0, "maximum": 14},
        "units": {"type": ["array", "null"], "items": {"enum": ["c", "f"]}, "maxItems": 2},
        "now": {"type": "boolean"},
    },
    "required": ["days", "now"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 6}},
}


@pytest.mark.parametrize("kind", CALLS)
def test_whatever_is_sampled_fits_the_schema(kind, tokenizer_with):
    """Tokens at random among those that the mask allows, from the start of the arguments."""
    import jsonschema
    import numpy
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

    tokenizer = tokenizer_with(MARKS[kind])
    tokenizer.eos_token = "<|pad|>"
    order = {"type": "function", "function": {"name": "order", "parameters": ORDER, "strict": True}}
    tools = ToolChoice((order,), parallel=False)
    constraint = answer_constraint(None, tools, find_format(kind), tokenizer, "")
    matcher = LLMatcher(from_tokenizer(tokenizer, len(tokenizer)), constraint.grammar_text(), limits=parser_limits())
    begin = (CALLS[kind] % ("order", "@")).split("@")[0]
    bits, random = allocate_token_bitmask(1, len(tokenizer)), numpy.random.default_rng(0)
    for _ in range(12):
        walk, ids = matcher.deep_copy(), tokenizer.encode(begin, add_special_tokens=False)
        assert walk.try_consume_tokens(ids) == len(ids)
        while not walk.is_accepting():
            fill_next_token_bitmask(walk, bits)
            allowed = numpy.flatnonzero(numpy.unpackbits(bits.view(numpy.uint8), bitorder="little")[: len(tokenizer)])
            ids.append(int(random.choice(allowed)))
            assert walk.consume_token(ids[-1])
        parser = FormatParser(find_format(kind), "", with_calls=True, tools=flat_tools(tools.tools))
        deltas = parser.feed(tokenizer.decode(ids)) + parser.finish()
        function = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        assert function[0]["name"] == "order"
        jsonschema.validate(json.loads("".join(part["arguments"] for part in function)), ORDER)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"anyOf": [CITY]}, "anyOf"),
        ({"type": "object", "properties": {"a b": {}}}, "a b"),
        ({"type": "object", "required": ["x"]}, "required"),
    ],
)
def test_a_schema_that_keyword_arguments_cannot_say(schema, named, tokenizer_with):
    tools = ToolChoice(({"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}},))
    with pytest.raises(InvalidRequestError, match=named) as caught:
        answer_constraint(None, tools, FORMATS["pythonic"], tokenizer_with([]), "")
    assert caught.value.param == "tools[0].function.parameters"


TAGGED = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 2, "maxLength": 9},
        "unit": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/place"},
        "size": {"type": ["integer", "null"], "maximum": 12},
        "note": {"type": ["string", "null"]},
    },
    "required": ["text"],
    "$defs": {"unit": {"enum": ["c", "f"], "type": "string"}, "place": {"type": "array", "items": {"type": "number"}}},
}


def tagged(**values):
    return call("qwen3_coder", "f", json.dumps(values))


def test_values_between_tags(tokenizer_with):
    """Strings are written as they are, other values as JSON, and the parser reads them by the schema's types."""
    tokenizer = tokenizer_with(MARKS["qwen3_coder"])
    tool = {"type": "function", "function": {"name": "f", "parameters": TAGGED, "strict": True}}
    tools = ToolChoice((tool,), parallel=False)
    constraint = answer_constraint(None, tools, FORMATS["qwen3_coder"], tokenizer, "")
    right = [
        {"text": '1 "\n}', "unit": "c", "place": [1.5, 2], "size": 12, "note": "\nsee <b>\n"},
        {"text": "ab", "unit": None, "size": None, "note": None},
    ]
    wrong = [{"unit": "c"}, {"text": "ab", "unit": "k"}, {"text": "ab", "size": 13}, {"text": "a"}, {"text": "a" * 10}]
    wrong += [{"text": "ab", "place": ["x"]}, {"text": "ab", "more": 1}, {"text": "a</parameter>"}]
    texts = [tagged(**values) for values in (*right, *wrong)]
    assert accepts(tokenizer, constraint, *texts) == [True] * len(right) + [False] * len(wrong)
    for values, text in zip(right, texts, strict=False):
        parser = FormatParser(FORMATS["qwen3_coder"], "", with_calls=True, tools=flat_tools(tools.tools))
        deltas = parser.feed(text) + parser.finish()
        found = "".join(each["function"]["arguments"] for delta in deltas for each in delta["tool_calls"])
        assert json.loads(found) == values


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "string", "pattern": "^a$"}, "pattern"),
        ({"type": ["string", "integer"]}, "type"),
        ({"enum": ["a", 1]}, "enum"),
        ({"const": "</parameter>"}, "const"),
        ({"type": "string", "maxLength": "9"}, "maxLength"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "maxLength"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"type": [{}]}, "type"),
        ({"anyOf": "abc"}, "anyOf"),
        ({"oneOf": []}, "oneOf"),
        ({"anyOf": [{"anyOf": [{"type": "string"}]}]}, "anyOf"),
        ({"enum": []}, "enum"),
        ({"anyOf": [{"type": "string"}], "oneOf": [{"type": "string"}]}, "oneOf"),
        ({"anyOf": [{"type": "string"}], "maxLength": 2}, "maxLength"),
        ({"not": {}}, "not"),
    ],
)
def test_a_schema_that_values_between_tags_cannot_have(schema, named, tokenizer_with):
    function = {"name": "f", "parameters": {"properties": {"a": schema}}, "strict": True}
    tools = ToolChoice(({"type": "function", "function": function},))
    with pytest.raises(InvalidRequestError, match=named) as caught:
        answer_constraint(None, tools, FORMATS["qwen3_coder"], tokenizer_with([]), "")
    assert caught.value.param == "tools[0].function.parameters.properties.a"


def test_a_value_that_is_no_string_may_have_alternatives_in_alternatives(tokenizer_with):
    objects = {"oneOf": [{"type": "object", "properties": {"n": {"type": "integer"}}}, {"type": "array"}]}
    parameters = {"properties": {"a": {"anyOf": [objects, {"type": "null"}]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    tokenizer = tokenizer_with(MARKS["qwen3_coder"])
    constraint = answer_constraint(None, ToolChoice((tool,), parallel=False), FORMATS["qwen3_coder"], tokenizer, "")
    assert accepts(tokenizer, constraint, tagged(a={"n": 1}), tagged(a="x")) == [True, False]


def test_a_strict_schema_with_too_many_alternatives_is_refused(tokenizer_with):
    schema = {"anyOf": [{"const": f"c{number}"} for number in range(600)]}
    function = {"name": "f", "parameters": {"properties": {"a": schema}}, "strict": True}
    with pytest.raises(InvalidRequestError, match="more than 500 schemas"):
        answer_constraint(
            None,
            ToolChoice(({"type": "function", "function": function},)),
            FORMATS["qwen3_coder"],
            tokenizer_with([]),
            "",
        )


def test_references_that_multiply_end():
    """A schema of which each reference has a hundred of itself is looked at a bounded number of times."""
    parameters = {"properties": {"x": {"anyOf": [{"$ref": "#/properties/x"}] * 100}}}
    [tool] = flat_tools(({"function": {"name": "f", "parameters": parameters}},))
    schemas, count = [tool["function"]["parameters"]["properties"]["x"]], 0
    while schemas:
        schema = schemas.pop()
        schemas += schema.get("anyOf", [])
        count += "$ref" not in schema
    assert count <= 500 + 9 * 100


@pytest.mark.parametrize("kind", ["hermes", "deepseek_v3", "mistral", "openai", "qwen3_coder"])
def test_a_form_or_calls(kind, tokenizer_with):
    tokenizer, begin = tokenizer_with(MARKS[kind]), BEFORE.get(kind, "")
    tokenizer.eos_token = "<|pad|>"
    constraint = answer_constraint(JSON, TOOLS, find_format(kind), tokenizer, "")
    texts, wrong = [begin + '{"a": 1}', call(kind)], [begin + "Hello", call(kind, arguments="{}")]
    one = answer_constraint(JSON, TOOLS._replace(parallel=False), find_format(kind), tokenizer, "")
    if kind != "openai":
        think = ("[THINK]", "[/THINK]") if kind == "mistral" else ("<think>", "</think>")
        texts += [call(kind) + "\n" + call(kind, "other", "{}"), f'{think[0]}{{"a{think[1]}\n{call(kind)}']
        wrong.append(call(kind) + '{"a": 1}')
        assert accepts(tokenizer, one, call(kind), call(kind) * 2) == [True, False]
    assert accepts(tokenizer, constraint, *texts, *wrong) == [True] * len(texts) + [False] * len(wrong)


@pytest.mark.parametrize("as_tokens", [True, False])
def test_reasoning_before_a_form(as_tokens, tokenizer_with):
    tokenizer = tokenizer_with(MARKS["hermes"] if as_tokens else [])
    texts = ['<think>so {"b": </think>\n\n{"a": 1}', 'so {"b": </think>\n\n{"a": 1}', '{"a": 1}', "<think>so"]
    chosen = ToolChoice()
    may = answer_constraint(JSON, chosen, FORMATS["hermes"], tokenizer, "")
    assert accepts(tokenizer, may, *texts) == [as_tokens, False, True, False]
    begun = answer_constraint(JSON, chosen, FORMATS["hermes"], tokenizer, "<think>")
    assert accepts(tokenizer, begun, *texts[1:]) == [True, False, False]


def test_channels_of_harmony(tokenizer_with):
    tokenizer = tokenizer_with(MARKS["openai"])
    tokenizer.eos_token = "<|pad|>"  # the end of its answers is not <|end|>
    final = '<|channel|>final <|constrain|>json<|message|>{"a": 1}'
    texts = [f"<|channel|>analysis<|message|>so<|end|><|start|>assistant{final}", final, '{"a": 1}']
    constraint = answer_constraint(JSON, ToolChoice(), FORMATS["openai"], tokenizer, "")
    assert accepts(tokenizer, constraint, *texts) == [True, True, False]


def test_constraints_of_the_request_are_kept_without_calls_in_text(tokenizer_with):
    tokenizer = tokenizer_with([])
    assert answer_constraint(JSON, ToolChoice(), None, tokenizer, "") is JSON
    assert answer_constraint(None, ToolChoice(TOOLS.tools[1:]), FORMATS["hermes"], tokenizer, "") is None
    forced = TOOLS._replace(is_forced=True, name="weather")
    asked = forced.constraint()
    assert answer_constraint(asked, forced, FORMATS["hermes"], tokenizer, "") is asked
    assert json.loads(asked.json) == CITY
