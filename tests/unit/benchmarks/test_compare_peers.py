"""Engines side by side, with made-up ones: the real worker process, turns, failures, ratios, the written result."""

import importlib
import json
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

# The worker with engines of its own. An engine named weak fails in each mode in another way.
WORKER = """
    import importlib.util, os, sys, threading, time
    spec = importlib.util.spec_from_file_location("worker", {worker!r})
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    worker.SHORTEST_ROUND = 0.0

    def load(seconds, weak):
        def engine(options):
            print("noise on standard output")
            if weak and options.mode == "lora":
                raise RuntimeError("no adapters here")
            def generate(prompts, output):
                if weak and output == 64 and options.mode == "ngram":
                    print("giving up", file=sys.stderr, flush=True)
                    os._exit(7)
                if weak and output == 64 and options.mode == "draft":
                    return [prompt[:1] for prompt in prompts]
                time.sleep(seconds)
                return [prompt[:1] * output for prompt in prompts]
            return generate
        return engine

    def spinning(options):
        def spin():
            while True:
                pass
        threading.Thread(target=spin, daemon=True).start()
        return load(0.0, False)(options)

    def hanging(options):
        time.sleep(600)

    engines = dict(outrider=load(0.0, False), slow=load(0.06, False), weak=load(0.0, True))
    engines |= dict(spinning=spinning, hanging=hanging)
    worker.ENGINES = {{name: (engine, ("pytest", "no-such-thing")) for name, engine in engines.items()}}
    worker.main()
"""


@pytest.fixture
def peers(repo_root, monkeypatch):
    """Module of benchmarks/peers by name."""
    monkeypatch.syspath_prepend(repo_root / "benchmarks")
    return lambda name: importlib.import_module(f"peers.{name}")


@pytest.fixture
def compare_peers(peers):
    return importlib.import_module("compare_peers")


@pytest.fixture
def fake(peers, tmp_path):
    """Name -> an engine whose worker is the real one, with made-up engines in it."""
    environments = peers("environments")
    script = tmp_path / "fake_worker.py"
    script.write_text(textwrap.dedent(WORKER.format(worker=str(environments.WORKER))), encoding="utf-8")
    return lambda name, **options: environments.Engine(name, Path(sys.executable), worker=script, **options)


@pytest.fixture
def measure(peers, tmp_path):
    """(mode, engines) -> the results of two rounds of two sizes."""
    session, results = peers("session"), peers("session").Results()
    sizes = [session.Size(1, 4, 64), session.Size(2, 8, 64)]

    def run(mode, engines, say=lambda text: None):
        session.Session(tmp_path, tmp_path / "logs", sizes, 2, 60, say).run(
            session.Case("tiny", mode), engines, results
        )
        return results

    return run


def running_workers(folder):
    """Processes of the fake worker in this folder that still run; zombies have no command line."""
    found, script = [], str(folder / "fake_worker.py").encode()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [file.parent.name] if script in file.read_bytes() else []
        except OSError:
            continue
    return found


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_stopped(stat):
    return stat.read_text().rpartition(")")[2].split()[0] == "T"


# --- The interleaved run ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_engines_take_turns_and_another_one_begins_each_time(fake, measure):
    results = measure("base", [fake("outrider"), fake("slow")])
    assert not results.failures
    turns = [(m["round"], m["requests"], m["engine"]) for m in results.measurements]
    assert [turn[:2] for turn in turns] == [(1, 1), (1, 1), (1, 2), (1, 2), (2, 1), (2, 1), (2, 2), (2, 2)]
    firsts = [turns[i][2] for i in range(0, 8, 2)]
    assert {"outrider", "slow"} == set(firsts) == set(firsts[:2])
    for i in range(0, 8, 2):
        assert {turns[i][2], turns[i + 1][2]} == {"outrider", "slow"}
    for m in results.measurements:
        assert m["tokens_per_second"] == pytest.approx(m["requests"] * 64 / m["seconds"])
        assert len(m["first_tokens"]) == m["requests"]
    slow = [m["seconds"] for m in results.measurements if m["engine"] == "slow"]
    assert all(seconds >= 0.06 for seconds in slow)


@pytest.mark.slow
def test_an_engine_for_one_request_gets_no_more(fake, measure):
    results = measure("base", [fake("outrider"), fake("slow", most_requests=1)])
    assert not results.failures
    assert {(m["engine"], m["requests"]) for m in results.measurements} == {
        ("outrider", 1),
        ("outrider", 2),
        ("slow", 1),
    }


def test_starts_are_described(fake, measure):
    (start,) = measure("base", [fake("outrider")]).starts
    assert start["start_seconds"] >= start["load_seconds"] >= 0
    assert start["versions"] == {"pytest": pytest.__version__}
    assert start["peak_rss_mib"] > 1
    assert (start["model"], start["mode"], start["engine"]) == ("tiny", "base", "outrider")


