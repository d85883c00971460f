"""`parallel_tool_calls: false` in grammars: one call, also in formats that write several in a list."""

from __future__ import annotations

import json

import pytest

from outrider.platform.http.openai.tools.grammar import answer_constraint

from .format_calls import MARKS, call
from .test_tool_grammars import JSON, TOOLS, accepts, find_format, tokenizer_with

__all__ = ["tokenizer_with"]  # a fixture

LISTED = {"name": "other", "arguments": {}}
TWO_CALLS = {
    "hermes": call("hermes") + call("hermes", "other", "{}"),
    "mistral": call("mistral") + call("mistral", "other", "{}"),
    "old mistral": f"{call('old mistral')[:-1]}, {json.dumps(LISTED)}]",
    "deepseek_v3": call("deepseek_v3") + call("deepseek_v3", "other", "{}"),
    "qwen3_coder": call("qwen3_coder") + call("qwen3_coder", "other", "{}"),
}


@pytest.mark.parametrize("kind", TWO_CALLS)
def test_several_calls_need_parallel_calls(kind, tokenizer_with):
    tokenizer = tokenizer_with(MARKS[kind])
    for parallel in (True, False):
        tools = TOOLS._replace(parallel=parallel)
        constraint = answer_constraint(JSON, tools, find_format(kind), tokenizer, "")
        assert accepts(tokenizer, constraint, call(kind), TWO_CALLS[kind]) == [True, parallel]
