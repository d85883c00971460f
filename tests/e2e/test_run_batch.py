"""`outrider run-batch` with the demo: 50 lines, good and bad, and none is lost."""

import json
import subprocess
import sys

from outrider.platform.cli.main import main

ASK = {"messages": [{"role": "user", "content": "List all customers from Berlin."}], "max_tokens": 12, "temperature": 0}
GOOD = [
    ("/v1/chat/completions", ASK | {"model": "sql"}),
    ("/v1/chat/completions", ASK),
    ("/v1/completions", {"prompt": "The capital of France", "max_tokens": 4, "temperature": 0}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/v1/score", {"text_1": "a", "text_2": ["a", "b"]}),
    ("/v1/rerank", {"query": "a", "documents": ["b", "a"]}),
    ("/v1/messages", {"messages": ASK["messages"], "max_tokens": 4}),
]
REFUSED = [
    ("/v1/chat/completions", ASK | {"model": "nobody"}, 404),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}, 400),
    ("/v1/embeddings", {}, 400),
    ("/v1/completions", {"prompt": "\ud800"}, 400),
    ("/v1/completions", {"prompt": "a", "temperature": float("nan")}, 400),
]
BROKEN = [
    '{"custom_id": ',
    "[1]",
    '{"method": "POST", "url": "/v1/completions", "body": {}}',
    '{"custom_id": "get", "method": "GET", "url": "/v1/models", "body": {}}',
    '{"custom_id": "url", "method": "POST", "url": "/v1/load_lora_adapter", "body": {}}',
    '{"custom_id": "body", "method": "POST", "url": "/v1/completions", "body": "a"}',
    '{"custom_id": "stream", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "stream": true}}',
    '{"custom_id": "\\ud800", "method": "POST", "url": "/v1/models", "body": {}}',
    '{"custom_id": "good-0", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}',
]


def request(custom_id: str, url: str, body: dict) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def test_fifty_lines(tethered, tmp_path):
    good = [request(f"good-{index}", *GOOD[index % len(GOOD)]) for index in range(36)]
    refused = [request(f"refused-{index}", *REFUSED[index % len(REFUSED)][:2]) for index in range(5)]
    lines = [line for mixed in zip(good, (*refused, *BROKEN, *[""] * 22), strict=True) for line in mixed]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    options = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--max-concurrency", "8")
    command = tethered([sys.executable, "-m", "outrider.platform.cli.main", "run-batch", *options])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert "50 requests: 36 answered, 14 failed" in done.stderr
    assert done.stderr.startswith("Outrider is loading outrider-demo\n")  # a life sign, also in a pipe
    assert "Traceback" not in done.stderr
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(answers) == 50
    assert all(set(answer) == {"id", "custom_id", "response", "error"} for answer in answers)
    by_id = {answer["custom_id"]: answer for answer in answers if answer["response"] is not None}
    for index in range(36):
        answer = by_id[f"good-{index}"]
        assert (answer["response"]["status_code"], answer["error"]) == (200, None)
        assert answer["response"]["request_id"]
    texts = [by_id[f"good-{index}"]["response"]["body"]["choices"][0]["message"]["content"] for index in (0, 1)]
    assert texts[0].upper().startswith("SELECT")  # the adapter's
    assert texts[0] != texts[1]
    for index in range(5):
        response = by_id[f"refused-{index}"]["response"]
        assert response["status_code"] == REFUSED[index % len(REFUSED)][2]
        assert response["body"]["error"]["message"]
    broken = [answer for answer in answers if answer["response"] is None]
    assert len(broken) == len(BROKEN)
    assert all(answer["error"]["message"].startswith("line ") for answer in broken)
    assert {answer["custom_id"] for answer in broken} == {None, "get", "url", "body", "stream", "\ud800", "good-0"}


def test_files_that_cannot_be_used(tmp_path, capsys):
    def error(file: str, output: str) -> str:
        assert main(["run-batch", "-i", str(tmp_path / file), "-o", str(tmp_path / output)]) == 1
        return capsys.readouterr().err

    assert "cannot read" in error("none.jsonl", "out.jsonl")
    (tmp_path / "in.jsonl").write_text("{}")
    assert "the output is the input" in error("in.jsonl", "in.jsonl")
    assert (tmp_path / "in.jsonl").read_text() == "{}"
