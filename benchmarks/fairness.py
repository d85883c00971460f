"""Time to first token and throughput beside one tenant's flood, for first come first served and for the fair policy.

The engine runs in this process. Some tenants send requests at random times, at a part of what the machine bears, which
is measured before each round; in the floods one more sends many times what is left. The same arrivals are served in
three settings, in turn, round after round:

    quiet   the others alone, under the fair policy
    fcfs    the others and the flood, first come first served
    fair    the same arrivals, under the fair policy

A request's time to first token runs from when it was due to arrive to the end of the step that gave its first token.
One that has none when the measurement ends counts with the time it has waited: under FCFS these would be longer.
Throughput is prompt and output tokens of all tenants together, while the flood has requests queued. Ratios are medians
of those of the rounds: a round that other work on the machine disturbs counts as one.

The clock is the CPU time of the one thread that computes, so that other work on the machine does not count; where the
engine would be idle, the clock is set on to the next arrival.

Usage: OMP_NUM_THREADS=1 python benchmarks/fairness.py [--output-json FILE] [--plot FILE] [--rounds N] [options]
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from script import make_parser, settings_of, write_result

from outrider import SamplingParams
from outrider.platform.cli.bench.machine import describe_machine
from outrider.platform.cli.bench.pictures import BLUE, GREY, SAND, add_legend, panels, save
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.messages import EngineRequest
from outrider.platform.engine.engine_core import EngineCore

CLAIM = "Time to first token of four tenants beside the flood of a fifth, first come first served and fair"
FLOOD = "flood"
SETTINGS = ("quiet", "fcfs", "fair")
CALIBRATION = 1.0
"""Seconds for which the machine's capacity is measured before a round."""


class Arrival(NamedTuple):
    """A request that is due `at` seconds after the start."""

    at: float
    request: EngineRequest


@dataclass
class Measured:
    """One setting, one round."""

    ttft: list[float] = field(default_factory=list)
    """Times to first token, in seconds, of the others' requests that arrived after the warm-up."""
    num_waiting: int = 0
    """Number of these requests without a first token at the end."""
    tokens_per_second: float = 0.0


