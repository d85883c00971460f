"""gpt-oss's format: reasoning, text and calls, whole and cut off, as OpenAI's library reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.platform.http.openai.tools.formats import FORMATS
from outrider.platform.http.openai.tools.parser import FormatParser

ANALYSIS, FINAL, COMMENTARY = (f"<|channel|>{name}" for name in ("analysis", "final", "commentary"))
NEXT, TEXT, JSON = "<|end|><|start|>assistant", "<|message|>", '{"city": "Par\\"is"}'
TO = "to=functions."
Message = dict[str, Any]


def answer(reasoning: str = "", content: str = "", **calls: str) -> Message:
    """A message of the non-empty fields; `calls`: arguments by function."""
    listed = [{"name": name, "arguments": arguments} for name, arguments in calls.items()]
    fields = {"reasoning_content": reasoning, "content": content, "tool_calls": listed}
    return {name: value for name, value in fields.items() if value}


ANSWERS = {
    "a call": f"{ANALYSIS}{TEXT}Hm.{NEXT}{COMMENTARY} {TO}f <|constrain|>json{TEXT}{JSON}<|call|>",
    "no space": f"{COMMENTARY} {TO}f<|constrain|>json{TEXT}{JSON}<|call|>",
    "a plain type": f"{COMMENTARY} {TO}f json{TEXT}{JSON}<|call|>",
    "no type": f"{COMMENTARY} {TO}f{TEXT}{JSON}<|call|>",
    "named before the channel": f"{ANALYSIS}{TEXT}Hm.{NEXT} {TO}f{COMMENTARY} json{TEXT}{JSON}<|call|>",
    "named at once": f" {TO}f{COMMENTARY} <|constrain|>json{TEXT}{JSON}<|call|>",
    "a call in analysis": f"{ANALYSIS} {TO}f <|constrain|>json{TEXT}{JSON}<|call|>",
    "text": f"{ANALYSIS}{TEXT}Easy.{NEXT}{FINAL}{TEXT}Hello {{}}<|return|>",
    "text alone": f"{FINAL}{TEXT}Hello<|return|>",
    "JSON": f"{ANALYSIS}{TEXT}Easy.{NEXT}{FINAL} <|constrain|>json{TEXT}{JSON}<|return|>",
    "a preamble": f"{COMMENTARY}{TEXT}I look.{NEXT}{COMMENTARY} {TO}f <|constrain|>json{TEXT}{JSON}<|call|>",
    "several": f"{ANALYSIS}{TEXT}One.{NEXT}{ANALYSIS}{TEXT}Two.{NEXT}{COMMENTARY}{TEXT}A.{NEXT}{FINAL}{TEXT}B.",
    "two calls": f"{COMMENTARY} {TO}f json{TEXT}{{}}{NEXT}{COMMENTARY} {TO}g json{TEXT}{JSON}<|call|>",
    "cut in analysis": f"{ANALYSIS}{TEXT}Need wea",
    "cut in a header": f"{ANALYSIS}{TEXT}Hm.{NEXT}{COMMENTARY} {TO}get_we",
    "cut in a call": f'{COMMENTARY} {TO}f <|constrain|>json{TEXT}{{"city": "Pa',
    "cut in a text": f"{ANALYSIS}{TEXT}Easy.{NEXT}{FINAL}{TEXT}Hel",
}
EXPECTED = {
    "a call": answer("Hm.", f=JSON),
    "no space": answer(f=JSON),
    "a plain type": answer(f=JSON),
    "no type": answer(f=JSON),
    "named before the channel": answer("Hm.", f=JSON),
    "named at once": answer(f=JSON),
    "a call in analysis": answer(f=JSON),
    "text": answer("Easy.", "Hello {}"),
    "text alone": answer(content="Hello"),
    "JSON": answer("Easy.", JSON),
    "a preamble": answer(content="I look.", f=JSON),
    "several": answer("One.Two.", "A.B."),
    "two calls": answer(f="{}", g=JSON),
    "cut in analysis": answer("Need wea"),
    "cut in a header": answer("Hm."),
    "cut in a call": answer(f='{"city": "Pa'),
    "cut in a text": answer("Easy.", "Hel"),
}


def add(message: Message, name: str, text: str) -> None:
    if text:
        message[name] = message.get(name, "") + text


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer(name):
    parser, message = FormatParser(FORMATS["openai"], "", with_calls=True), {}
    for delta in [*(d for character in ANSWERS[name] for d in parser.feed(character)), *parser.finish()]:
        for call in delta.get("tool_calls", []):
            if "id" in call:
                message.setdefault("tool_calls", []).append(dict(call["function"]))
            else:
                message["tool_calls"][-1]["arguments"] += call["function"]["arguments"]
        for field in delta.keys() - {"tool_calls"}:
            add(message, field, delta[field])
    assert message == EXPECTED[name]


OF_LIBRARY = json.loads(Path(__file__).with_name("harmony_answers.json").read_text())["answers"]
"""The texts, and their messages as OpenAI's library reads them; `make_harmony_answers.py` writes the file."""


@pytest.mark.parametrize("name", OF_LIBRARY)
def test_openais_library_reads_the_same(name):
    message: Message = {}
    for found in OF_LIBRARY[name]["messages"]:
        recipient, text = found["recipient"] or "", found["text"]
        if recipient.startswith("functions."):  # the library takes a type behind a space for a recipient, too
            call = {"name": recipient.removeprefix("functions."), "arguments": text}
            message.setdefault("tool_calls", []).append(call)
        else:
            add(message, "reasoning_content" if found["channel"] == "analysis" else "content", text)
    assert OF_LIBRARY[name]["text"] == ANSWERS[name], "the file is of another text: write it again"
    assert message == EXPECTED[name]
