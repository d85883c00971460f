"""Weighted sums of adapters in completion and chat requests."""

import json

import pytest

from outrider.platform.core.lora_request import LoRAMix, LoRARequest

VERSIONS = ("a:2", "a:0.5", "a:03", "base:a:1.0", "a:latest", "b:8b", "v:3")
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}
ROUTES = pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])


@pytest.fixture(autouse=True)
def loaded(http):
    for name in ("a", "b", "v:2", "c+d"):
        http.load_adapter(name, f"/adapters/{name}")


def mix_parts(lora):
    if isinstance(lora, LoRAMix):
        return [(part.request.name, part.weight) for part in lora.parts]
    return lora if lora is None else lora.name


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("a:0.7+b:0.3", [("a", 0.7), ("b", 0.3)]),
        ("b:0.3+a:0.7", [("a", 0.7), ("b", 0.3)]),
        ("+a:0.5", [("a", 0.5)]),
        ("a:-1.0+b", [("a", -1.0), ("b", 1.0)]),
        ("+base:a:0.5", [("a", 0.5)]),
        ("alias:a:0.5+base:b:2.0", [("a", 0.5), ("b", 2.0)]),
        ("v:2", "v:2"),
        ("v:2:0.5+a", [("a", 1.0), ("v:2", 0.5)]),
        ("c+d", "c+d"),
        ("+c+d:0.5", [("c+d", 0.5)]),
        ("+a:1.0", "a"),
        ("a:0.25+a:0.75", "a"),
        ("+a:0.0", None),
        ("a:1.0+b:0.0", "a"),
    ],
)
@ROUTES
def test_model(http, llm, path, body, model, expected):
    response = http.post(path, body | {"model": model})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model, "what was asked for"
    assert mix_parts(llm.calls[-1]["lora_request"]) == expected


@pytest.mark.parametrize("model", [None, "base", "alias"])
@ROUTES
def test_adapters(http, llm, path, body, model):
    adapters = [{"name": "b", "weight": -0.5}, "a", {"name": "c+d"}]
    response = http.post(path, body | {"model": model, "adapters": adapters})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == "a:1.0+b:-0.5+c+d:1.0"
    assert mix_parts(llm.calls[-1]["lora_request"]) == [("a", 1.0), ("b", -0.5), ("c+d", 1.0)]
    answer = http.post(path, body | {"adapters": [{"name": "a", "weight": 1}], "model": model}).json()
    assert answer["model"] == "a"
    assert llm.calls[-1]["lora_request"] == LoRARequest("a", path="/adapters/a", roots=("/",))
    answer = http.post(path, body | {"adapters": [{"name": "a", "weight": 0}]}).json()
    assert (answer["model"], llm.calls[-1]["lora_request"]) == ("base", None)


@ROUTES
def test_streams_echo_the_mix(http, path, body):
    response = http.post(path, body | {"model": "a:0.7+b:0.3", "stream": True})
    chunks = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert chunks.pop() == "[DONE]"
    assert {json.loads(chunk)["model"] for chunk in chunks} == {"a:0.7+b:0.3"}


