"""Requests of the tests of token ids, and their answers."""

from __future__ import annotations

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
CALL = 'Wait.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lisbon"}}\n</tool_call>'


def ask(http, path: str, **body):
    response = http.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(http, path: str, **body):
    response = http.post(path, body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def ids(text: str) -> list[int]:
    return [ord(char) for char in text]
