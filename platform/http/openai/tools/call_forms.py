"""Rules in Lark's syntax for calls in a model's own format, whose arguments fit the schemas of strict tools.

A format that writes arguments between marks is a `CallForm`: as JSON, or each between tags (`arguments.py`). Harmony
has channels, and a pythonic call keyword arguments: each has rules of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from .arguments import (
    ARGUMENT_TAGS,
    FUNCTION_TAGS,
    INVOKE_TAGS,
    Tags,
    checked_properties,
    json_rule,
    property_rule,
    tagged_arguments,
)
from .choice import ToolChoice, tool_parameters

TEXT = r"/(.|\n)*/"


class CallForm(NamedTuple):
    """Text of a call in a format that writes arguments between marks."""

    trigger: str
    """Text that begins a call, and nothing else."""
    begin: str
    """Text between it and the arguments; %s is the name."""
    end: str
    around: tuple[str, ...] = ()
    """Tokens allowed between calls."""
    bracket: bool = False
    """True if one trigger begins a list of calls."""
    beginning: str = ""
    """Pattern of all that the parser takes for the start of a call, if that is more than the trigger."""


CALL_FORMS = {
    "hermes": CallForm("<tool_call>", '\n{"name": "%s", "arguments": ', "}\n</tool_call>"),
    "llama3_json": CallForm(
        *('{"name": ', '"%s", "parameters": ', "}", ("<|python_tag|>",)),
        beginning=r'\{\s*"(type"\s*:\s*"function"\s*,\s*")?name"\s*:',
    ),
    "mistral": CallForm("[TOOL_CALLS]", "%s[ARGS]", ""),
    "deepseek_v3": CallForm(
        "<｜tool▁call▁begin｜>",
        "function<｜tool▁sep｜>%s\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "kimi_k2": CallForm(
        "<|tool_call_begin|>",
        "functions.%s:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "functiongemma": CallForm("<start_function_call>", "call:%s", "<end_function_call>"),
    "gemma4": CallForm("<|tool_call>", "call:%s", "<tool_call|>"),
}
"""Formats whose arguments are JSON, by name. Gemma's models write bare keys and marks around texts; JSON's quotes are
read as well."""
_FUNCTION = "\n<function=%s>\n", "</function>\n"
_TAGGED = {
    "qwen3_coder": (CallForm("<tool_call>", *_FUNCTION, beginning="<function="), FUNCTION_TAGS),
    "seed_oss": (CallForm("<seed:tool_call>", *_FUNCTION, beginning="<function="), FUNCTION_TAGS),
    "glm45": (CallForm("<tool_call>", "%s\n", ""), ARGUMENT_TAGS),
    "minimax_m2": (
        CallForm("<minimax:tool_call>", '\n<invoke name="%s">\n', "</invoke>\n", beginning="<invoke name="),
        INVOKE_TAGS,
    ),
}
"""Formats whose arguments are between tags. The tag that closes the trigger's ends a call."""
_OLD_MISTRAL = CallForm("[TOOL_CALLS]", '{"name": "%s", "arguments": ', "}", bracket=True)
"""Format of Mistral's tokenizers that have no token [ARGS]."""


class Marks:
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
            return f"{rule}: {TEXT} {self.lark(mark)}"
        return f"{rule}[lazy]: {TEXT} {json.dumps(mark)}"


CallRules = Callable[[ToolChoice, Marks], list[str]]
"""Maker of the rules `calls`, one call or several, and `free`, text that may have calls."""


def call_rules(name: str | None, marks: Marks) -> CallRules | None:
    """Maker of a format's rules; None if a grammar cannot hold its calls to their schemas."""
    if name == "openai":
        return _harmony if "<|channel|>" in marks.tokens else None
    if name == "pythonic":
        return _pythonic
    if name in _TAGGED:
        return partial(_tagged_calls, *_TAGGED[name])
    form = CALL_FORMS.get(name or "")
    if name == "mistral" and "[ARGS]" not in marks.tokens:
        form = _OLD_MISTRAL
    return None if form is None else lambda choice, marks: _json_calls(form, choice, marks)


def begins_as_json(name: str | None) -> bool:
    """True for a format whose calls begin as JSON may: a lexer cannot distinguish them from a form's JSON."""
    return name in ("llama3_json", "pythonic")


def _arguments(function: dict[str, Any]) -> str:
    """Arguments of a call as JSON."""
    return json_rule(tool_parameters(function) if function.get("strict") else {"type": "object"})


def _json_calls(form: CallForm, choice: ToolChoice, marks: Marks) -> list[str]:
    return _calls(form, [_arguments(tool["function"]) for tool in choice.tools], choice, marks)


def _tagged_calls(form: CallForm, tags: Tags, choice: ToolChoice, marks: Marks) -> list[str]:
    form = form._replace(end=form.end + form.trigger.replace("<", "</"))
    tags = tags._replace(lark=marks.lark)
    rules = [
        rule for index, tool in enumerate(choice.tools) for rule in tagged_arguments(index, tool["function"], tags)
    ]
    return [*_calls(form, [f"args_{index}" for index in range(len(choice.tools))], choice, marks), *rules]


