"""`outrider bench latency | serve`, from options to files."""

import json
from collections import Counter

import numpy as np
import pytest

from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_model_path
from outrider.platform.cli.bench.latency.latency_session import prompt_batches
from outrider.platform.cli.bench.serving.serve_command import make_groups
from outrider.platform.cli.main import build_parser, main

_ENGINE = ["--no-speculation", "--max-model-len", "64", "--num-gpu-blocks-override", "64", "--disable-tqdm"]


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


def test_batches_differ_so_that_no_drafter_remembers():
    options = build_parser().parse_args(["bench", "latency", "--batch-size", "2", "--input-len", "5"])
    batches = prompt_batches(options, load_tokenizer(demo_model_path()), 0)
    prompts = [prompt["prompt_token_ids"] for _ in range(3) for prompt in next(batches)]
    assert len({tuple(prompt) for prompt in prompts}) == 6


def test_made_up_acceptance_is_labelled(tmp_path, capsys):
    out = tmp_path / "l.json"
    config = {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0, 1.0],
    }
    options = ["--batch-size", "3", "--num-iters", "1", "--num-iters-warmup", "0", "--input-len", "8"]
    engine = [option for option in _ENGINE if option != "--no-speculation"]
    options += ["--output-len", "12", "--output-json", str(out), *engine, "--speculative-config", json.dumps(config)]
    assert main(["bench", "latency", *options]) == 0
    assert capsys.readouterr().out.startswith("SYNTHETIC ACCEPTANCE (1, 1)")
    report = json.loads(out.read_text())
    assert report["labels"][0].startswith("SYNTHETIC ACCEPTANCE")
    assert report["figures"]["acceptance_rate"] == 1
    assert 1 < report["figures"]["acceptance_length"] <= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("serve --base-url ftp://host", "--base-url: must be http"),
        ("serve --base-url http://me:secret@127.0.0.1:1", "--base-url: must be http"),
        ("serve --base-url http://127.0.0.1:1", "--base-url: http://127.0.0.1:1: "),
        ("serve --group a x --group b", "--group: must be NAME KEY=VALUE ..., got a x"),
        ("serve --group a --group a", "--group: every group needs a name of its own"),
        ("serve --group a request_rate=0", "--group: a: request_rate must be a number greater than 0"),
        ("serve --group a api_key_env=NO_SUCH_KEY", "--group: a: the variable NO_SUCH_KEY holds no key"),
        ("latency --save-detailed", "--save-detailed: has no file"),
        ("latency --no-speculation --input-len 40000", "--input-len: 40128 tokens"),
        ("latency --lora nobody", "--lora: the adapter 'nobody' needs a path"),
        ("latency --lora json --lora json", "--lora: there are two"),
        ("latency --lora json --no-enable-lora", "--lora: needs LoRA"),
        ("latency --no-speculation --speculative-config {}", "--no-speculation: not allowed together"),
        ("latency --max-num-seqs 0", "--max-num-seqs: "),
        ("latency --profile /dev/null/x", "--profile: /dev/null/x cannot be made"),
        ("latency --output-json /nowhere/x.json", "there is no folder /nowhere"),
    ],
)
def test_bad_options_are_named(command, message, capsys):
    assert main(["bench", *command.split()]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("serve", "--request-rate", "0"),
        ("serve", "--request-rate", "nan"),
        ("serve", "--max-concurrency", "0"),
        ("serve", "--temperature", "-1"),
        ("serve", "--extra-body", "[]"),
        ("latency", "--metric-percentiles", "101"),
        ("latency", "--percentile-metrics", "speed"),
    ],
)
def test_bad_values_are_refused_at_once(command, option, value, capsys):
    with pytest.raises(SystemExit) as error:
        main(["bench", command, option, value])
    assert error.value.code == 2
    assert f"argument {option}" in capsys.readouterr().err


def test_groups_have_settings_and_fields_of_their_own(monkeypatch):
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    monkeypatch.setenv("FLOOD", "secret")
    line = "bench serve --num-prompts 7 --group calm speculative=false request_rate=2 "
    line += "--group flood api_key_env=FLOOD max_concurrency=3 num_prompts=9 base_url=http://x/ model=sql"
    calm, flood = make_groups(build_parser().parse_args(line.split()))
    assert (calm.fields, calm.request_rate, calm.num_prompts) == ({"speculative": False}, 2.0, 7)
    assert (flood.fields, flood.api_key, flood.max_concurrency) == ({"model": "sql"}, "secret", 3)
    assert (flood.num_prompts, flood.base_url) == (9, "http://x")
    assert "secret" not in repr(flood) + str(flood.as_dict())


@pytest.mark.parametrize("command", ["serve --grou a", "lora --adapters 3", "speculation --rand"])
def test_options_are_not_abbreviated(command, capsys):
    with pytest.raises(SystemExit):
        main(["bench", *command.split()])
    assert "unrecognized arguments" in capsys.readouterr().err