def arrivals(
    rates: dict[str, float], seconds: float, options: argparse.Namespace, vocab_size: int, number: int, setting: str
) -> list[Arrival]:
    """Poisson arrivals of each tenant, at its rate a second. Those of a round, by its `number`, differ in their tokens
    alone: no prompt has a prefix that the engine may have from another setting."""
    found: list[Arrival] = []
    for index, (tenant, rate) in enumerate(rates.items()):
        source = random.Random(1000 * number + index)
        words = random.Random(f"{number} {setting} {index}")
        at = 0.0
        while (at := at + source.expovariate(rate)) < seconds:
            length = source.randint(options.prompt_len // 2, options.prompt_len * 3 // 2)
            params = SamplingParams(
                max_tokens=source.randint(options.output_len // 2, options.output_len * 3 // 2),
                temperature=0.0,
                ignore_eos=True,
            )
            prompt = [words.randrange(vocab_size) for _ in range(length)]
            found.append(Arrival(at, EngineRequest(f"{tenant}/{len(found)}", prompt, params, tenant=tenant)))
    return sorted(found)


class Clock:
    """Clock of this thread's CPU time, and of idle time, which is skipped."""

    def __init__(self) -> None:
        self._start = time.thread_time()

    def now(self) -> float:
        """Seconds since the clock was made."""
        return time.thread_time() - self._start

    def skip(self, seconds: float) -> None:
        """Skip idle seconds."""
        self._start -= seconds


class Session:
    """Server of arrivals in one engine."""

    def __init__(self, core: EngineCore, due: list[Arrival], warm_up: float, seconds: float) -> None:
        self._core = core
        self._due = iter(due)
        self._warm_up = warm_up
        self._end = warm_up + seconds
        self._arrived: dict[str, Arrival] = {}
        self._first: dict[str, float] = {}
        self._num_tokens = 0

    def run(self) -> Measured:
        """Serve until the time is over, then abort the unfinished requests."""
        core, end = self._core, self._end
        gc.collect()
        gc.freeze()
        following = next(self._due, None)
        clock = Clock()
        while (now := clock.now()) < end:
            while following is not None and following.at <= now:
                self._arrived[following.request.request_id] = following
                core.add_request(following.request)
                following = next(self._due, None)
            if not core.has_work():
                clock.skip(min(end, following.at if following is not None else end) - now)
                continue
            for delta in core.step():
                self._take(delta.request_id, len(delta.token_ids), clock.now())
        core.abort(list(self._arrived))
        gc.unfreeze()
        return self._measured(clock.now())

    def _take(self, request_id: str, num_tokens: int, now: float) -> None:
        arrival = self._arrived[request_id]
        if request_id not in self._first:
            self._first[request_id] = now
            num_tokens += len(arrival.request.prompt_token_ids)
        if now >= self._warm_up:
            self._num_tokens += num_tokens

    def _measured(self, end: float) -> Measured:
        measured = Measured(tokens_per_second=self._num_tokens / (end - self._warm_up))
        for request_id, arrival in self._arrived.items():
            if arrival.at >= self._warm_up and arrival.request.tenant != FLOOD:
                measured.ttft.append(self._first.get(request_id, end) - arrival.at)
                measured.num_waiting += request_id not in self._first
        return measured


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds; returns the report."""
    torch.set_num_threads(1)
    limits = {
        "prompt_pacing": options.prompt_pacing,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
    }
    cores = {
        policy: EngineCore(EngineArgs(model=options.model, scheduling_policy=policy, **limits))
        for policy in ("fcfs", "fair")
    }
    vocab_size = cores["fair"].info.vocab_size
    rounds: list[dict[str, Measured]] = []
    rates: list[dict[str, float]] = []
    for number in range(options.rounds):
        rates.append(rates_of(capacity(cores["fcfs"], options, vocab_size, number), options))
        found = {}
        for setting in SETTINGS:
            due = arrivals(rates[-1], options.warm_up + options.seconds, options, vocab_size, number, setting)
            some = [item for item in due if setting != "quiet" or item.request.tenant != FLOOD]
            core = cores["fcfs" if setting == "fcfs" else "fair"]
            found[setting] = Session(core, some, options.warm_up, options.seconds).run()
        rounds.append(found)
    for core in cores.values():
        core.check_integrity()
        core.shutdown()
    return report(rounds, rates, options, cores["fair"].info.num_parameters)


def capacity(core: EngineCore, options: argparse.Namespace, vocab_size: int, number: int) -> float:
    """Capacity of the machine now: requests a second when more than enough are queued."""
    enough = arrivals({FLOOD: 50_000.0}, 0.05, options, vocab_size, number, "capacity")
    measured = Session(core, [arrival._replace(at=0.0) for arrival in enough], CALIBRATION / 2, CALIBRATION).run()
    return measured.tokens_per_second / (options.prompt_len + options.output_len)


def rates_of(capacity: float, options: argparse.Namespace) -> dict[str, float]:
    """Requests a second of each tenant, on a machine that serves `capacity` requests a second."""
    each = options.load * capacity / options.tenants
    return {f"tenant-{index}": each for index in range(options.tenants)} | {FLOOD: options.flood_load * capacity}


def report(
    rounds: list[dict[str, Measured]],
    rates: list[dict[str, float]],
    options: argparse.Namespace,
    num_parameters: int,
) -> dict[str, Any]:
    """Figures over all rounds and of each round."""
    settings = {}
    for setting in SETTINGS:
        measured = [found[setting] for found in rounds]
        ttft = [value for one in measured for value in one.ttft]
        settings[setting] = {
            "num_requests": len(ttft),
            "num_without_token": sum(one.num_waiting for one in measured),
            "ttft_p50_ms": _quantile_ms(ttft, 0.5),
            "ttft_p99_ms": _quantile_ms(ttft, 0.99),
            "ttft_p99_ms_of_rounds": [_quantile_ms(one.ttft, 0.99) for one in measured],
            "tokens_per_second": round(statistics.mean(one.tokens_per_second for one in measured)),
            "tokens_per_second_of_rounds": [round(one.tokens_per_second) for one in measured],
            "ttft_quantiles_ms": [_quantile_ms(ttft, part / 200) for part in range(201)],
        }
    p99 = {setting: settings[setting]["ttft_p99_ms_of_rounds"] for setting in SETTINGS}
    throughput = {setting: settings[setting]["tokens_per_second_of_rounds"] for setting in SETTINGS}
    of_rounds = {
        "ttft_p99_over_quiet": _ratios(p99["fair"], p99["quiet"]),
        "ttft_p99_over_quiet_fcfs": _ratios(p99["fcfs"], p99["quiet"]),
        "throughput_over_fcfs": _ratios(throughput["fair"], throughput["fcfs"]),
    }
    return {
        "model": {"name": options.model or "demo", "num_parameters": num_parameters},
        "clock": "CPU time of the one thread",
        "options": {name: value for name, value in settings_of(options).items() if name not in ("plot", "model")},
        "requests_per_second_of_rounds": [{name: round(rate, 1) for name, rate in one.items()} for one in rates],
        "settings": settings,
        "results_of_rounds": of_rounds,
        "results": {name: round(statistics.median(values), 3) for name, values in of_rounds.items()},
    }


def _ratios(over: list[float], under: list[float]) -> list[float]:
    return [round(one / other, 3) for one, other in zip(over, under, strict=True)]


def draw(found: dict[str, Any], file: Path) -> None:
    """Write the picture as a PNG: the others' times to first token, and the throughput of all."""
    texts = {"quiet": "no flood", "fcfs": "flood, first come first served", "fair": "flood, fair"}
    colors = {"quiet": GREY, "fcfs": SAND, "fair": BLUE}
    options, results = found["options"], found["results"]
    title = [
        f"One tenant sends {options['flood_load']:g} times what the machine serves, {options['tenants']} others "
        f"{options['load']:.0%} of it together ({found['model']['name']} model, {describe_machine()['cpu']}, 1 thread)",
        f"fair: p99 is {results['ttft_p99_over_quiet']:.2f} of that without the flood, throughput "
        f"{results['throughput_over_fcfs']:.2f} of FCFS",
    ]
    figure, axes = panels(title, 1, 2, (10.5, 4.6), width_ratios=(2, 1))
    left, right = axes[0]
    for setting, row in found["settings"].items():
        label = f"{texts[setting]}: p50 {row['ttft_p50_ms']:.0f} ms, p99 {row['ttft_p99_ms']:.0f} ms"
        shares = [part / 2 for part in range(201)]
        left.plot(row["ttft_quantiles_ms"], shares, color=colors[setting], linewidth=2, label=label)
    left.set_xscale("log")
    left.set_xlabel("time to first token of the tenants that do not flood, ms (logarithmic)")
    left.set_ylabel("% of their requests")
    left.axhline(99, color="#202020", linewidth=0.8, linestyle=":")
    add_legend(figure, left, columns=3)
    left.xaxis.set_major_formatter("{x:g}")
    rates = {setting: found["settings"][setting]["tokens_per_second"] for setting in SETTINGS}
    bars = right.bar(list(texts.values()), list(rates.values()), color=list(colors.values()))
    right.bar_label(bars, [f"{rate:,.0f}" for rate in rates.values()], fontsize=9)
    right.set_xticks(range(3), ["no flood", "flood,\nFCFS", "flood,\nfair"])
    right.set_ylabel("tokens/s of all tenants together")
    save(figure, file)


def _quantile_ms(values: list[float], part: float) -> float:
    """Quantile of seconds in ms: the smallest value that at least `part` of the values do not exceed."""
    return round(1000 * float(np.quantile(values, part, method="inverted_cdf")), 2)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("--plot", type=Path, help="picture (needs matplotlib)")
    parser.add_argument("--model", help="HF directory or hub id (default: the demo model)")
    parser.add_argument("--seconds", type=float, default=4.0, help="measured, of each setting and round")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before")
    parser.add_argument("--tenants", type=int, default=4, help="tenants beside the one that floods")
    parser.add_argument("--load", type=float, default=0.4, help="of these together, over what the machine serves")
    parser.add_argument("--flood-load", type=float, default=3.0, help="of the flood")
    parser.add_argument("--no-prompt-pacing", dest="prompt_pacing", action="store_false", help="as for `serve`")
    parser.add_argument("--prompt-len", type=int, default=64, help="mean, from half of it to half more")
    parser.add_argument("--output-len", type=int, default=32, help="mean, from half of it to half more")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, write and print."""
    options = parse()
    found = measure(options)
    write_result(options.output_json, CLAIM, found["model"]["name"], found)
    if options.plot is not None:
        draw(found, options.plot)
    for name, row in found["settings"].items():
        print(
            f"{name:6} ttft p50 {row['ttft_p50_ms']:8.1f} ms  p99 {row['ttft_p99_ms']:8.1f} ms  "
            f"{row['tokens_per_second']:6} tokens/s, {row['num_requests']} requests, "
            f"{row['num_without_token']} without a token"
        )
    print("of each round:", found["results_of_rounds"])
    print(found["results"])


if __name__ == "__main__":
    main()
