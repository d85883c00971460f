"""Messages of answers with calls or reasoning: whole, or in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....core.outputs import CompletionOutput
from .arguments import flat_tools
from .calls import Delta
from .choice import ToolChoice
from .parser import AnswerParser, ForcedCalls, FormatParser, ReasonedCalls

MakeParser = Callable[[], AnswerParser]


def parser_maker(choice: ToolChoice, template: dict[str, Any] | None, opened: str) -> MakeParser | None:
    """Maker of the parsers of a request's choices; None if answers are plain text.

    Args:
        template: Response template of the model's format, when the answer is parsed.
        opened: Part of the prompt that belongs to the answer.
    """
    names = frozenset(tool["function"]["name"] for tool in choice.tools)

    def forced() -> ForcedCalls:
        return ForcedCalls(choice.name, names, parallel=choice.parallel)

    if template is None:
        return forced if choice.is_forced else None
    if choice.is_forced:
        return lambda: ReasonedCalls(FormatParser(template, opened, with_calls=False), forced())
    tools = flat_tools(choice.tools)
    return lambda: FormatParser(
        template, opened, with_calls=bool(names), tools=tools, names=names, parallel=choice.parallel
    )


def open_region(template: dict[str, Any], prompt_end: str) -> str:
    """Part of the prompt that belongs to the answer: the mark of reasoning that the chat template has begun.

    `prompt_end`: text of the prompt's last tokens.
    """
    if template["start_anchor_pattern" if "start_anchor_pattern" in template else "start_anchor"] != r"\A":
        return prompt_end
    mark = template["fields"].get("reasoning_content", {}).get("open", "")
    return mark if mark and prompt_end.rstrip().endswith(mark) else ""


def finish_reason(reason: str | None, parser: AnswerParser) -> str | None:
    """Reason of the end: "tool_calls" if the answer has calls and did not end inside one."""
    return "tool_calls" if reason == "stop" and parser.has_calls and not parser.is_cut else reason


def whole_message(text: str, make_parser: MakeParser) -> tuple[dict[str, Any], AnswerParser]:
    """Fields of the message of a whole answer, and its parser."""
    parser = make_parser()
    message: dict[str, Any] = {"content": None}
    for delta in [*parser.feed(text), *parser.finish()]:
        for name, value in delta.items():
            if name != "tool_calls":
                message[name] = (message.get(name) or "") + value
                continue
            [call] = value
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                calls.append({key: part for key, part in call.items() if key != "index"})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return message, parser


def chunk_deltas(
    output: CompletionOutput, parsers: dict[int, AnswerParser], make_parser: MakeParser
) -> tuple[list[Delta], AnswerParser]:
    """Deltas of one event of a choice, and its parser."""
    parser = parsers.get(output.index)
    if parser is None:
        parser = parsers[output.index] = make_parser()
    deltas = parser.feed(output.text) if output.text else []
    if output.finish_reason is not None:
        deltas += parser.finish()
    return deltas, parser
