"""Keywords of a schema that do not hold: each field that takes a schema names them in `x-outrider-ignored`."""

from __future__ import annotations

import subprocess

import pytest

from outrider.platform.core.constraint_check import CHECKER

SCHEMA = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "pet": {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "discriminator": {"propertyName": "kind"}},
    },
    "$defs": {
        name: {"type": "object", "properties": {"kind": {"const": name}, "x": {"exclusiveMinimum": 0, "maximum": 0.5}}}
        for name in ("cat", "dog")
    },
    "required": ["tags", "pet"],
}
REFUSED = {"type": "object", "not": {"required": ["a"]}}
MESSAGES = [{"role": "user", "content": "hi"}]


def response_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def named(schema):
    return {"type": "json_schema", "name": "a", "schema": schema}


DOORS = {
    "response_format": ("chat/completions", lambda s: {"messages": MESSAGES, "response_format": response_format(s)}),
    "guided_json": ("completions", lambda s: {"prompt": "hi", "guided_json": s}),
    "structured_outputs": ("completions", lambda s: {"prompt": "hi", "structured_outputs": {"json": s}}),
    "a structural tag": (
        "completions",
        lambda s: {
            "prompt": "hi",
            "structured_outputs": {
                "structural_tag": {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": s, "end": "</f>"}]}
            },
        },
    ),
    "text.format": ("responses", lambda s: {"input": "hi", "text": {"format": named(s)}}),
    "output_config": (
        "messages",
        lambda s: {"max_tokens": 9, "messages": MESSAGES, "output_config": {"format": named(s)}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_each_schema_field_names_keywords_that_are_not_enforced(http, door):
    route, body = DOORS[door]
    response = http.post(f"/v1/{route}", {"model": "base", **body(SCHEMA)})
    assert response.status_code == 200, response.text
    names = response.headers["x-outrider-ignored"].split(",")
    assert [name.endswith("properties.tags.uniqueItems") for name in names] == [True], names


@pytest.mark.parametrize("door", DOORS)
def test_each_schema_field_refuses_unsupported_keywords(http, door):
    route, body = DOORS[door]
    response = http.post(f"/v1/{route}", {"model": "base", **body(REFUSED)})
    assert response.status_code == 400
    assert "not" in response.json()["error"]["message"]


def test_a_schema_that_holds_names_nothing(http):
    route, body = DOORS["response_format"]
    schema = {"type": "object", "properties": {"pet": SCHEMA["properties"]["pet"]}, "$defs": SCHEMA["$defs"]}
    assert "x-outrider-ignored" not in http.post(f"/v1/{route}", {"model": "base", **body(schema)}).headers


def test_a_checker_that_was_killed_is_a_503(http, monkeypatch):
    def broken(command, **options):
        return popen(["false"], **options)

    popen = subprocess.Popen
    CHECKER.close()
    with monkeypatch.context() as changed:
        changed.setattr(subprocess, "Popen", broken)
        response = http.post("/v1/completions", {"model": "base", "prompt": "hi", "guided_regex": "never seen before"})
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.json()["error"]["type"] == "ServiceUnavailableError"
    assert "guided_regex: the process that checks constraints ended" in response.json()["error"]["message"]
    response = http.post("/v1/completions", {"model": "base", "prompt": "hi", "guided_regex": "never seen before"})
    assert response.status_code == 200, response.text
