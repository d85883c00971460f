"""Grammars of chat answers: reasoning before the part with a form, and calls of strict tools among free text.

A mark that is one token of its own (`<think>`) stands in a grammar as that token, any other one as text.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any, NamedTuple

from ....core.structured_outputs import WHITESPACE, StructuredOutputsParams
from .choice import ToolChoice, parameters_of
from .formats import FORMATS

_TEXT = r"/(.|\n)*/"


class CallForm(NamedTuple):
    """Text of a call in a format that writes arguments as JSON."""

    trigger: str
    """Text that begins a call, and nothing else."""
    begin: str
    """Text between it and the arguments; %s is the name."""
    end: str
    around: tuple[str, ...] = ()
    """Tokens that may stand between calls."""


CALL_FORMS = {
    "hermes": CallForm("<tool_call>", '\n{"name": "%s", "arguments": ', "}\n</tool_call>"),
    "llama3_json": CallForm('{"name": ', '"%s", "parameters": ', "}", ("<|python_tag|>",)),
    "deepseek_v3": CallForm(
        "<｜tool▁call▁begin｜>",
        "function<｜tool▁sep｜>%s\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
}
"""Formats whose calls a grammar can hold to the schemas of strict tools."""


def answer_constraint(
    asked: StructuredOutputsParams | None,
    choice: ToolChoice,
    template: dict[str, Any] | None,
    tokenizer: Any,
    opened: str,
) -> StructuredOutputsParams | None:
    """Constraint on an answer, with what may stand before the part with a form, or instead of it.

    Args:
        asked: The form that the request asks for, or that a forced call has.
        template: Response template of the model's format, when the answer is parsed.
        opened: The mark of reasoning that the prompt ends with, or nothing.
    """
    form = next((CALL_FORMS.get(name) for name, known in FORMATS.items() if known is template), None)
    if choice.is_forced or (asked is None and not choice.has_strict):
        form = None
    if asked is not None and form is not None and form.trigger.startswith("{"):
        form = None  # JSON that may be a call, or else the answer: a lexer cannot tell them apart by their beginning
    if template is None or (asked is None and form is None):
        return asked
    marks = _Marks(tokenizer)
    head, rules = _reasoning(template, opened, marks)
    if form is not None:
        rules += _calls(form, choice, marks)
    if asked is None:
        return StructuredOutputsParams(grammar="\n".join([f"start: {head}free", *rules]), source="tools")
    if not rules:
        return asked
    body = "@body" if form is None else "(@body | calls)"
    return replace(asked, frame="\n".join([f"start: {head}{body}", *rules]))


class _Marks:
    """Marks of a tokenizer in Lark's syntax."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokens: dict[str, int] = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
        longest_first = sorted(self.tokens, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    def lark(self, text: str) -> str:
        """Sequence of tokens and texts."""
        pieces = self._pattern.split(text) if self._pattern is not None else [text]
        return " ".join(f"<[{self.tokens[p]}]>" if p in self.tokens else json.dumps(p) for p in pieces if p)

    def until(self, rule: str, mark: str) -> str:
        """Rule for any text up to the first `mark`, and it."""
        if mark in self.tokens:
            return f"{rule}: {_TEXT} {self.lark(mark)}"
        return f"{rule}[lazy]: {_TEXT} {json.dumps(mark)}"


def _reasoning(template: dict[str, Any], opened: str, marks: _Marks) -> tuple[str, list[str]]:
    """Beginning of the rule `start`, and the rules of the reasoning that the model may write first."""
    if template is FORMATS["openai"]:
        analysis = marks.lark("<|channel|>analysis<|message|>"), marks.lark("<|end|><|start|>assistant")
        final = marks.lark("<|channel|>final"), marks.lark(" <|constrain|>json"), marks.lark("<|message|>")
        rules = [f"reasoning: {analysis[0]} {_TEXT} {analysis[1]}", f"final: {final[0]} ({final[1]})? {final[2]}"]
        return ("reasoning? final ", rules) if "<|channel|>" in marks.tokens else ("", [])
    field = template["fields"].get("reasoning_content", {})
    begin, end = field.get("open"), field.get("close")
    if not isinstance(begin, str) or not isinstance(end, str) or not (opened or begin in marks.tokens):
        return "", []
    rules = [f"reasoning: {'' if opened else marks.lark(begin)} thoughts /\\s*/", marks.until("thoughts", end)]
    return ("reasoning " if opened else "reasoning? "), rules


def _calls(form: CallForm, choice: ToolChoice, marks: _Marks) -> list[str]:
    """Rules `calls`, one call or several, and `free`, text with calls in it."""
    calls = []
    for tool in choice.tools:
        function = tool["function"]
        schema = parameters_of(function) if function.get("strict") else {"type": "object"}
        schema = schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        calls.append(f"{marks.lark(form.begin % function['name'])} %json {json.dumps(schema)} {marks.lark(form.end)}")
    around = [marks.lark(mark) for mark in form.around if mark in marks.tokens]
    between = " | ".join([r"/[ \n;]+/", *around])
    first = f"({' | '.join(around)})* " if around else ""
    return [
        f"calls: {first}{marks.lark(form.trigger)} called" + (" between* (call between*)*" if choice.parallel else ""),
        f"between: {between}",
        f"free: ({' | '.join(['call', *(f'{_TEXT} {mark}' for mark in around)])})* {_TEXT}",
        "call: until_call called",
        marks.until("until_call", form.trigger),
        f"called: {' | '.join(calls)}",
    ]
