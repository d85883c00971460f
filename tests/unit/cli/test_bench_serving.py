"""`outrider bench latency | throughput | serve`, from options to files."""

import argparse
import json
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_adapters, demo_model_path
from outrider.platform.cli.bench.serving import datasets
from outrider.platform.cli.main import build_parser, main


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(demo_model_path())


_ENGINE = ["--no-speculation", "--max-model-len", "64", "--num-gpu-blocks-override", "64", "--disable-tqdm"]


@pytest.mark.slow
def test_throughput_on_the_demo(tmp_path, capsys):
    out, png = tmp_path / "t.json", tmp_path / "t.png"
    options = ["--num-prompts", "5", "--input-len", "8", "--output-len", "4", "--lora", "json"]
    other = f"other={demo_adapters()['sql']}"
    files = ["--output-json", str(out), "--save-detailed", "--plot", str(png)]
    command = ["bench", "throughput", *options, "--lora", other, "--lora-assignment", "round-robin", *files, *_ENGINE]
    assert main(command) == 0
    report = json.loads(out.read_text())
    found = report["figures"]
    assert (found["completed"], found["total_input_tokens"], found["total_output_tokens"]) == (5, 40, 20)
    assert found["output_throughput"] == pytest.approx(20 / found["duration"], rel=0.01)
    assert found["total_token_throughput"] == pytest.approx(60 / found["duration"], rel=0.01)
    assert [request["adapter"] for request in report["requests"]] == ["json", "other", "json", "other", "json"]
    assert all(r["finish_reason"] == "length" and r["itl"] == [] for r in report["requests"])
    assert report["arguments"]["lora_assignment"] == "round-robin"
    assert report["machine"]["outrider"]
    assert report["model"]["name"] == "outrider-demo"
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "Output token throughput (tok/s):" in capsys.readouterr().out


def test_throughput_with_speculation_and_made_up_acceptance(tmp_path, capsys):
    out = tmp_path / "t.json"
    config = {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0, 1.0],
    }
    options = ["--num-prompts", "3", "--input-len", "8", "--output-len", "12", "--output-json", str(out)]
    engine = [option for option in _ENGINE if option != "--no-speculation"]
    assert main(["bench", "throughput", *options, *engine, "--speculative-config", json.dumps(config)]) == 0
    assert capsys.readouterr().out.startswith("SYNTHETIC ACCEPTANCE (1, 1)")
    report = json.loads(out.read_text())
    assert report["labels"][0].startswith("SYNTHETIC ACCEPTANCE")
    assert report["figures"]["acceptance_rate"] == 1
    assert 1 < report["figures"]["acceptance_length"] <= 3


@pytest.mark.slow
def test_latency_on_the_demo_with_its_profile(tmp_path, capsys):
    out, folder = tmp_path / "l.json", tmp_path / "new" / "profile"
    options = ["--batch-size", "2", "--input-len", "8", "--output-len", "6", "--lora", "json"]
    options += ["--num-iters", "3", "--num-iters-warmup", "1", "--metric-percentiles", "50,90"]
    files = ["--profile", str(folder), "--output-json", str(out), "--save-detailed"]
    assert main(["bench", "latency", *options, *files, *_ENGINE]) == 0
    report = json.loads(out.read_text())
    seconds, found = report["latencies"], report["figures"]
    assert len(seconds) == 3
    assert found["avg_latency"] == pytest.approx(np.mean(seconds), abs=1e-5)
    assert found["percentiles"] == {
        "50": pytest.approx(np.percentile(seconds, 50), abs=1e-5),
        "90": pytest.approx(np.percentile(seconds, 90), abs=1e-5),
    }
    assert (found["completed"], found["total_output_tokens"], len(report["requests"])) == (6, 36, 6)
    assert "Avg latency (s):" in capsys.readouterr().out

    profile = report["profile"]
    assert profile["num_steps"] >= 3 * 6  # three batches of six tokens; a batch may begin in two steps
    parts = {part["name"] for part in profile["parts"]}
    assert parts >= {"schedule", "prepare", "forward", "attention", "LoRA", "logits", "sample", "commit", "IPC"}
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    spans = Counter(event["name"] for event in events if event["ph"] == "X")
    assert spans["step"] == spans["schedule"] == spans["commit"] == profile["num_steps"]
    assert spans["attention"] == 5 * spans["forward"]  # layers of the demo
    assert spans["detokenize"] > 0
    torch_names = {event.get("name") for event in json.loads((folder / "torch.json").read_text())["traceEvents"]}
    assert {"forward", "attention"} <= torch_names
    assert "forward" in (folder / "torch.txt").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["timeline.json", "torch.json", "torch.txt"]


