"""The arithmetic of `outrider bench latency | throughput | serve | compare`."""

import json

import numpy as np
import pytest

from outrider.platform.cli.bench.compare import compare, differences
from outrider.platform.cli.bench.request_figures import RequestRecord, acceptance, figures
from outrider.platform.cli.bench.serving.profiling.timeline import (
    Span,
    chrome_trace,
    own_seconds,
    summarize,
)
from outrider.platform.cli.bench.serving.request_load import arrival_times
from outrider.platform.cli.bench.serving.serving_report import draw_latencies
from outrider.platform.cli.main import main
from outrider.platform.core.messages import SpeculationCounts

# --- figures --------------------------------------------------------------------------------------------------------


def _record(index=0, start=10.0, gaps=(0.2, 0.1, 0.3), tokens=4, **fields):
    arrivals = (start + np.cumsum(gaps)).tolist()
    return RequestRecord(
        index, start, arrivals, ended=start + 5, num_prompt_tokens=7, num_output_tokens=tokens, **fields
    )


def test_latencies_of_a_request():
    record = _record(tokens=6)  # three chunks brought six tokens
    assert record.ttft == pytest.approx(0.2)
    assert record.e2el == pytest.approx(0.6)
    assert record.tpot == pytest.approx(0.4 / 5)  # without the first token
    assert record.itl == pytest.approx([0.1, 0.3])  # between chunks, however many tokens they bring


def test_an_empty_answer_has_an_end_and_nothing_else():
    record = RequestRecord(0, started=1.0, ended=1.5)
    assert (record.ttft, record.tpot, record.itl, record.e2el) == (None, None, [], 0.5)
    found = figures([record], 2.0, [99])
    assert found["mean_e2el_ms"] == 500
    assert not any("ttft" in name or "tpot" in name or "itl" in name for name in found)


def test_offline_requests_have_no_inter_token_latencies():
    assert _record(gaps=(0.1, 2.0), streamed=False).itl == []


def test_figures_of_known_requests():
    records = [_record(i, gaps=(0.1 * (i + 1), 0.1), tokens=2) for i in range(4)] + [RequestRecord(4, error="no")]
    found = figures(records, 2.0, [50, 75])
    assert {name: found[name] for name in ("completed", "failed", "total_input_tokens", "total_output_tokens")} == {
        "completed": 4,
        "failed": 1,
        "total_input_tokens": 28,
        "total_output_tokens": 8,
    }
    assert found["request_throughput"] == 2
    assert found["output_throughput"] == 4
    assert found["total_token_throughput"] == 18
    assert found["mean_ttft_ms"] == found["median_ttft_ms"] == found["p50_ttft_ms"] == pytest.approx(250)
    assert found["p75_ttft_ms"] == pytest.approx(325)
    assert found["std_ttft_ms"] == pytest.approx(1e3 * np.std([0.1, 0.2, 0.3, 0.4]), abs=1e-3)
    assert found["mean_tpot_ms"] == found["mean_itl_ms"] == pytest.approx(100)
    assert "request_goodput" not in found


def test_only_the_metrics_asked_for():
    found = figures([_record()], 1.0, [99], ["tpot"])
    assert [name for name in found if name.endswith("_ms")] == [
        "mean_tpot_ms",
        "median_tpot_ms",
        "std_tpot_ms",
        "p99_tpot_ms",
    ]


def test_goodput_counts_requests_that_keep_every_limit():
    # TTFT 200, TPOT 133, ITL on average 200, E2EL 600 ms
    fast, slow = _record(), _record(gaps=(0.5, 0.1))
    assert figures([fast, slow], 2.0, [], goodput={"ttft": 250})["request_goodput"] == 0.5
    assert figures([fast, slow], 2.0, [], goodput={"e2el": 600.001})["request_goodput"] == 1
    assert figures([fast, slow], 2.0, [], goodput={"ttft": 250, "tpot": 100})["request_goodput"] == 0
    assert figures([fast], 1.0, [], goodput={"itl": 199})["request_goodput"] == 0
    one_token = _record(gaps=(0.1,), tokens=1)
    assert figures([one_token], 1.0, [], goodput={"tpot": 1})["request_goodput"] == 1  # it has none to be too slow


