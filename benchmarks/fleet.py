"""Ten thousand adapters on a hundred replicas, on paper: what routing by adapter is worth.

A discrete-event simulation (`fleet_model/`) serves one load under three ways to route: at random, in turn, and to where
the adapter is. Its times are those of real replicas on this machine. With --model they are measured first, on one
server for each core, and the servers then get a load that the simulation must foretell; without it they are read from
an earlier result.

Usage: python benchmarks/fleet.py [--model PATH] [--costs FILE] [--quick] [--output-json FILE] [--plot FILE] [options]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from fleet_model.costs import Costs, Limits, StepTimes
from fleet_model.load import Load, Request
from fleet_model.routing import STRATEGIES
from fleet_model.simulation import Fleet, Simulation
from script import make_parser, settings_of

from outrider.platform.cli.bench.machine import describe_machine
from outrider.platform.cli.bench.pictures import BLUE, GREY, SAND, add_legend, panels, save

CLAIM = "Routing by adapter over random and in turn, simulated with the times of real replicas"
MEASURED, SIMULATED = "two replicas", "fleet"
RESULT = Path(__file__).parent / "results" / "fleet.json"
COLORS = dict(zip(STRATEGIES, (GREY, SAND, BLUE), strict=True))
FORETOLD = ("ttft_p50", "ttft_p99", "output_tokens_per_second", "adapter_loads")
REAL_LOADS = (("random arrivals", None, 1), ("16 users", 16, 1), ("16 users, conversations of 4", 16, 4))
"""Loads of real replicas: name, users who wait for an answer, and mean requests of a user for one adapter."""
ROUTER_SEED = 0
"""Seed of the real router and of the simulated one, which break ties at random."""
LOADS = (0.4, 0.6, 0.8, 1.0, 1.2)


# --- Real replicas ------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A load that real replicas served."""

    name: str
    strategy: str
    fleet: Fleet
    requests: list[Request]
    ttft: list[float]
    """Times to first token, in seconds."""
    figures: dict[str, Any]


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Measure real replicas and send them loads, more than once, and simulate the same."""
    from fleet_model.real_replicas import Replicas, measure, serve

    limits, count = Limits(), len(os.sched_getaffinity(0))
    load = Load(options.real_requests, options.real_rate, options.real_adapters, tenants=4)
    measured, runs = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        Replicas(options.model, Path(folder), count, load.adapters + limits.slots, limits) as replicas,
    ):
        for repeat in range(options.real_repeats):
            measured.append(measure(replicas))
            for name, users, turns in REAL_LOADS:
                requests = replace(load, turns=turns, talks=users or 1).requests(options.seed + repeat)
                fleet = Fleet(count, limits, prefixes=load.adapters * load.prefixes, users=users)
                for strategy in STRATEGIES[1:]:
                    served = serve(
                        replicas, fleet.router(strategy, ROUTER_SEED), fleet, requests, f"{name} {strategy} {repeat}"
                    )
                    runs.append(Run(name, strategy, fleet, requests, *served))
    costs = Costs.median(measured)
    rows = [
        foretell(costs, [run for run in runs if (run.name, run.strategy) == (name, strategy)])
        for name, _, _ in REAL_LOADS
        for strategy in STRATEGIES[1:]
    ]
    return {
        "model": {"name": Path(options.model).name},
        "limits": asdict(limits),
        "load": asdict(load),
        "num_replicas": count,
        "costs": costs.as_dict(),
        "measured_costs": [each.as_dict() for each in measured],
        "rows": rows,
        "table": compared(rows),
    }


def foretell(costs: Costs, runs: list[Run]) -> dict[str, Any]:
    """Simulate what real replicas served, runs of one load with one router; returns both, and the ratios of all their
    requests together."""
    simulated = [Simulation(costs, run.fleet, run.strategy, ROUTER_SEED) for run in runs]
    figures = [simulation.run(run.requests) for simulation, run in zip(simulated, runs, strict=True)]
    real = summary([run.ttft for run in runs], [run.figures for run in runs])
    paper = summary([simulation.ttft for simulation in simulated], figures)
    ratios = {key: round(paper[key] / real[key], 3) for key in FORETOLD}
    print(f"{runs[0].strategy}, {runs[0].name}: simulated over real {ratios}", flush=True)
    real["client"] = [run.figures["client"] for run in runs]
    return {
        "load": runs[0].name,
        "strategy": runs[0].strategy,
        "real": real,
        "simulated": paper,
        "ratios": ratios,
    }


def summary(ttft: Sequence[Sequence[float]], figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Quantiles of all requests of several runs together and of each run, and means of the runs' figures."""
    p50, p99 = np.quantile(np.concatenate(ttft), (0.5, 0.99)).round(5).tolist()
    of_runs = np.transpose([np.quantile(times, (0.5, 0.99)) for times in ttft]).round(5).tolist()
    return {
        "ended": sum(map(len, ttft)),
        "ttft_p50": p50,
        "ttft_p99": p99,
        "output_tokens_per_second": round(fmean(each["output_tokens_per_second"] for each in figures), 2),
        "adapter_loads": round(fmean(each["adapter_loads"] for each in figures), 1),
        "p50_of_runs": of_runs[0],
        "p99_of_runs": of_runs[1],
    }


def compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Table of what was real and what was simulated."""
    lines = []
    for row in rows:
        real, simulated = row["real"], row["simulated"]
        cells = [f"{real[key]:.3g}, {simulated[key]:.3g} ({row['ratios'][key]:.2f})" for key in FORETOLD]
        spread = f"{min(real['p99_of_runs']):.2f} to {max(real['p99_of_runs']):.2f}"
        lines.append([row["load"], row["strategy"], *cells, spread])
    head = ["real, simulated (ratio)", "router", "TTFT p50, s", "p99", "tokens/s", "loads", "real p99 of each run"]
    return {"head": head, "rows": lines}


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
    parser.add_argument("--model", help="folder of the model that real replicas serve")
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
    parser.add_argument("--real-requests", type=int, default=200, help="of the load on real replicas")
    parser.add_argument("--real-repeats", type=int, default=3, help="runs of each, with other requests")
    parser.add_argument("--real-rate", type=float, default=8.0, help="requests a second of it")
    parser.add_argument("--real-adapters", type=int, default=40)
    options = parser.parse_args(arguments)
    if options.quick:
        for name in ("replicas", "requests", "adapters", "tenants"):
            setattr(options, name, getattr(options, name) // 10)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure if asked to, simulate, print and write."""
    options = parse(arguments)
    if options.model:
        measured = {"run": MEASURED, "machine": describe_machine(), **compare(options)}
    else:
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
