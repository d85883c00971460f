"""Answers in each format: the deltas, joined, are the same however the text is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_model_path
from outrider.platform.client.text.chat_template import render_messages
from outrider.platform.http.openai.tools.formats import FORMATS, find_template
from outrider.platform.http.openai.tools.parser import AnswerParser, ForcedCalls, FormatParser

from .format_answers import ANSWERS, JSON, NOTHING, WEATHER


def joined(deltas):
    message: dict[str, Any] = {}
    for delta in deltas:
        for name, value in delta.items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            [call] = value
            calls = message.setdefault(name, [])
            if call["index"] == len(calls):
                assert call["id"].startswith("call_")
                calls.append(dict(call["function"]))
            else:
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    for call in message.get("tool_calls", []):
        call["arguments"] = json.loads(call["arguments"] or "{}")
    return message


def parse(parser: AnswerParser, pieces):
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return joined([*deltas, *parser.finish()])


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_every_cut_gives_the_same_message(name):
    kind, text, expected = ANSWERS[name]

    def parsed(*pieces):
        return parse(FormatParser(FORMATS[kind], "", with_calls=True), pieces)

    assert parsed(text) == expected
    assert parsed(*text) == expected
    for cut in range(len(text)):
        assert parsed(text[:cut], text[cut:]) == expected, text[:cut]
    for size in (2, 3, 5, 7):
        assert parsed(*(text[at : at + size] for at in range(0, len(text), size))) == expected


def test_arguments_come_while_they_are_written():
    parser = FormatParser(FORMATS["hermes"], "", with_calls=True)
    assert not parser.feed('<tool_call>\n{"name": "f", "argum')
    [call] = parser.feed('ents": {"ci')
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"ci'}
    [more] = parser.feed('ty": "Li')
    assert more == {"tool_calls": [{"index": 0, "function": {"arguments": 'ty": "Li'}}]}
    assert parser.has_calls


@pytest.mark.parametrize(("name", "text"), [("f", JSON), (None, f'[{{"name": "f", "parameters": {JSON}}}]')])
def test_forced_calls(name, text):
    expected = {"tool_calls": [{"name": "f", "arguments": WEATHER["arguments"]}]}
    assert parse(ForcedCalls(name), [text]) == expected
    assert parse(ForcedCalls(name), text) == expected


@pytest.mark.parametrize(("kind", "text"), [("pythonic", "[f(1 + 2)]"), ("hermes", "<think>Hm</think>Hello")])
def test_text_that_is_no_call_is_content(kind, text):
    message = parse(FormatParser(FORMATS[kind], "", with_calls=True), [text])
    assert "tool_calls" not in message
    assert message["content"] in text


def test_a_call_that_is_no_json_calls_nothing():
    parser = FormatParser(FORMATS["hermes"], "", with_calls=True)
    assert parse(parser, ["<tool_call>not json</tool_call> after"]) == {
        "content": "<tool_call>not json</tool_call> after"
    }
    assert not parser.has_calls


def test_reasoning_that_the_prompt_has_begun():
    message = parse(FormatParser(FORMATS["hermes"], "<think>", with_calls=False), ["Hm</think>\n\n<tool_call>"])
    assert message == {"reasoning_content": "Hm", "content": "<tool_call>"}


class Tokenizer:
    response_template = None
    chat_template: Any = None


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("x <tool_call> x", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ({"default": "", "tool_use": "<|channel|>"}, "openai"),
        ("<|channel>thought <|tool_call>call:", "gemma4"),
        ("x <start_function_call>call:", "functiongemma"),
        ("<tool_call>{name}<arg_key>", "glm45"),
        ("<minimax:tool_call><invoke name=", "minimax_m2"),
        ("<｜DSML｜function_calls>", "deepseek_v32"),
        ("<|START_THINKING|> <|START_ACTION|>[", "cohere_command3"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2"),
        ("<seed:tool_call><function=", "seed_oss"),
        ("<|tool_call_start|>[", "pythonic"),
    ],
)
def test_a_format_is_guessed_from_the_chat_template(template, kind):
    tokenizer = Tokenizer()
    tokenizer.chat_template = template
    assert find_template(None, tokenizer) == FORMATS[kind]
    assert find_template("pythonic", tokenizer) == FORMATS["pythonic"]
    tokenizer.response_template = {"own": 1}
    assert find_template(None, tokenizer) == {"own": 1}
    assert find_template(None, Tokenizer()) is None


@pytest.mark.parametrize(
    ("said", "passed"),
    [
        ("null", "{}"),
        ('""', "{}"),
        ('"null"', "{}"),
        ('"{}"', "{}"),
        ('{"a": "1\n2\t\x01"}', '{"a": "1\\n2\\t\\u0001"}'),
        ('{"a": "\\\\\n"}', '{"a": "\\\\\\n"}'),
        ('{"a": "\\\n"}', '{"a": "\\n"}'),
        ("[1]", "[1]"),
    ],
)
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": %s}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": %s, "name": "f"}</tool_call>'),
        ("llama3_json", '{"name": "f", "parameters": %s}'),
        ("mistral", "[TOOL_CALLS]f[ARGS]%s"),
        ("openai", "<|channel|>commentary to=f<|message|>%s<|call|>"),
    ],
)
def test_arguments_are_json(kind, form, said, passed):
    text = form % said
    for pieces in ([text], text):
        parser = FormatParser(FORMATS[kind], "", with_calls=True)
        deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
        assert "".join(delta["tool_calls"][0]["function"]["arguments"] for delta in deltas) == passed
        assert not parser.is_cut


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("llama3_json", '{"name": "Ann", "age": 3}'),
        ("llama3_json", '{"name": "f", "age": 3}'),
        ("llama3_json", '{"result": {"name": "f", "parameters": {}}}'),
        ("hermes", '<tool_call>{"name": "g", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "age": 3}</tool_call>'),
        ("mistral", "[TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]f[ARGS]Sorry"),
        ("qwen3_coder", "<function=g>\n<parameter=a>\n1\n</parameter>\n</function>"),
        ("openai", '<|channel|>commentary to=python <|constrain|>json<|message|>{"a": 1}'),
        ("glm45", "<tool_call>g\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        ("minimax_m2", '<invoke name="g">\n<parameter name="a">1</parameter>\n</invoke>'),
        ("deepseek_v32", '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>'),
        ("cohere_command3", '<|START_ACTION|>[{"tool_name": "g", "parameters": {}}]<|END_ACTION|>'),
        ("cohere_command3", '<|START_ACTION|>[{"tool_name": "f", "para'),
        ("kimi_k2", "<|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("openai", "Hello"),
        ("pythonic", "[g(a=1)]"),
        ("gemma4", "<|tool_call>call:g{a:1}<tool_call|>"),
    ],
)
def test_text_that_is_no_tool_call_is_unchanged(kind, text):
    for pieces in ([text], text):
        assert parse(FormatParser(FORMATS[kind], "", with_calls=True, names={"f"}), pieces) == {"content": text}


def test_a_recipient_without_functions_is_a_call():
    text = '<|channel|>commentary to=f <|constrain|>json<|message|>{"a": 1}<|call|>'
    message = parse(FormatParser(FORMATS["openai"], "", with_calls=True, names={"f"}), text)
    assert message == {"tool_calls": [{"name": "f", "arguments": {"a": 1}}]}


def test_the_template_for_gemma_3(repo_root):
    """The calls of a conversation are written as the parser reads them."""
    template = (repo_root / "examples" / "gemma3_tools.jinja").read_text(encoding="utf-8")
    tokenizer = load_tokenizer(demo_model_path())
    calls = [{"type": "function", "function": call | {"arguments": call["arguments"]}} for call in (WEATHER, NOTHING)]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    prompt = render_messages(tokenizer, messages, {"chat_template": template, "tools": tools})
    _, first, answer, result, last = prompt.split("<start_of_turn>")
    assert first.startswith("user\nBe brief.\n\nYou have access")
    assert json.dumps(tools[0]) in first
    assert first.endswith("\n\nWeather?<end_of_turn>\n")
    text = answer.removeprefix("model\n").removesuffix("<end_of_turn>\n")
    tokenizer.chat_template = template
    assert find_template(None, tokenizer) == FORMATS["pythonic"]
    assert parse(FormatParser(FORMATS["pythonic"], "", with_calls=True), [text]) == {"tool_calls": [WEATHER, NOTHING]}
    assert (result, last) == ("user\n```tool_output\nrain\n```<end_of_turn>\n", "model\n")


@pytest.mark.parametrize("name", FORMATS)
def test_white_space_is_searched_once(name):
    """Without the look-behind of the patterns, this takes minutes."""
    parser = FormatParser(FORMATS[name], "", with_calls=True)
    deltas = [delta for _ in range(20) for delta in parser.feed(" " * 1000)]
    assert not [delta for delta in [*deltas, *parser.finish()] if "tool_calls" in delta]


@pytest.mark.parametrize(
    ("said", "value"),
    [("1e2", 100.0), ('{"a": [null]}', {"a": [None]}), ("NaN", "NaN"), ("[1e999]", "[1e999]"), ("[1", "[1")],
)
def test_values_that_deepseek_marks_as_json(said, value):
    call = f'<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">{said}</｜DSML｜parameter>\n'
    message = parse(FormatParser(FORMATS["deepseek_v32"], "", with_calls=True), [f"{call}</｜DSML｜invoke>"])
    assert message == {"tool_calls": [{"name": "f", "arguments": {"a": value}}]}


def test_a_call_without_arguments_has_an_empty_object():
    parser = FormatParser(FORMATS["hermes"], "", with_calls=True)
    deltas = [*parser.feed('<tool_call>{"name": "now"}</tool_call>'), *parser.finish()]
    assert "".join(delta["tool_calls"][0]["function"]["arguments"] for delta in deltas) == "{}"


def test_prefixes_of_calls_are_searched_once():
    """With a name that may contain a prefix, this would take hours."""
    parser = FormatParser(FORMATS["qwen3_coder"], "", with_calls=True)
    text = "<function=" * 2000
    deltas = [delta for at in range(0, len(text), 4) for delta in parser.feed(text[at : at + 4])]
    assert "".join(delta["content"] for delta in [*deltas, *parser.finish()]) == text


def test_arguments_that_never_end_are_searched_once():
    """A search for the end that begins again at each parameter takes half a minute."""
    parser = FormatParser(FORMATS["qwen3_coder"], "", with_calls=True)
    text = "<tool_call><function=f>" + "<parameter=a>" * 5000
    assert parse(parser, [text]) == {"content": text}
