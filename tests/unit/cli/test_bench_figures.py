"""The arithmetic of `outrider bench latency`."""

import numpy as np
import pytest

from outrider.platform.cli.bench.latency.latency_report import draw_latencies
from outrider.platform.cli.bench.latency.timeline import Span, chrome_trace, own_seconds, summarize
from outrider.platform.cli.bench.request_figures import RequestRecord, acceptance, figures
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


def test_only_the_metrics_asked_for():
    found = figures([_record()], 1.0, [99], ["tpot"])
    assert [name for name in found if name.endswith("_ms")] == [
        "mean_tpot_ms",
        "median_tpot_ms",
        "std_tpot_ms",
        "p99_tpot_ms",
    ]


def test_acceptance_is_defined_as_everywhere():
    found = acceptance(SpeculationCounts(10, 40, 16, [8, 5, 2, 1]))
    assert found == {"acceptance_rate": 0.4, "acceptance_length": 2.6, "acceptance_per_position": [0.8, 0.5, 0.2, 0.1]}
    assert acceptance(SpeculationCounts()) == {}


# --- shares of the time --------------------------------------------------------------------------------------------


def test_own_time_excludes_nested_ranges():
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
    machine = {"gpu": None, "cpu": "a processor", "date": "2026-01-01"}
    draw_latencies({"labels": [], "machine": machine}, "a title", {"one": records, "other": records}, file)
    head = file.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int.from_bytes(head[20:24], "big")  # height in pixels


@pytest.mark.slow
def test_a_picture_has_no_empty_half(tmp_path):
    whole = _picture([_record()], tmp_path / "whole.png")
    single_tokens = _picture([_record(gaps=(0.2,), tokens=1)], tmp_path / "half.png")  # no TPOT, no ITL
    nothing = _picture([], tmp_path / "nothing.png")
    assert nothing == single_tokens < 0.6 * whole
