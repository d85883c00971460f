"""Chat templates that write a part of a text, or a tool in another form: no text is lost silently."""

from typing import Any

import pytest

from outrider.platform.client.text.chat_template import render_messages
from outrider.platform.core.errors import InvalidRequestError


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content[0].text }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:9] }}{% endfor %}",
        "{% for m in messages %}{{ m.content.split('\n')[-1] }}{% endfor %}",
        "{% for m in messages %}{% if '##' in m.content %}{{ m.content.split('##')[1] }}{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_writes_part_of_a_text_is_an_error(tokenizer: Any, template: str) -> None:
    parts = [{"type": "text", "text": "first ## line"}, {"type": "text", "text": "another"}]
    with pytest.raises(InvalidRequestError, match="out of the prompt"):
        render_messages(tokenizer, [{"role": "user", "content": parts}], {"chat_template": template})


def test_a_shortened_result_does_not_hide_that_a_later_text_is_missing(tokenizer: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a long result"},
        {"role": "user", "content": "last"},
    ]
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content[:5] }}{% elif m.tool_calls %}"
        "{{ m.tool_calls[0].function.name }}{% elif loop.first %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(InvalidRequestError, match=r"messages\[3\]"):
        render_messages(tokenizer, messages, {"chat_template": template})


def test_a_template_may_write_the_schema_of_a_tool_alone(tokenizer: Any) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": schema}}
    template = (
        "{% for t in tools or [] %}{{ t.function.parameters | tojson }}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    prompt = render_messages(
        tokenizer, [{"role": "user", "content": "x"}], {"chat_template": template, "tools": [tool]}
    )
    assert "city" in prompt
