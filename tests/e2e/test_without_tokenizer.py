"""`outrider serve --skip-tokenizer-init` of a folder without a tokenizer."""

import json
import shutil

import pytest

from outrider.models.demo import demo_adapters, demo_model_path

IDS = [1, 4, 201, 35, 589, 300]
CHAT = [{"role": "user", "content": "hello"}]
GENERATED = {"request_id": "r", "choices": [{"index": 0, "token_ids": IDS}]}
OPTION = "skip_tokenizer_init"


@pytest.fixture(scope="module")
def bare(start_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(demo_model_path() / name, folder / name)
    adapter = f"json={demo_adapters()['json']}"
    server = start_server(
        str(folder), "--skip-tokenizer-init", "--log-prompts", "--enable-lora", "--lora-modules", adapter
    )
    with server.http() as http:
        yield server, http
    assert server.stop() == 0
    assert "Traceback" not in server.output


def complete(http, **body):
    answer = http.post("/v1/completions", json={"prompt": IDS, "temperature": 0, "return_token_ids": True, **body})
    assert answer.status_code == 200, answer.text
    return answer


def test_token_ids_come_back(bare):
    server, http = bare
    assert "/v1/completions -H" in server.output  # the example of the summary
    assert "outrider chat --url" not in server.output
    whole = complete(http, max_tokens=6, logprobs=1).json()["choices"][0]
    assert (whole["text"], len(whole["token_ids"]), whole["prompt_token_ids"]) == ("", 6, IDS)
    assert whole["logprobs"]["tokens"] == [f"token_id:{i}" for i in whole["token_ids"]]
    lines = complete(http, max_tokens=6, stream=True).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == whole["token_ids"]
    for model in (None, "json"):
        beams = complete(http, model=model, max_tokens=4, n=2, use_beam_search=True).json()["choices"]
        assert [(beam["text"], len(beam["token_ids"])) for beam in beams] == [("", 4)] * 2
    assert str(IDS) in server.output  # --log-prompts


def test_generate_gives_the_ids_of_completions(bare):
    _, http = bare
    for model in (None, "json"):
        want = complete(http, model=model, max_tokens=6, logprobs=1, n=2, seed=3, temperature=1).json()["choices"]
        params = {"max_tokens": 6, "logprobs": 1, "n": 2, "seed": 3, "temperature": 1}
        body = {"token_ids": IDS, "model": model, "sampling_params": params}
        answer = http.post("/inference/v1/generate", json=body).raise_for_status().json()
        assert [choice["token_ids"] for choice in answer["choices"]] == [choice["token_ids"] for choice in want]
        for choice, other in zip(answer["choices"], want, strict=True):
            content = choice["logprobs"]["content"]
            assert [entry["token"] for entry in content] == other["logprobs"]["tokens"]
            assert [entry["logprob"] for entry in content] == other["logprobs"]["token_logprobs"]
    # What is rendered without text is what was sent.
    [rendered] = http.post("/v1/completions/render", json={"prompt": IDS, "max_tokens": 3}).raise_for_status().json()
    assert (rendered["token_ids"], rendered["sampling_params"]["max_tokens"]) == (IDS, 3)
    assert len(http.post("/inference/v1/generate", json=rendered).json()["choices"][0]["token_ids"]) == 3


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "hello"}, "prompt"),
        ("/v1/completions", {"prompt": IDS, "stop": "x"}, "stop"),
        ("/v1/completions", {"prompt": IDS, "echo": True}, "echo"),
        ("/v1/completions", {"prompt": IDS, "bad_words": ["x"]}, "bad_words"),
        ("/v1/completions", {"prompt": IDS, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("/v1/completions", {"prompt": IDS, "response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/chat/completions", {"messages": CHAT}, "messages"),
        ("/v1/responses", {"input": "hello"}, "input"),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 3}, "messages"),
        ("/v1/embeddings", {"input": "hello"}, "input"),
        ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {"stop": "x"}}, "stop"),
        ("/v1/chat/completions/render", {"messages": CHAT}, "messages"),
        ("/v1/completions/render", {"prompt": "hello"}, "prompt"),
        ("/v1/chat/completions/derender", {"generate_response": GENERATED}, "generate_response"),
        ("/v1/completions/derender", {"generate_responses": [GENERATED]}, "generate_responses"),
        ("/tokenize", {"prompt": "hello"}, "prompt"),
        ("/tokenize", {"messages": CHAT}, "messages"),
        ("/detokenize", {"tokens": IDS}, "tokens"),
        ("/tokenizer_info", None, OPTION),
    ],
)
def test_routes_that_need_text_name_the_option(bare, path, body, param):
    _, http = bare
    answer = http.get(path) if body is None else http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert OPTION in error["message"]
