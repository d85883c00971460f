"""Peers' environments, the models they are compared on, and the report of a comparison."""

import importlib
import json
import sys
from pathlib import Path

import pytest


@pytest.fixture
def peers(repo_root, monkeypatch):
    """Module of benchmarks/peers by name."""
    monkeypatch.syspath_prepend(repo_root / "benchmarks")
    return lambda name: importlib.import_module(f"peers.{name}")


# --- Environments -------------------------------------------------------------------------------------------


def test_workers_inherit_no_setting_that_changes_an_engine(peers, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("KEPT", "yes")
    engine = peers("environments").Engine("vllm", Path(sys.executable), variables={"LD_PRELOAD": "x.so"})
    environment = engine.environment()
    assert not {"OMP_NUM_THREADS", "PYTHONPATH"} & set(environment)
    assert (environment["KEPT"], environment["LD_PRELOAD"]) == ("yes", "x.so")


@pytest.fixture
def no_venv(peers, monkeypatch):
    """An environment is a link to this interpreter."""

    def make(command, what):
        (command[-1] / "bin").mkdir(parents=True, exist_ok=True)
        if not (command[-1] / "bin" / "python").exists():
            (command[-1] / "bin" / "python").symlink_to(sys.executable)

    monkeypatch.setattr(peers("environments"), "run", make)


@pytest.mark.usefixtures("no_venv")
def test_an_environment_is_made_once(peers, tmp_path, monkeypatch):
    environments = peers("environments")
    installed, said = [], []
    peer = environments.Peer(installed.append, ("json",), ("base",))
    monkeypatch.setitem(environments.PEERS, "own", peer)
    for _ in range(2):
        engine = environments.prepare("own", tmp_path, said.append)
    assert installed == [tmp_path / "own"]
    assert len(said) == 1
    assert engine.python == tmp_path / "own" / "bin" / "python"


@pytest.mark.usefixtures("no_venv")
def test_an_installation_that_was_cut_off_is_begun_again(peers, tmp_path, monkeypatch):
    environments = peers("environments")
    tries = []

    def install(folder):
        tries.append(folder)
        if len(tries) == 1:
            raise environments.PeerError("pip install failed: no network")

    monkeypatch.setitem(environments.PEERS, "own", environments.Peer(install, ("json",), ("base",)))
    with pytest.raises(environments.PeerError, match="no network"):
        environments.prepare("own", tmp_path, lambda text: None)
    environments.prepare("own", tmp_path, lambda text: None)
    assert len(tries) == 2


@pytest.mark.usefixtures("no_venv")
def test_an_environment_that_lacks_its_engine_is_refused(peers, tmp_path, monkeypatch):
    environments = peers("environments")
    peer = environments.Peer(lambda folder: None, ("no_such_engine.part",), ("base",))
    monkeypatch.setitem(environments.PEERS, "own", peer)
    with pytest.raises(environments.PeerError, match=r"lacks one of no_such_engine\.part"):
        environments.prepare("own", tmp_path, lambda text: None)


def test_vllm_is_not_measured_without_tcmalloc(peers, tmp_path, monkeypatch):
    environments = peers("environments")
    openmp = tmp_path / "lib" / "libiomp5.so"
    openmp.parent.mkdir()
    openmp.touch()
    monkeypatch.setattr(environments, "TCMALLOC", str(tmp_path / "none*"))
    with pytest.raises(environments.PeerError, match="tcmalloc"):
        environments.PEERS["vllm"].variables(tmp_path)
    (tmp_path / "nonesuch.so").touch()
    assert environments.PEERS["vllm"].variables(tmp_path) == {"LD_PRELOAD": f"{tmp_path / 'nonesuch.so'}:{openmp}"}


def test_the_last_output_of_a_failed_command_is_the_reason(peers):
    environments = peers("environments")
    code = "print('first'); print('the reason'); raise SystemExit(3)"
    with pytest.raises(environments.PeerError, match=r"^export failed: the reason$"):
        environments.run([sys.executable, "-c", code], "export")


def test_an_adapters_scale(peers, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 32, "r": 8}', encoding="utf-8")
    assert peers("worker")._lora_scale(str(tmp_path)) == 4.0


# --- The report ---------------------------------------------------------------------------------------------


def measurement(engine, number, rate, requests=1, tokens=(3,), mode="base"):
    return {
        "model": "tiny",
        "mode": mode,
        "engine": engine,
        "requests": requests,
        "prompt": 4,
        "output": 64,
        "round": number,
        "seconds": requests * 64 / rate,
        "tokens_per_second": rate,
        "first_tokens": list(tokens),
    }


@pytest.fixture
def summary(peers):
    """Three rounds; the peer had a slow neighbour in the second, and failed in the third of 8 requests."""
    results = peers("session").Results()
    for number, ours, theirs in ((1, 100.0, 50.0), (2, 110.0, 11.0), (3, 90.0, 60.0)):
        results.measurements += [measurement("vllm", number, theirs, tokens=(3 if number < 3 else 4,))]
        results.measurements += [measurement("outrider", number, ours)]
        results.measurements += [measurement("outrider", number, 8 * ours, requests=8, tokens=range(8))]
    results.measurements.append(measurement("vllm", 1, 200.0, requests=8, tokens=range(8)))
    start = {"model": "tiny", "mode": "base", "start_seconds": 2.0, "load_seconds": 1.0, "peak_rss_mib": 2048}
    results.starts += [start | {"engine": name, "versions": {}} for name in ("outrider", "vllm")]
    results.fail(peers("session").Case("tiny", "base"), "vllm", "ended")
    return peers("report").summarize(results)


def test_ratios_are_of_the_same_round(summary):
    ratios = {row["requests"]: row for row in summary["ratios"]}
    assert ratios[1]["rounds"] == [2.0, 10.0, 1.5]
    assert ratios[1]["ratio"] == 2.0
    assert ratios[8]["rounds"] == [4.0]
    assert {(row["engine"], row["peer"]) for row in summary["ratios"]} == {("outrider", "vllm")}


def test_medians_and_agreement(summary):
    medians = {(row["engine"], row["requests"]): row["tokens_per_second"] for row in summary["medians"]}
    assert medians == {("outrider", 1): 100.0, ("outrider", 8): 800.0, ("vllm", 1): 50.0, ("vllm", 8): 200.0}
    assert [start["same_first_token"] for start in summary["starts"]] == [1.0, 10 / 11]
    assert "first_tokens" not in summary["measurements"][0]


def test_without_outrider_there_are_rates_and_no_ratios(peers):
    results = peers("session").Results(measurements=[measurement("vllm", 1, 50.0)])
    summary = peers("report").summarize(results)
    assert summary["ratios"] == []
    assert len(summary["medians"]) == 1


def test_the_lines_for_a_terminal(peers, summary):
    text = peers("report").tables(summary)
    rows = [line.split() for line in text.splitlines()]
    assert ["tiny", "base,", "8", "requests", "outrider", "800.0"] in rows
    assert ["tiny", "base", "vllm:", "ready", "in", "2.0", "s,", "2.0", "GiB,", "91%"] in rows
    assert ["tiny", "base,", "1", "requests", "outrider", "/", "vllm:", "2.00"] in rows
    assert text.endswith("not measured, or not to the end\n  vllm (tiny base): ended")
    assert "INTERRUPTED" in peers("report").tables(summary | {"interrupted": True})


def test_adaptive_drafts_have_ratios_of_their_own(peers):
    results = peers("session").Results()
    for engine, rate in (("outrider", 100.0), ("outrider-adaptive", 150.0), ("vllm", 50.0)):
        results.measurements.append(measurement(engine, 1, rate, mode="ngram"))
    ratios = peers("report").summarize(results)["ratios"]
    found = {(row["engine"], row["peer"]): row["ratio"] for row in ratios}
    assert found == {("outrider", "vllm"): 2.0, ("outrider-adaptive", "vllm"): 3.0}


# --- The models ---------------------------------------------------------------------------------------------


def test_missing_models_are_made_and_present_ones_kept(peers, monkeypatch, tmp_path):
    import transformers
    from safetensors.torch import load_file

    models = peers("models")
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    tiny = transformers.LlamaConfig(**config, num_key_value_heads=1, vocab_size=64)
    shapes = importlib.import_module("lora_models").SHAPES
    monkeypatch.setitem(shapes, "tiny", (transformers.LlamaForCausalLM, tiny))
    monkeypatch.setattr(models, "make_tokenizer", lambda: type("None", (), {"save_pretrained": lambda self, f: None})())
    said = []
    models.make_missing(tmp_path, ["tiny", "draft"], ["tiny"], said.append)
    adapters = [f"tiny-lora{i}" for i in range(8)]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["draft", "tiny", *adapters]
    ranks, first = [], set()
    for name in adapters:
        weights = load_file(tmp_path / name / "adapter_model.safetensors")
        a, b = (weights[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{x}.weight"] for x in "AB")
        assert b.any()
        ranks.append(a.shape[0])
        first.add(float(a[0, 0]))
    assert ranks == [8, 16] * 4
    assert len(first) == 8
    draft = json.loads((tmp_path / "draft" / "config.json").read_text(encoding="utf-8"))
    assert (draft["hidden_size"], draft["num_hidden_layers"], draft["vocab_size"]) == (256, 2, 4096)
    said.clear()
    models.make_missing(tmp_path, ["tiny", "draft"], ["tiny"], said.append)
    assert said == []