@pytest.mark.parametrize(
    ("mode", "reason", "started"),
    [
        ("lora", "RuntimeError: no adapters here", 0),
        ("ngram", "ended with status 7; last line: giving up", 1),
        ("draft", "ValueError: asked for 1 outputs of 64 tokens, got lengths [1]", 1),
    ],
)
def test_an_engine_that_fails_is_named_and_the_others_go_on(fake, measure, tmp_path, mode, reason, started):
    results = measure(mode, [fake("weak"), fake("outrider")])
    assert results.failures == [{"model": "tiny", "mode": mode, "engine": "weak", "reason": reason}]
    assert [m["engine"] for m in results.measurements] == ["outrider"] * 4
    assert len(results.starts) == 1 + started
    assert running_workers(tmp_path) == []


def test_an_engine_that_cannot_be_started_is_named(fake, measure):
    results = measure("base", [fake("unknown"), fake("outrider")])
    assert [failure["engine"] for failure in results.failures] == ["unknown"]
    assert "invalid choice" in results.failures[0]["reason"]
    assert len(results.measurements) == 4


@pytest.mark.slow
def test_an_interrupt_ends_all_workers_and_keeps_results(fake, peers, tmp_path):
    session = peers("session")
    results, case = session.Results(), session.Case("tiny", "base")

    def say(text):
        if len(results.measurements) == 3:
            raise KeyboardInterrupt

    run = session.Session(tmp_path, tmp_path / "logs", [session.Size(1, 4, 64)], 5, 60, say).run
    with pytest.raises(KeyboardInterrupt):
        run(case, [fake("outrider"), fake("slow")], results)
    assert len(results.measurements) == 3
    assert running_workers(tmp_path) == []


# --- Workers ------------------------------------------------------------------------------------------------


@pytest.fixture
def start(peers, fake, tmp_path):
    """Engine's name -> its worker in mode base, ended after the test."""
    workers = []

    def make(name, timeout=60.0):
        engine = fake(name)
        command = engine.command(tmp_path, "tiny", "base")
        workers.append(peers("process").Worker(command, engine.environment(), tmp_path / "log", timeout))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def test_an_idle_worker_takes_no_processor_time(start):
    worker = start("spinning")
    worker.ask({"requests": 1, "prompt": 4, "output": 64})
    pid = worker._process.pid
    deadline = time.monotonic() + 20
    while not all(is_stopped(stat) for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        assert time.monotonic() < deadline  # each thread stops when it next has a core
        time.sleep(0.01)
    before = cpu_seconds(pid)
    time.sleep(0.3)
    assert cpu_seconds(pid) == before > 0
    assert worker.ask({"requests": 1, "prompt": 4, "output": 64})["seconds"] > 0


def test_an_unresponsive_peer_is_given_up(start, peers, tmp_path):
    with pytest.raises(peers("process").WorkerError, match=r"^no answer in 0\.5 seconds$"):
        start("hanging", timeout=0.5)
    assert running_workers(tmp_path) == []


def test_processes_of_a_worker_are_found_and_ended(peers, tmp_path):
    process = peers("process")
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print('{}', flush=True); sys.stdin.read()"
    worker = process.Worker([sys.executable, "-c", code], dict(os.environ), tmp_path / "log", 60)
    parent, child = (found.pid for found in process.processes(worker._process.pid))
    assert Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"sleep")
    worker.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and Path(f"/proc/{child}").exists() and not _is_zombie(child):
        time.sleep(0.01)
    assert not Path(f"/proc/{child}").exists() or _is_zombie(child)
    assert not Path(f"/proc/{parent}").exists()
    assert process.peak_rss(parent) == 0


def _is_zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_round_of_a_fast_engine_is_repeated(peers, monkeypatch):
    worker = peers("worker")
    calls = []

    def generate(prompts, output):
        calls.append(len(prompts))
        return [[5] * output for _ in prompts]

    monkeypatch.setattr(worker, "SHORTEST_ROUND", 0.2)
    found = worker.run_round(generate, requests=3, prompt=4, output=2)
    assert calls[0] == 1  # the engine's caches
    assert set(calls[1:]) == {3}
    assert found["repeats"] == len(calls) - 1 > 1
    assert found["first_tokens"] == [5, 5, 5]


def test_prompts_are_the_same_every_time(peers):
    make_prompts = peers("worker").make_prompts
    assert make_prompts(8, 128) == make_prompts(8, 128)
    assert [len(p) for p in make_prompts(2, 7)] == [7, 7]
    assert len({tuple(p) for p in make_prompts(32, 128)}) == 32


# --- The command --------------------------------------------------------------------------------------------


@pytest.fixture
def command(compare_peers, fake, tmp_path, monkeypatch):
    """(arguments, engines) -> exit status and report of a whole run with made-up engines."""
    monkeypatch.setattr(compare_peers, "prepare_peers", lambda options, results: {})
    file = tmp_path / "out" / "result.json"

    def run(*arguments, engines=("outrider", "slow")):
        monkeypatch.setattr(compare_peers, "engines_for", lambda case, peers: [fake(name) for name in engines])
        options = ["--models", str(tmp_path), "--envs", str(tmp_path), "--output-json", str(file), *arguments]
        before = signal.getsignal(signal.SIGTERM)
        try:
            status = compare_peers.main(["--requests", "1", "--rounds", "1", "--sizes", "small", *options])
        finally:
            signal.signal(signal.SIGTERM, before)
        return status, json.loads(file.read_text(encoding="utf-8"))

    return run


