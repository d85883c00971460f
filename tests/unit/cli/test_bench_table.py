"""The table of `outrider bench speculation`: its columns, and the figures that they are made of."""

import pytest

from outrider.platform.cli.bench.request_figures import RequestRecord, Round
from outrider.platform.cli.bench.speculation.modes import Mode
from outrider.platform.cli.bench.speculation.speculation_figures import Cell, figures
from outrider.platform.cli.bench.speculation.speculation_report import format_table
from outrider.platform.cli.bench.speculation.tasks import WITH_DRAFT
from outrider.platform.core.messages import SpeculationCounts

OFF = Mode("off", "off", {"method": "off"})
EAGLE3 = Mode("eagle3", "eagle3", {"method": "eagle3", "model": "head", "num_speculative_tokens": 4})


def cell(mode: Mode, seconds: float, arrivals: list[float], counts=None) -> Cell:
    """Two rounds of a request with nine tokens."""
    request = RequestRecord(0, 0.0, arrivals, num_output_tokens=9, token_ids=list(range(9)), speculation=counts)
    return Cell(mode, "json", WITH_DRAFT, 1, [Round(seconds, [request], seconds / 2)] * 2)


@pytest.fixture(scope="module")
def rows():
    """Off, and EAGLE-3 in half the time."""
    off = cell(OFF, 1.0, [0.2 + 0.1 * i for i in range(9)])
    counts = SpeculationCounts(4, 16, 6, [3, 2, 1, 0], [1, 0, 0, 0, 4], [4], [10])
    drafted = cell(EAGLE3, 0.5, [0.1, 0.2, 0.3, 0.5], counts)
    return [figures(off, off), figures(drafted, off)]


def test_rows_have_their_latencies(rows):
    off, drafted = rows
    assert off["tpot_ms"]["mean"] == off["itl_ms"]["mean"] == 100.0
    assert drafted["ttft_ms"]["mean"] == 100.0
    assert drafted["tpot_ms"]["mean"] == 50.0, "eight tokens after the first one, in 0.4 s"
    assert drafted["itl_ms"] == {"mean": 133.3333, "median": 100.0, "std": 47.1405, "p99": 200.0}, (
        "between three further arrivals"
    )


def test_rows_have_the_shares_of_drafts(rows):
    assert rows[1]["drafts_verified"] == {"0": 0.2, "4": 0.8}


def render_table(rows) -> list[str]:
    report = {
        "labels": ["RANDOM WEIGHTS"],
        "model": {"name": "x", "num_parameters": 3e6, "dtype": "float32"},
        "machine": {"gpu": None, "cpu": "a processor", "threads": 2},
        "settings": {"num_speculative_tokens": 4, "rounds": 2},
        "rows": rows,
    }
    return format_table(report).splitlines()


def test_the_table_shows_its_rows(rows):
    lines = render_table(rows)
    assert lines[0] == "RANDOM WEIGHTS"
    assert "x, 3M parameters, float32, on a processor, threads: 2" in lines[1]
    assert "4 drafts a step, median of 2 rounds" in lines[2]
    header = next(line for line in lines if line.startswith("text"))
    shown = next(line for line in lines if line.startswith("json") and "eagle3" in line)
    want = {
        "tokens/s": "18.0",
        "speed-up": "2.00",
        "+-": "0.00",
        "CPU": "2.00",
        "TTFT ms": "100.0",
        "TPOT ms": "50.00",
        "p99 ITL": "200.0",
        "a step": "2.20",
        "length": "2.50",
        "rate": "0.38",
        "by position": "0.75 0.50 0.25 0.00",
        "same text": "2/2",
    }
    for name, cell in want.items():
        edge = header.index(name) + len(name)  # they end with their heading
        assert shown[:edge].endswith(f" {cell}"), name
    assert shown.split() == ["json", "with", "eagle3", *" ".join(want.values()).split()]


def test_columns_without_a_value_for_off_are_empty(rows):
    shown = next(line for line in render_table(rows) if line.startswith("json") and " off " in line)
    assert shown.split() == "json with off 9.0 1.00 0.00 1.00 200.0 100.00 100.0 2/2".split()
