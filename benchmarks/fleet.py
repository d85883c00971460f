"""Ten thousand adapters on a hundred replicas, on paper: what routing by adapter is worth.

A discrete-event simulation (`fleet_model/`) serves one load with three ways to route: at random, in turn, and to those
with the adapter. Its times are those of two real replicas, measured at commit 7f567f0a6efc and read from the result.

Usage: python benchmarks/fleet.py [--costs FILE] [--quick] [--output-json FILE] [--plot FILE] [options]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fleet_model.costs import Costs, Limits, StepTimes
from fleet_model.load import Load
from fleet_model.routing import STRATEGIES
from fleet_model.simulation import Fleet, Simulation
from script import make_parser, settings_of

from outrider.platform.cli.bench.machine import describe_machine
from outrider.platform.cli.bench.pictures import BLUE, GREY, SAND, add_legend, panels, save

CLAIM = "Routing by adapter over random and in turn, simulated with the times of real replicas"
MEASURED, SIMULATED = "two replicas", "fleet"
RESULT = Path(__file__).parent / "results" / "fleet.json"
COLORS = dict(zip(STRATEGIES, (GREY, SAND, BLUE), strict=True))
LOADS = (0.4, 0.6, 0.8, 1.0, 1.2)


# --- The fleet ----------------------------------------------------------------------------------------------


def capacity(costs: Costs, limits: Limits, load: Load) -> float:
    """Requests a second of one replica with all rows in use, and every adapter and no prefix at hand."""
    times = StepTimes(costs, limits)
    prompt = load.prefix_tokens + load.prompt_tokens
    seconds = load.output_tokens * times(limits.rows, limits.rows, 0) / limits.rows
    return 1 / (seconds + times(1, 1, prompt) - times(1, 1, 0))


def simulate(costs: Costs, options: argparse.Namespace) -> dict[str, Any]:
    """Simulate the fleet by strategy and load, and once more with failures."""
    limits = replace(Limits(), slots=options.slots)
    fleet = Fleet(options.replicas, limits, prefixes=options.prefixes)
    load = Load(options.requests, 1.0, options.adapters, options.tenants, options.exponent)
    full = options.replicas * capacity(costs, limits, load)
    rows = []
    for share in [options.load] if options.quick else sorted({*LOADS, options.load}):
        requests = replace(load, rate=share * full).requests(options.seed)
        failing = replace(fleet, lifetime=options.lifetime * requests[-1].at)
        for each in [fleet, failing] if share == options.load else [fleet]:
            for strategy in STRATEGIES:
                found = Simulation(costs, each, strategy, options.seed).run(requests)
                if share != options.load:
                    del found["ttft_quantiles"]
                rows.append({"strategy": strategy, "load": share, "fails": each is failing, **found})
                print(describe(rows[-1]), flush=True)
    settings = {name: value for name, value in settings_of(options).items() if not isinstance(value, Path)}
    described = {"settings": settings, "limits": asdict(limits), "requests_per_second_when_full": round(full, 1)}
    return {**described, "rows": rows, "table": tabulated(rows)}


def tabulated(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Table of the runs."""
    lines = []
    for row in rows:
        load = f"{row['load']:g}" + (f", {row['failures']} failures" if row["fails"] else "")
        times = (row["ttft_p50"], row["ttft_p99"], row["tenant_p50"]["best"], row["tenant_p50"]["worst"])
        shares = [f"{row[key]:.2f}" for key in ("adapter_hits", "prefix_hits", "fairness")]
        loads, lost = f"{row['adapter_loads']:,}", f"{row['lost']}, {row['retried']}"
        lines.append([load, row["strategy"], *(f"{time:.2f}" for time in times), loads, *shares, lost])
    head = ["load", "router", "TTFT p50, s", "p99", "p50 of the best tenant", "of the worst"]
    return {"head": [*head, "loads", "adapter hits", "prefix hits", "fairness", "lost, retried"], "rows": lines}


