"""Groups of requests, in turn or together, and their figures side by side."""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import random
import statistics
import time
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

from ....core.errors import InvalidRequestError
from ....http.server import loop_factory
from ..bench_options import Result
from ..latency.latency_report import draw_latencies
from ..machine import describe_machine
from ..prompt_files import Prompt, read_prompts
from ..prompts import DEMO_PROMPTS
from ..request_figures import RequestRecord, Round, acceptance, row_figures, sum_speculation
from .completions import CHAT, COMPLETIONS, Server
from .serve_command import Group

_BUSY_SHARE = 0.7
"""Share of a core that the client may use; above it its own delays are part of the latencies."""
_COLUMNS = ("group", "failed", "tokens/s", "over first", "TTFT p50, p99 ms", "ITL p50, p99 ms", "accepted", "same text")


class _Call(NamedTuple):
    path: str
    body: dict[str, Any]


def measure_groups(options: argparse.Namespace, groups: Sequence[Group]) -> Result:
    """Measure the groups in an event loop: uvloop's, if installed.

    Raises:
        InvalidRequestError: a server cannot be measured.
    """
    prompts = read_prompts(options.prompts, "prompts") if options.prompts else _demo_prompts()
    calls = [_calls(group, prompts, options) for group in groups]
    used, began = time.process_time(), time.perf_counter()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        rounds = runner.run(_measure(groups, calls, options))
    share = (time.process_time() - used) / (time.perf_counter() - began)
    rows = [_row(group, mine, rounds[0]) for group, mine in zip(groups, rounds, strict=True)]
    report = {
        "benchmark": "serve",
        "labels": ["THE CLIENT WAS BUSY: its own delays are part of the latencies"] if share > _BUSY_SHARE else [],
        "machine": describe_machine(),
        "together": options.together,
        "client_cpu_share": round(share, 3),
        "rows": rows,
    }
    records = {
        group.name: [record for each in mine for record in each.requests]
        for group, mine in zip(groups, rounds, strict=True)
    }
    title = f"serve, {'together' if options.together else 'in turn'}: {', '.join(records)}"
    status = 0 if all(row["requests"] for row in rows) else 1
    return Result(report, format_table(report), lambda file: draw_latencies(report, title, records, file), status)


def _demo_prompts() -> list[Prompt]:
    return [Prompt([{"role": "user", "content": text}], None) for texts in DEMO_PROMPTS.values() for text in texts]


def _calls(group: Group, prompts: Sequence[Prompt], options: argparse.Namespace) -> list[_Call]:
    """Requests of a group: messages are chats, texts and token ids are completions."""
    fields = {"model": Server(group.base_url, group.api_key).first_model(), "max_tokens": options.output_len}
    fields |= {"temperature": options.temperature, "stream": True, "return_metrics": True}
    fields |= {"stream_options": {"include_usage": True}} | ({"ignore_eos": True} if options.ignore_eos else {})
    calls = []
    for content, adapter in islice(cycle(prompts), group.num_prompts):
        is_chat = isinstance(content, list) and isinstance(content[0], dict)
        path, name = (CHAT, "messages") if is_chat else (COMPLETIONS, "prompt")
        body = fields | options.extra_body | group.fields | ({"model": adapter} if adapter else {})
        calls.append(_Call(path, body | {name: content}))
    return calls


async def _measure(
    groups: Sequence[Group], calls: Sequence[Sequence[_Call]], options: argparse.Namespace
) -> list[list[Round]]:
    """Rounds of each group, after a request of each to warm up."""
    for group, (first, *_) in zip(groups, calls, strict=True):
        record = RequestRecord(0)
        await Server(group.base_url, group.api_key).stream(*first, record)
        if record.error is not None:
            raise InvalidRequestError(f"{group.name}: the first request failed: {record.error}")
    rounds = []
    gc.collect()
    gc.disable()  # a collection would delay all requests
    try:
        for number in range(options.rounds):
            sending = [_send(*pair, options.seed + number) for pair in zip(groups, calls, strict=True)]
            rounds.append(await asyncio.gather(*sending) if options.together else [await each for each in sending])
    finally:
        gc.enable()
    return [list(mine) for mine in zip(*rounds, strict=True)]


async def _send(group: Group, calls: Sequence[_Call], seed: int) -> Round:
    """Send the requests of a group at their times. Latencies count from when a request is sent."""
    generator, server = random.Random(seed), Server(group.base_url, group.api_key)
    seats = asyncio.Semaphore(group.max_concurrency or len(calls))
    records = [RequestRecord(index, adapter=call.body["model"]) for index, call in enumerate(calls)]

    async def one(call: _Call, record: RequestRecord) -> None:
        async with seats:
            await server.stream(*call, record)

    due = started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for call, record in zip(calls, records, strict=True):
            if not math.isinf(group.request_rate):
                due += generator.expovariate(group.request_rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.create_task(one(call, record))
    return Round(max(record.ended for record in records) - started, records)


def _row(group: Group, rounds: Sequence[Round], first: Sequence[Round]) -> dict[str, Any]:
    """Figures of a group, with its ratio to the first one: the median of the rounds' ratios of output tokens/s."""
    good = [Round(each.seconds, [record for record in each.requests if record.error is None]) for each in rounds]
    errors = [record.error for each in rounds for record in each.requests if record.error is not None]
    ratios = [mine.speed / other.speed for mine, other in zip(good, first, strict=True) if other.output_tokens]
    texts = [
        one.text == other.text
        for mine, theirs in zip(rounds, first, strict=True)
        for one, other in zip(mine.requests, theirs.requests, strict=False)
    ]
    return {
        "group": group.name,
        "settings": group.as_dict(),
        "failed": len(errors),
        "errors": list(dict.fromkeys(errors))[:5],
        **row_figures(good),
        "ratio_to_first": round(statistics.median(ratios), 4) if ratios else None,
        "same_text_as_first": {"same": sum(texts), "of": len(texts)},
        **acceptance(sum_speculation([record for each in good for record in each.requests])),
    }


def format_table(report: dict[str, Any]) -> str:
    """Table with a line for each group, and the errors."""
    lines: list[tuple[str, ...]] = [_COLUMNS]
    for row in report["rows"]:
        times = [f"{ms['median']:.1f}, {ms['p99']:.1f}" if ms else "" for ms in (row["ttft_ms"], row["itl_ms"])]
        ratio = "" if row["ratio_to_first"] is None else f"{row['ratio_to_first']:.2f}"
        accepted = f"{row['acceptance_length']:.2f}" if "acceptance_length" in row else ""
        same = "{same}/{of}".format(**row["same_text_as_first"])
        lines.append(
            (row["group"], str(row["failed"]), f"{row['output_throughput']:.1f}", ratio, *times, accepted, same)
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    failures = [f"{row['group']}: {error}" for row in report["rows"] for error in row["errors"]]
    return "\n".join([*report["labels"], *table, *failures])