@pytest.mark.parametrize(
    ("extra", "status", "param", "message"),
    [
        ({"model": "a:0.5+nobody:0.5"}, 404, "model", "'nobody' does not exist"),
        ({"model": "+nobody:0.5"}, 404, "model", "'nobody' does not exist"),
        *[({"model": name}, 404, "model", f"{name!r} does not exist") for name in VERSIONS],
        (
            {"model": "a:2+b:0.5"},
            404,
            "model",
            "'a:2' does not exist; /v1/models lists those that do (a weight has a d",
        ),
        ({"model": "nobody"}, 404, "model", "'nobody' does not exist"),
        ({"model": "a:b"}, 404, "model", "'a:b' does not exist"),
        ({"model": "a:nan"}, 404, "model", "'a:nan' does not exist"),
        ({"model": "a:0.5+"}, 404, "model", "'a:0.5+' does not exist"),
        ({"model": "+base:0.5"}, 400, "model", "'base' is the base model"),
        ({"model": "a:0.5+base:0.5"}, 400, "model", "'base' is the base model"),
        ({"model": "+a:1.0e999"}, 400, "model", "the weight of adapter 'a'"),
        ({"model": "+a:101.0"}, 400, "model", "the weight of adapter 'a'"),
        ({"model": "+".join(["a:0.1"] * 9)}, 400, "model", "at most 8"),
        ({"adapters": []}, 400, "adapters", "1 to 8"),
        ({"adapters": ["a"] * 9}, 400, "adapters", "1 to 8"),
        ({"adapters": ["a", "nobody"]}, 404, "adapters", "'nobody' does not exist"),
        ({"adapters": ["a:0.5"]}, 404, "adapters", "'a:0.5' does not exist"),
        ({"adapters": ["base"]}, 400, "adapters", "'base' is the base model"),
        ({"adapters": [{"name": "a", "weight": 101}]}, 400, "adapters", "the weight of adapter 'a'"),
        ({"adapters": ["a"], "model": "a"}, 400, "adapters", "exclude each other"),
        ({"adapters": ["a"], "model": "b:0.5+a"}, 400, "adapters", "exclude each other"),
        ({"adapters": ["a"], "model": "nobody"}, 404, "model", "'nobody' does not exist"),
    ],
)
@ROUTES
def test_refused(http, llm, path, body, extra, status, param, message):
    response = http.post(path, body | extra)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert message in error["message"]
    assert not llm.calls


@pytest.mark.parametrize(
    "adapters",
    ["a", {"a": 0.5}, [3], [None], [{"weight": 1}], [{"name": "a", "weight": "x"}], [{"name": "a", "weight": True}],
     [{"name": "a", "weight": None}], [{"name": "a", "scale": 1}], [["a", 0.5]]],
)  # fmt: skip
@ROUTES
def test_malformed(http, path, body, adapters):
    response = http.post(path, body | {"adapters": adapters})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "BadRequestError"), error
    assert error["param"].startswith("adapters")


def test_a_weight_that_json_does_not_have(http):
    text = '{"prompt": "hi", "adapters": [{"name": "a", "weight": NaN}]}'
    response = http.post("/v1/completions", content=text.encode(), headers={"content-type": "application/json"})
    assert response.status_code == 400


def test_an_unloaded_part_takes_its_mixes_along(http):
    body = COMPLETION | {"model": "a:0.7+b:0.3"}
    assert http.post("/v1/completions", body).status_code == 200
    http.post("/v1/unload_lora_adapter", {"lora_name": "b"})
    response = http.post("/v1/completions", body)
    assert response.status_code == 404
    assert "'b' does not exist" in response.json()["error"]["message"]
    assert http.post("/v1/completions", COMPLETION | {"model": "+a:0.7"}).status_code == 200


@pytest.mark.parametrize("name", ["a:2.0", "base:a:2.0", "a:0.5+b:0.5"])
def test_a_name_that_was_unloaded_is_no_weight(http, name):
    http.load_adapter(name.removeprefix("base:"), "/adapters/x")
    sums = [name] if "+" in name else [f"{name}+b", f"+{name}"]
    assert http.post("/v1/completions", COMPLETION | {"model": name}).status_code == 200
    http.post("/v1/unload_lora_adapter", {"lora_name": name.removeprefix("base:")})
    for model in (name, *sums):
        response = http.post("/v1/completions", COMPLETION | {"model": model})
        assert response.status_code == 404, model
        assert "++" not in response.text
    http.load_adapter(name.removeprefix("base:"), "/adapters/x")
    assert http.post("/v1/completions", COMPLETION | {"model": name}).status_code == 200


def test_mixes_are_no_models_of_the_list(http):
    http.post("/v1/completions", COMPLETION | {"model": "a:0.7+b:0.3"})
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["base", "alias", "a", "b", "v:2", "c+d"]
    assert http.get("/v1/models/a:0.7+b:0.3").status_code == 404


def test_tokenizing_takes_the_same_names(http):
    assert http.post("/tokenize", {"model": "a:0.7+b:0.3", "prompt": "ab"}).json()["count"] == 3
    assert http.post("/detokenize", {"model": "+a:0.5", "tokens": [97]}).json() == {"prompt": "a"}
    assert http.post("/tokenize", {"model": "a+nobody", "prompt": "ab"}).status_code == 404
