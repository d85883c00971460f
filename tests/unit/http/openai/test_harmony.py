"""gpt-oss's format: reasoning, text and calls, whole and cut off.

OpenAI's library says the same, where it is installed and finds its vocabulary (`TIKTOKEN_ENCODINGS_BASE`, or a
download).
"""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def of_library():
    """of_library(text) -> the message, as OpenAI's library reads the tokens."""
    harmony = pytest.importorskip("openai_harmony")
    try:
        encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except harmony.HarmonyError as error:
        pytest.skip(f"no vocabulary: {error}")

    def read(text: str) -> Message:
        parser, message = harmony.StreamableParser(encoding, role=harmony.Role.ASSISTANT), {}
        for token in encoding.encode(text, allowed_special="all"):
            parser.process(token)
        found = [(m.recipient, m.channel, "".join(part.text for part in m.content)) for m in parser.messages]
        for recipient, channel, content in [*found, (parser.current_recipient, parser.current_channel, None)]:
            content = parser.current_content if content is None else content
            if content and (recipient or "").startswith("functions."):  # it takes a type behind a space for one, too
                function = recipient.removeprefix("functions.")
                message.setdefault("tool_calls", []).append({"name": function, "arguments": content})
            else:
                add(message, "reasoning_content" if channel == "analysis" else "content", content)
        return message

    return read


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


@pytest.mark.parametrize("name", ANSWERS)
def test_openais_library_reads_the_same(name, of_library):
    assert of_library(ANSWERS[name]) == EXPECTED[name]
