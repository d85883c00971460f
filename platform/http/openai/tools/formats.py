"""Formats of reasoning and tool calls by family, as response templates of transformers.

A tokenizer that brings a `response_template` has its own; these are for the others. Each is chosen by its name
(`--tool-call-parser`, with vLLM's names), or by a mark in the chat template.
"""

from __future__ import annotations

import re
from typing import Any

_CALL = {"type": "function", "function": "{content}"}
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_SPACE = r"(?<!\s)\s*+"
"""All white space before a call. Without the look-behind each of n characters of it would begin a search: n² steps."""
_THINK = {"open": "<think>", "close": "</think>", "content": "text"}


def _format(tool_calls: dict[str, Any], reasoning: dict[str, Any] = _THINK, content: Any = None) -> dict[str, Any]:
    fields = {"reasoning_content": reasoning, "tool_calls": {"repeats": True, **tool_calls}}
    return {"start_anchor_pattern": r"\A", "fields": {**fields, "content": content or {"content": "text"}}}


def _gemma(begin: str, end: str, quote: str, reasoning: dict[str, Any] = _THINK) -> dict[str, Any]:
    """Calls as `call:name{key:value}`, whose texts are between two of `quote`."""
    return _format(
        {
            "open_pattern": rf"\s*{re.escape(begin)}\s*call:\s*(?P<name>[\w.-]+)\s*(?=\{{)",
            "close": end,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [[quote, quote]]},
            "transform": _NAMED_CALL,
        },
        reasoning,
    )


def _tagged(begin: str, end: str, value: str, reasoning: dict[str, Any] = _THINK) -> dict[str, Any]:
    """Calls whose values are between tags, one of `TAGGED_FORMS`; the arguments are patterns."""
    calls = {"open_pattern": _SPACE + begin, "close_pattern": end, "content": "xml-inline", "transform": _NAMED_CALL}
    return _format(calls | {"content_args": {"tag_pattern": value}}, reasoning)


def _functions(outer: str, reasoning: dict[str, Any] = _THINK) -> dict[str, Any]:
    """Calls as `<function=name><parameter=key>value</parameter></function>`, in `outer` tags, which the model
    sometimes leaves out."""
    return _tagged(
        rf"(?:<{outer}>\s*+)?<function=(?P<name>[^<>\n]++)>(?=\s*+(?:<parameter=|</function>))",
        rf"</function>(?:\s*</{outer}>)?|</{outer}>",
        r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>",
        reasoning,
    )


