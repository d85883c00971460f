"""Answers in each format: the deltas, joined, are the same however the text is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_model_path
from outrider.platform.client.text.chat_template import render_messages
from outrider.platform.http.openai.tools.formats import FORMATS, format_of
from outrider.platform.http.openai.tools.parser import AnswerParser, ForcedCalls, FormatParser

WEATHER = {"name": "get_weather", "arguments": {"city": 'Par"is}', "days": [1, {"a": "]"}]}}
NOTHING = {"name": "do.nothing", "arguments": {}}
JSON = json.dumps(WEATHER["arguments"])

ANSWERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "hermes": (
        "hermes",
        "<think>\nLet me see.\n</think>\n\nI will look.\n"
        f"<tool_call>\n{json.dumps(WEATHER)}\n</tool_call>\n"
        '<tool_call>\n{"arguments": {}, "name": "do.nothing"}\n</tool_call>',
        {"reasoning_content": "Let me see.\n", "content": "I will look.", "tool_calls": [WEATHER, NOTHING]},
    ),
    "llama": (
        "llama3_json",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {JSON}}}; {{"name": "do.nothing", "parameters": {{}}}}',
        {"tool_calls": [WEATHER, NOTHING]},
    ),
    "llama, a list": (
        "llama3_json",
        f'Sure, [{{"name": "get_weather", "parameters": {JSON}}}, {{"name": "do.nothing", "parameters": {{}}}}]',
        {"content": "Sure,", "tool_calls": [WEATHER, NOTHING]},
    ),
    "pythonic": (
        "pythonic",
        """[get_weather(city='Par"is}', days=[1, {"a": "]"}]), do.nothing()]""",
        {"tool_calls": [WEATHER, NOTHING]},
    ),
    "mistral": (
        "mistral",
        f"Sure. [TOOL_CALLS] [{json.dumps(WEATHER)}, {json.dumps(NOTHING)}]",
        {"content": "Sure.", "tool_calls": [WEATHER, NOTHING]},
    ),
    "mistral 11": (
        "mistral",
        f"[THINK]Hm[/THINK][TOOL_CALLS]get_weather[ARGS]{JSON}[TOOL_CALLS]do.nothing[ARGS]{{}}",
        {"reasoning_content": "Hm", "tool_calls": [WEATHER, NOTHING]},
    ),
    "deepseek": (
        "deepseek_v3",
        "<think>Hm</think>Ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>do.nothing\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        {"reasoning_content": "Hm", "content": "Ok", "tool_calls": [WEATHER, NOTHING]},
    ),
    "deepseek 3.1": (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        {"tool_calls": [WEATHER]},
    ),
    "pythonic in a fence": (
        "pythonic",
        """I will look.\n```tool_code\n[get_weather(city='Par"is}', days=[1, {"a": "]"}]), do.nothing()]\n```""",
        {"content": "I will look.", "tool_calls": [WEATHER, NOTHING]},
    ),
    "functiongemma": (
        "functiongemma",
        '<start_function_call>call:get_weather{city:<escape>Par"is}<escape>,days:[1,{a:<escape>]<escape>}]}'
        "<end_function_call><start_function_call>call:do.nothing{}<end_function_call>",
        {"tool_calls": [WEATHER, NOTHING]},
    ),
    "gemma 4": (
        "gemma4",
        '<|channel>thought\nHm<channel|>Ok.<|tool_call>call:get_weather{city:<|"|>Par"is}<|"|>,'
        'days:[1,{a:<|"|>]<|"|>}]}<tool_call|><|tool_call>call:do.nothing{}<tool_call|>',
        {"reasoning_content": "Hm", "content": "Ok.", "tool_calls": [WEATHER, NOTHING]},
    ),
    "qwen coder": (
        "qwen3_coder",
        "Ok.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        {"content": "Ok.", "tool_calls": [{"name": "get_weather", "arguments": {"city": "Paris"}}]},
    ),
    "kimi": (
        "kimi_k2",
        "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|><|tool_call_begin|>functions.do.nothing:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        {"content": "Ok.", "tool_calls": [WEATHER, NOTHING]},
    ),
    "glm": (
        "glm45",
        "<think>Hm</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par</arg_key>\n</arg_value>\n"
        "</tool_call>\n<tool_call>do.nothing\n</tool_call>",
        {
            "reasoning_content": "Hm",
            "tool_calls": [{"name": "get_weather", "arguments": {"city": "Par</arg_key>\n"}}, NOTHING],
        },
    ),
    "glm 4.7, without line breaks": (
        "glm45",
        "Ok.<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value></arg_value>"
        "</tool_call>",
        {"content": "Ok.", "tool_calls": [{"name": "f", "arguments": {"a": "1", "b": ""}}]},
    ),
    "minimax": (
        "minimax_m2",
        'Ok.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</invoke></parameter>\n</invoke>\n'
        '<invoke name="do.nothing">\n</invoke>\n</minimax:tool_call>',
        {"content": "Ok.", "tool_calls": [{"name": "f", "arguments": {"a": "1</invoke>"}}, NOTHING]},
    ),
    "seed": (
        "seed_oss",
        "<seed:think>Hm</seed:think>Ok.<seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>\n</function>\n"
        "</seed:tool_call>",
        {"reasoning_content": "Hm", "content": "Ok.", "tool_calls": [{"name": "f", "arguments": {"a": "1"}}]},
    ),
    "lfm2": (
        "pythonic",
        "<|tool_call_start|>[do.nothing()]<|tool_call_end|>I look.",
        {"content": "I look.", "tool_calls": [NOTHING]},
    ),
    "harmony": (
        "openai",
        "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{JSON}<|call|>",
        {"reasoning_content": "Need weather.", "tool_calls": [WEATHER]},
    ),
    "harmony, named before the channel": (
        "openai",
        "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant to=functions.get_weather"
        f"<|channel|>commentary json<|message|>{JSON}<|end|><|start|>assistant to=functions.do.nothing"
        "<|channel|>analysis <|constrain|>json<|message|>{}<|call|>",
        {"reasoning_content": "Need weather.", "tool_calls": [WEATHER, NOTHING]},
    ),
    "harmony without calls": (
        "openai",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Hello {}<|return|>",
        {"reasoning_content": "Easy.", "content": "Hello {}"},
    ),
    "qwen coder without the first mark": (
        "qwen3_coder",
        "Ok.\n\n<function=do.nothing>\n</function>\n</tool_call>\n"
        "<function=f>\n<parameter=code>\na</function>b\n</parameter>\n</function>\n",
        {"content": "Ok.", "tool_calls": [NOTHING, {"name": "f", "arguments": {"code": "a</function>b"}}]},
    ),
    "qwen coder in prose": (
        "qwen3_coder",
        "Write `<function=NAME>` first. Ok. <function=do.nothing>\n</function> Done.",
        {"content": "Write `<function=NAME>` first. Ok.  Done.", "tool_calls": [NOTHING]},
    ),
    "qwen coder, two calls with text between": (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>\n1\n</parameter></function>\nDone\n"
        "<tool_call><function=f><parameter=a>\n2\n</parameter></function></tool_call>",
        {"content": "Done", "tool_calls": [{"name": "f", "arguments": {"a": number}} for number in "12"]},
    ),
    "a list beside the name": (
        "hermes",
        f'<tool_call>{{"name": "get_weather", "tags": [1], "arguments": {JSON}}}</tool_call>',
        {"tool_calls": [WEATHER]},
    ),
    "white space between content and calls": (
        "hermes",
        f"\nOne \n<tool_call>{json.dumps(NOTHING)}</tool_call> <tool_call>{json.dumps(NOTHING)}</tool_call>\n Two ",
        {"content": "One \n \n Two ", "tool_calls": [NOTHING, NOTHING]},
    ),
    "arguments as a string, of a call that does not end": (
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(JSON)}</tool_call>',
        {"tool_calls": [WEATHER]},
    ),
    "arguments as a string": (
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(JSON)}}}</tool_call>'
        f'<tool_call>{{"arguments": {json.dumps(JSON)} , "name": "get_weather"}}</tool_call>'
        '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        {"tool_calls": [WEATHER, WEATHER, {"name": "f", "arguments": "text"}]},
    ),
    "broken calls, Gemma 4": (
        "gemma4",
        "One. <|tool_call>call:do.nothing{}<tool_call|><|tool_call>call:f{a: }<tool_call|> Two. "
        "<|tool_call>call:do.nothing{}<tool_call|><|tool_call>call:f{a:1",
        {
            "content": "One. <|tool_call>call:f{a: }<tool_call|> Two. <|tool_call>call:f{a:1",
            "tool_calls": [NOTHING, NOTHING],
        },
    ),
    "broken call, FunctionGemma": (
        "functiongemma",
        "<start_function_call>call:do.nothing{}<end_function_call><start_function_call>call:f{a}<end_function_call>",
        {"content": "<start_function_call>call:f{a}<end_function_call>", "tool_calls": [NOTHING]},
    ),
    "text": ("hermes", "Just { text } [no] <tool", {"content": "Just { text } [no] <tool"}),
}


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


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("pythonic", "[f(1 + 2)]"),
        ("hermes", "<think>Hm</think>Hello"),
    ],
)
def test_what_is_no_call_is_content(kind, text):
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
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2"),
        ("<seed:tool_call><function=", "seed_oss"),
        ("<|tool_call_start|>[", "pythonic"),
    ],
)
def test_a_format_is_guessed_from_the_chat_template(template, kind):
    tokenizer = Tokenizer()
    tokenizer.chat_template = template
    assert format_of(None, tokenizer) == FORMATS[kind]
    assert format_of("pythonic", tokenizer) == FORMATS["pythonic"]
    tokenizer.response_template = {"own": 1}
    assert format_of(None, tokenizer) == {"own": 1}
    assert format_of(None, Tokenizer()) is None


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
        ("kimi_k2", "<|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("openai", "Hello"),
        ("pythonic", "[g(a=1)]"),
        ("gemma4", "<|tool_call>call:g{a:1}<tool_call|>"),
    ],
)
def test_what_is_no_call_of_a_tool_stays_as_it_was(kind, text):
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
    assert format_of(None, tokenizer) == FORMATS["pythonic"]
    assert parse(FormatParser(FORMATS["pythonic"], "", with_calls=True), [text]) == {"tool_calls": [WEATHER, NOTHING]}
    assert (result, last) == ("user\n```tool_output\nrain\n```<end_of_turn>\n", "model\n")


@pytest.mark.parametrize("name", FORMATS)
def test_white_space_is_searched_once(name):
    """Without the look-behind of the patterns, this takes minutes."""
    parser = FormatParser(FORMATS[name], "", with_calls=True)
    deltas = [delta for _ in range(20) for delta in parser.feed(" " * 1000)]
    assert not [delta for delta in [*deltas, *parser.finish()] if "tool_calls" in delta]


def test_a_call_without_arguments_has_an_empty_object():
    parser = FormatParser(FORMATS["hermes"], "", with_calls=True)
    deltas = [*parser.feed('<tool_call>{"name": "now"}</tool_call>'), *parser.finish()]
    assert "".join(delta["tool_calls"][0]["function"]["arguments"] for delta in deltas) == "{}"


def test_beginnings_of_calls_are_searched_once():
    """With a name that may contain a beginning, this takes hours."""
    parser = FormatParser(FORMATS["qwen3_coder"], "", with_calls=True)
    text = "<function=" * 2000
    deltas = [delta for at in range(0, len(text), 4) for delta in parser.feed(text[at : at + 4])]
    assert "".join(delta["content"] for delta in [*deltas, *parser.finish()]) == text


def test_arguments_that_never_end_are_searched_once():
    """A search for the end that begins again at each parameter takes half a minute."""
    parser = FormatParser(FORMATS["qwen3_coder"], "", with_calls=True)
    text = "<tool_call><function=f>" + "<parameter=a>" * 5000
    assert parse(parser, [text]) == {"content": text}
