"""`outrider bench serve` against a real server."""

import json
from collections import Counter

import pytest

from outrider.platform.cli.main import main


def _bench(server, tmp_path, *options):
    out = tmp_path / "result.json"
    common = ["--base-url", server.url, "--output-json", str(out), "--save-detailed", "--disable-tqdm"]
    assert main(["bench", "serve", *common, *map(str, options)]) == 0
    return json.loads(out.read_text())


def test_completions_for_adapters(server, tmp_path, capsys):
    before = {name: server.metric("request_success_total", adapter=name) for name in ("json", "sql")}
    report = _bench(
        server,
        tmp_path,
        *("--num-prompts", 8, "--input-len", 12, "--output-len", 6, "--ignore-eos", "--request-rate", 100),
        *("--lora-modules", "json", "sql", "--lora-assignment", "round-robin", "--goodput", "e2el:60000"),
        *("--plot", tmp_path / "result.png"),
    )
    found = report["figures"]
    assert (found["completed"], found["failed"]) == (8, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (96, 48)
    assert found["request_goodput"] == found["request_throughput"]
    assert found["output_throughput"] == pytest.approx(6 * found["request_throughput"], rel=0.01)
    assert 0 < found["median_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
    assert Counter(request["adapter"] for request in report["requests"]) == {"json": 4, "sql": 4}
    for request in report["requests"]:
        assert request["output_tokens"] == 6
        assert request["ttft"] + sum(request["itl"]) == pytest.approx(request["e2el"], abs=1e-4)
    # The server was asked for the same, and once more for the first adapter, to warm up.
    served = {name: server.metric("request_success_total", adapter=name) - before[name] for name in before}
    assert served == {"json": 5, "sql": 4}
    assert found["acceptance_length"] >= 1  # of the server's drafter, from its metrics
    assert report["client"]["peak_concurrency"] <= 8
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    assert "Mean TTFT (ms):" in capsys.readouterr().out


def test_chat_from_a_file_with_few_at_once(server, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": "What is 7 plus 12?"}]}, {"prompt": "Hi", "adapter": "support"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    report = _bench(
        server,
        tmp_path,
        *("--endpoint", "/v1/chat/completions", "--dataset", "jsonl", "--dataset-path", file, "--num-prompts", 6),
        *("--max-concurrency", 2, "--output-len", 8),
    )
    assert report["figures"]["completed"] == 6
    assert report["client"]["peak_concurrency"] == 2
    assert [request["adapter"] for request in report["requests"]] == [None, "support"] * 3
    assert all(request["prompt_tokens"] > 0 for request in report["requests"])


def test_a_shared_prefix_is_found_in_the_cache(server, tmp_path):
    before = server.metric("prefix_cache_hits_total")
    options = ("--dataset", "prefix", "--prefix-len", 64, "--input-len", 4, "--output-len", 2, "--num-prompts", 4)
    assert _bench(server, tmp_path, *options, "--max-concurrency", 1)["figures"]["completed"] == 4
    assert server.metric("prefix_cache_hits_total") - before >= 3 * 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "nobody"), "--model: the server has no model 'nobody'"),
        (("--lora-modules", "nobody"), "--lora-modules: the server has no model 'nobody'"),
        (("--input-len", "20000"), "the first request failed: status 400"),
        (("--tokenizer", "/nowhere"), "--tokenizer: "),
    ],
)
def test_what_the_server_refuses_is_said(server, options, message, capsys):
    assert main(["bench", "serve", "--base-url", server.url, *options]) == 1
    assert message in capsys.readouterr().err


def test_requests_that_fail_are_counted_and_shown(server, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Hi"}\n{"prompt": "Hi", "adapter": "nobody"}')
    report = _bench(server, tmp_path, "--dataset", "jsonl", "--dataset-path", file, "--num-prompts", 4)
    assert (report["figures"]["completed"], report["figures"]["failed"]) == (2, 2)
    assert "nobody" in report["errors"][0]
    assert "failed: status 404" in capsys.readouterr().out
