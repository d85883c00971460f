"""Grammars of chat answers: what they let through, token by token, with marks as text and as tokens."""

from __future__ import annotations

import copy
import json

import pytest

from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_model_path
from outrider.platform.core.constraint_check import CHECKER
from outrider.platform.core.structured_outputs import StructuredOutputsParams, parser_limits
from outrider.platform.http.openai.tools.choice import ToolChoice
from outrider.platform.http.openai.tools.formats import FORMATS
from outrider.platform.http.openai.tools.grammar import CALL_FORMS, answer_constraint

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
MARKS = {
    "hermes": ["<think>", "</think>", "<tool_call>", "</tool_call>"],
    "llama3_json": ["<|python_tag|>"],
    "deepseek_v3": [
        "<think>",
        "</think>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ],
    "openai": ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"],
}


@pytest.fixture(scope="module")
def tokenizer_with():
    plain = load_tokenizer(demo_model_path())

    def make(marks):
        tokenizer = copy.deepcopy(plain)
        tokenizer.add_tokens(marks)
        return tokenizer

    return make


def call(form, name="weather", arguments='{"city": "Rome"}'):
    return form.trigger + form.begin % name + arguments + form.end


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


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize("name", CALL_FORMS)
def test_strict_calls_among_free_text(name, as_tokens, tokenizer_with):
    form, tokenizer = CALL_FORMS[name], tokenizer_with(MARKS[name] if as_tokens else [])
    constraint = answer_constraint(None, TOOLS, FORMATS[name], tokenizer, "")
    right = ["Hello", call(form), "I look. " + call(form) + call(form, "other", '{"x": [1]}')]
    wrong = [call(form, arguments='{"town": "Rome"}'), "So: " + call(form, "third", "{}")]
    assert accepts(tokenizer, constraint, *right, *wrong) == [True] * 3 + [False] * 2


@pytest.mark.parametrize("name", ["hermes", "deepseek_v3"])
def test_a_form_or_calls(name, tokenizer_with):
    form, tokenizer = CALL_FORMS[name], tokenizer_with(MARKS[name])
    constraint = answer_constraint(JSON, TOOLS, FORMATS[name], tokenizer, "")
    texts = [
        '{"a": 1}',
        call(form),
        call(form) + "\n" + call(form, "other", "{}"),
        f'<think>{{"a</think>\n{call(form)}',
    ]
    wrong = ["Hello", call(form) + '{"a": 1}', call(form, arguments="{}")]
    assert accepts(tokenizer, constraint, *texts, *wrong) == [True] * 4 + [False] * 3
    one = answer_constraint(JSON, TOOLS._replace(parallel=False), FORMATS[name], tokenizer, "")
    assert accepts(tokenizer, one, call(form), call(form) * 2) == [True, False]


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


def test_nothing_is_added_where_nothing_can_stand(tokenizer_with):
    tokenizer = tokenizer_with([])
    assert answer_constraint(JSON, ToolChoice(), None, tokenizer, "") is JSON
    assert answer_constraint(None, TOOLS, FORMATS["pythonic"], tokenizer, "") is None
    assert answer_constraint(None, ToolChoice(TOOLS.tools[1:]), FORMATS["hermes"], tokenizer, "") is None
    forced = TOOLS._replace(is_forced=True, name="weather")
    asked = forced.constraint()
    assert answer_constraint(asked, forced, FORMATS["hermes"], tokenizer, "") is asked
    assert json.loads(asked.json) == CITY