def test_acceptance_is_defined_as_everywhere():
    found = acceptance(SpeculationCounts(10, 40, 16, [8, 5, 2, 1]))
    assert found == {
        "acceptance_rate": 0.4,
        "acceptance_length": 2.6,
        "acceptance_per_position": [0.8, 0.5, 0.2, 0.1],
    }
    assert acceptance(SpeculationCounts()) == {}


# --- arrivals -------------------------------------------------------------------------------------------------------


def test_an_infinite_rate_is_all_at_once():
    assert arrival_times(5, float("inf"), 1.0, 0).tolist() == [0] * 5


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_their_rate_and_burstiness(burstiness):
    times = arrival_times(20_000, 50.0, burstiness, 3)
    gaps = np.diff(times, prepend=0.0)
    assert (gaps >= 0).all()
    assert times[-1] == pytest.approx(20_000 / 50)  # the load that was asked for, exactly
    # A gamma distribution of that shape: coefficient of variation 1 / sqrt(shape), skewness 2 / sqrt(shape).
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    assert ((gaps - gaps.mean()) ** 3).mean() / gaps.std() ** 3 == pytest.approx(2 * burstiness**-0.5, rel=0.15)


def test_arrivals_of_a_seed_are_always_the_same():
    assert (arrival_times(50, 5, 1, 1) == arrival_times(50, 5, 1, 1)).all()
    assert (arrival_times(50, 5, 1, 1) != arrival_times(50, 5, 1, 2)).any()


# --- where the time goes --------------------------------------------------------------------------------------------


def test_own_time_is_without_what_lies_inside():
    spans = [Span("a", 1, 3), Span("inner", 2, 3), Span("b", 3, 7), Span("a", 4, 6), Span("step", 0, 10)]
    assert own_seconds(spans) == {"step": 4, "a": 3, "inner": 1, "b": 2}


def test_summary_of_a_timeline():
    engine = [Span("forward", 1, 4), Span("step", 0, 5), Span("IPC", 5, 6), Span("step", 6, 9)]
    client = [Span("detokenize", 7, 8)]
    found = summarize(engine, client)
    assert (found["num_steps"], found["step_ms"], found["detokenize_ms"]) == (2, 4000, 500)
    assert {part["name"]: part["ms_per_step"] for part in found["parts"]} == {
        "other": 2500,
        "forward": 1500,
        "IPC": 500,
    }
    assert sum(part["share"] for part in found["parts"]) == pytest.approx(1, abs=1e-4)
    trace = chrome_trace({"engine": engine, "client": client})
    event = next(e for e in trace["traceEvents"] if e["name"] == "detokenize")
    assert (event["ph"], event["pid"], event["ts"], event["dur"]) == ("X", 1, 7e6, 1e6)


# --- pictures -------------------------------------------------------------------------------------------------------


def _picture(records, file):
    figures = {"completed": len(records), "output_throughput": 0.0, "request_throughput": 0.0}
    machine = {"gpu": None, "cpu": "a processor", "date": "2026-01-01"}
    report = {"benchmark": "serve", "labels": [], "model": {"name": "x"}, "figures": figures, "machine": machine}
    draw_latencies(report, records, file)
    head = file.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int.from_bytes(head[20:24], "big")  # height in pixels


@pytest.mark.slow
def test_a_picture_has_no_empty_half(tmp_path):
    whole = _picture([_record()], tmp_path / "whole.png")
    single_tokens = _picture([_record(gaps=(0.2,), tokens=1)], tmp_path / "half.png")  # no TPOT, no ITL
    nothing = _picture([], tmp_path / "nothing.png")
    assert nothing == single_tokens < 0.6 * whole