@pytest.mark.slow
def test_a_run_writes_and_prints_its_ratios_last(command, capsys):
    status, report = command("--modes", "base,ngram")
    assert (status, report["interrupted"], report["failures"]) == (0, False, [])
    assert {(row["mode"], row["peer"]) for row in report["ratios"]} == {("base", "slow"), ("ngram", "slow")}
    assert all(row["ratio"] > 1 for row in report["ratios"])
    assert report["machine"]["usable_cores"] >= 1
    assert report["settings"]["sizes"] == [{"requests": 1, "prompt": 32, "output": 64}]
    assert set(report["versions"]) == {"outrider", "slow"}
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last[:-1] == ["small", "ngram,", "1", "requests", "outrider", "/", "slow:"]


def test_a_failed_peer_is_reported_and_leaves_the_status_alone(command, capsys):
    status, report = command("--modes", "lora", engines=("outrider", "weak"))
    assert status == 0
    assert [failure["engine"] for failure in report["failures"]] == ["weak"]
    assert "weak (small lora): RuntimeError: no adapters here" in capsys.readouterr().out


def test_a_signal_keeps_results(command, compare_peers, monkeypatch, capsys, tmp_path):
    def say(text):
        if text.startswith("small ngram: starting"):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(compare_peers, "say", say)
    status, report = command("--modes", "base,ngram")
    assert (status, report["interrupted"]) == (130, True)
    assert {row["mode"] for row in report["medians"]} == {"base"}
    assert capsys.readouterr().out.startswith("INTERRUPTED")
    assert running_workers(tmp_path) == []


def test_each_mode_has_its_engines(compare_peers, peers, fake):
    names = lambda mode: [e.name for e in compare_peers.engines_for(peers("session").Case("small", mode), every)]  # noqa: E731
    every = {name: fake(name) for name in ("vllm", "transformers", "openvino")}
    assert names("lora") == ["outrider", *every]
    assert names("draft") == ["outrider", "outrider-adaptive", "vllm", "openvino"]
    assert names("w8a8") == ["outrider", "vllm"]


def test_quantised_checkpoints_are_the_model_rounded(peers, tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig

    from outrider.models.checkpoint.loader import load_model

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tiny")
    plain = load_model(tmp_path / "tiny", dtype="float32", device="cpu")
    x = torch.randn(3, 128)
    for mode, most in (("w8a8", 0.02), ("w4a16", 0.15)):
        peers("quantised_models").make_quantised(tmp_path, "tiny", mode, print)
        rounded = load_model(tmp_path / f"tiny-{mode}", dtype="float32", device="cpu")
        for exact, made in zip(plain.linears(), rounded.linears(), strict=True):
            if exact.in_features == 128:
                wanted = exact.project(x)
                assert 0 < float((made.project(x) - wanted).norm() / wanted.norm()) < most


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "vllm,sglang"], "unknown: 'sglang'; known are vllm, transformers, openvino"),
        (["--requests", "2"], "unknown: '2'; known are 1, 8, 32"),
        (["--rounds", "0"], "of at least 1, got"),
    ],
)
def test_wrong_options_are_refused(compare_peers, arguments, message, capsys):
    with pytest.raises(SystemExit):
        compare_peers.parse(["--models", "m", "--output-json", "f", *arguments])
    assert message in capsys.readouterr().err


def test_a_peer_that_cannot_be_had_is_left_out(compare_peers, peers, monkeypatch, tmp_path):
    environments, results = peers("environments"), peers("session").Results()

    def prepare(name, envs, say):
        if name == "vllm":
            raise environments.PeerError("no network")
        return environments.Engine(name, Path(sys.executable))

    made = set()
    monkeypatch.setattr(compare_peers, "prepare", prepare)
    for make in ("export_to_openvino", "make_gguf"):
        monkeypatch.setattr(compare_peers, make, lambda engine, models, name, kind, say: made.add((name, kind)))
    monkeypatch.setattr(peers("models"), "make_missing", lambda *arguments: None)
    options = compare_peers.parse(["--models", str(tmp_path), "--output-json", "f", "--modes", "draft,int4"])
    found = compare_peers.prepare_peers(options, results)
    assert list(found) == ["transformers", "openvino", "llamacpp"]
    assert results.failures == [{"model": "all", "mode": "all", "engine": "vllm", "reason": "no network"}]
    names = ("small", "medium", "draft")
    quantized = {(name, kind) for name in names[:2] for kind in ("Q4_0", "Q4_K_M")}
    assert made == {(name, mode) for name in names for mode in ("draft", "int4")} | quantized
    engines = compare_peers.engines_for(peers("session").Case("small", "int4"), found)
    assert [engine.name for engine in engines] == ["outrider", "openvino", "llamacpp-Q4_0", "llamacpp-Q4_K_M"]
