"""Grammars of chat answers: reasoning before the part with a form, and calls of strict tools among free text.

A mark that is one token of its own (`<think>`) is that token in a grammar, any other one as text.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from ....core.errors import InvalidRequestError
from ....core.json_schema import served
from ....core.structured_outputs import MAX_CONSTRAINT_CHARS, StructuredOutputsParams
from .call_forms import Marks, analysis_rule, begins_as_json, call_rules
from .choice import ToolChoice, tool_parameters
from .formats import format_name


def answer_constraint(
    asked: StructuredOutputsParams | None,
    choice: ToolChoice,
    template: dict[str, Any] | None,
    tokenizer: Any,
    opened: str,
) -> StructuredOutputsParams | None:
    """Constraint on an answer, with what is allowed before the part with a form, or instead of it.

    Args:
        asked: The form that the request asks for, or that a forced call has.
        template: Response template of the model's format, when the answer is parsed.
        opened: The mark of reasoning that the prompt ends with, or nothing.

    Raises:
        InvalidRequestError: the model's format cannot hold a strict tool's arguments to its schema.
    """
    if template is None or (asked is None and not choice.has_strict):
        return asked
    choice, ignored = _served(choice)
    marks = Marks(tokenizer)
    name = format_name(template)
    make = call_rules(name, marks)
    if choice.is_forced or not choice.tools or (asked is not None and begins_as_json(name)):
        make = None
    if asked is None and make is None:
        return None
    calls = [] if make is None else make(choice, marks)
    if name == "openai":
        return _channels(asked, calls, marks, ignored)
    head, rules = _reasoning(template, opened, marks)
    rules += calls
    if asked is None:
        text = "\n".join([f"start: {head}free", *rules])
        return StructuredOutputsParams(grammar=text, source="tools", ignored=ignored)
    if not rules:
        return asked
    body = "(@body | calls)" if calls else "@body"
    return replace(asked, frame="\n".join([f"start: {head}{body}", *rules]), ignored=ignored if calls else ())


def _served(choice: ToolChoice) -> tuple[ToolChoice, tuple[str, ...]]:
    """Tools whose strict schemas are as grammars read them, and the paths of the keywords that are left out. Schemas
    that are too long for a grammar stay.

    Raises:
        InvalidRequestError: a value in a schema cannot be served.
    """
    if choice.is_forced:  # then the schema of all calls is rewritten
        return choice, ()
    tools, ignored, room = [], [], MAX_CONSTRAINT_CHARS
    for index, tool in enumerate(choice.tools):
        function = tool["function"]
        if function.get("strict"):
            place = f"tools[{index}].function.parameters"
            try:
                text = json.dumps(tool_parameters(function))
                if (room := room - len(text)) >= 0:
                    schema, places = served(text)
                    function = function | {"parameters": schema}
                    ignored += [f"{place}.{keyword}" for keyword in places]
            except (ValueError, RecursionError) as error:
                raise InvalidRequestError(f"{place}: {error}", param=place) from error
        tools.append(tool | {"function": function})
    return choice._replace(tools=tuple(tools)), tuple(ignored)


def _channels(
    asked: StructuredOutputsParams | None, calls: list[str], marks: Marks, ignored: tuple[str, ...]
) -> StructuredOutputsParams | None:
    """Constraint on an answer in harmony: each message has a channel."""
    if asked is None:
        text = "\n".join(["start: free", *calls])
        return StructuredOutputsParams(grammar=text, source="tools", ignored=ignored)
    if "<|channel|>" not in marks.tokens:
        return asked
    final = marks.lark("<|channel|>final"), marks.lark(" <|constrain|>json"), marks.lark("<|message|>")
    rules = [f"final: {final[0]} ({final[1]})? {final[2]}", *(calls or [analysis_rule(marks)])]
    head = "start: (analysis | preamble)* (final @body | calls)" if calls else "start: analysis? final @body"
    return replace(asked, frame="\n".join([head, *rules]), ignored=ignored if calls else ())


def _reasoning(template: dict[str, Any], opened: str, marks: Marks) -> tuple[str, list[str]]:
    """Start of the rule `start`, and the rules of the reasoning that the model may write first."""
    field = template["fields"].get("reasoning_content", {})
    begin, end = field.get("open"), field.get("close")
    if not isinstance(begin, str) or not isinstance(end, str):
        return "", []
    if not opened and not begin.startswith(tuple(marks.tokens)):  # it is text, like any other
        return "", []
    rules = [f"reasoning: {'' if opened else marks.lark(begin)} thoughts /\\s*/", marks.until("thoughts", end)]
    return ("reasoning " if opened else "reasoning? "), rules