_HARMONY_HEAD = r"(?:<\|start\|>assistant)?"
_HARMONY_TO = r"\s*to=(?:functions\.)?(?P<name>[\w.-]+)"
_HARMONY_CALLS = r"<\|channel\|>(?:commentary|analysis)"
_HARMONY_CUT = r"(?:\s*to=[\w.-]*)?(?:\s*<\|constrain\|>\w*)?"
FORMATS: dict[str, dict[str, Any]] = {
    "hermes": _format(
        {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json", "transform": _CALL}
    ),
    "llama3_json": _format(
        {
            # Not inside of other JSON.
            "open_pattern": _SPACE
            + r'(?:<\|python_tag\|>\s*+)?(?<!(?:[\[{]|"\s*:|[\]}"\d]\s*,)\s*)'
            + r'(?=\[?\s*\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?name"\s*:)',
            "close_pattern": r";|<\|eom_id\|>",
            "content": "json",
            "transform": _CALL,
        }
    ),
    "pythonic": _format(
        {
            "open_pattern": _SPACE
            + r"(?:<\|python_start\|>|<\|tool_call_start\|>|```tool_code\s++)?(?=\[\s*[A-Za-z_][\w.-]*\()",
            "close_pattern": r"(?<=\)\s*\])(?:<\|tool_call_end\|>|(?:<\|python_end\|>|\s*+```)?(?=\s*\Z))",
            "content": "python-call-list",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
            "transform_each": True,
        }
    ),
    "mistral": _format(
        {
            "open_pattern": r"\s*\[TOOL_CALLS\]\s*(?:(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]|(?=[\[{]))",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            "content": "json",
            "transform": _NAMED_CALL,
        },
        {"open": "[THINK]", "close": "[/THINK]", "content": "text"},
    ),
    "deepseek_v3": _format(
        {
            "open_pattern": r"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
            r"(?P<name>[^\n<]+)(?:\n```json\n|<｜tool▁sep｜>(?=\s*\{))",
            "close_pattern": r"(?:\n```)?<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?|\n```\s*\Z",
            "content": "json",
            "transform": _NAMED_CALL,
        }
    ),
    "kimi_k2": _format(
        {
            "open_pattern": r"\s*(?:<\|tool_calls_section_begin\|>)?\s*<\|tool_call_begin\|>\s*(?:functions\.)?"
            r"(?P<name>[\w.-]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>(?=\s*\{)",
            "close_pattern": r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
            "content": "json",
            "transform": _NAMED_CALL,
        }
    ),
    "qwen3_coder": _functions("tool_call"),
    "seed_oss": _functions("seed:tool_call", {"open": "<seed:think>", "close": "</seed:think>", "content": "text"}),
    "glm45": _tagged(
        r"<tool_call>\s*+(?P<name>[\w.-]++)(?=\s*+(?:<arg_key>|</tool_call>))",
        "</tool_call>",
        r"<arg_key>(?P<key>[^<>\n]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    ),
    "minimax_m2": _tagged(
        r"(?:<minimax:tool_call>\s*+)?"
        r'<invoke name="(?P<name>[^"<>\n]++)">(?=\s*+(?:<parameter name="|</invoke>))',
        r"</invoke>(?:\s*</minimax:tool_call>)?",
        r'<parameter name="(?P<key>[^">\n]+)">(?P<value>.*?)</parameter>',
    ),
    "deepseek_v32": _tagged(
        r"(?:<｜DSML｜(?:function|tool)_calls>\s*+)?"
        r'<｜DSML｜invoke name="(?P<name>[^"<>\n]++)">(?=\s*+(?:<｜DSML｜parameter name="|</｜DSML｜invoke>))',
        r"</｜DSML｜invoke>(?:\s*</｜DSML｜(?:function|tool)_calls>)?",
        r'<｜DSML｜parameter name="(?P<key>[^">\n]+)"(?: string="\w+")?>(?P<value>.*?)</｜DSML｜parameter>',
    ),
    "cohere_command3": _format(
        {
            "open_pattern": _SPACE + r"(?:<\|START_ACTION\|>|Action:\s*+```json)(?=\s*+\[)",
            "close_pattern": r"<\|END_ACTION\|>|```",
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
            "transform_each": True,
        },
        {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>", "content": "text"},
        {"close_pattern": r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>|<\|END_OF_TURN_TOKEN\|>", "content": "text"},
    ),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma(
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        {"open": "<|channel>thought", "close": "<channel|>", "content": "text"},
    ),
    "openai": _format(
        {
            "open_pattern": f"{_HARMONY_HEAD}(?:{_HARMONY_TO}{_HARMONY_CALLS}|{_HARMONY_CALLS}{_HARMONY_TO})"
            r"(?:\s*<\|constrain\|>\w+|\s+\w+)?<\|message\|>",
            "close": ["<|call|>", "<|end|>"],
            "content": "json",
            "transform": _NAMED_CALL,
        },
        {
            "open_pattern": _HARMONY_HEAD + r"<\|channel\|>analysis<\|message\|>",
            "close": "<|end|>",
            "content": "text",
        },
        {
            # Headers and ends of messages, and a header at the end of an answer that is cut off.
            "close_pattern": _HARMONY_HEAD + r"<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\w+)?<\|message\|>"
            rf"|<\|(?:return|end|call)\|>|(?=<\|){_HARMONY_HEAD}{_HARMONY_CUT}(?:<\|channel\|>\w*{_HARMONY_CUT})?\Z",
            "content": "text",
        },
    ),
}
"""Response templates by name."""

_MARKS = {
    "<|channel|>": "openai",
    "<start_function_call>": "functiongemma",
    "<|tool_call>": "gemma4",
    "<seed:tool_call>": "seed_oss",
    "<minimax:tool_call>": "minimax_m2",
    "｜DSML｜": "deepseek_v32",
    "<|START_ACTION|>": "cohere_command3",
    "<function=": "qwen3_coder",
    "<arg_key>": "glm45",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<｜tool▁calls▁begin｜>": "deepseek_v3",
    "<|tool_call_begin|>": "kimi_k2",
    "<|python_tag|>": "llama3_json",
    "<|python_start|>": "pythonic",
    "<|tool_call_start|>": "pythonic",
    "[func_name": "pythonic",
}
"""Marks in chat templates that give a format away; the first one that is found counts."""


REASONING_FORMATS = ("deepseek_r1", "qwen3", "granite", *FORMATS)
"""Names for `--reasoning-parser`; those that are no format of calls have <think> and </think>."""


def find_template(name: str | None, tokenizer: Any, adapter_template: str | None = None) -> dict[str, Any] | None:
    """Response template of a model, the first that there is: by name, guessed from the adapter's chat template, of the
    tokenizer, guessed from the tokenizer's chat template; None if nothing gives it away."""
    if name is not None:
        return FORMATS.get(name, FORMATS["hermes"])
    if (found := _guess(adapter_template)) is not None:
        return found
    own = getattr(tokenizer, "response_template", None)
    if isinstance(own, dict):
        return own
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    return _guess(template)


def _guess(template: object) -> dict[str, Any] | None:
    """Response template whose mark is in a chat template."""
    found = next((kind for mark, kind in _MARKS.items() if isinstance(template, str) and mark in template), None)
    return None if found is None else FORMATS[found]


def format_name(template: dict[str, Any]) -> str | None:
    """Name of the format in which a response template reads calls, be it a tokenizer's own; None: it has no name."""
    fields = template.get("fields")
    calls = fields.get("tool_calls") if isinstance(fields, dict) else None
    if not isinstance(calls, dict):
        return None
    begin = str(calls.get("open") or calls.get("open_pattern"))
    for mark, name in _MARKS.items():
        known = FORMATS[name]["fields"]["tool_calls"]
        same = all(calls.get(key) == known.get(key) for key in ("close", "close_pattern", "content", "transform"))
        if calls is known or (same and (mark in begin or re.escape(mark) in begin)):
            return name
    return None