def test_batches_differ_so_that_no_drafter_remembers(tokenizer):
    from outrider.platform.cli.bench.serving.latency import prompt_batches

    options = build_parser().parse_args(["bench", "latency", "--batch-size", "2", "--input-len", "5"])
    batches = prompt_batches(options, tokenizer, 0)
    prompts = [prompt["prompt_token_ids"] for _ in range(3) for prompt in next(batches)]
    assert len({tuple(prompt) for prompt in prompts}) == 6
    assert datasets.random_prompt(tokenizer, 5, random.Random(0)) == prompts[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("serve --dataset sharegpt", "--dataset-path: is needed"),
        ("serve --dataset-path x", "--dataset-path: means nothing to the dataset random"),
        ("serve --base-url ftp://host", "--base-url: must be http"),
        ("serve --base-url http://host:port", "--base-url: not a URL"),
        ("serve --base-url http://127.0.0.1:1", "--base-url: cannot connect"),
        ("serve --base-url http://me:secret@127.0.0.1:1", "--base-url: must not hold a user or password"),
        ("serve --host 127.0.0.1 --port 1", "--base-url: cannot connect to 127.0.0.1:1"),
        ("serve --save-detailed", "--save-detailed: has no file"),
        ("throughput --no-speculation --input-len 40000", "--input-len: a prompt of 40000 tokens"),
        ("throughput --lora nobody", "--lora: the adapter 'nobody' needs a path"),
        ("throughput --lora json --lora json", "--lora: there are two"),
        ("throughput --lora json --no-enable-lora", "--lora: needs LoRA"),
        ("throughput --no-speculation --speculative-config {}", "--no-speculation: not allowed together"),
        ("latency --max-num-seqs 0", "--max-num-seqs: "),
        ("latency --profile /dev/null/x", "--profile: /dev/null/x cannot be made"),
        ("latency --output-json /nowhere/x.json", "there is no folder /nowhere"),
    ],
)
def test_bad_options_are_named(command, message, capsys):
    assert main(["bench", *command.split()]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--request-rate", "0"),
        ("--request-rate", "nan"),
        ("--burstiness", "0"),
        ("--max-concurrency", "0"),
        ("--random-range-ratio", "1"),
        ("--metric-percentiles", "101"),
        ("--percentile-metrics", "speed"),
        ("--goodput", "ttft"),
        ("--goodput", "ttft:fast"),
        ("--goodput", "speed:3"),
        ("--temperature", "-1"),
        ("--dataset-name", "nothing"),
        ("--lora-assignment", "nobody"),
        ("--extra-body", "[]"),
        ("--endpoint", "/v1/embeddings"),
        ("--prefix-len", "-1"),
    ],
)
def test_bad_values_are_refused_at_once(option, value, capsys):
    with pytest.raises(SystemExit) as error:
        main(["bench", "serve", option, value])
    assert error.value.code == 2
    assert f"argument {option}" in capsys.readouterr().err


def test_names_that_users_of_vllm_know():
    lengths = "--random-input-len 3 --random-output-len 4 --random-prefix-len 5"
    shown = "--goodput ttft:200 tpot:50 --percentile-metrics ttft,itl --metric-percentiles 50,99.9"
    options = build_parser().parse_args(f"bench serve --request-rate inf {lengths} {shown}".split())
    assert (options.input_len, options.output_len, options.prefix_len) == (3, 4, 5)
    assert options.goodput == [("ttft", 200.0), ("tpot", 50.0)]
    assert (options.percentile_metrics, options.metric_percentiles) == (["ttft", "itl"], [50.0, 99.9])


@pytest.mark.parametrize(
    ("given", "url", "endpoint"),
    [
        ("", "http://127.0.0.1:8000", "/v1/completions"),
        ("--host ::1 --port 8001", "http://[::1]:8001", "/v1/completions"),
        ("--backend openai-chat --host api", "http://api:8000", "/v1/chat/completions"),
        ("--backend vllm --base-url https://x/y --endpoint /v2/completions", "https://x/y", "/v2/completions"),
    ],
)
def test_where_requests_go(given, url, endpoint, monkeypatch):
    class Stop(Exception):
        pass

    def stop(options, client):
        assert (options.base_url, options.endpoint) == (url, endpoint)
        raise Stop

    monkeypatch.setattr("outrider.platform.cli.bench.serving.over_http._measure", stop)
    with pytest.raises(Stop):
        main(["bench", "serve", *given.split()])


@pytest.mark.parametrize(
    "command", ["serve --goodpu ttft:1", "lora --adapters 3", "compare a b --plo c", "speculation --rand"]
)
def test_options_are_not_abbreviated(command, capsys):
    with pytest.raises(SystemExit):
        main(["bench", *command.split()])
    assert "unrecognized arguments" in capsys.readouterr().err


def test_arguments_in_a_report_hold_no_secret():
    from outrider.platform.cli.bench.serving.serving_commands import arguments

    namespace = argparse.Namespace(api_key="secret", request_rate=float("inf"), run=SimpleNamespace(), seed=0)
    assert arguments(namespace) == {"request_rate": "inf", "seed": 0}
