"""Events of an answer's blocks: the same, with deltas joined, however the text is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.platform.http.anthropic.blocks import SIGNATURE, BlockEvents, whole_content
from outrider.platform.http.openai.tools.formats import FORMATS
from outrider.platform.http.openai.tools.parser import ForcedCalls, FormatParser, PlainText

WEATHER = {"name": "get_weather", "arguments": {"city": 'Par"is', "days": [1, {"a": "]"}]}}
CALL = json.dumps(WEATHER)
HERMES = f"<think>\nHm {{\n</think>\n\nI look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
HARMONY = (
    "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.get_weather <|constrain|>json<|message|>{json.dumps(WEATHER['arguments'])}<|call|>"
)
USED = {"type": "tool_use", "name": "get_weather", "input": WEATHER["arguments"]}
ANSWERS: dict[str, tuple[Any, str, list[dict[str, Any]]]] = {
    "thinking, text and two calls": (
        lambda: FormatParser(FORMATS["hermes"], "", with_calls=True),
        HERMES,
        [
            {"type": "thinking", "thinking": "Hm {\n", "signature": SIGNATURE},
            {"type": "text", "text": "I look."},
            USED,
            USED,
        ],
    ),
    "harmony": (
        lambda: FormatParser(FORMATS["openai"], "", with_calls=True),
        HARMONY,
        [{"type": "thinking", "thinking": "Need weather.", "signature": SIGNATURE}, USED],
    ),
    "forced": (
        lambda: ForcedCalls(None),
        json.dumps([{"name": "get_weather", "parameters": WEATHER["arguments"]}] * 2),
        [USED, USED],
    ),
    "text": (PlainText, "Just { text } <tool_call>", [{"type": "text", "text": "Just { text } <tool_call>"}]),
    "nothing": (PlainText, "", []),
}


def block_events(make, pieces):
    blocks = BlockEvents(make())
    return [event for piece in pieces for event in blocks.feed(piece)] + blocks.finish()


def checked(events):
    """The content of events that keep Anthropic's order: each block begins, has deltas of its type, and ends before the
    next begins."""
    deltas = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
    open_kind, index = None, -1
    before = None
    for event in events:
        kind = event["type"]
        if open_kind == "thinking" and kind == "content_block_stop":  # else clients drop the block
            assert before["delta"] == {"type": "signature_delta", "signature": SIGNATURE}
        if kind == "content_block_start":
            assert open_kind is None
            index += 1
            open_kind = event["content_block"]["type"]
        elif kind == "content_block_delta":
            assert event["delta"]["type"] in (deltas[open_kind], "signature_delta")
        else:
            assert (kind, open_kind is None) == ("content_block_stop", False)
            open_kind = None
        assert event["index"] == index
        before = event
    assert open_kind is None
    content = whole_content(events)
    ids = [block.pop("id") for block in content if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids)
    return content


@pytest.mark.parametrize("name", ANSWERS)
def test_every_split(name):
    """In two pieces at each place, and in runs of each length, as speculation makes them."""
    make, text, expected = ANSWERS[name]
    for cut in range(len(text) + 1):
        assert checked(block_events(make, [text[:cut], text[cut:]])) == expected
    for size in range(1, 24):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert checked(block_events(make, pieces)) == expected


def test_one_call_at_most():
    _, text, expected = ANSWERS["forced"]
    assert checked(block_events(lambda: ForcedCalls(None, parallel=False), text)) == expected[:1]


@pytest.mark.parametrize("name", ["forced", "harmony"])
def test_a_call_that_is_cut_off_is_no_call(name):
    """A `tool_use` block has an object, which would look whole: a file would be written that ends in the middle."""
    make, text, expected = ANSWERS[name]
    text = text[: text.index("days") + 10]
    *before, block = checked(block_events(make, [text]))
    assert before == [each for each in expected if each["type"] == "thinking"]
    assert block["type"] == "text"
    assert text[text.index('{"city') :] in block["text"]
    blocks = BlockEvents(make())
    assert not [event for event in blocks.feed(text) + blocks.finish() if event.get("content_block") == USED]
    assert not blocks.has_calls


def test_arguments_that_are_no_object_are_no_call():
    parser = ForcedCalls("f")
    assert checked(block_events(lambda: parser, ["[1]"]))[0]["type"] == "text"
