"""Calls in each format, and the tokens that tokenizers have for its marks."""

import json

MARKS = {
    "hermes": ["<think>", "</think>", "<tool_call>", "</tool_call>"],
    "llama3_json": ["<|python_tag|>"],
    "deepseek_v3": [
        "<think>",
        "</think>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ],
    "openai": ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
    "old mistral": ["[TOOL_CALLS]"],
    "pythonic": ["<|python_start|>", "<|python_end|>"],
    "qwen3_coder": ["<think>", "</think>", "<tool_call>", "</tool_call>"],
    "seed_oss": ["<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"],
    "kimi_k2": [
        *("<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ],
    "glm45": [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ],
    "minimax_m2": ["<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"],
    "functiongemma": ["<start_function_call>", "<end_function_call>", "<escape>"],
    "gemma4": ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'],
}
CALLS = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "%s", "parameters": %s}',
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>",
    "mistral": "[TOOL_CALLS]%s[ARGS]%s",
    "old mistral": '[TOOL_CALLS] [{"name": "%s", "arguments": %s}]',
    "openai": "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s",
    "pythonic": "[%s(%s)]",
    "qwen3_coder": "<tool_call>\n<function=%s>\n%s</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=%s>\n%s</function>\n</seed:tool_call>",
    "kimi_k2": "<|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>%s<|tool_call_end|>",
    "glm45": "<tool_call>%s\n%s</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="%s">\n%s</invoke>\n</minimax:tool_call>',
    "functiongemma": "<start_function_call>call:%s%s<end_function_call>",
    "gemma4": "<|tool_call>call:%s%s<tool_call|>",
}
"""Text of a call by format: name, arguments."""
TAGS = {
    **dict.fromkeys(("qwen3_coder", "seed_oss"), "<parameter=%s>\n%s\n</parameter>\n"),
    "glm45": "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n",
    "minimax_m2": '<parameter name="%s">%s</parameter>\n',
}
"""Text of an argument in formats that write them between tags."""
BEFORE = {"openai": "<|channel|>final<|message|>"}
"""Text that begins an answer without a call."""


def call(kind, name="weather", arguments='{"city": "Rome"}'):
    if kind == "pythonic":
        arguments = ", ".join(f"{key}={json.dumps(value)}" for key, value in json.loads(arguments).items())
    if kind in TAGS:
        values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in json.loads(arguments).items()}
        arguments = "".join(TAGS[kind] % pair for pair in values.items())
    return CALLS[kind] % (name, arguments)