def _calls(form: CallForm, arguments: list[str], choice: ToolChoice, marks: Marks) -> list[str]:
    """Rules of calls between marks. `arguments`: of each tool, as a part of a rule."""
    calls = [
        f"{marks.lark(form.begin % tool['function']['name'])} {written} {marks.lark(form.end)}"
        for tool, written in zip(choice.tools, arguments, strict=True)
    ]
    around = [marks.lark(mark) for mark in form.around if mark in marks.tokens]
    between = " | ".join([r"/[ \n;]+/", *around])
    first = f"({' | '.join(around)})* " if around else ""
    more = ' ("," " "? one)*' if choice.parallel else ""
    text, until_call = TEXT, [marks.until("until_call", form.trigger)]
    if form.beginning:  # text has none of them, and one that ends with the trigger no other
        text = "PLAIN"
        until_call = [rf"PLAIN: /(.|\n)*/ & ~/(.|\n)*{form.beginning}(.|\n)*/"]
        if form.trigger in marks.tokens:
            until_call.append(f"until_call: PLAIN {marks.lark(form.trigger)}")
        else:
            until = rf"/(.|\n)*{re.escape(form.trigger)}/ & ~/(.|\n)*{form.beginning}(.|\n)(.|\n)+/"
            until_call.append(f"until_call[lazy]: {until}")
    return [
        f"calls: {first}{marks.lark(form.trigger)} called" + (" between* (call between*)*" if choice.parallel else ""),
        f"between: {between}",
        f"free: ({' | '.join(['call', *(f'{text} {mark}' for mark in around)])})* {text}",
        "call: until_call called",
        *until_call,
        f'called: " "? "[" one{more} "]"' if form.bracket else "called: one",
        f"one: {' | '.join(calls)}",
    ]


# --- harmony ---


def analysis_rule(marks: Marks) -> str:
    """Rule `analysis`: a message of reasoning, and the start of the next one."""
    begin, end = marks.lark("<|channel|>analysis<|message|>"), marks.lark("<|end|><|start|>assistant")
    return f"analysis: {begin} {TEXT} {end}"


def _harmony(choice: ToolChoice, marks: Marks) -> list[str]:
    """A call is the last message of an answer; a text that is no call is one of the channel `final`."""
    calls = [
        f"{marks.lark('<|channel|>commentary to=functions.' + tool['function']['name'])} "
        f"({marks.lark(' <|constrain|>json')})? {marks.lark('<|message|>')} {_arguments(tool['function'])}"
        for tool in choice.tools
    ]
    begin, end = marks.lark("<|channel|>commentary<|message|>"), marks.lark("<|end|><|start|>assistant")
    return [
        analysis_rule(marks),
        f"preamble: {begin} {TEXT} {end}",
        f"calls: {' | '.join(calls)}",
        f"free: (analysis | preamble)* (calls | {marks.lark('<|channel|>final<|message|>')} {TEXT})",
    ]


# --- pythonic ---

_NAME = r"[A-Za-z_][A-Za-z0-9_]*([\-.][A-Za-z0-9_]+)*"
"""Name of a function or an argument that transformers' parser reads."""
_OPEN = rf"\[\s*{_NAME}\s*\("
"""Start of a list of calls."""


def _pythonic(choice: ToolChoice, marks: Marks) -> list[str]:
    """The text before the list has no start of a call, and nothing follows the list."""
    rules, heads, calls = [], [], []
    for index, tool in enumerate(choice.tools):
        function = tool["function"]
        name = re.escape(function["name"])
        rules += _keyword_arguments(index, function)
        # Two languages at once: up to the name of this function, and no start of a call before it.
        rules.append(rf"head_{index}[lazy]: /(.|\n)*\[{name}\(/ & ~/(.|\n)*{_OPEN}(.|\n)+/")
        heads.append(f'head_{index} args_{index} ")"')
        calls.append(f'{json.dumps(function["name"] + "(")} args_{index} ")"')
    begin, end = (f"({marks.lark(m)})?" if m in marks.tokens else "" for m in ("<|python_start|>", "<|python_end|>"))
    more = ' ("," " "? call)*' if choice.parallel else ""
    return [
        f"free: PLAIN | {f'(PLAIN {begin[1:-2]})? ' if begin else ''}calls",
        rf"PLAIN: /(.|\n)*/ & ~/(.|\n)*{_OPEN}(.|\n)*/",
        f'calls: ({" | ".join(heads)}){more} "]" {end}',
        f"call: {' | '.join(calls)}",
        *rules,
    ]


def _keyword_arguments(index: int, function: dict[str, Any]) -> list[str]:
    """Rules of `args_{index}`, in the order of the schema's properties.

    Raises:
        InvalidRequestError: keyword arguments cannot say what the schema of a strict tool asks for.
    """
    if not function.get("strict"):
        return [f'args_{index}: (any_{index} ("," " "? any_{index})*)?', f'any_{index}: /{_NAME}/ "=" {json_rule({})}']
    properties = checked_properties(index, function, _NAME)
    required = set(tool_parameters(function).get("required") or [])
    rules, written, unwritten = [], '""', '""'  # what may follow once an argument is written, or none yet
    for number, name in reversed(list(enumerate(properties))):
        one = f"value_{index}_{number}"
        rules.append(f"{one}: {json.dumps(name + '=')} {property_rule(function, name)}")
        next_written, next_unwritten = f"more_{index}_{number}", f"first_{index}_{number}"
        optional = name not in required
        rules.append(f'{next_written}: "," " "? {one} {written}' + (f" | {written}" if optional else ""))
        rules.append(f"{next_unwritten}: {one} {written}" + (f" | {unwritten}" if optional else ""))
        written, unwritten = next_written, next_unwritten
    return [f"args_{index}: {unwritten}", *rules]
