"""Answers in each format, and the messages that they are."""

from __future__ import annotations

import json
from typing import Any

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
    "deepseek 3.2": (
        "deepseek_v32",
        'Hm</think>Ok.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="a" string="true">1</｜DSML｜invoke></｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="false">[1, {"c": null}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="do.nothing">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        {
            "content": "Hm</think>Ok.",
            "tool_calls": [{"name": "f", "arguments": {"a": "1</｜DSML｜invoke>", "b": [1, {"c": None}]}}, NOTHING],
        },
    ),
    "command a": (
        "cohere_command3",
        "<|START_THINKING|>Hm<|END_THINKING|><|START_ACTION|>[\n"
        f'    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {JSON}}},\n'
        '    {"tool_call_id": "1", "tool_name": "do.nothing", "parameters": {}}\n]<|END_ACTION|>',
        {"reasoning_content": "Hm", "tool_calls": [WEATHER, NOTHING]},
    ),
    "command a, an answer": (
        "cohere_command3",
        "<|START_THINKING|>Hm<|END_THINKING|><|START_RESPONSE|>It rains.<|END_RESPONSE|>",
        {"reasoning_content": "Hm", "content": "It rains."},
    ),
    "command r+": (
        "cohere_command3",
        f'Action: ```json\n[\n    {{\n        "tool_name": "get_weather",\n        "parameters": {JSON}\n    }}\n]```',
        {"tool_calls": [WEATHER]},
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
    "a list next to the name": (
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
