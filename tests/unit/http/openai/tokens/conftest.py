"""A tokenizer and contexts for the tests of token ids."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def long_context(llm):
    """The script's tokenizer, with a template that writes tools, and longer contexts."""
    kind = type(llm.tokenizer)

    class ToolTokenizer(kind):
        chat_template = "fake <tool_call>"

        def apply_chat_template(self, conversation: Any, *, tools: Any = None, **options: Any) -> str:
            return json.dumps(tools or []) + super().apply_chat_template(conversation, **options)

    llm.tokenizer = llm.input_processor.tokenizer = ToolTokenizer()
    llm.info = replace(llm.info, max_model_len=1024)
    llm.input_processor._info = llm.info