def describe(row: dict[str, Any]) -> str:
    """One line of a run."""
    return (
        f"{row['strategy']:11} load {row['load']}{' with failures' if row['fails'] else ''}: TTFT p50 "
        f"{row['ttft_p50'] * 1e3:.0f} ms, p99 {row['ttft_p99'] * 1e3:.0f} ms, {row['adapter_loads']} loads, adapter "
        f"hits {row['adapter_hits']:.2f}, prefix hits {row['prefix_hits']:.2f}, fairness {row['fairness']:.2f}, "
        f"{row['lost']} lost, busy {row['busy']:.2f}"
    )


def draw(run: dict[str, Any], file: Path) -> None:
    """Write the picture as a PNG: times to first token by load, their distribution, and loads of adapters."""
    settings = run["settings"]
    title = [
        f"Simulated: {settings['adapters']:,} adapters on {settings['replicas']} replicas with {settings['slots']} "
        f"slots, {settings['requests']:,} requests, Zipf {settings['exponent']:g}",
        "Step, prompt and load times are those of real replicas with one core each",
    ]
    figure, axes = panels(title, 1, 3, (12.5, 4.6))
    by_load, shares, loads = axes[0]
    for strategy, color in COLORS.items():
        rows = [row for row in run["rows"] if row["strategy"] == strategy and not row["fails"]]
        at = [row["load"] for row in rows]
        for key, style in (("ttft_p50", "-"), ("ttft_p99", ":")):
            by_load.plot(at, [row[key] for row in rows], style, color=color, marker="o", markersize=4)
        chosen = next(row for row in rows if row["load"] == settings["load"])
        shares.plot(chosen["ttft_quantiles"], range(101), color=color, linewidth=2, label=strategy)
        style = "--" if strategy == STRATEGIES[1] else "-"  # in turn and at random cost the same loads
        loads.plot(
            at, [row["adapter_loads"] / row["ended"] for row in rows], style, color=color, marker="o", markersize=4
        )
    for axis in (by_load, shares):
        axis.set_yscale("log") if axis is by_load else axis.set_xscale("log")
    by_load.set_xlabel("load, over what full rows serve")
    by_load.set_ylabel("time to first token, s: p50 (line), p99 (dots)")
    shares.set_xlabel(f"time to first token at load {settings['load']}, s")
    shares.set_ylabel("% of the requests")
    loads.set_xlabel("load, over what full rows serve")
    loads.set_ylabel("adapter loads a request")
    loads.set_ylim(bottom=0)
    by_load.yaxis.set_major_formatter("{x:g}")
    shares.xaxis.set_major_formatter("{x:g}")
    add_legend(figure, shares, columns=3)
    save(figure, file)


# --- The command line ---------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--plot", type=Path, help="picture (needs matplotlib)")
    parser.add_argument("--costs", type=Path, default=RESULT, help="result with the times of real replicas")
    parser.add_argument("--quick", action="store_true", help="one load, a tenth of everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--adapters", type=int, default=10_000)
    parser.add_argument("--tenants", type=int, default=100)
    parser.add_argument("--exponent", type=float, default=1.0, help="of the adapters' popularity (Zipf)")
    parser.add_argument("--slots", type=int, default=32, help="adapters that a replica holds")
    parser.add_argument("--prefixes", type=int, default=256, help="prefixes whose KV a replica keeps")
    parser.add_argument("--load", type=float, default=0.8, help="requests over what replicas with full rows serve")
    parser.add_argument("--lifetime", type=float, default=10.0, help="mean, of a replica, over the time of the load")
    options = parser.parse_args(arguments)
    if options.quick:
        for name in ("replicas", "requests", "adapters", "tenants"):
            setattr(options, name, getattr(options, name) // 10)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, print and write."""
    options = parse(arguments)
    runs = json.loads(options.costs.read_text(encoding="utf-8"))["runs"]
    measured = next(run for run in runs if run["run"] == MEASURED)
    fleet = {"run": SIMULATED, "machine": describe_machine(), **simulate(Costs.read(measured["costs"]), options)}
    if options.output_json is not None:
        result = {"claim": CLAIM, "runs": [measured, fleet]}
        options.output_json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        draw(fleet, options.plot)


if __name__ == "__main__":
    main()
