"""Answers at random, in each format: no text vanishes, and pieces give the same as the whole."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import pytest

from outrider.platform.http.openai.tools.arguments import flat_tools
from outrider.platform.http.openai.tools.formats import FORMATS
from outrider.platform.http.openai.tools.parser import FormatParser

KINDS = [*FORMATS, "old mistral"]
NAMES = ("write_file", "do.nothing")
THINK = {
    "mistral": "[THINK]%s[/THINK]",
    "old mistral": "[THINK]%s[/THINK]",
    "gemma4": "<|channel>thought\n%s<channel|>",
    "openai": "<|channel|>analysis<|message|>%s<|end|><|start|>assistant",
    "seed_oss": "<seed:think>%s</seed:think>",
    "cohere_command3": "<|START_THINKING|>%s<|END_THINKING|>",
}
TAGGED = {
    "qwen3_coder": "<tool_call>\n<function=%s>\n%s</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=%s>\n%s</function>\n</seed:tool_call>",
    "glm45": "<tool_call>%s\n%s</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="%s">\n%s</invoke>\n</minimax:tool_call>',
    "deepseek_v32": "<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="%s">\n%s</｜DSML｜invoke>\n</｜DSML｜function_calls>',
}
"""Formats whose values are plain text between tags."""
VALUES = {
    "glm45": "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n",
    "minimax_m2": '<parameter name="%s">%s</parameter>\n',
    "deepseek_v32": '<｜DSML｜parameter name="%s" string="true">%s</｜DSML｜parameter>\n',
}
MARKS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", ";", "<|python_tag|>", "<function=f>", "</function>"),
    *(
        "</parameter> x",
        "<parameter=a>",
        "<end_function_call>",
        "<tool_call|>",
        "<｜tool▁call▁end｜>",
        "\n```",
        "<|end|>",
        "</arg_value> x",
        "<arg_key>a</arg_key>",
        '<parameter name="a">',
        "</invoke>",
        "<|tool_call_end|>",
    ),
    *('{"name": "do.nothing", "parameters": {}}', "[do.nothing()]", "]", "}", '"', "\\", "\\n", "\n", "\t", "é😀", "'"),
)
"""Texts inside of arguments."""
WORD = re.compile(r"w\d+z")


class Writer:
    """Writer of one random answer."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.random, self.count = kind, Random(f"{kind} {seed}"), 0
        self.calls: list[dict[str, Any]] = []

    def word(self) -> str:
        self.count += 1
        return f"w{self.count}z"

    def words(self) -> str:
        return " ".join(self.word() for _ in range(self.random.randint(1, 3)))

    def string(self) -> str:
        pieces = [self.random.choice(MARKS) if self.random.random() < 0.6 else self.word() for _ in range(4)]
        return f"{self.word()}{''.join(pieces)} {self.word()}"

    def value(self, depth: int = 0) -> Any:
        kind = self.random.randint(0, 5 if depth < 2 else 3)
        if kind == 4:
            return [self.value(depth + 1) for _ in range(self.random.randint(0, 3))]
        if kind == 5:
            return {key: self.value(depth + 1) for key in "ab"[: self.random.randint(0, 2)]}
        return [self.string(), self.random.randint(-9, 99), 1.5, self.random.choice([None, True, False])][kind]

    def arguments(self) -> dict[str, Any]:
        return {key: self.value() for key in ("path", "text", "more")[: self.random.randint(0, 3)]}

    def call(self, name: str | None = None) -> str:
        name, arguments = name or self.random.choice(NAMES), self.arguments()
        if name in NAMES:
            self.calls.append({"name": name, "arguments": arguments})
        return written(self.kind, name, arguments)

    def segment(self) -> str:
        """Text, a call, or nearly a call."""
        kind = self.random.randint(0, 7)
        if kind < 3:
            return self.random.choice(["", " ", "\n\n"]) + self.words() + self.random.choice(["", " ", "\n"])
        if kind == 3:
            return (
                self.random.choice(['{"name": "%s", "age": 3}', '{"%s": [1]}', "[%s, 2]", "{%s", '["%s']) % self.word()
            )
        if kind == 4 and self.kind != "pythonic":
            return self.call(f"other{self.random.randint(0, 9)}")
        if kind == 5 and self.kind != "pythonic":
            text = self.call()
            self.calls.pop()
            at = self.random.randrange(len(text))
            return text[:at] + self.random.choice(["", "}", '"']) + text[at + self.random.randint(1, 3) :]
        return self.call()

    def answer(self) -> str:
        text = THINK.get(self.kind, "<think>%s</think>") % self.words() if self.random.random() < 0.3 else ""
        segments = [self.segment() for _ in range(self.random.randint(1, 5))]
        return text + "".join(segments)