# --- compare --------------------------------------------------------------------------------------------------------


def _result(throughput, ttft, **more):
    figures = {"output_throughput": throughput, "mean_ttft_ms": ttft, "completed": 9, "std_ttft_ms": 1.0}
    return {"benchmark": "serve", "figures": figures, "machine": {"cpu": "x"}, "arguments": {"seed": 0}} | more


def test_figures_are_compared_in_their_direction():
    better, slower = compare(_result(100.0, 50.0), _result(150.0, 100.0))
    assert (better.name, better.ratio, better.gain) == ("output_throughput", 1.5, 1.5)
    assert (slower.name, slower.ratio, slower.gain) == ("mean_ttft_ms", 2.0, 0.5)


def test_rows_are_matched_by_what_they_are_about():
    def row(mode, size, speed):
        return {"mode": mode, "batch_size": size, "output_throughput": speed, "ttft_ms": {"mean": 1.0}, "requests": 8}

    a = {"rows": [row("off", 1, 10.0), row("ngram", 1, 20.0), row("ngram", 4, 30.0)]}
    b = {"rows": [row("ngram", 4, 60.0), row("off", 1, 5.0), row("suffix", 1, 1.0)]}
    found = {c.name: c.ratio for c in compare(a, b)}
    assert found == {
        "off batch_size=1 / output_throughput": 0.5,
        "off batch_size=1 / ttft_ms.mean": 1,
        "ngram batch_size=4 / output_throughput": 2,
        "ngram batch_size=4 / ttft_ms.mean": 1,
    }


def test_rows_without_adapters_and_with_none_are_two():
    def row(number, speed, ranks=()):
        return {"batch_size": 1, "num_adapters": number, "ranks": [*ranks], "output_throughput": speed}

    a = {"rows": [row(None, 1.0), row(0, 2.0), row(1, 3.0, (8, 16))]}
    b = {"rows": [row(None, 2.0), row(0, 6.0), row(1, 12.0, (8, 16))]}
    assert {c.name: c.ratio for c in compare(a, b)} == {
        "batch_size=1 / output_throughput": 2,
        "batch_size=1 num_adapters=0 / output_throughput": 3,
        "batch_size=1 num_adapters=1 ranks=8,16 / output_throughput": 4,
    }


def test_what_else_differs_is_said():
    a, b = _result(1, 1), _result(1, 1, machine={"cpu": "y"}, benchmark="throughput")
    assert differences(a, b) == {"benchmark": ["serve", "throughput"], "machine.cpu": ["x", "y"]}
    assert differences(a, a) == {}


def test_compare_prints_ratios_and_draws_one_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, result in (("a.json", _result(100.0, 50.0)), ("b.json", _result(150.0, 50.0, labels=["RANDOM"]))):
        (tmp_path / name).write_text(json.dumps(result))
    assert main(["bench", "compare", "a.json", "b.json", "--output-json", "c.json"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("RANDOM\nA: a.json\nB: b.json\n")
    assert "1.500  better" in printed
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "c.json").read_text())["ratios"][0]["ratio"] == 1.5


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "not JSON"), ("[]", "not a result"), ("{}", "not a result")],
)
def test_compare_refuses_other_files(content, message, tmp_path, capsys):
    file = tmp_path / "a.json"
    if content is not None:
        file.write_text(content)
    assert main(["bench", "compare", str(file), str(file), "--plot", str(tmp_path / "c.png")]) == 1
    assert message in capsys.readouterr().err


def test_compare_of_results_without_a_common_figure(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(_result(1.0, 2.0)))
    (tmp_path / "b.json").write_text(json.dumps({"figures": {"other": 1}}))
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    assert main(["bench", "compare", *files, "--plot", str(tmp_path / "c.png")]) == 1
    assert "no figure in common" in capsys.readouterr().err
