"""`outrider bench serve` against a real server."""

import json

import pytest

from outrider.platform.cli.main import main


def _bench(server, tmp_path, *options):
    out = tmp_path / "result.json"
    common = ["--base-url", server.url, "--output-json", str(out)]
    assert main(["bench", "serve", *common, *map(str, options)]) == 0
    return json.loads(out.read_text())


def test_modes_in_turn(server, tmp_path, capsys):
    report = _bench(
        server,
        tmp_path,
        *("--group", "off", "speculative=false", "--group", "4 drafts", "speculative=4"),
        *("--num-prompts", 6, "--output-len", 12, "--max-concurrency", 2, "--rounds", 2),
        *("--plot", tmp_path / "result.png"),
    )
    off, drafts = report["rows"]
    for row in (off, drafts):
        assert (row["requests"], row["failed"]) == (6, 0)
        assert row["output_throughput"] > 0
        assert 0 < row["ttft_ms"]["median"] <= row["ttft_ms"]["p99"] <= row["e2el_ms"]["p99"]
        assert row["same_text_as_first"] == {"same": 12, "of": 12}
    assert off["ratio_to_first"] == 1
    assert "acceptance_length" not in off
    assert drafts["acceptance_length"] >= 1
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("group ")
    assert lines[-1].startswith("4 drafts ")


def test_adapters_together_from_a_file(server, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": "What is 7 plus 12?"}]}, {"prompt": "Hi", "adapter": "support"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    names = ("json", "sql", "support")
    before = {name: server.metric("request_success_total", adapter=name) for name in names}
    report = _bench(
        server,
        tmp_path,
        *("--group", "json", "model=json", "num_prompts=6", "--group", "sql", "model=sql", "request_rate=50"),
        *("--together", "--prompts", file, "--num-prompts", 4, "--output-len", 4, "--ignore-eos", "--rounds", 1),
    )
    assert [row["requests"] for row in report["rows"]] == [6, 4]
    served = {name: server.metric("request_success_total", adapter=name) - before[name] for name in names}
    assert served == {"json": 4, "sql": 3, "support": 5}  # half of the lines, and one to warm up each group


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--group", "a", "model=nobody"), "a: the first request failed: status 404"),
        (("--group", "a", "max_tokens=2000000"), "a: the first request failed: status 400"),
    ],
)
def test_a_servers_refusal_is_reported(server, options, message, capsys):
    assert main(["bench", "serve", "--base-url", server.url, *options]) == 1
    assert message in capsys.readouterr().err


def test_requests_that_fail_are_counted_and_shown(server, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Hi"}\n{"prompt": "Hi", "adapter": "nobody"}')
    (row,) = _bench(server, tmp_path, "--prompts", file, "--num-prompts", 4, "--rounds", 1)["rows"]
    assert (row["requests"], row["failed"]) == (2, 2)
    assert "nobody" in row["errors"][0]
    assert "all: status 404" in capsys.readouterr().out