def written(kind: str, name: str, arguments: dict[str, Any]) -> str:
    """A call in the format."""
    text = json.dumps(arguments, ensure_ascii=False)
    if kind == "pythonic":
        return f"[{name}({', '.join(f'{k}={json.dumps(v, ensure_ascii=False)}' for k, v in arguments.items())})]"
    if kind in TAGGED:
        values = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
        form = VALUES.get(kind, "<parameter=%s>\n%s\n</parameter>\n")
        return TAGGED[kind] % (name, "".join(form % pair for pair in values.items()))
    quotes = {"functiongemma": "<escape>", "gemma4": '<|"|>'}
    if kind in quotes:
        text = lax(arguments, quotes[kind])
    forms = {
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>',
        "llama3_json": f'<|python_tag|>{{"name": "{name}", "parameters": {text}}};',
        "mistral": f"[TOOL_CALLS]{name}[ARGS]{text}",
        "old mistral": f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {text}}}]',
        "deepseek_v3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "kimi_k2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0"
        f"<|tool_call_argument_begin|>{text}<|tool_call_end|><|tool_calls_section_end|>",
        "cohere_command3": f'<|START_ACTION|>[{{"tool_name": "{name}", "parameters": {text}}}]<|END_ACTION|>',
        "functiongemma": f"<start_function_call>call:{name}{text}<end_function_call>",
        "gemma4": f"<|tool_call>call:{name}{text}<tool_call|>",
        "openai": f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>",
    }
    return forms[kind]


def lax(value: Any, quote: str) -> str:
    """A value as Gemma's models write it: bare keys, and marks around texts."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{lax(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(lax(each, quote) for each in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in NAMES
]


def parsed(kind: str, pieces: list[str]) -> dict[str, Any]:
    """Message of an answer in pieces."""
    parser = FormatParser(
        FORMATS[kind.split()[-1]], "", with_calls=True, tools=flat_tools(tuple(TOOLS)), names=frozenset(NAMES)
    )
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for delta in [*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()]:
        [(name, value)] = delta.items()
        if name != "tool_calls":
            message[name] += value
        elif "id" in value[0]:
            message["calls"].append(dict(value[0]["function"]))
        else:
            message["calls"][value[0]["index"]]["arguments"] += value[0]["function"]["arguments"]
    return message | {"is_cut": parser.is_cut}


def is_whole(call: dict[str, Any]) -> bool:
    try:
        return isinstance(json.loads(call["arguments"]), dict)
    except ValueError:
        return False


def split_randomly(text: str, random: Random) -> list[str]:
    pieces, most = [], random.choice([1, 3, 8, 40])
    while text:
        size = random.randint(1, most)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_text_vanishes(kind):
    for seed in range(75):
        writer = Writer(kind, seed)
        text = writer.answer()
        if seed % 3 == 0:
            text = text[: writer.random.randint(0, len(text))]
        whole = parsed(kind, [text])
        found = " ".join(
            [whole["content"], whole["reasoning_content"], *(call["arguments"] for call in whole["calls"])]
        )
        lost = set(WORD.findall(text)) - set(WORD.findall(found))
        assert not lost, (lost, text, whole)
        for _ in range(4):
            assert parsed(kind, split_randomly(text, writer.random)) == whole, text


@pytest.mark.parametrize("kind", KINDS)
def test_calls_are_read_as_they_were_meant(kind):
    """Whole calls, with marks in their strings, among text: the calls and the text are returned as written."""
    for seed in range(50):
        writer = Writer(kind, seed)
        texts, calls = [], []
        for _ in range(1 if kind in ("pythonic", "openai") else writer.random.randint(1, 3)):
            texts.append(writer.words())
            calls.append(writer.call())
        after = "" if kind == "pythonic" else writer.words()
        head = "<|channel|>final<|message|>" if kind == "openai" else ""
        end = "<|end|><|start|>assistant" if kind == "openai" else ""
        parts = [f"{head}{text}{end}{call}{end}" for text, call in zip(texts, calls, strict=True)]
        whole = parsed(kind, ["".join(parts) + head + after])
        expected = writer.calls
        if kind in TAGGED:  # without a schema all values are texts
            expected = [
                {
                    **call,
                    "arguments": {
                        k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)
                        for k, v in call["arguments"].items()
                    },
                }
                for call in expected
            ]
        assert [{**call, "arguments": json.loads(call["arguments"])} for call in whole["calls"]] == expected, parts
        assert whole["content"] == "".join([*texts, after])


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_is_cut_is_never_mended(kind):
    """At each place: arguments that can be read are those that were written."""
    for seed in range(3):
        writer = Writer(kind, seed)
        text = writer.call("write_file")
        complete = json.loads(parsed(kind, [text])["calls"][0]["arguments"])
        for cut in range(len(text)):
            message = parsed(kind, [text[:cut]])
            for call in message["calls"]:
                assert not is_whole(call) or json.loads(call["arguments"]) == complete, text[:cut]
                assert message["is_cut"] == (not is_whole(call))
            assert (
                message["calls"]
                or "write_file" not in text[:cut]
                or "write_file" in message["content"]
                or kind == "openai"
            )
